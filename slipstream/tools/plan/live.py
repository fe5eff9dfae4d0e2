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
from collections.abc import Callable, Sequence
from functools import partial
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

    def add(self, tensor: Tensor, inputs: Sequence[Tensor]) -> None:
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
        kwargs = kwargs or {}
        inputs: list[Tensor] = []
        key = (function, _key(args, inputs), _key(tuple(kwargs.items()), inputs) if kwargs else ())
        result = _run(function, args, kwargs, inputs, key)
        for tensor in _tensors(result):
            self._live.add(tensor, inputs)
        return result


def _tensors(value: Any) -> Sequence[Tensor]:
    """Returns the tensors of a result."""
    if isinstance(value, Tensor):
        return (value,)
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (tuple, list)) else ()


# ---- operations on the meta device


_Form = tuple[torch.Size, tuple[int, ...], torch.dtype]
_results: dict[Any, int | list[_Form]] = {}
"""What operations on the meta device return, by their arguments: the index of an input, or the forms of new tensors, or
an empty list for any other result. torch computes many of these in Python, which takes ten times as long as to look
them up, and the blocks of a model repeat them."""


def _run(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor], key: Any
) -> Any:
    if not inputs or not all(tensor.is_meta for tensor in inputs):
        return function(*args, **kwargs)
    known = _results.get(key)
    if isinstance(known, int):
        return inputs[known]
    if known:
        made = list(map(_make, known))
        return made[0] if len(made) == 1 else tuple(made)
    if known is not None:
        return function(*args, **kwargs)
    before = list(map(_memory, inputs))
    result = function(*args, **kwargs)
    _results[key] = _repeatable(result, inputs) if before == list(map(_memory, inputs)) else []
    return result


def _repeatable(result: Any, inputs: list[Tensor]) -> int | list[_Form]:
    """Returns the entry of `_results` for a result. New tensors must share no memory with each other or an input."""
    for index, tensor in enumerate(inputs):
        if result is tensor:
            return index
    outputs = (
        [result] if isinstance(result, Tensor) else list(result) if type(result) is tuple and len(result) > 1 else []
    )
    if not all(isinstance(tensor, Tensor) and tensor.is_meta for tensor in outputs):
        return []
    old, new = ({id(tensor.untyped_storage()) for tensor in tensors} for tensors in (inputs, outputs))
    forms = [_form(tensor) for tensor in outputs]
    is_plain = [_memory(_make(form))[:2] for form in forms] == [_memory(tensor)[:2] for tensor in outputs]
    return forms if is_plain and len(new) == len(outputs) and not old & new else []


def _make(form: _Form) -> Tensor:
    size, stride, dtype = form
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")


def _memory(tensor: Tensor) -> tuple[_Form, int, int]:
    storage = tensor.untyped_storage()
    return _form(tensor), storage.nbytes(), id(storage)


def _key(value: Any, inputs: list[Tensor]) -> Any:
    """Returns what of an argument decides about the form of the result, and adds its tensors to the inputs. 1, 1.0 and
    True are different arguments."""
    if isinstance(value, Tensor):
        inputs.append(value)
        return _form(value)
    if isinstance(value, (tuple, list)):
        return tuple([_key(item, inputs) for item in value])
    return type(value), value


def _form(tensor: Tensor) -> _Form:
    return tensor.shape, tensor.stride(), tensor.dtype


# ---- fused kernels of real devices


def fuse_kernels(model: nn.Sequential, kernels: Kernels) -> None:
    """Makes attention, and on CUDA also norms, keep as much memory on the meta device as the fused kernels of a real
    device. The meta device itself would compose both from small operations, and keep every length x length matrix of
    attention.

    It changes the layers instead of the context in which they run, because a recomputed layer runs during a backward,
    where no such mode is active."""
    for layer in model:
        fused = partial(_run_fused, layer.forward, kernels)
        setattr(layer, "forward", fused)  # noqa: B010 (mypy rejects an assignment to a method)


def _run_fused(forward: Callable[..., Any], kernels: Kernels, *args: Any) -> Any:
    with _Fused(kernels):
        return forward(*args)


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
