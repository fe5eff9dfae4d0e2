"""What the rivals train: stages that sleep, which show the schedule and nothing else, a small decoder, and on GPUs a
larger one.

A workload is a list of layers and how many of them every chunk gets. A process holds one chunk or two, by the rival's
schedule; whatever the number, its work is the same.
"""

from __future__ import annotations

import ctypes
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...config.optimizers import parameter_groups
from ...config.schema import Config, OptimizerSection
from ...model.decoder import ModelConfig, decoder, initialise, next_token_loss
from ...optim import Group
from ...pipeline.partition import cut
from ...precision import Precision

FORWARD_SECONDS, BACKWARD_SECONDS = 0.010, 0.020
"""Of an emulated process and microbatch, in all its chunks together."""
SLOW_FACTOR = 1.5
"""How much more one process has to do where the workload is unbalanced."""
SEQUENCE_LENGTH = 256
"""Tokens of a real microbatch, which is one sequence."""
HEAD_DIM = 128
"""Of the decoder on GPUs."""
NUM_GPU_MICROBATCHES = 8
"""That differ; then they come again."""
NUM_GPU_WARM_UP_STEPS = 3
"""In which memory is reserved, kernels are chosen and links are connected."""


@dataclass(frozen=True)
class Workload:
    model: nn.Sequential
    sizes: list[int]
    """Layers of every chunk, in the order in which a microbatch passes through them."""
    data: Callable[[int, int], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    device: torch.device = torch.device("cpu")  # noqa: RUF009
    prepare: Callable[[nn.Sequential], None] | None = None
    """Gives a chunk its weights; None: the model has them."""
    activations: Callable[[], Tensor] | None = None
    """Makes something like what passes between chunks; None: it has to be computed."""
    num_warm_up_steps: int = 0
    """Steps of a run that count for nothing, before those of which `steady` chooses."""
    groups: Sequence[Group] = ()
    """slipstream: parameter groups to use instead of the optimizer."""
    precision: Precision | None = None
    """slipstream: of working copies and of gradients, if not the layers' own."""

    def chunk(self, index: int) -> nn.Sequential:
        layers = cut(self.model, self.sizes, index)
        if self.prepare is not None:
            self.prepare(layers)
        return layers


@dataclass(frozen=True)
class Placement:
    """Which process holds which chunks."""

    num_processes: int
    shape: str = "single"
    """single: one chunk each. loop: process i has chunks i and P + i. v: i and 2P - 1 - i."""

    @property
    def num_chunks(self) -> int:
        return self.num_processes * (1 if self.shape == "single" else 2)

    def process(self, chunk: int) -> int:
        last = self.num_chunks - 1
        return min(chunk, last - chunk) if self.shape == "v" else chunk % self.num_processes

    def chunks(self, process: int) -> list[int]:
        return [chunk for chunk in range(self.num_chunks) if self.process(chunk) == process]


def work_of(num_processes: int, unbalanced: bool) -> list[float]:
    """The share of work of every process: 1, or more on the one in the middle."""
    slow = num_processes // 2 if unbalanced else None
    return [SLOW_FACTOR if process == slow else 1.0 for process in range(num_processes)]


# ---- stages that sleep


def sleep_precisely() -> None:
    """Linux lets a sleep end up to 50 microseconds late to save power; this thread asks it not to."""
    if platform.system() == "Linux":
        set_timer_slack, one_nanosecond = 29, 1
        ctypes.CDLL(None).prctl(set_timer_slack, one_nanosecond, 0, 0, 0)


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))


class _Pace:
    """When what a layer's backward has done so far should have ended. A backward's nodes share one, so that the time
    between them counts as theirs."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        """Of either half."""
        self._ends_at = 0.0

    def begin(self) -> None:
        self._ends_at = time.perf_counter()

    def spend_half(self) -> None:
        self._ends_at += self.seconds
        _sleep_until(self._ends_at)


class _Whole(torch.autograd.Function):
    """A backward in one piece."""

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
    """Where the paths of input and weight meet. It is the first node of a backward, and of either half of one."""

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
    """The way to the input, or to the weight: half of a backward. Autograd goes it only if that gradient is wanted."""

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
    """Takes exactly as long as it is told, its arithmetic included. Divisible: half of the backward's time goes to the
    gradient of the input and half to that of the weight, for schedules that ask for one of them alone. That takes three
    nodes where one does, all of them Python, and stages that share cores feel it: only where it is needed."""

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
                x = x.detach().requires_grad_()  # the first stage has a path to its input too, as above an embedding
            pace = _Pace(self.backward_seconds / 2)
            outputs = _Meet.apply(_Path.apply(x, pace), _Path.apply(self.weight, pace), pace)
        _sleep_until(ends_at)
        return outputs


def _sleeping_data(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
    return torch.ones(1, 2), torch.zeros(1, 2)


def _no_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs * 0).sum()


def emulated(placement: Placement, unbalanced: bool = False, divisible: bool = False) -> Workload:
    work = work_of(placement.num_processes, unbalanced)
    per_process = placement.num_chunks / placement.num_processes
    shares = [work[placement.process(chunk)] / per_process for chunk in range(placement.num_chunks)]
    return Workload(
        model=nn.Sequential(
            *(SleepingLayer(share * FORWARD_SECONDS, share * BACKWARD_SECONDS, divisible) for share in shares)
        ),
        sizes=[1] * placement.num_chunks,
        data=_sleeping_data,
        loss=_no_loss,
        optimizer=partial(torch.optim.SGD, lr=0.0),
    )


# ---- a decoder


def real(placement: Placement, unbalanced: bool = False) -> Workload:
    """Blocks of one size, two to a process and three to the slow one; wide, and with a byte vocabulary, so that
    embedding and head weigh little."""
    blocks_of = [round(2 * work) for work in work_of(placement.num_processes, unbalanced)]
    config = ModelConfig(
        vocab_size=256,
        sequence_length=SEQUENCE_LENGTH,
        dim=256,
        num_layers=sum(blocks_of),
        num_heads=4,
        num_kv_heads=4,
        hidden_dim=704,
    )
    model = decoder(config)
    initialise(model, config, seed=0)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (8, 1, SEQUENCE_LENGTH + 1), generator=generator)

    def data(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        sequence = tokens[microbatch % len(tokens)]
        return sequence[:, :-1].contiguous(), sequence[:, 1:].contiguous()

    return Workload(
        model, layers_per_chunk(placement, blocks_of), data, next_token_loss, partial(torch.optim.AdamW, lr=1e-4)
    )


def layers_per_chunk(placement: Placement, blocks_of: Sequence[int]) -> list[int]:
    """Layers of every chunk. blocks_of: every process."""
    sizes = []
    for chunk in range(placement.num_chunks):
        process = placement.process(chunk)
        chunks = placement.chunks(process)
        blocks = blocks_of[process]
        is_first = chunk == chunks[0]
        sizes.append(blocks if len(chunks) == 1 else (blocks + 1) // 2 if is_first else blocks // 2)
    sizes[0] += 1  # the embedding
    sizes[-1] += 1  # the head
    return sizes


# ---- a decoder for GPUs


@dataclass(frozen=True)
class GpuSetting:
    """The decoder that is trained on GPUs, and how those are shared out."""

    dim: int = 2048
    blocks: int = 4
    """To a process; an even number, for the schedules that give it two chunks."""
    sequence_length: int = 1024
    batch: int = 4
    """Sequences to a microbatch."""
    vocabulary: int = 256
    tied: bool = False
    """Embedding and head share a weight, for rivals that can."""
    share: int | None = None
    """Percent of one GPU's multiprocessors for each process; None: a GPU for each."""

    @property
    def tokens_per_microbatch(self) -> int:
        return self.batch * self.sequence_length

    @property
    def message_bytes(self) -> int:
        return self.tokens_per_microbatch * self.dim * torch.bfloat16.itemsize

    def activations(self, device: torch.device) -> Tensor:
        return torch.randn(self.batch, self.sequence_length, self.dim, dtype=torch.bfloat16, device=device)

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


AS_TRAINED = Config(optimizer=OptimizerSection(newton_schulz_dtype="bfloat16"))


def on_gpu(
    setting: GpuSetting, placement: Placement, device: torch.device, tied: bool = False, as_trained: bool = False
) -> Workload:
    """A process makes its own layers alone, and on its device. as_trained: with Muon and error
    feedback, masters and gradients in float32 and working copies in bfloat16; otherwise with AdamW, all in bfloat16."""
    config = setting.config(placement.num_processes, tied)
    with torch.device("meta"):
        model = decoder(config)

    @torch.no_grad()
    def materialise(layers: nn.Sequential) -> None:
        layers.to(torch.float32 if as_trained else torch.bfloat16)
        layers.to_empty(device=device)
        initialise(layers, config, seed=None)  # the tables of positions; weights are drawn where they are needed
        generator = torch.Generator(device).manual_seed(0)
        for name, parameter in layers.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=0.02, generator=generator)

    generator = torch.Generator().manual_seed(0)
    shape = (NUM_GPU_MICROBATCHES, setting.batch, setting.sequence_length + 1)
    tokens = torch.randint(setting.vocabulary, shape, generator=generator).to(device)
    pairs = [(sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()) for sequences in tokens]
    return Workload(
        model,
        layers_per_chunk(placement, [setting.blocks] * placement.num_processes),
        lambda step, microbatch: pairs[microbatch % len(pairs)],
        next_token_loss,
        partial(torch.optim.AdamW, lr=1e-4, fused=True),
        device,
        prepare=materialise,
        activations=partial(setting.activations, device),
        num_warm_up_steps=NUM_GPU_WARM_UP_STEPS,
        groups=parameter_groups(AS_TRAINED) if as_trained else (),
        precision=Precision.of(torch.float32, torch.bfloat16) if as_trained else None,
    )


DIVISIBLE = "emulated, divisible"
WORKLOADS: dict[str, Callable[[Placement, bool], Workload]] = {
    "emulated": emulated,
    DIVISIBLE: partial(emulated, divisible=True),
    "real": real,
}
