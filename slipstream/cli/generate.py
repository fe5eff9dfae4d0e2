"""`slipstream generate`."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import tyro

from ..config.rules import is_unicode
from ..errors import UsageError
from .parse import parse, run_and_step


@dataclass(frozen=True)
class GenerateArguments:
    """Writes text with a trained model: a run, or a folder of Hugging Face with a Llama, Mistral, Qwen2, Qwen3 or
    Glm4Moe model."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN[@STEP]|FOLDER")]
    """The folder of a run, or its name below runs/; or the folder of a model."""
    prompt: Annotated[str, tyro.conf.arg(help_behavior_hint=r"(default: '\n')")] = "\n"
    """The beginning of the text."""
    max_tokens: int = 128
    """The most tokens to add. Text also ends with the model's end-of-text token, and where its positions end."""
    temperature: float = 1.0
    """Divides the logits. 0: the most likely token is always taken."""
    top_k: int = 0
    """Draw only from so many of the most likely tokens. 0: from all."""
    top_p: float = 1.0
    """Draw only from the most likely tokens that together have this probability."""
    seed: int = 0
    """Seed of the draws."""
    samples: int = 1
    """How many texts to write, each with its own seed."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute. auto: on a GPU if there is one."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype to compute in. None: bfloat16 on a GPU, float32 on a CPU."""
    cache: bool = True
    """Keep keys and values of earlier positions. Without them the text is the same, and slower."""


def main(arguments: list[str]) -> None:
    given = parse(GenerateArguments, arguments, "slipstream generate")
    if given.samples < 1:
        raise UsageError(f"samples = {given.samples} writes nothing: use 1 or more")
    if not is_unicode(given.prompt):
        raise UsageError(f"prompt = {given.prompt!r} is not Unicode: write it in UTF-8")
    path, step = run_and_step(given.source)

    from ..observe.console import Screen
    from ..tools.generate import Sampling, codec_of, generate
    from ..tools.loading import find_source, load, place

    sampling = Sampling(given.max_tokens, given.temperature, given.top_k, given.top_p, given.seed)
    source = find_source(path, step, Screen().print)
    codec = codec_of(source)
    prompt = codec.encode(given.prompt)
    length = source.model.sequence_length
    if not prompt:
        raise UsageError("prompt = '' has no tokens: give at least one letter")
    if len(prompt) >= length:
        raise UsageError(f"prompt has {len(prompt)} tokens, and the model {length} positions: shorten it")
    if len(prompt) + given.max_tokens > length:
        print(
            f"max_tokens = {given.max_tokens}: the text ends after at most {length - len(prompt)} tokens, because the "
            f"model has {length} positions and the prompt takes {len(prompt)}",
            file=sys.stderr,
        )
    layers = load(source, *place(given.device, given.dtype))
    for sample in range(given.samples):
        drawn = replace(sampling, seed=given.seed + sample, end=source.end_of_text_id)
        print(given.prompt, end="", flush=True)
        for piece in codec.stream(generate(layers, prompt, drawn, length, given.cache)):
            print(piece, end="", flush=True)
        print("\n" if given.samples > 1 else "")
