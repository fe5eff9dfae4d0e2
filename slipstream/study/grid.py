"""A study's TOML file, and the cells it comes to.

    name = "momentum"
    compute_dtype = "bfloat16"           # also: compile_mode, description
    [config.train]                       # any section and field of `slipstream train`
    steps = 3000
    [modes.half]                         # sync, async, ef, pipedream and paci are known; these are more
    delays = [1, 0]
    pipeline.stages = 2
    [[grid]]                             # every combination of the values of each [[grid]]
    mode = ["sync", "async", "ef"]
    optimizer.name = "muon"
    optimizer.momentum = [0.8, 0.95]
    train.seed = [0, 1, 2]

Fields are those of the configuration, and delays, predictor and predictor_weight of a cell. What [[grid]] says wins
over the mode, and the mode over [config].
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import Config, ConfigError, build, validate
from .cell import Cell

BUILTIN = Path(__file__).with_name("quick.toml")

MODES: dict[str, dict[str, Any]] = {
    "sync": {"pipeline.schedule": "one_f_one_b"},
    "async": {"pipeline.schedule": "two_bw", "optimizer.error_feedback": 0.0},
    "ef": {"pipeline.schedule": "two_bw", "optimizer.error_feedback": 1.0},
    "pipedream": {"pipeline.schedule": "pipedream", "optimizer.error_feedback": 0.0},
    "paci": {"pipeline.schedule": "paci", "optimizer.error_feedback": 0.0},
}
CELL_FIELDS = {"delays": list, "predictor": str, "predictor_weight": float}
ONLY_UNDER_DELAY = {"optimizer.error_feedback", "pipeline.stages", "pipeline.sync_start_steps", *CELL_FIELDS}
"""Axes that a synchronous cell takes no notice of."""


@dataclass(frozen=True)
class Grid:
    name: str
    cells: list[Cell]
    """In the order of the file. Some may have one id, and different places in the grid."""
    description: str = ""


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
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): check the path") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML ({error}): mend it there") from error
    try:
        return make_grid(tree, path.stem)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def make_grid(tree: dict[str, Any], default_name: str) -> Grid:
    file = _read(tree, default_name)
    modes = MODES | {name: _flatten(settings) for name, settings in file.modes.items()}
    cells: list[Cell] = []
    for combination in itertools.chain.from_iterable(_combinations(entry) for entry in file.grid):
        mode = combination.pop("mode", "ef")
        if mode not in modes:
            raise ConfigError(f"mode = {mode!r} is unknown: choose one of {', '.join(modes)}, or define it in [modes]")
        cell = _cell(file, mode, modes[mode], combination)
        if cell not in cells:
            cells.append(cell)
    return Grid(file.name, cells, file.description)


def _read(tree: dict[str, Any], default_name: str) -> _File:
    for key, value in tree.items():
        wanted = {"config": dict, "modes": dict, "grid": list}.get(key, str)
        if key not in _File.__dataclass_fields__:
            raise ConfigError(f"{key} is unknown: known are {', '.join(_File.__dataclass_fields__)}")
        if not isinstance(value, wanted):
            raise ConfigError(f"{key} = {value!r} has the wrong type: see the head of slipstream/study/grid.py")
    file = _File(**{"name": default_name, **tree})
    if not file.name or Path(file.name).name != file.name or not file.name.isprintable() or file.name == "..":
        raise ConfigError(f"name = {file.name!r} is not the name of a folder: use letters, digits, - and _")
    if not file.grid or not all(isinstance(entry, dict) for entry in file.grid):
        raise ConfigError("grid is empty: add a [[grid]] table with at least mode = [...]")
    return file


def _combinations(entry: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every choice of one value from each list, the first axis changing slowest."""
    axes = _flatten(entry)
    for name, values in axes.items():
        if values == []:
            raise ConfigError(f"grid: {name} = [] leaves nothing to run: give it a value, or leave it out")
    lists = [_values(name, value) for name, value in axes.items()]
    for combination in itertools.product(*lists):
        yield dict(zip(axes, combination, strict=True))


def _values(name: str, value: Any) -> list[Any]:
    """Fields that are lists themselves vary as lists of lists."""
    is_list_field = name in ("delays", "data.sources", "data.validation_sources", "pipeline.layers_per_stage")
    if not isinstance(value, list) or (is_list_field and not (value and isinstance(value[0], list))):
        return [value]
    return value


def _flatten(tree: dict[str, Any], where: str = "") -> dict[str, Any]:
    """{"train": {"seed": 1}} and {"train.seed": 1} alike to {"train.seed": 1}."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{where}{name}"
        if isinstance(value, dict) and path != "optimizer.arguments":
            flat |= _flatten(value, f"{path}.")
        else:
            flat[path] = value
    return flat


def _cell(file: _File, mode: str, mode_settings: dict[str, Any], axes: dict[str, Any]) -> Cell:
    settings = _flatten(file.config) | mode_settings | axes
    own = {name: settings.pop(name) for name in CELL_FIELDS if name in settings}
    for name, value in own.items():
        if isinstance(value, int) and CELL_FIELDS[name] is float:
            value = own[name] = float(value)
        if not isinstance(value, CELL_FIELDS[name]):
            raise ConfigError(f"{name} = {value!r} has the wrong type: write a {CELL_FIELDS[name].__name__}")
    if "delays" in own:
        if not all(isinstance(delay, int) for delay in own["delays"]):
            raise ConfigError(f"delays = {own['delays']} cannot be: write whole numbers")
        own["delays"] = tuple(own["delays"])
    settings.pop("pipeline.transport", None)
    config = build(Config, _unflatten({"pipeline.transport": "thread", **settings}), "")
    validate(config)
    cell = Cell(config, mode, {}, **own, compute_dtype=file.compute_dtype, compile_mode=file.compile_mode)
    cell.validate()
    ignored = ONLY_UNDER_DELAY if cell.is_synchronous else set()
    setting = {n: v for n, v in axes.items() if n not in ("optimizer.name", "train.seed") and n not in ignored}
    return Cell(**{**vars(cell), "setting": setting})


def _unflatten(settings: Iterable[tuple[str, Any]] | dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in dict(settings).items():
        section, _, name = path.partition(".")
        if name:
            branch = tree.setdefault(section, {})
            if not isinstance(branch, dict):
                raise ConfigError(f"{section} = {branch!r} is not a section: write it as a TOML table")
            branch[name] = value
        else:
            tree[path] = value
    return tree
