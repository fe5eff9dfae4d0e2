"""Starts the stages: one process each on this machine, one thread each in this process, or the processes of torchrun.

`launch(worker, num_stages)` calls `worker(transport)` once per stage and returns the results of the workers, by stage.
If a stage fails or dies, all of them end, with one message.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pickle
import secrets
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..errors import NonFiniteError, PipelineError, StageFailure
from .base import Transport
from .computing_threads import await_ended_threads, begin_computing_thread
from .environment import under_torchrun
from .failures import read_failure
from .link import PeerLost, place_of
from .mesh import Mesh
from .nccl import pretend_to_be_a_host
from .world import ProcessWorld, ThreadWorld, ThreadWorldState, World

Result = TypeVar("Result")

Worker = Callable[[Transport], Result]

WorldWorker = Callable[[World], Result]

GRACE_SECONDS = 5.0
"""Number of seconds that the other stages have to notice a failure and to report what they waited for."""

INTERRUPTED = "slipstream: interrupted, and ending when all is saved; once more ends it at once"

MEETING_PAUSE = 0.01
"""Number of seconds between two checks of the first process for the others."""


def launch(
    worker: Worker[Result],
    num_stages: int,
    *,
    num_replicas: int = 1,
    placement: str = "pipeline",
    threads: bool = False,
    device: torch.device | str = "cpu",
    timeout_seconds: float = 300.0,
    shared_memory: bool = True,
    backend: str = "auto",
    share_gpu: bool = False,
    start_method: str | None = None,
) -> list[Result]:
    """Calls `worker(transport)` once per stage and returns the results of the workers, by stage.

    num_replicas       number of copies of the whole pipeline; each computes its share of every batch
    placement          which processes have consecutive ranks: the stages of a replica ("pipeline"), or the replicas of
                       a stage ("replica")
    threads            run the stages as threads of this process instead of as processes
    device             "cpu" or "cuda"
    timeout_seconds    how long a stage waits for another before it gives up
    shared_memory      use shared memory between processes of one machine, on CPUs; otherwise gloo, as between machines
    backend            "auto": NCCL between GPUs, gloo between CPUs; "gloo": also between GPUs, through host memory
    share_gpu          allow more processes than GPUs over NCCL, for tests
    start_method       how multiprocessing starts processes: "fork", "spawn" or "forkserver"; None means the default

    Under torchrun this process is one stage of the existing group of processes, and the list holds only its result.

    By default, on Linux, the processes are forked from a clean server process that has torch loaded. This needs a
    worker that can be pickled, such as a function of a module. Any other worker is forked from this process. That is
    safe only as long as this process has not computed anything with more than one thread. On other systems processes
    are spawned.
    """
    mesh = Mesh(num_stages, num_replicas, placement)
    if under_torchrun() and not threads and (size := int(os.environ["WORLD_SIZE"])) != mesh.size:
        replicas = f" in each of {num_replicas} replicas" if num_replicas > 1 else ""
        raise StageFailure(
            f"torchrun started {size} processes for {num_stages} stages{replicas}: make the two numbers the same"
        )
    return launch_world(
        partial(_in_one_layout, worker, mesh),
        mesh.size,
        mesh=mesh,
        threads=threads,
        device=device,
        timeout_seconds=timeout_seconds,
        shared_memory=shared_memory,
        backend=backend,
        share_gpu=share_gpu,
        start_method=start_method,
    )


def _in_one_layout(worker: Worker[Result], mesh: Mesh, world: World) -> Result:
    transport = world.take_places(mesh)
    assert transport is not None, "every member of this world has a place"
    return worker(transport)


def launch_world(
    worker: WorldWorker[Result],
    num_processes: int,
    *,
    mesh: Mesh | None = None,
    threads: bool = False,
    device: torch.device | str = "cpu",
    timeout_seconds: float = 300.0,
    shared_memory: bool = True,
    backend: str = "auto",
    share_gpu: bool = False,
    start_method: str | None = None,
    forwarded: Sequence[signal.Signals] = (),
) -> list[Result]:
    """Calls `worker(world)` in every process. It is for runs that change their layout (see world.py).

    mesh               the layout of a world that never changes it; error messages then name stages instead of processes
    threads            run the members as threads of this process
    shared_memory      use shared memory between processes of one machine, on CPUs; otherwise gloo, as between machines
    backend            "auto": NCCL between GPUs, gloo between CPUs; "gloo": also between GPUs, through host memory
    share_gpu          allow more processes than GPUs over NCCL, to test a pipeline of GPUs on a single one
    start_method       how multiprocessing starts processes; None means the default, as for `launch`
    forwarded          signals that this process forwards to its stages. SIGINT is forwarded once, as SIGTERM
    """
    device = torch.device(device)
    options = LaunchOptions(num_processes, mesh, device, timeout_seconds, shared_memory, backend, share_gpu)
    if threads:
        return _launch_threads(worker, options)
    if under_torchrun():
        return [_join_torchrun(worker, options)]
    return _launch_processes(worker, options, start_method, forwarded)


@dataclass(frozen=True)
class LaunchOptions:
    """The settings that all members of a world share."""

    size: int
    mesh: Mesh | None
    device: torch.device
    timeout_seconds: float
    shared_memory: bool
    backend: str = "auto"
    share_gpu: bool = False

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self.timeout_seconds)

    def name(self, rank: int) -> str:
        return f"process {rank}" if self.mesh is None else self.mesh.name(rank)

    def on_gpu(self, index: int) -> LaunchOptions:
        """Returns the options with the GPU of one stage as the device, where stages compute on GPUs. If several stages
        may share a GPU, the index wraps around."""
        if self.device.type != "cuda":
            return self
        if self.share_gpu or self.backend == "gloo":
            index %= max(1, torch.cuda.device_count())
        return replace(self, device=torch.device("cuda", index))


# ---- torchrun
def _join_torchrun(worker: WorldWorker[Result], options: LaunchOptions) -> Result:
    try:
        store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=options.timeout)))
    except (OSError, RuntimeError, ValueError) as error:
        raise StageFailure(f"stage {os.environ['RANK']} does not find the others: {error}") from error
    if world_size != options.size:
        raise StageFailure(f"torchrun started {world_size} processes and not {options.size}: make the two the same")
    try:
        word = meet(store, rank, world_size, options.timeout_seconds)
    except (RuntimeError, ValueError) as error:
        raise StageFailure(f"stage {rank} does not find the others: {error}") from error
    own_store = dist.PrefixStore(word, store)
    own_store.set(f"process/{rank}", json.dumps(_identity(os.getpid())))
    keeps_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    is_done, seconds = False, options.timeout_seconds
    try:
        result = _run_stage(worker, own_store, rank, options.on_gpu(int(os.environ.get("LOCAL_RANK", "0"))))
        is_done = True
        return result
    except PipelineError as error:  # another stage failed, and the others are about to notice
        is_done, seconds = True, GRACE_SECONDS
        if isinstance(error.__cause__, PeerLost) and error.__cause__.is_silent:
            _end_later(own_store, set(range(world_size)) - {rank})
        raise
    finally:
        if is_done:
            _take_leave(own_store, rank, world_size if keeps_store else 0, seconds)


def _take_leave(store: dist.Store, rank: int, world_size: int, timeout_seconds: float) -> None:
    """Marks this process as finished. The process that hosts the store waits for the others and leaves last, because
    they may still write to the store or read from it. `world_size` is 0 if this process does not host the store."""
    deadline = time.monotonic() + timeout_seconds
    with suppress(RuntimeError, ValueError):  # the store may be gone nevertheless
        store.set(f"left/{rank}", "")
        missing = set(range(1, world_size))
        while missing and time.monotonic() < deadline:
            missing = {other for other in missing if not store.check([f"left/{other}"])}
            time.sleep(MEETING_PAUSE)


def _end_later(store: dist.Store, ranks: Collection[int]) -> None:
    """Arranges that processes of a failed run on this machine are killed if they do not end by themselves: a stopped
    process (SIGSTOP) never notices the failure. A separate process does this, because this one must end so that the
    others notice."""
    with suppress(RuntimeError, ValueError, OSError):
        own = _identity(os.getpid())
        found = [json.loads(store.get(f"process/{rank}")) for rank in ranks if store.check([f"process/{rank}"])]
        here = [identity for identity in found if identity and own and identity[-1] == own[-1]]
        command = [sys.executable, "-c", _ENDER, str(GRACE_SECONDS), *(f"{pid}:{start}" for pid, start, _ in here)]
        subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


_ENDER = """
import os, signal, sys, time
time.sleep(float(sys.argv[1]))
for pid, start in (word.split(":") for word in sys.argv[2:]):
    try:
        with open(f"/proc/{pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[19] == start:
                os.kill(int(pid), signal.SIGKILL)
    except OSError:
        pass
"""


def _identity(pid: int) -> list[int | str] | None:
    """Returns the process id, its start time and the boot id of the machine. The process id alone may belong to another
    process by now. None means that the system does not provide this information."""
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        return [pid, started, Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
    except OSError:
        return None


def meet(store: dist.Store, rank: int, world_size: int, timeout_seconds: float) -> str:
    """Returns a token that all processes of this start share and that no other start has.

    torchrun's store outlives its restarts, and keeps what earlier processes wrote to it: their addresses and their
    failures. The restart counter distinguishes the starts on one node, but every node has its own counter. So every
    process publishes a random token of its own, which no earlier process knew. The first process answers each of them
    with its own token, and all use that one.
    """
    own = secrets.token_hex(8)
    if rank > 0:
        store.set(f"meeting/{rank}", own)
        word = store.get(f"meeting/answer to {own}").decode()
        store.set(f"meeting/{word}/{rank}", "here")
        return word
    missing, answered = set(range(1, world_size)), set[bytes]()
    deadline = time.monotonic() + timeout_seconds
    while missing:
        for other in sorted(missing):
            if store.check([f"meeting/{own}/{other}"]):
                missing.discard(other)
            elif store.check([f"meeting/{other}"]) and (theirs := store.get(f"meeting/{other}")) not in answered:
                # This may be the token of an earlier process, which does not read the answer any more. Then a later
                # check finds the token of the new process.
                store.set(f"meeting/answer to {theirs.decode()}", own)
                answered.add(theirs)
        if missing and time.monotonic() > deadline:
            raise RuntimeError(f"ranks {sorted(missing)} did not come within {timeout_seconds:g} s")
        time.sleep(MEETING_PAUSE)
    return own


def _run_stage(worker: WorldWorker[Result], store: dist.Store, rank: int, options: LaunchOptions) -> Result:
    if options.device.type == "cuda":
        if options.share_gpu:
            pretend_to_be_a_host(rank)
        # Autograd's threads cause this warning, because each of them starts without a CUDA context.
        warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA context")
        torch.cuda.set_device(options.device)
    world = ProcessWorld(
        dist.PrefixStore("slipstream", store),
        rank,
        options.size,
        options.device,
        options.timeout_seconds,
        options.shared_memory,
        options.backend,
        is_close=os.environ.get("LOCAL_WORLD_SIZE", str(options.size)) == str(options.size),
    )
    try:
        result = worker(world)
    except (PipelineError, NonFiniteError):
        raise
    except PeerLost as lost:
        raise PipelineError(world.fail(str(lost))) from lost
    except Exception as error:
        first = world.fail(f"{world.name} failed with {type(error).__name__}: {error}{place_of(error)}")
        raise StageFailure(first, traceback.format_exc()) from error
    world.leave()
    world.close()
    return result


# ---- one process per stage
def _launch_processes(
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
    try:
        for rank in range(options.size):
            try:
                ours, theirs = context.Pipe()
                process = context.Process(  # type: ignore[attr-defined]
                    target=_process_main,
                    args=(worker, rank, options, theirs),
                    name=options.name(rank),
                    daemon=True,
                )
                process.start()
            except OSError as error:
                raise _no_room(options, rank, error) from None
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
            return _collect(processes, pipes, store, options)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def _no_room(options: LaunchOptions, rank: int, error: Exception) -> StageFailure:
    return StageFailure(
        f"this machine has no room for {options.size} stages, all replicas counted: {options.name(rank)} could not be "
        f"started ({error}); use fewer of them"
    )


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
    """Tells whether a signal is SIGINT and is ignored. A shell starts its background jobs with SIGINT ignored."""
    return number == signal.SIGINT and signal.getsignal(number) is signal.SIG_IGN


def _can_pickle(worker: WorldWorker[Any]) -> bool:
    try:
        pickle.dumps(worker)
    except Exception:  # whatever the worker's own objects raise
        return False
    return True


def _process_main(worker: WorldWorker[Any], rank: int, options: LaunchOptions, pipe: Connection) -> None:
    # Objects inherited by a fork belong to the parent: their threads do not exist here, and collecting them could
    # abort.
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its stages itself
    threading.Thread(target=die_with_parent, name="watches the parent", daemon=True).start()
    try:
        store = dist.TCPStore("127.0.0.1", pipe.recv(), is_master=False, timeout=options.timeout)
        result = _run_stage(worker, store, rank, options.on_gpu(rank))
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


# ---- one thread per stage
def _launch_threads(worker: WorldWorker[Result], options: LaunchOptions) -> list[Result]:
    layouts = ThreadWorldState(options.size, options.timeout_seconds)
    num_threads = torch.get_num_threads()
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}
    everyone = threading.Barrier(options.size)

    def run(rank: int) -> None:
        try:
            everyone.wait()
        except threading.BrokenBarrierError:  # another thread could not be started
            return
        begin_computing_thread(num_threads)
        world = ThreadWorld(layouts, rank)
        try:
            results[rank] = worker(world)
        except BaseException as error:
            errors[rank] = error
            world.fail(f"{world.name} failed with {type(error).__name__}: {error}{place_of(error)}")

    members = [threading.Thread(target=run, args=(r,), name=options.name(r), daemon=True) for r in range(options.size)]
    for rank, thread in enumerate(members):
        try:
            thread.start()
        except RuntimeError as error:
            everyone.abort()
            raise _no_room(options, rank, error) from None
    for thread in members:
        thread.join()
    if errors:
        causes = [error for error in errors.values() if not isinstance(error, (PipelineError, PeerLost))]
        raise StageFailure(layouts.failure or "a stage failed") from (causes or list(errors.values()))[0]
    return [results[rank] for rank in range(options.size)]
