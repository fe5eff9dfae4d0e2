"""Evaluates a trained model on tasks of lm-eval (EleutherAI's harness), or on task files of your own.

    results = evaluate(source, layers, ["hellaswag", "mine.yaml"], limit=100)

The model answers lm-eval's questions itself, without an export. Tokenisation, truncation and sums are as in lm-eval's
own class for transformers, so both give the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import UsageError
from .generate import Sampling, codec_of, generate
from .loading import Source

MAX_NEW_TOKENS = 256
"""Number of tokens to generate where a task does not say."""


def evaluate(source: Source, layers: nn.Sequential, tasks: Sequence[str], limit: int | None = None) -> dict[str, Any]:
    """Returns the results of every task, as lm-eval has them. tasks: names of lm-eval's tasks, or YAML files. limit:
    the most examples of a task; None means all."""
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise UsageError("slipstream eval needs lm-eval: pip install 'slipstream[eval]'") from None
    files = [Path(task) for task in tasks if task.endswith((".yaml", ".yml"))]
    for file in files:
        if not file.is_file():
            raise UsageError(f"tasks = {str(file)!r} does not exist: give the YAML file of a task, or a name")
    manager = TaskManager(include_path=sorted({str(file.parent.resolve()) for file in files}) or None)
    names = [_name_in(Path(task)) if Path(task) in files else task for task in tasks]
    if unknown := [name for name in names if name not in manager.all_tasks]:
        raise UsageError(f"tasks = {unknown[0]!r} is no task of lm-eval: lm_eval ls tasks lists them")
    model = _harness_model(source, layers)
    found = lm_eval.simple_evaluate(model=model, tasks=names, task_manager=manager, limit=limit, log_samples=False)
    return dict(found["results"])


def _name_in(file: Path) -> str:
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("task:"):
            return line.removeprefix("task:").strip().strip("\"'")
    raise UsageError(f"tasks = {str(file)!r} has no line 'task: NAME': give it one")


def _harness_model(source: Source, layers: nn.Sequential) -> Any:
    """Returns the model as lm-eval's class. It is defined here, because its base is in that library."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    codec, length = codec_of(source), source.model.sequence_length
    end = source.end_of_text_id

    class Model(TemplateLM):
        @property
        def eot_token_id(self) -> int:
            return 0 if end is None else end

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            return codec.encode(string)

        def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, **kwargs: Any) -> Any:
            return [_score(layers, context, continuation, length) for _, context, continuation in requests]

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            sums = []
            for request in requests:
                (string,) = request.args
                windows = get_rolling_token_windows(
                    token_list=codec.encode(string),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=length,
                    context_len=1,
                )
                pairs = map(make_disjoint_window, windows)
                sums.append(sum(_score(layers, before, after, length)[0] for before, after in pairs))
            return sums

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            return [self._generate(*request.args) for request in requests]

        def _generate(self, context: str, options: dict[str, Any]) -> str:
            until = options.get("until") or []
            stops = [until] if isinstance(until, str) else list(until)
            most = options.get("max_gen_toks", MAX_NEW_TOKENS)
            prompt = codec.encode(context)[-(length - most) :] or [self.eot_token_id]
            temperature = float(options.get("temperature", 0.0)) if options.get("do_sample") else 0.0
            said = ""
            for piece in codec.stream(generate(layers, prompt, Sampling(most, temperature, end=end), length)):
                said += piece
                if any(stop in said for stop in stops):
                    break
            for stop in stops:
                said = said.split(stop)[0]
            return said

    return Model()


@torch.no_grad()
def _score(
    layers: nn.Sequential, context: Sequence[int], continuation: Sequence[int], length: int
) -> tuple[float, bool]:
    """Returns the log-probability of the continuation, and whether it is what greedy decoding would give."""
    device = next(layers.parameters()).device
    tokens = [*context, *continuation][-(length + 1) :]
    logits = layers(torch.tensor([tokens[:-1]], device=device))[0, -len(continuation) :].float()
    targets = torch.tensor(continuation, device=device)[-len(logits) :]
    chosen = logits.log_softmax(-1).gather(1, targets.unsqueeze(1))
    return float(chosen.sum()), bool((logits.argmax(-1) == targets).all())
