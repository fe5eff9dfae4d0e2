"""Starts the stages: one process each on this machine, one thread each in this process, or the processes of torchrun.

`launch(worker, num_stages)` calls `worker(transport)` once per stage and returns the results of the workers, by stage.
If a stage fails or dies, all of them end, with one message.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ..errors import PipelineError, StageFailure
from .base import Transport
from .computing_threads import begin_computing_thread
from .environment import under_torchrun, world_size
from .link import PeerLost, place_of
from .mesh import Mesh
from .stage_main import LaunchOptions, Result, WorldWorker, no_room
from .stage_processes import launch_processes
from .torchrun import join_torchrun
from .world import ThreadWorld, ThreadWorldState, World

Worker = Callable[[Transport], Result]


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
    if under_torchrun() and not threads and (size := world_size()) != mesh.size:
        replicas = f" in each of {num_replicas} replicas" if num_replicas > 1 else ""
        raise StageFailure(
            f"WORLD_SIZE = {size} processes were started for {num_stages} stages{replicas}: make the two numbers the "
            "same"
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
        return [join_torchrun(worker, options)]
    return launch_processes(worker, options, start_method, forwarded)


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
            raise no_room(options, rank, error) from None
    for thread in members:
        thread.join()
    if errors:
        causes = [error for error in errors.values() if not isinstance(error, (PipelineError, PeerLost))]
        raise StageFailure(layouts.failure or "a stage failed") from (causes or list(errors.values()))[0]
    return [results[rank] for rank in range(options.size)]
