"""Splits the bubble of an option into its causes: the schedule itself, unequal stages, links, and sums over
replicas."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import fmean

from .predict import StageCosts, predict
from .search import Option, Search

WORTH_A_WORD = 0.005
EVEN = 0.03
"""Relative excess of the slowest stage over the mean, below which a cut counts as even."""


def idle_causes(search: Search, option: Option) -> dict[str, float]:
    """Returns the share of a step for each cause. The shares add up to the bubble."""
    costs, m = search.stage_costs(option.division), option.division.num_microbatches
    lengths = (costs.forward, costs.backward_input, costs.backward_weight, costs.update)
    forward, backward_input, backward_weight, update = ((fmean(by_stage),) * costs.num_stages for by_stage in lengths)
    even = StageCosts(forward, backward_input, backward_weight, update)
    at_once = replace(costs, latency=0.0)
    times = [predict(option.schedule, each, m).step_time for each in (even, at_once, costs)]
    points = [float(fmean(costs.work(m))), *times, option.step_time]
    names = ("filling and draining", "stages of unequal work", "links", "sums over replicas")
    shares = ((later - earlier) / option.step_time for earlier, later in pairwise(points))
    return dict(zip(names, shares, strict=True))


def say_causes(search: Search, option: Option, causes: dict[str, float]) -> str:
    parts = [f"{share:.1%} {name}" for name, share in causes.items() if share >= WORTH_A_WORD]
    said = f"Of a step, devices idle for {' and '.join([', '.join(parts[:-1]), parts[-1]] if parts[1:] else parts)}"
    num_stages, num_layers = option.division.num_stages, len(search.costs.layers)
    if search.unevenness(num_stages) < EVEN:
        return f"{said}."
    near = [count for count in search.stage_counts() if count <= 2 * num_stages <= 4 * count]
    better = [str(count) for count in near if search.unevenness(count) < EVEN]
    advice = f": {' or '.join(better)} would be even" if better else ""
    return f"{said}. {num_layers} layers do not divide well among {num_stages} stages{advice}."
