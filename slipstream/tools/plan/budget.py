"""Computes how long a number of tokens takes, and which share of the devices' peak is used."""

from __future__ import annotations

from ...observe.devices import DeviceKind
from .search import Option, Search

TOKENS_PER_PARAMETER = 20
"""Default budget in tokens per parameter (arXiv:2203.15556). With experts, only the parameters that a token uses
count."""


def budget_sentence(search: Search, device: DeviceKind, option: Option, tokens: float | None) -> str:
    """Returns a sentence about MFU and training time. The MFU is the model FLOP/s as a share of the peak of all
    devices, without recomputation. tokens: number of tokens for a run without delay. None means 20 per parameter."""
    peak = search.cluster.num_devices * device.flops_in(search.memory_model.dtypes.compute)
    utilisation = option.tokens_per_second * search.model.flops_per_token() / peak
    budget = float(TOKENS_PER_PARAMETER * search.model.num_active_parameters()) if tokens is None else tokens
    needed = budget * option.token_price
    reasons = [f"{TOKENS_PER_PARAMETER} to a parameter"] if tokens is None else []
    reasons += [f"{needed:.3g} with the delay's price"] if option.token_price > 1 else []
    said = f" ({'; '.join(reasons)})" if reasons else ""
    return (
        f"{option.schedule}: {utilisation:.0%} MFU; {budget:.3g} tokens"
        f"{said} take {duration(needed / option.tokens_per_second)}."
    )


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.1f} minutes"
    return f"{seconds / 3600:.1f} hours" if seconds < 2 * 86400 else f"{seconds / 86400:,.1f} days"
