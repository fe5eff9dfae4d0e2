"""Models of which only a part is trained: LoRA adapters (arXiv:2106.09685) through peft, and parameters frozen by name.

    model = PartlyTrained(decoder, Lora(rank=8, alpha=16.0))      # its projections get adapters, the rest is frozen
    model = PartlyTrained(decoder, freeze=("embedding.*",))

`PartlyTrained` is a ModelSpec around another one. Its layers have peft's modules in place of the projections, so
`block0.attention.query.weight` becomes `block0.attention.query.base_layer.weight`. The library peft is needed for
adapters (the extra `adapters`). There is no dropout: a pipeline repeats no draws.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from .spec import Loss, ModelSpec, generator

NAME = "default"
"""Name of the adapter in peft's modules, and so in the names of its parameters."""


@dataclass(frozen=True)
class Lora:
    rank: int
    alpha: float
    """The product of the two matrices is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Names of the linear projections that get adapters, such as "query". Empty means all."""


@dataclass(frozen=True)
class PartlyTrained(ModelSpec):
    """A model with frozen parameters."""

    base: ModelSpec
    lora: Lora | None = None
    """Adapters. They are trained, and everything else is frozen."""
    freeze: tuple[str, ...] = ()
    """Patterns of the names of further parameters to freeze, with * and ?."""

    def __post_init__(self) -> None:
        for name in ModelSpec.__annotations__:  # what is no method is as the base has it
            object.__setattr__(self, name, getattr(self.base, name))

    def layers_and_loss(self, loss_chunk_tokens: int = 0) -> tuple[nn.Sequential, Loss]:
        layers, loss = self.base.layers_and_loss(loss_chunk_tokens)
        if self.lora is not None:
            _inject(layers, self.lora)
        for name, parameter in layers.named_parameters(remove_duplicate=False):  # a tied weight by any of its names
            if any(fnmatchcase(name, pattern) for pattern in self.freeze):
                parameter.requires_grad_(False)
        return layers, loss

    def validate(self) -> None:
        self.base.validate()
        layers = self.meta_layers()
        names = [name for name, _ in layers.named_parameters(remove_duplicate=False)]
        for pattern in self.freeze:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(
                    f"train.freeze = {pattern!r} matches no parameter: their names are {names[0]}, {names[1]} and so on"
                )
        if not any(parameter.requires_grad for parameter in layers.parameters()):
            raise ValueError(f"train.freeze = {list(self.freeze)} leaves nothing to train: freeze less")

    @torch.no_grad()
    def initialise(self, layers: nn.Module, seed: int | None) -> None:
        """Initialises the base as usual. A is uniform with a bound of 1 / sqrt(inputs), as in peft, and B is zero, so
        that the model starts as the base."""
        if self.lora is None:
            self.base.initialise(layers, seed)
            return
        with _without_adapters(layers):
            self.base.initialise(layers, seed)
        if seed is None:
            return
        for name, parameter in layers.named_parameters():
            if is_adapter(name, "B"):
                parameter.zero_()
            elif is_adapter(name, "A"):
                draw = torch.rand(parameter.shape, generator=generator(seed, name), dtype=torch.float32, device="cpu")
                parameter.copy_(draw.mul_(2).sub_(1).mul_(parameter.shape[1] ** -0.5))

    def layer_flops(self) -> list[float]:
        added = [
            2.0 * sum(parameter.numel() for name, parameter in layer.named_parameters() if is_adapter(name))
            for layer in self.meta_layers()
        ]
        return [cost + more for cost, more in zip(self.base.layer_flops(), added, strict=True)]

    def flops_per_token(self) -> float:
        """Counts no gradients of frozen weights, but all gradients of activations."""
        layers = self.meta_layers()
        blocks_and_head = [name for name, _ in layers.named_children()][1:]
        weights = sum(
            parameter.numel()
            for name, parameter in layers.named_parameters(remove_duplicate=False)
            if parameter.requires_grad and parameter.ndim > 1 and name.split(".")[0] in blocks_and_head
        )
        return 2 * sum(self.layer_flops()) + self.num_layers * self.weightless_flops() + 2.0 * weights

    @property
    def steps_tied_weights(self) -> bool:
        return self.tied_embeddings and any(p.requires_grad for p in self.meta_layers()[0].parameters())

    # ---- as the base has it

    @property
    def layer_names(self) -> list[str]:
        return self.base.layer_names

    @property
    def weight_folder(self) -> Path | None:
        return self.base.weight_folder

    def weightless_flops(self) -> float:
        return self.base.weightless_flops()

    def num_active_parameters(self) -> int:
        added = self.num_parameters() - self.base.num_parameters()
        return self.base.num_active_parameters() + added

    def resized(self, num_layers: int, num_dense_layers: int = 0) -> Self:
        return replace(self, base=self.base.resized(num_layers, num_dense_layers))

    def separating(self, separator: int) -> Self:
        return replace(self, base=self.base.separating(separator))

    def facts(self) -> dict[str, Any]:
        lora = {} if self.lora is None else {"adapter": str(self.lora)}
        return self.base.facts() | lora | ({"freeze": str(self.freeze)} if self.freeze else {})


def is_adapter(name: str, letter: str = "") -> bool:
    """Returns whether a parameter belongs to an adapter, or is the matrix of this letter."""
    return any(f".lora_{each}." in name for each in letter or "AB")


def block_projections(layers: nn.Sequential) -> list[str]:
    """Returns the names of the linear projections of all layers but the first and the last."""
    blocks = {name for name, _ in list(layers.named_children())[1:-1]}
    linear = [name for name, module in layers.named_modules() if isinstance(module, nn.Linear)]
    return [name for name in linear if name.split(".")[0] in blocks]


def _inject(layers: nn.Sequential, lora: Lora) -> None:
    """Puts adapters into the linear projections of the blocks. Everything else is frozen."""
    peft, linear = _peft(), block_projections(layers)
    known = sorted({name.split(".")[-1] for name in linear})
    for target in lora.targets:
        if target not in known:
            raise ValueError(f"adapter.targets = {target!r} is no linear projection of a block: choose from {known}")
    chosen = [name for name in linear if name.split(".")[-1] in (lora.targets or known)]
    if not chosen:
        raise ValueError("adapter.rank needs linear projections in blocks, and this model has none: leave it out")
    peft.inject_adapter_in_model(peft_config(lora, chosen), layers, NAME)


def peft_config(lora: Lora, targets: list[str], **further: Any) -> Any:
    """Returns peft's own configuration of the adapters. The weights are not initialised by it."""
    alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    return _peft().LoraConfig(
        r=lora.rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0, init_lora_weights=False, **further
    )


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:  # it is missing, or too old for the transformers that it finds
        raise ValueError(f"adapter.rank needs the library peft ({error}): pip install 'slipstream[adapters]'") from None
    return peft


def _adapted(layers: nn.Module) -> dict[str, Any]:
    """Returns the modules that have adapters, by name."""
    kind = _peft().tuners.lora.LoraLayer
    return {name: module for name, module in layers.named_modules() if isinstance(module, kind)}


@contextmanager
def _without_adapters(layers: nn.Module) -> Iterator[None]:
    """Puts the projections of the base back into their places for the duration of the block."""
    adapted = _adapted(layers)
    for name, module in adapted.items():
        layers.set_submodule(name, module.base_layer)
    try:
        yield
    finally:
        for name, module in adapted.items():
            layers.set_submodule(name, module)


@torch.no_grad()
def merge(layers: nn.Module) -> None:
    """Adds the adapters to the weights of the base, and removes them: W <- W + alpha / rank B A."""
    for name, module in _adapted(layers).items():
        module.merge()
        layers.set_submodule(name, module.base_layer)
