"""In which dtype a run keeps, computes, adds up and sends its numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """The dtypes of a run. `Precision.of` fills in what is left out."""

    master: torch.dtype
    """The weights that the optimizer steps, and its state. `Pipeline` takes it from the layers it is given."""
    compute: torch.dtype
    """The working copies of the weights, activations and messages. Parameters that a module names in its attribute
    `keeps_dtype` keep theirs."""
    gradient: torch.dtype
    """The sum of a step's gradients over microbatches."""
    reduction: torch.dtype
    """The sum of gradients over replicas, and the gradients of tied weights between stages."""

    @classmethod
    def of(
        cls,
        master: torch.dtype,
        compute: torch.dtype | None = None,
        gradient: torch.dtype | None = None,
        reduction: torch.dtype | None = None,
    ) -> Precision:
        """None: compute and gradient are as the masters, reduction is as the gradients."""
        gradient = gradient or master
        return cls(master, compute or master, gradient, reduction or gradient)

    @property
    def is_mixed(self) -> bool:
        """Whether masters are kept apart from the working copies, whatever the schedule."""
        return self.compute != self.master

    def __str__(self) -> str:
        return f"{_name(self.compute)} with masters in {_name(self.master)}" if self.is_mixed else _name(self.master)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
