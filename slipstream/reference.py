"""Runs the whole algorithm in one process, slowly and simply. Every pipeline is compared with this reference.

It keeps what the paper keeps: weights and the previous update. It copies weights wherever that is clearer.

    z[t]   = x[t+1] + lam d u[t-1]                             the undelayed iterate
    z[t+1] = (1 - lr wd) z[t] - u[t]                           u[t] from the gradient at x[t]
    x[t+2] = z[t+1] - lam d u[t]                               equals x[t+1] - u[t] - lam (u[t] - u[t-1]) for d = 1

If the optimizer predicts another update than the last one (AdamW), that prediction replaces the u's that are multiplied
by lam.

`delays[s]` is the delay d of stage s: all 0 for a synchronous run, all 1 for 2BW, P-1-s for PipeDream. The code shares
only the optimizers and their groups with the pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .optim import AdamW
from .optim.groups import Group, assign


@torch.enable_grad()
def reference_run(
    model: nn.Sequential,
    *,
    data: Callable[[int, int], tuple[Any, Any]],
    loss: Callable[[Any, Any], Tensor],
    groups: Sequence[Group],
    num_microbatches: int,
    num_steps: int,
    delays: Sequence[int] = (0,),
    layers_per_stage: Sequence[int] | None = None,
    sync_start_steps: int = 0,
    learning_rate: Callable[[int], float] = lambda step: 1.0,
    loss_scale: Callable[[int], float] | None = None,
    skip_non_finite: bool = False,
    drift_warmups: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    gradient_dtype: torch.dtype | None = None,
) -> tuple[dict[str, Tensor], list[float]]:
    """Trains a model with the whole algorithm in one process. Returns the final z of every parameter and the loss of
    every step. Parameters with requires_grad=False are frozen, and not among them.

    `model` itself is left at its last weights.

    drift_warmups: for PACI. On stage s, the forward of a microbatch reads the version that was newest drift_warmups[s]
    microbatches ago, and its backward reads the newest.

    dtype: x is rounded to it before anything is computed; z keeps the dtype of the model's parameters. gradient_dtype:
    dtype in which the gradients of a step are added. None means the dtype of x.
    """
    m = num_microbatches
    for frozen in (p for p in model.parameters() if not p.requires_grad):
        frozen.data = frozen.data.to(dtype or frozen.dtype)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    stage_of = _stages(model, layers_per_stage or [len(model)])
    delay_of = {name: delays[stage_of[name]] for name in parameters}

    # x[name][v]: the weights of version v; predicted[name]: the latest update, already multiplied by lam d.
    x = {name: [p.detach().to(dtype or p.dtype, copy=True)] for name, p in parameters.items()}
    z = {name: p.detach().clone() for name, p in parameters.items()}
    predicted = {name: torch.zeros_like(p) for name, p in parameters.items()}
    masters = {name: nn.Parameter(p.detach().clone()) for name, p in parameters.items()}
    assigned = [(group, members) for group, members in assign(list(masters.items()), groups) if members]
    optimizers = [group.optimizer([p for _, p in members]) for group, members in assigned]
    base_rates = [[g["lr"] for g in optimizer.param_groups] for optimizer in optimizers]
    losses = []

    for step in range(num_steps):
        synchronous = step < sync_start_steps
        step_loss = 0.0
        gradients = {
            name: torch.zeros_like(p, dtype=gradient_dtype or dtype, requires_grad=False)
            for name, p in parameters.items()
        }
        for microbatch in range(m):
            for name, parameter in parameters.items():
                if synchronous:
                    version = step
                elif drift_warmups is not None:
                    version = max(sync_start_steps, (step * m + microbatch - drift_warmups[stage_of[name]]) // m)
                else:
                    version = max(sync_start_steps, step - delay_of[name])
                parameter.data = x[name][version].clone()
                parameter.grad = None
            inputs, targets = data(step, microbatch)
            scale = 1 / m if loss_scale is None else loss_scale(step)
            microbatch_loss = loss(model(inputs), targets) * scale
            if drift_warmups is not None:
                for name, parameter in parameters.items():
                    parameter.data.copy_(x[name][step])
            microbatch_loss.backward()
            step_loss += float(microbatch_loss.detach())
            for name, parameter in parameters.items():
                if parameter.grad is not None:
                    gradients[name] += parameter.grad
        losses.append(step_loss)

        norms = [
            math.sqrt(math.fsum(float(gradients[name].double().square().sum()) for name, _ in members))
            for _, members in assigned
        ]
        finite = math.isfinite(step_loss) and all(map(math.isfinite, norms))
        if not finite and not skip_non_finite:
            raise RuntimeError(f"step {step} has a loss of {step_loss} and gradient norms of {norms}")

        for (group, members), optimizer, rates, norm in zip(assigned, optimizers, base_rates, norms, strict=True):
            for param_group, rate in zip(optimizer.param_groups, rates, strict=True):
                param_group["lr"] = rate * learning_rate(step)
            clip = 1.0 if group.clip_norm is None else min(1.0, group.clip_norm / (norm + 1e-6))
            before = {}
            for name, master in members:
                before[name] = z[name] if dtype else x[name][-1] + predicted[name]  # a rounded x does not determine z
                if finite:
                    before[name] = before[name] * (1 - optimizer.param_groups[0]["lr"] * group.weight_decay)
                master.data = before[name].clone()
                master.grad = (gradients[name] * clip).to(master.dtype)
            if finite:
                optimizer.step()
            for name, master in members:
                update = before[name] - master.detach()
                expected = _expected(optimizer, master) if finite else None
                horizon = 0 if synchronous else delay_of[name]
                predicted[name] = group.error_feedback * horizon * (update if expected is None else expected)
                x[name].append((master.detach() - predicted[name]).to(dtype or master.dtype))
                z[name] = master.detach().clone()

    return {name: z[name] if dtype else x[name][-1] + predicted[name] for name in parameters}, losses


def _expected(optimizer: torch.optim.Optimizer, master: nn.Parameter) -> Tensor | None:
    """Returns the update that is predicted next: that of AdamW with Nesterov's term. None means the last update
    again."""
    group = next(group for group in optimizer.param_groups if any(p is master for p in group["params"]))
    if not isinstance(optimizer, AdamW) or group["predictor"] == "last":
        return None
    state, gradient = optimizer.state[master], master.grad
    assert gradient is not None
    weight = group["beta1"]
    mean = (weight * state["mean"] + (1 - weight) * gradient) / (1 - weight ** state["step"])
    root = (state["square"] / (1 - group["beta2"] ** state["step"])).sqrt()
    expected: Tensor = group["lr"] * mean / (root + group["eps"])
    return expected


def _stages(model: nn.Sequential, layers_per_stage: Sequence[int]) -> dict[str, int]:
    """Maps the name of every parameter to its stage."""
    stage_of_layer = [stage for stage, size in enumerate(layers_per_stage) for _ in range(size)]
    layers = [name for name, _ in model.named_children()]
    return {name: stage_of_layer[layers.index(name.split(".")[0])] for name, _ in model.named_parameters()}
