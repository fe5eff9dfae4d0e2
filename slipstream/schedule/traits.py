"""Defines `TRAITS`: the properties of every schedule. All other code reads them here and never compares names.

A new schedule needs a generator (generators.py), an entry here, and the text of its first steps in its test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from . import generators
from .action import Action


@dataclass(frozen=True)
class Traits:
    generate: Callable[[generators.Place], Iterator[Action]]
    flushes: bool = False
    """Whether the pipeline is empty when the update of a step is made."""
    steps_alone: bool = False
    """Whether every stage makes its update as soon as its own gradient is complete. The stages then never have the same
    number of updates at the same time. An update needs no sum over stages, unless something else requires one. Weights
    cannot be tied across stages, and the layout cannot change during a run."""
    has_slack: bool = False
    """Whether there is the time of a whole batch to make an update in the background. This needs more microbatches than
    are in flight."""
    drifts: bool = False
    """Whether there is only one weight version, which is overwritten while microbatches are in flight. A backward may
    then read newer weights than its forward did. This excludes error feedback, recomputation, torch.compile and
    resuming."""
    depths: tuple[str, ...] = ("minimum",)
    delay: Callable[[int, int], int] = lambda num_stages, stage: 0
    """Function (num_stages, stage) -> number of updates between the weights that a batch runs on and the weights that
    its gradient is applied to."""
    ahead: Callable[[int, int, int], int] = lambda num_stages, num_microbatches, warmup: 0
    """Function (num_stages, num_microbatches, warmup) -> largest number of microbatches in flight on the first stage,
    minus 1. It is ignored if it is less than num_stages - 1."""


TRAITS = {
    "gpipe": Traits(
        generators.gpipe,
        flushes=True,
        ahead=lambda num_stages, num_microbatches, warmup: num_microbatches - 1,
    ),
    "one_f_one_b": Traits(generators.one_f_one_b, flushes=True),
    "two_bw": Traits(
        generators.two_bw,
        has_slack=True,
        depths=("minimum", "double"),
        delay=lambda num_stages, stage: 1,
        ahead=lambda num_stages, num_microbatches, warmup: warmup,
    ),
    "pipedream": Traits(
        generators.pipedream,
        steps_alone=True,
        delay=lambda num_stages, stage: num_stages - 1 - stage,
        ahead=lambda num_stages, num_microbatches, warmup: (num_stages - 1) * num_microbatches,
    ),
    "paci": Traits(generators.paci, steps_alone=True, drifts=True),
}
SCHEDULES = tuple(TRAITS)
DEPTHS = tuple(dict.fromkeys(depth for traits in TRAITS.values() for depth in traits.depths))


def waits_for_sum(name: str, clips: bool = False, skips_non_finite: bool = False) -> bool:
    """Returns whether an update waits for a sum over all stages.

    Stages that update independently need the sum only for a norm to clip by, or for the check for inf and nan. All
    other schedules always wait: two_bw has slack for the sum, and a flushing schedule waits for all stages anyway.
    """
    return not TRAITS[name].steps_alone or clips or skips_non_finite
