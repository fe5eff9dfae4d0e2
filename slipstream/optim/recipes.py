"""Optimizers of others, known by name: which class, with which arguments, for which parameters.

A recipe turns a learning rate into what `Group.optimizer` wants. The classes are those of torch, and of
pytorch_optimizer, which is optional and imported when a recipe is used. All read the learning rate of their param group
at every step. Their own weight decay is always 0: the group's acts on the masters, and error feedback does not
extrapolate it.

What was read in pytorch_optimizer 4.1.0, and for nadamw in torch 2.13:

             writes p.grad   waits for the device   looks beyond a single number
    normuon  yes             no                     Newton-Schulz, in bf16 whatever the parameter's dtype
    soap     no              at step 1 (eigh)       eigenbases; their QR is in fp32 even for fp64 parameters
    scion    no              no                     Newton-Schulz in bf16, and the update stays rounded to bf16
    adan     no              no                     no
    lion     no              no                     no
    mars     no              no                     every tensor's corrected gradient is clipped to norm 1
    nadamw   no              no                     no; its step counts are tensors on the CPU

All but soap batch their tensors (`foreach`; torch does so on a GPU). That saves launches, and is the only path of mars
that does not wait for the device and the only one of adan that leaves the gradient alone; it takes temporaries as large
as the group's parameters, three times over for mars. normuon and scion stack the matrices of one shape, and how many
share a stack changes the last bits of bf16: two cuts of a model agree to about 1 % of an update. To compare schedules,
use muon.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

from torch import nn
from torch.optim import Optimizer


@dataclass(frozen=True)
class Recipe:
    path: str
    """Import path of the class."""
    learning_rate: float
    """To begin with: the best of docs/results/delay.md, Learning rates; of scion and nadamw as the comments say."""
    arguments: Mapping[str, float]
    """Its hyper-parameters, and all that `optimizer.arguments` may change. What is whole here stays whole."""
    betas: tuple[str, ...] = ()
    """Which of the arguments the class takes together, as its `betas`."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """What its use here requires."""
    group: Mapping[str, Any] = field(default_factory=dict)
    """What the class requires of its param group."""
    matrices_only: bool = False
    """Takes hidden matrices alone, and leaves embedding, head and norms to AdamW."""
    elementwise: bool = False
    """Treats every number of a parameter alone, so that parameters may be laid end to end in one tensor."""

    def optimizer(self, lr: float, changes: Mapping[str, float]) -> Callable[[list[nn.Parameter]], Optimizer]:
        """For `Group.optimizer`. Imports the class: ImportError or AttributeError where it cannot be had."""
        module, _, name = self.path.rpartition(".")
        cls = getattr(import_module(module), name)
        values: dict[str, Any] = {key: type(value)(changes.get(key, value)) for key, value in self.arguments.items()}
        if self.betas:
            values["betas"] = tuple(values.pop(key) for key in self.betas)
        keywords = {**values, **self.fixed, "lr": lr, "weight_decay": 0.0}
        return partial(_make, cls, self, keywords)


def _make(cls: type[Optimizer], recipe: Recipe, keywords: dict[str, Any], parameters: list[nn.Parameter]) -> Optimizer:
    if recipe.matrices_only:
        for parameter in parameters:
            # A stack of matrices would be taken for one matrix, without a word.
            if parameter.ndim != 2:
                raise ValueError(
                    f"{cls.__name__} needs matrices (2-D) and was given a parameter of shape "
                    f"{tuple(parameter.shape)}: muon takes stacks of them, AdamW everything"
                )
    return cls([{"params": parameters, **recipe.group}], **keywords)


RECIPES: dict[str, Recipe] = {
    # arXiv:2510.05491: Muon whose rows are scaled by their second moment. preserve_norm then gives the update back its
    # norm, and the factor for the shape is that of our Muon's scale "spectral": its learning rates carry over.
    "normuon": Recipe(
        "pytorch_optimizer.NorMuon",
        0.02,
        {"momentum": 0.95, "beta2": 0.95, "nesterov": True, "ns_steps": 5},
        fixed={"update_scale": "preserve_norm", "foreach": True},
        group={"use_muon": True},  # it asks which part of itself to use: its other half is an AdamW
        matrices_only=True,
    ),
    # arXiv:2409.11321 and its code: Adam in the eigenbasis of Shampoo's preconditioner. The first step only makes that
    # basis, of one gradient, and leaves the parameters as they are. A matrix that is not square has a gradient of too
    # low a rank for it: what is missing is chosen by the last bit, so runs that differ in one soon differ visibly.
    "soap": Recipe(
        "pytorch_optimizer.SOAP",
        0.003,
        {"beta1": 0.95, "beta2": 0.95, "eps": 1e-8, "precondition_frequency": 10, "max_precondition_dim": 10000},
        betas=("beta1", "beta2"),
        matrices_only=True,
    ),
    # arXiv:2502.07529 and its code. `momentum` is the weight of the new gradient: 0.1 is a beta of 0.9. `scale` is the
    # radius. With 1 an update has the spectral norm lr sqrt(rows / columns), as Muon's for tall matrices; the authors'
    # 50 at a rate of 2^-12 is 1 at 0.012. Their constraint shrinks the weights by 1 - lr in here, where error feedback
    # would extrapolate it: it is left out, and scale 50 with optimizer.weight_decay = 1 does the same. Embedding and
    # head go to AdamW, not to their sign norm.
    "scion": Recipe(
        "pytorch_optimizer.SCION",
        0.012,
        {"momentum": 0.1, "scale": 1.0},
        fixed={"norm_type": 2, "constraint": False, "foreach": True},  # 2: LMONorm.SPECTRAL
        matrices_only=True,
    ),
    # arXiv:2208.06677. The library has the authors' general betas; their GPT-2 was trained with a beta3 of 0.95
    # (gpt2/checkpoints/gpt2-adan/gpt_args in sail-sg/Adan).
    "adan": Recipe(
        "pytorch_optimizer.Adan",
        0.001,
        {"beta1": 0.98, "beta2": 0.92, "beta3": 0.95, "eps": 1e-8},
        betas=("beta1", "beta2", "beta3"),
        fixed={"foreach": True},
        elementwise=True,
    ),
    # arXiv:2302.06675 found (0.9, 0.99) and took (0.95, 0.98) for T5, for stability.
    "lion": Recipe(
        "pytorch_optimizer.Lion",
        0.0001,
        {"beta1": 0.95, "beta2": 0.98},
        betas=("beta1", "beta2"),
        fixed={"foreach": True},
        elementwise=True,
    ),
    # arXiv:2411.10438, its AdamW form. optimize_1d: norms too, instead of by an AdamW inside with a rate of its own.
    "mars": Recipe(
        "pytorch_optimizer.MARS",
        0.001,
        {"beta1": 0.95, "beta2": 0.99, "gamma": 0.025, "eps": 1e-8},
        betas=("beta1", "beta2"),
        fixed={"mars_type": "adamw", "optimize_1d": True, "foreach": True},
    ),
    # arXiv:2505.01099 and its code: NAdam with a beta1 of 0.99. torch lets the weight of the momentum grow as
    # mu = beta1 (1 - 0.96^(momentum_decay t) / 2) and gives the rest, half at first, to the bare gradient. The authors'
    # momentum_decay of 0.004 brings mu to beta1 within their 50,000 steps, but only to 0.57 in the first 1,000. 0.1
    # does in 2,000 steps what theirs does in 50,000, and 200 / train.steps in all; 0 would hold mu at beta1 / 2.
    "nadamw": Recipe(
        "torch.optim.NAdam",
        0.001,  # AdamW's; it was not swept
        {"beta1": 0.99, "beta2": 0.999, "eps": 1e-8, "momentum_decay": 0.1},
        betas=("beta1", "beta2"),
        elementwise=True,
    ),
}
