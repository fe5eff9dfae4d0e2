"""The orders of flushing schedules that a plan compares but the trainer does not run: what each stage does in a step.

    order = make_order("zero_bubble_v", num_stages=4, num_microbatches=8)
    ones = [1.0] * 4      # by stage
    ends = play(order, forward=ones, backward_input=ones, backward_weight=ones, latency=0.0, free_from=[0.0] * 4)

`slipstream.schedule` has the schedules that the executor can run. The schedules here split a stage into chunks or a
backward into two operations, for comparison with the others. A plan may have hundreds of stages. So an order is an
array of integers, and all stages are simulated at once. Only for this reason gpipe and one_f_one_b are here too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, pairwise

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.integer]
Seconds = NDArray[np.float64]

ROUNDS_BETWEEN_LOOKS = 16
"""Number of rounds between two checks of whether `play` is done. A few additional rounds cost less than a check in
each."""


@dataclass(frozen=True)
class Order:
    """The operations of every stage in one step, in order.

    An operation is a forward, the gradient with respect to the inputs (B) or the gradient with respect to the weights
    (W). If the order does not split its backwards, B is the whole backward and there is no W. All stages have the same
    number of operations. An operation is one integer, `(kind * num_chunks + chunk) * num_microbatches + microbatch`,
    where the kinds are 0 (forward), 1 (B) and 2 (W).
    """

    num_stages: int
    num_microbatches: int
    num_chunks: int
    is_split: bool
    """Whether a backward is two operations."""
    is_v_shaped: bool
    """Whether microbatches pass through the second chunks from the last stage to the first. Otherwise they start again
    at the first stage."""
    codes: Integers
    """Codes of the operations, with one row per stage."""

    @property
    def in_flight(self) -> tuple[float, ...]:
        """Returns the maximum number of microbatches whose activations each stage holds, in units of a whole stage: one
        of two chunks counts 0.5.

        Activations are held from the forward to the end of the backward. If the backward is split, this is the gradient
        of the weights.
        """
        kinds = self.codes // (self.num_microbatches * self.num_chunks)
        change = (kinds == 0).astype(np.int8) - (kinds == (2 if self.is_split else 1)).astype(np.int8)
        peaks = np.cumsum(change, axis=1, dtype=np.int32).max(axis=1)
        return tuple(float(peak) / self.num_chunks for peak in peaks)


def make_order(name: str, num_stages: int, num_microbatches: int) -> Order:
    """Returns the order of a flushing schedule.

    Each schedule is a rule that gives every operation of a stage a slot. A stage runs its operations from the lowest
    slot to the highest. Slots have a meaning only relative to other slots of the same stage.
    """
    # Every rule lists the slots in the order of the codes, so that the index of an operation is its code. The slots of
    # one kind ascend, and a stable sort only merges such runs.
    slots = (np.concatenate(SLOTS[name](stage, num_stages, num_microbatches)) for stage in range(num_stages))
    codes = np.stack([np.argsort(slot, kind="stable").astype(np.int32) for slot in slots])
    is_split, is_v_shaped = name.startswith("zero_bubble"), name == "zero_bubble_v"
    return Order(num_stages, num_microbatches, NUM_CHUNKS.get(name, 1), is_split, is_v_shaped, codes)


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
    latency: float,
    free_from: Sequence[float] | Seconds,
) -> Seconds:
    """Returns when every stage has finished its operations, if stage s is free from `free_from[s]` on.

    Each stage runs its operations in order. An operation starts when its stage is free and its input has arrived, which
    takes `latency` from another stage. An input from the same stage is always ready, because the order puts it first.

    In every round, each stage whose next operation can be timed runs it. So the number of rounds is the length of the
    longest chain of operations. It grows with the number of microbatches, and hardly with the number of stages. A W
    needs no round: it waits only for its own stage, so its time is added to the operation before it.
    """
    codes, num_weights = _without_weights(order)
    num_stages, num_played = codes.shape
    width = num_played + 1  # a stage's operations, then one that never begins
    lengths = (forward, backward_input, backward_weight)
    f, b, w = (np.asarray(length, dtype=np.float64)[:, None] / order.num_chunks for length in lengths)
    is_forward = codes < order.num_chunks * order.num_microbatches
    costs, pauses = np.full((num_stages, width), math.inf), np.zeros((num_stages, width))
    costs[:, :num_played] = np.where(is_forward, f, b if order.is_split else b + w)
    pauses[:, :num_played] = num_weights * w

    cost, pause, needs = costs.ravel(), pauses.ravel(), _needs(order, codes)
    ends = np.full(num_stages * width + 1, math.inf)
    ends[-1] = -math.inf  # at place -1: what an operation without an input waits for
    first = np.arange(num_stages) * width
    cursor = first.copy()
    free = np.array(free_from, dtype=np.float64)
    for round_ in count(1):
        end = np.maximum(ends.take(needs.take(cursor)) + latency, free) + cost.take(cursor)
        ends[cursor] = end
        is_timed = end < math.inf
        if round_ % ROUNDS_BETWEEN_LOOKS == 0 and not is_timed.any():
            break
        free = np.where(is_timed, end + pause.take(cursor), free)
        cursor += is_timed
    assert (cursor == first + num_played).all(), "the order deadlocks"
    return free


def _without_weights(order: Order) -> tuple[Integers, Integers]:
    """Returns the codes without the Ws, and the number of Ws after each code, with one row per stage."""
    num_played = 2 * order.num_chunks * order.num_microbatches
    flat = order.codes.ravel()
    places = np.flatnonzero(flat < num_played)
    num_weights = np.diff(np.append(places, flat.size)) - 1
    shape = (order.num_stages, num_played)
    return flat[places].reshape(shape), num_weights.reshape(shape)


def _needs(order: Order, codes: Integers) -> Integers:
    """Returns for every operation the place of the operation on another stage that it waits for, or -1. Places are
    numbered through all stages, with one more for the end of each stage.

    This is the only rule for dependencies between stages: a forward waits for the forward of the chunk before it on the
    path of its microbatch, and a backward for the backward of the chunk after it.
    """
    num_stages, num_played = codes.shape
    width = num_played + 1
    needs = np.full(num_stages * width, -1, dtype=np.int32)
    place: Integers = np.empty(codes.shape, dtype=np.int32)
    np.put_along_axis(place, codes, np.arange(num_played, dtype=np.int32)[None, :], axis=1)
    place += width * np.arange(num_stages, dtype=np.int32)[:, None]
    place = place.reshape(num_stages, 2, order.num_chunks, order.num_microbatches)  # 2: forward and backward
    stages = range(num_stages)
    path = [(stage, 0) for stage in stages]
    if order.num_chunks == 2:
        path += [(stage, 1) for stage in (reversed(stages) if order.is_v_shaped else stages)]
    for (stage, chunk), (later_stage, later_chunk) in pairwise(path):
        if stage != later_stage:
            needs[place[later_stage, 0, later_chunk]] = place[stage, 0, chunk]
            needs[place[stage, 1, chunk]] = place[later_stage, 1, later_chunk]
    return needs
