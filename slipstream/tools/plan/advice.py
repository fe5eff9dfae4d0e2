"""Turns the results of a search into a recommendation of a few sentences."""

from __future__ import annotations

import shlex
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from ...config.schema import Config
from . import savings
from .causes import idle_causes, say_causes
from .fsdp import FSDP
from .predict import DOUBLE, traits_of
from .search import ALIKE, DATA_PARALLEL, Option, Search
from .stage import StageMemory

GIB = 2**30
PREFERENCE = (DATA_PARALLEL, "one_f_one_b", "gpipe", "two_bw", "two_bw_double", "pipedream", "paci")
"""Order of preference among options of equal speed: first no cut, then no delay, then a delay that is the same on all
stages and can be corrected. Schedules of one's own come last."""
MUCH = 0.05
"""Relative difference in speed from which a sentence mentions it."""
BIG_BUBBLE = 0.03
"""Bubble from which a sentence explains its causes."""


@dataclass(frozen=True)
class Advice:
    sentences: tuple[str, ...]
    choice: Option | None
    """Recommended option. None means that nothing fits."""
    command: str | None
    """Command that runs the recommended option. None means that there is none."""


def advise(
    searches: Sequence[Search], options: Mapping[str, Option | str], asked: Config, default: Config, path: str | None
) -> Advice:
    """Returns the recommendation. searches: in the order from no memory savings to all of them. asked: the user's
    configuration. default: that of the file at the path, or of no file."""
    search = searches[0]
    found = {name: option for name, option in options.items() if isinstance(option, Option)}
    fitting = {name: option for name, option in found.items() if option.fits}
    runnable = [option for option in fitting.values() if option.is_runnable]
    if not runnable:
        return _nothing_fits(searches[-1], found)
    most = max(option.worth for option in runnable)
    whole = fitting.get(DATA_PARALLEL)
    if whole is not None and whole.worth * (1 + MUCH) >= most:
        choice = whole
    else:
        alike = [option for option in runnable if option.worth >= (1 - ALIKE) * most]
        places = {name: place for place, name in enumerate(PREFERENCE)}
        choice = min(alike, key=lambda option: places.get(option.schedule, len(places)))
    is_whole = choice.schedule == DATA_PARALLEL
    (own,) = [each for each in searches if each.config == choice.config]
    sentences = [
        *(_use_replicas(search, choice) if is_whole else _use_pipeline(own, choice, found, asked)),
        *_beside_fsdp(search, choice, fitting.get(FSDP)),
        *([] if is_whole else _beside_the_others(choice, fitting)),
    ]
    return Advice(tuple(sentences), choice, _command(choice, asked, default, path))


def _use_replicas(search: Search, whole: Option) -> list[str]:
    fits = f"the model fits on one device ({_gib(whole.memory[0].most)} of {_gib(search.cluster.memory)} GiB)"
    if search.cluster.num_devices == 1:
        return [f"There is nothing to cut: {fits}."]
    shared = whole.config.optimizer.sharded and not search.config.optimizer.sharded
    sharing = "They share the update; otherwise each updates the whole model (--optimizer.sharded)."
    return [
        f"Pipeline parallelism is the wrong tool here: {fits}. Use a replica on every device (pipeline.stages = 1): no "
        "bubble, no delay, no cut to balance.",
        *([sharing] if shared else []),
    ]


def _use_pipeline(search: Search, best: Option, found: Mapping[str, Option], asked: Config) -> list[str]:
    whole = found.get(DATA_PARALLEL)
    num_stages, num_replicas = best.division.num_stages, best.division.num_replicas
    replicas = f" in each of {num_replicas} replicas" if num_replicas > 1 else ""
    too_large = ""
    if whole is not None and not whole.fits:
        too_large = f"One device would need {_gib(whole.memory[0].most)} GiB. "
    late = max(best.prediction.delay)
    sentences = [
        f"{too_large}Use {best.schedule} on {num_stages} stages{replicas}: {best.tokens_per_second:,.0f} "
        f"tokens/s, a bubble of {best.bubble:.1%}, and at most {_gib(best.largest.most)} of "
        f"{_gib(search.cluster.memory)} GiB, on stage {best.memory.index(best.largest)}."
        + (f" Gradients are {late} update{'s' * (late > 1)} late." if late else "")
    ]
    if saved := savings.words(best.config, asked, num_replicas):
        sentences.append(f"With {', '.join(saved)}.")
    if best.bubble >= BIG_BUBBLE:
        sentences.append(say_causes(search, best, idle_causes(search, best)))
    if idle := search.cluster.num_devices - num_stages * num_replicas:
        sentences.append(f"{idle} of the {search.cluster.num_devices} devices stay idle.")
    return sentences


def _beside_fsdp(search: Search, choice: Option, fsdp: Option | None) -> list[str]:
    if search.cluster.num_devices == 1:
        return []
    if fsdp is None:
        return ["FSDP would not fit."]
    gain = fsdp.tokens_per_second / choice.worth - 1
    counted = ", the delay's price counted" if choice.token_price > 1 else ""
    makes = f"{fsdp.tokens_per_second:,.0f} tokens/s"
    if abs(gain) <= ALIKE:
        return [f"FSDP, which this trainer does not have, would be as fast ({makes}{counted}), with nothing to cut."]
    if gain < 0:
        return [f"FSDP would be {-gain:.0%} slower ({makes}{counted})."]
    tool = "" if choice.schedule == DATA_PARALLEL else "Pipeline parallelism is the wrong tool here: "
    return [
        f"{tool}FSDP, which this trainer does not have and torchtitan has, would be {gain:.0%} faster "
        f"({makes}{counted}), with no delay and nothing to cut."
    ]


def _beside_the_others(best: Option, fitting: Mapping[str, Option]) -> list[str]:
    sentences, optimizer, speed = [], best.config.optimizer, attrgetter("tokens_per_second")
    others = [fitting[name] for name in ("one_f_one_b", "gpipe") if name in fitting and name != best.schedule]
    if others and max(best.prediction.delay) > 0:
        gain = best.tokens_per_second / others[0].tokens_per_second - 1
        sentences.append(f"It is {gain:.1%} faster than {others[0].schedule}, which has no delay.")
    if more := best.token_price - 1:
        feedback = "with error feedback" if optimizer.error_feedback else "without error feedback"
        sentences.append(
            f"Its delay costs about {more:.0%} more tokens to the same loss with {optimizer.name} {feedback} "
            "(docs/results/delay.md; less in long runs of small steps), and that is counted here."
        )
    other = max((option for option in fitting.values() if option.is_runnable), key=speed)
    if other.tokens_per_second > (1 + MUCH) * best.tokens_per_second:
        sentences.append(
            f"{other.schedule} is {other.tokens_per_second / best.tokens_per_second - 1:.0%} faster, but its delay "
            f"costs {other.token_price - 1:.0%} more tokens to the same loss with {optimizer.name} "
            "(docs/results/delay.md; less in long runs of small steps)."
        )
    fastest = max((option for option in fitting.values() if option.schedule != FSDP), key=speed)
    if not fastest.is_runnable and (1 - ALIKE) * fastest.tokens_per_second > best.tokens_per_second:
        gain = fastest.tokens_per_second / best.tokens_per_second - 1
        sentences.append(f"{fastest.schedule} would be {gain:.1%} faster, but the trainer does not have it.")
    return sentences


def _nothing_fits(smallest: Search, found: Mapping[str, Option]) -> Advice:
    """Returns the advice if no option fits. smallest: the search that saves the most memory."""
    pipelines = [option for option in found.values() if option.schedule not in (DATA_PARALLEL, FSDP)]
    if not pipelines:
        reason = "no schedule can be played with this batch: give another with --batch-tokens"
        return Advice((f"Nothing can be planned: {reason}.",), None, None)
    least = min(pipelines, key=lambda option: option.largest.most)
    memory, marks = least.largest, savings.marks(least.config, least.division.num_replicas)
    sentences = [
        f"Nothing fits into {_gib(smallest.cluster.memory)} GiB: the least is {_gib(memory.most)} GiB, with "
        f"{least.schedule} on {least.division.num_stages} stages{f' and {marks}' if marks else ''} ({_parts(memory)}).",
    ]
    if (fsdp := found.get(FSDP)) is not None and fsdp.fits:
        sentences.append(f"FSDP, which this trainer does not have, would: {fsdp.tokens_per_second:,.0f} tokens/s.")
    if more := smallest.more_devices("two_bw") or smallest.more_devices("one_f_one_b"):
        sentences.append(
            f"It needs more devices: {more.schedule} on {more.division.num_stages} stages would take "
            f"{_gib(more.largest.most)} GiB of each."
        )
    else:
        sentences.append(
            "More devices alone do not help: the first stage of a pipeline holds a microbatch for every stage, in all "
            "the activations of one through the whole model. Use a smaller model.sequence_length, devices with more "
            "memory, or tensor parallelism, which the trainer does not have."
        )
    return Advice(tuple(sentences), None, None)


def _parts(memory: StageMemory) -> str:
    names = ("weights", "gradients", "optimizer", "activations", "messages")
    parts = [f"{_gib(getattr(memory, name))} {name}" for name in names]
    return ", ".join([*parts, f"{_gib(memory.work + memory.overlap)} work space"])


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f}" if num_bytes >= GIB else f"{num_bytes / GIB:.3f}"


def _command(option: Option, asked: Config, default: Config, path: str | None) -> str:
    """Returns the command `slipstream train` with the user's options and those of the plan."""
    division = option.division
    schedule = "one_f_one_b" if option.schedule == DATA_PARALLEL else option.schedule
    chosen: dict[str, Any] = {
        "pipeline.schedule": schedule.removesuffix(DOUBLE),
        "pipeline.depth": "double" if schedule.endswith(DOUBLE) else "minimum",
        "pipeline.stages": division.num_stages,
        "pipeline.replicas": division.num_replicas,
        "pipeline.microbatches": division.num_microbatches,
        "pipeline.layers_per_stage": division.layers_per_stage,
        "train.microbatch_size": division.microbatch_size,
        "train.device": option.config.train.device,
        "optimizer.sharded": option.config.optimizer.sharded and division.num_replicas > 1,
        "train.loss_chunk_tokens": option.config.train.loss_chunk_tokens,
        "train.recompute_every": option.config.train.recompute_every,
    }
    if traits_of(schedule).drifts:
        chosen["optimizer.error_feedback"] = 0.0
    words = ["slipstream", "train", *([path] if path else [])]
    for section, fields in vars(asked).items():
        defaults, hints = vars(getattr(default, section)), typing.get_type_hints(type(fields))
        for name, own in vars(fields).items():
            value = chosen.get(f"{section}.{name}", own)
            if value != defaults[name] and hints[name] is bool:
                words.append(f"--{section}.{'' if value else 'no-'}{name}".replace("_", "-"))
            elif value != defaults[name]:
                words += [f"--{section}.{name}".replace("_", "-"), *_words(value)]
    return shlex.join(words)


def _words(value: Any) -> list[str]:
    if isinstance(value, tuple):
        return [str(item) for item in value]
    if isinstance(value, dict):
        return [str(word) for pair in value.items() for word in pair]
    return [str(value)]
