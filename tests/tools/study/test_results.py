"""What a study found, on records made by hand, whose answers are known."""

import math
from typing import Any

import pytest

from experiments.figures import courses
from slipstream.tools.study.record import Evaluation, Record
from slipstream.tools.study.results import (
    Estimate,
    Row,
    best_learning_rates,
    markdown_table,
    overhead_by_curve,
    rows,
    sweep_table,
)


def cell(mode: str, loss: float | None, seed: int = 0, optimizer: str = "muon", **changes: Any) -> Record:
    """Of 100 steps of 10 tokens, measured against the sync cell of the same optimizer, seed and steps."""
    steps = changes.pop("steps", 100)
    setting = changes.get("setting", {})
    name = f"{optimizer} {seed} {steps}"
    values: dict[str, Any] = {
        "id": f"{name} {mode} {sorted(setting.items())}" if mode != "sync" else f"{name} sync",
        "study": "main",
        "setting": {},
        "baseline": f"{name} sync",
        "learning_rate": 0.01,
        "tokens": 10 * steps,
        "parameters": 1000,
        "seconds": 1.0,
        "tokens_per_second": 1000.0,
        "optimizer_share": 0.1,
    }
    values |= changes
    return Record(optimizer=optimizer, mode=mode, seed=seed, steps=steps, final_loss=loss, **values)


def by_mode(records: list[Record]) -> dict[str, Row]:
    table = rows(records)
    assert len({row.mode for row in table}) == len(table)
    return {row.mode: row for row in table}


def approx(mean: float, spread: float | None, seeds: int) -> Estimate:
    return Estimate(pytest.approx(mean), None if spread is None else pytest.approx(spread), seeds)


THREE_SEEDS = [
    *(cell("sync", loss, seed) for seed, loss in enumerate([2.0, 2.2, 2.4])),
    *(cell("async", loss, seed) for seed, loss in enumerate([2.1, 2.4, 2.7])),
    *(cell("ef", loss, seed) for seed, loss in enumerate([2.05, 2.25, 2.43])),
]


def test_losses_gaps_and_recovery_are_paired_by_seed():
    table = by_mode(THREE_SEEDS)
    assert table["sync"].loss == approx(2.2, 0.2, 3)
    # 0.1, 0.2, 0.3: that sync itself spreads by 0.2 does not widen the gap.
    assert table["async"].gap == approx(0.2, 0.1, 3)
    # 0.05, 0.05, 0.03
    assert table["ef"].gap == approx(0.13 / 3, 0.02 / math.sqrt(3), 3)
    # 1 - 0.05 / 0.1, 1 - 0.05 / 0.2, 1 - 0.03 / 0.3
    assert table["ef"].recovered == approx(2.15 / 3, 0.2020726, 3)


def test_bits_per_byte_stand_beside_the_loss_where_they_are_known():
    known = [cell("sync", loss, seed, bits_per_byte=2 * loss) for seed, loss in enumerate([2.0, 2.2])]
    diverged = cell("sync", None, seed=2)
    [row] = rows([*known, diverged])
    assert row.bits_per_byte == approx(4.2, 0.2 * 2**0.5, 2)
    header, _, line, *_ = (part.split("|") for part in markdown_table([row]).splitlines())
    at = [name.strip() for name in header].index("bits per byte")
    assert header[at - 1].strip() == "final loss" and line[at].strip() == "4.2000 ± 0.2828"
    assert "bits per byte" not in markdown_table(rows(THREE_SEEDS))  # of records that do not have them


def test_a_synchronous_row_has_no_gap_and_async_recovers_nothing():
    table = by_mode(THREE_SEEDS)
    sync, plain = table["sync"], table["async"]
    assert sync.is_synchronous and not plain.is_synchronous
    assert sync.gap is sync.recovered is sync.overhead is None
    assert plain.recovered is None


def test_one_seed_has_no_spread():
    table = by_mode([cell("sync", 2.0), cell("async", 2.5)])
    assert table["async"].gap == Estimate(0.5, None, 1)


def test_without_its_baseline_a_row_has_a_loss_but_no_gap():
    row = by_mode([cell("ef", 2.5)])["ef"]
    assert row.loss == Estimate(2.5, None, 1)
    assert row.gap is row.recovered is row.overhead is None


@pytest.mark.parametrize("plain", [None, 2.0, 1.9])
def test_nothing_is_recovered_of_a_gap_that_is_not_there(plain: float | None):
    table = by_mode([cell("sync", 2.0), cell("async", plain), cell("ef", 1.95)])
    assert table["ef"].gap == approx(-0.05, None, 1)
    assert table["ef"].recovered is None
    assert by_mode([cell("sync", 2.0), cell("ef", 1.95)])["ef"].recovered is None


def test_recovery_is_measured_against_the_async_cell_with_most_of_the_setting_in_common():
    records = [
        cell("sync", 2.0),
        cell("async", 2.1, setting={"pipeline.stages": 2}),
        cell("async", 2.4, setting={"pipeline.stages": 4}),
        cell("ef", 2.1, setting={"pipeline.stages": 4, "optimizer.error_feedback": 1.0}),
        cell("ef", 2.08, setting={"pipeline.stages": 2, "optimizer.error_feedback": 1.0}),
    ]
    assert [row.recovered for row in rows(records)] == [
        None,
        None,
        None,
        approx(0.75, None, 1),
        approx(0.2, None, 1),
    ]


# ---- divergence


def test_a_diverged_cell_is_counted_and_kept_out_of_means():
    records = [record for record in THREE_SEEDS if (record.mode, record.seed) != ("async", 1)]
    records.append(cell("async", None, seed=1))
    table = by_mode(records)
    assert (table["async"].diverged, len(table["async"].cells)) == (1, 3)
    assert table["async"].loss == approx(2.4, 0.6 / math.sqrt(2), 2)
    assert table["async"].gap == approx(0.2, 0.2 / math.sqrt(2), 2)
    assert table["ef"].gap == approx(0.13 / 3, 0.02 / math.sqrt(3), 3)
    assert table["ef"].recovered == approx(0.7, 0.4 / math.sqrt(2), 2)


def test_where_all_diverged_the_row_says_so():
    row = by_mode([cell("sync", 2.0), cell("async", None)])["async"]
    assert (row.diverged, len(row.cells)) == (1, 1)
    assert row.loss is row.gap is row.overhead is None


def test_a_diverged_baseline_leaves_no_gap():
    row = by_mode([cell("sync", None), cell("async", 2.5)])["async"]
    assert row.diverged == 0
    assert row.loss == Estimate(2.5, None, 1)
    assert row.gap is row.overhead is None


# ---- which cells make a row


def test_the_same_id_twice_counts_once_and_the_last_wins():
    row = by_mode([cell("sync", 9.0), cell("async", 2.5), cell("sync", 2.0)])["sync"]
    assert len(row.cells) == 1
    assert row.loss == Estimate(2.0, None, 1)


def test_rows_come_by_optimizer_then_sync_async_ef_and_others_as_they_appear():
    records = [
        cell("half", 2.2, optimizer="muon"),
        cell("ef", 2.1, optimizer="muon"),
        cell("async", 3.0, optimizer="adamw"),
        cell("other", 2.2, optimizer="muon"),
        cell("sync", 2.0, optimizer="muon"),
        cell("sync", 2.0, optimizer="adamw"),
        cell("async", 2.0, optimizer="muon"),
    ]
    assert [(row.optimizer, row.mode) for row in rows(records)] == [
        ("muon", "sync"),
        ("muon", "async"),
        ("muon", "ef"),
        ("muon", "half"),
        ("muon", "other"),
        ("adamw", "sync"),
        ("adamw", "async"),
    ]


def test_a_cell_with_two_places_in_a_grid_ties_their_settings_together():
    momentum = {"optimizer.momentum": 0.95}
    main = [cell("sync", 2.0 + seed, seed) for seed in range(3)]
    again = cell("sync", 2.0, 0, setting=momentum)
    other = cell("sync", 2.5, 0, setting={"optimizer.momentum": 0.8}, id="0.8", baseline="0.8")
    table = rows([*main, again, other])
    assert [(len(row.cells), row.axes["optimizer.momentum"]) for row in table] == [(3, 0.95), (1, 0.8)]
    assert table[0].loss == approx(3.0, 1.0, 3)


def test_a_cell_in_two_modes_is_in_a_row_of_each():
    plain = cell("async", 2.4)
    again = cell("ef", 2.4, id=plain.id, setting={"optimizer.error_feedback": 0.0})
    half = cell("ef", 2.2, setting={"optimizer.error_feedback": 0.5})
    table = rows([cell("sync", 2.0), plain, again, half])
    assert [(row.mode, row.recovered) for row in table] == [
        ("sync", None),
        ("async", None),
        ("ef", approx(0.0, None, 1)),
        ("ef", approx(0.5, None, 1)),
    ]


def test_lengths_and_sizes_outside_the_axes_make_rows_of_their_own():
    big = cell("sync", 1.9, parameters=2000, id="big", baseline="big")
    assert len(rows([cell("sync", 2.0), cell("sync", 1.8, steps=200), big])) == 3


# ---- token overhead by lengths


def lengths(mode: str, *losses: float | None, steps: tuple[int, ...] = (100, 200, 400), seed: int = 0) -> list[Record]:
    pairs = zip(losses, steps, strict=True)
    return [cell(mode, loss, seed, steps=each, setting={"train.steps": each}) for loss, each in pairs]


def overheads(records: list[Record], mode: str = "async") -> list[float | None]:
    return [row.overhead and row.overhead.mean for row in rows(records) if row.mode == mode]


def test_overhead_by_lengths_is_linear_in_the_logarithm_of_tokens():
    records = [*lengths("sync", 2.9, 2.45, 2.0), *lengths("async", 3.0, 2.6, 2.2)]
    table = [row for row in rows(records) if row.mode == "async"]
    # 2.0 lies below all that async reached.
    assert [row.overhead_way for row in table] == ["lengths", "lengths", "lengths, extrapolated"]
    assert [row.overhead and row.overhead.mean for row in table] == [
        pytest.approx(2 ** (0.1 / 0.4)),
        pytest.approx(2 ** (0.15 / 0.4)),
        pytest.approx(2 ** (0.2 / 0.4)),
    ]


def test_overhead_by_lengths_skips_over_segments_it_has_passed():
    records = [*lengths("sync", 2.3, 2.0, 1.9), *lengths("async", 3.0, 2.6, 2.2)]
    assert overheads(records)[0] == pytest.approx(4 * 2 ** -(0.1 / 0.4))


def test_a_delayed_run_that_is_better_than_sync_needs_fewer_tokens():
    records = [*lengths("sync", 3.1, 2.8, 2.3), *lengths("async", 3.0, 2.6, 2.2)]
    found = [row for row in rows(records) if row.mode == "async"]
    assert [row.overhead and row.overhead.mean for row in found] == [
        pytest.approx(2 ** -(0.1 / 0.4)),
        pytest.approx(2 ** -(0.2 / 0.4)),
        pytest.approx(2 ** -(0.1 / 0.4)),
    ]
    # 3.1 is more than async was left with after its shortest run.
    assert [row.overhead_way for row in found] == ["lengths, extrapolated", "lengths", "lengths"]


def test_there_is_no_overhead_where_more_tokens_do_not_help_or_would_never_be_enough():
    assert overheads([*lengths("sync", 2.5, 2.3, 2.1), *lengths("async", 3.0, 2.9, 2.95)]) == [None] * 3
    assert overheads([*lengths("sync", 2.5, 2.3, 2.1), *lengths("async", 3.0, 2.9, 2.899)]) == [None] * 3


def test_lengths_are_told_apart_by_seed_and_the_mean_covers_the_seeds_that_have_them():
    records = [
        *lengths("sync", 2.9, 2.5, steps=(100, 200)),
        *lengths("async", 3.0, 2.6, steps=(100, 200)),
        *lengths("sync", 2.0, steps=(100,), seed=1),
        *lengths("async", 2.9, steps=(100,), seed=1),
    ]
    short = next(row for row in rows(records) if row.mode == "async" and row.axes["train.steps"] == 100)
    assert len(short.cells) == 2
    assert (short.overhead, short.overhead_way) == (approx(2 ** (0.1 / 0.4), None, 1), "lengths")


def test_a_length_that_diverged_is_none():
    falling = {"evaluations": [Evaluation(0, 0, 4.0), Evaluation(100, 1000, 2.0)]}
    short = cell("sync", 2.0, setting={"train.steps": 100}, **falling)
    records = [short, *lengths("async", 3.0, None, steps=(100, 200))]
    row = next(row for row in rows(records) if row.mode == "async" and row.axes["train.steps"] == 100)
    assert (row.overhead, row.overhead_way) == (approx(2.0, None, 1), "curve")


def test_lengths_of_another_setting_do_not_count():
    records = [
        cell("sync", 2.0),
        cell("ef", 3.0, setting={"optimizer.error_feedback": 1.0}),
        cell("ef", 2.0, setting={"optimizer.error_feedback": 0.5}, steps=200),
    ]
    assert [row.overhead for row in rows(records)] == [None, None, None]


def test_lengths_may_be_of_any_setting_of_the_cell():
    records = [
        cell("sync", 2.9),
        cell("async", 3.0),
        *lengths("async", 2.6, steps=(200,)),
        cell("async", 3.0, setting={"optimizer.momentum": 0.9}, id="muon 0 100 async []"),
    ]
    row = next(row for row in rows(records) if row.mode == "async" and row.axes["train.steps"] == 100)
    assert (row.overhead, row.overhead_way) == (approx(2 ** (0.1 / 0.4), None, 1), "lengths")


# ---- token overhead within one run

FALLING = [Evaluation(0, 0, 5.0), Evaluation(40, 400, 3.0), Evaluation(80, 800, 2.5), Evaluation(100, 1000, 2.0)]


@pytest.mark.parametrize(
    ("loss", "overhead"),
    [
        (2.75, 1 / 0.6),
        (3.0, 1 / 0.4),
        (2.1, 1 / 0.96),
        (2.0, 1.0),
        (1.9, 1.0),
        (5.0, None),
        (5.5, None),
    ],
)
def test_overhead_by_curve_is_when_sync_passed_the_delayed_end(loss: float, overhead: float | None):
    row = by_mode([cell("sync", 2.0, evaluations=FALLING), cell("async", loss)])["async"]
    assert row.overhead == (None if overhead is None else approx(overhead, None, 1))
    assert row.overhead_way == "curve"


def test_the_first_crossing_counts():
    wavy = [Evaluation(0, 0, 5.0), Evaluation(25, 250, 2.4), Evaluation(50, 500, 3.0), Evaluation(100, 1000, 2.0)]
    assert overhead_by_curve(cell("async", 2.4), cell("sync", 2.0, evaluations=wavy)) == pytest.approx(4.0)


def test_evaluations_that_are_not_numbers_are_passed_over():
    baseline = cell("sync", 2.0, evaluations=[FALLING[0], Evaluation(20, 200, None), *FALLING[1:]])
    assert overhead_by_curve(cell("async", 3.0), baseline) == pytest.approx(2.5)


def test_without_a_curve_there_is_no_overhead_but_for_a_run_that_is_better():
    assert by_mode([cell("sync", 2.0), cell("async", 2.5)])["async"].overhead is None
    assert by_mode([cell("sync", 2.0), cell("async", 1.5)])["async"].overhead == Estimate(1.0, None, 1)


# ---- tables


def test_a_course_is_the_gap_of_the_longest_runs_at_the_same_step():
    def run(mode: str, losses: dict[int, float | None], **changes: Any) -> Record:
        evaluations = [Evaluation(step, 10 * step, loss) for step, loss in losses.items()]
        return cell(mode, evaluations[-1].loss, evaluations=evaluations, **changes)

    sync = run("sync", {0: 5.0, 50: 3.0, 100: 2.0})
    late = run("ef", {0: 5.0, 25: 4.5, 50: 3.5, 75: None, 100: 1.75})
    setting = {"pipeline.sync_start_steps": 1220}
    with_start = run("ef", {50: 3.25, 100: 2.0}, setting=setting, id="start")
    alone = run("async", {100: 2.0}, id="alone", baseline="not here")
    found = courses([sync, late, with_start, alone])
    assert {course.name: course.gaps for course in found} == {
        "ef": {0: 0.0, 50: 0.5, 100: -0.25},
        "ef, 1,220 synchronous steps": {50: 0.25, 100: 0.0},
    }
    assert all(course.baseline is sync for course in found)
    longer = [cell("sync", 1.5, steps=200, id="l", baseline="l"), cell("ef", 1.6, steps=200, id="m", baseline="l")]
    assert [course.cell for course in courses([sync, late, *longer])] == [longer[1]]
    seeds = [record for seed in (0, 1) for record in (cell("sync", 2.0, seed), cell("ef", 2.1, seed))]
    assert [course.name for course in courses(seeds)] == ["ef, seed 0", "ef, seed 1"]
    assert courses([alone]) == courses([]) == []


def test_a_table_as_it_is_read_on_github():
    records = [
        *(cell("sync", loss, seed, evaluations=FALLING) for seed, loss in enumerate([2.0, 2.2])),
        *(cell("async", loss, seed) for seed, loss in enumerate([2.5, 2.5])),
        cell("ef", 2.25),
        cell("ef", None, seed=1),
        cell("sync", 3.0, optimizer="adamw"),
    ]
    expected = """\
| optimizer | mode  |   lr | seeds |      final loss |              gap | recovered |        token overhead | diverged |
| --------- | ----- | ---: | ----: | --------------: | ---------------: | --------: | --------------------: | -------: |
| muon      | sync  | 0.01 |     2 | 2.1000 ± 0.1414 |                  |           |                       |          |
| muon      | async | 0.01 |     2 | 2.5000 ± 0.0000 | +0.4000 ± 0.1414 |           | 1.250 ± 0.000 (curve) |          |
| muon      | ef    | 0.01 |     2 |          2.2500 |          +0.2500 |      50 % |         1.111 (curve) |   1 of 2 |
| adamw     | sync  | 0.01 |     1 |          3.0000 |                  |           |                       |          |
"""
    assert markdown_table(rows(records)) == expected


def test_a_table_shows_only_axes_that_vary_within_an_optimizer():
    records = [
        cell("sync", 2.0, setting={"optimizer.momentum": 0.95}),
        cell("ef", 2.2, setting={"optimizer.momentum": 0.95, "optimizer.error_feedback": 0.5}),
        cell("ef", 2.1, setting={"optimizer.momentum": 0.95, "optimizer.error_feedback": 1.0}),
        cell("sync", 2.0, optimizer="adamw", setting={"optimizer.momentum": 0.9}),
    ]
    lines = markdown_table(rows(records)).splitlines()
    assert lines[0].startswith("| optimizer | mode | error_feedback |   lr | seeds |")
    assert lines[3].startswith("| muon      | ef   |            0.5 | 0.01 |     1 |     2.2000 | +0.2000 |")


def test_an_axis_that_one_row_of_a_mode_leaves_at_its_base_value_varies():
    other = cell("sync", 2.1, setting={"optimizer.momentum": 0.8}, id="0.8", baseline="0.8")
    lines = markdown_table(rows([cell("sync", 2.0), other])).splitlines()
    assert lines[0].startswith("| optimizer | mode | momentum |")
    assert lines[3].startswith("| muon      | sync |      0.8 |")


def test_axes_with_the_same_last_name_keep_their_whole_names():
    records = [
        cell("sync", 2.0, setting={"train.size": size, "model.size": 3 - size}, id=str(size), baseline=str(size))
        for size in (1, 2)
    ]
    assert "| train.size | model.size |" in markdown_table(rows(records))


def test_a_table_says_how_an_overhead_was_found_and_which_seeds_it_covers():
    table = markdown_table(rows([*lengths("sync", 2.9, 2.45, 2.0), *lengths("async", 3.0, 2.6, 2.2)]))
    assert "|               1.189 (lengths) |" in table
    assert "| 1.414 (lengths, extrapolated) |" in table
    records = [cell("sync", 2.0), cell("async", 2.5), cell("async", 2.5, seed=1), cell("ef", 2.5, seed=1)]
    assert "| +0.5000 (1 of 2) |" in markdown_table(rows(records))


def test_a_table_without_rows_is_its_header():
    assert len(markdown_table([]).splitlines()) == 2


# ---- learning rates


def swept(optimizer: str, losses: dict[float, float | None], seed: int = 0, **changes: Any) -> list[Record]:
    found = []
    for rate, loss in losses.items():
        name = f"{optimizer} {rate} {seed} {changes}"
        setting = {"optimizer.learning_rate": rate}
        values = {"learning_rate": rate, "setting": setting, "id": name, "baseline": name, **changes}
        found.append(cell("sync", loss, seed, optimizer, **values))
    return found


def test_the_best_rate_has_the_lowest_mean_over_seeds():
    records = [
        *swept("muon", {0.04: 2.5, 0.01: 2.3, 0.02: 2.2}),
        *swept("muon", {0.01: 2.3, 0.02: 2.6, 0.04: 2.4}, seed=1),
        cell("async", 1.0),
    ]
    (sweep,) = best_learning_rates(records)
    assert (sweep.optimizer, sweep.best) == ("muon", 0.01)
    assert sweep.losses == {0.01: [2.3, 2.3], 0.02: [2.2, 2.6], 0.04: [2.5, 2.4]}
    assert "- muon: the best rate is the lowest tried" in sweep_table(records)


def test_a_rate_at_which_a_seed_diverged_is_not_the_best_but_was_tried():
    records = [*swept("muon", {0.01: 2.3, 0.02: 2.2, 0.04: 2.0}), *swept("muon", {0.04: None}, seed=1)]
    (sweep,) = best_learning_rates(records)
    assert (sweep.best, sweep.losses[0.04]) == (0.02, [2.0, math.inf])
    assert sweep_table(records).endswith("**0.02: 2.2000**, 0.04: 2.0000 diverged 1 of 2 |\n")  # and without a note
    (hopeless,) = best_learning_rates(swept("muon", {0.01: None, 0.02: None}))
    assert hopeless.best is None


def test_rates_are_compared_at_one_length_only():
    records = [*swept("muon", {0.01: 2.3, 0.02: 2.2}), *swept("muon", {0.01: 1.9, 0.02: 2.0}, steps=200)]
    assert [(s.axes["train.steps"], s.best) for s in best_learning_rates(records)] == [(100, 0.02), (200, 0.01)]
    assert sweep_table(records).startswith("| optimizer | steps |")
    longer = [*records[:2], *swept("muon", {0.01: 1.9}, steps=200)]
    assert [sweep.axes["train.steps"] for sweep in best_learning_rates(longer)] == [100]


def test_a_sweep_as_it_is_read_on_github():
    records = [
        *swept("muon", {0.01: 2.3, 0.02: 2.2, 0.04: None}),
        *swept("adamw", {0.001: 2.4, 0.002: 2.3}),
        *swept("adamw", {0.001: 2.5, 0.002: 2.3}, seed=1),
        *swept("lion", {0.001: 2.4}),
    ]
    expected = """\
| optimizer | learning rate: final loss                             |
| --------- | ----------------------------------------------------- |
| muon      | 0.01: 2.3000, **0.02: 2.2000**, 0.04: diverged 1 of 1 |
| adamw     | 0.001: 2.4500 ± 0.0707, **0.002: 2.3000 ± 0.0000**    |
| lion      | **0.001: 2.4000**                                     |

- adamw: the best rate is the highest tried, and a better one may lie beyond.
- only one rate was tried: lion.
"""
    assert sweep_table(records) == expected
