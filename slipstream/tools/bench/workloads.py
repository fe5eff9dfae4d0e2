"""The workloads of the benchmark: stages that sleep, which show only the effect of the schedule, a small decoder, and a
larger decoder for GPUs.

A workload is a list of layers and the number of layers in every chunk. The contender's schedule decides whether a
process holds one chunk or two. The work of a process is the same in both cases.
"""

from __future__ import annotations

import ctypes
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...config.optimizers import parameter_groups
from ...config.schema import Config, OptimizerSection
from ...model.decoder import ModelConfig, decoder, initialise, next_token_loss
from ...model.spec import on_meta
from ...optim import Group
from ...pipeline.partition import cut
from ...pipeline.update_step import OVERLAPPING
from ...precision import Precision

FORWARD_SECONDS, BACKWARD_SECONDS = 0.010, 0.020
"""Times of an emulated process for one microbatch, over all its chunks."""
SLOW_FACTOR = 1.5
"""Work of the slow process relative to the others, if the workload is unbalanced."""
SEQUENCE_LENGTH = 256
"""Tokens in a microbatch of the real workload, which is one sequence."""
REAL_DIM = 256
"""Width of the decoder of the real workload."""
HEAD_DIM = 128
"""Dimension of a head of the decoder on GPUs."""
NUM_MICROBATCHES = 8
"""Number of different microbatches of a decoder. They repeat in a cycle."""
NUM_GPU_WARM_UP_STEPS = 3
"""Number of steps in which memory is reserved, kernels are selected and links are connected."""


@dataclass(frozen=True)
class Workload:
    model: nn.Sequential
    sizes: list[int]
    """Number of layers in every chunk, in the order in which a microbatch passes through the chunks."""
    data: Callable[[int, int], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | Sequence[Group]
    """Function that makes the optimizer, or parameter groups, which only slipstream can train."""
    device: torch.device = torch.device("cpu")  # noqa: RUF009
    prepare: Callable[[nn.Sequential], None] | None = None
    """Function that gives a chunk its weights. None means that the model already has them."""
    num_warm_up_steps: int = 0
    """Number of steps at the start of a run that are not measured. `seconds_per_step` drops further steps after
    them."""
    precision: Precision | None = None
    """Precision of slipstream's working copies and gradients. None means that of the layers."""

    def chunk(self, index: int) -> nn.Sequential:
        layers = cut(self.model, self.sizes, index)
        if self.prepare is not None:
            self.prepare(layers)
        return layers


@dataclass(frozen=True)
class Placement:
    """Assignment of chunks to processes."""

    num_processes: int
    shape: str = "single"
    """Rule of the assignment. single: one chunk per process. loop: process i has chunks i and P + i. v: process i has
    chunks i and 2P - 1 - i."""

    @property
    def num_chunks(self) -> int:
        return self.num_processes * (1 if self.shape == "single" else 2)

    def process(self, chunk: int) -> int:
        last = self.num_chunks - 1
        return min(chunk, last - chunk) if self.shape == "v" else chunk % self.num_processes

    def chunks(self, process: int) -> list[int]:
        return [chunk for chunk in range(self.num_chunks) if self.process(chunk) == process]


def work_of(num_processes: int, unbalanced: bool) -> list[float]:
    """Returns the relative work of every process: 1, or SLOW_FACTOR for the middle process if unbalanced."""
    slow = num_processes // 2 if unbalanced else None
    return [SLOW_FACTOR if process == slow else 1.0 for process in range(num_processes)]


# ---- stages that sleep


def sleep_precisely() -> None:
    """Asks Linux for exact sleeps in this thread. By default a sleep may end up to 50 microseconds late to save
    power."""
    if platform.system() == "Linux":
        set_timer_slack, one_nanosecond = 29, 1
        ctypes.CDLL(None).prctl(set_timer_slack, one_nanosecond, 0, 0, 0)


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))


class _Pace:
    """The target end time of the backward of a layer so far. All nodes of the backward share one instance, so that the
    time between the nodes counts as part of their time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        """Time of each half."""
        self._ends_at = 0.0

    def begin(self) -> None:
        self._ends_at = time.perf_counter()

    def spend_half(self) -> None:
        self._ends_at += self.seconds
        _sleep_until(self._ends_at)


class _Whole(torch.autograd.Function):
    """A layer whose backward is one node."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ends_at = time.perf_counter() + ctx.seconds
        [gradient] = gradients
        gradient_of_weight = gradient.sum().reshape(1)
        _sleep_until(ends_at)
        return gradient, gradient_of_weight, None


class _Meet(torch.autograd.Function):
    """The node where the paths of input and weight join. It is the first node of a backward, and also of each half of a
    backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, pace: _Pace) -> Tensor:
        ctx.pace = pace
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.pace.begin()
        [gradient] = gradients
        return gradient, gradient.sum().reshape(1), None


class _Path(torch.autograd.Function):
    """The path to the input or to the weight, which is half of a backward. Autograd runs it only if that gradient is
    needed."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, pace: _Pace) -> Tensor:
        ctx.pace = pace
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.pace.spend_half()
        [gradient] = gradients
        return gradient, None


class SleepingLayer(nn.Module):
    """A layer that takes exactly the given time, including its arithmetic.

    divisible: half of the backward's time belongs to the gradient of the input and half to the gradient of the weight,
    for schedules that request only one of them. This needs three Python nodes instead of one, which slows down stages
    that share cores. So it is used only where a schedule needs it."""

    def __init__(self, forward_seconds: float, backward_seconds: float, divisible: bool = False) -> None:
        super().__init__()
        self.forward_seconds, self.backward_seconds, self.divisible = forward_seconds, backward_seconds, divisible
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        ends_at = time.perf_counter() + self.forward_seconds
        outputs: Tensor
        if not self.divisible:
            outputs = _Whole.apply(x, self.weight, self.backward_seconds)
        else:
            if torch.is_grad_enabled() and not x.requires_grad:
                x = x.detach().requires_grad_()  # so that the first stage has a path to its input too
            pace = _Pace(self.backward_seconds / 2)
            outputs = _Meet.apply(_Path.apply(x, pace), _Path.apply(self.weight, pace), pace)
        _sleep_until(ends_at)
        return outputs


def sleeping_data(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
    return torch.ones(1, 2), torch.zeros(1, 2)


def no_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs * 0).sum()


def emulated(placement: Placement, unbalanced: bool = False, divisible: bool = False) -> Workload:
    """Returns stages that sleep. They stand for GPUs, which leave the cores of the host free. So from then on this
    process makes updates in the background."""
    OVERLAPPING.add("cpu")
    work = work_of(placement.num_processes, unbalanced)
    per_process = placement.num_chunks / placement.num_processes
    shares = [work[placement.process(chunk)] / per_process for chunk in range(placement.num_chunks)]
    return Workload(
        model=nn.Sequential(
            *(SleepingLayer(share * FORWARD_SECONDS, share * BACKWARD_SECONDS, divisible) for share in shares)
        ),
        sizes=[1] * placement.num_chunks,
        data=sleeping_data,
        loss=no_loss,
        optimizer=partial(torch.optim.SGD, lr=0.0),
    )


# ---- a decoder


def real(placement: Placement, unbalanced: bool = False) -> Workload:
    """Returns a small decoder with equal blocks: two for each process, three for the slow process. It is wide and has a
    vocabulary of bytes, so that embedding and head cost little."""
    blocks_of = [round(2 * work) for work in work_of(placement.num_processes, unbalanced)]
    config = ModelConfig(
        vocab_size=256,
        sequence_length=SEQUENCE_LENGTH,
        dim=REAL_DIM,
        num_layers=sum(blocks_of),
        num_heads=4,
        num_kv_heads=4,
        hidden_dim=704,
    )
    model = decoder(config)
    initialise(model, config, seed=0)
    data, optimizer = random_data(config, 1, torch.device("cpu")), partial(torch.optim.AdamW, lr=1e-4)
    return Workload(model, layers_per_chunk(placement, blocks_of), data, next_token_loss, optimizer)


def random_data(config: ModelConfig, batch: int, device: torch.device) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    """Returns the data of a decoder: random tokens. batch: sequences in a microbatch."""
    shape = (NUM_MICROBATCHES, batch, config.sequence_length + 1)
    tokens = torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(device)
    pairs = [(sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()) for sequences in tokens]
    return lambda step, microbatch: pairs[microbatch % len(pairs)]


def layers_per_chunk(placement: Placement, blocks_of: Sequence[int]) -> list[int]:
    """Returns the number of layers in every chunk. blocks_of: the number of blocks of every process."""
    if placement.shape == "single":
        sizes = list(blocks_of)
    else:  # the first chunk of a process has the larger half
        sizes = [(blocks + 1) // 2 for blocks in blocks_of]
        sizes += [blocks_of[placement.process(chunk)] // 2 for chunk in range(len(sizes), placement.num_chunks)]
    sizes[0] += 1  # the embedding
    sizes[-1] += 1  # the head
    return sizes


# ---- a decoder for GPUs


@dataclass(frozen=True)
class GpuSetting:
    """Sizes of the decoder that is trained on GPUs, and the share of a GPU for each process."""

    dim: int = 2048
    blocks: int = 4
    """Number of blocks per process. It is even, because some schedules give a process two chunks."""
    sequence_length: int = 1024
    batch: int = 4
    """Number of sequences in a microbatch."""
    vocabulary: int = 256
    tied: bool = False
    """Whether embedding and head share a weight, for contenders that support it."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of weights and activations."""
    share: int | None = None
    """Percent of one GPU's multiprocessors for each process. None means a separate GPU for each process."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def tokens_per_microbatch(self) -> int:
        return self.batch * self.sequence_length

    @property
    def message_bytes(self) -> int:
        return self.tokens_per_microbatch * self.dim * self.torch_dtype.itemsize

    def activations(self, device: torch.device) -> Tensor:
        return torch.randn(self.batch, self.sequence_length, self.dim, dtype=self.torch_dtype, device=device)

    def config(self, num_processes: int, tied: bool = False) -> ModelConfig:
        return ModelConfig(
            vocab_size=self.vocabulary,
            sequence_length=self.sequence_length,
            dim=self.dim,
            num_layers=self.blocks * num_processes,
            num_heads=self.dim // HEAD_DIM,
            num_kv_heads=self.dim // HEAD_DIM,
            hidden_dim=round(8 * self.dim / 3 / 128) * 128,
            tied_embeddings=tied,
        )


def on_gpu(
    setting: GpuSetting, placement: Placement, device: torch.device, tied: bool = False, as_trained: bool = False
) -> Workload:
    """Returns the decoder for GPUs. A process creates only its own layers, on its device.

    as_trained: whether to train with Muon and error feedback, masters and gradients in float32 and working copies in
    the setting's dtype. Otherwise it trains with AdamW, all in the setting's dtype."""
    config = setting.config(placement.num_processes, tied)
    with on_meta():
        model = decoder(config)

    @torch.no_grad()
    def materialise(layers: nn.Sequential) -> None:
        layers.to(torch.float32 if as_trained else setting.torch_dtype)
        layers.to_empty(device=device)
        initialise(layers, config, seed=None)  # only position tables here; the weights follow
        generator = torch.Generator(device).manual_seed(0)
        for name, parameter in layers.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=0.02, generator=generator)

    optimizer = partial(torch.optim.AdamW, lr=1e-4, fused=True)
    groups = parameter_groups(Config(optimizer=OptimizerSection(newton_schulz_dtype="bfloat16")))
    return Workload(
        model,
        layers_per_chunk(placement, [setting.blocks] * placement.num_processes),
        random_data(config, setting.batch, device),
        next_token_loss,
        groups if as_trained else optimizer,
        device,
        prepare=materialise,
        num_warm_up_steps=NUM_GPU_WARM_UP_STEPS,
        precision=Precision.of(torch.float32, setting.torch_dtype) if as_trained else None,
    )
