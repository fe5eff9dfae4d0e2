"""One tree of frozen dataclasses: the whole configuration of a run.

The command line is generated from it, a TOML file mirrors it, and a run writes it down resolved. To read it, or to
explain it with --help, takes no torch. Every mistake is a
`ConfigError` of one sentence that names the field, the value and the remedy.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import tomllib
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .presets import PRESETS, ModelConfig
from .reading import read_plain_file
from .schedule import DEPTHS, SCHEDULES, TRAITS, Schedule, ScheduleError

BUILTIN = "builtin"
"""The corpus that is always there."""
MIN_TIMEOUT_SECONDS, MAX_TIMEOUT_SECONDS = 0.01, 1e6
"""No stage is always faster than the one; the other is some eleven days: longer than anyone waits, and short enough for
every clock it is handed to."""


class ConfigError(ValueError):
    """A configuration that cannot run."""


@dataclass(frozen=True)
class ModelSection:
    preset: str = "tiny"
    """tiny, small, 135m, 360m, 1b, 3b, 8b, 10b or 70b; moe-2b or moe-10b, with experts."""
    vocab_size: int | None = None
    """None: the preset's, or the corpus's if that is larger."""
    sequence_length: int | None = None
    """Tokens in a sequence. None: the preset's; likewise below."""
    dim: int | None = None
    """Width of the residual stream."""
    num_layers: int | None = None
    """Blocks between the embedding and the head."""
    num_heads: int | None = None
    """Query heads of a block."""
    num_kv_heads: int | None = None
    """Key and value heads of a block."""
    hidden_dim: int | None = None
    """Width inside the SwiGLU of a dense block."""
    tied_embeddings: bool | None = None
    """Whether embedding and head share one matrix."""
    num_experts: int | None = None
    """Routed experts of a block; 0: all blocks are dense."""
    experts_per_token: int | None = None
    """How many of them a token goes through, at least 2."""
    expert_dim: int | None = None
    """Width inside the SwiGLU of one expert."""
    num_shared_experts: int | None = None
    """Experts that every token goes through besides."""
    num_dense_layers: int | None = None
    """Blocks at the beginning that have no experts."""


@dataclass(frozen=True)
class DataConfig:
    sources: tuple[str, ...] = (BUILTIN,)
    """Files (.txt, .jsonl, .bin), folders or globs; "builtin" is the source of Python's standard library."""
    validation_sources: tuple[str, ...] = ()
    """Files, folders or globs held out for validation; without any, a part of `sources` is."""
    validation_fraction: float = 0.05
    """The part held out: the end of the tokens, or whole files of "builtin"; shards may bring their own."""
    tokenizer: str = "bytes"
    """Makes tokens of text: "bytes", or a tokenizer.json or its folder (needs slipstream[text]); shards had theirs."""
    end_of_text: str | None = None
    """The tokenizer's token that ends a document. None: found by its usual names. "none": documents have no end."""
    text_field: str = "text"
    """The field of a .jsonl object that holds its text."""
    token_dtype: Literal["uint8", "uint16", "uint32"] | None = None
    """Type of the ids in .bin shards that have no .json beside them."""


@dataclass(frozen=True)
class PipelineSection:
    schedule: str = "two_bw"
    """two_bw, one_f_one_b, gpipe, pipedream or paci."""
    stages: int = 2
    """Parts the layers are cut into, each with a process (under torchrun: a rank) of its own."""
    replicas: int = 1
    """Copies of the whole pipeline, each with its own microbatches of every step: stages x replicas processes."""
    placement: Literal["pipeline", "replica"] = "pipeline"
    """Which processes have consecutive ranks: the stages of a replica, or the replicas of a stage."""
    microbatches: int = 4
    """To a step of each replica. two_bw wants at least one per stage, and twice that less one at double depth."""
    depth: str = "minimum"
    """two_bw: "double" keeps twice the forwards in flight and hides the latency of links."""
    sync_start_steps: int = 0
    """Steps to train synchronously before the asynchronous schedule begins."""
    layers_per_stage: tuple[int, ...] = ()
    """Layers of every stage, embedding and head counted as one each; empty: balanced by their cost."""
    profile: str = ""
    """What slipstream profile wrote: the layers' measured costs, to balance the stages by; empty: by their FLOPs."""
    reshape: tuple[str, ...] = ()
    """Change the number of stages on the way: "100=4" makes four of them after 100 steps, "100=2x2" two in each of two
    replicas, "100=2/5,5" two of five layers. Weights and optimizer move from memory to memory."""
    processes: int | None = None
    """Processes at hand, for slipstream reshape: those that have no stage stand by. None: as many as pipeline.stages x
    pipeline.replicas or pipeline.reshape come to."""
    transport: Literal["process", "thread"] = "process"
    """Stages as processes, or as threads of one process (several stages on one GPU)."""
    backend: Literal["auto", "gloo"] = "auto"
    """Between processes: NCCL between GPUs and gloo between CPUs; or gloo between GPUs too, through the hosts' memory,
    which lets several stages have one GPU."""
    share_gpu: bool = False
    """More processes than GPUs, over NCCL: tests a pipeline of GPUs on a machine with one. Each process then counts as
    a host of its own, and messages go over sockets."""
    shared_memory: bool = True
    """Processes of one machine exchange activations in shared memory, on CPUs; false: by gloo, as between machines."""
    timeout_seconds: float = 300.0
    """How long a stage waits for another before it gives up and says what it waited for."""


@dataclass(frozen=True)
class OptimizerSection:
    name: str = "muon"
    """muon, normuon, soap or scion (hidden matrices; AdamW takes the rest), adamw, adan, lion, mars or nadamw, or any
    class by its import path: torch.optim.SGD."""
    learning_rate: float | None = None
    """Peak rate; where AdamW takes the rest, of the matrices. None: the best of our sweep for this optimizer, such as
    0.02 for muon and 0.001 for adamw, or what a class of torch's has by itself."""
    adamw_learning_rate: float | None = None
    """Peak rate of embedding, head, norms and routers where AdamW takes them beside another. None: 0.003."""
    balance_rate: float | None = None
    """Experts: by how much a step raises or lowers an expert's chance to be chosen, to even out the load; follows the
    learning rate's schedule. None: 0.001."""
    arguments: dict[str, float] = field(default_factory=dict)
    """A class by its import path: further arguments, {momentum = 0.9} in TOML, momentum 0.9 on the command line. Those
    that slipstream/optim/recipes.py gives normuon, soap, scion, adan, lion, mars and nadamw can be changed likewise."""
    momentum: float = 0.95
    """muon: of the matrices."""
    beta1: float = 0.9
    """adamw, and the part AdamW takes beside another: decay of the mean."""
    beta2: float = 0.95
    """Likewise, of the mean square."""
    adamw_nesterov: bool = False
    """Likewise: look one step ahead along the mean."""
    adamw_predictor: Literal["nesterov", "last"] | None = None
    """Likewise: what error feedback expects of the next update, the last one again or, as if with adamw_nesterov, one
    that turns with the mean. None: nesterov for adamw, last beside another, where it made no difference."""
    nesterov: bool = True
    """muon: look ahead along the momentum."""
    lookahead: float | None = None
    """muon, with nesterov: how many steps ahead; the more, the more the newest gradient counts. None: one."""
    newton_schulz_steps: int = 5
    """muon: iterations that make an update orthogonal."""
    newton_schulz_dtype: Literal["float64", "float32", "bfloat16"] | None = None
    """muon: what they compute in. None: bfloat16 on a GPU, float32 on a CPU."""
    weight_decay: float = 0.1
    """Decoupled, times the learning rate; never extrapolated by error feedback."""
    clip_norm: float = 1.0
    """Every parameter group's gradient is scaled down to this norm, taken over all stages; 0: no clipping."""
    sharded: bool = False
    """The replicas of a stage share its optimizer: each keeps weights and state of a part of the parameters, steps
    them, and hands them to the others (ZeRO-1)."""
    error_feedback: float = 1.0
    """lam: how much of the one-step prediction to apply; 0 is plain delay. No effect while synchronous."""
    schedule: str = "cosine"
    """Learning rate by update: constant, cosine, linear or wsd, after a linear warm-up."""
    horizon_steps: int | None = None
    """Steps that warm-up and schedule are laid out for; the rate then stays where it is. None: train.steps, so that a
    run which goes on for longer than planned changes its rate."""
    warmup_steps: int | None = None
    """None: a tenth of all steps, and 1,000 at most."""
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
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the stages compute; auto: on GPUs if there are enough. There a stage that is a process wants one of its
    own, unless pipeline.share_gpu is set."""
    dtype: Literal["float32", "float64"] = "float32"
    """Of the weights that the optimizer steps, and of its state."""
    compute_dtype: Literal["float64", "float32", "bfloat16"] | None = None
    """Of the working copies of the weights, of activations and messages. None: bfloat16 on a GPU if train.dtype is
    float32, otherwise train.dtype."""
    gradient_dtype: Literal["float64", "float32", "bfloat16"] | None = None
    """That the gradients of a step's microbatches are added up in. None: train.dtype."""
    reduction_dtype: Literal["float64", "float32", "bfloat16"] | None = None
    """That the gradients of replicas are added up in, and travel in; those of tied weights travel in it between stages.
    None: train.gradient_dtype."""
    non_finite: Literal["raise", "skip"] = "raise"
    """An inf or nan in loss or gradient stops the run, or costs one update, on all stages alike."""
    track_alignment: bool = True
    """Log the cosine of each update and what was expected of it; without error feedback that keeps one more copy of the
    weights."""
    loss_chunk_tokens: int = 0
    """Tokens whose logits exist at a time: head and loss go over a microbatch in chunks of so many; 0: all at once."""
    recompute_every: int = 0
    """Every n-th block keeps its input alone and is computed again in the backward; 1: all blocks, 0: none."""
    compile: bool = False
    """Run the blocks through torch.compile, all that are alike through one graph: fewer kernels, the same numbers up to
    rounding. The first microbatches wait for the compiler."""


@dataclass(frozen=True)
class EvaluationSection:
    every_steps: int = 50
    """0: only at the end. The held-out set passes through without a drain."""
    batches: int = 8
    """Microbatches of held-out text; 0: no evaluation."""


@dataclass(frozen=True)
class CheckpointSection:
    every_steps: int = 0
    """Save after every so many steps; 0: not by steps."""
    every_minutes: float = 30.0
    """Save when so many minutes have passed; 0: not by the clock."""
    at_end: bool = True
    """Save after the last step. After SIGTERM or Ctrl-C, which stop a run within a few steps, and after SIGUSR1, which
    does not, it is saved in any case. A second Ctrl-C ends it at once."""
    keep_last: int = 2
    """How many checkpoints stay, the newest of them."""
    keep_every: int = 0
    """Those of every so many steps stay too; 0: none."""
    resume: bool = False
    """Go on from the run's newest complete checkpoint. Where there is none, begin."""


@dataclass(frozen=True)
class RunSection:
    name: str = "default"
    """The run's folder below `folder`."""
    folder: str = "runs"
    """Where runs are kept."""
    overwrite: bool = False
    """Replace an earlier run of the same name."""
    log_every_steps: int = 10
    """How often a line is printed where there is no terminal to draw a progress bar on."""
    trace_actions: int = 512
    """How many of every stage's latest actions go into trace.json; at most 4,096 are kept."""


@dataclass(frozen=True)
class Config:
    model: ModelSection = field(default_factory=ModelSection)
    data: DataConfig = field(default_factory=DataConfig)
    pipeline: PipelineSection = field(default_factory=PipelineSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    train: TrainSection = field(default_factory=TrainSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    run: RunSection = field(default_factory=RunSection)


# ---- what follows from it


def model_config(config: Config, corpus_vocab_size: int) -> ModelConfig:
    """The preset with the section's changes."""
    section = config.model
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


def with_model(config: Config, model: ModelConfig) -> Config:
    """The configuration with nothing of the model left to its preset or to the corpus."""
    names = (member.name for member in dataclasses.fields(ModelSection) if member.name != "preset")
    section = dataclasses.replace(config.model, **{name: getattr(model, name) for name in names})
    return dataclasses.replace(config, model=section)


def has_experts(config: Config) -> bool:
    num_experts = config.model.num_experts
    return bool(PRESETS[config.model.preset].num_experts if num_experts is None else num_experts)


def schedule_of(config: Config) -> Schedule:
    section = config.pipeline
    return Schedule(
        section.schedule,
        section.stages,
        section.microbatches,
        config.train.steps,
        depth=section.depth,
        sync_start_steps=section.sync_start_steps,
    )


# ---- what cannot be


AT_LEAST = {
    "train.steps": 1,
    "train.microbatch_size": 1,
    "train.loss_chunk_tokens": 0,
    "train.recompute_every": 0,
    "pipeline.stages": 1,
    "pipeline.replicas": 1,
    "pipeline.processes": 1,
    "pipeline.microbatches": 1,
    "pipeline.sync_start_steps": 0,
    "optimizer.error_feedback": 0,
    "optimizer.weight_decay": 0,
    "optimizer.clip_norm": 0,
    "optimizer.learning_rate": 0,
    "optimizer.adamw_learning_rate": 0,
    "optimizer.horizon_steps": 1,
    "optimizer.newton_schulz_steps": 1,
    "evaluation.every_steps": 0,
    "evaluation.batches": 0,
    "checkpoint.every_steps": 0,
    "checkpoint.every_minutes": 0,
    "checkpoint.keep_last": 1,
    "checkpoint.keep_every": 0,
    "run.log_every_steps": 1,
    "run.trace_actions": 0,
}

AT_MOST = {
    "train.steps": 10**9,
    "pipeline.microbatches": 2**16,
    "evaluation.batches": 2**20,
    "optimizer.newton_schulz_steps": 1000,
    "optimizer.learning_rate": 1e30,
    "optimizer.adamw_learning_rate": 1e30,
    "optimizer.weight_decay": 1e30,
    "optimizer.clip_norm": 1e30,
    "optimizer.error_feedback": 1e30,
    "optimizer.balance_rate": 1e30,
}
"""Far beyond any use, and short of what looks like a hang or float32 cannot hold."""


def validate(config: Config) -> None:
    """What can be said without looking at data or model; the rest is said when those are built."""
    from .optim.learning_rate import SCHEDULES as LEARNING_RATES  # here, because they come with torch

    values = dict(_walk(config))
    for path, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{path} = {value} is not finite: write a number that is")
        if isinstance(value, str) and not _is_unicode(value):
            raise ConfigError(f"{path} = {value!r} is not Unicode: write it in UTF-8")
    for path, least in AT_LEAST.items():
        if values[path] is not None and values[path] < least:
            raise ConfigError(f"{path} = {values[path]} is too small: use {least} or more")
    for path, most in AT_MOST.items():
        if values[path] is not None and values[path] > most:
            raise ConfigError(
                f"{path} = {values[path]} is too large: use {most if most < 1e9 else f'{most:g}'} or less"
            )
    _choose("model.preset", config.model.preset, PRESETS)
    _choose("pipeline.schedule", config.pipeline.schedule, SCHEDULES)
    _choose("pipeline.depth", config.pipeline.depth, DEPTHS)
    _choose("optimizer.schedule", config.optimizer.schedule, LEARNING_RATES)
    _validate_pipeline(config)
    _validate_optimizer(config)
    train = config.train
    if (train.compute_dtype, train.dtype) == ("float64", "float32"):
        raise ConfigError(
            f"train.compute_dtype = {train.compute_dtype!r} is finer than train.dtype = {train.dtype!r}: set that to "
            "'float64' too, or leave train.compute_dtype out"
        )
    name = config.run.name
    if not name or Path(name).name != name or name == ".." or not name.isprintable():
        raise ConfigError(f"run.name = {name!r} is not the name of a folder: use letters, digits, - and _")
    if not config.run.folder or not config.run.folder.isprintable():
        raise ConfigError(f"run.folder = {config.run.folder!r} is not a path: name a folder to keep runs in")


def _walk(section: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Every value and its path; those of a list or a table one by one."""
    for member in dataclasses.fields(section):
        value, path = getattr(section, member.name), f"{where}{member.name}"
        if dataclasses.is_dataclass(value):
            yield from _walk(value, f"{path}.")
        elif isinstance(value, dict):
            yield from ((f"{path}.{key}", item) for key, item in value.items())
        elif isinstance(value, tuple):
            yield from ((f"{path}[{index}]", item) for index, item in enumerate(value))
        else:
            yield path, value


def _is_unicode(text: str) -> bool:
    """An argument that was not decodable carries surrogates, which no file takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _choose(path: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        raise ConfigError(f"{path} = {value!r} is unknown: choose one of {', '.join(known)}")


def _validate_pipeline(config: Config) -> None:
    section = config.pipeline
    traits, name = TRAITS[section.schedule], section.schedule
    if section.depth not in traits.depths:
        raise ConfigError(
            f"pipeline.depth = {section.depth!r} is made for two_bw, not for {name}: set pipeline.depth = 'minimum'"
        )
    if not MIN_TIMEOUT_SECONDS <= section.timeout_seconds <= MAX_TIMEOUT_SECONDS:
        raise ConfigError(
            f"pipeline.timeout_seconds = {section.timeout_seconds:g} cannot be: use at least {MIN_TIMEOUT_SECONDS:g}, "
            f"and at most {MAX_TIMEOUT_SECONDS:,.0f}"
        )
    if traits.drifts and config.optimizer.error_feedback != 0:
        raise ConfigError(
            f"optimizer.error_feedback = {config.optimizer.error_feedback:g} needs a weight version to predict into, "
            f"and {name} keeps none: set optimizer.error_feedback = 0, or pipeline.schedule = 'two_bw'"
        )
    if traits.drifts and config.train.recompute_every:
        raise ConfigError(
            f"train.recompute_every = {config.train.recompute_every} computes blocks again with the weights of their "
            f"forward, and {name} has overwritten them: set train.recompute_every = 0, or pipeline.schedule = 'two_bw'"
        )
    if traits.drifts and config.train.compile:
        raise ConfigError(
            "train.compile = true leaves it to the compiler what a backward keeps of the forward's weights, and under "
            f"{name} it must read the newest: set train.compile = false, or pipeline.schedule = 'two_bw'"
        )
    if traits.drifts and config.checkpoint.resume:
        raise ConfigError(
            f"checkpoint.resume = true needs the weights that microbatches in flight have read, and {name} overwrites "
            "them: begin anew, or use another schedule"
        )
    try:
        schedule_of(config)
    except ScheduleError as error:
        # Everything else it could object to has been looked at above.
        raise ConfigError(f"pipeline.microbatches = {section.microbatches} cannot be: {error}") from error


def _validate_optimizer(config: Config) -> None:
    from .optim.recipes import RECIPES

    section, steps = config.optimizer, config.optimizer.horizon_steps or config.train.steps
    whose = "train.steps" if section.horizon_steps is None else "optimizer.horizon_steps"
    for name in ("momentum", "beta1", "beta2"):
        value = getattr(section, name)
        if not 0 <= value < 1:
            raise ConfigError(f"optimizer.{name} = {value} cannot be: use at least 0 and less than 1")
    if section.lookahead is not None and not 0 <= section.lookahead * (1 - section.momentum) <= 1 + 1e-9:
        most = 1 / (1 - section.momentum)
        raise ConfigError(
            f"optimizer.lookahead = {section.lookahead} cannot be: use 0 to {most:g}, where with optimizer.momentum = "
            f"{section.momentum} the newest gradient is all that counts"
        )
    if section.balance_rate is not None:
        _validate_balance(config, section.balance_rate)
    if not 0 <= section.final_fraction <= 1:
        raise ConfigError(f"optimizer.final_fraction = {section.final_fraction} is no share: use 0 to 1")
    for name in ("warmup_steps", "decay_steps"):
        value = getattr(section, name)
        if value is not None and not 0 <= value <= steps:
            raise ConfigError(
                f"optimizer.{name} = {value} does not fit into {whose} = {steps}: use 0 to {steps}, or leave it out"
            )
    if section.schedule == "wsd" and section.warmup_steps and section.decay_steps:
        left = steps - section.warmup_steps
        if section.decay_steps > left:
            raise ConfigError(
                f"optimizer.decay_steps = {section.decay_steps} is more than the {left} of {whose} = {steps} that "
                f"optimizer.warmup_steps = {section.warmup_steps} leaves: use at most {left}"
            )
    if section.arguments and section.name in ("muon", "adamw"):
        raise ConfigError(
            f"optimizer.arguments = {section.arguments} is for other optimizers, and {section.name} has fields of its "
            "own: use those"
        )
    for name, own in (("lr", "learning_rate"), ("weight_decay", "weight_decay")):
        if name in section.arguments:
            raise ConfigError(
                f"optimizer.arguments.{name} = {section.arguments[name]} has a field of its own: set optimizer.{own}"
            )
    if section.name in RECIPES:
        _validate_recipe(section, RECIPES[section.name].arguments)


def _validate_balance(config: Config, rate: float) -> None:
    if rate < 0:
        raise ConfigError(f"optimizer.balance_rate = {rate} is too small: use 0 or more")
    if not has_experts(config):
        raise ConfigError(
            f"optimizer.balance_rate = {rate} balances experts, and model.preset = {config.model.preset!r} has none: "
            "leave it out, or set model.num_experts"
        )


def _validate_recipe(section: OptimizerSection, known: Mapping[str, float]) -> None:
    """The classes take any argument and say nothing of those they do not know."""
    for name, value in section.arguments.items():
        if name not in known:
            raise ConfigError(
                f"optimizer.arguments.{name} = {value:g} means nothing to {section.name}: it has {', '.join(known)}"
            )
        if isinstance(known[name], int) and value != int(value):
            raise ConfigError(f"optimizer.arguments.{name} = {value:g} cannot be: write a whole number")


# ---- TOML in and out


def load_toml(path: Path) -> Config:
    try:
        tree = tomllib.loads(read_plain_file(path).decode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): check the path") from error
    except (ValueError, RecursionError) as error:  # bad TOML, bad UTF-8, a number without end, tables without end
        raise ConfigError(f"{path} is not valid TOML ({error}): mend it there") from error
    return build(Config, tree, f"{path}: ")


def build(cls: type, tree: Any, where: str) -> Any:
    if not isinstance(tree, dict):
        raise ConfigError(f"{where.rstrip('. ')} = {tree!r} is not a section: write it as a TOML table")
    hints = typing.get_type_hints(cls)
    values = {}
    for name, value in tree.items():
        if name not in hints:
            raise ConfigError(f"{where}{name} is unknown: {_suggest(name, hints)}")
        values[name] = _convert(hints[name], value, f"{where}{name}")
    return cls(**values)


def _suggest(name: str, hints: dict[str, Any]) -> str:
    close = difflib.get_close_matches(name, hints, n=1)
    if close:
        return f"did you mean {close[0]}?"
    for section, hint in hints.items():
        if dataclasses.is_dataclass(hint) and name in typing.get_type_hints(hint):
            return f"did you mean {section}.{name}?"
    return f"known are {', '.join(hints)}"


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:  # which JSON has, and TOML has not
            return None
        return _convert(next(a for a in arguments if a is not types.NoneType), value, where)
    if origin is Literal and isinstance(value, str):
        _choose(where, value, arguments)
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(_convert(arguments[0], item, where) for item in value)
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, f"{where}.")
    if origin is dict and isinstance(value, dict):
        return {str(key): _convert(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return _to_float(value, where)
    if isinstance(hint, type) and isinstance(value, hint) and (hint is bool) == isinstance(value, bool):
        return value
    raise ConfigError(f"{where} = {value!r} has the wrong type: write {wanted(hint)}")


def _to_float(value: int, where: str) -> float:
    try:
        return float(value)
    except OverflowError as error:
        raise ConfigError(f"{where} = {value} is too large: write a smaller number") from error


def wanted(hint: Any) -> str:
    """What to write for a field of this type, in TOML or on the command line."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return wanted(next(a for a in arguments if a is not types.NoneType))
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is tuple:
        return f"a list, each item {wanted(arguments[0])}"
    if origin is dict:
        return f"a table, each value {wanted(arguments[1])}"
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(hint, "a text")


def to_toml(config: Config) -> str:
    """What `load_toml` reads back to the same configuration; fields without a value are left out."""
    lines = []
    for section in dataclasses.fields(config):
        lines.append(f"[{section.name}]")
        for name, value in dataclasses.asdict(getattr(config, section.name)).items():
            if value is not None:
                lines.append(f"{name} = {literal(value)}")
        lines.append("")
    return "\n".join(lines)


def literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # TOML's escapes are JSON's, except that it has no surrogate pairs and does not take a bare DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(literal, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(key)} = {literal(item)}" for key, item in value.items()) + "}"
    return repr(value)
