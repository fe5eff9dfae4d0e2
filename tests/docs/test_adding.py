"""The pages that show how to add something, followed to the letter."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

import slipstream
from slipstream.cli import plan, run
from slipstream.config.models import model_of
from slipstream.config.schema import Config, ModelSection
from slipstream.schedule import TRAITS, Action, Traits, generators

PAGES = Path(__file__).parents[2] / "docs" / "development"
SMALL = [
    "--train.device",
    "cpu",
    "--train.microbatch-size",
    "2",
    "--pipeline.transport",
    "thread",
    "--evaluation.batches",
    "2",
]


def code_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (PAGES / page).read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the reader works: it is on the path of modules."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("mymodels", "mydata", "mysinks"):
        sys.modules.pop(name, None)


def summary(name: str) -> dict:
    return json.loads(Path("runs", name, "summary.json").read_text())


def test_a_model_of_the_readers_own_is_trained_resumed_planned_and_studied(folder, text_file, capsys, monkeypatch):
    monkeypatch.setattr(
        plan, "SCHEDULES", ("one_f_one_b", "two_bw")
    )  # the others take longer, and are tested elsewhere
    (folder / "mymodels.py").write_text(code_of("add_model.md")[0])
    model = ["--model.name", "mymodels.ShiftModel", "--model.dim", "16", "--model.arguments", "hidden_dim", "24"]
    base = [*model, *SMALL, "--data.sources", str(text_file)]
    assert run(["train", *base, "--train.steps", "8", "--run.name", "two"]) == 0
    assert run(["train", *base, "--train.steps", "8", "--run.name", "four", "--pipeline.stages", "4"]) == 0
    assert summary("two")["parameter_checksum"] == summary("four")["parameter_checksum"]
    assert summary("two")["parameters"] == 2 * 256 * 16 + 4 * (16 + 3 * 16 * 24)
    assert run(["train", *base, "--train.steps", "12", "--run.name", "two", "--checkpoint.resume"]) == 0
    assert summary("two")["resumed_at"] == 8 and summary("two")["steps"] == 12
    assert run(["plan", *model, "--devices", "2", "--device-kind", "cpu", "--batch-tokens", "512"]) == 0
    assert "mymodels.ShiftModel: " in capsys.readouterr().out
    lines = ['name = "own"', "[config.model]", 'name = "mymodels.ShiftModel"', "dim = 16", "[config.data]"]
    lines += [f'sources = ["{text_file}"]', "[config.train]", "steps = 6", "microbatch_size = 2"]
    lines += ["[[grid]]", 'mode = ["sync", "ef"]', 'optimizer.name = "muon"', "train.seed = 0"]
    Path("own.toml").write_text("\n".join(lines))
    assert run(["study", "own.toml", "--jobs", "1"]) == 0


def test_a_plan_and_a_profile_take_the_vocabulary_of_the_corpus_as_a_run_does(folder, text_file, capsys, monkeypatch):
    monkeypatch.setattr(plan, "SCHEDULES", ("one_f_one_b",))
    text = code_of("add_model.md")[0].replace("vocab_size: int = 256", "vocab_size: int = 1000")
    (folder / "mymodels.py").write_text(text)
    model, data = ["--model.name", "mymodels.ShiftModel"], ["--data.sources", str(text_file)]
    assert run(["profile", *model, *data, "--train.device", "cpu", "--train.microbatch-size", "1"]) == 0
    assert '"vocab_size": 256' in Path("profile.json").read_text()
    planning = ["plan", *model, "--devices", "2", "--device-kind", "cpu", "--batch-tokens", "512"]
    vocabularies = {256: data, 1000: [], 300: ["--data.sources", "elsewhere.bin", "--model.vocab-size", "300"]}
    for vocab_size, given in vocabularies.items():
        capsys.readouterr()
        assert run([*planning, *given]) == 0
        assert f"ShiftModel: {2 * 32 * vocab_size + 4 * (32 + 3 * 32 * 64):,} parameters" in capsys.readouterr().out
    assert run([*planning, "--data.sources", "elsewhere.bin"]) == 2
    assert "data.sources names 'elsewhere.bin', which does not exist" in capsys.readouterr().err


TIED = """
@dataclass(frozen=True)
class TiedModel(ShiftModel):
    def layers_and_loss(self, loss_chunk_tokens=0):
        model, loss = super().layers_and_loss(loss_chunk_tokens)
        first, *_, last = model.children()
        last.weight = first.weight
        return model, loss


@dataclass(frozen=True)
class Optional(ShiftModel):
    rank: int | None = None
    share: int | float | None = None


class Renamed(ShiftModel):
    def layers_and_loss(self, *arguments):
        model, loss = super().layers_and_loss(*arguments)
        return nn.Sequential(*model.children()), loss
"""


def test_an_optional_int_of_a_model_of_the_readers_own_is_an_int(folder):
    (folder / "mymodels.py").write_text(code_of("add_model.md")[0] + TIED)
    given = {"rank": 96.0, "share": 2.0, "hidden_dim": 24.0}
    model = model_of(Config(model=ModelSection(name="mymodels.Optional", arguments=given)), 0)
    assert [type(value) for value in (model.rank, model.share, model.hidden_dim)] == [int, float, int]


WRONG_CORPORA = """
from dataclasses import replace

def high(config):
    return replace(load_sums(config), vocab_size=50)

def flat(config):
    corpus = load_sums(config)
    return replace(corpus, train=Tokens((corpus.train.parts[0].astype(float),)))

def none(config):
    return replace(load_sums(config), vocab_size=None)
"""


def test_a_model_of_the_readers_own_with_tied_weights_is_the_same_on_one_stage_and_on_two(folder, text_file):
    (folder / "mymodels.py").write_text(code_of("add_model.md")[0] + TIED)
    model = ["--model.name", "mymodels.TiedModel", "--model.dim", "16", "--data.sources", str(text_file)]
    losses = []
    for stages in ("1", "2"):
        own = ["--pipeline.stages", stages, "--run.name", stages, "--train.steps", "6"]
        assert run(["train", *model, *SMALL, *own]) == 0
        rows = map(json.loads, Path("runs", stages, "metrics.jsonl").read_text().splitlines())
        losses.append([row["loss"] for row in rows if "loss" in row])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--model.name mymodels.Missing", "model.name = 'mymodels.Missing' cannot be imported"),
        ("--model.name nothing", "model.name = 'nothing' is unknown: use decoder or the import path"),
        ("--model.name json.JSONDecoder", "model.name = 'json.JSONDecoder' is no ModelSpec"),
        ("--model.name mymodels.ShiftModel --model.num-heads 4", "model.num_heads = 4 is no field of mymodels.Shift"),
        ("--model.name mymodels.ShiftModel --model.arguments width 4", "model.arguments.width is no field of mymodels"),
        (
            "--model.name mymodels.ShiftModel --model.arguments hidden_dim 96.5",
            "model.arguments.hidden_dim = 96.5 is an int of mymodels.ShiftModel: write a whole number",
        ),
        (
            "--model.name mymodels.Optional --model.arguments rank 2.5",
            "model.arguments.rank = 2.5 is an int of mymodels.Optional: write a whole number",
        ),
        (
            "--model.name mymodels.ShiftModel --train.loss-chunk-tokens 8",
            "train.loss_chunk_tokens = 8 is not supported",
        ),
        (
            "--model.name mymodels.TiedModel --pipeline.schedule pipedream --optimizer.error-feedback 0",
            "pipeline.schedule = 'pipedream' lets every stage step on its own, and",
        ),
        ("--data.loader mydata.missing", "data.loader = 'mydata.missing' cannot be imported"),
        (
            "--data.loader mydata.high --data.sources 400",
            "data.loader = 'mydata.high' returned ids from 10 to",
        ),
        ("--data.loader mydata.flat --data.sources 400", "data.loader = 'mydata.flat' returned ids as a 1-D"),
        (
            "--data.loader mydata.none --data.sources 400",
            "data.loader = 'mydata.none' returned a Corpus with",
        ),
        ("--model.name mymodels.Renamed", "model.name = 'mymodels.Renamed' builds a layer named '0' where layer_names"),
        ("--data.loader mydata.load_sums --data.sources many", "data.loader = 'mydata.load_sums' failed (ValueError"),
        (
            "--run.sinks tensorbord",
            "run.sinks = 'tensorbord' is unknown: use tensorboard, wandb, trackio or",
        ),
        ("--run.sinks json.dumps", "run.sinks = 'json.dumps' is no class"),
        ("--run.sinks mysinks.Missing", "run.sinks = 'mysinks.Missing' cannot be imported"),
    ],
)
def test_a_mistake_with_ones_own_is_one_sentence_before_anything_starts(folder, text_file, capsys, arguments, sentence):
    (folder / "mymodels.py").write_text(code_of("add_model.md")[0] + TIED)
    (folder / "mydata.py").write_text(code_of("add_data_source.md")[0] + WRONG_CORPORA)
    (folder / "mysinks.py").write_text(code_of("add_sink.md")[0])
    sources = [] if "--data.sources" in arguments else ["--data.sources", str(text_file)]
    assert run(["train", *SMALL, *sources, "--train.steps", "2", *arguments.split()]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"slipstream: {sentence}") and said.count("\n") == 1, said
    assert not Path("runs").exists()


def test_a_schedule_that_breaks_a_promise_is_refused(folder, text_file, capsys, monkeypatch):
    def swapped(place: generators.Place) -> Iterator[Action]:
        actions = generators.one_f_one_b(place)
        yield from reversed(list(islice(actions, 2)))
        yield from actions

    monkeypatch.setitem(TRAITS, "one_f_one_b", Traits(swapped, flushes=True))
    arguments = ["--pipeline.schedule", "one_f_one_b", "--optimizer.error-feedback", "0", "--data.sources"]
    assert run(["train", *SMALL, *arguments, str(text_file), "--train.steps", "2"]) == 2
    said = capsys.readouterr().err
    assert "stage 0" in said and said.count("\n") == 1, said


def test_a_data_source_of_the_readers_own_is_trained_on_and_resumed(folder):
    (folder / "mydata.py").write_text(code_of("add_data_source.md")[0])
    model = "--model.dim 16 --model.num-heads 2 --model.num-kv-heads 1 --model.hidden-dim 32 --model.sequence-length 16"
    base = [*model.split(), *SMALL, "--data.loader", "mydata.load_sums", "--data.sources", "300"]
    assert run(["train", *base, "--train.steps", "4", "--run.name", "sums"]) == 0
    assert run(["train", *base, "--train.steps", "6", "--run.name", "sums", "--checkpoint.resume"]) == 0
    assert summary("sums")["resumed_at"] == 4


def test_a_sink_of_the_readers_own_gets_every_row_and_a_broken_one_ends_nothing(folder, text_file, capsys):
    code = code_of("add_sink.md")[0]
    (folder / "mysinks.py").write_text(f"{code}\n\nclass Broken(TwoColumns):\n    write = None\n")
    model = "--model.dim 16 --model.num-heads 2 --model.num-kv-heads 1 --model.hidden-dim 32 --model.sequence-length 16"
    base = [*model.split(), *SMALL, "--data.sources", str(text_file), "--train.steps", "5", "--run.name", "logged"]
    assert run(["train", *base, "--run.sinks", "mysinks.TwoColumns", "mysinks.Broken"]) == 0
    rows = [json.loads(line) for line in Path("runs/logged/metrics.jsonl").read_text().splitlines()]
    losses = [f"{row['step']}\t{row['loss']}" for row in rows if "loss" in row]
    assert Path("runs/logged/losses.tsv").read_text().splitlines() == losses and len(losses) == 5
    assert "the sink Broken failed and is left out" in capsys.readouterr().out


def test_a_schedule_that_a_reader_adds_is_checked_and_trained(tmp_path, text_file):
    """In a copy of the package, with the page's two pieces of code put where the page says."""
    package = tmp_path / "slipstream"
    shutil.copytree(Path(slipstream.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    generator, entry = code_of("add_schedule.md")
    with (package / "schedule" / "generators.py").open("a", encoding="utf-8") as file:
        file.write(f"\n\n{generator}")
    traits = package / "schedule" / "traits.py"
    source = traits.read_text(encoding="utf-8")
    opening = re.search(r"^TRAITS[^\n]*\{\n", source, re.MULTILINE)
    assert opening is not None
    traits.write_text(source[: opening.end()] + f"    {entry}" + source[opening.end() :], encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    model = "--model.dim 16 --model.num-heads 2 --model.num-kv-heads 1 --model.hidden-dim 32 --model.sequence-length 16"
    train = ["train", *model.split(), *SMALL, "--data.sources", str(text_file), "--train.steps", "3"]
    train += ["--pipeline.schedule", "my_schedule", "--optimizer.error-feedback", "0"]
    look = ["schedule", "my_schedule", "--output", "drawn.svg"]
    program = f"from slipstream.cli import run; raise SystemExit(run({look!r}) or run({train!r}))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no deadlock" in done.stdout and "my_schedule, gradients" in done.stdout
