"""Which calls wait for the whole device? Each is timed while a kernel of one thread spins for two seconds.

    python benchmarks/device_waits.py

A call that returns only when the kernel has ended is one that can hold up a rank whose device spins in an operation of
NCCL. slipstream/transport/nccl.py says why that must not matter.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

SPIN_SECONDS = 2.0


def spin() -> None:
    """On a stream of its own. torch's only kernel that spins has no public name."""
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(int(SPIN_SECONDS * 1.6e9))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures a GPU, and torch finds none here.")
    warm = torch.randn(256, 256, device="cuda")
    kept = [torch.empty(2**28, dtype=torch.uint8, device="cuda") for _ in range(4)]
    event, side = torch.cuda.Event(blocking=True), torch.cuda.Stream()
    on_host = torch.empty(2**20, pin_memory=True)
    (warm + 1).sum()
    torch.cuda.synchronize()

    def free() -> None:
        kept.clear()
        torch.cuda.empty_cache()

    def product(dtype: torch.dtype) -> Callable[[], object]:
        return lambda: torch.randn(64, 64, device="cuda").to(dtype) @ torch.randn(64, 64, device="cuda").to(dtype)

    probes: dict[str, Callable[[], object]] = {
        "a kernel that ran before": lambda: warm + 1,
        "cudaMalloc, 1 GiB": lambda: torch.empty(2**30, dtype=torch.uint8, device="cuda"),
        "cudaHostAlloc, 256 MiB pinned": lambda: torch.empty(2**28, dtype=torch.uint8, pin_memory=True),
        "copy to pinned memory, side stream": lambda: _copy(on_host, warm, side),
        "a new stream": lambda: torch.cuda.Stream(priority=-1),
        "record and query an event": lambda: (event.record(), event.query()),
        "first use of a kernel (erfinv)": lambda: torch.erfinv(warm),
        "second use of it": lambda: torch.erfinv(warm),
        "first product of cuBLAS, fp32": product(torch.float32),
        "first product of cuBLAS, bf16": product(torch.bfloat16),
        "second product of cuBLAS, bf16": product(torch.bfloat16),
        "first attention": lambda: F.scaled_dot_product_attention(*[warm.bfloat16().view(1, 4, 64, 256)] * 3),
        "cudaFree (empty_cache)": free,
        "host waits for another stream": lambda: side.synchronize(),
    }
    print(f"a kernel spins for {SPIN_SECONDS:g} s; seconds until the call returned")
    for name, probe in probes.items():
        torch.cuda.synchronize()
        spin()
        started = time.perf_counter()
        probe()
        seconds = time.perf_counter() - started
        torch.cuda.synchronize()
        total = time.perf_counter() - started
        print(f"{name:40} {seconds:8.4f}   {'WAITS' if seconds > 0.8 * total else ''}", flush=True)


def _copy(on_host: torch.Tensor, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        on_host[:65536].copy_(tensor.view(-1), non_blocking=True)


if __name__ == "__main__":
    main()
