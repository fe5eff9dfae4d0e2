"""What is not as it was when a run goes on: everything is said, for nothing of it shows in the numbers by itself.

for line in changes(found, config, parts): ...
keep_configuration(folder, found.step)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from .checkpoint import Checkpoint
from .config import Config, ConfigError, build
from .data import Tokens
from .defaults import peak_rates_of
from .parts import Parts, learning_rate, peak_rates

UNTOLD = ("checkpoint.resume", "run.name", "run.folder", "run.overwrite")
"""Of how the run is started, and not of the run."""
SAMPLE_TOKENS = 2**16


def corpus_facts(tokens: Tokens) -> dict[str, Any]:
    """By which a corpus is known again: how long it is, and how it begins and ends."""
    count = len(tokens)
    ends = tokens.read(0, min(SAMPLE_TOKENS, count)), tokens.read(max(0, count - SAMPLE_TOKENS), count)
    return {"tokens": count, "sample": hashlib.sha256(np.concatenate(ends).tobytes()).hexdigest()[:16]}


def changes(found: Checkpoint, config: Config, parts: Parts) -> Iterator[str]:
    """A line for everything that differs from what the checkpoint was made with."""
    facts: Mapping[str, Any] = next(iter(found.facts.values()))
    tree = facts.get("config")
    then, now = _flat(tree if isinstance(tree, dict) else {}), _flat(asdict(config))
    for name in sorted(then.keys() & now.keys()):
        if then[name] != now[name] and name not in UNTOLD:
            yield f"{name} was {then[name]!r} until step {found.step}, and is {now[name]!r} from here on"
    corpus = facts.get("corpus")
    if isinstance(corpus, dict) and corpus != (current := corpus_facts(parts.batches.tokens)):
        yield (
            f"the corpus is another than until step {found.step}: {corpus.get('tokens')} tokens then, "
            f"{current['tokens']} now"
        )
    yield from _rate_changes(found, tree, config)


def _rate_changes(found: Checkpoint, tree: Any, config: Config) -> Iterator[str]:
    """Of the next update, where the peak itself has not been changed."""
    try:
        before = build(Config, tree, "")
        then, now = learning_rate(before)(found.step), learning_rate(config)(found.step)
    except (ConfigError, ValueError, TypeError):  # a configuration of another version of the program
        return
    if peak_rates(before) == peak_rates(config) and abs(then - now) > 1e-6 * now:
        peak, _ = peak_rates_of(config.optimizer)
        steps = before.optimizer.horizon_steps or before.train.steps
        yield (
            f"the learning rate is {peak * now:.4g} from here on, and would have been {peak * then:.4g} as it was laid "
            f"out: set optimizer.horizon_steps = {steps} to keep to that"
        )


def keep_configuration(folder: Path, step: int) -> None:
    """Puts the configuration of the steps so far aside."""
    with suppress(FileNotFoundError):
        (folder / "config.toml").replace(folder / f"config.until-step-{step}.toml")


def _flat(tree: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Every field by its section's name and its own, its value as JSON would have it."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        is_section = isinstance(value, dict) and not before
        plain = list(value) if isinstance(value, tuple) else value
        flat |= _flat(value, f"{name}.") if is_section else {f"{before}{name}": plain}
    return flat
