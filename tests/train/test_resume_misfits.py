"""A run goes on from its newest checkpoint, whatever the optimizer; one that does not fit is refused."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from settings import changed

from slipstream.config.schema import Config
from slipstream.errors import ConfigError
from slipstream.optim import RECIPES
from slipstream.train.run_folder import run_folder
from slipstream.train.trainer import train


@pytest.fixture
def saved(tiny: Config) -> Config:
    """Two steps are made and saved; what is returned makes a third."""
    config = changed(tiny, train__steps=2, evaluation__batches=0)
    train(config)
    return changed(config, train__steps=3, checkpoint__resume=True)


def newest(config: Config) -> Path:
    return max((run_folder(config) / "checkpoints").iterdir())


def seal(folder: Path, part: str, record: dict[str, Any]) -> None:
    """All digests are right again, as if the program had written it."""

    def stamp(path: Path) -> dict[str, Any]:
        return {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}

    tensors = stamp(folder / f"{part}.safetensors")
    (folder / f"{part}.json").write_text(json.dumps(record | {"tensors": tensors}))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["parts"][part] = {"record": stamp(folder / f"{part}.json"), "tensors": tensors}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def of_the_head(record: dict[str, Any]) -> dict[str, Any]:
    return record["facts"]["state"]["optimizer"]["head.output.weight"]


MISFITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no state": (lambda r: r["facts"].pop("state"), "was not written by slipstream train: set run.name"),
    "key lost": (lambda r: of_the_head(r).pop("mean"), "head.output.weight has no 'mean', which the configured"),
    "number for tensor": (lambda r: of_the_head(r).update(mean=1), "has a 'mean' of another kind than the configured"),
    "other tensor": (
        lambda r: of_the_head(r).update(mean={"tensor": "master/head.norm.weight"}),
        "has a 'mean' of shape (16,), where the parameter has (256, 16)",
    ),
}


@pytest.mark.parametrize("how", MISFITS)
def test_a_checkpoint_with_other_content_is_refused_before_anything_starts(how, saved, monkeypatch):
    monkeypatch.setattr(
        "slipstream.train.trainer.launch_world", lambda *args, **kwargs: pytest.fail("a stage was started")
    )
    change, sentence = MISFITS[how]
    folder = newest(saved)
    record = json.loads((folder / "stage-1.json").read_text())
    change(record)
    seal(folder, "stage-1", record)
    with pytest.raises(ConfigError, match="the checkpoint of step 2") as refused:
        train(saved)
    assert sentence in str(refused.value)


def test_another_optimizer_than_the_checkpoint_was_made_with_is_refused(saved):
    with pytest.raises(ConfigError, match="which the configured optimizer keeps"):
        train(changed(saved, optimizer__name="adamw"))


@pytest.mark.parametrize("name", ["adamw", "torch.optim.Adam", *RECIPES])
def test_every_optimizer_goes_on_from_its_own_state(name, tiny):
    config = changed(tiny, train__steps=2, evaluation__batches=0, optimizer__name=name)
    train(config)
    train(changed(config, train__steps=3, checkpoint__resume=True))
    assert json.loads((run_folder(config) / "summary.json").read_text())["resumed_at"] == 2


@pytest.mark.parametrize("fields", [
    {"train__compute_dtype": "bfloat16"},
    {"pipeline__schedule": "pipedream"},
    {"pipeline__schedule": "one_f_one_b"},
    {"pipeline__replicas": 2, "optimizer__sharded": True},
    {"model__tied_embeddings": True},
])  # fmt: skip
def test_every_kind_of_run_goes_on_from_its_own_state(fields, tiny):
    config = changed(tiny, train__steps=4, evaluation__batches=0, **fields)
    train(config)
    train(changed(config, train__steps=5, checkpoint__resume=True))
    assert json.loads((run_folder(config) / "summary.json").read_text())["resumed_at"] == 4


def test_metrics_that_were_tampered_with_do_not_stop_a_run(saved):
    path = run_folder(saved) / "metrics.jsonl"
    lines = path.read_bytes() + b'{"step": 1, "loss": "x", "tokens": 1}\n{"step": 1}\n\xff\n[3]\n' + b"[" * 5000 + b"\n"
    path.write_bytes(lines)
    train(saved)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]
