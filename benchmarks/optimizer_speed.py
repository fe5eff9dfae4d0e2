"""What a step of Muon and AdamW costs, ours beside torch's, and what error feedback adds to an update.

    python benchmarks/optimizer_speed.py --device cuda --output optimizer.json     about a minute
    python benchmarks/optimizer_speed.py --device cuda --tilings                   tiles for the symmetric product
    python benchmarks/optimizer_speed.py --device cpu --quick                      to see that it works

Newton-Schulz is in bf16 everywhere, as torch.optim.Muon has it; weights, gradients and momenta are fp32, gradients
random and the same at every step. All contenders of a block take turns, a few steps each, round after round; given are
the median over rounds, and the lowest and the highest. The time is the device's, between two events; "host" is until
all of it was enqueued: where it equals the step, launches are what limits it. Before it is timed, the first update of
every Muon is compared with that of torch.optim.Muon.

The ceiling is the fastest of a few large products, taken before everything else and after it. "of the ceiling" counts
the FLOPs of plain products, 4 m^2 n + 2 m^3 for an iteration on m x n; "symmetric at half" counts those whose result is
symmetric for half, 3 m^2 n + m^3: the least there is to do step by step. "computed" is what ours does compute, where
symmetric products are halved and several steps are taken at once (rules.py). All the rest of a step (momentum, norms,
rounding, decay, the update itself) has its time counted and no FLOPs.

Error feedback goes through Updater, with two weight versions: off, masters move between the two; on, they are a copy of
their own and the version is predicted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from slipstream.config.models import model_of
from slipstream.config.schema import Config, ModelSection
from slipstream.model.decoder import decoder, layer_costs
from slipstream.optim import AdamW, Muon, assign, kernels, muon_and_adamw
from slipstream.optim.rules import AT_ONCE, WIDE
from slipstream.pipeline import partition
from slipstream.pipeline.partition import cut
from slipstream.pipeline.update import Updater
from slipstream.pipeline.weight_versions import WeightVersions, weight_layout
from slipstream.tools.plan.live import LiveBytes

NS_STEPS = 5
PRODUCT = "bf16 product"
MINIATURE = ModelSection(
    dim=16, num_layers=4, num_heads=2, num_kv_heads=1, hidden_dim=32, vocab_size=64, sequence_length=16
)
"""For --quick: some CPUs have no products in bf16 but the slowest."""
TILINGS = ((128, 64, 8, 3), (128, 64, 4, 3), (128, 64, 8, 4), (128, 64, 4, 4), (128, 32, 4, 4), (128, 32, 8, 4))
"""Block, depth, warps, stages."""


@dataclass(frozen=True)
class Contender:
    name: str
    run: Callable[[], object]
    triton: bool = True
    min_rows: int = kernels.MIN_ROWS


@dataclass(frozen=True)
class Row:
    block: str
    name: str
    milliseconds: list[float]
    """By round."""
    host_milliseconds: float
    plain_flops: float = 0.0
    symmetric_flops: float = 0.0
    computed_flops: float = 0.0
    peak_bytes: int = 0

    @property
    def median(self) -> float:
        return statistics.median(self.milliseconds)


class Bench:
    def __init__(self, device: str, rounds: int) -> None:
        self.device, self.rounds = torch.device(device), rounds
        self.has_kernels = device == "cuda" and kernels.HAS_TRITON
        self.rows: list[Row] = []

    def measure(
        self,
        block: str,
        contenders: list[Contender],
        steps: int,
        plain: float = 0.0,
        symmetric: float = 0.0,
        computed: float = 0.0,
    ) -> None:
        times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
        hosts: dict[str, list[float]] = {contender.name: [] for contender in contenders}
        for contender in contenders:
            with switched(contender):
                for _ in range(3):
                    contender.run()
        for _ in range(self.rounds):
            for contender in contenders:
                with switched(contender):
                    taken, host = self._time(contender.run, steps)
                times[contender.name].append(taken)
                hosts[contender.name].append(host)
        for contender in contenders:
            name = contender.name
            with switched(contender):
                peak = self._peak(contender.run)
            done = computed if name == "ours" else 0.0
            row = Row(block, name, times[name], statistics.median(hosts[name]), plain, symmetric, done, peak)
            self.rows.append(row)
            print(f"{block}: {name}: {row.median:.3f} ms", file=sys.stderr, flush=True)

    def _time(self, run: Callable[[], object], steps: int) -> tuple[float, float]:
        """Milliseconds a step, of the device and of the host."""
        if self.device.type == "cpu":
            started = time.perf_counter()
            for _ in range(steps):
                run()
            taken = (time.perf_counter() - started) * 1e3 / steps
            return taken, taken
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        started = time.perf_counter()
        start.record()
        for _ in range(steps):
            run()
        end.record()
        host = (time.perf_counter() - started) * 1e3 / steps
        end.synchronize()
        return start.elapsed_time(end) / steps, host

    def _peak(self, run: Callable[[], object]) -> int:
        """Bytes that a step holds at most beyond what it begins with."""
        if self.device.type == "cpu":
            live = LiveBytes()
            with live.watch():
                before = live.now
                live.restart_peak()
                run()
            return live.peak - before
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def random(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        return torch.empty(shape, device=self.device).normal_(0, scale).to(dtype)

    def free(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


@contextmanager
def switched(contender: Contender) -> Iterator[None]:
    before = kernels.USE_TRITON, kernels.MIN_ROWS
    kernels.USE_TRITON, kernels.MIN_ROWS = contender.triton, contender.min_rows
    try:
        yield
    finally:
        kernels.USE_TRITON, kernels.MIN_ROWS = before


# ---- what is measured


def stage_layers(preset: str, num_stages: int, stage: int) -> nn.Sequential:
    """On the meta device."""
    model = model_of(Config(model=MINIATURE if preset == "miniature" else ModelSection(preset=preset)), 0)
    with torch.device("meta"):
        whole = decoder(model)
    return cut(whole, partition(layer_costs(model, model.sequence_length), num_stages), stage)


def shapes_of(layers: nn.Module, group: str) -> list[torch.Size]:
    groups = assign(list(layers.named_parameters()), muon_and_adamw(muon_lr=0.02, adamw_lr=0.001))
    return [p.shape for g, members in groups if g.name == group for _, p in members]


def measure_ceiling(bench: Bench, block: str, quick: bool) -> float:
    """FLOP/s of the fastest product in bf16."""
    sizes = [(1, 64, 64, 64), (2, 32, 64, 32)]
    if not quick:
        sizes = [(1, 4096, 4096, 4096), (1, 8192, 8192, 8192), (4, 4096, 4096, 4096), (4, 2048, 8192, 2048)]
        sizes += [(1, 16384, 16384, 16384)]
    best = 0.0
    for n, rows, cols, depth in sizes:
        left = bench.random(n, rows, depth, dtype=torch.bfloat16)
        right = bench.random(n, depth, cols, dtype=torch.bfloat16)
        if n == 1:
            left, right = left[0], right[0]
        out = left @ right
        flops = 2.0 * n * rows * cols * depth
        name = f"{n} x ({rows} x {depth}) ({depth} x {cols})"
        steps = max(2, min(20, round(4e13 / flops))) if not quick else 2
        bench.measure(block, [Contender(name, partial(torch.matmul, left, right, out=out))], steps, flops, flops)
        best = max(best, flops / bench.rows[-1].median * 1e3)
        del left, right, out
        bench.free()
    return best


def measure_muon(bench: Bench, block: str, shapes: list[torch.Size], steps: int) -> float:
    """Returns the largest distance of a first update from torch's, as a share of it."""
    gradients = [bench.random(*shape, scale=1e-3) for shape in shapes]
    start = [bench.random(*shape, scale=0.02) for shape in shapes]

    def parameters() -> list[nn.Parameter]:
        held = [nn.Parameter(tensor.clone()) for tensor in start]
        for parameter, gradient in zip(held, gradients, strict=True):
            parameter.grad = gradient
        return held

    theirs = parameters()
    contenders = [
        Contender("torch.optim.Muon", torch.optim.Muon(theirs, lr=0.02, momentum=0.95, weight_decay=0.1).step)
    ]
    kinds = [("ours", True, kernels.MIN_ROWS)]
    if bench.has_kernels:
        kinds = [("ours, plain torch", False, kernels.MIN_ROWS), *kinds]
        if min(min(shape) for shape in shapes) < kernels.MIN_ROWS:
            kinds += [("ours, symmetric at every size", True, 1)]
    ours: dict[str, list[nn.Parameter]] = {}
    for name, triton, min_rows in kinds:
        held = ours[name] = parameters()
        optimizer = Muon(held, lr=0.02, beta=0.95, ns_dtype=torch.bfloat16, weight_decay=0.1)
        contenders.append(Contender(name, optimizer.step, triton, min_rows))
    for contender in contenders:
        with switched(contender):
            contender.run()
    distance = 0.0
    for held in ours.values():
        for a, b, z in zip(held, theirs, start, strict=True):
            decayed = z * (1 - 0.02 * 0.1)
            distance = max(distance, float(((a - b).norm() / (decayed - b).norm()).detach()))
    ms_ns = [(min(shape), max(shape)) for shape in shapes]
    plain = NS_STEPS * sum(4.0 * m * m * n + 2.0 * m**3 for m, n in ms_ns)
    symmetric = NS_STEPS * sum(3.0 * m * m * n + m**3 for m, n in ms_ns)
    computed = sum(computed_flops(m, n) for m, n in ms_ns) if bench.has_kernels else 0.0
    bench.measure(block, contenders, steps, plain, symmetric, computed)
    bench.free()
    return distance


def computed_flops(m: int, n: int) -> float:
    """Of the iteration in bf16 with our kernels."""
    half = 0.5 if m >= kernels.MIN_ROWS else 1.0
    at_once = AT_ONCE if m >= kernels.MIN_ROWS and n >= WIDE * m else 1
    looks = -(-NS_STEPS // at_once)
    large, small = half * 2 * m * m * n + 2 * m * m * n, half * 2 * m**3
    return looks * large + (4 * NS_STEPS - 3 * looks) * small


def measure_adamw(bench: Bench, block: str, shapes: list[torch.Size], steps: int) -> None:
    gradients = [bench.random(*shape, scale=1e-3) for shape in shapes]

    def stepper(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Callable[[], object]:
        held = [nn.Parameter(bench.random(*shape, scale=0.02)) for shape in shapes]
        for parameter, gradient in zip(held, gradients, strict=True):
            parameter.grad = gradient
        return make(held).step

    torch_adamw = partial(torch.optim.AdamW, lr=0.001, betas=(0.9, 0.95), weight_decay=0.1)
    ours = partial(AdamW, lr=0.001, weight_decay=0.1)
    contenders = [
        Contender("torch.optim.AdamW, fused", stepper(partial(torch_adamw, fused=True))),
        Contender("torch.optim.AdamW, foreach", stepper(partial(torch_adamw, foreach=True))),
        Contender("ours", stepper(ours)),
    ]
    if bench.has_kernels:
        contenders.insert(2, Contender("ours, plain torch", stepper(ours), triton=False))
    bench.measure(block, contenders, steps)
    bench.free()


def measure_error_feedback(bench: Bench, block: str, preset: str, num_stages: int, steps: int) -> None:
    def updates(error_feedback: float) -> Callable[[], object]:
        layers = stage_layers(preset, num_stages, 1).to_empty(device=bench.device)
        for parameter in layers.parameters():
            nn.init.normal_(parameter, std=0.02)
        versions = WeightVersions(layers, weight_layout(2, compares=error_feedback != 0))
        groups = muon_and_adamw(
            muon_lr=0.02,
            adamw_lr=0.001,
            weight_decay=0.1,
            error_feedback=error_feedback,
            muon_ns_dtype=torch.bfloat16,
        )
        updater = Updater(versions, groups, {}, lambda step: 1.0, False, bench.device)
        gradients = {name: bench.random(*master.shape, scale=1e-3) for name, master in versions.masters.items()}

        def update() -> None:
            updater.apply(0, dict(gradients), [1.0] * len(groups), horizon=1)  # which uses them up
            versions.close_next()

        return update

    bench.measure(
        block, [Contender("error feedback off", updates(0.0)), Contender("error feedback on", updates(1.0))], steps
    )
    bench.free()


def measure_tilings(bench: Bench) -> None:
    """The symmetric product alone, X X^T and a I + b A + c A A, for every tiling; checked against torch first."""
    from slipstream.optim import triton_kernels

    chosen = triton_kernels.TILING
    print("| product | way | ms | TFLOP/s of a plain product | distance from torch |\n|---|---|---:|---:|---:|")
    for n, rows, depth, is_tall in ((4, 2048, 8192, False), (4, 2048, 8192, True), (4, 2048, 2048, False),
                                    (60, 576, 1536, False)):  # fmt: skip
        X = bench.random(n, depth, rows, dtype=torch.bfloat16).mT if is_tall else None
        X = bench.random(n, rows, depth, dtype=torch.bfloat16) if X is None else X
        X = X / depth**0.5
        for added in (None, X) if rows == depth else (None,):
            if added is not None:
                X = added = X + X.mT
            beta, diagonal = (0.0, 0.0) if added is None else (-4.775, 3.4445)
            product = partial(kernels.symmetric_product, X, alpha=1.0, added=added, beta=beta, diagonal=diagonal)
            expected = torch.bmm(X.double(), X.double().mT)
            if added is not None:
                expected += beta * added.double() + diagonal * torch.eye(rows, device=bench.device)
            name = f"{n} x {rows} x {depth}" + (", tall" if is_tall else "") + ("" if added is None else ", added")
            ways = [("torch", False, chosen), *((str(t), True, triton_kernels.Tiling(*t)) for t in TILINGS)]
            for way, triton, tiling in ways:
                triton_kernels.TILING = tiling
                try:
                    with switched(Contender(way, product, triton, 1)):
                        found = product()
                        distance = float((found.double() - expected).norm() / expected.norm())
                        bench.measure(name, [Contender(way, product, triton, 1)], 10)
                except Exception as error:  # a tiling may ask for more shared memory than there is
                    print(f"| {name} | {way} | {type(error).__name__} | | |", flush=True)
                    continue
                finally:
                    triton_kernels.TILING = chosen
                median = bench.rows.pop().median
                rate = 2e-9 * n * rows * rows * depth / median
                print(f"| {name} | {way} | {median:.3f} | {rate:.0f} | {distance:.1e} |", flush=True)


# ---- what is said


def table(rows: list[Row], ceiling: float) -> str:
    lines = [
        "| what | who | ms a step (lowest - highest) | host | times the first | TFLOP/s | of the ceiling "
        "| symmetric at half | computed | peak, MiB |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    first: dict[str, float] = {}
    for row in rows:
        base = first.setdefault(row.block, row.median)
        spread = f"{min(row.milliseconds):.3f} - {max(row.milliseconds):.3f}"
        rate, least = row.plain_flops / row.median * 1e3, row.symmetric_flops / row.median * 1e3
        is_product = row.block.startswith(PRODUCT)
        cells = [
            row.block,
            row.name,
            f"{row.median:.3f} ({spread})",
            f"{row.host_milliseconds:.3f}",
            "" if is_product else f"{row.median / base:.3f}",
            f"{rate / 1e12:.1f}" if rate else "",
            f"{rate / ceiling:.1%}" if rate else "",
            f"{least / ceiling:.1%}" if rate and not is_product else "",
            f"{row.computed_flops / row.median * 1e3 / ceiling:.1%}" if row.computed_flops else "",
            f"{row.peak_bytes / 2**20:.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--quick", action="store_true", help="tiny shapes, two rounds: figures mean nothing")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--tilings", action="store_true", help="the symmetric product alone, tile by tile")
    parser.add_argument("--output", type=Path, default=None, help="JSON")
    given = parser.parse_args()
    bench = Bench(given.device, given.rounds or (2 if given.quick else 9))
    device = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
    print(
        f"{device}, torch {torch.__version__}, {bench.rounds} rounds, Triton {'yes' if bench.has_kernels else 'no'}\n"
    )
    if given.tilings:
        if not bench.has_kernels:
            parser.error("--tilings needs --device cuda and Triton")
        measure_tilings(bench)
        return
    many, large, stages = ("miniature", "miniature", 2) if given.quick else ("135m", "1b", 4)
    long, short = (1, 1) if given.quick else (5, 10)
    ceiling = measure_ceiling(bench, PRODUCT, given.quick)
    distances = {}
    for name, layers, steps in (
        (f"Muon, {many}, all", stage_layers(many, 1, 0), short),
        (f"Muon, {large}, stage 1 of {stages}", stage_layers(large, stages, 1), long),
    ):
        distances[name] = measure_muon(bench, name, shapes_of(layers, "matrices"), steps)
    rest = shapes_of(stage_layers(large, stages, 0), "rest")
    measure_adamw(bench, f"AdamW, {large}, stage 0 of {stages}", rest, long)
    for preset in dict.fromkeys((many, large)):
        measure_error_feedback(bench, f"update, {preset}, stage 1 of {stages}", preset, stages, long)
    ceiling = max(ceiling, measure_ceiling(bench, f"{PRODUCT}, again", given.quick))
    print(table(bench.rows, ceiling))
    for name, distance in distances.items():
        print(f"\n{name}: our first update is at most {distance:.2%} of its norm away from torch.optim.Muon's")
    if given.output:
        found = {
            "device": device,
            "torch": torch.__version__,
            "ceiling_flops": ceiling,
            "distances": distances,
            "rows": [asdict(row) | {"median": row.median} for row in bench.rows],
        }
        given.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
