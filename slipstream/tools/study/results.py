"""Computes the results of a study: how much delay costs each optimizer, and how much of that a correction recovers.

    table = rows(read_records(path))
    print(markdown_table(table))
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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .record import Record

MODES = ("sync", "async", "ef")
"""Modes that come first. Other modes follow in the order in which they appear."""
RATE, STEPS, STUDY = "optimizer.learning_rate", "train.steps", "study"
UNCORRECTED = ("async", "pipedream", "paci")
"""Modes without a correction of the delay, which have no recovered share."""
MAX_EXTRAPOLATION = 10.0
"""Maximum factor beyond the longest run, or below the shortest, up to which a token overhead is extrapolated."""

OverheadWay = Literal["lengths", "curve"]


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


@dataclass(frozen=True)
class Row:
    """The cells of a study that differ only in their seed."""

    study: str
    """Study of the first cell. The cells of a row may come from several studies."""
    optimizer: str
    mode: str
    setting: dict[str, Any]
    learning_rate: float
    steps: int
    tokens: int
    parameters: int
    ids: tuple[str, ...]
    """Ids of the cells."""
    baselines: tuple[str, ...]
    """Ids of the baselines of the cells, in the same order."""
    seeds: int
    """Number of cells, including those that diverged."""
    diverged: int
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
    """How many times the tokens the delayed run needs to reach the final loss of sync (`token_overhead`)."""
    overhead_way: OverheadWay | None
    extrapolated: bool
    """Whether the overhead of any seed is extrapolated beyond the lengths that were run."""

    @property
    def synchronous(self) -> bool:
        return self.ids == self.baselines


@dataclass(frozen=True)
class Sweep:
    """Synchronous runs of one optimizer that differ only in learning rate and seed."""

    optimizer: str
    setting: dict[str, Any]
    """Setting without the learning rate."""
    steps: int
    losses: dict[float, Estimate | None]
    """Loss by learning rate, in ascending order."""
    diverged: dict[float, str]
    """By learning rate, if any cell diverged: how many, such as "1 of 3"."""
    best: float | None
    """Learning rate with the lowest mean loss among those where no seed diverged."""

    @property
    def edge(self) -> str | None:
        """Returns "lowest" or "highest" if the best rate is at that end of the sweep, so that a better rate may lie
        beyond it. Returns None otherwise."""
        rates = list(self.losses)
        if self.best is None or len(rates) == 1:
            return None
        return {rates[0]: "lowest", rates[-1]: "highest"}.get(self.best)


# ---- from cells to rows


def final_loss(record: Record) -> float | None:
    """Returns the final loss, or None if the run diverged. In a file the loss of such a run is None, because JSON has
    no nan; directly after a run it may be nan."""
    loss = record.final_loss
    return loss if loss is not None and math.isfinite(loss) else None


def curve(record: Record) -> list[tuple[int, float]]:
    """Returns (tokens, held-out loss) of all evaluations with a finite loss."""
    # JSON turns nan into None, although the type of the field is float.
    return [(e.tokens, e.loss) for e in record.evaluations if e.loss is not None and math.isfinite(e.loss)]


def cells_by_row(records: Iterable[Record]) -> list[list[Record]]:
    """Groups the cells that differ only in their seed. If a mode has the same id twice, it counts once, and the last
    record is used.

    Rows are sorted by optimizer in the order of appearance, then by mode (sync, async, ef, others in the order of
    appearance), then by appearance.

    Studies may name different axes, so that one cell may appear with several settings. The cell then connects these
    settings: they form one row, and its cells get the axes of all. Conversely, cells with equal settings and seeds but
    different ids differ in something that their grids do not name. They are separated by study. A cell to which studies
    give different modes, such as async and ef with a coefficient of 0, is in a row of each mode.
    """
    records = list(records)
    latest = {(record.mode, record.id): record for record in records}
    row_of: dict[tuple[str, str], list[Record]] = {}
    for group in _alike(records):
        found = [row_of[record.mode, record.id] for record in group if (record.mode, record.id) in row_of]
        tied = {id(row): row for row in found}.values()
        joined = [*itertools.chain.from_iterable(tied), *group]
        row_of.update(((record.mode, record.id), joined) for record in joined)
    result = []
    for row in {id(row): row for row in row_of.values()}.values():
        setting = {axis: value for record in row for axis, value in record.setting.items()}
        members = dict.fromkeys((record.mode, record.id) for record in row)
        result.append([dataclasses.replace(latest[member], setting=setting) for member in members])
    optimizers = list(dict.fromkeys(record.optimizer for record in records))
    modes = list(dict.fromkeys([*MODES, *(record.mode for record in records)]))
    places = list(latest)

    def order(row: Sequence[Record]) -> tuple[int, int, int]:
        first = min(places.index((record.mode, record.id)) for record in row)
        return optimizers.index(row[0].optimizer), modes.index(row[0].mode), first

    return sorted(result, key=order)


def _alike(records: Iterable[Record]) -> list[list[Record]]:
    """Groups records with equal settings. If a group would have two cells for one seed, it is split by study."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(_digest(record, record.setting, record.steps), []).append(record)
    result = []
    for group in groups.values():
        if len({record.seed for record in group}) == len({record.id for record in group}):
            result.append(group)
        else:
            result += [[r for r in group if r.study == study] for study in dict.fromkeys(r.study for r in group)]
    return result


def _digest(record: Record, setting: Mapping[str, Any], *more: Any) -> str:
    """Returns a key of everything that defines a cell except its seed. It includes learning rate, tokens per step and
    size, because they may differ without being axes of a grid."""
    size = (record.learning_rate, record.tokens / max(record.steps, 1), record.parameters)
    return json.dumps([record.optimizer, record.mode, setting, *size, *more], sort_keys=True, default=str)


def rows(records: Iterable[Record]) -> list[Row]:
    """Returns a row for every optimizer, mode and setting, in the order of `cells_by_row`."""
    records = list(records)
    groups = cells_by_row(records)
    cells = {cell.id: cell for group in groups for cell in group}
    plain: dict[str, list[Record]] = {}
    for cell in itertools.chain.from_iterable(groups):
        if cell.mode == "async":
            plain.setdefault(cell.baseline, []).append(cell)
    lengths = _lengths(records)
    result = []
    for group in groups:
        first = group[0]
        losses = [final_loss(cell) for cell in group]
        overhead, way, extrapolated = _overhead(group, cells, lengths)
        result.append(
            Row(
                study=first.study,
                optimizer=first.optimizer,
                mode=first.mode,
                setting=first.setting,
                learning_rate=first.learning_rate,
                steps=first.steps,
                tokens=first.tokens,
                parameters=first.parameters,
                ids=tuple(cell.id for cell in group),
                baselines=tuple(cell.baseline for cell in group),
                seeds=len(group),
                diverged=losses.count(None),
                loss=Estimate.over(losses),
                bits_per_byte=Estimate.over(cell.bits_per_byte for cell in group if final_loss(cell) is not None),
                gap=Estimate.over(_gap(cell, cells) for cell in group),
                recovered=Estimate.over(_recovered(cell, plain.get(cell.baseline, []), cells) for cell in group),
                overhead=overhead,
                overhead_way=way,
                extrapolated=extrapolated,
            )
        )
    return result


def _gap(cell: Record, cells: Mapping[str, Record]) -> float | None:
    baseline = cells.get(cell.baseline)
    if baseline is None or cell.id == cell.baseline:
        return None
    loss, goal = final_loss(cell), final_loss(baseline)
    return None if loss is None or goal is None else loss - goal


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


def token_overhead(cell: Record, baseline: Record, lengths: Sequence[Record]) -> tuple[float | None, bool]:
    """Returns how many times the tokens a delayed cell needs to reach the final loss of its baseline, and whether that
    is extrapolated.

    `lengths` has the same cell with the same seed at every number of steps for which it was run, including the cell
    itself. If two or more of them finished (way "lengths"), the final loss is assumed to be linear in ln(tokens)
    between neighbouring lengths, and this is solved for the final loss of the baseline. Every run has its own
    learning-rate schedule, stretched to its length, so these are the losses of complete runs. Beyond the longest run,
    the line through the last two is continued, and below the shortest run the line through the first two, up to
    `MAX_EXTRAPOLATION`. If the line does not fall, there is no result.

    Otherwise (way "curve") there is only one run. The baseline reached the final loss of the delayed cell at a fraction
    f of its tokens (first crossing, linear between evaluations), and the overhead is 1 / f. With a decaying learning
    rate this is too low: the loss falls fast at the end, so a baseline scheduled to end at that loss would have needed
    still fewer tokens. A delayed run that is better than its baseline gets 1.
    """
    loss, goal = final_loss(cell), final_loss(baseline)
    if loss is None or goal is None:
        return None, False
    ends = sorted((other.tokens, end) for other in lengths if (end := final_loss(other)) is not None)
    if len(ends) > 1:
        tokens, extrapolated = _tokens_at(ends, goal)
        return (None, False) if tokens is None else (tokens / cell.tokens, extrapolated)
    if loss <= goal:
        return 1.0, False
    passed = _first_crossing([*(p for p in curve(baseline) if p[0] < baseline.tokens), (baseline.tokens, goal)], loss)
    return (None, False) if passed is None else (cell.tokens / passed, False)


def _tokens_at(ends: Sequence[tuple[int, float]], goal: float) -> tuple[float | None, bool]:
    """Returns the tokens at which the line through two neighbours of `ends` reaches `goal`, and whether that is
    extrapolated. ends: pairs (tokens, loss), sorted by tokens."""
    reached = next((index for index, (_, loss) in enumerate(ends) if loss <= goal), None)
    right = len(ends) - 1 if reached is None else max(reached, 1)
    (t0, loss0), (t1, loss1) = ends[right - 1], ends[right]
    if loss1 >= loss0:
        return None, False
    distance = (loss0 - goal) / (loss0 - loss1) * math.log(t1 / t0)  # distance from t0, in ln(tokens)
    beyond = max(distance - math.log(t1 / t0), -distance)
    if beyond > math.log(MAX_EXTRAPOLATION):
        return None, False
    return t0 * math.exp(distance), beyond > 0


def _first_crossing(points: Sequence[tuple[int, float]], goal: float) -> float | None:
    """Returns the tokens at which a curve first falls to `goal`. None if it never does, or if it starts at or below
    `goal`."""
    for (t0, loss0), (t1, loss1) in itertools.pairwise(points):
        if loss0 <= goal:
            return None
        if loss1 <= goal:
            return t0 + (loss0 - goal) / (loss0 - loss1) * (t1 - t0)
    return None


def _lengths(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Returns by id the same cell at every number of steps. If several studies have different cells for one length, the
    cell's own study is preferred."""
    alike: dict[tuple[str, int], list[Record]] = {}
    keys: dict[str, list[tuple[str, int]]] = {}
    for record in records:
        key = _digest(record, {axis: value for axis, value in record.setting.items() if axis != STEPS}), record.seed
        alike.setdefault(key, []).append(record)
        keys.setdefault(record.id, []).append(key)
    result = {}
    for record in records:
        found = [other for key in dict.fromkeys(keys[record.id]) for other in alike[key]]
        found.sort(key=lambda other: (other.id == record.id, other.study == record.study))
        result[record.id] = list({other.tokens: other for other in found}.values())
    return result


def _overhead(
    group: Sequence[Record], cells: Mapping[str, Record], lengths: Mapping[str, Sequence[Record]]
) -> tuple[Estimate | None, OverheadWay | None, bool]:
    """Returns the overhead of a row. The two ways are never averaged: if any seed has several lengths, only such seeds
    count."""
    pairs = [(c, cells[c.baseline]) for c in group if c.id != c.baseline and c.baseline in cells]
    longer = [(c, b) for c, b in pairs if sum(final_loss(other) is not None for other in lengths[c.id]) > 1]
    found = [token_overhead(c, b, lengths[c.id]) for c, b in longer or pairs]
    estimate = Estimate.over(overhead for overhead, _ in found)
    if estimate is None:
        return None, None, False
    return estimate, "lengths" if longer else "curve", any(extrapolated for _, extrapolated in found)


# ---- learning rates


def best_learning_rates(records: Iterable[Record]) -> list[Sweep]:
    """Returns the learning-rate sweeps of the synchronous cells, by optimizer in the order of appearance.

    An optimizer has several sweeps if something else varies too, such as the number of steps. Settings with only one
    rate are left out, unless the optimizer has no real sweep at all.
    """
    alike: dict[str, dict[str, Record]] = {}
    for record in records:
        if record.id == record.baseline:
            alike.setdefault(_digest_without_rate(record), {})[record.id] = record
    sweeps = [_sweep(list(cells.values())) for cells in alike.values()]
    swept = {sweep.optimizer for sweep in sweeps if len(sweep.losses) > 1}
    optimizers = list(dict.fromkeys(sweep.optimizer for sweep in sweeps))
    sweeps = [sweep for sweep in sweeps if len(sweep.losses) > 1 or sweep.optimizer not in swept]
    return sorted(sweeps, key=lambda sweep: optimizers.index(sweep.optimizer))


def _digest_without_rate(record: Record) -> str:
    setting = {axis: value for axis, value in record.setting.items() if axis not in (RATE, STEPS)}
    return _digest(dataclasses.replace(record, learning_rate=0.0), setting, record.steps)


def _sweep(cells: Sequence[Record]) -> Sweep:
    by_rate: dict[float, list[float | None]] = {}
    for cell in sorted(cells, key=lambda cell: cell.learning_rate):
        by_rate.setdefault(cell.learning_rate, []).append(final_loss(cell))
    losses = {rate: Estimate.over(found) for rate, found in by_rate.items()}
    diverged = {rate: f"{found.count(None)} of {len(found)}" for rate, found in by_rate.items() if None in found}
    sound = {rate: loss.mean for rate, loss in losses.items() if loss is not None and rate not in diverged}
    return Sweep(
        optimizer=cells[0].optimizer,
        setting={axis: value for axis, value in cells[0].setting.items() if axis != RATE},
        steps=cells[0].steps,
        losses=losses,
        diverged=diverged,
        best=min(sound, key=lambda rate: sound[rate]) if sound else None,
    )


# ---- tables


def axes_of(row: Row) -> dict[str, Any]:
    """Returns the setting, together with learning rate and number of steps, which need not be axes of the grid."""
    return {**row.setting, RATE: row.learning_rate, STEPS: row.steps}


def varying(rows: Sequence[Row]) -> list[str]:
    """Returns the axes with two or more values within the rows of one optimizer. They are needed to distinguish the
    rows.

    Within a mode, it is also a difference if one row names an axis and another does not, because the other study left
    the axis at its base value. Between modes it is not a difference, because the axis may matter only under delay.
    """
    axes = _varying([(row.optimizer, row.mode, axes_of(row)) for row in rows])
    seen = [(row.optimizer, row.mode, *(_text(axes_of(row).get(axis)) for axis in axes)) for row in rows]
    return [*axes, STUDY] if len(set(seen)) < len(seen) else axes


def _varying(settings: Sequence[tuple[str, str, Mapping[str, Any]]]) -> list[str]:
    """Returns the axes that vary. settings: tuples (optimizer, mode, axes)."""
    result = []
    for axis in dict.fromkeys(axis for _, _, axes in settings for axis in axes):
        named, by_mode = set(), set()
        for optimizer, mode, axes in settings:
            by_mode.add((optimizer, mode, _text(axes.get(axis))))
            if axis in axes:
                named.add((optimizer, _text(axes[axis])))
        if len(named) > len({key[:1] for key in named}) or len(by_mode) > len({key[:2] for key in by_mode}):
            result.append(axis)
    return result


def value_text(row: Row, axis: str) -> str:
    """Returns the value of an axis as text. Empty if the axis has no effect on the row."""
    return row.study if axis == STUDY else _text(axes_of(row).get(axis))


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Returns the last part of each dotted name, or the whole name if two have the same last part."""
    names = list(dict.fromkeys(names))
    last = [name.rpartition(".")[2] for name in names]
    return {name: short if last.count(short) == 1 else name for name, short in zip(names, last, strict=True)}


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def markdown_table(rows: Sequence[Row]) -> str:
    """Returns the table as Markdown for GitHub. An estimate over fewer seeds than finished shows their number: (2 of
    3)."""
    axes = [axis for axis in varying(rows) if axis != RATE]
    names = short_names(axes)
    any_diverged = any(row.diverged for row in rows)
    any_bits = any(row.bits_per_byte for row in rows)
    header = ["optimizer", "mode", *(names[axis] for axis in axes), "lr", "seeds", "final loss"]
    header += [*(["bits per byte"] if any_bits else []), "gap", "recovered", "token overhead"]
    header += ["diverged"] if any_diverged else []
    lines = []
    for row in rows:
        finished = row.seeds - row.diverged
        way = f"{row.overhead_way}, extrapolated" if row.extrapolated else row.overhead_way
        line = [row.optimizer, row.mode, *(value_text(row, axis) for axis in axes), f"{row.learning_rate:g}"]
        line += [
            str(row.seeds),
            _estimate(row.loss, finished, ".4f"),
            *([_estimate(row.bits_per_byte, finished, ".4f")] if any_bits else []),
            _estimate(row.gap, finished, "+.4f"),
            _estimate(row.recovered, finished, ".0f", scale=100, unit=" %"),
            _estimate(row.overhead, finished, ".3f", unit=f" ({way})"),
        ]
        if any_diverged:
            line.append(f"{row.diverged} of {row.seeds}" if row.diverged else "")
        lines.append(line)
    return _table(header, lines, num_left=2)


def _estimate(estimate: Estimate | None, finished: int, form: str, scale: float = 1, unit: str = "") -> str:
    if estimate is None:
        return ""
    text = f"{scale * estimate.mean:{form}}"
    if estimate.spread is not None:
        text += f" ± {scale * estimate.spread:{form.lstrip('+')}}"
    return f"{text}{unit}" + (f" ({estimate.seeds} of {finished})" if estimate.seeds < finished else "")


def sweep_table(records: Iterable[Record]) -> str:
    """Returns a table of every rate and its loss, with the best in bold. Adds a note if the best rate is at the edge of
    its sweep."""
    sweeps = best_learning_rates(records)
    settings = [{**sweep.setting, STEPS: sweep.steps} for sweep in sweeps]
    axes = _varying([(sweep.optimizer, "sync", setting) for sweep, setting in zip(sweeps, settings, strict=True)])
    names = short_names(axes)
    lines, notes, single = [], [], []
    for sweep, setting in zip(sweeps, settings, strict=True):
        values = {names[axis]: _text(setting.get(axis)) for axis in axes}
        lines.append([sweep.optimizer, *values.values(), ", ".join(_rate_text(sweep, rate) for rate in sweep.losses)])
        name = ", ".join([sweep.optimizer, *(f"{axis} {value}" for axis, value in values.items() if value)])
        if sweep.edge:
            notes.append(f"- {name}: the best rate is the {sweep.edge} tried, and a better one may lie beyond.")
        elif len(sweep.losses) == 1:
            single.append(name)
    if single:
        notes.append(f"- only one rate was tried: {'; '.join(single)}.")
    table = _table(["optimizer", *names.values(), "learning rate: final loss"], lines, num_left=2 + len(axes))
    return "\n".join([table, *notes, ""]) if notes else table


def _rate_text(sweep: Sweep, rate: float) -> str:
    loss = sweep.losses[rate]
    words = [] if loss is None else [_estimate(loss, loss.seeds, ".4f")]
    if rate in sweep.diverged:
        words.append(f"diverged {sweep.diverged[rate]}")
    text = f"{rate:g}: {' '.join(words)}"
    return f"**{text}**" if rate == sweep.best else text


def _table(header: Sequence[str], lines: Sequence[Sequence[str]], num_left: int) -> str:
    """Returns a Markdown table. Columns after the first `num_left` are right-aligned."""
    widths = [max(3, *(len(line[column]) for line in [header, *lines])) for column in range(len(header))]
    rule = ["-" * width if column < num_left else "-" * (width - 1) + ":" for column, width in enumerate(widths)]

    def text(line: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if column < num_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        return f"| {' | '.join(cells)} |"

    return "\n".join([text(header), text(rule), *(text(line) for line in lines), ""])
