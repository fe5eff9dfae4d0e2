"""`slipstream export`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from .parse import parse, run_and_step


@dataclass(frozen=True)
class ExportArguments:
    """Writes a checkpoint of a run as a folder that transformers, vLLM and lm-eval load: config.json, safetensors,
    tokenizer. A dense model is a Llama there, a mixture of experts a Glm4Moe."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN[@STEP]")]
    """The folder of a run, such as runs/default, or its name below runs/. By default its newest checkpoint is exported;
    runs/default@200 is that of step 200."""
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """The folder to write."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the weights."""
    adapter: bool = False
    """Of a run with adapters: write only these, as peft loads them. By default they are merged into the weights."""
    overwrite: bool = False
    """Replace the folder, if it holds a model (or adapters) already."""


def main(arguments: list[str]) -> None:
    from rich.progress import Progress

    from ..observe.console import Screen
    from ..tools.export import export, export_adapter
    from ..tools.loading import find_source

    given = parse(ExportArguments, arguments, "slipstream export")
    screen = Screen()
    source = find_source(*run_and_step(given.run), screen.print)
    if given.adapter:
        export_adapter(source, given.folder, given.dtype, given.overwrite)
        print(f"{given.folder}: the adapters of {source.where} in {given.dtype}, of {source.model.weight_folder}")
        return
    with Progress(console=screen, transient=True, disable=not screen.is_terminal) as progress:
        task = progress.add_task("writing the weights", total=None)
        num_parameters = export(
            source,
            given.folder,
            given.dtype,
            given.overwrite,
            lambda now, total: progress.update(task, completed=now, total=total),
        )
    note = "" if source.tokenizer_json else "; the run does not know its tokenizer, so there is none"
    print(f"{given.folder}: {num_parameters:,} parameters of {source.where} in {given.dtype}{note}")
