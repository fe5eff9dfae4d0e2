"""`slipstream tune`."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from ..config.models import model_of
from ..config.rules import trains_all
from ..config.schema import Config
from ..config.toml import to_toml
from ..errors import UsageError
from ..model.spec import ModelSpec
from ..observe.console import Screen
from ..tools.plan.budget import TOKENS_PER_PARAMETER
from ..tools.study.workers import default_jobs, worker_pool
from ..tools.tune.advice import Size, batch_of, gap_remark, is_delayed, law_rows, level_0, with_batch, with_rate
from ..tools.tune.continued import check_reach, read_laws, tokens_before
from ..tools.tune.fit import POOR, Fit
from ..tools.tune.page import Tuning, advice_on_synchronous, page, summary
from ..tools.tune.predict import predict
from ..tools.tune.proxies import choose_proxies, planned_flops
from ..tools.tune.trials import NUM_TRIALS, Trials, plan_trials, run_trials
from ..tools.tune.trunks import Laboratory, Record, check_corpus, explore
from ..train.build import corpus_vocab_size
from ..transport.environment import under_torchrun
from .config_arguments import config_of, model_of_run, parse_with_config, write_to

FILES = ("tuned.toml", "tune.json", "tune.html")
FEW = 0.1
"""Share of the planned tokens below which weights to continue count as hardly trained."""


@dataclass(frozen=True)
class TuneArguments(Config):
    """Chooses learning rate, batch and number of steps for a model and a number of tokens, and writes a configuration
    that trains with them.

    Without --budget it takes published laws and runs nothing. With --budget it trains small models of the same family
    on the same text, with the same delay, and fits laws to them: they also predict the final loss and what the delay
    adds to it. With --model.initial it continues a trained model: it takes its loss, finds after how many tokens the
    law expects this loss, and counts these tokens as done. With --trials it also tries rates on these weights
    themselves. CONFIG.toml and --section.field are those of `slipstream train`.
    """

    tokens: float | None = None
    """Tokens to train on. By default 20 for every parameter that a token uses."""
    budget: str | None = None
    """Share of the target's FLOPs that small models may use, such as 2%."""
    reach: float = 64.0
    """How many times the parameters and the tokens of the largest small model the target may have."""
    laws: Path | None = None
    """A tune.json of an earlier tuning with --budget, whose laws are used again."""
    tokens_before: float | None = None
    """With --model.initial: tokens that its weights were trained on. Give it if they saw other text: their loss on this
    text then tells too little. By default the law says after how many tokens it expects their loss."""
    trials: str | None = None
    """With --model.initial: share of the tokens for short runs of its weights, such as 20%. They decide rate and batch,
    instead of laws of training from scratch."""
    jobs: int | None = None
    """Small models to train at the same time. By default one for each core, and one on a GPU."""
    output: Path | None = None
    """Folder to write to; by default runs/tune-NAME, with the preset as name. Small models that were trained before are
    found there and not trained again."""


def main(arguments: list[str]) -> None:
    given, _, _ = parse_with_config(TuneArguments, arguments, "tune")
    config = config_of(_with_enough_microbatches(given))
    budget, trials = _check(given)
    jobs = given.jobs or default_jobs(config.train.device == "cuda")
    if jobs > 1 and (budget or trials) is not None:
        torch.set_num_threads(1)  # fork is safe if there was never a second thread
    if not trains_all(config):
        raise UsageError("adapter.rank and train.freeze are unknown to slipstream tune: its laws are of whole models")
    name = Path(config.model.initial or config.model.hf or config.model.preset).name
    if config.model.name != "decoder":
        name = config.model.name.rpartition(".")[2]
    folder = given.output or Path(config.run.folder) / f"tune-{name}"
    _check_output(folder)
    needs_corpus = budget is not None or bool(config.model.initial)
    model = model_of(config, corpus_vocab_size(config)) if needs_corpus else model_of_run(config)
    size = Size.of(model)
    tokens = given.tokens or float(TOKENS_PER_PARAMETER * model.num_active_parameters())
    laws = law_rows(config, size, tokens)  # raises now if the optimizer has none
    screen = Screen()
    screen.print(
        f"{name}: {size.parameters:,.0f} parameters without embedding and head that a token uses, {tokens:.3g} tokens, "
        f"{size.flops_per_token * tokens:.3g} FLOPs, {config.optimizer.name}, {config.pipeline.schedule}"
    )
    fit: Fit | None = None
    records: list[Record] = []
    if budget is not None:
        fit, records = _fit(config, model, size, tokens, budget, given.reach, folder, jobs, screen)
    elif given.laws is not None:
        fit, records = read_laws(given.laws, config)
        check_reach(records, size, tokens, given.reach)
    elif config.model.initial and trials is None:
        raise UsageError(
            f"model.initial = {config.model.initial!r} needs laws of its text: give --budget 2%, or --laws with the "
            "tune.json of an earlier tuning, or try its weights with --trials 20%"
        )
    if fit is None:
        prediction = None
        chosen, said = level_0(config, model, size, tokens)
    else:
        before = given.tokens_before or 0.0
        if config.model.initial and not before:
            before = tokens_before(fit, config, model, tokens, screen.print)
        prediction, chosen = predict(fit, config, model, tokens, before)
        said = [*_fit_remarks(fit), *_continued_remarks(config, before, tokens)]
    length, tried = model.sequence_length, None
    if trials is not None:
        tried = _try(chosen, model, tokens, trials, folder / "trials", jobs, screen)
        chosen = with_batch(chosen, length, tried.batch)
        rate = tried.rate * math.sqrt(batch_of(chosen, length) / tried.batch)
        chosen = with_rate(chosen, size, length, rate, tokens)
        prediction, said = None, [*_trial_remarks(tried, size, tokens), *_mismatch(config)]
        said += [gap_remark(chosen)] if is_delayed(chosen) else []
    batch = batch_of(chosen, length)
    tuning = Tuning(name, chosen, batch, size, tokens, laws, said, prediction, fit, records, budget or 0.0, tried)
    _print(screen, tuning)
    _write(tuning, folder, screen)


def _with_enough_microbatches(given: TuneArguments) -> TuneArguments:
    """Returns the arguments with as many microbatches as the schedule needs: a tuning chooses their number itself."""
    section = given.pipeline
    least = 2 * section.stages if section.depth == "double" else section.stages
    return replace(given, pipeline=replace(section, microbatches=max(section.microbatches, least)))


def _check(given: TuneArguments) -> tuple[float | None, float | None]:
    """Returns the shares for small models and for trials. None means that there are none."""
    if under_torchrun():
        raise UsageError("slipstream tune is one process: start it without torchrun, or unset RANK")
    if given.tokens is not None and not 0 < given.tokens < math.inf:
        raise UsageError(f"tokens = {given.tokens} is invalid: use a number above 0")
    if (before := given.tokens_before) is not None and not (given.model.initial and 0 < before < math.inf):
        raise UsageError(f"tokens_before = {before} needs --model.initial and a number above 0: leave it out")
    if given.jobs is not None and given.jobs < 1:
        raise UsageError(f"jobs = {given.jobs} is too small: use 1 or more")
    if not 1 <= given.reach < math.inf:
        raise UsageError(f"reach = {given.reach} is invalid: use 1 or more")
    if given.budget is not None and given.laws is not None:
        raise UsageError("budget and laws are two ways to get laws: leave out one of them")
    if given.trials is not None and not given.model.initial:
        raise UsageError(f"trials = {given.trials!r} needs the weights to try: give --model.initial")
    return _share("budget", given.budget), _share("trials", given.trials)


def _share(name: str, given: str | None) -> float | None:
    if given is None:
        return None
    text, is_percent = given.removesuffix("%"), given.endswith("%")
    try:
        share = float(text) / (100 if is_percent else 1)
    except ValueError:
        share = math.nan
    if not 0 < share <= (10 if is_percent else 1):
        raise UsageError(f"{name} = {given!r} is no share: write a percentage, such as 2%")
    return share


def _fit(
    config: Config,
    model: ModelSpec,
    size: Size,
    tokens: float,
    budget: float,
    reach: float,
    folder: Path,
    jobs: int,
    screen: Screen,
) -> tuple[Fit, list[Record]]:
    proxies = choose_proxies(config, model, tokens, budget, reach)
    check_corpus(proxies)
    flops, planned = size.flops_per_token * tokens, planned_flops(proxies)
    trunks = folder / "trunks"
    _make(trunks)
    names = ", ".join(f"{proxy.name} on {proxy.tokens:.3g} tokens" for proxy in proxies)
    screen.print(
        f"proxies: {names}; {planned:.3g} FLOPs, {planned / flops:.2%} of the target's, and more rates as the budget "
        f"allows; finished ones are kept in {trunks}"
    )
    with _laboratory("proxies", trunks, planned, budget * flops, jobs, config, screen) as laboratory:
        fit = explore(proxies, laboratory)
    return fit, list(laboratory.records.values())


def _try(
    config: Config, model: ModelSpec, tokens: float, share: float, folder: Path, jobs: int, screen: Screen
) -> Trials:
    trial = plan_trials(config, model, tokens, share)
    allowed, (steps,) = NUM_TRIALS * trial.flops(trial.batch), trial.horizons(trial.batch)
    _make(folder)
    screen.print(f"trials: {steps:,} steps of the laws' batch each; finished ones are kept in {folder}")
    with _laboratory("trials", folder, allowed, allowed, jobs, config, screen) as laboratory:
        return run_trials(trial, config, laboratory)


@contextmanager
def _laboratory(
    what: str, folder: Path, planned: float, budget: float, jobs: int, config: Config, screen: Screen
) -> Iterator[Laboratory]:
    """Yields a laboratory, and shows how much of the planned FLOPs is done. A single job runs in this process."""
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with (
        Progress(*columns, console=screen, disable=not screen.is_terminal) as progress,
        worker_pool(jobs, config.train.device == "cuda") if jobs > 1 else nullcontext() as workers,
    ):
        advance = partial(progress.advance, progress.add_task(what, total=planned))
        yield Laboratory(folder, budget, advance, screen.print, workers)


def _fit_remarks(fit: Fit) -> list[str]:
    found = []
    if fit.backtest is not None:
        found.append(
            f"A law of the smaller proxies alone misses the losses of the largest one by {fit.backtest.error:.1%}. The "
            "band of the loss allows for as much in every such step to the target."
        )
    if fit.noise >= POOR:
        found.append(
            f"Warning: the law misses the losses of the proxies by {fit.noise:.1%}: they are too small or too short "
            "for one. Take rate and batch as hints, because their bands are wide. More --tokens or a larger --budget "
            "helps."
        )
    return found


def _continued_remarks(config: Config, before: float, tokens: float) -> list[str]:
    if not before:
        return []
    found = [
        f"The weights of {config.model.initial} count as {before:.3g} tokens from scratch: rate and batch are those of "
        f"{before + tokens:.3g} tokens (arXiv:2606.05610)."
    ]
    if before < FEW * tokens:
        found.append(
            "This is little for trained weights: they saw other text, and a lower rate than this one may be better. If "
            "you know how many tokens they were trained on, give --tokens-before; --trials 20% tries them."
        )
    return [*found, *_mismatch(config)]


def _mismatch(config: Config) -> list[str]:
    if config.optimizer.name != "muon":
        return []
    return [
        "If AdamW trained these weights, Muon may forget more of them than AdamW does (arXiv:2605.10468): compare with "
        "optimizer.name = 'adamw'."
    ]


def _trial_remarks(tried: Trials, size: Size, tokens: float) -> list[str]:
    spent = sum(record.flops for record in tried.records) / (size.flops_per_token * tokens)
    found = [
        f"Rate and batch are those of {len(tried.records)} trials, which cost {spent:.2%} of the run. The loss is not "
        "predicted: laws of training from scratch do not hold for weights that saw other text."
    ]
    if tried.is_edge:
        found.append("Warning: the best trial had the lowest or the highest rate. Larger --trials pay for more.")
    return found


def _print(screen: Screen, tuning: Tuning) -> None:
    screen.print("")
    for what, value, detail in summary(tuning):
        screen.print(f"  {what:<20}{value:<17} {detail}")
    screen.print("\npublished laws")
    for row in tuning.laws:
        rate = "no rate" if row["rate"] is None else f"rate of AdamW {row['rate']:.3g} (here {row['converted']:.3g})"
        said = f"{rate}, batch {row['batch']:,.0f} tokens; fitted on {row['fitted_on']}"
        screen.print(f"  {row['name']}, {row['source']}: {said}")
    screen.print("")
    for remark in tuning.remarks:
        screen.print(remark)
    if tuning.prediction:
        for what, added in tuning.prediction.wrong.items():
            screen.print(f"  {what}: loss {added:+.4f}")
        screen.print(advice_on_synchronous(tuning))
    if tuning.budget:
        screen.print(
            f"cost: {len(tuning.records)} trunks, {tuning.spent:.3g} FLOPs, {tuning.spent / tuning.flops:.2%} of the "
            "target's"
        )


def _write(tuning: Tuning, folder: Path, screen: Screen) -> None:
    head = f"# slipstream train {folder / 'tuned.toml'}\n# made by slipstream tune, {time.strftime('%Y-%m-%d')}\n"
    texts = f"{head}\n{to_toml(tuning.config)}", json.dumps(tuning.tree(), indent=1) + "\n", page(tuning)

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in zip(FILES, texts, strict=True):
            (folder / name).write_text(text, encoding="utf-8")

    write_to("output", folder, write)
    screen.print(f"\n{folder}: {', '.join(FILES)}\n\n  slipstream train {folder / 'tuned.toml'}")


def _check_output(folder: Path) -> None:
    """Raises a UsageError now if the folder or its files could not be written at the end."""

    def probe() -> None:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        tempfile.TemporaryFile(dir=there).close()
        for name in FILES:
            if (folder / name).exists():
                (folder / name).open("ab").close()

    write_to("output", folder, probe)


def _make(folder: Path) -> None:
    write_to("output", folder, lambda: folder.mkdir(parents=True, exist_ok=True))
