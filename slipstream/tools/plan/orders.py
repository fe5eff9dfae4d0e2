"""Orders of flushing schedules that are planned with and not run: what each stage does in one step, and when.

    order = make_order("zero_bubble_v", num_stages=4, num_microbatches=8)
    ends = play(order, forward=[1.0] * 4, backward_input=[1.0] * 4, backward_weight=[1.0] * 4)   # by stage

`slipstream.schedule` has the schedules that the executor can play. Those here cut a stage into chunks or a backward in
two, and a plan sets them beside the others. A plan may also ask for hundreds of stages, so an order is an array of
integers and all stages are played at once; gpipe and one_f_one_b are here for that reason alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...schedule import ScheduleError

Integers = NDArray[np.integer]
Seconds = NDArray[np.float64]

ROUNDS_BETWEEN_LOOKS = 16
"""How often `play` looks whether it is done: a few rounds too many cost less than a look in each."""


class Kind(IntEnum):
    FORWARD = 0
    BACKWARD = 1
    """With respect to the inputs, and in an order that does not split its backwards to the weights as well."""
    WEIGHT = 2


class Operation(NamedTuple):
    """`F5.1` is the forward of microbatch 5 through chunk 1 of a stage; B and W the two halves of its backward, BW both
    in one."""

    kind: str
    microbatch: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}.{self.chunk}"


@dataclass(frozen=True)
class Order:
    """What every stage does in one step, in which order.

    All stages do equally many operations. An operation is one integer, `row * num_microbatches + microbatch`, where a
    row is a kind of operation on one chunk: `kind * num_chunks + chunk`.
    """

    num_stages: int
    num_microbatches: int
    num_chunks: int
    is_split: bool
    """A backward is two operations, B and W; otherwise one, BW."""
    is_v_shaped: bool
    """The second chunks are passed through from the last stage to the first; otherwise again from the first on."""
    codes: Integers
    """One line per stage."""

    @cached_property
    def num_rows(self) -> int:
        return self.num_chunks * (3 if self.is_split else 2)

    def operations(self, stage: int) -> list[Operation]:
        rows, microbatches = np.divmod(self.codes[stage], self.num_microbatches)
        kinds, chunks = np.divmod(rows, self.num_chunks)
        names = ["F", "B", "W"] if self.is_split else ["F", "BW"]
        return [
            Operation(names[kind], microbatch, chunk)
            for kind, microbatch, chunk in zip(kinds.tolist(), microbatches.tolist(), chunks.tolist(), strict=True)
        ]

    def position(self, stage: int, chunk: int) -> int:
        """The place of a chunk on a microbatch's way through the model."""
        if self.is_v_shaped and chunk == 1:
            return 2 * self.num_stages - 1 - stage
        return chunk * self.num_stages + stage

    def at(self, position: int) -> tuple[int, int]:
        """The stage and chunk at a place on the way: the inverse of `position`."""
        chunk, stage = divmod(position, self.num_stages)
        return (self.num_stages - 1 - stage if self.is_v_shaped and chunk == 1 else stage), chunk

    def requires(self, kind: Kind, stage: int, chunk: int) -> tuple[Kind, int, int] | None:
        """The one rule of what an operation waits for: kind, stage and chunk, always of the same microbatch.

        That a chunk's forward comes before its backward on the same stage is a matter of the stage's own order.
        """
        position = self.position(stage, chunk)
        if kind is Kind.FORWARD:
            return None if position == 0 else (Kind.FORWARD, *self.at(position - 1))
        if kind is Kind.WEIGHT:
            return Kind.BACKWARD, stage, chunk
        if position == self.num_stages * self.num_chunks - 1:
            return Kind.FORWARD, stage, chunk
        return Kind.BACKWARD, *self.at(position + 1)

    @cached_property
    def in_flight(self) -> tuple[float, ...]:
        """Most microbatches that each stage holds activations of, in whole stages: a chunk of two counts a half.

        They are held from the forward to the end of the backward: where it is split, to the gradient of the weights.
        """
        kinds = self.codes // (self.num_microbatches * self.num_chunks)
        frees = Kind.WEIGHT if self.is_split else Kind.BACKWARD
        change = (kinds == Kind.FORWARD).astype(np.int8) - (kinds == frees).astype(np.int8)
        peaks = np.cumsum(change, axis=1, dtype=np.int32).max(axis=1)
        return tuple(float(peak) / self.num_chunks for peak in peaks)


def make_order(name: str, num_stages: int, num_microbatches: int) -> Order:
    """The order of a flushing schedule.

    Each schedule is written as a rule that gives every operation of a stage a slot; a stage works through its slots
    from the lowest to the highest. Slots are relative to each other and to their stage alone.
    """
    slots, num_chunks, is_split = {
        "gpipe": (_gpipe_slots, 1, False),
        "one_f_one_b": (_one_f_one_b_slots, 1, False),
        "interleaved_1f1b": (_interleaved_slots, 2, False),
        "zero_bubble_h1": (_zero_bubble_h1_slots, 1, True),
        "zero_bubble_v": (_zero_bubble_v_slots, 2, True),
    }[name]
    num_operations = num_chunks * (3 if is_split else 2) * num_microbatches
    codes = np.empty((num_stages, num_operations), dtype=np.int32)
    for stage in range(num_stages):
        # Row by row as Order numbers them, so that an operation's place here is its code.
        slot = np.concatenate(slots(stage, num_stages, num_microbatches))
        first = slot.min()
        by_slot = np.full(slot.max() - first + 1, -1, dtype=np.int32)
        by_slot[slot - first] = np.arange(num_operations)
        codes[stage] = by_slot[by_slot >= 0]
    return Order(num_stages, num_microbatches, num_chunks, is_split, name == "zero_bubble_v", codes)


def _gpipe_slots(stage: int, num_stages: int, num_microbatches: int) -> list[Integers]:
    """All forwards, then all backwards."""
    microbatch = np.arange(num_microbatches)
    return [microbatch, num_microbatches + microbatch]


def _one_f_one_b_slots(stage: int, num_stages: int, num_microbatches: int) -> list[Integers]:
    """A backward after every forward but the first, of which a stage is as many ahead as there are stages behind it."""
    microbatch = np.arange(num_microbatches)
    warmup = num_stages - 1 - stage
    return [2 * (microbatch - warmup), 2 * microbatch + 1]


def _interleaved_slots(stage: int, num_stages: int, num_microbatches: int) -> list[Integers]:
    """Interleaved 1F1B of Megatron-LM (arXiv:2104.04473), two chunks to a stage.

    P microbatches pass through one chunk, the same P through the other, and so on; backwards take the chunks in
    reverse. One forward, one backward after a warm-up that is P forwards of the first chunk and two for every stage
    behind this one.
    """
    microbatch = np.arange(num_microbatches)
    rank = microbatch // num_stages * 2 * num_stages + microbatch % num_stages
    warmup = num_stages + 2 * (num_stages - 1 - stage)
    earlier, later = rank, rank + num_stages
    return [2 * (earlier - warmup), 2 * (later - warmup), 2 * later + 1, 2 * earlier + 1]


def _zero_bubble_h1_slots(stage: int, num_stages: int, num_microbatches: int) -> list[Integers]:
    """ZB-H1 (arXiv:2401.10241): 1F1B, where stage s is s weight gradients late.

    The last stages hold fewer activations in 1F1B. They may keep weight gradients back until they hold as much as the
    first stage does; that lets the last backwards leave sooner, and what was kept back fills the end of the step.
    """
    microbatch = np.arange(num_microbatches)
    warmup = num_stages - 1 - stage
    return [3 * (microbatch - warmup), 3 * microbatch + 1, 3 * (microbatch + stage) + 2]


def _zero_bubble_v_slots(stage: int, num_stages: int, num_microbatches: int) -> list[Integers]:
    """ZB-V (arXiv:2401.10241, section 6): the order for F, B and W of equal length, which torch plays too.

    It stays the same where they are not equal; the paper also searches for an order to fit given costs, and finds
    better ones there. In a step of at least 2P - 1 microbatches the two chunks take turns, F B W of one and F B W of
    the other: a round of six slots. A shorter step is a longer one with microbatches left out.
    """
    microbatch = np.arange(num_microbatches)
    num_full = max(num_microbatches, 2 * num_stages - 1)
    behind = num_stages - stage  # this stage and those after it

    # Warm-up: forwards of the first chunk alone until one comes back through the second, then both in turns, ...
    num_alone, num_before = 2 * behind - 1, 2 * num_stages - 1 - stage
    forward_0 = np.select(
        [microbatch < num_alone, microbatch < num_before],
        [microbatch - num_alone - 6 * num_stages, 6 * (microbatch - num_alone - num_stages) + 4],
        6 * (microbatch - num_before),
    )
    # ... then the second chunk alone, until the first one's backwards begin at slot 0.
    forward_1 = 6 * (microbatch - num_stages) + 3
    backward_1 = 6 * (microbatch - behind) + 4
    backward_0 = 6 * microbatch + 1

    # From `end` on there are no forwards left: backwards hurry to the stages that wait for them, W fills what is left.
    end = 6 * (num_full - num_stages)
    weight_0, weight_1 = backward_0 + 1, backward_1 + 1
    left_0, left_1 = microbatch - (num_full - num_stages), microbatch - (num_full - stage)
    backward_0 = np.where(left_0 < 0, backward_0, end + 2 * left_0)
    backward_1 = np.where(left_1 < 0, backward_1, end + 2 * left_1 + 1)
    weight_0 = np.where(left_0 < 0, weight_0, end + 2 * (left_0 + stage) + 1)
    weight_1 = np.where(left_1 < 0, weight_1, end + 2 * num_stages + left_1)
    weight_0 = np.where(left_1 < 0, weight_0, end + 2 * num_stages + stage + left_1)
    return [forward_0, forward_1, backward_0, backward_1, weight_0, weight_1]


def play(
    order: Order,
    forward: Sequence[float],
    backward_input: Sequence[float],
    backward_weight: Sequence[float],
    latency: float = 0.0,
    free_from: Sequence[float] | Seconds | None = None,
) -> Seconds:
    """When every stage has done its part, if stage s is free from `free_from[s]` on (None: all from 0).

    Each stage plays in order; an operation begins when its stage is free and what it requires has arrived, which takes
    `latency` from another stage. What it requires from its own stage has ended, because the order puts it first.

    In every round each stage whose next operation can be timed plays it, and tells its successor when that can begin.
    So the number of rounds is the longest chain of operations, which grows with the number of microbatches and hardly
    with that of stages. A W needs no round: it waits for its own stage alone, and prolongs what comes before it.
    """
    codes, num_weights = _without_weights(order)
    num_stages, num_played = codes.shape
    width = num_played + 2  # a stage's operations, then one that never begins, then a place for what nobody waits for
    lengths = (forward, backward_input, backward_weight)
    f, b, w = (np.asarray(length, dtype=np.float64)[:, None] / order.num_chunks for length in lengths)
    is_forward = codes < order.num_chunks * order.num_microbatches
    costs, pauses = np.zeros((num_stages, width)), np.zeros((num_stages, width))
    costs[:, :num_played] = np.where(is_forward, f, b if order.is_split else b + w)
    pauses[:, :num_played] = num_weights * w
    arrivals, successors = _messages(order, codes, width)

    cost, pause, arrival, successor = costs.ravel(), pauses.ravel(), arrivals.ravel(), successors.ravel()
    first = np.arange(num_stages) * width
    cursor = first.copy()
    free = np.zeros(num_stages) if free_from is None else np.array(free_from, dtype=np.float64)
    for round_ in count(1):
        end = np.maximum(arrival.take(cursor), free) + cost.take(cursor)
        arrival[successor.take(cursor)] = end + latency
        is_timed = end < math.inf
        if round_ % ROUNDS_BETWEEN_LOOKS == 0 and not is_timed.any():
            break
        free = np.where(is_timed, end + pause.take(cursor) if order.is_split else end, free)
        cursor += is_timed
    done = cursor - first
    if done.min() < num_played:
        stage = int(done.argmin())
        stuck = [one for one in order.operations(stage) if one.kind != "W"][int(done[stage])]
        raise ScheduleError(f"the order deadlocks: {stuck} of stage {stage} waits for ever")
    return free


def _without_weights(order: Order) -> tuple[Integers, Integers]:
    """The codes but for the Ws, and how many Ws come after each; one line per stage."""
    num_played = 2 * order.num_chunks * order.num_microbatches
    flat = order.codes.ravel()
    places = np.flatnonzero(flat < num_played)
    num_weights = np.diff(np.append(places, flat.size)) - 1
    shape = (order.num_stages, num_played)
    return flat[places].reshape(shape), num_weights.reshape(shape)


def _messages(order: Order, codes: Integers, width: int) -> tuple[Seconds, Integers]:
    """When every operation can begin, so far as that is known before any is played, and which operation on another
    stage waits for it: there is never more than one. Both are by place, and places are counted through all stages."""
    num_stages, num_played = codes.shape
    m, stages = order.num_microbatches, np.arange(num_stages, dtype=np.int32)[:, None]
    place = np.empty(codes.shape, dtype=np.int32)
    np.put_along_axis(place, codes, np.arange(num_played, dtype=np.int32)[None, :], axis=1)
    arrivals = np.full((num_stages, width), math.inf)
    nobody = stages * width + width - 1
    by_code = np.repeat(nobody, num_played, axis=1)
    for row in range(2 * order.num_chunks):
        kind, chunk = Kind(row // order.num_chunks), row % order.num_chunks
        for stage in range(num_stages):
            own = place[stage, row * m : (row + 1) * m]
            required = order.requires(kind, stage, chunk)
            if required is None or required[1] == stage:
                arrivals[stage, own] = -math.inf
            else:
                other_kind, other_stage, other_chunk = required
                other_row = other_kind * order.num_chunks + other_chunk
                by_code[other_stage, other_row * m : (other_row + 1) * m] = stage * width + own
    successors = np.repeat(nobody, width, axis=1)
    successors[:, :num_played] = np.take_along_axis(by_code, codes, axis=1)
    return arrivals, successors
