"""Groups small tensors into larger messages, for exchanges between replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .host_staging import to_host

_BUCKET_BYTES = 2**20


@dataclass(frozen=True)
class Bucket:
    """Tensors that are sent in one message. `flat` holds their contents and is what is sent."""

    tensors: list[Tensor]
    owner: int | None
    flat: Tensor

    def put_back(self) -> None:
        if len(self.tensors) > 1 or self.flat.data_ptr() != self.tensors[0].data_ptr():
            parts = self.flat.split([tensor.numel() for tensor in self.tensors])
            for tensor, part in zip(self.tensors, parts, strict=True):
                tensor.copy_(part.view_as(tensor))


def make_buckets(tensors: Sequence[Tensor], owners: Sequence[int | None], is_staged: bool) -> list[Bucket]:
    """Groups tensors into buckets. Small tensors with the same owner and dtype share a message. A large contiguous
    tensor is a message of its own and is sent without a copy, unless `is_staged`: then everything is copied to host
    memory first, because the backend cannot reach the memory of the device."""
    found: list[tuple[int | None, list[Tensor]]] = []
    latest: dict[tuple[int | None, torch.dtype], list[Tensor]] = {}
    for tensor, owner in zip(tensors, owners, strict=True):
        last = latest.get((owner, tensor.dtype))
        if last is None or sum(t.nbytes for t in last) + tensor.nbytes > _BUCKET_BYTES:
            last = latest[owner, tensor.dtype] = []
            found.append((owner, last))
        last.append(tensor)
    return [Bucket(bucket, owner, on_host(_flat(bucket)) if is_staged else _flat(bucket)) for owner, bucket in found]


def on_host(tensor: Tensor) -> Tensor:
    """Copies a tensor to host memory and waits until the copy is done. It blocks, so call it from background work."""
    copy = to_host(tensor)
    if tensor.is_cuda:
        torch.cuda.current_stream().synchronize()
    return copy


def _flat(bucket: Sequence[Tensor]) -> Tensor:
    return (
        bucket[0].view(-1)
        if len(bucket) == 1 and bucket[0].is_contiguous()
        else torch.cat([t.flatten() for t in bucket])
    )
