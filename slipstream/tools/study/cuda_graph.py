"""A function of a batch as one CUDA graph: one launch for the host, whatever the number of kernels.

torch.compile's own mode for it, reduce-overhead, makes a graph of the forward and one of the backward, and looks at
every parameter's address before each. For a small batch that takes longer than the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]
Result = TypeVar("Result")

WARMUP_CALLS = 3
"""Before the capture: compilers compile, and libraries choose their kernels."""


def captured(function: Callable[[Batch], Result], example: Batch) -> Callable[[Batch], Result]:
    """Everything else that the function reads stays where it is, and whatever it returns is overwritten by the next
    call. No other thread may use the device meanwhile."""
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
