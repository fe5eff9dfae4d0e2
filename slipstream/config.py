"""One tree of frozen dataclasses: the whole configuration of a run.

The command line is generated from it, a TOML file mirrors it, and a run writes it down resolved. Every mistake is a
`ConfigError` of one sentence that names the field, the value and the remedy.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .data import DataConfig
from .model import PRESETS, ModelConfig
from .optim.learning_rate import SCHEDULES as LEARNING_RATES
from .schedule import Schedule, ScheduleError


class ConfigError(ValueError):
    """A configuration that cannot run."""


@dataclass(frozen=True)
class ModelSection:
    preset: str = "tiny"
    """tiny, small, 135m, 360m or 1b."""
    vocab_size: int | None = None
    """None: the preset's, or the corpus's if that is larger."""
    sequence_length: int | None = None
    """None: the preset's; likewise below."""
    dim: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    hidden_dim: int | None = None
    tied_embeddings: bool | None = None


@dataclass(frozen=True)
class PipelineSection:
    schedule: str = "two_bw"
    """two_bw, one_f_one_b, gpipe, pipedream or paci."""
    stages: int = 2
    """Parts the layers are cut into, each with a process (under torchrun: a rank) of its own."""
    microbatches: int = 4
    """To a step. two_bw wants at least one per stage, and twice that less one at double depth."""
    depth: str = "minimum"
    """two_bw: "double" keeps twice the forwards in flight and hides the latency of links."""
    sync_start_steps: int = 0
    """Steps to train synchronously before the asynchronous schedule begins."""
    layers_per_stage: tuple[int, ...] = ()
    """Layers of every stage, embedding and head counted as one each; empty: balanced by their FLOPs."""
    transport: Literal["process", "thread"] = "process"
    """Stages as processes, or as threads of one process (several stages on one GPU)."""
    timeout_seconds: float = 300.0
    """How long a stage waits for another before it gives up and says what it waited for."""


@dataclass(frozen=True)
class OptimizerSection:
    name: str = "muon"
    """muon (hidden matrices; AdamW takes the rest), adamw, or any class by its import path: torch.optim.SGD."""
    learning_rate: float = 0.02
    """Peak rate; with muon, of the matrices."""
    adamw_learning_rate: float = 0.003
    """muon: peak rate of embedding, head and norms."""
    arguments: dict[str, float] = field(default_factory=dict)
    """A class by its import path: further arguments, such as {momentum = 0.9}."""
    momentum: float = 0.95
    """muon: of the matrices."""
    beta1: float = 0.9
    """adamw, and the part AdamW takes beside muon; likewise below."""
    beta2: float = 0.95
    nesterov: bool = True
    """muon: look ahead along the momentum."""
    newton_schulz_steps: int = 5
    newton_schulz_dtype: Literal["float64", "float32", "bfloat16"] = "float32"
    weight_decay: float = 0.1
    """Decoupled, times the learning rate; never extrapolated by error feedback."""
    clip_norm: float = 1.0
    """Every parameter group's gradient is scaled down to this norm, taken over all stages; 0: no clipping."""
    error_feedback: float = 1.0
    """lam: how much of the one-step prediction to apply; 0 is plain delay. No effect while synchronous."""
    schedule: str = "cosine"
    """Learning rate by update: constant, cosine, linear or wsd, after a linear warm-up."""
    warmup_steps: int | None = None
    """None: a tenth of all steps."""
    decay_steps: int | None = None
    """wsd: the steps at the end in which the rate falls; None: a fifth of all steps."""
    final_fraction: float = 0.1
    """The rate at the end, as a share of the peak."""


@dataclass(frozen=True)
class TrainSection:
    steps: int = 200
    """Updates to make."""
    microbatch_size: int = 4
    """Sequences in a microbatch."""
    seed: int = 0
    """Of the weights and of the order of the data."""
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "float64"] = "float32"
    non_finite: Literal["raise", "skip"] = "raise"
    """An inf or nan in loss or gradient stops the run, or costs one update, on all stages alike."""
    track_alignment: bool = True
    """Log the cosine of consecutive updates; without error feedback that keeps one more copy of the weights."""


@dataclass(frozen=True)
class EvaluationSection:
    every_steps: int = 50
    """0: only at the end. The held-out set passes through without a drain."""
    batches: int = 8
    """Microbatches of held-out text; 0: no evaluation."""


@dataclass(frozen=True)
class RunSection:
    name: str = "default"
    """The run's folder below `folder`."""
    folder: str = "runs"
    overwrite: bool = False
    """Replace an earlier run of the same name."""
    log_every_steps: int = 10
    """How often a line is printed where there is no terminal to draw a progress bar on."""


@dataclass(frozen=True)
class Config:
    model: ModelSection = field(default_factory=ModelSection)
    data: DataConfig = field(default_factory=DataConfig)
    pipeline: PipelineSection = field(default_factory=PipelineSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    train: TrainSection = field(default_factory=TrainSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    run: RunSection = field(default_factory=RunSection)


# ---- what follows from it


def model_config(config: Config, corpus_vocab_size: int) -> ModelConfig:
    """The preset with the section's changes."""
    section = config.model
    if section.preset not in PRESETS:
        raise ConfigError(f"model.preset = {section.preset!r} is unknown: choose one of {', '.join(PRESETS)}")
    changes = {
        name: value for name, value in dataclasses.asdict(section).items() if name != "preset" and value is not None
    }
    preset = PRESETS[section.preset]
    changes.setdefault("vocab_size", max(preset.vocab_size, corpus_vocab_size))
    result = dataclasses.replace(preset, **changes)
    try:
        result.validate()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if result.vocab_size < corpus_vocab_size:
        raise ConfigError(
            f"model.vocab_size = {result.vocab_size} is too small for a corpus of {corpus_vocab_size} token ids: "
            f"use at least {corpus_vocab_size}, or leave it out"
        )
    return result


def schedule_of(config: Config) -> Schedule:
    section = config.pipeline
    try:
        return Schedule(
            section.schedule,
            section.stages,
            section.microbatches,
            config.train.steps,
            depth=section.depth,
            sync_start_steps=section.sync_start_steps,
        )
    except ScheduleError as error:
        raise ConfigError(f"pipeline: {error}") from error


def validate(config: Config) -> None:
    """What can be said without looking at data or model; the rest is said when those are built."""
    at_least = {
        "train.steps": 1,
        "train.microbatch_size": 1,
        "pipeline.stages": 1,
        "pipeline.microbatches": 1,
        "pipeline.sync_start_steps": 0,
        "optimizer.error_feedback": 0,
        "optimizer.weight_decay": 0,
        "optimizer.clip_norm": 0,
        "optimizer.learning_rate": 0,
        "optimizer.adamw_learning_rate": 0,
        "optimizer.newton_schulz_steps": 1,
        "optimizer.final_fraction": 0,
        "evaluation.every_steps": 0,
        "evaluation.batches": 0,
        "run.log_every_steps": 1,
    }
    for path, least in at_least.items():
        section, name = path.split(".")
        value = getattr(getattr(config, section), name)
        if not value >= least or value == float("inf"):
            raise ConfigError(f"{path} = {value} cannot be: use a finite number of {least} or more")
    for name in ("momentum", "beta1", "beta2"):
        value = getattr(config.optimizer, name)
        if not 0 <= value < 1:
            raise ConfigError(f"optimizer.{name} = {value} cannot be: use at least 0 and less than 1")
    for name in ("warmup_steps", "decay_steps"):
        value = getattr(config.optimizer, name)
        if value is not None and not 0 <= value <= config.train.steps:
            raise ConfigError(
                f"optimizer.{name} = {value} does not fit into train.steps = {config.train.steps}: use 0 to "
                f"{config.train.steps}, or leave it out"
            )
    if config.optimizer.final_fraction > 1:
        raise ConfigError(f"optimizer.final_fraction = {config.optimizer.final_fraction} is more than 1: use 0 to 1")
    if config.optimizer.schedule not in LEARNING_RATES:
        raise ConfigError(
            f"optimizer.schedule = {config.optimizer.schedule!r} is unknown: choose one of {', '.join(LEARNING_RATES)}"
        )
    if not config.pipeline.timeout_seconds > 0:
        raise ConfigError(
            f"pipeline.timeout_seconds = {config.pipeline.timeout_seconds:g} is no time at all: use more than 0"
        )
    name = config.run.name
    if not name or Path(name).name != name or name in (".", ".."):
        raise ConfigError(f"run.name = {name!r} is not the name of a folder: use letters, digits, - and _")
    schedule_of(config)


# ---- TOML in and out


def load_toml(path: Path) -> Config:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML ({error}): mend it there") from error
    return _build(Config, tree, f"{path}: ")


def _build(cls: type, tree: Any, where: str) -> Any:
    if not isinstance(tree, dict):
        raise ConfigError(f"{where.rstrip('. ')} = {tree!r} is not a section: write it as a TOML table")
    hints = typing.get_type_hints(cls)
    values = {}
    for name, value in tree.items():
        if name not in hints:
            close = difflib.get_close_matches(name, hints, n=1)
            remedy = f"did you mean {close[0]}?" if close else f"known are {', '.join(hints)}"
            raise ConfigError(f"{where}{name} is unknown: {remedy}")
        if dataclasses.is_dataclass(hints[name]):
            values[name] = _build(typing.cast(type, hints[name]), value, f"{where}{name}.")
        else:
            values[name] = _convert(hints[name], value, f"{where}{name}")
    return cls(**values)


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _convert(next(a for a in arguments if a is not types.NoneType), value, where)
    if origin is Literal:
        if value not in arguments:
            raise ConfigError(f"{where} = {value!r} is unknown: choose one of {', '.join(map(str, arguments))}")
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(_convert(arguments[0], item, where) for item in value)
    if origin is dict and isinstance(value, dict):
        return {str(key): _convert(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and isinstance(value, hint) and (hint is bool) == isinstance(value, bool):
        return value
    wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "a text in quotes"}
    raise ConfigError(f"{where} = {value!r} has the wrong type: write {wanted.get(hint, 'a list or table of values')}")


def to_toml(config: Config) -> str:
    """What `load_toml` reads back to the same configuration; fields without a value are left out."""
    lines = []
    for section in dataclasses.fields(config):
        lines.append(f"[{section.name}]")
        for name, value in dataclasses.asdict(getattr(config, section.name)).items():
            if value is not None:
                lines.append(f"{name} = {_literal(value)}")
        lines.append("")
    return "\n".join(lines)


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
        return f'"{escaped}"'
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(key)} = {_literal(item)}" for key, item in value.items()) + "}"
    return repr(value)
