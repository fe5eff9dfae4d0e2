"""Runs one cell. Writes metrics.jsonl during the run and record.json at its end."""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ...checkpoint.files import write_file
from ...config.defaults import peak_rates_of
from ...config.toml import to_toml
from ...data import text_size
from ...observe.metrics import finite
from ...optim import Alignment
from ...train.build import build_components
from .cell import Cell
from .delayed import DelayedRun
from .record import Evaluation, Record

NUM_COSINES = 200
"""Approximate number of points on the curve of cosines of a cell."""


def record_path(folder: Path, cell: Cell) -> Path:
    return folder / "cells" / cell.name / "record.json"


def run_cell(study: str, cell: Cell, folder: Path, progress: Callable[[int, str], None]) -> Record:
    """Runs a cell and writes its record. progress: called after every evaluation with the number of updates made and a
    short status text."""
    components, steps = build_components(cell.config), cell.config.train.steps
    path = record_path(folder, cell)
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / "config.toml").write_text(to_toml(cell.config), encoding="utf-8")
    run = DelayedRun(cell, components, torch.device(cell.config.train.device))
    tokens_per_step = components.batches.num_tokens(0)
    every = cell.config.evaluation.every_steps or steps
    assert components.validation is not None, "a study without an evaluation is refused"
    text = text_size(components.validation, components.tokenizer, components.tokenizer_json)
    evaluations = [Evaluation(0, 0, run.evaluate().item())]
    seconds, started = 0.0, time.perf_counter()
    with (path.parent / "metrics.jsonl").open("w", encoding="utf-8", buffering=1) as metrics:
        for done in run.train(track_every=max(1, steps // NUM_COSINES)):
            if done % every and done != steps:
                continue
            first = evaluations[-1].step
            losses = run.losses[first:done].tolist()  # the only place that waits for the device
            seconds += time.perf_counter() - started
            for step, loss in enumerate(losses, start=first + 1):
                _write(metrics, step=step, tokens=step * tokens_per_step, loss=loss)
            held_out = run.evaluate().item()
            bits = {} if text is None else {"val_bits_per_byte": text.bits_per_byte(held_out)}
            _write(metrics, step=done, val_loss=held_out, **bits)
            if not math.isfinite(held_out + sum(losses)):
                break
            evaluations.append(Evaluation(done, done * tokens_per_step, held_out))
            progress(done, f"held out {held_out:.4f}")
            started = time.perf_counter()
    final_loss = evaluations[-1].loss if evaluations[-1].step == steps else None
    record = Record(
        id=cell.id,
        study=study,
        optimizer=cell.config.optimizer.name,
        mode=cell.mode,
        seed=cell.config.train.seed,
        setting=cell.setting,
        baseline=cell.synchronous().id,
        learning_rate=peak_rates_of(cell.config.optimizer)[0],
        steps=steps,
        tokens=steps * tokens_per_step,
        parameters=components.model.num_parameters(),
        final_loss=final_loss,
        seconds=seconds,
        tokens_per_second=done * tokens_per_step / seconds,
        optimizer_share=run.optimizer_share(),
        evaluations=evaluations,
        cosines=_cosines(run),
        machine=_machine(run),
        bits_per_byte=None if text is None or final_loss is None else text.bits_per_byte(final_loss),
        source_losses={} if final_loss is None else run.evaluate_sources(),
    )
    write_file(path, [f"{record.to_json()}\n".encode()])  # atomic: the record is complete or does not exist
    return record


def _write(metrics: Any, **values: Any) -> None:
    metrics.write(json.dumps(finite(values)) + "\n")


def _cosines(run: DelayedRun) -> dict[str, list[tuple[int, float]]]:
    """Returns the cosines of every group. Values that are not finite are left out, for example after an update of
    zero."""
    cosines = {}
    for state in run.groups:
        points = [(step, Alignment.from_products(products.tolist()).cosine) for step, products in state.products]
        cosines[state.group.name] = [(step, round(cosine, 5)) for step, cosine in points if math.isfinite(cosine)]
    return cosines


def _machine(run: DelayedRun) -> str:
    device = run.losses.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    return f"{name}, torch {torch.__version__}"
