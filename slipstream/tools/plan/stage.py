"""A stage as `MemoryModel` sees it: its place in the pipeline, its layers, and what its memory consists of."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ...model.spec import ModelSpec
from ...schedule import Traits


@dataclass(frozen=True)
class Stage:
    """The properties of a stage, apart from the model, on which its memory depends."""

    index: int
    num_stages: int
    first_layer: int
    """Index of the first layer, where the embedding is layer 0."""
    num_layers: int
    versions: int
    """Number of weight versions that the schedule keeps on this stage."""
    delay: int
    in_flight: float
    """Maximum number of microbatches whose activations are held at once, in units of a whole stage."""
    max_in_flight: float
    """The same on the stage with the most. Links keep that many messages."""
    traits: Traits
    num_replicas: int = 1
    """Number of replicas of the whole pipeline."""


@dataclass(frozen=True)
class StageMemory:
    """Memory of a stage in bytes."""

    weights: int
    """All weight versions, masters, and the rotary tables."""
    gradients: int
    optimizer: int
    """Optimizer state and, in mixed precision, the sample of an update that is compared with the next one."""
    activations: int
    """Activations of all microbatches in flight, including the messages between stages that they hold."""
    messages: int
    """Receive buffers that wait for messages, and sent messages that are not yet released."""
    work: int
    """Temporary memory of a backward or of an update, whichever is larger."""
    overlap: int
    """The smaller of the two, if both can happen at the same time. This is rare, but will happen in a long run."""

    @property
    def total(self) -> int:
        """Expected peak."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.messages + self.work

    @property
    def most(self) -> int:
        """Upper bound of the peak, without the internal memory of kernels."""
        return self.total + self.overlap


@dataclass(frozen=True)
class Layers:
    """The layers of a stage. Dense blocks come before blocks with experts."""

    embedding: bool
    dense: int
    sparse: int
    """Number of blocks with experts."""
    head: bool

    @property
    def blocks(self) -> int:
        return self.dense + self.sparse

    def few(self, most: int) -> Layers:
        """Returns the same layers with at most so many blocks of each kind."""
        return replace(self, dense=min(self.dense, most), sparse=min(self.sparse, most))

    def part(self, share: float) -> Layers:
        """Returns the same layers with a share of the blocks of each kind."""
        return replace(self, dense=math.ceil(share * self.dense), sparse=math.ceil(share * self.sparse))


def dense_blocks(count: int) -> Layers:
    return Layers(False, count, 0, False)


def sparse_blocks(count: int) -> Layers:
    return Layers(False, 0, count, False)


def layers_of(model: ModelSpec, first: int, count: int) -> Layers:
    """Returns consecutive layers, where the embedding is layer 0."""
    num_dense = model.num_layers - model.num_sparse_layers
    begin, end = max(first, 1), min(first + count, model.num_layers + 1)
    dense = max(0, min(end, num_dense + 1) - begin)
    return Layers(first == 0, dense, max(0, end - begin) - dense, first + count == model.num_layers + 2)


@dataclass(frozen=True)
class Passes:
    """Memory of one microbatch that passes through the layers of a stage."""

    parameters: int
    """Number of values in all parameters that are trained. The other fields are bytes, except for the next."""
    frozen: int
    """Number of values in parameters that are frozen, of which there is one copy."""
    working: int
    """Size of one working copy. Some parameters may keep their own dtype."""
    buffers: int
    activations: int
    """Memory that is held between forward and backward."""
    forward_work: int
    """Peak of a forward, above the memory that remains after it."""
    backward_work: int
    """Peak of a backward that adds to existing gradients, above the memory at its start."""


@dataclass(frozen=True)
class Stepping:
    """Properties of a stage's updates on which their memory depends."""

    separate: bool
    """Whether the masters are a separate copy of the weights."""
    predicts: bool
    """Whether the working copies run ahead of the masters."""
    beside: bool
    """Whether the update runs in the background, which holds the gradients of the batch until the update has ended."""
    error_feedback: float


@dataclass(frozen=True)
class Update:
    optimizer: int
    """Bytes of the optimizer state, and of the sample of an update that is compared with the next one."""
    work: int
    """Peak memory of an update, above the memory at its start."""
    values: int
    """Number of values that are stepped on this device."""
    bytes_by_group: tuple[float, ...]
    """Bytes in `optimizer` for each value, by parameter group."""
