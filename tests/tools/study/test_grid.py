"""From a study's TOML file to its cells, and every way to get the file wrong."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from slipstream.config.schema import Config
from slipstream.errors import ConfigError
from slipstream.tools.study.cell import Cell
from slipstream.tools.study.grid import BUILTIN, MODES, Grid, load_grid, make_grid


def grid_of(text: str) -> Grid:
    return make_grid(tomllib.loads(text), "test")


def cells_of(text: str) -> list[Cell]:
    return grid_of(text).cells


def settings_of(text: str) -> list[dict[str, Any]]:
    return [cell.setting for cell in cells_of(text)]


# ---- which cells there are


def test_every_combination_is_there_and_the_first_axis_changes_slowest() -> None:
    cells = cells_of("""
        [[grid]]
        mode = ["async", "ef"]
        optimizer.learning_rate = [0.1, 0.2]
        train.seed = [0, 1]
    """)
    assert [(c.mode, c.config.optimizer.learning_rate, c.config.train.seed) for c in cells] == [
        (mode, rate, seed) for mode in ("async", "ef") for rate in (0.1, 0.2) for seed in (0, 1)
    ]
    assert [c.setting for c in cells[:3]] == [{"optimizer.learning_rate": rate} for rate in (0.1, 0.1, 0.2)]


def test_tables_follow_each_other() -> None:
    cells = cells_of("""
        [[grid]]
        mode = "sync"
        train.seed = [3, 2]
        [[grid]]
        mode = ["ef", "async"]
    """)
    assert [(c.mode, c.config.train.seed) for c in cells] == [("sync", 3), ("sync", 2), ("ef", 0), ("async", 0)]


def test_a_value_alone_is_a_list_of_one() -> None:
    alone = cells_of('[[grid]]\nmode = "ef"\ntrain.seed = 7\noptimizer.name = "adamw"')
    listed = cells_of('[[grid]]\nmode = ["ef"]\ntrain.seed = [7]\noptimizer.name = ["adamw"]')
    assert alone == listed
    assert len(alone) == 1
    assert alone[0].config.train.seed == 7


@pytest.mark.parametrize(
    "axes",
    [
        "train.seed = [1, 2]\noptimizer.beta1 = 0.5\noptimizer.name = 'adamw'",
        "'train.seed' = [1, 2]\n'optimizer.beta1' = 0.5\n'optimizer.name' = 'adamw'",
        "train = {seed = [1, 2]}\noptimizer = {beta1 = 0.5, name = 'adamw'}",
        "[grid.train]\nseed = [1, 2]\n[grid.optimizer]\nbeta1 = 0.5\nname = 'adamw'",
    ],
    ids=["dotted", "quoted", "inline", "tables"],
)
def test_nested_tables_and_dotted_and_quoted_keys_are_alike(axes: str) -> None:
    cells = cells_of(f"[[grid]]\nmode = 'async'\n{axes}")
    assert [c.config.train.seed for c in cells] == [1, 2]
    assert {(c.config.optimizer.name, c.config.optimizer.beta1) for c in cells} == {("adamw", 0.5)}
    assert [c.setting for c in cells] == [{"optimizer.beta1": 0.5}] * 2


@pytest.mark.parametrize(
    "axis",
    [
        "optimizer.arguments.momentum = [0.8, 0.9]",
        "'optimizer.arguments.momentum' = [0.8, 0.9]",
        "optimizer.arguments = [{momentum = 0.8}, {momentum = 0.9}]",
    ],
    ids=["dotted", "quoted", "tables"],
)
def test_arguments_of_an_optimizer_are_axes_too(axis: str) -> None:
    cells = cells_of(f"""
        [config.optimizer]
        arguments = {{momentum = 0.5, dampening = 0.1}}
        [[grid]]
        optimizer.name = "torch.optim.SGD"
        {axis}
    """)
    assert [c.config.optimizer.arguments for c in cells] == [
        {"momentum": 0.8, "dampening": 0.1},
        {"momentum": 0.9, "dampening": 0.1},
    ]
    assert [c.setting for c in cells] == [{"optimizer.arguments.momentum": m} for m in (0.8, 0.9)]


def test_a_list_of_tables_varies_their_fields_together() -> None:
    cells = cells_of("[config.train]\nmicrobatch_size = 3\n[[grid]]\ntrain = [{seed = 1, steps = 10}, {seed = 2}]")
    assert [(c.config.train.seed, c.config.train.steps) for c in cells] == [(1, 10), (2, 200)]
    assert {c.config.train.microbatch_size for c in cells} == {3}


def test_a_field_that_is_a_list_takes_one_list_or_a_list_of_lists() -> None:
    text = '[config.pipeline]\nstages = 2\n[[grid]]\nmode = "async"\n'
    assert [c.delays for c in cells_of(text + "delays = [1, 0]")] == [(1, 0)]
    assert [c.delays for c in cells_of(text + "delays = [[1, 0], [0, 1]]")] == [(1, 0), (0, 1)]
    text += "delays = [1, 0]\npipeline.layers_per_stage = "
    one, several = cells_of(text + "[1, 3]"), cells_of(text + "[[1, 3], [3, 1]]")
    assert [c.config.pipeline.layers_per_stage for c in one] == [(1, 3)]
    assert [c.config.pipeline.layers_per_stage for c in several] == [(1, 3), (3, 1)]
    sources = cells_of('[[grid]]\ndata.sources = [["a", "b"], ["c"]]')
    assert [c.config.data.sources for c in sources] == [("a", "b"), ("c",)]
    [scaled] = cells_of("[[grid]]\nmodel.rope_scaling = [8.0, 1.0, 4.0, 8192.0]")
    assert scaled.config.model.rope_scaling == (8.0, 1.0, 4.0, 8192.0)
    weights = cells_of('[config.data]\nsources = ["a", "b"]\n[[grid]]\ndata.weights = [[0.7, 0.3], [0.5, 0.5]]')
    assert [c.config.data.weights for c in weights] == [(0.7, 0.3), (0.5, 0.5)]


def test_the_grid_wins_over_the_mode_and_the_mode_over_the_config() -> None:
    cells = cells_of("""
        [config.train]
        steps = 10
        seed = 10
        microbatch_size = 10
        [modes.mine]
        train.steps = 20
        train.seed = 20
        [[grid]]
        mode = "mine"
        train.steps = 30
    """)
    train = cells[0].config.train
    assert (train.steps, train.seed, train.microbatch_size) == (30, 20, 10)
    assert train.dtype == Config().train.dtype


def test_a_grid_may_change_what_a_known_mode_sets() -> None:
    cells = cells_of('[[grid]]\nmode = "ef"\noptimizer.error_feedback = [0.5, 2]')
    assert [c.config.optimizer.error_feedback for c in cells] == [0.5, 2.0]
    assert all(isinstance(c.config.optimizer.error_feedback, float) for c in cells)


def test_modes_of_ones_own_set_fields_and_what_only_a_cell_has() -> None:
    (cell,) = cells_of("""
        [modes.half]
        delays = [1, 0]
        predictor = "two_term"
        predictor_weight = 1
        pipeline.stages = 2
        [[grid]]
        mode = "half"
    """)
    assert (cell.mode, cell.delays, cell.predictor, cell.predictor_weight) == ("half", (1, 0), "two_term", 1.0)
    assert cell.config.pipeline.stages == 2
    assert cell.setting == {}


def test_a_known_mode_can_be_defined_anew() -> None:
    (cell,) = cells_of('[modes.ef]\noptimizer.error_feedback = 0.5\n[[grid]]\nmode = "ef"')
    assert cell.config.optimizer.error_feedback == 0.5


def test_the_known_modes_are_what_their_names_say() -> None:
    cells = {c.mode: c for c in cells_of(f"[[grid]]\nmode = {list(MODES)}\npipeline.stages = 3")}
    schedules = {name: (c.config.pipeline.schedule, c.config.optimizer.error_feedback) for name, c in cells.items()}
    assert schedules.pop("sync")[0] == "one_f_one_b"
    assert schedules == {
        "async": ("two_bw", 0.0),
        "ef": ("two_bw", 1.0),
        "pipedream": ("pipedream", 0.0),
        "paci": ("paci", 0.0),
    }
    assert {name for name, cell in cells.items() if cell.is_synchronous} == {"sync"}


def test_without_a_mode_a_cell_has_error_feedback() -> None:
    (cell,) = cells_of("[[grid]]\ntrain.seed = 1")
    assert cell.mode == "ef"


def test_what_is_said_of_all_cells_reaches_all() -> None:
    grid = grid_of("""
        name = "mine"
        description = "what for"
        compute_dtype = "bfloat16"
        compile_mode = "default"
        [[grid]]
        mode = ["sync", "ef"]
    """)
    assert grid.name == "mine"
    assert {(c.compute_dtype, c.compile_mode) for c in grid.cells} == {("bfloat16", "default")}


def test_a_study_is_called_after_its_file(tmp_path: Path) -> None:
    path = tmp_path / "momentum.toml"
    path.write_text("[[grid]]\nmode = 'ef'")
    assert load_grid(path).name == "momentum"


def test_the_builtin_grid_compares_both_optimizers_in_three_modes() -> None:
    grid = load_grid(BUILTIN)
    assert grid.name == "quick"
    assert [(c.config.optimizer.name, c.mode) for c in grid.cells] == [
        (name, mode) for name in ("adamw", "muon") for mode in ("sync", "async", "ef")
    ]


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[3].glob("configs/studies/*.toml")), ids=lambda p: p.name)
def test_the_studies_that_come_with_it_can_be_read_and_have_every_baseline(path: Path) -> None:
    grid = load_grid(path)
    assert {cell.synchronous().id for cell in grid.cells} <= {cell.id for cell in grid.cells}


# ---- which cells are one


def test_the_same_cell_twice_is_one() -> None:
    assert len(cells_of('[[grid]]\nmode = ["ef", "ef"]\ntrain.seed = [1, 1]\n[[grid]]\ntrain.seed = 1')) == 1


@pytest.mark.parametrize(
    ("axis", "places"),
    [
        ("optimizer.error_feedback = [0.5, 1.0]", 2),
        ('predictor = ["last", "experiments.predictors.fitted", "two_term"]', 3),
        ("pipeline.sync_start_steps = [0, 5]", 2),
        ("pipeline.stages = [1, 2, 4]", 3),
        ("pipeline.stages = 2\ndelays = [[1, 0], [0, 1], [1, 1]]", 3),
        ("pipeline.stages = 2\npipeline.layers_per_stage = [[1, 3], [3, 1]]", 2),
        ('predictor = "two_term"\npredictor_weight = [0.1, 0.2]', 2),
    ],
)
def test_axes_of_delay_leave_one_synchronous_cell(axis: str, places: int) -> None:
    cells = cells_of(f'[[grid]]\nmode = ["sync", "ef"]\n{axis}')
    assert [cell.mode for cell in cells] == ["sync"] + ["ef"] * places
    assert cells[0].setting == {}
    assert cells[0].is_synchronous
    assert all(cell.setting for cell in cells[1:])
    assert {cell.synchronous().id for cell in cells} == {cells[0].id}


def test_axes_that_change_a_synchronous_cell_stay_with_it() -> None:
    assert settings_of('[[grid]]\nmode = ["sync", "ef"]\noptimizer.beta1 = [0.5, 0.9]\ntrain.seed = [0, 1]') == (
        [{"optimizer.beta1": 0.5}, {"optimizer.beta1": 0.5}, {"optimizer.beta1": 0.9}, {"optimizer.beta1": 0.9}] * 2
    )


def test_one_cell_may_have_two_places_in_the_grid() -> None:
    """async is error feedback with a coefficient of 0, and both rows of the table want it."""
    cells = cells_of('[[grid]]\nmode = "async"\n[[grid]]\nmode = "ef"\noptimizer.error_feedback = [0.0, 1.0]')
    assert [(c.mode, c.setting) for c in cells] == [
        ("async", {}),
        ("ef", {"optimizer.error_feedback": 0.0}),
        ("ef", {"optimizer.error_feedback": 1.0}),
    ]
    assert cells[0].id == cells[1].id != cells[2].id


def test_whatever_the_transport_stages_need_no_gpu_each() -> None:
    assert {c.config.pipeline.transport for c in cells_of("[config.pipeline]\ntransport = 'process'\n[[grid]]")} == {
        "thread"
    }


# ---- mistakes


GRID = '[[grid]]\nmode = ["sync", "ef"]\n'
DELAYED = '[config.pipeline]\nstages = 2\n[[grid]]\nmode = "async"\n'
MISTAKES = [
    # the file
    ("[config", "is not valid TOML (Expected ']' at the end of a table declaration"),
    ("x = ", "is not valid TOML (Invalid value"),
    (f"x = {'[' * 2000}", "is not valid TOML (maximum recursion depth exceeded"),
    (f"{GRID}{'.'.join('a' * 3000)} = 1", "has tables without end: correct it there"),
    (b"\xff\xfe", "is not valid TOML ('utf-8' codec can't decode byte 0xff in position 0"),
    # its top
    (f"stpes = 3\n{GRID}", "stpes is unknown: known are name, description, compute_dtype, compile_mode, config, modes"),
    (f"name = 3\n{GRID}", "name = 3 has the wrong type: write a text"),
    (f"name = 'a/b'\n{GRID}", "name = 'a/b' is not the name of a folder: use letters, digits, - and _"),
    (f"name = '..'\n{GRID}", "name = '..' is not the name of a folder"),
    (f"name = '.'\n{GRID}", "name = '.' is not the name of a folder"),
    (f"name = ''\n{GRID}", "name = '' is not the name of a folder"),
    (f'name = "a\\nb"\n{GRID}', r"name = 'a\nb' is not the name of a folder"),
    (f"name = '{'a' * 300}'\n{GRID}", "is not the name of a folder"),
    (f"description = 3\n{GRID}", "description = 3 has the wrong type: write a text"),
    (f"compute_dtype = 'fp8'\n{GRID}", "compute_dtype = 'fp8' is unknown: choose one of bfloat16, float32, float64"),
    (f"compute_dtype = 16\n{GRID}", "compute_dtype = 16 has the wrong type: write a text"),
    (f"compile_mode = 'fast'\n{GRID}", "compile_mode = 'fast' is unknown: choose one of default, reduce-overhead"),
    (f"config = 3\n{GRID}", "config = 3 has the wrong type: write a table"),
    (f"modes = 3\n{GRID}", "modes = 3 has the wrong type: write a table for each"),
    (f"[modes]\nhalf = 3\n{GRID}", "modes.half = 3 is not a section: write it as a TOML table"),
    # no grid
    ("", "grid is empty: add a [[grid]] table with at least mode = [...]"),
    ("grid = []", "grid is empty: add a [[grid]] table"),
    ("[grid]\nmode = 'ef'", "grid = {'mode': 'ef'} has the wrong type: write [[grid]] tables"),
    ("grid = [1]", "grid = [1] has the wrong type: write [[grid]] tables"),
    # modes
    (
        "[[grid]]\nmode = 'asynch'",
        "mode = 'asynch' is unknown: choose one of sync, async, ef, pipedream, paci, or",
    ),
    ("[[grid]]\nmode = 1", "mode = 1 is unknown: choose one of sync,"),
    ("[[grid]]\nmode = [['ef']]", "mode = ['ef'] is unknown: choose one of sync,"),
    ("[[grid]]\nmode = []", "mode = [] leaves nothing to run: give it a value, or leave it out"),
    (
        f"{GRID}pipeline.schedule = 'two_bw'",
        "pipeline.schedule = 'two_bw' would delay mode = 'sync': leave it to",
    ),
    # fields
    (f"{GRID}trian.seed = 1", "trian is unknown: did you mean train?"),
    (f"{GRID}train.sede = 1", "train.sede is unknown: did you mean seed?"),
    (f"{GRID}seed = 1", "seed is unknown: did you mean train.seed?"),
    (f"{GRID}predictr = 'last'", "predictr is unknown: did you mean predictor?"),
    (f"[config.optimizer]\nmomentun = 0.9\n{GRID}", "optimizer.momentun is unknown: did you mean momentum?"),
    ("[modes.x]\ntrain.sede = 1\n[[grid]]\nmode = 'x'", "train.sede is unknown: did you mean seed?"),
    (f"{GRID}compute_dtype = 'float32'", "compute_dtype is unknown: did you mean train.compute_dtype?"),
    (f"{GRID}train.compute_dtype = 'float32'", "train.compute_dtype = 'float32' is a pipeline's: leave it out"),
    (f"{GRID}optimizer.sharded = true", "optimizer.sharded is for replicas, and a study has none: leave it out"),
    (f"{GRID}train.seed.x = 1", "train.seed = {'x': 1} has the wrong type: write a whole number"),
    (f"{GRID}train.seed = 'a'", "train.seed = 'a' has the wrong type: write a whole number"),
    (f"{GRID}train.seed = 1.5", "train.seed = 1.5 has the wrong type: write a whole number"),
    (f"{GRID}train.seed = [0, true]", "train.seed = True has the wrong type: write a whole number"),
    (f"{GRID}train.seed = 2020-01-01", "train.seed = datetime.date(2020, 1, 1) has the wrong type: write a whole numb"),
    (f"{GRID}optimizer.learning_rate = true", "optimizer.learning_rate = True has the wrong type: write a number"),
    (f"{GRID}optimizer.learning_rate = [0.1, nan]", "optimizer.learning_rate = nan is not finite: write a number that"),
    (f"{GRID}optimizer.learning_rate = -1", "optimizer.learning_rate = -1.0 is too small: use 0 or more"),
    (f"{GRID}optimizer.learning_rate = 1{'0' * 400}", "is too large: write a smaller number"),
    (f"{GRID}train.steps = 0", "train.steps = 0 is too small: use 1 or more"),
    (f"{GRID}train.seed = []", "train.seed = [] leaves nothing to run: give it a value, or leave it out"),
    (f"{GRID}train.seed = 1\n'train.seed' = 2", "train.seed = 2 is said twice in one table: leave one of them out"),
    (f"{GRID}train = 3", "train = 3 is not a section: write it as a TOML table"),
    (f"[config]\ntrain = 3\n{GRID}train.seed = 1", "train = 3 is not a section: write it as a TOML table"),
    (f"[config]\ntrain = [{{seed = 1}}]\n{GRID}", "train = [{'seed': 1}] is not a section: write it as a TOML table"),
    (f"[config.train]\nseed = [1, 2]\n{GRID}", "train.seed = [1, 2] has the wrong type: write a whole number"),
    (f"{GRID}train.dtype = 'bfloat16'", "train.dtype = 'bfloat16' is unknown: choose one of float32, float64"),
    (f"{GRID}model.preset = 'huge'", "model.preset = 'huge' is unknown: choose one of tiny,"),
    (f"{GRID}data.sources = 3", "data.sources = 3 has the wrong type: write a list, each item a text"),
    (f"{GRID}run.name = 'a/b'", "run.name = 'a/b' is not the name of a folder"),
    (f"{GRID}pipeline.transport = 'smoke'", "pipeline.transport = 'smoke' is unknown: choose one of process, thread"),
    (f"{GRID}pipeline.stages = 0", "pipeline.stages = 0 is too small: use 1 or more"),
    (
        f"{GRID}pipeline.stages = 9",
        "pipeline.microbatches = 4 is invalid: 4 microbatches are too few for two_bw on 9",
    ),
    (
        f"{GRID}pipeline.depth = 'double'",
        "pipeline.depth = 'double' is made for two_bw, not for one_f_one_b: set",
    ),
    (f"{GRID}pipeline.sync_start_steps = -1", "pipeline.sync_start_steps = -1 is too small: use 0 or more"),
    (f"{GRID}optimizer.arguments.momentum = 0.9", "optimizer.arguments = {'momentum': 0.9} is for other optimizers"),
    ("[[grid]]\nmode = 'paci'\noptimizer.error_feedback = 1", "optimizer.error_feedback = 1 needs a weight version to"),
    # what only a study has
    (f"{GRID}train.non_finite = 'skip'", "train.non_finite = 'skip' asks the device after every step, which a study"),
    (f"{GRID}predictor = 'lats'", "predictor = 'lats' is unknown: use last, two_term or the import path"),
    (f"{GRID}predictor = 3", "predictor = 3 has the wrong type: write a text"),
    (f"{GRID}predictor_weight = true", "predictor_weight = True has the wrong type: write a number"),
    (f"{GRID}predictor_weight = nan", "predictor_weight = nan is not finite: write a number that is"),
    (f"{GRID}predictor_weight = 1{'0' * 400}", "is too large: write a smaller number"),
    (
        f"{GRID}predictor = 'experiments.predictors.momentum'\noptimizer.name = 'lion'",
        "predictor = 'experiments.predictors.momentum' looks into muon and adamw, not into optimizer",
    ),
    (f"{DELAYED}delays = [1]", "delays = [1] has not one entry for each of pipeline.stages = 2: give 2"),
    (f"{DELAYED}delays = [[1, 0], [1]]", "delays = [1] has not one entry for each of pipeline.stages = 2: give 2"),
    (f"{DELAYED}delays = [1, -1]", "delays = [1, -1] is invalid: use 0 to train.steps = 200 for every stage"),
    (f"{DELAYED}delays = [1, 1{'0' * 30}]", "is invalid: use 0 to train.steps = 200 for every stage"),
    (f"{DELAYED}delays = [1, 0.5]", "delays = 0.5 has the wrong type: write a whole number"),
    (f"{DELAYED}delays = [true, false]", "delays = True has the wrong type: write a whole number"),
    (f"{DELAYED}delays = 1", "delays = 1 has the wrong type: write a list, each item a whole number"),
    (f"{DELAYED}delays = [[1, 0], 2]", "delays = 2 has the wrong type: write a list, each item a whole number"),
    (f"{DELAYED}delays = []", "delays = [] leaves nothing to run"),
    (
        "[config.pipeline]\nstages = 2\n[[grid]]\nmode = 'paci'\ndelays = [1, 0]",
        "delays = [1, 0] are those of weight versions, and paci keeps none: leave them out, or use another schedule",
    ),
]


@pytest.mark.parametrize(("text", "sentence"), MISTAKES, ids=[sentence for _, sentence in MISTAKES])
def test_a_mistake_is_one_sentence_that_names_file_field_value_and_remedy(
    text: str | bytes, sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "grid.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as error:
        load_grid(path)
    said = str(error.value)
    assert said.startswith(str(path))
    assert sentence in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("name", "reason"), [("missing.toml", "No such file or directory"), ("folder", "Is a directory")]
)
def test_a_file_that_cannot_be_read_is_named(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError) as error:
        load_grid(tmp_path / name)
    assert str(error.value) == f"{tmp_path / name} cannot be read ({reason}): check the path"
