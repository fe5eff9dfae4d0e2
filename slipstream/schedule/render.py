"""Draws a timeline as text for the terminal, as SVG and as PNG.

    print(text_grid(timeline))
    Path("two_bw.svg").write_text(svg(timeline, "two_bw, 4 stages"))

SVG and PNG are drawn from the same shapes, those of `layout`, so they always show the same picture.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from html import escape
from pathlib import Path

from .action import Op
from .schedule import ScheduleError
from .simulate import Box, Timeline

# Two shades for each kind of action, for even and odd weight versions, each with a label colour that is legible on it.
COLOURS = {
    Op.FORWARD: (("#bcdcf5", "#12324d"), ("#3a84c4", "#ffffff")),
    Op.BACKWARD: (("#fbdcae", "#4a2e05"), ("#e8952c", "#2b1a00")),
    Op.EVALUATE: (("#d9cbef", "#33205c"), ("#8a63c7", "#ffffff")),
}
UPDATE, IDLE, INK, FAINT, PAPER = "#c2185b", "#e9ecef", "#1f2328", "#6b7280", "#ffffff"
NAMES = {Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.EVALUATE: "evaluation"}
# Margins in pixels around the rows, for the names of the stages, the title, the axis and the legend.
LEFT, RIGHT, TOP, BOTTOM = 74, 24, 52, 74
# Width of a digit relative to the font size: slightly more than in the fonts that may be used.
DIGIT_WIDTH = 0.64


def text_grid(timeline: Timeline, max_width: int = 120) -> str:
    """Draws one row per stage: `F8/1` is the forward of microbatch 8 on version 1, `*` an update, `.` idle time.

    The width of a column is the longest time that divides all forwards and backwards. If that makes too many columns to
    read, it is the shortest of them. All times are rounded to the nearest column. Rows that are too long are cut and
    end with `…`.
    """
    column = _column(timeline)
    labels = {box: f"{box.action.op}{box.action.microbatch}/{box.action.version}" for box in timeline.boxes}
    # A space, a place for the `*`, and the longest label.
    cell = 2 + max(map(len, labels.values()))
    num_columns = min(_nearest(timeline.makespan / column), max_width // cell + 1)  # the rest is cut
    name_width = len(f"S{timeline.schedule.num_stages - 1}")
    lines = []
    for stage, row in enumerate(timeline.boxes_by_stage):
        text = [*(("  " + ".".center(cell - 2)) * num_columns), " ", " "]
        for box in row:
            begin, end = _nearest(box.start / column), min(_nearest(box.end / column), num_columns)
            if begin < end:
                fill = " " if end - begin == 1 else "-"
                text[begin * cell + 2 : end * cell] = labels[box].ljust((end - begin) * cell - 2, fill)
            elif box.action.op is Op.UPDATE and begin <= num_columns:
                text[begin * cell + 1] = "*"
        line = f"S{stage}".ljust(name_width) + "".join(text).rstrip()
        lines.append(line if len(line) <= max_width else line[: max_width - 1] + "…")
    return "\n".join(lines)


def _column(timeline: Timeline) -> float:
    lengths = {box.end - box.start for box in timeline.boxes if box.action.op is not Op.UPDATE}
    costs = {Fraction(length).limit_denominator(1000) for length in lengths} - {Fraction(0)}
    denominator = math.lcm(*(cost.denominator for cost in costs))
    common = Fraction(math.gcd(*(int(cost * denominator) for cost in costs)), denominator)
    shortest = min(costs)
    return float(common if shortest <= 2 * common else shortest)


def _nearest(number: float) -> int:
    return math.floor(number + 0.5)


@dataclass(frozen=True)
class Rect:
    x: float
    y: float
    width: float
    height: float
    fill: str
    tip: str = ""


@dataclass(frozen=True)
class Text:
    x: float
    y: float
    """Vertical middle of the line of text."""
    text: str
    size: float
    fill: str
    anchor: str = "middle"
    """Horizontal anchor: start, middle or end."""
    bold: bool = False


@dataclass(frozen=True)
class Drawing:
    """Shapes from back to front, in pixels, with y pointing down."""

    width: float
    height: float
    shapes: tuple[Rect | Text, ...]


def layout(timeline: Timeline, title: str) -> Drawing:
    """Computes the position of all shapes: one row per stage, grey where it is idle, with one box per action. Time runs
    to the right."""
    num_stages = timeline.schedule.num_stages
    makespan = timeline.makespan
    plot_width = _plot_width(timeline)
    pitch = max(10.0, min(38.0, 640 / num_stages))
    row_height = pitch * 0.8
    bottom = TOP + num_stages * pitch
    width, height = LEFT + plot_width + RIGHT, bottom + BOTTOM

    def x(time: float) -> float:
        return LEFT + time / makespan * plot_width

    shapes: list[Rect | Text] = [
        Rect(0, 0, width, height, PAPER),
        Text(LEFT, 26, title, 16, INK, anchor="start", bold=True),
    ]
    name_every = math.ceil(14 / pitch)
    for stage, row in enumerate(timeline.boxes_by_stage):
        y = TOP + stage * pitch
        if stage % name_every == 0:
            shapes.append(Text(LEFT - 10, y + row_height / 2, f"stage {stage}", 12, INK, anchor="end"))
        shapes.append(Rect(LEFT, y, plot_width, row_height, IDLE))
        for box in row:
            if box.action.op is not Op.UPDATE:
                shapes += _box(box, x(box.start), x(box.end), y, row_height)
    # Updates are drawn last and a little taller than the row, because most of them take no time and lie between two
    # boxes.
    for box in timeline.boxes:
        if box.action.op is Op.UPDATE:
            length = max(3.0, x(box.end) - x(box.start))
            middle, y = (x(box.start) + x(box.end)) / 2, TOP + box.action.stage * pitch
            overhang = pitch * 0.1
            shapes.append(Rect(middle - length / 2, y - overhang, length, row_height + 2 * overhang, UPDATE, _tip(box)))
    shapes += _axis(makespan, plot_width, bottom + 4)
    shapes += _legend(timeline, height - 20)
    return Drawing(width, height, tuple(shapes))


def _plot_width(timeline: Timeline) -> float:
    """Returns a width with room for a label in the shortest box, but not less than the legend needs, nor more than a
    page shows."""
    lengths = [box.end - box.start for box in timeline.boxes if box.action.op is not Op.UPDATE]
    wanted = 24 * timeline.makespan / min(length for length in lengths if length > 0)
    return max(760.0, min(1600.0, wanted))


def _box(box: Box, left: float, right: float, y: float, height: float) -> list[Rect | Text]:
    fill, ink = COLOURS[box.action.op][box.action.version % 2]
    # A thin gap separates neighbours of the same shade, unless the boxes themselves are almost as thin.
    gap = 1.0 if right - left > 4 else 0.0
    shapes: list[Rect | Text] = [Rect(left, y, right - left - gap, height, fill, _tip(box))]
    label = str(box.action.microbatch)
    size = min(12.0, height * 0.6, (right - left - 3) / (len(label) * DIGIT_WIDTH))
    if size >= 8:
        shapes.append(Text((left + right - gap) / 2, y + height / 2, label, size, ink))
    return shapes


def _tip(box: Box) -> str:
    return f"{box.action}, {box.start:g} to {box.end:g}"


def _axis(makespan: float, width: float, y: float) -> list[Rect | Text]:
    shapes: list[Rect | Text] = [Rect(LEFT, y, width, 1, FAINT)]
    step = _tick(makespan * 60 / width)
    for i in range(math.floor(makespan / step + 1e-9) + 1):
        x = LEFT + i * step / makespan * width
        shapes.append(Rect(x - 0.5, y, 1, 5, FAINT))
        shapes.append(Text(x, y + 14, f"{i * step:g}", 11, FAINT))
    shapes.append(Text(LEFT - 10, y + 14, "time", 11, FAINT, anchor="end"))
    return shapes


def _tick(least: float) -> float:
    """Returns the smallest of 1, 2, 5, 10, 20, ... (or of 0.1, 0.2, 0.5, ...) that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)


def _legend(timeline: Timeline, y: float) -> list[Rect | Text]:
    shown = {box.action.op for box in timeline.boxes}
    entries = [(name, [shade for shade, _ in COLOURS[op]], 14.0) for op, name in NAMES.items() if op in shown]
    entries += [("update", [UPDATE], 3.0), ("idle", [IDLE], 14.0)]
    shapes: list[Rect | Text] = []
    x = float(LEFT)
    for name, fills, width in entries:
        for fill in fills:
            shapes.append(Rect(x, y - 7, width, 14, fill))
            x += width
        shapes.append(Text(x + 6, y, name, 12, INK, anchor="start"))
        x += 6 + 7 * len(name) + 22
    shapes.append(Text(x, y, "shades alternate with the weight version", 12, FAINT, anchor="start"))
    return shapes


def svg(timeline: Timeline, title: str) -> str:
    """Draws a self-contained SVG with a white background. A box shows its action and its time as a tooltip."""
    drawing = layout(timeline, title)
    width, height = _number(drawing.width), _number(drawing.height)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" font-family="Helvetica, Arial, sans-serif">',
        f"<title>{escape(title)}</title>",
    ]
    for shape in drawing.shapes:
        if isinstance(shape, Rect):
            place = f'x="{_number(shape.x)}" y="{_number(shape.y)}"'
            size = f'width="{_number(shape.width)}" height="{_number(shape.height)}"'
            end = f"><title>{escape(shape.tip)}</title></rect>" if shape.tip else "/>"
            lines.append(f'<rect {place} {size} fill="{shape.fill}"{end}')
        else:
            # Placed by its baseline, because not every viewer can centre a line of text vertically.
            place = f'x="{_number(shape.x)}" y="{_number(shape.y + 0.36 * shape.size)}"'
            style = f'font-size="{_number(shape.size)}" fill="{shape.fill}" text-anchor="{shape.anchor}"'
            bold = ' font-weight="bold"' if shape.bold else ""
            lines.append(f"<text {place} {style}{bold}>{escape(shape.text)}</text>")
    return "\n".join([*lines, "</svg>", ""])


def _number(value: float) -> str:
    return f"{round(value, 2):g}"


def png(timeline: Timeline, title: str, path: Path) -> None:
    """Writes the same drawing as `svg` as a PNG file, with matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise ScheduleError(f"{path} needs matplotlib: install slipstream[plot]") from error
    drawing = layout(timeline, title)
    # A pixel of the layout is one point here (72 per inch) and two dots, which is sharp on any screen.
    figure = Figure(figsize=(drawing.width / 72, drawing.height / 72), dpi=144)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, drawing.width), ylim=(drawing.height, 0))
    axes.axis("off")
    for shape in drawing.shapes:
        if isinstance(shape, Rect):
            corner = (shape.x, shape.y)
            axes.add_patch(Rectangle(corner, shape.width, shape.height, facecolor=shape.fill, linewidth=0))
        else:
            axes.text(
                shape.x,
                shape.y,
                shape.text,
                fontsize=shape.size,
                color=shape.fill,
                fontweight="bold" if shape.bold else "normal",
                horizontalalignment={"start": "left", "middle": "center", "end": "right"}[shape.anchor],
                verticalalignment="center_baseline",
            )
    FigureCanvasAgg(figure).print_png(path)
