"""How long a step of torch.distributed.pipelining takes if every message takes time and every wait counts.

    programs = one_f_one_b(num_processes=4, num_microbatches=8)
    step_seconds, busy_seconds = play(programs, Costs(work, update, one_way, exchange))

slipstream's stages wait only for what they receive. torch's wait for more (torch 2.11, schedules.py):

- All sends and receives of a process run one after the other, on one stream of its communicator. A receive that was
  launched early blocks every message after it until its sender comes.
- Schedule1F1B launches a send together with the next receive, and waits for both.
- All sends have to end before the update.
- A message occupies multiprocessors from its launch until it ends, also while it waits for the other side. Work beside
  it has fewer of them.

A program is the list of what one process launches in a step. Its computation and its messages are two streams.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

NUM_STEPS = 4
"""Steps that are played; the last one is measured."""
EPSILON = 1e-12
"""Seconds that are no work, but rounding."""


class Work(NamedTuple):
    """A forward (F), a backward (B), one of its halves for inputs (I) and weights (W), or the update (U)."""

    op: str
    chunk: int = 0
    microbatch: int = 0


class Message(NamedTuple):
    """What `sender` passes on: an activation (F) or a gradient (B) of one microbatch."""

    op: str
    sender: int
    microbatch: int


@dataclass(frozen=True)
class Launch:
    """Messages that are sent and received together."""

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()


NOTHING = Launch()


@dataclass(frozen=True)
class Wait:
    """The computation waits for the end of a launch."""

    launch: Launch


Program = list[Work | Launch | Wait]


@dataclass(frozen=True)
class Costs:
    work: Mapping[tuple[str, int], float]
    """Seconds of every kind of work on every chunk."""
    update: float
    one_way: float = 0.0
    """Seconds of a message."""
    exchange: float = 0.0
    """Seconds of two messages in opposite directions at once."""
    speed_beside_message: float = 1.0
    """Speed of work beside a message, as a part of its speed alone."""

    def seconds(self, work: Work) -> float:
        return self.update if work.op == "U" else self.work[work.op, work.chunk]


def one_f_one_b(num_processes: int, num_microbatches: int) -> list[Program]:
    """Schedule1F1B, which has no list of its actions."""
    return [list(_one_f_one_b(process, num_processes, num_microbatches)) for process in range(num_processes)]


def _one_f_one_b(process: int, num_processes: int, num_microbatches: int) -> Iterator[Work | Launch | Wait]:
    has_next, has_previous = process < num_processes - 1, process > 0

    def forward_in(microbatch: int) -> tuple[Message, ...]:
        return (Message("F", process - 1, microbatch),) if has_previous else ()

    def forward_out(microbatch: int) -> tuple[Message, ...]:
        return (Message("F", process, microbatch),) if has_next else ()

    def backward_in(microbatch: int) -> tuple[Message, ...]:
        return (Message("B", process + 1, microbatch),) if has_next else ()

    def backward_out(microbatch: int) -> tuple[Message, ...]:
        return (Message("B", process, microbatch),) if has_previous else ()

    def at_once(launch: Launch) -> Iterator[Launch | Wait]:
        yield launch
        yield Wait(launch)

    num_warm_up = min(num_microbatches, num_processes - process)
    sent = NOTHING
    for microbatch in range(num_warm_up):
        yield from at_once(Launch(receives=forward_in(microbatch)))
        yield Work("F", process, microbatch)
        if microbatch < num_warm_up - 1:
            yield Wait(sent)
            sent = Launch(forward_out(microbatch))
            yield sent
    yield Wait(sent)
    for microbatch in range(num_microbatches - num_warm_up + 1):
        last_forward = microbatch + num_warm_up - 1
        yield from at_once(Launch(forward_out(last_forward), backward_in(microbatch)))
        yield Work("B", process, microbatch)
        if last_forward + 1 < num_microbatches:
            yield from at_once(Launch(backward_out(microbatch), forward_in(last_forward + 1)))
            yield Work("F", process, last_forward + 1)
    sent = Launch(backward_out(num_microbatches - num_warm_up))
    yield sent
    for microbatch in range(num_microbatches - num_warm_up + 1, num_microbatches):
        yield from at_once(Launch(receives=backward_in(microbatch)))
        yield Work("B", process, microbatch)
        yield Wait(sent)
        sent = Launch(backward_out(microbatch))
        yield sent
    yield Wait(sent)
    yield Work("U")


def from_order(order: Sequence[str]) -> list[Program]:
    """Schedules with two chunks on each process, as they write their own actions: 2F5, 2SEND_F5, 3RECV_F5 and so on,
    one text for each process."""
    return [_from_actions(actions) for actions in order]


def _from_actions(actions: str) -> Program:
    program: Program = []
    sent: list[Launch] = []
    received: dict[tuple[str, int, int], Launch] = {}
    for first, op, last in re.findall(r"(\d+)(SEND_F|SEND_B|RECV_F|RECV_B|F|B|I|W)(\d+)", actions):
        chunk, microbatch, kind = int(first), int(last), op[-1]
        if op.startswith("SEND"):
            sent.append(Launch(sends=(Message(kind, chunk, microbatch),)))
            program.append(sent[-1])
        elif op.startswith("RECV"):
            sender = chunk - 1 if kind == "F" else chunk + 1
            received[kind, chunk, microbatch] = launch = Launch(receives=(Message(kind, sender, microbatch),))
            program.append(launch)
        else:
            if op != "W" and (needed := received.pop(("F" if op == "F" else "B", chunk, microbatch), None)):
                program.append(Wait(needed))
            program.append(Work(op, chunk, microbatch))
    return [*program, *map(Wait, reversed(sent)), Work("U")]


class _Process:
    """One process while its program is played, step after step."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._actions = iter([(step, action) for step in range(NUM_STEPS) for action in program])
        self._next = next(self._actions, None)
        self._queue: list[tuple[int, Launch]] = []
        """Launches that have not started, each with its step."""
        self._ended: set[tuple[int, Launch]] = set()
        self.launch: tuple[int, Launch] | None = None
        """The launch that occupies the communicator."""
        self.launch_ends: float | None = None
        """When it ends. None while a message that it receives was not sent."""
        self.work: Work | None = None
        self.work_left = 0.0
        """Seconds that the current work would take without messages beside it."""
        self.step_ends: list[float] = []
        self.busy: list[float] = [0.0] * NUM_STEPS
        """Seconds of work in every step."""

    @property
    def has_ended(self) -> bool:
        return self._next is None and self.work is None and self.launch is None and not self._queue

    def go_on(self, now: float, sent: set[tuple[int, Message]], costs: Costs) -> bool:
        """Starts what can start now. Returns whether anything did, or ended."""
        went_on = False
        while self.work is None and self._next is not None:
            step, action = self._next
            if isinstance(action, Work):
                self.work, self.work_left = action, costs.seconds(action)
            elif isinstance(action, Launch):
                if action != NOTHING:
                    self._queue.append((step, action))
            elif action.launch != NOTHING and (step, action.launch) not in self._ended:
                break
            self._next, went_on = next(self._actions, None), True
        if self.launch is None and self._queue:
            self.launch, self.launch_ends, went_on = self._queue.pop(0), None, True
            sent.update((self.launch[0], message) for message in self.launch[1].sends)
        if self.launch is not None and self.launch_ends is None:
            step, launch = self.launch
            if all((step, message) in sent for message in launch.receives):
                both_ways = launch.sends and launch.receives
                self.launch_ends, went_on = now + (costs.exchange if both_ways else costs.one_way), True
        return went_on

    def next_event(self, now: float, costs: Costs) -> float:
        """When the current work or launch ends, if nothing changes before."""
        events = [] if self.launch_ends is None else [self.launch_ends]
        if self.work is not None:
            events.append(now + self.work_left / self._speed(costs))
        return min(events, default=math.inf)

    def advance(self, now: float, until: float, costs: Costs) -> None:
        if self.work is not None:
            self.busy[len(self.step_ends)] += until - now
            self.work_left -= (until - now) * self._speed(costs)
            if self.work_left <= EPSILON:
                if self.work.op == "U":
                    self.step_ends.append(until)
                self.work = None
        if self.launch is not None and self.launch_ends is not None and self.launch_ends <= until:
            self._ended.add(self.launch)
            self.launch = self.launch_ends = None

    def _speed(self, costs: Costs) -> float:
        return 1.0 if self.launch is None else costs.speed_beside_message


def play(programs: Sequence[Program], costs: Costs) -> tuple[float, float]:
    """Returns the time of a step, and the part of it in which a process computes, averaged over processes.

    A send takes its time whether or not its receiver has come, because NCCL buffers messages of this size. Raises
    ValueError if the programs wait for each other for ever."""
    processes, sent, now = [_Process(program) for program in programs], set[tuple[int, Message]](), 0.0
    while not all(process.has_ended for process in processes):
        while any([process.go_on(now, sent, costs) for process in processes]):  # noqa: C419  all of them go on
            pass
        until = min(process.next_event(now, costs) for process in processes)
        if until == math.inf:
            raise ValueError("the programs wait for each other for ever")
        for process in processes:
            process.advance(now, until, costs)
        now = until
    before, last = (max(process.step_ends[step] for process in processes) for step in (-2, -1))
    return last - before, sum(process.busy[-1] for process in processes) / len(processes)
