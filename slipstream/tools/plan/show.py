"""Shows a plan as a table, as JSON and as a figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ...train.layer_profile import Profile
from .advice import GIB, Advice
from .fsdp import FSDP
from .savings import marks
from .search import Option, Search
from .stage import StageMemory

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours of Okabe and Ito, which colour-blind readers can distinguish.
COLOURS = ("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#cc79a7", "#d55e00", "#f0c8a8")

Cells = Mapping[str, Callable[[Option], str]]
COLUMNS: Cells = {
    "schedule": lambda option: option.schedule,
    "P x R": lambda option: f"{option.division.num_stages} x {option.division.num_replicas}",
    "m x size": lambda option: f"{option.division.num_microbatches} x {option.division.microbatch_size}",
    "bubble": lambda option: f"{option.bubble:.1%}",
    "tokens/s": lambda option: f"{option.tokens_per_second:,.0f}",
    "price": lambda option: f"{option.token_price:.2f}",
    "GiB": lambda option: _gib(option.largest.most),
    "with": lambda option: marks(option.config, 1 if option.schedule == FSDP else option.division.num_replicas),
}
"""The columns of the table. With a note they fit into 80 columns of a terminal."""
WIDE = 150
"""Width of a terminal, in columns, from which the table includes the parts of the memory."""
WIDE_COLUMNS: Cells = {
    "step s": lambda option: f"{option.step_time:.3g}" if option.step_time < 1000 else f"{option.step_time:,.0f}",
    "weights": lambda option: _gib(option.largest.weights),
    "grads": lambda option: _gib(option.largest.gradients),
    "optimizer": lambda option: _gib(option.largest.optimizer),
    "activations": lambda option: _gib(option.largest.activations),
    "other": lambda option: _gib(option.largest.messages + option.largest.work + option.largest.overlap),
}


def plan_table(options: Mapping[str, Option | str], choice: Option | None, width: int) -> Table:
    """Returns the table. width: the width of the terminal in columns."""
    table = Table(box=None, header_style="bold", pad_edge=False, collapse_padding=True)
    columns = {**COLUMNS, **(WIDE_COLUMNS if width >= WIDE else {})}
    for name in columns:
        table.add_column(name, justify="left" if name in ("schedule", "with") else "right", no_wrap=True)
    table.add_column("")
    for name, option in options.items():
        if isinstance(option, str):
            table.add_row(name, *["-"] * (len(columns) - 1), "cannot", style="dim")
        else:
            cells = [cell(option) for cell in columns.values()]
            table.add_row(*cells, _note(option, choice), style=None if option.fits else "dim")
    return table


def _note(option: Option, choice: Option | None) -> str:
    if not option.fits:
        return "too big"
    if option == choice:
        return "<- best"
    return "" if option.is_runnable else "planned"


def _gib(num_bytes: float) -> str:
    gib = num_bytes / GIB
    return f"{gib:.1f}" if gib >= 0.1 else f"{gib:.4f}"


def profile_table(profile: Profile) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("layer", no_wrap=True)
    for name in ("count", "parameters", "forward ms", "backward: input", "weights", "update ms", "kept MiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in profile.rows:
        times = (row.forward, row.backward_input, row.backward_weight, row.update)
        milliseconds = [f"{1000 * seconds:.3f}" for seconds in times]
        kept = f"{row.activations / 2**20:.2f}"
        table.add_row(row.kind, str(row.num_layers), f"{row.parameters:,}", *milliseconds, kept)
    return table


def plan_tree(search: Search, options: Mapping[str, Option | str], advice: Advice) -> dict[str, Any]:
    """Returns the data that --json writes: everything in the table, for every stage."""
    rows: list[dict[str, Any]] = []
    for name, option in options.items():
        if isinstance(option, str):
            rows.append({"schedule": name, "impossible": option})
            continue
        rows.append(
            {
                "schedule": name,
                "stages": option.division.num_stages,
                "replicas": option.division.num_replicas,
                "microbatches": option.division.num_microbatches,
                "microbatch_size": option.division.microbatch_size,
                "layers_per_stage": option.division.layers_per_stage,
                "sharded": option.config.optimizer.sharded,
                "loss_chunk_tokens": option.config.train.loss_chunk_tokens,
                "recompute_every": option.config.train.recompute_every,
                "step_seconds": option.step_time,
                "bubble": option.bubble,
                "tokens_per_second": option.tokens_per_second,
                "token_price": option.token_price,
                "utilisation": option.prediction.utilisation,
                "in_flight": option.prediction.in_flight,
                "weight_versions": option.prediction.weight_versions,
                "delay": option.prediction.delay,
                "simulated": option.prediction.is_simulated,
                "memory": [{**asdict(memory), "total": memory.total, "most": memory.most} for memory in option.memory],
                "fits": option.fits,
                "runnable": option.is_runnable,
                "recommended": option == advice.choice,
            }
        )
    return {
        "model": search.model.facts(),
        "devices": search.cluster.num_devices,
        "memory_bytes": search.cluster.memory,
        "link": {
            "latency_seconds": search.cluster.latency,
            "bytes_per_second": search.cluster.bandwidth,
            "devices_per_node": search.cluster.node_size,
            "bytes_per_second_between_nodes": None if search.cluster.is_one_node else search.cluster.node_bandwidth,
        },
        "batch_sequences": search.batch_size,
        "dtypes": {name: str(dtype).removeprefix("torch.") for name, dtype in vars(search.memory_model.dtypes).items()},
        "sharded": search.config.optimizer.sharded,
        "costs": {"source": search.costs.source, "layers": [asdict(layer) for layer in search.costs.layers]},
        "options": rows,
        "recommendation": list(advice.sentences),
        "command": advice.command,
    }


def draw_plan(search: Search, options: Mapping[str, Option | str], advice: Advice, path: Path) -> None:
    """Draws the figure. Left: the step of every schedule, divided into computing and idle. Right: the memory of every
    stage, for the recommended option or else for the one that needs the least."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = [option for option in options.values() if isinstance(option, Option)]
    shown = advice.choice or min(found, key=lambda option: option.largest.most)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    _draw_steps(left, found)
    _draw_memory(right, shown, search.cluster.memory)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_steps(axes: Axes, found: list[Option]) -> None:
    places = range(len(found))
    busy = [option.step_time * (1 - option.bubble) for option in found]
    idle = [option.step_time * option.bubble for option in found]
    axes.barh(places, busy, color=COLOURS[0], label="computing")
    axes.barh(places, idle, left=busy, color=COLOURS[5], label="idle")
    labels = [
        f"{option.schedule}{'' if option.fits else ' (does not fit)'}\n"
        f"{option.division.num_stages} x {option.division.num_replicas}"
        for option in found
    ]
    axes.set_yticks(places, labels, fontsize=8)
    axes.invert_yaxis()
    axes.locator_params(axis="x", nbins=5)  # times of milliseconds have long labels
    axes.set_xlabel("seconds a step, mean over devices")
    axes.set_title("step (stages x replicas)")
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2, frameon=False)


def _draw_memory(axes: Axes, option: Option, limit: float) -> None:
    from matplotlib.ticker import MaxNLocator

    places = range(len(option.memory))
    below = [0.0] * len(option.memory)
    for part, colour in zip(fields(StageMemory), COLOURS, strict=True):
        heights = [getattr(memory, part.name) / GIB for memory in option.memory]
        axes.bar(places, heights, bottom=below, color=colour, label=part.name)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    if limit / GIB < 4 * max(below):
        axes.axhline(limit / GIB, color="black", linestyle="--", linewidth=1)
    axes.set_xlabel("stage")
    axes.set_ylabel("GiB")
    axes.set_title(f"memory of {option.schedule}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=4, frameon=False)
