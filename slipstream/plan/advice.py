"""What to do, in a few sentences, from what a search found."""

from __future__ import annotations

import dataclasses
import shlex
import typing
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..config import Config
from .price import token_price
from .search import ALIKE, DATA_PARALLEL, Option, Search

GIB = 2**30
PREFERENCE = ("one_f_one_b", "gpipe", "two_bw", "two_bw_double", "pipedream", "paci")
"""Among schedules that are equally fast: no delay, then one that is the same everywhere and can be made up for."""
MUCH = 0.05
"""A difference in speed that is worth a sentence."""


@dataclass(frozen=True)
class Advice:
    sentences: tuple[str, ...]
    choice: Option | None
    """What they recommend; None if nothing fits."""
    command: str | None
    """What to type next."""


def advise(search: Search, options: Mapping[str, Option | str], given: Given) -> Advice:
    found = {name: option for name, option in options.items() if isinstance(option, Option)}
    fitting = {name: option for name, option in found.items() if option.fits}
    whole = fitting.pop(DATA_PARALLEL, None)
    runnable = [option for option in fitting.values() if option.is_runnable]
    most = max((worth(search, option) for option in runnable), default=0.0)
    alike = [option for option in runnable if worth(search, option) >= (1 - ALIKE) * most]
    best = min(alike, key=lambda option: PREFERENCE.index(option.schedule), default=None)
    if whole is not None:
        return _use_one_stage(search, whole, best, given)
    if best is not None:
        return _use_pipeline(search, best, fitting, found, given)
    return _nothing_fits(search, found)


def worth(search: Search, option: Option) -> float:
    """Tokens per second, less those that its delay costs."""
    return option.tokens_per_second / price(search, option)


def price(search: Search, option: Option) -> float:
    return token_price(search.config.optimizer, option.schedule, max(option.prediction.delay))


@dataclass(frozen=True)
class Given:
    """What was typed, to be typed again."""

    path: str | None
    default: Config
    config: Config
    device: str


def _use_one_stage(search: Search, whole: Option, best: Option | None, given: Given) -> Advice:
    """best: of the pipelines that the trainer plays."""
    fits = f"the model fits on one device ({_gib(whole.memory[0].most)} of {_gib(search.cluster.memory)} GiB)"
    if search.cluster.num_devices == 1:
        return Advice((f"There is nothing to cut: {fits}.",), whole, _command(whole, given))
    sentences = [
        f"Pipeline parallelism is the wrong tool here: {fits}. Use data parallelism or FSDP on all of them: no "
        "bubble, no delay, no cut to balance.",
        "With pipeline.stages = 1 the trainer does the former, a replica on every device (pipeline.replicas).",
    ]
    replicas, typed = whole, given
    if best is not None and _is_worth_much_more(search, best, whole) and not search.config.optimizer.sharded:
        shared = _shared(search).best(DATA_PARALLEL)
        if isinstance(shared, Option) and shared.fits and _is_worth_much_more(search, shared, whole):
            gain = shared.tokens_per_second / whole.tokens_per_second - 1
            sentences.append(
                f"Let them share the update, which else each of them makes for all the model (--optimizer.sharded): "
                f"{gain:.0%} faster, {shared.tokens_per_second:,.0f} tokens/s."
            )
            config = replace(given.config, optimizer=replace(given.config.optimizer, sharded=True))
            replicas, typed = shared, replace(given, config=config)
    if best is None or not _is_worth_much_more(search, best, replicas):
        return Advice(tuple(sentences), replicas, _command(replicas, typed))
    gain = best.tokens_per_second / replicas.tokens_per_second - 1
    pipeline = f"{best.schedule} on {best.num_stages} stages"
    even = "" if replicas is whole else ", even if they share the update (--optimizer.sharded)"
    overlapped = replicas.tokens_per_second / max(replicas.bubble, 1 - replicas.bubble)
    if overlapped < worth(search, best):
        sentence = f"{pipeline} is predicted {gain:.0%} faster than a replica on each{even}, though {fits}."
        return Advice((sentence, *_price_said(search, best)), best, _command(best, given))
    sentences = [
        f"Pipeline parallelism is the wrong tool here: {fits}. Use FSDP on all of them, which hides the sums of "
        f"gradients behind the backward: up to {overlapped:,.0f} tokens/s, no bubble, no delay, no cut to balance.",
        f"This trainer's replicas wait for their sums, {replicas.bubble:.0%} of a step. Of what it plays, {pipeline} "
        f"is the best: {gain:.0%} faster than a replica on each{even}.",
        *_price_said(search, best),
    ]
    return Advice(tuple(sentences), best, _command(best, given))


def _is_worth_much_more(search: Search, one: Option, other: Option) -> bool:
    return worth(search, one) > (1 + MUCH) * worth(search, other)


def _is_much_faster(one: Option, other: Option) -> bool:
    return one.tokens_per_second > (1 + MUCH) * other.tokens_per_second


def _price_said(search: Search, option: Option) -> list[str]:
    more = price(search, option) - 1
    if not more:
        return []
    feedback = "with error feedback" if search.config.optimizer.error_feedback else "without error feedback"
    return [
        f"Its delay costs about {more:.0%} more tokens to the same loss with {search.config.optimizer.name} {feedback} "
        "(docs/results.md; less in long runs of small steps), and that is counted here."
    ]


def _use_pipeline(
    search: Search, best: Option, fitting: Mapping[str, Option], found: Mapping[str, Option], given: Given
) -> Advice:
    whole = found.get(DATA_PARALLEL)
    largest = best.memory[best.largest_stage]
    replicas = f" in each of {best.num_replicas} replicas" if best.num_replicas > 1 else ""
    too_large = "" if whole is None else f"One device would need {_gib(whole.memory[0].most)} GiB. "
    limit = _gib(search.cluster.memory)
    late = max(best.prediction.delay)
    sentences = [
        f"{too_large}Use {best.schedule} on {best.num_stages} stages{replicas}: {best.tokens_per_second:,.0f} "
        f"tokens/s, a bubble of {best.bubble:.1%}, and at most {_gib(largest.most)} of {limit} GiB, on stage "
        f"{best.largest_stage}." + (f" Gradients are {late} update{'s' * (late > 1)} late." if late else "")
    ]
    others = [fitting[name] for name in ("one_f_one_b", "gpipe") if name in fitting and name != best.schedule]
    if others and late:
        gain = best.tokens_per_second / others[0].tokens_per_second - 1
        sentences.append(f"That is {gain:.1%} faster than {others[0].schedule}, which has no delay.")
    sentences += _price_said(search, best)
    faster = [option for option in fitting.values() if option.is_runnable and _is_much_faster(option, best)]
    if faster:
        rival = max(faster, key=lambda option: option.tokens_per_second)
        sentences.append(
            f"{rival.schedule} is {rival.tokens_per_second / best.tokens_per_second - 1:.0%} faster, but its delay "
            f"costs {price(search, rival) - 1:.0%} more tokens to the same loss with {search.config.optimizer.name} "
            "(docs/results.md; less in long runs of small steps)."
        )
    fastest = max(fitting.values(), key=lambda option: option.tokens_per_second)
    if not fastest.is_runnable and (1 - ALIKE) * fastest.tokens_per_second > best.tokens_per_second:
        gain = fastest.tokens_per_second / best.tokens_per_second - 1
        sentences.append(f"{fastest.schedule} would be {gain:.1%} faster still, and the trainer does not play it.")
    sentences += _sharing(search, found, best.tokens_per_second)
    idle = search.cluster.num_devices - best.num_devices
    if idle:
        sentences.append(f"{idle} of the {search.cluster.num_devices} devices stay idle.")
    return Advice(tuple(sentences), best, _command(best, given))


def _nothing_fits(search: Search, found: Mapping[str, Option]) -> Advice:
    pipelines = [option for name, option in found.items() if name != DATA_PARALLEL] or list(found.values())
    if not pipelines:
        reason = "no schedule can be played with this batch: give another with --batch-tokens"
        return Advice((f"Nothing can be planned: {reason}.",), None, None)
    least = min(pipelines, key=lambda option: option.memory[option.largest_stage].most)
    memory = least.memory[least.largest_stage]
    sentences = [
        f"Nothing fits into {_gib(search.cluster.memory)} GiB: the least is {_gib(memory.most)} GiB, with "
        f"{least.schedule} on {least.num_stages} stages ({_parts(memory)}).",
        *_sharing(search, found),
        *_smaller_activations(search.config),
    ]
    for schedule in ("two_bw", "one_f_one_b"):
        more = search.more_devices(schedule)
        if more is not None:
            sentences.append(
                f"It needs more devices: {schedule} on {more.num_stages} stages would take "
                f"{_gib(more.memory[more.largest_stage].most)} GiB of each."
            )
            break
    else:
        sentences.append(
            "More devices alone do not help: the first stage of a pipeline holds a microbatch for every stage, in all "
            "the activations of one through the whole model. Use a smaller model.sequence_length, devices with more "
            "memory, or tensor parallelism, which the trainer does not have."
        )
    return Advice(tuple(sentences), None, None)


def _sharing(search: Search, found: Mapping[str, Option], least: float = 0.0) -> list[str]:
    """What fits only where replicas share the optimizer: the fastest of it. Of pipelines, only one that makes more than
    the least tokens per second is worth a word."""
    if search.config.optimizer.sharded or search.cluster.num_devices == 1:
        return []
    shared = _shared(search)
    too_large = [name for name, option in found.items() if not option.fits and _is_trainable(option)]
    options = [option for option in map(shared.best, too_large) if isinstance(option, Option)]
    fitting = [
        option
        for option in options
        if option.fits
        and option.num_replicas > 1
        and (option.schedule == DATA_PARALLEL or option.tokens_per_second > least)
    ]
    if not fitting:
        return []
    best = max(fitting, key=lambda option: option.tokens_per_second)
    stages = "" if best.schedule == DATA_PARALLEL else f" on {best.num_stages} stages"
    return [
        f"With --optimizer.sharded, where replicas share masters and optimizer state, {best.schedule}{stages} would "
        f"fit too, {best.num_replicas} replicas with {_gib(best.memory[best.largest_stage].most)} GiB on a device: "
        f"{best.tokens_per_second:,.0f} tokens/s."
    ]


def _shared(search: Search) -> Search:
    """The same where replicas share the optimizer."""
    config = replace(search.config, optimizer=replace(search.config.optimizer, sharded=True))
    return replace(search, config=config, memory_model=replace(search.memory_model, config=config))


def _is_trainable(option: Option) -> bool:
    return option.is_runnable or option.schedule == DATA_PARALLEL


def _smaller_activations(config: Config) -> list[str]:
    options = []
    if config.train.recompute_every != 1:
        options.append("--train.recompute-every 1 (every block is computed twice)")
    if not config.train.loss_chunk_tokens:
        options.append("--train.loss-chunk-tokens 1024 (never all logits at once)")
    return [f"Activations shrink with {' and '.join(options)}."] if options else []


def _parts(memory: Any) -> str:
    names = ("weights", "gradients", "optimizer", "activations", "messages")
    parts = [f"{_gib(getattr(memory, name))} {name}" for name in names]
    return ", ".join([*parts, f"{_gib(memory.work + memory.overlap)} work space"])


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f}" if num_bytes >= GIB else f"{num_bytes / GIB:.3f}"


def _command(option: Option, given: Given) -> str:
    """`slipstream train` with what was given and what was found."""
    chosen: dict[str, Any] = {
        "pipeline.schedule": "two_bw" if option.schedule == "two_bw_double" else option.schedule,
        "pipeline.depth": "double" if option.schedule == "two_bw_double" else "minimum",
        "pipeline.stages": option.num_stages,
        "pipeline.replicas": option.num_replicas,
        "pipeline.microbatches": option.num_microbatches,
        "pipeline.layers_per_stage": option.layers_per_stage,
        "train.microbatch_size": option.microbatch_size,
        "train.device": given.device,
    }
    if option.schedule == DATA_PARALLEL:
        chosen["pipeline.schedule"] = "one_f_one_b"
    if option.schedule == "paci":
        chosen["optimizer.error_feedback"] = 0.0
    words = ["slipstream", "train", *([given.path] if given.path else [])]
    for section in dataclasses.fields(Config):
        hints = typing.get_type_hints(type(getattr(given.config, section.name)))
        for member in dataclasses.fields(getattr(given.config, section.name)):
            path = f"{section.name}.{member.name}"
            default = getattr(getattr(given.default, section.name), member.name)
            value = chosen.get(path, getattr(getattr(given.config, section.name), member.name))
            if value != default and hints[member.name] is bool:
                words.append(f"--{section.name}.{'' if value else 'no-'}{member.name}".replace("_", "-"))
            elif value != default:
                words += [f"--{path.replace('_', '-')}", *_words(value)]
    return shlex.join(words)


def _words(value: Any) -> list[str]:
    if isinstance(value, tuple):
        return [str(item) for item in value]
    if isinstance(value, dict):
        return [str(word) for pair in value.items() for word in pair]
    return [str(value)]
