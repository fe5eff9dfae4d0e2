"""Captures a function of a batch in one CUDA graph, so that the host makes one launch for all its kernels.

torch.compile has a mode for this, reduce-overhead. But it makes one graph of the forward and one of the backward, and
checks the address of every parameter before each of them. For a small batch these checks take longer than the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]
Result = TypeVar("Result")

WARMUP_CALLS = 3
"""Number of calls before the capture, in which compilers compile and libraries select their kernels."""


def captured(function: Callable[[Batch], Result], example: Batch) -> Callable[[Batch], Result]:
    """Returns a function that copies its batch into the graph's input and replays the graph. All other tensors that
    `function` reads must stay at their addresses. The next call overwrites the result. No other thread may use the
    device during the capture."""
    batch = (example[0].clone(), example[1].clone())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUP_CALLS):
            function(batch)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function(batch)

    def replay(current: Batch) -> Result:
        for place, tensor in zip(batch, current, strict=True):
            place.copy_(tensor, non_blocking=True)
        graph.replay()
        return result

    return replay
