"""Builds the model, data, optimizers and stage boundaries of a configuration, before any weight or process exists.

Every mistake in a configuration is reported here, as one sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from ..config.defaults import settled
from ..config.layout import validate_layouts
from ..config.models import model_of, recomputed_layers
from ..config.optimizers import learning_rate, parameter_groups, peak_rates
from ..config.rules import schedule_of, validate
from ..config.schema import Config, DataConfig
from ..data import Batches, Corpus, ValidationBatches, codec_of_corpus, corpus_of, validation_batches
from ..errors import ConfigError, UsageError
from ..model.spec import ModelSpec
from ..observe.sinks import sink_classes
from ..optim import Group
from ..pipeline import PartitionError, Samples, partition
from ..pipeline.partition import check_sizes, tied_parameters
from ..pipeline.pipeline import plan_schedule
from ..schedule import TRAITS, Schedule
from ..schedule.check import check
from ..transport.environment import under_torchrun
from .layer_profile import read_profile
from .preflight import check_cuda, check_memory, check_model, check_num_processes, check_optimizers, check_torchrun

CHECKED_STEPS, MOST_CHECKED = 3, 1024
"""Steps of a schedule that are checked before a run, and stages times microbatches up to which they are."""


@dataclass(frozen=True)
class Components:
    """The objects that are built from a configuration."""

    model: ModelSpec
    batches: Batches
    validation: ValidationBatches | None
    groups: list[Group]
    learning_rate: Callable[[int], float]
    """Function from the number of an update to the factor that multiplies the peak learning rate of every group."""
    peak_rates: dict[str, float]
    """Peak learning rate by group name."""
    layers_per_stage: list[int]
    tokenizer: str = "unknown"
    """Name of the tokenizer that made the tokens, as in `Corpus`. `tokenizer_json` is the content of its file, if
    known."""
    tokenizer_json: bytes | None = None
    samples: Samples | None = None
    """Prompts of `evaluation.prompts`, as tokens."""

    def learning_rates(self, step: int) -> dict[str, float]:
        """Returns the learning rate of every group at a step, including groups that have no parameters on this
        stage."""
        return {name: peak * self.learning_rate(step) for name, peak in self.peak_rates.items()}


@cache
def read_corpus(config: DataConfig) -> Corpus:
    """Reads the corpus once, in the process that launches the stages. Forked stages inherit the result."""
    return corpus_of(config)


def corpus_vocab_size(config: Config) -> int:
    """Returns the number of token ids in the corpus."""
    try:
        return read_corpus(config.data).vocab_size
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        raise ConfigError(f"data.sources = {list(config.data.sources)} cannot be read: {error}") from error


def build_components(config: Config) -> Components:
    """Builds everything except weights and processes.

    Raises a ConfigError with one sentence if the configuration cannot be used.
    """
    validate(config)
    config = settled(config)
    validate_layouts(config)
    if under_torchrun():
        check_torchrun(config)
    if config.train.device == "cuda":
        check_cuda(config)
    try:
        groups = parameter_groups(config)
        corpus = read_corpus(config.data)
        model = model_of(config, corpus.vocab_size)
        if config.data.separate_documents:
            model = _separating(model, corpus)
        batches, validation = _batches(config, model, corpus)
        check_model(config, model)
        check_memory(config, model)
        sink_classes(config.run.sinks)
        check_optimizers(config, groups, model)
        sizes = _layers_per_stage(config, model)
        check_num_processes(config, model)
        schedule = schedule_of(config)
        _check_order(schedule)
        _check_tied(config, model, sizes)
        plan_schedule(schedule, groups, has_tied=False, skip_non_finite=config.train.non_finite == "skip")
        return Components(
            model=model,
            batches=batches,
            validation=validation,
            groups=groups,
            learning_rate=learning_rate(config),
            peak_rates=peak_rates(config),
            layers_per_stage=sizes,
            tokenizer=corpus.tokenizer,
            tokenizer_json=corpus.tokenizer_json,
            samples=_samples(config, model, corpus),
        )
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(
            f"data.sources = {list(config.data.sources)} leads to {str(error.filename)!r}, which cannot be read "
            f"({error.strerror}): give another"
        ) from error


def in_layout_of(config: Config, components: Components) -> Components:
    """Returns the components for a configuration that differs from that of `components` only in its layout.

    The configuration must have been checked already.
    """
    batches, validation = _batches(config, components.model, read_corpus(config.data))
    sizes = _layers_per_stage(config, components.model)
    return replace(components, batches=batches, validation=validation, layers_per_stage=sizes)


def _layers_per_stage(config: Config, model: ModelSpec) -> list[int]:
    costs = _layer_costs(config, model)
    stages = config.pipeline.stages
    if stages > len(costs):
        raise ConfigError(
            f"pipeline.stages = {stages} is more than the model's {len(costs)} layers (embedding, {model.num_layers} "
            f"blocks, head): use at most {len(costs)}, or raise model.num_layers"
        )
    sizes = list(config.pipeline.layers_per_stage) or partition(costs, stages)
    try:
        check_sizes(sizes, len(costs), stages)
    except PartitionError as error:
        raise ConfigError(f"pipeline.{error}") from error
    return sizes


def _layer_costs(config: Config, model: ModelSpec) -> list[float]:
    """Returns the cost of every layer: the measured seconds of a forward and a backward, or without a profile the
    estimated FLOPs of a forward.

    A backward costs twice a forward. A recomputed layer makes its forward twice, so it costs four thirds of a layer
    that is not recomputed.
    """
    recomputed = recomputed_layers(config, model)
    if not config.pipeline.profile:
        forward = zip(model.layer_names, model.layer_flops(), strict=True)
        return [cost * 4 / 3 if name in recomputed else cost for name, cost in forward]
    path = Path(config.pipeline.profile)
    try:
        layers = read_profile(path).layer_costs(model, path)
    except UsageError as error:
        raise ConfigError(f"pipeline.{error}") from error
    return [layer.compute + (layer.forward if layer.name in recomputed else 0.0) for layer in layers]


def _separating(model: ModelSpec, corpus: Corpus) -> ModelSpec:
    """Returns the model with documents kept apart."""
    if corpus.end_of_text is None:
        raise ConfigError(
            "data.separate_documents = true needs a token that ends a document, and data.loader names none: "
            "give its Corpus an end_of_text"
        )
    try:
        return model.separating(corpus.end_of_text)
    except NotImplementedError:
        raise ConfigError(
            f"data.separate_documents = true is not possible with a {type(model).__name__}: leave it out"
        ) from None


def _check_tied(config: Config, model: ModelSpec, sizes: list[int]) -> None:
    """Raises a ConfigError if stages that step on their own hold the same weight, and it is updated."""
    if not TRAITS[config.pipeline.schedule].steps_alone:
        return
    tied = tied_parameters(model.meta_layers(), sizes)
    if names := [name for name, weight in tied.items() if not weight.is_frozen]:
        raise ConfigError(
            f"pipeline.schedule = {config.pipeline.schedule!r} lets every stage step on its own, and {names[0]} and "
            f"{names[1]} are one weight on two stages: set model.tied_embeddings = false or untie them, or "
            "pipeline.schedule = 'two_bw'"
        )


def _check_order(schedule: Schedule) -> None:
    """Checks the first steps of a schedule, which may be of the user's own. Large ones would take seconds."""
    if schedule.num_stages * schedule.num_microbatches <= MOST_CHECKED:
        steps = schedule.sync_start_steps + CHECKED_STEPS
        check(replace(schedule, num_steps=min(steps, schedule.num_steps or steps)))


def _batches(config: Config, model: ModelSpec, corpus: Corpus) -> tuple[Batches, ValidationBatches | None]:
    length, size = model.sequence_length, config.train.microbatch_size
    for source in corpus.sources:
        _check_window(source.num_tokens, f"training in {source.name!r}", length, "give that source more text")
    _check_window(len(corpus.train), "training", length, "give data.sources more text")
    batches = Batches(
        corpus.train,
        length,
        size,
        config.pipeline.microbatches * config.pipeline.replicas,
        config.train.seed,
        corpus.sources,
    )
    if not config.evaluation.batches:
        return batches, None
    per_source = config.evaluation.per_source
    parts = corpus.held_out_sources if per_source and corpus.held_out_sources else corpus.sources
    remedy = "raise data.validation_fraction, name data.validation_sources"
    if corpus.held_out_sources:
        remedy = "give data.validation_sources more text"
    _check_window(
        max((source.num_held_out for source in parts), default=0) or len(corpus.validation),
        "validation",
        length,
        f"{remedy}, or set evaluation.batches = 0",
    )
    for source in parts if per_source else ():
        _check_window(
            source.num_held_out,
            f"validation in {source.name!r}",
            length,
            "give that source more text, or set evaluation.per_source = false",
        )
    held_out = validation_batches(
        corpus.validation, length, size, config.evaluation.batches, parts, per_source=per_source
    )
    if per_source and (missing := {part.name for part in parts} - {part.name for part in held_out.parts}):
        raise ConfigError(
            f"evaluation.batches = {config.evaluation.batches} is too few: no batch has text of {min(missing)!r}, so "
            "use more, or set evaluation.per_source = false"
        )
    if per_source and len(held_out.parts) < 2:
        raise ConfigError(
            "evaluation.per_source = true finds one source of held-out text: name several in data.validation_sources, "
            "or mix several by data.weights"
        )
    return batches, held_out


def _samples(config: Config, model: ModelSpec, corpus: Corpus) -> Samples | None:
    prompts, num_tokens = config.evaluation.prompts, config.evaluation.sample_tokens
    if not prompts:
        return None
    name = config.pipeline.schedule
    if not config.evaluation.batches:
        raise ConfigError("evaluation.prompts are continued at evaluations, and evaluation.batches = 0: use 1 or more")
    if TRAITS[name].steps_alone:
        raise ConfigError(
            f"evaluation.prompts need stages that hold the same number of updates, and those of {name} do not: leave "
            "them out, or set pipeline.schedule = 'two_bw'"
        )
    codec = codec_of_corpus(corpus.tokenizer, corpus.tokenizer_json)
    encoded = tuple(tuple(codec.encode(prompt)) for prompt in prompts)
    for prompt, ids in zip(prompts, encoded, strict=True):
        if not ids or max(ids) >= model.vocab_size:
            raise ConfigError(f"evaluation.prompts has {prompt!r}, which is no token of the model: write some text")
        if len(ids) + num_tokens > model.sequence_length + 1:
            raise ConfigError(
                f"evaluation.prompts has {prompt[:40]!r}, whose {len(ids)} tokens and the {num_tokens} of "
                f"evaluation.sample_tokens do not fit model.sequence_length = {model.sequence_length}: shorten one"
            )
    return Samples(encoded, num_tokens, config.train.seed)


def _check_window(num_tokens: int, part: str, length: int, remedy: str) -> None:
    if num_tokens <= length:
        raise ConfigError(
            f"model.sequence_length = {length} takes {length + 1} tokens and there are {num_tokens} for {part}: "
            f"shorten it, or {remedy}"
        )
