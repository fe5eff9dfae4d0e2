"""Tasks of lm-eval: the same numbers as with the exported folder; and one sentence for what is no task."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from runs import folder_of
from settings import changed

from slipstream.config.schema import Config
from slipstream.errors import UsageError
from slipstream.tools.evaluate import _score, evaluate
from slipstream.tools.export import export
from slipstream.tools.loading import Source, find_source, load
from slipstream.train.trainer import train

CHOICE = """
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {data}}}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["yes", "no"]
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""
ROLLING = """
task: words
dataset_path: json
dataset_kwargs: {{data_files: {data}}}
test_split: train
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""


@pytest.fixture
def source(tiny: Config) -> Source:
    config = changed(tiny, train__steps=3, evaluation__batches=0)
    train(config)
    return find_source(folder_of(config), None, print)


@pytest.fixture
def tasks(tmp_path: Path) -> list[str]:
    rows = [{"question": f"Is {i} plus {i} {2 * i}? ", "answer": "yes" if i % 3 else "no"} for i in range(8)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("sums", CHOICE), ("words", ROLLING)):
        (tmp_path / f"{name}.yaml").write_text(text.format(data=data))
    return [str(tmp_path / f"{name}.yaml") for name in ("sums", "words")]


def test_a_score_is_the_sum_of_log_probabilities(source):
    layers = load(source, torch.device("cpu"), torch.float64)
    context, continuation = [1, 2, 3], [4, 5]
    with torch.no_grad():
        table = layers(torch.tensor([[1, 2, 3, 4]]))[0].float().log_softmax(-1)
    expected = float(table[2, 4] + table[3, 5])
    found, is_greedy = _score(layers, context, continuation, 16)
    assert found == pytest.approx(expected) and not is_greedy
    best = int(table[3].argmax())
    assert _score(layers, [1, 2, 3, 4], [best], 16)[1]
    longer = [7] * 40  # as much of it counts as there are positions
    assert _score(layers, longer, continuation, 16) == _score(layers, longer[:15], continuation, 16)


def test_the_numbers_are_those_of_the_exported_folder(source, tasks, tmp_path, monkeypatch):
    lm_eval = pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    ours = evaluate(source, load(source, torch.device("cpu"), torch.float32), tasks)
    export(source, tmp_path / "out", "float32")
    theirs = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(tmp_path / "out"), "dtype": "float32"},
        tasks=["sums", "words"],
        task_manager=lm_eval.tasks.TaskManager(include_path=str(tmp_path)),
        device="cpu",
        batch_size=1,
    )["results"]
    assert ours["sums"]["acc,none"] == theirs["sums"]["acc,none"]
    assert ours["words"]["bits_per_byte,none"] == pytest.approx(theirs["words"]["bits_per_byte,none"], rel=1e-6)


def test_what_is_no_task_is_one_sentence(source, tmp_path):
    layers = load(source, torch.device("cpu"), torch.float32)
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        with pytest.raises(UsageError, match="slipstream eval needs lm-eval: pip install"):
            evaluate(source, layers, ["hellaswag"])
        return
    (tmp_path / "nameless.yaml").write_text("dataset_path: json\n")
    for task, sentence in (
        ("no-such-task", "is no task of lm-eval"),
        (str(tmp_path / "missing.yaml"), "does not exist"),
        (str(tmp_path / "nameless.yaml"), "has no line 'task: NAME'"),
    ):
        with pytest.raises(UsageError) as refused:
            evaluate(source, layers, [task])
        assert sentence in str(refused.value)
