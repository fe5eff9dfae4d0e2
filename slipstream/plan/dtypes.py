"""Which numbers of a run are kept, computed, added up and sent in which dtype: a configuration's choice, resolved."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..config import Config


@dataclass(frozen=True)
class Dtypes:
    master: torch.dtype
    """Of the weights that the optimizer steps, and of its state."""
    compute: torch.dtype
    """Of the working copies, activations and messages."""
    gradient: torch.dtype
    """That a step's gradients are added up in."""
    reduction: torch.dtype
    """That the gradients of replicas are added up in."""

    @classmethod
    def of(cls, config: Config) -> Dtypes:
        """As the trainer resolves what is left out."""
        train = config.train
        gradient = train.gradient_dtype or train.dtype
        names = train.dtype, train.compute_dtype or train.dtype, gradient, train.reduction_dtype or gradient
        return cls(*(getattr(torch, name) for name in names))

    @property
    def is_mixed(self) -> bool:
        """Masters are kept apart from the working copies, whatever the schedule."""
        return self.compute != self.master

    def __str__(self) -> str:
        return f"{_name(self.compute)} with masters in {_name(self.master)}" if self.is_mixed else _name(self.master)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
