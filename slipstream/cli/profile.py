"""`slipstream profile`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ..config.defaults import settled
from ..config.rules import trains_all
from ..config.schema import Config
from ..errors import UsageError
from ..observe.console import Screen
from ..tools.plan.profile import measure_in_slices, measure_profile
from ..tools.plan.show import profile_table
from ..train.layer_profile import layer_kinds, write_profile
from ..transport.environment import under_torchrun
from .config_arguments import (
    check_folder,
    config_of,
    model_of_run,
    parse_with_config,
    progress_bar,
    wide_console,
    write_to,
)


@dataclass(frozen=True)
class ProfileArguments(Config):
    """Measures the cost of every layer of a model on this device, for `slipstream plan --profile`.

    CONFIG.toml and --section.field are those of `slipstream train`. Only --train.device, --train.microbatch-size, the
    model, the vocabulary of the corpus and the optimizer matter.
    """

    output: Path = Path("profile.json")
    """The file to write."""
    share: int | None = None
    """On CUDA: measure in a slice with this percentage of the multiprocessors of one GPU, while pipeline.stages - 1
    others compute."""


def main(arguments: list[str]) -> None:
    given, _, _ = parse_with_config(ProfileArguments, arguments, "profile")
    config = settled(config_of(given), "cuda" if torch.cuda.is_available() else "cpu")
    model = model_of_run(config)
    if not trains_all(config):
        raise UsageError("adapter.rank and train.freeze are unknown to slipstream profile: plan without a profile")
    if config.train.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("train.device = 'cuda' finds no CUDA device here: use train.device = 'cpu'")
    if under_torchrun():
        raise UsageError("slipstream profile is one process: start it without torchrun, or unset RANK")
    check_folder("output", given.output)
    if given.share is not None:
        _check_share(given.share, config)
    with progress_bar() as progress:
        kinds = list(dict.fromkeys(layer_kinds(model)))
        task = progress.add_task("profiling", total=len(kinds))

        def tell(kind: str) -> None:
            progress.update(task, description=f"timing the {kind}", completed=kinds.index(kind))

        measured = (
            measure_profile(config, model, tell)
            if given.share is None
            else measure_in_slices(config, model, given.share)
        )
    write_to("output", given.output, lambda: write_profile(measured, given.output))
    wide_console().print(profile_table(measured))
    Screen().print(
        f"{measured.device}, torch {measured.torch}, {config.optimizer.name}, microbatches of "
        f"{measured.microbatch_size} x {model.sequence_length} tokens, {measured.message / 2**20:.2f} MiB a message\n"
        f"{given.output}: for slipstream plan --profile {given.output}"
    )


def _check_share(share: int, config: Config) -> None:
    num_slices = config.pipeline.stages
    if config.train.device != "cuda":
        raise UsageError(f"share = {share} is of a GPU: add --train.device cuda, or leave share out")
    if not 1 <= share <= 100 // num_slices:
        raise UsageError(
            f"share = {share} is not possible for pipeline.stages = {num_slices} slices of one GPU: use 1 to "
            f"{100 // num_slices}"
        )
