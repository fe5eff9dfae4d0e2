"""Recipes for optimizers from other packages, by name: the class, its arguments, and the parameters it updates.

A recipe turns a learning rate into a function for `Group.optimizer`. The classes are those of torch, and of
pytorch_optimizer, which is optional and imported when a recipe is used. All read the learning rate of their param group
at every step. Their own weight decay is always 0: that of the group acts on the master weights, and error feedback does
not extrapolate it.

Properties of the implementations in pytorch_optimizer 4.1.0, and for nadamw in torch 2.13:

             writes p.grad   waits for the device   looks beyond a single number
    normuon  yes             no                     Newton-Schulz, in bf16 for every dtype of the parameter
    soap     no              at step 1 (eigh)       eigenbases; their QR is in fp32 even for fp64 parameters
    scion    no              no                     Newton-Schulz in bf16, and the update stays rounded to bf16
    adan     no              no                     no
    lion     no              no                     no
    mars     no              no                     the corrected gradient of every tensor is clipped to norm 1
    nadamw   no              no                     no; its step counts are tensors on the CPU

All except soap batch their tensors (`foreach`; torch does so on a GPU). This saves kernel launches. For mars it is the
only code path that does not wait for the device, and for adan the only one that does not modify the gradient. It needs
temporaries as large as the parameters of the group, and three times as large for mars. normuon and scion stack the
matrices of one shape. The number of matrices in a stack changes the last bits in bf16: two cuts of a model agree to
about 1 % of an update. To compare schedules, use muon.
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
    """Default learning rate: the best of docs/results/delay.md, Learning rates. For scion and nadamw see the comments
    below."""
    arguments: Mapping[str, float]
    """Hyperparameters with their defaults. `optimizer.arguments` can change these and no others. Integers stay
    integers."""
    betas: tuple[str, ...] = ()
    """Names of the arguments that the class takes together, as its `betas`."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that are required for its use in this package."""
    group: Mapping[str, Any] = field(default_factory=dict)
    """Entries that the class requires in its param group."""
    matrices_only: bool = False
    """Whether the optimizer updates only hidden matrices, so that AdamW updates embedding, head and norms."""
    elementwise: bool = False
    """Whether the optimizer treats every number of a parameter independently, so that parameters may be concatenated in
    one tensor."""

    def optimizer(self, lr: float, changes: Mapping[str, float]) -> Callable[[list[nn.Parameter]], Optimizer]:
        """Returns a function for `Group.optimizer`.

        Imports the class, and raises an ImportError or AttributeError if it is not available.
        """
        module, _, name = self.path.rpartition(".")
        cls = getattr(import_module(module), name)
        values: dict[str, Any] = {key: type(value)(changes.get(key, value)) for key, value in self.arguments.items()}
        if self.betas:
            values["betas"] = tuple(values.pop(key) for key in self.betas)
        keywords = {**values, **self.fixed, "lr": lr, "weight_decay": 0.0}
        return partial(self._make, cls, keywords)

    def _make(self, cls: type[Optimizer], keywords: dict[str, Any], parameters: list[nn.Parameter]) -> Optimizer:
        for parameter in parameters:
            # The class would silently treat a stack of matrices as one matrix.
            if self.matrices_only and parameter.ndim != 2:
                raise ValueError(
                    f"{cls.__name__} needs matrices (2-D) and was given a parameter of shape "
                    f"{tuple(parameter.shape)}: muon takes stacks of them, AdamW everything"
                )
        return cls([{"params": parameters, **self.group}], **keywords)


RECIPES: dict[str, Recipe] = {
    # arXiv:2510.05491: Muon whose rows are scaled by their second moment. preserve_norm then restores the norm of the
    # update. The factor for the shape is that of our Muon with scale "spectral", so the same learning rates can be
    # used.
    "normuon": Recipe(
        "pytorch_optimizer.NorMuon",
        0.02,
        {"momentum": 0.95, "beta2": 0.95, "nesterov": True, "ns_steps": 5},
        fixed={"update_scale": "preserve_norm", "foreach": True},
        group={"use_muon": True},  # selects the Muon part of the class, which also contains an AdamW
        matrices_only=True,
    ),
    # arXiv:2409.11321 and its code: Adam in the eigenbasis of Shampoo's preconditioner. The first step only computes
    # that basis, from one gradient, and does not change the parameters. The gradient of a matrix that is not square has
    # too low a rank to determine the whole basis. The rest of the basis is decided by rounding, so runs that differ in
    # one bit soon differ visibly.
    "soap": Recipe(
        "pytorch_optimizer.SOAP",
        0.003,
        {"beta1": 0.95, "beta2": 0.95, "eps": 1e-8, "precondition_frequency": 10, "max_precondition_dim": 10000},
        betas=("beta1", "beta2"),
        matrices_only=True,
    ),
    # arXiv:2502.07529 and its code. `momentum` is the weight of the new gradient: 0.1 is a beta of 0.9. `scale` is the
    # radius. With 1 an update has the spectral norm lr sqrt(rows / columns), as in Muon for tall matrices. The authors'
    # 50 at a rate of 2^-12 equals 1 at 0.012. Their constraint multiplies the weights by 1 - lr inside the optimizer,
    # where error feedback would extrapolate it. So it is switched off here; scale 50 with optimizer.weight_decay = 1
    # does the same. Embedding and head are updated by AdamW, not with their sign norm.
    "scion": Recipe(
        "pytorch_optimizer.SCION",
        0.012,
        {"momentum": 0.1, "scale": 1.0},
        fixed={"norm_type": 2, "constraint": False, "foreach": True},  # 2: LMONorm.SPECTRAL
        matrices_only=True,
    ),
    # arXiv:2208.06677. The library has the authors' general betas. Their GPT-2 was trained with a beta3 of 0.95
    # (gpt2/checkpoints/gpt2-adan/gpt_args in sail-sg/Adan).
    "adan": Recipe(
        "pytorch_optimizer.Adan",
        0.001,
        {"beta1": 0.98, "beta2": 0.92, "beta3": 0.95, "eps": 1e-8},
        betas=("beta1", "beta2", "beta3"),
        fixed={"foreach": True},
        elementwise=True,
    ),
    # arXiv:2302.06675 found (0.9, 0.99), and used (0.95, 0.98) for T5, for stability.
    "lion": Recipe(
        "pytorch_optimizer.Lion",
        0.0001,
        {"beta1": 0.95, "beta2": 0.98},
        betas=("beta1", "beta2"),
        fixed={"foreach": True},
        elementwise=True,
    ),
    # arXiv:2411.10438, its AdamW form. With optimize_1d it also updates norms; otherwise an AdamW inside the class
    # would update them, with its own learning rate.
    "mars": Recipe(
        "pytorch_optimizer.MARS",
        0.001,
        {"beta1": 0.95, "beta2": 0.99, "gamma": 0.025, "eps": 1e-8},
        betas=("beta1", "beta2"),
        fixed={"mars_type": "adamw", "optimize_1d": True, "foreach": True},
    ),
    # arXiv:2505.01099 and its code: NAdam with a beta1 of 0.99. In torch the weight of the momentum grows as mu = beta1
    # (1 - 0.96^(momentum_decay t) / 2), and the plain gradient has the rest, which is half at first. The authors'
    # momentum_decay of 0.004 brings mu to beta1 within their 50,000 steps, but only to 0.57 in the first 1,000. A value
    # of 0.1 does in 2,000 steps what theirs does in 50,000; in general use 200 / train.steps. 0 would keep mu at beta1
    # / 2.
    "nadamw": Recipe(
        "torch.optim.NAdam",
        0.001,  # that of AdamW; there was no sweep
        {"beta1": 0.99, "beta2": 0.999, "eps": 1e-8, "momentum_decay": 0.1},
        betas=("beta1", "beta2"),
        elementwise=True,
    ),
}
