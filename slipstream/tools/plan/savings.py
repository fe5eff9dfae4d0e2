"""Ways to need less memory, from what costs nothing to what costs time: a plan tries them in this order.

    s    replicas share masters and optimizer state (optimizer.sharded), which also shares out the update
    c    the loss in chunks of tokens: never all logits at once (train.loss_chunk_tokens)
    r2   every second block is computed again in the backward (train.recompute_every), r1 every one

What the configuration asks for already is kept, and not undone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...config.schema import Config
from ...model.spec import ModelSpec

CHUNK_TOKENS = 1024
MANY_ENTRIES = 4096
"""Of a vocabulary whose logits are worth a chunk."""


def ever_smaller(config: Config, model: ModelSpec, num_devices: int, is_profiled: bool) -> Iterator[Config]:
    """The configuration, then with one more way each. A profile is of the loss that it was measured with."""
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
    """Of the table."""
    found = ["s"] if config.optimizer.sharded and num_replicas > 1 else []
    found += ["c"] if config.train.loss_chunk_tokens else []
    found += [f"r{config.train.recompute_every}"] if config.train.recompute_every else []
    return " ".join(found)


def words(config: Config, asked: Config, num_replicas: int) -> list[str]:
    """What a configuration has that was not asked for."""
    found = []
    if config.optimizer.sharded and not asked.optimizer.sharded and num_replicas > 1:
        found.append("replicas that share the optimizer")
    if config.train.loss_chunk_tokens != asked.train.loss_chunk_tokens:
        found.append("the loss in chunks")
    if config.train.recompute_every != asked.train.recompute_every:
        every = {1: "all blocks", 2: "every second block"}[config.train.recompute_every]
        found.append(f"{every} computed again in the backward")
    return found
