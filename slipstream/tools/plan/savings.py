"""Ways to save memory, in the order in which a plan tries them: from those that cost nothing to those that cost time.

    s    replicas share masters and optimizer state (optimizer.sharded), which also divides the work of the update
    c    the loss is computed in chunks of tokens, never with all logits at once (train.loss_chunk_tokens)
    r2   every second block is recomputed in the backward (train.recompute_every); r1: every block

Savings that the configuration already has are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...config.schema import Config
from ...model.spec import ModelSpec

CHUNK_TOKENS = 1024
MANY_ENTRIES = 4096
"""Size of the vocabulary from which its logits are computed in chunks."""


def ever_smaller(config: Config, model: ModelSpec, num_devices: int, is_profiled: bool) -> Iterator[Config]:
    """Yields the configuration, and then configurations with one more saving each. With a profile the loss is not
    changed, because the profile was measured with it."""
    yield config
    if num_devices > 1 and not config.optimizer.sharded:
        config = replace(config, optimizer=replace(config.optimizer, sharded=True))
        yield config
    if model.vocab_size >= MANY_ENTRIES and not config.train.loss_chunk_tokens and not is_profiled:
        config = replace(config, train=replace(config.train, loss_chunk_tokens=CHUNK_TOKENS))
        yield config
    for every in (2, 1):
        if not config.train.recompute_every or config.train.recompute_every > every:
            config = replace(config, train=replace(config.train, recompute_every=every))
            yield config


def marks(config: Config, num_replicas: int) -> str:
    """Returns the marks of the savings in the table."""
    found = ["s"] if config.optimizer.sharded and num_replicas > 1 else []
    found += ["c"] if config.train.loss_chunk_tokens else []
    found += [f"r{config.train.recompute_every}"] if config.train.recompute_every else []
    return " ".join(found)


def words(config: Config, asked: Config, num_replicas: int) -> list[str]:
    """Returns texts for the savings of a configuration that the user did not ask for."""
    found = []
    if config.optimizer.sharded and not asked.optimizer.sharded and num_replicas > 1:
        found.append("replicas that share the optimizer")
    if config.train.loss_chunk_tokens != asked.train.loss_chunk_tokens:
        found.append("the loss in chunks")
    if config.train.recompute_every != asked.train.recompute_every:
        every = {1: "all blocks", 2: "every second block"}[config.train.recompute_every]
        found.append(f"{every} computed again in the backward")
    return found
