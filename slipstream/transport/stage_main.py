"""Runs the worker of one stage in the process that was started for it, whoever started it."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from ..errors import NonFiniteError, PipelineError, StageFailure
from .link import PeerLost, place_of
from .mesh import Mesh
from .nccl import pretend_to_be_a_host
from .world import ProcessWorld, World

Result = TypeVar("Result")

WorldWorker = Callable[[World], Result]

GRACE_SECONDS = 5.0
"""Number of seconds that the other stages have to notice a failure and to report what they waited for."""


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


def run_stage(worker: WorldWorker[Result], store: dist.Store, rank: int, options: LaunchOptions) -> Result:
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
    except (Exception, SystemExit) as error:  # a SystemExit would end this process without a word to the others
        first = world.fail(f"{world.name} failed with {type(error).__name__}: {error}{place_of(error)}")
        raise StageFailure(first, traceback.format_exc()) from error
    world.leave()
    world.close()
    return result


def no_room(options: LaunchOptions, rank: int, error: Exception) -> StageFailure:
    return StageFailure(
        f"this machine has no room for {options.size} stages, all replicas counted: {options.name(rank)} could not be "
        f"started ({error}); use fewer of them"
    )
