"""Starts one process for each stage on this machine, and collects their results or their failures."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

import torch.distributed as dist

from ..errors import NonFiniteError, PipelineError, StageFailure
from .computing_threads import await_ended_threads
from .failures import read_failure
from .stage_main import GRACE_SECONDS, LaunchOptions, Result, WorldWorker, no_room, run_stage

WAITING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that are blocked while stages start."""

INTERRUPTED = "slipstream: interrupted, and ending when all is saved; once more ends it at once"


def launch_processes(
    worker: WorldWorker[Result], options: LaunchOptions, start_method: str | None, forwarded: Sequence[signal.Signals]
) -> list[Result]:
    if start_method is None:
        start_method = "spawn" if sys.platform != "linux" else "forkserver" if _can_pickle(worker) else "fork"
    context = multiprocessing.get_context(start_method)
    if start_method == "fork":
        await_ended_threads()
    if start_method == "forkserver":
        context.set_forkserver_preload(["slipstream.pipeline"])
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    # A signal that comes while stages start waits until it can be forwarded. Raised inside a fork, it would be lost.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, WAITING)
    try:
        for rank in range(options.size):
            try:
                ours, theirs = context.Pipe()
                process = context.Process(  # type: ignore[attr-defined]
                    target=_process_main,
                    args=(worker, rank, options, theirs, forwarded),
                    name=options.name(rank),
                    daemon=True,
                )
                process.start()
            except OSError as error:
                raise no_room(options, rank, error) from None
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        # The store is in this process and not in a stage, so that the message of a dying stage outlives the stage. It
        # is made after the fork, which must not copy the store's threads.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for pipe in pipes:
            # If the process was killed already, _collect will notice.
            with suppress(BrokenPipeError, ConnectionResetError):
                pipe.send(store.port)
        with _forwarding(forwarded, processes):
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return _collect(processes, pipes, store, options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


@contextmanager
def _forwarding(signals: Sequence[signal.Signals], processes: Sequence[BaseProcess]) -> Iterator[None]:
    """Forwards signals to the stages. SIGINT is forwarded as SIGTERM, so that the stages end in their own way. A second
    SIGINT ends them at once."""
    was_interrupted = False
    # Python allows signal handlers only in the main thread.
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal was_interrupted
        if number == signal.SIGINT:
            was_interrupted = True
            signal.signal(number, before[signal.SIGINT])
            print(INTERRUPTED, file=sys.stderr, flush=True)
            number = signal.SIGTERM
        for process in processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, number)

    before = {number: signal.signal(number, forward) for number in signals if not is_ignored(number)}
    try:
        yield
    except StageFailure:
        if was_interrupted:  # before a stage could react to it
            raise KeyboardInterrupt from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if was_interrupted:
        raise KeyboardInterrupt


def is_ignored(number: signal.Signals) -> bool:
    """Tells whether a signal is to stay ignored. A shell starts its background jobs with SIGINT ignored, and nohup
    starts a command with SIGHUP ignored."""
    return number in (signal.SIGINT, signal.SIGHUP) and signal.getsignal(number) is signal.SIG_IGN


def _can_pickle(worker: WorldWorker[Any]) -> bool:
    try:
        pickle.dumps(worker)
    except Exception:  # whatever the worker's own objects raise
        return False
    return True


def _process_main(
    worker: WorldWorker[Any], rank: int, options: LaunchOptions, pipe: Connection, forwarded: Sequence[signal.Signals]
) -> None:
    # Objects inherited by a fork belong to the parent: their threads do not exist here, and collecting them could
    # abort.
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its stages itself
    # The worker unblocks the signals that are forwarded to it, once it handles them.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, set(WAITING) - set(forwarded))
    threading.Thread(target=die_with_parent, name="watches the parent", daemon=True).start()
    try:
        store = dist.TCPStore("127.0.0.1", pipe.recv(), is_master=False, timeout=options.timeout)
        result = run_stage(worker, store, rank, options.on_gpu(rank))
        pipe.send(("result", pickle.dumps(result), ""))
    except StageFailure as failure:
        pipe.send(("failure", str(failure), failure.details))
    except BaseException as error:
        has_said_it = isinstance(error, (PipelineError, NonFiniteError))
        pipe.send(("failure", str(error), "" if has_said_it else traceback.format_exc()))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a process group with a lost peer may hang in its destructor


def die_with_parent() -> None:
    """Ends this process when its parent dies. A parent that was killed cannot end its stages, and without this they
    would continue to train unnoticed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _collect(
    processes: list[BaseProcess], pipes: list[Connection], store: dist.Store, options: LaunchOptions
) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, tuple[str, str]] = {}
    open_pipes = dict(zip(pipes, range(len(pipes)), strict=True))
    deadline: float | None = None
    while open_pipes:
        remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait(list(open_pipes), remaining)
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = open_pipes.pop(pipe)
            try:
                kind, value, details = pipe.recv()
            except (EOFError, ConnectionResetError):
                processes[rank].join()
                kind, value, details = "failure", _cause_of_death(options.name(rank), processes[rank].exitcode), ""
            if kind == "result":
                results[rank] = pickle.loads(value)
            else:
                failures[rank] = value, details
                deadline = deadline or time.monotonic() + GRACE_SECONDS
    if not failures:
        return [results[rank] for rank in range(len(processes))]
    raise _summarise(failures, store)


def _cause_of_death(stage: str, exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        named = {number.value: number.name for number in signal.Signals}  # real-time signals have no name
        return f"{stage} was killed by {named.get(-exit_code, f'signal {-exit_code}')}"
    return f"{stage} left without a word (exit code {exit_code})"


def _summarise(failures: dict[int, tuple[str, str]], store: dist.Store) -> StageFailure:
    """Combines the failures into one message: the first failure, and the cause of death of a stage that could not
    report it."""
    first = read_failure(dist.PrefixStore("slipstream", store)) or next(iter(failures.values()))[0]
    deaths = [
        message for message, _ in failures.values() if " was killed by " in message or " without a word" in message
    ]
    details = next((details for _, details in failures.values() if details), "")
    return StageFailure("; ".join([*(d for d in deaths if d not in first), first]), details)
