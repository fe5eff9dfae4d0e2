"""Tests what `slipstream tune --budget` predicted: sweeps rates and batches at the target itself, and compares.

    slipstream tune target.toml --tokens 3e6 --budget 90% --output runs/tune-target
    python experiments/tuning.py runs/tune-target --jobs 2

Run it after the prediction is written: it reads tune.json and tuned.toml, and changes neither. The sweep is a study of
its own in FOLDER/sweep, so it can be stopped and started again. It tries rates in factors of the square root of two
around the predicted one, at the predicted batch, at half and at twice of it, and goes on as long as the best rate or
the best batch is at an edge. The predicted setting is run with two seeds, delayed and synchronously. Best rate and
batch are those of the law of `slipstream tune`, fitted to the sweep alone: the losses of single runs differ by chance.

    slipstream tune --model.initial base --tokens 3e7 --laws runs/tune-target/tune.json --output runs/tune-continued
    python experiments/tuning.py runs/tune-continued --guesses 0.02:32 0.002:32 0.02:128

With --guesses there is no sweep: the predicted setting is compared with these rates and sequences in a step.

    python experiments/tuning.py runs/tune-continued --by-length 0.005:8 0.01:8 0.02:8

With --by-length neither: each of these settings is a trunk of the target, with branches that decay after a sixteenth of
the tokens, an eighth and so on. The table shows whether the best rate or batch depends on the length of the run.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.config.models import model_of
from slipstream.config.toml import load_toml
from slipstream.model.registry import Decoder
from slipstream.tools.study import figures
from slipstream.tools.study.cell import Cell
from slipstream.tools.study.grid import Grid
from slipstream.tools.study.record import Record
from slipstream.tools.study.runner import run_study
from slipstream.tools.tune.advice import Size, batch_of, is_delayed, with_rate
from slipstream.tools.tune.fit import End, Fit, fit
from slipstream.tools.tune.proxies import Proxy, held_out_sequences, proxy_of
from slipstream.tools.tune.trials import bottom, trial_of
from slipstream.tools.tune.trunks import priors_for, run_trunk
from slipstream.train.build import corpus_vocab_size

RATES = (2**-1, 2**-0.5, 1.0, 2**0.5, 2.0)
"""Rates at the predicted batch, as multiples of the predicted one."""
BATCHES = (0.5, 1.0, 2.0)
SEEDS = (0, 1)
MOST_ROUNDS = 8
CLOSE = 0.01
"""Share by which a loss may exceed the lowest one to count when the best rate of a batch is looked for."""
LENGTHS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
Setting = tuple[float, int]
"""Rate, and sequences in a step."""
Losses = dict[int, dict[float, float]]
"""Losses of delayed runs of the first seed, by sequences in a step and by rate."""


class Sweep:
    def __init__(self, folder: Path, jobs: int | None) -> None:
        self._folder, self._jobs = folder, jobs
        self.config = config = load_toml(folder / "tuned.toml")
        model = model_of(config, corpus_vocab_size(config))
        tree = json.loads((folder / "tune.json").read_text(encoding="utf-8"))
        self.prediction: dict[str, Any] = tree["prediction"]
        self.rate: float = tree["setting"]["learning_rate"]
        self.tokens, self.length = tree["target"]["tokens"], model.sequence_length
        assert isinstance(model, Decoder), "tune --budget refuses other models"
        self.proxy: Proxy = proxy_of(config, model, Size.of(model), self.tokens)
        self.is_late = is_delayed(config)
        self.sequences = batch_of(config, self.length) // self.length
        self.spent_on_proxies = sum(trunk["flops"] for trunk in tree["trunks"])
        self._cells: dict[str, Cell] = {}
        self.records: list[Record] = []

    def cell(self, rate: float, sequences: int, is_late: bool, seed: int) -> Cell:
        made = replace(self.proxy, batch=sequences).cell(rate, sequences, is_late)
        # All batches that may be tried divide this number, so that all are evaluated on the same text.
        most = 4 * self.sequences
        held_out = math.ceil(held_out_sequences(self.proxy.config, self.length) / most) * most
        config = replace(
            made.config,
            train=replace(made.config.train, microbatch_size=sequences, seed=seed),
            pipeline=replace(made.config.pipeline, microbatches=1),
        )
        config = with_rate(config, self.proxy.size, self.length, rate, self.tokens)
        evaluation = replace(config.evaluation, batches=max(1, round(held_out / sequences)))
        setting = {"optimizer.learning_rate": config.optimizer.learning_rate, "train.microbatch_size": sequences}
        return replace(made, config=replace(config, evaluation=evaluation), setting=setting)

    def run(self, wanted: Sequence[tuple[float, int, bool, int]]) -> None:
        cells = [self.cell(*values) for values in wanted]
        self._cells |= {cell.id: cell for cell in cells}
        grid = Grid("sweep", list(self._cells.values()))
        self.records = run_study(grid, self._folder / "tuned.toml", self._folder / "sweep", (), self._jobs)

    def losses(self) -> Losses:
        found: Losses = {}
        for record in self.records:
            if record.mode == "late" and record.seed == SEEDS[0]:
                at = found.setdefault(record.setting["train.microbatch_size"], {})
                at[record.learning_rate] = math.inf if record.final_loss is None else record.final_loss
        return found

    def law(self) -> Fit:
        """Returns the law of the finished runs."""
        n, length = self.proxy.size.parameters, self.length
        ends = [
            End(record.id, n, record.tokens, sequences * length, record.learning_rate, record.mode == "late", loss)
            for record in self.records
            if (sequences := record.setting["train.microbatch_size"]) and (loss := record.final_loss) is not None
        ]
        return fit(ends, priors_for([self.proxy]))

    def explore(self) -> None:
        rate = self.prediction["rate"]
        wanted = [(rate, self.sequences, late, seed) for seed in SEEDS for late in {self.is_late, False}]
        wanted += [
            (rate * math.sqrt(batch) * factor, round(self.sequences * batch), self.is_late, SEEDS[0])
            for batch in BATCHES
            for factor in (RATES if batch == 1 else RATES[::2])
        ]
        for _ in range(MOST_ROUNDS):
            self.run(wanted)
            if not (wanted := self._beyond()):
                return

    def _beyond(self) -> list[tuple[float, int, bool, int]]:
        """Returns what lies beyond the edges: of the rates, for every batch, and then of the batches."""
        found, wanted = self.losses(), []
        for sequences, at in found.items():
            best = min(at, key=at.__getitem__)
            if best in (min(at), max(at)):
                factor = 2.0 if best == max(at) else 0.5
                wanted.append((best * factor, sequences, self.is_late, SEEDS[0]))
        bottoms = {sequences: bottom(at, CLOSE)[1] for sequences, at in found.items()}
        best_batch = min(bottoms, key=bottoms.__getitem__)
        if not wanted and best_batch in (min(bottoms), max(bottoms)) and best_batch > 1:
            factor = 2.0 if best_batch == max(bottoms) else 0.5
            rate = bottom(found[best_batch], CLOSE)[0] * math.sqrt(factor)
            wanted += [(rate * f, round(best_batch * factor), self.is_late, SEEDS[0]) for f in RATES[::2]]
        return wanted


def compare(sweep: Sweep) -> str:
    said, found, law = sweep.prediction, sweep.losses(), sweep.law()
    target = sweep.proxy.size.parameters, sweep.tokens
    rate_here, best_batch = float(law.rate(*target, said["batch"])), float(law.batch(*target, sweep.is_late))
    rate_band = law.band(law.rate(*target, said["batch"], law.samples))
    batch_band = law.band(law.batch(*target, sweep.is_late, law.samples))
    lowest, best_rate, at_sequences = min(
        (loss, rate, sequences) for sequences, at in found.items() for rate, loss in at.items()
    )
    own = min(found[sweep.sequences], key=lambda rate: abs(math.log(rate / said["rate"])))
    first = found[sweep.sequences][own]
    runs = {
        (record.mode, record.seed): record.final_loss
        for record in sweep.records
        if record.setting["train.microbatch_size"] == sweep.sequences and record.learning_rate == own
    }
    late = np.array([runs["late", seed] for seed in SEEDS], float)
    sync = np.array([runs["sync", seed] for seed in SEEDS], float)
    gaps = late - sync
    flops = sweep.proxy.size.flops_per_token * sum(record.tokens for record in sweep.records)

    def band(name: str, form: str = ".4g") -> str:
        low, high = said[f"{name}_band"]
        return f"{low:{form}} to {high:{form}}"

    def inside(name: str, value: float) -> str:
        low, high = said[f"{name}_band"]
        return "inside" if low <= value <= high else "**outside**"

    rows = [
        ("rate at the predicted batch", f"{said['rate']:.3g}", band("rate", ".3g"),
         f"{rate_here:.3g} ({rate_band[0]:.3g} to {rate_band[1]:.3g})", f"ratio {said['rate'] / rate_here:.2f}"),
        ("batch, tokens", f"{said['batch']:,}", band("batch", ",.0f"),
         f"{best_batch:,.0f} ({batch_band[0]:,.0f} to {batch_band[1]:,.0f})",
         f"ratio {said['batch'] / best_batch:.2f}"),
        ("loss at the predicted setting", f"{said['loss']:.4f}", band("loss", ".4f"),
         f"{late.mean():.4f} ({late.min():.4f}, {late.max():.4f})", inside("loss", float(late.mean()))),
        ("part of the delay", f"{said['gap']:.4f}", band("gap", ".4f"),
         f"{gaps.mean():.4f} ({gaps.min():.4f}, {gaps.max():.4f})", inside("gap", float(gaps.mean()))),
        ("lowest loss of the sweep", "", "",
         f"{lowest:.4f}, rate {best_rate:.3g}, {at_sequences * sweep.length:,} tokens",
         f"predicted setting {first / lowest - 1:+.2%}"),
        ("cost, FLOPs", f"{sweep.spent_on_proxies:.3g}", "", f"{flops:.3g}",
         f"{flops / sweep.spent_on_proxies:.1f} times"),
    ]  # fmt: skip
    head = "| | predicted | band, 5 to 95 % | measured | |\n|---|---|---|---|---|\n"
    return head + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def by_length(sweep: Sweep, settings: Sequence[Setting]) -> str:
    """Runs a trunk for each setting. Returns a table of the losses at the ends of its branches."""
    head = ["rate", "tokens a step", *(f"{length * sweep.tokens:,.0f} tokens" for length in LENGTHS)]
    lines = [f"| {' | '.join(head)} |", "|" + "---:|" * len(head)]
    for rate, sequences in settings:
        cell = trial_of(sweep.config, sweep.proxy.model, sweep.tokens).cell(rate, sequences, sweep.is_late)
        steps = [round(length * sweep.tokens / (sequences * sweep.length)) for length in LENGTHS]
        losses = run_trunk(cell, steps, lambda _: None, 1.0)
        texts = ["diverged" if loss is None else f"{loss:.4f}" for loss in losses]
        lines.append(f"| {' | '.join([f'{rate:g}', f'{sequences * sweep.length:,}', *texts])} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join([*lines, ""])


def against(sweep: Sweep, guesses: Sequence[Setting]) -> str:
    """Runs the predicted setting and the guesses with all seeds. Returns a table, the best first."""
    settings = [(sweep.rate, sweep.sequences), *guesses]
    sweep.run([(rate, sequences, sweep.is_late, seed) for rate, sequences in settings for seed in SEEDS])
    rows = []
    for number, (rate, sequences) in enumerate(settings):
        ids = {sweep.cell(rate, sequences, sweep.is_late, seed).id for seed in SEEDS}
        losses = [math.inf if r.final_loss is None else r.final_loss for r in sweep.records if r.id in ids]
        name = f"guess {number}" if number else "**tuned**"
        each = ", ".join(f"{loss:.4f}" for loss in losses)
        rows.append((sum(losses) / len(losses), f"| {name} | {rate:.3g} | {sequences * sweep.length:,} |", each))
    head = f"| | rate | tokens a step | loss | seeds {', '.join(map(str, SEEDS))} |\n|---|---:|---:|---:|---|\n"
    return head + "".join(f"{setting} {mean:.4f} | {each} |\n" for mean, setting, each in sorted(rows))


def draw(sweep: Sweep, path: Path) -> None:
    if not figures.start():
        return
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    colours = (figures.BLUE, figures.BLACK, figures.VERMILLION, figures.GREEN, figures.PURPLE)
    for colour, (sequences, at) in zip(colours, sorted(sweep.losses().items()), strict=False):
        points = sorted((rate, loss) for rate, loss in at.items() if math.isfinite(loss))
        axes.plot(*zip(*points, strict=True), "o-", color=colour, label=f"{sequences * sweep.length:,} tokens a step")
    said = sweep.prediction
    low, high = said["loss_band"]
    errors = [[said["loss"] - low], [high - said["loss"]]]
    label = f"predicted, {said['batch']:,} tokens a step"
    axes.errorbar([said["rate"]], [said["loss"]], errors, fmt="*", ms=14, color=figures.ORANGE, label=label)
    axes.set(xscale="log", xlabel="learning rate", ylabel="held-out loss (nats per token)")
    axes.legend()
    figures.save(figure, path)


def setting(text: str) -> Setting:
    rate, sequences = text.split(":")
    return float(rate), int(sequences)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="output folder of slipstream tune --budget")
    parser.add_argument("--jobs", type=int, help="runs at a time")
    parser.add_argument(
        "--guesses", nargs="+", metavar="RATE:SEQUENCES", type=setting, help="to compare with, no sweep"
    )
    parser.add_argument("--by-length", nargs="+", metavar="RATE:SEQUENCES", type=setting, help="branches, no sweep")
    arguments = parser.parse_args()
    sweep = Sweep(arguments.folder, arguments.jobs)
    if arguments.by_length:
        print(by_length(sweep, arguments.by_length))
        return
    if arguments.guesses:
        text = against(sweep, arguments.guesses)
    else:
        sweep.explore()
        text = compare(sweep)
        draw(sweep, arguments.folder / "comparison.png")
    (arguments.folder / "comparison.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
