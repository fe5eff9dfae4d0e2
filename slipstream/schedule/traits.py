"""`TRAITS`: what every schedule promises and needs. Everyone who has to know reads it here; no part of the
engine compares names.

A new schedule is a generator (generators.py), an entry here, and the text of its first steps in its test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from . import generators
from .action import Action


@dataclass(frozen=True)
class Place:
    """Whose actions are asked for, and what of the schedule decides them."""

    stage: int
    num_stages: int
    num_microbatches: int
    warmup: int
    """two_bw: forwards in flight ahead of the first backward, by its depth."""
    first_step: int
    num_steps: int | None
    """None: for ever."""
    oldest: int
    """The first weight version that the schedule itself writes; those before belong to a synchronous start."""

    @property
    def usual(self) -> tuple[int, int, int, int | None, int]:
        """What every generator wants."""
        return self.stage, self.num_stages, self.num_microbatches, self.num_steps, self.first_step


@dataclass(frozen=True)
class Traits:
    generate: Callable[[Place], Iterator[Action]]
    flushes: bool = False
    """The pipeline is empty when a step's update is made."""
    steps_alone: bool = False
    """Every stage steps when its own gradient is complete, so the stages never hold the same number of updates at once.
    An update then needs no sum over stages, unless something else asks for one; weights cannot be tied across stages,
    and the layout cannot change during a run."""
    has_slack: bool = False
    """An update has a whole batch's time to be made in the background. That takes more microbatches than are in
    flight."""
    drifts: bool = False
    """The only weight version is overwritten while microbatches are in flight: a backward may read newer weights than
    its forward did. Rules out error feedback, recomputation, torch.compile and resuming."""
    depths: tuple[str, ...] = ("minimum",)
    delay: Callable[[int, int], int] = lambda num_stages, stage: 0
    """How many updates the weights a batch runs on lie behind those its gradient is applied to."""
    ahead: Callable[[int, int, int], int] = lambda num_stages, num_microbatches, warmup: 0
    """Forwards of the first stage ahead of its first backward, where that is more than the other stages need."""


TRAITS = {
    "gpipe": Traits(
        lambda place: generators.gpipe(*place.usual),
        flushes=True,
        ahead=lambda num_stages, num_microbatches, warmup: num_microbatches - 1,
    ),
    "one_f_one_b": Traits(lambda place: generators.one_f_one_b(*place.usual), flushes=True),
    "two_bw": Traits(
        lambda place: generators.two_bw(*place.usual, oldest=place.oldest, warmup=place.warmup),
        has_slack=True,
        depths=("minimum", "double"),
        delay=lambda num_stages, stage: 1,
        ahead=lambda num_stages, num_microbatches, warmup: warmup,
    ),
    "pipedream": Traits(
        lambda place: generators.pipedream(*place.usual, oldest=place.oldest),
        steps_alone=True,
        delay=lambda num_stages, stage: num_stages - 1 - stage,
        ahead=lambda num_stages, num_microbatches, warmup: (num_stages - 1) * num_microbatches,
    ),
    "paci": Traits(lambda place: generators.paci(*place.usual), steps_alone=True, drifts=True),
}
SCHEDULES = tuple(TRAITS)
DEPTHS = tuple(dict.fromkeys(depth for traits in TRAITS.values() for depth in traits.depths))


def waits_for_sum(name: str, clips: bool = False, skips_non_finite: bool = False) -> bool:
    """Whether an update waits for a sum over all stages. Stages that step alone do so only for a norm to clip by, or a
    verdict on inf and nan; two_bw has slack for it, and a flushing schedule waits anyway."""
    return not TRAITS[name].steps_alone or clips or skips_non_finite
