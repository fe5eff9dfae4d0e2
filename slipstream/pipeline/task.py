"""What a run computes, the same on every stage, and what a stage reports of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor

from ..optim.correction import Alignment
from .clock import TimeSplit
from .reduction import Requests
from .sampling import Samples

Data = Callable[[int, int], tuple[Any, Any]]
"""Function from a step and a microbatch within it to (inputs, targets)."""

Loss = Callable[[Any, Any], Tensor]
"""Function from the outputs of the last layer and the targets to a scalar."""


@dataclass(frozen=True)
class EvaluationPart:
    """A part of the held-out data whose loss is also reported on its own, such as one of several corpora."""

    num_batches: int
    """Number of batches. The first part has the first batches, and so on."""
    scale: float | None = None
    """Factor of every batch's loss in the sum. None means 1 / num_batches, which gives their mean."""


@dataclass(frozen=True)
class Evaluation:
    """The held-out data, which is evaluated every few steps and after the last one. The pipeline is not drained for
    it."""

    data: Callable[[int], tuple[Any, Any]]
    """Function from the index of a batch to (inputs, targets)."""
    num_batches: int
    """Number of batches to evaluate."""
    every_steps: int = 0
    """Number of steps between two evaluations. 0 means only after the last step."""
    scale: float | None = None
    """Factor of every batch's loss in the sum. None means 1 / num_batches, which gives their mean."""
    samples: Samples | None = None
    """Prompts to continue after the batches, with the same weights. The model must be causal and return logits. Not for
    pipedream and paci, whose stages evaluate different weights."""
    parts: tuple[EvaluationPart, ...] = ()
    """Parts whose losses are reported too. Empty, or as many batches as there are in all."""

    @property
    def num_actions(self) -> int:
        """Returns the number of actions of an evaluation on each stage: the batches, and the tokens of the samples."""
        return self.num_batches + (0 if self.samples is None else self.samples.num_tokens)

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * (1 / max(1, self.num_batches) if self.scale is None else self.scale)

    def scaled_in_part(self, loss: Tensor, index: int) -> tuple[int, Tensor]:
        """Returns the part to which a batch belongs, and its loss as a summand of the part's."""
        number = bisect_right(list(accumulate(part.num_batches for part in self.parts)), index)
        part = self.parts[number]
        return number, loss * (1 / part.num_batches if part.scale is None else part.scale)


@dataclass(frozen=True)
class Task:
    """The data, loss and evaluation of a run, which are the same on every stage."""

    data: Data
    loss: Loss
    loss_scale: Callable[[int], float]
    """Function from a step to the factor of a microbatch's loss, such that the scaled losses add up to the batch's
    loss."""
    evaluation: Evaluation | None = None
    requests: Callable[[], Requests] = Requests
    """Function that is called at the end of every batch and returns the requests of this process."""
    skip_non_finite: bool = False
    """Whether to skip an update when an inf or nan occurs, instead of raising."""


@dataclass(frozen=True)
class StepReport:
    """The results of a step, reported after its update. They are the same on every stage that takes part in the
    reduction."""

    step: int
    """Index of the step, from 0."""
    loss: float
    """Loss of the batch, at the weights it ran with."""
    utilisations: tuple[float, ...]
    """Share of the time since the pipeline filled that each stage spent computing. nan before that. If updates do not
    wait for a sum over stages, this, `memory` and `splits` are those of a few steps earlier. Until those are known, the
    other stages have nan here and zeros there."""
    memory: tuple[int, ...]
    """Peak memory of each stage so far, of its device or of its process, in bytes."""
    splits: tuple[TimeSplit, ...]
    """Times of each stage between the ends of its last two batches."""
    gradient_norms: dict[str, float]
    """Gradient norm of each parameter group, before clipping. It is that of this stage alone if updates do not wait for
    a sum over stages."""
    alignments: dict[str, Alignment]
    """Quality of the prediction of the previous update, for each parameter group."""
    skipped: bool
    """Whether the update was skipped because of an inf or nan."""
    save: bool
    """Whether a process requested a checkpoint after this update."""
    busy: bool
    """Whether a process was still writing a checkpoint when the batch ended."""
    delay: int
    """Number of updates between the weights that the batch's first forward used and the weights to which this update is
    applied, on this stage."""


@dataclass(frozen=True)
class EvaluationReport:
    """The loss of the evaluation set at the master weights. It is known on the last stage."""

    step: int
    """Index of the step after which it was evaluated, from 0."""
    loss: float | None
    """Loss of the evaluation set. None on all stages but the last."""
    part_losses: tuple[float, ...] = ()
    """Loss of each of `Evaluation.parts`. Empty on all stages but the last."""
    samples: tuple[tuple[int, ...], ...] = ()
    """Token ids that continue each prompt of `Evaluation.samples`. Empty on all stages but the last."""
