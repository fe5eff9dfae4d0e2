"""The drawings show every action once, and SVG and PNG show the same."""

from itertools import pairwise
from xml.etree import ElementTree

import pytest

from slipstream.schedule import Op, Schedule
from slipstream.schedule.render import COLOURS, PAPER, UPDATE, Rect, Text, layout, png, svg, text_grid
from slipstream.schedule.simulate import Costs, simulate

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def timeline():
    return simulate(Schedule("two_bw", 4, 4, 3), Costs())


def test_the_grid_is_the_figure_of_the_design():
    timeline = simulate(Schedule("two_bw", 4, 4, 2), Costs(forward=1, backward=1))
    assert text_grid(timeline, max_width=92).splitlines() == [
        "S0  F0/0  F1/0  F2/0  F3/0   .     .     .    B0/0  F4/0  B1/0  F5/0  B2/0  F6/0  B3/0  F7/…",
        "S1   .    F0/0  F1/0  F2/0   .     .    B0/0  F3/0  B1/0  F4/0  B2/0  F5/0  B3/0  F6/0  B4/…",
        "S2   .     .    F0/0  F1/0   .    B0/0  F2/0  B1/0  F3/0  B2/0  F4/0  B3/0  F5/0  B4/0  F6/…",
        "S3   .     .     .    F0/0  B0/0  F1/0  B1/0  F2/0  B2/0  F3/0  B3/0  F4/0  B4/0  F5/0  B5/…",
    ]


def test_a_longer_action_spans_columns_and_a_star_is_an_update():
    timeline = simulate(Schedule("gpipe", 1, 2, 2), Costs(forward=0.5, backward=1))
    assert text_grid(timeline) == "S0  F0/0  F1/0  B0/0------  B1/0------ *F2/1  F3/1  B2/1------  B3/1------ *"


def test_an_update_that_takes_time_has_a_cell_of_its_own():
    timeline = simulate(Schedule("gpipe", 1, 1, 1), Costs(forward=1, backward=1, update=2))
    assert text_grid(timeline) == "S0  F0/0  B0/0  U0/1------"


def test_costs_without_a_common_column_are_drawn_to_the_nearest():
    timeline = simulate(Schedule("gpipe", 1, 2, 1), Costs(forward=1, backward=2.1))
    assert text_grid(timeline) == "S0  F0/0  F1/0  B0/0------  B1/0------ *"


def test_no_row_is_wider_than_asked(timeline):
    for max_width in (20, 80, 1000):
        rows = text_grid(timeline, max_width).splitlines()
        assert max(map(len, rows)) <= max_width
        assert all(row.endswith("…") == (max_width < 1000) for row in rows)


def test_the_svg_is_valid_and_has_a_white_ground_of_its_own(timeline):
    root = ElementTree.fromstring(svg(timeline, "two_bw <4 & 4>"))
    assert root.find(f"{SVG}title").text == "two_bw <4 & 4>"
    ground = root.find(f"{SVG}rect").attrib
    assert ground["fill"] == PAPER
    assert (ground["width"], ground["height"]) == (root.get("width"), root.get("height"))


def test_the_svg_draws_every_action_once_in_the_colour_of_its_version(timeline):
    root = ElementTree.fromstring(svg(timeline, ""))
    drawn = {}
    for rect in root.iter(f"{SVG}rect"):
        if (tip := rect.find(f"{SVG}title")) is not None:
            drawn.setdefault(tip.text.split(",")[0], []).append(rect.get("fill"))
    for box in timeline.boxes:
        action = box.action
        fill = UPDATE if action.op is Op.UPDATE else COLOURS[action.op][action.version % 2][0]
        assert drawn.pop(str(action)) == [fill]
    assert not drawn


def test_shapes_lie_within_the_drawing_and_boxes_of_a_stage_do_not_overlap():
    timeline = simulate(Schedule("two_bw", 20, 24, 3), Costs(latency=0.1))
    drawing = layout(timeline, "title")
    rects = [shape for shape in drawing.shapes if isinstance(shape, Rect)]
    for rect in rects:
        assert 0 <= rect.x <= rect.x + rect.width <= drawing.width
        assert 0 <= rect.y <= rect.y + rect.height <= drawing.height
    boxes = sorted((r for r in rects if r.tip and r.fill != UPDATE), key=lambda r: (r.y, r.x))
    assert len(boxes) == 20 * 24 * 3 * 2
    for one, other in pairwise(boxes):
        assert one.y != other.y or one.x + one.width <= other.x + 1e-6


def test_labels_are_left_out_where_they_do_not_fit():
    def labels(num_steps):
        drawing = layout(simulate(Schedule("two_bw", 2, 8, num_steps), Costs()), "")
        return [shape.text for shape in drawing.shapes if isinstance(shape, Text) and shape.size > 7]

    assert "15" in labels(2)
    assert "799" not in labels(100)


def test_the_legend_names_evaluations_only_where_there_are_some(timeline):
    evaluated = simulate(Schedule("two_bw", 2, 2, 3, evaluate_after=[0], num_evaluations=1), Costs())
    assert "evaluation" not in svg(timeline, "")
    assert ">evaluation<" in svg(evaluated, "")


def test_the_png_has_two_dots_for_each_pixel_of_the_layout(timeline, tmp_path):
    path = tmp_path / "two_bw.png"
    png(timeline, "two_bw", path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    drawing = layout(timeline, "two_bw")
    assert (width, height) == (
        pytest.approx(2 * drawing.width, abs=1),
        pytest.approx(2 * drawing.height, abs=1),
    )


def test_actions_that_take_no_time_leave_the_others_legible():
    timeline = simulate(Schedule("gpipe", 1, 1, 1), Costs(forward=0, backward=1))
    assert text_grid(timeline) == "S0  B0/0 *"
    ElementTree.fromstring(svg(timeline, ""))
