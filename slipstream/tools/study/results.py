"""Computes the results of a study: how much delay costs each optimizer, and how much of that a correction recovers.

    records = read_records(path)
    print(markdown_table(rows(records)))
    print(sweep_table(records))

Every cell is compared with its synchronous cell of the same seed, which `Record.baseline` names. So gaps are computed
per pair, and then averaged. The pairs are not found by comparing settings, because a synchronous cell lacks the axes
that matter only under delay. A cell that diverged still counts in its row; means cover only cells that finished.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .record import Record

MODES = ("sync", "async", "ef")
"""Modes that come first. Other modes follow in the order in which they appear."""
RATE, STEPS = "optimizer.learning_rate", "train.steps"
UNCORRECTED = ("async", "pipedream", "paci")
"""Modes without a correction of the delay, which have no recovered share."""
MAX_EXTRAPOLATION = 10.0
"""Maximum factor beyond the longest run, or below the shortest, up to which a token overhead is extrapolated."""


@dataclass(frozen=True)
class Estimate:
    """Mean and spread of a number over the seeds that have it."""

    mean: float
    spread: float | None
    """Sample standard deviation over seeds. None for one seed."""
    seeds: int

    @classmethod
    def over(cls, values: Iterable[float | None]) -> Estimate | None:
        known = [value for value in values if value is not None]
        if not known:
            return None
        return cls(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None, len(known))


@dataclass(frozen=True, eq=False)  # a row equals only itself, and can be a key
class Row:
    """The cells of a study that differ only in their seed."""

    optimizer: str
    mode: str
    axes: dict[str, Any]
    """Setting, together with learning rate and number of steps, which need not be axes of the grid."""
    cells: list[Record]
    diverged: int
    """Number of cells that diverged."""
    loss: Estimate | None
    """Final held-out loss, in nats per token. None if no cell finished."""
    bits_per_byte: Estimate | None
    """The same loss in bits per byte. None also means that the bytes of the tokens are unknown."""
    gap: Estimate | None
    """Final loss minus the final loss of the baseline. None for a synchronous row, or if no pair finished."""
    recovered: Estimate | None
    """Share of the gap of async that is removed: 1 - gap / gap of async. None for modes without a correction, and if
    async is missing, diverged or is no worse than sync."""
    overhead: Estimate | None
    """How many times the tokens the delayed run needs to reach the final loss of sync."""
    overhead_way: str
    """How the overhead was found: "curve", "lengths", or "lengths, extrapolated" if that holds for any seed."""

    @property
    def finished(self) -> int:
        return len(self.cells) - self.diverged

    @property
    def is_synchronous(self) -> bool:
        return all(cell.id == cell.baseline for cell in self.cells)


# ---- from cells to rows


def rows(records: Iterable[Record]) -> list[Row]:
    """Returns a row for every optimizer, mode and setting.

    Rows are sorted by optimizer in the order of appearance, then by mode (sync, async, ef, others in the order of
    appearance), then by appearance.
    """
    records = list(records)
    groups = _groups(records)
    cells = {cell.id: cell for group in groups for cell in group}
    plain: dict[str, list[Record]] = defaultdict(list)
    for cell in itertools.chain.from_iterable(groups):
        if cell.mode == "async":
            plain[cell.baseline].append(cell)
    ends = _ends(records)
    result = []
    for group in groups:
        first, losses = group[0], [cell.final_loss for cell in group]
        overhead, way = _overhead(group, cells, ends)
        result.append(
            Row(
                optimizer=first.optimizer,
                mode=first.mode,
                axes={**first.setting, RATE: first.learning_rate, STEPS: first.steps},
                cells=group,
                diverged=losses.count(None),
                loss=Estimate.over(losses),
                bits_per_byte=Estimate.over(cell.bits_per_byte for cell in group),
                gap=Estimate.over(_gap(cell, cells) for cell in group),
                recovered=Estimate.over(_recovered(cell, plain[cell.baseline], cells) for cell in group),
                overhead=overhead,
                overhead_way=way,
            )
        )
    return result


def _groups(records: Sequence[Record]) -> list[list[Record]]:
    """Groups the cells that differ only in their seed, in the order of the rows. If a mode has the same id twice, it
    counts once, and the last record is used.

    A cell may have several places in a grid, with several settings. It then connects these settings: they form one row,
    and its cells get the axes of all. A cell that appears in two modes, such as async and ef with a coefficient of 0,
    is in a row of each.
    """
    latest = {(record.mode, record.id): record for record in records}
    alike: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        alike[_key(record, record.setting, record.learning_rate, record.steps)].append(record)
    group_of: dict[tuple[str, str], list[Record]] = {}
    for group in alike.values():
        members = [(record.mode, record.id) for record in group]
        tied = {id(found): found for member in members if (found := group_of.get(member))}
        joined = [*itertools.chain.from_iterable(tied.values()), *group]
        group_of.update(((record.mode, record.id), joined) for record in joined)
    result = []
    for group in {id(group): group for group in group_of.values()}.values():
        setting = {axis: value for record in group for axis, value in record.setting.items()}
        cells = {(record.mode, record.id): latest[record.mode, record.id] for record in group}
        result.append([dataclasses.replace(cell, setting=setting) for cell in cells.values()])
    optimizers = list(dict.fromkeys(record.optimizer for record in records))
    modes = list(dict.fromkeys([*MODES, *(record.mode for record in records)]))
    return sorted(result, key=lambda group: (optimizers.index(group[0].optimizer), modes.index(group[0].mode)))


def _key(record: Record, setting: Mapping[str, Any], *more: float) -> str:
    """Returns a key of optimizer, mode, setting, tokens per step and size. The last two may differ without being axes
    of a grid."""
    size = record.tokens / record.steps, record.parameters
    return json.dumps([record.optimizer, record.mode, setting, size, more], sort_keys=True)


def _without(setting: Mapping[str, Any], *axes: str) -> dict[str, Any]:
    return {axis: value for axis, value in setting.items() if axis not in axes}


def _gap(cell: Record, cells: Mapping[str, Record]) -> float | None:
    baseline = cells.get(cell.baseline)
    if baseline is None or cell.id == cell.baseline or cell.final_loss is None or baseline.final_loss is None:
        return None
    return cell.final_loss - baseline.final_loss


def _recovered(cell: Record, plain: Sequence[Record], cells: Mapping[str, Record]) -> float | None:
    """Returns the recovered share of the gap. plain: the async cells with the same baseline. If there are several, for
    example with different numbers of stages, the one that shares most of the cell's setting is used."""
    gap = _gap(cell, cells)
    if gap is None or cell.mode in UNCORRECTED or not plain:
        return None
    items = cell.setting.items()
    nearest = max(plain, key=lambda other: sum(other.setting.get(axis) == value for axis, value in items))
    full = _gap(nearest, cells)
    return None if full is None or full <= 0 else 1 - gap / full


# ---- token overhead

Ends = Sequence[tuple[int, float]]
"""Tokens and final loss of the same cell at every number of steps for which it finished, by tokens."""


def _ends(records: Sequence[Record]) -> dict[str, Ends]:
    """Returns the ends of every cell, by id. Its lengths have all its settings but the number of steps."""
    alike: dict[str, dict[int, Record]] = defaultdict(dict)
    places: dict[str, dict[str, dict[int, Record]]] = defaultdict(dict)
    for record in records:
        key = _key(record, _without(record.setting, STEPS), record.learning_rate, record.seed)
        alike[key][record.tokens] = record
        places[record.id][key] = alike[key]
    result: dict[str, Ends] = {}
    for record in records:
        lengths = dict(itertools.chain.from_iterable(place.items() for place in places[record.id].values()))
        lengths[record.tokens] = record
        ends = [(tokens, other.final_loss) for tokens, other in lengths.items() if other.final_loss is not None]
        result[record.id] = sorted(ends)
    return result


def _overhead(
    group: Sequence[Record], cells: Mapping[str, Record], ends: Mapping[str, Ends]
) -> tuple[Estimate | None, str]:
    """Returns the overhead of a row, and how it was found. The two ways are never averaged: if any seed finished at
    several lengths, only such seeds count."""
    pairs = [(c, cells[c.baseline]) for c in group if c.id != c.baseline and c.baseline in cells]
    with_lengths = [(c, b) for c, b in pairs if len(ends[c.id]) > 1]
    if not with_lengths:
        return Estimate.over(overhead_by_curve(c, b) for c, b in pairs), "curve"
    found = [overhead_by_lengths(c, b, ends[c.id]) for c, b in with_lengths]
    is_extrapolated = any(is_beyond for _, is_beyond in found)
    return Estimate.over(overhead for overhead, _ in found), "lengths, extrapolated" if is_extrapolated else "lengths"


def overhead_by_lengths(cell: Record, baseline: Record, ends: Ends) -> tuple[float | None, bool]:
    """Returns how many times the tokens a delayed cell needs to reach the final loss of its baseline, and whether that
    is extrapolated.

    The final loss is assumed to be linear in ln(tokens) between neighbouring lengths. Every run has its own
    learning-rate schedule, stretched to its length, so these are the losses of complete runs. Beyond the longest run,
    the line through the last two is continued, and below the shortest run the line through the first two, up to
    `MAX_EXTRAPOLATION`. If the line does not fall, there is no result.
    """
    goal = baseline.final_loss
    if cell.final_loss is None or goal is None:
        return None, False
    reached = next((index for index, (_, loss) in enumerate(ends) if loss <= goal), len(ends) - 1)
    right = max(reached, 1)
    (t0, loss0), (t1, loss1) = ends[right - 1], ends[right]
    if loss1 >= loss0:
        return None, False
    distance = (loss0 - goal) / (loss0 - loss1) * math.log(t1 / t0)  # distance from t0, in ln(tokens)
    beyond = max(distance - math.log(t1 / t0), -distance)
    if beyond > math.log(MAX_EXTRAPOLATION):
        return None, False
    return t0 * math.exp(distance) / cell.tokens, beyond > 0


def overhead_by_curve(cell: Record, baseline: Record) -> float | None:
    """Estimates the overhead from one run. The baseline reached the final loss of the delayed cell at a fraction f of
    its tokens (first crossing, linear between evaluations), and the overhead is 1 / f.

    With a decaying learning rate this is too low: the loss falls fast at the end, so a baseline scheduled to end at
    that loss would have needed still fewer tokens. A delayed run that is better than its baseline gets 1.
    """
    loss, goal = cell.final_loss, baseline.final_loss
    if loss is None or goal is None:
        return None
    if loss <= goal:
        return 1.0
    points = [point for point in curve(baseline) if point[0] < baseline.tokens]
    for (t0, loss0), (t1, loss1) in itertools.pairwise([*points, (baseline.tokens, goal)]):
        if loss0 <= loss:
            return None  # the curve starts at or below the loss
        if loss1 <= loss:
            return cell.tokens / (t0 + (loss0 - loss) / (loss0 - loss1) * (t1 - t0))
    return None


def curve(record: Record) -> list[tuple[int, float]]:
    """Returns (tokens, held-out loss) of all evaluations with a finite loss."""
    return [(e.tokens, e.loss) for e in record.evaluations if e.loss is not None]


# ---- tables


def varying(rows: Sequence[Row] | Sequence[Sweep]) -> list[str]:
    """Returns the axes with two or more values within the rows of one optimizer. They are needed to distinguish the
    rows.

    Within a mode, it is also a difference if one row names an axis and another does not, because the other leaves it at
    its base value. Between modes it is not a difference, because the axis may matter only under delay.
    """
    result = []
    for axis in dict.fromkeys(axis for row in rows for axis in row.axes):
        texts: dict[tuple[str, str | None], set[str]] = defaultdict(set)
        for row in rows:
            texts[row.optimizer, row.mode].add(value_text(row.axes.get(axis)))
            if axis in row.axes:
                texts[row.optimizer, None].add(value_text(row.axes[axis]))
        if any(len(different) > 1 for different in texts.values()):
            result.append(axis)
    return result


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Returns the last part of each dotted name, or the whole name if two have the same last part."""
    names = list(dict.fromkeys(names))
    last = [name.rpartition(".")[2] for name in names]
    return {name: short if last.count(short) == 1 else name for name, short in zip(names, last, strict=True)}


def value_text(value: Any) -> str:
    """Returns the value of an axis as text. Empty for None: the axis has no effect on the row."""
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def markdown_table(rows: Sequence[Row]) -> str:
    """Returns the table as Markdown for GitHub. An estimate over fewer seeds than finished shows their number: (2 of
    3)."""
    axes = [axis for axis in varying(rows) if axis != RATE]
    names = short_names(axes)
    columns = [
        ["optimizer", *(row.optimizer for row in rows)],
        ["mode", *(row.mode for row in rows)],
        *([names[axis], *(value_text(row.axes.get(axis)) for row in rows)] for axis in axes),
        ["lr", *(f"{row.axes[RATE]:g}" for row in rows)],
        ["seeds", *(str(len(row.cells)) for row in rows)],
        ["final loss", *(_estimate(row.loss, row.finished, ".4f") for row in rows)],
        ["bits per byte", *(_estimate(row.bits_per_byte, row.finished, ".4f") for row in rows)],
        ["gap", *(_estimate(row.gap, row.finished, "+.4f") for row in rows)],
        ["recovered", *(_estimate(row.recovered, row.finished, ".0f", scale=100, unit=" %") for row in rows)],
        ["token overhead", *(_estimate(r.overhead, r.finished, ".3f", unit=f" ({r.overhead_way})") for r in rows)],
        ["diverged", *(f"{row.diverged} of {len(row.cells)}" if row.diverged else "" for row in rows)],
    ]
    shown = [column for column in columns if column[0] not in ("bits per byte", "diverged") or any(column[1:])]
    return _table(shown, num_left=2)


def _estimate(estimate: Estimate | None, finished: int, form: str, scale: float = 1, unit: str = "") -> str:
    if estimate is None:
        return ""
    text = f"{scale * estimate.mean:{form}}"
    if estimate.spread is not None:
        text += f" ± {scale * estimate.spread:{form.lstrip('+')}}"
    return f"{text}{unit}" + (f" ({estimate.seeds} of {finished})" if estimate.seeds < finished else "")


def _table(columns: Sequence[Sequence[str]], num_left: int) -> str:
    """Returns a Markdown table. columns: each begins with its heading. Those after the first `num_left` are
    right-aligned."""
    aligned = []
    for index, column in enumerate(columns):
        width = max(3, *map(len, column))
        side, rule = ("<", "-" * width) if index < num_left else (">", "-" * (width - 1) + ":")
        heading, *values = (f"{text:{side}{width}}" for text in column)
        aligned.append([heading, rule, *values])
    return "".join(f"| {' | '.join(line)} |\n" for line in zip(*aligned, strict=True))


# ---- learning rates


@dataclass(frozen=True)
class Sweep:
    """Synchronous runs of one optimizer that differ only in learning rate and seed."""

    mode = "sync"
    optimizer: str
    axes: dict[str, Any]
    """Setting without the learning rate, and the number of steps."""
    losses: dict[float, list[float]]
    """Final losses of all seeds by learning rate, in ascending order. inf stands for a run that diverged."""

    @property
    def best(self) -> float | None:
        """Learning rate with the lowest mean loss among those where no seed diverged."""
        means = {rate: statistics.fmean(losses) for rate, losses in self.losses.items()}
        best = min(means, key=means.__getitem__)
        return best if math.isfinite(means[best]) else None


def best_learning_rates(records: Iterable[Record]) -> list[Sweep]:
    """Returns the learning-rate sweeps of the synchronous cells, by optimizer in the order of appearance.

    An optimizer has several sweeps if something else varies too, such as the number of steps. Settings with only one
    rate are left out, unless the optimizer has no real sweep at all.
    """
    alike: dict[str, dict[str, Record]] = defaultdict(dict)
    for record in records:
        if record.id == record.baseline:
            alike[_key(record, _without(record.setting, RATE, STEPS), record.steps)][record.id] = record
    sweeps = []
    for cells in alike.values():
        losses: dict[float, list[float]] = defaultdict(list)
        for cell in sorted(cells.values(), key=lambda cell: cell.learning_rate):
            losses[cell.learning_rate].append(math.inf if cell.final_loss is None else cell.final_loss)
        first = next(iter(cells.values()))
        sweeps.append(Sweep(first.optimizer, {**_without(first.setting, RATE), STEPS: first.steps}, losses))
    swept = {sweep.optimizer for sweep in sweeps if len(sweep.losses) > 1}
    optimizers = list(dict.fromkeys(sweep.optimizer for sweep in sweeps))
    sweeps = [sweep for sweep in sweeps if len(sweep.losses) > 1 or sweep.optimizer not in swept]
    return sorted(sweeps, key=lambda sweep: optimizers.index(sweep.optimizer))


def sweep_table(records: Iterable[Record]) -> str:
    """Returns a table of every rate and its loss, with the best in bold. Adds a note if the best rate is at the edge of
    its sweep, so that a better one may lie beyond."""
    sweeps = best_learning_rates(records)
    axes = varying(sweeps)
    names = short_names(axes)
    lines, notes, single = [["optimizer", *names.values(), "learning rate: final loss"]], [], []
    for sweep in sweeps:
        values = [value_text(sweep.axes.get(axis)) for axis in axes]
        lines.append([sweep.optimizer, *values, ", ".join(_rate_text(sweep, rate) for rate in sweep.losses)])
        words = [f"{names[axis]} {value}" for axis, value in zip(axes, values, strict=True) if value]
        name = ", ".join([sweep.optimizer, *words])
        lowest, highest = min(sweep.losses), max(sweep.losses)
        if lowest == highest:
            single.append(name)
        elif sweep.best in (lowest, highest):
            edge = "lowest" if sweep.best == lowest else "highest"
            notes.append(f"- {name}: the best rate is the {edge} tried, and a better one may lie beyond.")
    if single:
        notes.append(f"- only one rate was tried: {'; '.join(single)}.")
    table = _table(list(zip(*lines, strict=True)), num_left=len(lines[0]))
    return "\n".join([table, *notes, ""]) if notes else table


def _rate_text(sweep: Sweep, rate: float) -> str:
    losses = sweep.losses[rate]
    finished = [loss for loss in losses if math.isfinite(loss)]
    words = [f"{rate:g}:", _estimate(Estimate.over(finished), len(finished), ".4f")]
    if len(finished) < len(losses):
        words.append(f"diverged {len(losses) - len(finished)} of {len(losses)}")
    text = " ".join(filter(None, words))
    return f"**{text}**" if rate == sweep.best else text
