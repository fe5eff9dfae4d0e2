"""Draws a logged convergence run.

python benchmarks/draw_convergence.py benchmarks/convergence_h200_2026-11-15.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

LABELS = {"sync": "synchronous", "async": "one step late", "ef": "one step late + error feedback"}
COLOURS = {"sync": "#333333", "async": "#c8553d", "ef": "#4878a8"}


def main(source: Path) -> None:
    runs = json.loads(source.read_text(encoding="utf-8"))
    optimizers = list(dict.fromkeys(name.split("-")[0] for name in runs))
    figure, panels = pyplot.subplots(1, len(optimizers), figsize=(9, 3.6), sharey=True, layout="constrained")
    for panel, optimizer in zip(panels, optimizers, strict=True):
        for kind, label in LABELS.items():
            steps, losses = zip(*runs[f"{optimizer}-{kind}"]["val_loss"], strict=True)
            panel.plot(steps, losses, color=COLOURS[kind], marker="o", markersize=3, label=f"{label}: {losses[-1]:.3f}")
        panel.set_title({"muon": "Muon", "adamw": "AdamW"}[optimizer])
        panel.set_xlabel("updates")
        panel.grid(alpha=0.3)
        panel.legend()
    panels[0].set_ylabel("held-out nats per byte")
    figure.savefig(source.with_suffix(".png"), dpi=130)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    main(parser.parse_args().source)
