"""Reads the TOML file of a study and builds its cells.

    name = "momentum"
    compute_dtype = "bfloat16"           # also: compile_mode, description
    [config.train]                       # any section and field of `slipstream train`
    steps = 3000
    [modes.half]                         # in addition to sync, async, ef, pipedream and paci
    delays = [1, 0]
    pipeline.stages = 2
    [[grid]]                             # every combination of the values of each [[grid]]
    mode = ["sync", "async", "ef"]
    optimizer.name = "muon"
    optimizer.momentum = [0.8, 0.95]
    train.seed = [0, 1, 2]

The fields are those of the configuration, and delays, predictor and predictor_weight of a cell. [[grid]] overrides the
mode, and the mode overrides [config]. The mode sync ignores delays.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_type_hints

from ...config.defaults import peak_rates_of, settled
from ...config.rules import validate
from ...config.schema import Config
from ...config.toml import build, read_toml
from ...errors import ConfigError
from .cell import Cell

BUILTIN = Path(__file__).with_name("quick.toml")

LIST_FIELDS = {"delays"} | {
    f"{section}.{name}"
    for section, fields_of in get_type_hints(Config).items()
    for name, hint in get_type_hints(fields_of).items()
    if "tuple" in str(hint)
}
"""Fields whose value is a list of its own."""

MODES: dict[str, dict[str, Any]] = {
    "sync": {"pipeline.schedule": "one_f_one_b"},
    "async": {"pipeline.schedule": "two_bw", "optimizer.error_feedback": 0.0},
    "ef": {"pipeline.schedule": "two_bw", "optimizer.error_feedback": 1.0},
    "pipedream": {"pipeline.schedule": "pipedream", "optimizer.error_feedback": 0.0},
    "paci": {"pipeline.schedule": "paci", "optimizer.error_feedback": 0.0},
}
CELL_FIELDS = ("delays", "predictor", "predictor_weight")
ONLY_UNDER_DELAY = {
    "optimizer.error_feedback",
    "pipeline.stages",
    "pipeline.layers_per_stage",
    "pipeline.sync_start_steps",
    *CELL_FIELDS,
}
"""Axes that have no effect on a synchronous cell."""


@dataclass(frozen=True)
class Grid:
    name: str
    cells: list[Cell]
    """Cells in the order of the file. Several cells may have the same id at different places in the grid."""


@dataclass(frozen=True)
class _Settings(Config):
    """All settings of a cell that have a name: the sections of a configuration, and CELL_FIELDS."""

    delays: tuple[int, ...] = Cell.delays
    predictor: str = Cell.predictor
    predictor_weight: float = Cell.predictor_weight


@dataclass(frozen=True)
class _File:
    name: str
    description: str = ""
    compute_dtype: str | None = None
    compile_mode: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    modes: dict[str, dict[str, Any]] = field(default_factory=dict)
    grid: list[dict[str, Any]] = field(default_factory=list)


def load_grid(path: Path) -> Grid:
    tree = read_toml(path)
    try:
        return make_grid(tree, path.stem)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} has tables without end: correct it there") from error


def make_grid(tree: dict[str, Any], default_name: str) -> Grid:
    file = _read(tree, default_name)
    modes = MODES | {name: _flatten(settings) for name, settings in file.modes.items()}
    cells: dict[str, Cell] = {}
    for combination in itertools.chain.from_iterable(_combinations(entry) for entry in file.grid):
        mode = combination.pop("mode", "ef")
        if not isinstance(mode, str) or mode not in modes:
            raise ConfigError(f"mode = {mode!r} is unknown: choose one of {', '.join(modes)}, or define it in [modes]")
        cell = _cell(file, mode, modes[mode], combination)
        place = json.dumps([cell.id, cell.mode, cell.setting], sort_keys=True)
        cells.setdefault(place, cell)
    return Grid(file.name, list(cells.values()))


def _read(tree: dict[str, Any], default_name: str) -> _File:
    kinds = {"config": (dict, "a table"), "modes": (dict, "a table for each"), "grid": (list, "[[grid]] tables")}
    for key, value in tree.items():
        if key not in _File.__dataclass_fields__:
            raise ConfigError(f"{key} is unknown: known are {', '.join(_File.__dataclass_fields__)}")
        kind, remedy = kinds.get(key, (str, "a text"))
        if not isinstance(value, kind) or (kind is list and not all(isinstance(entry, dict) for entry in value)):
            raise ConfigError(f"{key} = {value!r} has the wrong type: write {remedy}")
    file = _File(**{"name": default_name, **tree})
    name = file.name
    if name in ("", "..") or Path(name).name != name or not name.isprintable() or len(name.encode()) >= 200:
        raise ConfigError(f"name = {name!r} is not the name of a folder: use letters, digits, - and _")
    for name, settings in file.modes.items():
        if not isinstance(settings, dict):
            raise ConfigError(f"modes.{name} = {settings!r} is not a section: write it as a TOML table")
    if not file.grid:
        raise ConfigError("grid is empty: add a [[grid]] table with at least mode = [...]")
    return file


def _combinations(entry: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields every combination of one value from each list. The first axis changes slowest."""
    axes = _flatten(entry)
    for combination in itertools.product(*(_values(name, value) for name, value in axes.items())):
        yield _flatten(dict(zip(axes, combination, strict=True)))  # a list of tables varies several fields together


def _values(name: str, value: Any) -> list[Any]:
    """Returns the values of an axis. A field whose value is a list varies as a list of lists."""
    if value == []:
        raise ConfigError(f"grid: {name} = [] leaves nothing to run: give it a value, or leave it out")
    varies = isinstance(value, list) and (name not in LIST_FIELDS or isinstance(value[0], list))
    return value if varies else [value]


def _flatten(tree: dict[str, Any], where: str = "") -> dict[str, Any]:
    """Turns both {"train": {"seed": 1}} and {"train.seed": 1} into {"train.seed": 1}."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{where}{name}"
        for field_path, item in (_flatten(value, f"{path}.") if isinstance(value, dict) else {path: value}).items():
            if field_path in flat:
                raise ConfigError(f"{field_path} = {item!r} is said twice in one table: leave one of them out")
            flat[field_path] = item
    return flat


def _cell(file: _File, mode: str, mode_settings: dict[str, Any], axes: dict[str, Any]) -> Cell:
    settings = _flatten(file.config) | mode_settings | axes
    if mode == "sync":
        settings.pop("delays", None)
    values = vars(build(_Settings, _unflatten(settings), "")).copy()
    own = {name: values.pop(name) for name in CELL_FIELDS}
    config = Config(**values)
    config = replace(config, pipeline=replace(config.pipeline, transport="thread"))  # a thread needs no GPU per stage
    validate(config)
    config = _settled(config)
    cell = Cell(config, mode, {}, **own, compute_dtype=file.compute_dtype, compile_mode=file.compile_mode)
    cell.validate()
    if mode == "sync" and not cell.is_synchronous:
        raise ConfigError(
            f"pipeline.schedule = {config.pipeline.schedule!r} would delay mode = 'sync': leave it to the mode"
        )
    ignored = ONLY_UNDER_DELAY if cell.is_synchronous else set()
    setting = {n: v for n, v in axes.items() if n not in ("optimizer.name", "train.seed") and n not in ignored}
    return replace(cell, setting=setting)


def _settled(config: Config) -> Config:
    """Fills in defaults as a pipeline does, with two exceptions. The study chooses its own dtypes. The rate of AdamW
    for the rest of the parameters is always set, because it has always been part of a cell's id, whether it is used or
    not."""
    optimizer = replace(
        config.optimizer,
        newton_schulz_dtype=config.optimizer.newton_schulz_dtype or "float32",
        adamw_learning_rate=peak_rates_of(config.optimizer)[1],
    )
    chosen = settled(replace(config, optimizer=optimizer))
    return replace(chosen, train=replace(chosen.train, compute_dtype=config.train.compute_dtype))


def _unflatten(settings: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in settings.items():
        *sections, name = path.split(".")
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
            if not isinstance(branch, dict):
                raise ConfigError(f"{section} = {branch!r} is not a section: write it as a TOML table")
        branch[name] = value
    return tree
