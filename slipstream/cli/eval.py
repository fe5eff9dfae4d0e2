"""`slipstream eval`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from ..errors import UsageError
from .parse import cannot_write, parse, run_and_step


@dataclass(frozen=True)
class EvalArguments:
    """Evaluates a trained model on tasks of lm-eval, or on task files of your own (needs slipstream[eval]). The model
    is a run, or a folder of Hugging Face."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN[@STEP]|FOLDER")]
    """The folder of a run, or its name below runs/; or the folder of a model."""
    tasks: tuple[str, ...]
    """Names of lm-eval's tasks, or YAML files of your own."""
    limit: int | None = None
    """The most examples of a task; by default all."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute. auto: on a GPU if there is one."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype to compute in. None: bfloat16 on a GPU, float32 on a CPU."""
    output: Path | None = None
    """A .json file to write the results to."""


def main(arguments: list[str]) -> None:
    given = parse(EvalArguments, arguments, "slipstream eval")
    if not given.tasks:
        raise UsageError("tasks has no value: name at least one")
    if given.limit is not None and given.limit < 1:
        raise UsageError(f"limit = {given.limit} leaves no examples: use 1 or more")
    path, step = run_and_step(given.source)

    from ..observe.console import Screen
    from ..tools.evaluate import evaluate
    from ..tools.loading import find_source, load, place

    source = find_source(path, step, Screen().print)
    results = evaluate(source, load(source, *place(given.device, given.dtype)), given.tasks, given.limit)
    for task, numbers in results.items():
        for name, value in numbers.items():
            metric, _, kind = name.partition(",")
            if isinstance(value, (int, float)) and kind:
                print(f"{task}  {metric if kind == 'none' else f'{metric} ({kind})'}  {value:.6g}")
    if given.output is not None:
        try:
            given.output.parent.mkdir(parents=True, exist_ok=True)
            given.output.write_text(json.dumps(results, indent=2, default=str) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(cannot_write(error, "output")) from error
