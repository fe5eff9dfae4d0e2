"""Runs the contenders interleaved: they take turns in one world of processes, round after round, so that noise affects
all of them.

If a contender fails, all processes of its world end. The other contenders continue in a new world where they stopped:
stage 0 keeps a log file of all turns that have started and ended, and the file outlives the process.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import platform
import statistics
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...errors import RunFailure, StageFailure
from ...transport.base import Transport, gather_objects
from ...transport.launch import launch
from ...transport.process import ProcessTransport
from .contenders import Contender, Refused, Round, World, nccl_group, run
from .links import delay_links, exchange_seconds, message_seconds
from .workloads import sleep_precisely

TIMEOUT_SECONDS = 60.0
"""Time without a message after which a contender counts as hanging. On GPUs it also limits a whole turn, because NCCL
does not always detect that it hangs."""
LAST_RESORT_SECONDS = 15.0
"""Additional time after which a process ends itself without a message, if it could not report the timeout."""
MAX_REASON_LENGTH = 400


@dataclass(frozen=True)
class Outcome:
    """All rounds of one contender in one world."""

    contender: Contender
    rounds: tuple[Round, ...]
    failure: str = ""
    """Reason why there are no more rounds. Empty if there is none."""

    @property
    def seconds_per_step(self) -> list[float]:
        return [each.seconds_per_step for each in self.rounds]


Turn = tuple[int, int]
"""Number of a round, and index of the contender that runs."""
OnTurn = Callable[[Turn | None], None]


class Stopped(Exception):
    """Raised when the user interrupts a world. It carries the outcomes until then."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        super().__init__()
        self.outcomes = outcomes


def compete(
    world: World, on_turn: OnTurn = lambda turn: None, after_failure: Callable[[], None] = lambda: None
) -> list[Outcome]:
    """Runs a world and returns the outcome of every contender, in the order of world.contenders.

    on_turn: called in the process of stage 0 before every turn, and with None after the last one.

    after_failure: called when the processes of a world ended too early."""
    torch.set_num_threads(1)  # this process computes nothing, and fork is safe if there was never a second thread
    todo = [(number, index) for number in range(world.num_rounds) for index in range(len(world.contenders))]
    rounds: list[list[Round]] = [[] for _ in world.contenders]
    failures = [""] * len(world.contenders)
    interrupt: BaseException | None = None
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        while todo:
            log.write_bytes(b"")
            failure = unfinished = None
            try:
                failure = _launch(partial(_take_turns, world=world, todo=todo, log=log, on_turn=on_turn), world)
            except (KeyboardInterrupt, SystemExit) as stop:
                interrupt = stop
            for turn, result in _entries(log):
                if result is None:
                    unfinished = turn[1]
                    continue
                if isinstance(result, Round):
                    rounds[turn[1]].append(result)
                else:
                    failures[turn[1]] = result
                todo.remove(turn)
                unfinished = None
            if failure is None:
                break
            after_failure()
            if unfinished is None:
                raise RunFailure(f"the stages failed between two contenders: {failure}")
            failures[unfinished] = failure
            todo = [turn for turn in todo if not failures[turn[1]]]
    outcomes = [
        Outcome(contender, tuple(rounds[index]), failures[index] or ("" if rounds[index] else "it was never run"))
        for index, contender in enumerate(world.contenders)
    ]
    if interrupt is not None:
        raise Stopped(outcomes) from interrupt
    return outcomes


def _launch(worker: Callable[[Transport], None], world: World) -> str | None:
    """Starts the stages and waits for them. Returns the reason of a failure as one line, or None."""
    options: dict[str, Any] = {"start_method": "fork" if platform.system() == "Linux" else None}
    if world.gpu is not None:  # a spawned process inherits the environment but no CUDA state
        options = {"device": "cuda", "share_gpu": world.gpu.share is not None, "start_method": "spawn"}
    try:
        launch(worker, world.num_stages, timeout_seconds=TIMEOUT_SECONDS, shared_memory=world.shared_memory, **options)
    except StageFailure as failure:
        return textwrap.shorten(str(failure), MAX_REASON_LENGTH)
    return None


def _entries(log: Path) -> Iterator[tuple[Turn, Round | str | None]]:
    """Yields, for every turn, None where it starts, and its round or the reason of its refusal where it ends."""
    with log.open("rb") as file, suppress(EOFError, pickle.UnpicklingError):  # the writer was killed
        while True:
            yield pickle.load(file)


# ---- on a stage


def settle_stage(stage: int, num_stages: int) -> None:
    """Sets up a stage process equally for every contender: one thread, BLAS without oneDNN, and exact sleeps. If there
    are fewer cores than stages, it pins each stage to one core, and neighbours to different cores."""
    if platform.system() == "Linux" and num_stages > len(cores := sorted(os.sched_getaffinity(0))):
        os.sched_setaffinity(0, {cores[stage % len(cores)]})
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)
    sleep_precisely()


def meet(transport: Transport) -> None:
    """Waits until all stages have called this function."""
    gather_objects(transport, b"", lambda: "the other stages to begin")


@contextmanager
def _turn_deadline(transport: Transport, name: str) -> Iterator[None]:
    """Ends this process if a contender hangs, after it has notified the other stages."""

    def give_up() -> None:
        faulthandler.dump_traceback()
        transport.fail(f"{name} did not end within {TIMEOUT_SECONDS:g} s on stage {transport.stage}")
        os._exit(1)

    timer = threading.Timer(TIMEOUT_SECONDS, give_up)
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(TIMEOUT_SECONDS + LAST_RESORT_SECONDS, exit=True)
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


def _take_turns(transport: Transport, world: World, todo: Sequence[Turn], log: Path, on_turn: OnTurn) -> None:
    if world.gpu is None:
        settle_stage(transport.stage, transport.num_stages)
        _take_settled_turns(transport, world, todo, log, on_turn)
    else:
        assert isinstance(transport, ProcessTransport)
        with transport.process_group():  # kept for the whole world, because creating an NCCL group takes seconds
            _take_settled_turns(transport, world, todo, log, on_turn)


def _take_settled_turns(transport: Transport, world: World, todo: Sequence[Turn], log: Path, on_turn: OnTurn) -> None:
    engines = {world.contenders[index].engine for _, index in todo}
    ping, exchange = 0.0, None
    if "slipstream" in engines:
        delay_links(transport, world.latency_seconds)
        ping = message_seconds(transport, (world.activations(transport.device),))
    if "torch" in engines and transport.device.type == "cuda":
        assert isinstance(transport, ProcessTransport)
        with _turn_deadline(transport, "the measurement of torch's messages"):
            exchange = exchange_seconds(transport, nccl_group(transport), world.activations(transport.device))
    is_first = transport.stage == 0
    refused: set[int] = set()

    def write(turn: Turn, result: Round | str | None) -> None:
        if is_first:
            with log.open("ab") as file:
                pickle.dump((turn, result), file)

    for turn in todo:
        contender = world.contenders[turn[1]]
        if turn[1] in refused:
            continue
        if is_first:
            on_turn(turn)
        write(turn, None)
        meet(transport)
        try:
            with nullcontext() if world.gpu is None else _turn_deadline(transport, contender.name):
                own = run(contender, world, transport, world.num_steps)
        except Refused as refusal:
            refused.add(turn[1])
            write(turn, str(refusal))
            continue
        parts = gather_objects(transport, pickle.dumps(own), lambda: "what the other stages measured")
        stages: list[Round] = [pickle.loads(part) for part in parts]
        result = Round(
            seconds_per_step=max(stage.seconds_per_step for stage in stages),
            costs=tuple(costs for stage in stages for costs in stage.costs),
            message_seconds=ping if contender.engine == "slipstream" else 0.0,
            exchange=exchange if contender.engine == "torch" else None,
            facts=stages[0].facts | {"mean_stage_seconds": statistics.fmean(s.seconds_per_step for s in stages)},
            memory_bytes=max((s.memory_bytes for s in stages if s.memory_bytes is not None), default=None),
            order=stages[0].order,
        )
        write(turn, result)
    if is_first:
        on_turn(None)
