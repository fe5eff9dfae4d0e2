"""The orders of flushing schedules that a plan compares but the trainer does not run: what each stage does in a step.

    order = make_order("zero_bubble_v", num_stages=4, num_microbatches=8)
    ends = play(order, forward=[1.0] * 4, backward_input=[1.0] * 4, backward_weight=[1.0] * 4)   # by stage

`slipstream.schedule` has the schedules that the executor can run. The schedules here split a stage into chunks or a
backward into two operations, for comparison with the others. A plan may have hundreds of stages. So an order is an
array of integers, and all stages are simulated at once. Only for this reason gpipe and one_f_one_b are here too.
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
"""Number of rounds between two checks of whether `play` is done. A few additional rounds cost less than a check in
each."""


class Kind(IntEnum):
    FORWARD = 0
    BACKWARD = 1
    """Gradient with respect to the inputs. If the order does not split its backwards, also with respect to the
    weights."""
    WEIGHT = 2


class Operation(NamedTuple):
    """One operation of a stage. `F5.1` is the forward of microbatch 5 through chunk 1 of a stage. B and W are the two
    halves of its backward, and BW is the whole backward."""

    kind: str
    microbatch: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}.{self.chunk}"


@dataclass(frozen=True)
class Order:
    """The operations of every stage in one step, in order.

    All stages have the same number of operations. An operation is one integer, `row * num_microbatches + microbatch`,
    where a row is a kind of operation on one chunk: `kind * num_chunks + chunk`.
    """

    num_stages: int
    num_microbatches: int
    num_chunks: int
    is_split: bool
    """Whether a backward is two operations, B and W. Otherwise it is one, BW."""
    is_v_shaped: bool
    """Whether microbatches pass through the second chunks from the last stage to the first. Otherwise they start again
    at the first stage."""
    codes: Integers
    """Codes of the operations, with one row per stage."""

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
        """Returns the position of a chunk on the path of a microbatch through the model."""
        if self.is_v_shaped and chunk == 1:
            return 2 * self.num_stages - 1 - stage
        return chunk * self.num_stages + stage

    def at(self, position: int) -> tuple[int, int]:
        """Returns the stage and chunk at a position on the path. This is the inverse of `position`."""
        chunk, stage = divmod(position, self.num_stages)
        return (self.num_stages - 1 - stage if self.is_v_shaped and chunk == 1 else stage), chunk

    def requires(self, kind: Kind, stage: int, chunk: int) -> tuple[Kind, int, int] | None:
        """Returns what an operation waits for: kind, stage and chunk, always of the same microbatch. This is the only
        rule for dependencies between operations.

        The stage's own order ensures that the forward of a chunk comes before its backward.
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
        """Returns the maximum number of microbatches whose activations each stage holds, in units of a whole stage: one
        of two chunks counts 0.5.

        Activations are held from the forward to the end of the backward. If the backward is split, this is the gradient
        of the weights.
        """
        kinds = self.codes // (self.num_microbatches * self.num_chunks)
        frees = Kind.WEIGHT if self.is_split else Kind.BACKWARD
        change = (kinds == Kind.FORWARD).astype(np.int8) - (kinds == frees).astype(np.int8)
        peaks = np.cumsum(change, axis=1, dtype=np.int32).max(axis=1)
        return tuple(float(peak) / self.num_chunks for peak in peaks)


def make_order(name: str, num_stages: int, num_microbatches: int) -> Order:
    """Returns the order of a flushing schedule.

    Each schedule is a rule that gives every operation of a stage a slot. A stage runs its operations from the lowest
    slot to the highest. Slots have a meaning only relative to other slots of the same stage.
    """
    slots = SLOTS[name]
    num_chunks, is_split = NUM_CHUNKS.get(name, 1), name.startswith("zero_bubble")
    num_operations = num_chunks * (3 if is_split else 2) * num_microbatches
    codes = np.empty((num_stages, num_operations), dtype=np.int32)
    for stage in range(num_stages):
        # The rows have the numbering of Order, so that the index of an operation in this array is its code.
        slot = np.concatenate(slots(stage, num_stages, num_microbatches))
        first = slot.min()
        by_slot = np.full(slot.max() - first + 1, -1, dtype=np.int32)
        by_slot[slot - first] = np.arange(num_operations)
        codes[stage] = by_slot[by_slot >= 0]
    return Order(num_stages, num_microbatches, num_chunks, is_split, name == "zero_bubble_v", codes)


def _gpipe_slots(stage: int, num_stages: int, num_microbatches: int) -> list[Integers]:
    """Puts all forwards before all backwards."""
    microbatch = np.arange(num_microbatches)
    return [microbatch, num_microbatches + microbatch]


def _one_f_one_b_slots(stage: int, num_stages: int, num_microbatches: int) -> list[Integers]:
    """Alternates forwards and backwards, after a warm-up of as many forwards as there are stages behind this one."""
    microbatch = np.arange(num_microbatches)
    warmup = num_stages - 1 - stage
    return [2 * (microbatch - warmup), 2 * microbatch + 1]


def _interleaved_slots(stage: int, num_stages: int, num_microbatches: int) -> list[Integers]:
    """Returns the slots of interleaved 1F1B of Megatron-LM (arXiv:2104.04473) with two chunks per stage.

    P microbatches pass through the first chunk, then the same P through the second, and so on. Backwards take the
    chunks in reverse order. After the warm-up, forwards and backwards alternate. The warm-up has P forwards of the
    first chunk, and two more for every stage behind this one.
    """
    microbatch = np.arange(num_microbatches)
    rank = microbatch // num_stages * 2 * num_stages + microbatch % num_stages
    warmup = num_stages + 2 * (num_stages - 1 - stage)
    earlier, later = rank, rank + num_stages
    return [2 * (earlier - warmup), 2 * (later - warmup), 2 * later + 1, 2 * earlier + 1]


def _zero_bubble_h1_slots(stage: int, num_stages: int, num_microbatches: int) -> list[Integers]:
    """Returns the slots of ZB-H1 (arXiv:2401.10241): 1F1B in which stage s computes weight gradients s microbatches
    later.

    In 1F1B the last stages hold fewer activations than the first. So they may defer weight gradients until they hold as
    many as the first stage. The last backwards can then leave earlier, and the deferred weight gradients fill the end
    of the step.
    """
    microbatch = np.arange(num_microbatches)
    warmup = num_stages - 1 - stage
    return [3 * (microbatch - warmup), 3 * microbatch + 1, 3 * (microbatch + stage) + 2]


def _zero_bubble_v_slots(stage: int, num_stages: int, num_microbatches: int) -> list[Integers]:
    """Returns the slots of ZB-V (arXiv:2401.10241, section 6): the order for F, B and W of equal length, which torch
    uses too.

    The order is the same if the lengths differ. For that case the paper also searches for an order that fits the given
    costs, and finds better ones. In a step of at least 2P - 1 microbatches the two chunks alternate, F B W of one and F
    B W of the other: a round of six slots. A shorter step is a longer one with some microbatches left out.
    """
    microbatch = np.arange(num_microbatches)
    num_full = max(num_microbatches, 2 * num_stages - 1)
    behind = num_stages - stage  # this stage and the stages after it

    # Warm-up: only forwards of the first chunk until one comes back through the second, then both in turn, ...
    num_alone, num_before = 2 * behind - 1, 2 * num_stages - 1 - stage
    forward_0 = np.select(
        [microbatch < num_alone, microbatch < num_before],
        [microbatch - num_alone - 6 * num_stages, 6 * (microbatch - num_alone - num_stages) + 4],
        6 * (microbatch - num_before),
    )
    # ... then only the second chunk, until the backwards of the first begin at slot 0.
    forward_1 = 6 * (microbatch - num_stages) + 3
    backward_1 = 6 * (microbatch - behind) + 4
    backward_0 = 6 * microbatch + 1

    # From `end` on there are no more forwards. Backwards come as early as possible, because other stages wait for them.
    # W fills the remaining slots.
    end = 6 * (num_full - num_stages)
    weight_0, weight_1 = backward_0 + 1, backward_1 + 1
    left_0, left_1 = microbatch - (num_full - num_stages), microbatch - (num_full - stage)
    backward_0 = np.where(left_0 < 0, backward_0, end + 2 * left_0)
    backward_1 = np.where(left_1 < 0, backward_1, end + 2 * left_1 + 1)
    weight_0 = np.where(left_0 < 0, weight_0, end + 2 * (left_0 + stage) + 1)
    weight_1 = np.where(left_1 < 0, weight_1, end + 2 * num_stages + left_1)
    weight_0 = np.where(left_1 < 0, weight_0, end + 2 * num_stages + stage + left_1)
    return [forward_0, forward_1, backward_0, backward_1, weight_0, weight_1]


SLOTS = {
    "gpipe": _gpipe_slots,
    "one_f_one_b": _one_f_one_b_slots,
    "interleaved_1f1b": _interleaved_slots,
    "zero_bubble_h1": _zero_bubble_h1_slots,
    "zero_bubble_v": _zero_bubble_v_slots,
}
NUM_CHUNKS = {"interleaved_1f1b": 2, "zero_bubble_v": 2}
"""Number of chunks of a stage, where it is not 1."""


def play(
    order: Order,
    forward: Sequence[float],
    backward_input: Sequence[float],
    backward_weight: Sequence[float],
    latency: float = 0.0,
    free_from: Sequence[float] | Seconds | None = None,
) -> Seconds:
    """Returns when every stage has finished its operations, if stage s is free from `free_from[s]` on. None means that
    all are free from 0 on.

    Each stage runs its operations in order. An operation starts when its stage is free and its input has arrived, which
    takes `latency` from another stage. An input from the same stage is always ready, because the order puts it first.

    In every round, each stage whose next operation can be timed runs it, and records for the operation that waits for
    it when its input arrives. So the number of rounds is the length of the longest chain of operations. It grows with
    the number of microbatches, and hardly with the number of stages. A W needs no round: it waits only for its own
    stage, so its time is added to the operation before it.
    """
    codes, num_weights = _without_weights(order)
    num_stages, num_played = codes.shape
    width = num_played + 2  # a stage's operations, then one that never begins, then a place for unused messages
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
    """Returns the codes without the Ws, and the number of Ws after each code, with one row per stage."""
    num_played = 2 * order.num_chunks * order.num_microbatches
    flat = order.codes.ravel()
    places = np.flatnonzero(flat < num_played)
    num_weights = np.diff(np.append(places, flat.size)) - 1
    shape = (order.num_stages, num_played)
    return flat[places].reshape(shape), num_weights.reshape(shape)


def _messages(order: Order, codes: Integers, width: int) -> tuple[Seconds, Integers]:
    """Returns, for every operation, when its input arrives if that is known in advance, and which operation on another
    stage waits for it. At most one does. Both arrays are indexed by place, and places are numbered through all
    stages."""
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
