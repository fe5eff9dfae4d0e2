"""Level 2: laws of an earlier tuning, and continued training by equivalent tokens (arXiv:2606.05610)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from ...config.files import read_plain_file
from ...config.schema import Config
from ...errors import ConfigError, UsageError, in_one_line
from ...model.spec import ModelSpec
from ...train.build import build_components
from ..study.delayed import DelayedRun
from .advice import Size, is_delayed
from .fit import Fit
from .trials import trial_of
from .trunks import Record


def read_laws(path: Path, config: Config) -> tuple[Fit, list[Record]]:
    """Reads the fit of a tune.json and the trunks that it was made from."""
    try:
        tree = json.loads(read_plain_file(path))
        fit = None if tree["fit"] is None else Fit.from_tree(tree["fit"])
        records = [Record(**row) for row in tree["trunks"]]
        optimizer = tree["target"]["optimizer"]
        if fit is not None:
            fit.loss_band(fit.centre.parameters, fit.centre.tokens, fit.centre.batch, 1e-3, True)  # uses all of it
    except OSError as error:
        raise UsageError(f"laws = {str(path)!r} cannot be read ({error.strerror}): name a tune.json") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UsageError(
            f"laws = {str(path)!r} is no whole tune.json ({in_one_line(error)}): name one of slipstream tune"
        ) from error
    if fit is None:
        raise UsageError(f"laws = {str(path)!r} is of a tuning without --budget and has none: make one with --budget")
    if optimizer != config.optimizer.name:
        raise UsageError(
            f"laws = {str(path)!r} is of optimizer.name = {optimizer!r}, not of {config.optimizer.name!r}: make one "
            "with --budget"
        )
    if is_delayed(config) and not any(record.is_late for record in records):
        raise UsageError(
            f"laws = {str(path)!r} is of synchronous runs, and pipeline.schedule = {config.pipeline.schedule!r} delays "
            "gradients: make one with --budget"
        )
    return fit, records


def check_reach(records: Sequence[Record], size: Size, tokens: float, reach: float) -> None:
    """Raises a UsageError if the target is too far from the largest proxy."""
    parameters = max(record.parameters for record in records)
    longest = max(record.batch * max(record.steps) for record in records)
    far = max(size.parameters / parameters, tokens / longest)
    if far > reach:
        raise UsageError(
            f"reach = {reach:g} is less than the {far:.3g} times by which the target exceeds the largest proxy, of "
            f"{parameters:.3g} parameters and {longest:.3g} tokens: use a smaller target, laws of larger proxies, "
            "or a larger --reach"
        )


def tokens_before(fit: Fit, config: Config, model: ModelSpec, tokens: float, say: Callable[[str], None]) -> float:
    """Evaluates the weights of model.initial, and returns after how many tokens from scratch the law expects their loss
    at their size."""
    trial = trial_of(config, model, tokens)
    cell = trial.cell(1e-3, trial.batch, False)
    run = DelayedRun(cell, build_components(cell.config), torch.device(cell.config.train.device))
    loss = run.evaluate().item()
    lengths = np.exp(np.linspace(np.log(fit.centre.tokens / 100), np.log(fit.centre.tokens * 1e6), 4001))
    losses = fit.floor(trial.size.parameters, lengths)
    if not losses[-1] < loss < losses[0]:
        raise ConfigError(
            f"model.initial = {config.model.initial!r} has a held-out loss of {loss:.4f}, and the law goes from "
            f"{losses[0]:.4f} to {losses[-1]:.4f} at its size: the law is of another text or family, so fit it on this "
            "one with --budget"
        )
    before = float(np.exp(np.interp(-loss, -losses, np.log(lengths))))
    say(f"{config.model.initial}: held-out loss {loss:.4f}, as after {before:.3g} tokens from scratch")
    return before
