"""Counts the bytes of all live tensors, and their peak. So it tells what an allocator would report, on any device.

    live = LiveBytes()
    with live.watch():
        loss = model(inputs).sum()
    live.now, live.peak

Every storage that an operation creates in a watched thread counts until it is freed, wherever that happens. Storages
that existed before do not count, nor does memory that a kernel allocates internally. On the meta device storages have
sizes but no memory, so a stage of any size can be measured on a laptop. `fuse_kernels` replaces operations in the
layers by stand-ins for the fused kernels of a real device, which keep less memory.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode  # private, because torch has no public API for this

Kernels = Literal["cpu", "cuda"]


class LiveBytes:
    def __init__(self) -> None:
        self.now = 0
        self.peak = 0
        self._lock = threading.RLock()  # a storage may be freed during an operation of the same thread
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def watch(self) -> TorchDispatchMode:
        """Returns a context that counts the storages that this thread creates. Several threads may share one
        counter."""
        return _Watch(self)

    def restart_peak(self) -> None:
        self.peak = self.now

    def add(self, tensor: Tensor, inputs: Sequence[Tensor] = ()) -> None:
        """Adds the storage of a tensor that an operation returned. If it is also the storage of an input, it existed
        before, and is only registered."""
        storage = tensor.untyped_storage()
        key = id(storage)  # torch keeps one Python object per storage as long as the storage lives
        if key in self._known:
            return
        is_old = any(id(other.untyped_storage()) == key for other in inputs)
        with self._lock:
            size = 0 if is_old else storage.nbytes()
            self._known[key] = weakref.ref(storage, lambda _: self._remove(key, size))
            self.now += size
            self.peak = max(self.peak, self.now)

    def _remove(self, key: int, size: int) -> None:
        with self._lock:
            self._known.pop(key, None)
            self.now -= size


class _Watch(TorchDispatchMode):
    def __init__(self, live: LiveBytes) -> None:
        super().__init__()
        self._live = live

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        inputs: list[Tensor] | None = None
        for tensor in _tensors(result):
            if inputs is None:
                inputs = list(_tensors((*args, *(kwargs or {}).values())))
            self._live.add(tensor, inputs)
        return result


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


# ---- fused kernels of real devices


def fuse_kernels(model: nn.Sequential, kernels: Kernels) -> None:
    """Makes attention, and on CUDA also norms, keep as much memory on the meta device as the fused kernels of a real
    device. The meta device itself would compose both from small operations, and keep every length x length matrix of
    attention.

    It changes the layers instead of the context in which they run, because a recomputed layer runs during a backward,
    where no such mode is active."""
    for layer in model:
        setattr(layer, "forward", _fused(layer.forward, kernels))  # noqa: B010 (mypy rejects an assignment to a method)


def _fused(forward: Callable[..., Any], kernels: Kernels) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with _Fused(kernels):
            return forward(*args)

    return run


class _Fused(TorchFunctionMode):
    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self._kernels = kernels

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            return _Attention.apply(*args[:3], self._kernels)
        if function is F.rms_norm and self._kernels == "cuda":
            return _Norm.apply(args[0], kwargs["weight"] if "weight" in kwargs else args[2])
        return function(*args, **kwargs)


class _Attention(torch.autograd.Function):
    """Stand-in for fused attention. It keeps queries, keys, values, the output and one number per query and head. On
    CUDA, for fp32 it models the memory-efficient kernel, whose output has the memory layout that the next layer reads.
    For bf16 it models flash attention, which accumulates the gradient of the queries in fp32, and computes the
    gradients of shared keys and values once per query head."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, kernels: Kernels) -> Tensor:
        batch, heads, length, width = query.shape
        if kernels == "cuda":
            output = query.new_empty(batch, length, heads, width).transpose(1, 2)
            sums = query.new_empty(batch, heads, -(-length // 32) * 32, dtype=torch.float32)
        else:
            output = query.new_empty(batch, heads, length, width)
            sums = query.new_empty(batch, length, heads, dtype=_precise(query))
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.kernels = kernels
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, output, _ = ctx.saved_tensors
        work = []
        if ctx.kernels == "cuda" and query.itemsize >= 4:
            work = [torch.empty_like(output)]  # output times its gradient
        elif ctx.kernels == "cuda":
            work = [torch.empty_like(query, dtype=torch.float32)]
            if key.shape[1] != query.shape[1]:
                work += [torch.empty_like(query), torch.empty_like(query)]
        results = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None
        work.clear()
        return results


def _precise(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=_precise(x)))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)
