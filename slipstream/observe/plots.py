"""Draws loss.png from metrics.jsonl."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path

from ..checkpoint.files import write_file


def draw_losses(folder: Path) -> None:
    """Draws loss.png from metrics.jsonl, if matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").split("\n")
    rows = [json.loads(line) for line in lines[:-1]]  # the last one is empty, or half a row if the disk was full
    train = [(row["tokens"], row["loss"]) for row in rows if row.get("loss") is not None]
    tokens_of = {row["step"]: row["tokens"] for row in rows if "tokens" in row}
    evaluated = [row for row in rows if "val_loss" in row and row["step"] in tokens_of]
    held_out = [(tokens_of[row["step"]], row["val_loss"]) for row in evaluated if row["val_loss"] is not None]
    names = list(dict.fromkeys(name for row in evaluated for name in row.get("val_losses", {})))
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    if train:
        axes.plot(*zip(*train, strict=True), color="#4878a8", linewidth=1, label="training batch")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), color="#c8553d", marker="o", label="held out")
    for name in names:
        losses = [(tokens_of[row["step"]], row.get("val_losses", {}).get(name)) for row in evaluated]
        axes.plot(*zip(*losses, strict=True), marker=".", linewidth=1, label=f"held out, {name}")
    axes.set_xlabel("tokens")
    axes.set_ylabel("nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title(folder.name)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150)
    pyplot.close(figure)
    write_file(folder / "loss.png", [drawn.getbuffer()])
