"""`slipstream train`."""

from __future__ import annotations

import traceback
from pathlib import Path

from ..config.schema import Config
from ..config.toml import load_toml
from ..errors import NonFiniteError, PipelineError, RunFailure, StageFailure
from .parse import parse

TRAIN_HELP = """Trains a language model across pipeline stages and writes metrics, summary and trace to runs/NAME.
CONFIG.toml has the sections and fields below, steps = 200 under [train] for --train.steps 200;
an option wins over the file. `slipstream init PRESET` writes one to begin with.

The ten that matter most:
  --model.preset 135m         0.7M to 70B: tiny, small (25M), 135m, 360m, 1b, 3b,
                              8b, 10b, 70b; with experts moe-2b, moe-10b
  --data.sources FILE ...     text, JSON lines, or shards of slipstream prepare
  --data.tokenizer FILE       a tokenizer.json; bytes if left out
  --train.steps 5000          updates to make
  --train.microbatch-size 4   sequences in a microbatch: as memory allows
  --pipeline.stages 4         processes, each with a part of the layers
  --pipeline.microbatches 8   in a step: at least as many as stages
  --optimizer.learning-rate X peak rate; by default that of the optimizer
  --run.name first            leaves everything in runs/first
  --checkpoint.resume         resumes the run of that name

All of them:"""


def main(arguments: list[str]) -> None:
    default = Config()
    if arguments and not arguments[0].startswith("-"):
        default = load_toml(Path(arguments.pop(0)))
    config = parse(Config, arguments, "slipstream train [CONFIG.toml]", TRAIN_HELP, default)
    from ..train.run_folder import run_folder
    from ..train.trainer import train  # here because it imports torch, and --help should not wait for that

    try:
        train(config)
    except StageFailure as failure:
        details = failure.details
        if not details and failure.__cause__ is not None and not isinstance(failure.__cause__, PipelineError):
            details = "".join(traceback.format_exception(failure.__cause__))
        raise RunFailure(f"{failure}{_keep(details, run_folder(config))}") from failure
    except (PipelineError, NonFiniteError) as error:
        raise RunFailure(str(error)) from error


def _keep(details: str, folder: Path) -> str:
    """Writes a traceback to failure.txt in the folder of the run. Returns the part of the error message that names the
    file."""
    if not details or not folder.is_dir():
        return ""
    from ..checkpoint.files import reason, write_file  # here because it imports torch

    path = folder / "failure.txt"
    try:
        write_file(path, [details.encode()])
    except OSError as error:  # a full disk may be the reason of the failure
        return f" (no traceback in {path}: {reason(error)})"
    return f" (traceback in {path})"
