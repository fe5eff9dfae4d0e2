"""The command line as a stranger uses it: what it says and what it refuses."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from settings import as_arguments, changed

from slipstream import cli
from slipstream.config.schema import Config
from slipstream.errors import ConfigError
from slipstream.model.presets import PRESETS
from slipstream.train.build import build_components
from slipstream.train.trainer import train


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to stand in."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that is said instead."""
    assert cli.run(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("slipstream: ") and said.err.count("\n") == 1, said.err
    return said.err


# ---- mistakes


TRAIN_MISTAKES = [
    ("--pipeline.microbatches 1", "pipeline.microbatches = 1 is invalid: 1 microbatches are too few for two_bw"),
    ("--pipeline.stages 5 --pipeline.microbatches 5", "pipeline.stages = 5 is more than the model's 4 layers"),
    ("--pipeline.layers-per-stage 1 2", "pipeline.layers_per_stage = [1, 2] does not cut 4 layers into 2 stages: give"),
    ("--pipeline.layers-per-stage 4 0", "pipeline.layers_per_stage = [4, 0] does not cut 4 layers into 2 stages: give"),
    (
        "--pipeline.layers-per-stage 1 x",
        "pipeline.layers_per_stage = '1 x' is invalid: write a list, each item a whole",
    ),
    ("--pipeline.schedule pipe", "pipeline.schedule = 'pipe' is unknown: choose one of"),
    ("--pipeline.schedule paci", "set optimizer.error_feedback = 0, or pipeline.schedule = 'two_bw'"),
    (
        "--pipeline.schedule pipedream --model.tied-embeddings True",
        "embedding.weight and head.output.weight are one weight on two stages: set model.tied_embeddings = false or",
    ),
    ("--pipeline.transport smoke", "pipeline.transport = 'smoke' is invalid: write one of process, thread"),
    ("--model.preset huge", "model.preset = 'huge' is unknown: choose one of"),
    ("--model.vocab-size 10", "model.vocab_size = 10 is too small for a corpus of 256 token ids: use at least 256"),
    ("--model.dim 15", "model.dim is 15, which 2 heads cannot share evenly: make it a multiple of model.num_heads"),
    ("--model.dim -1", "model.dim is -1: set it to 1 or more"),
    ("--model.dim 1.5", "model.dim = '1.5' is invalid: write a whole number"),
    ("--model.num-layers 1000000", "model.num_layers is 1000000, more than any model has: set it to 1000 or less"),
    ("--model.vocab-size 9223372036854775807", "model.vocab_size is 9223372036854775807, more than any model has: set"),
    ("--model.hidden-dim 4000000 --model.num-layers 100", "a model of 19,200,"),
    ("--train.microbatch-size 9007199254740993", "a microbatch of 144,115,188,075,855,888 tokens takes at least"),
    ("--model.sequence-length 100000", "model.sequence_length = 100000 takes 100001 tokens and there are"),
    ("--optimizer.name sgd", "optimizer.name = 'sgd' is unknown: use muon, adamw, normuon, soap,"),
    ("--optimizer.name no.Such", "optimizer.name = 'no.Such' cannot be imported (No module named 'no'): use muon,"),
    ("--optimizer.name torch.nn.Linear", "optimizer.name = 'torch.nn.Linear' is no torch optimizer: use one"),
    ("--optimizer.name torch.optim.LBFGS", "LBFGS.step() missing 1 required positional argument: 'closure'): change"),
    ("--optimizer.name torch.optim.Muon", "Muon only supports 2D parameters"),
    (
        "--optimizer.name torch.optim.SGD --optimizer.arguments momentum -1",
        "optimizer.arguments = {'momentum': -1.0} fails on a toy model (Invalid momentum value: -1.0): change",
    ),
    (
        "--optimizer.name torch.optim.SGD --optimizer.arguments impetus 1",
        "got an unexpected keyword argument 'impetus'): change optimizer.arguments",
    ),
    (
        "--optimizer.arguments momentum",
        "optimizer.arguments = 'momentum' is invalid: write a table, each value a number",
    ),
    ("--optimizer.learning-rate -1", "optimizer.learning_rate = -1.0 is too small: use 0 or more"),
    ("--optimizer.learning-rate nan", "optimizer.learning_rate = nan is not finite"),
    ("--optimizer.error-feedback 1e308", "optimizer.error_feedback = 1e+308 is too large: use 1e+30 or less"),
    ("--optimizer.newton-schulz-steps 1001", "optimizer.newton_schulz_steps = 1001 is too large: use 1000 or less"),
    ("--optimizer.schedule steps", "optimizer.schedule = 'steps' is unknown: choose one of"),
    ("--data.sources no.txt", "data.sources names 'no.txt', which does not exist: give a file, a folder or a glob"),
    ("--data.sources empty.txt", "data.sources is ['empty.txt'], which holds no text to train on: give some"),
    ("--data.sources short.txt", "model.sequence_length = 16 takes 17 tokens and there are 4 for training: shorten it"),
    ("--data.validation-fraction 0", "there are 0 for validation: shorten it, or raise data.validation_fraction"),
    ("--train.steps 0", "train.steps = 0 is too small: use 1 or more"),
    ("--train.steps abc", "train.steps = 'abc' is invalid: write a whole number"),
    ("--train.steps=abc", "train.steps = 'abc' is invalid: write a whole number"),
    ("--train.steps", "train.steps has no value: write a whole number"),
    ("--train.stesp 3", "option --train.stesp is unknown: did you mean --train.steps?"),
    ("--steps 3", "option --steps is unknown: did you mean --train.steps?"),
    ("-x", "option -x is unknown: see slipstream train --help"),
    ("--run.overwrite yes", "'yes' belongs to no option: see slipstream train --help"),
    ("late.toml", "'late.toml' belongs to no option: a configuration file comes before all options"),
    ("--run.folder empty.txt", "run.folder = 'empty.txt' cannot take the folder 'tiny' (Not a directory): use another"),
    ("--run.folder . --run.name used", "run.name = 'used' has been used, used exists: choose another, set checkpoint"),
    (
        "--run.folder . --run.name used --run.overwrite",
        "run.name = 'used' would overwrite used, which has no config.toml and is no run: choose another",
    ),
]


@pytest.mark.parametrize(("mistake", "sentence"), TRAIN_MISTAKES, ids=[mistake for mistake, _ in TRAIN_MISTAKES])
def test_a_mistake_is_one_sentence_before_anything_happens(mistake, sentence, tiny, here, capsys, monkeypatch):
    monkeypatch.setattr(
        "slipstream.train.trainer.launch_world", lambda *args, **kwargs: pytest.fail("a stage was started")
    )
    (here / "empty.txt").touch()
    (here / "short.txt").write_text("abc")
    (here / "used").mkdir()
    (here / "used" / "something").touch()
    before = sorted(here.parent.rglob("*"))
    assert sentence in refusal(["train", *as_arguments(tiny), *mistake.split()], capsys)
    assert sorted(here.parent.rglob("*")) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused(tiny, here, capsys):
    assert "train.device = 'cuda' finds no CUDA device here: use train.device = 'cpu'" in refusal(
        ["train", *as_arguments(tiny), "--train.device", "cuda"], capsys
    )


def test_an_unwritable_folder_is_refused(tiny, here, capsys, monkeypatch):
    def deny(path: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", deny)
    sentence = refusal(["train", *as_arguments(changed(tiny, run__folder="runs"))], capsys)
    assert "run.folder = 'runs' cannot take the folder 'tiny' (Permission denied): use another" in sentence


@pytest.mark.parametrize(("transport", "kind"), [("process", "processes"), ("thread", "threads")])
def test_more_stages_than_the_machine_can_carry_are_refused(tiny, here, capsys, transport, kind):
    config = changed(tiny, pipeline__transport=transport, pipeline__replicas=50 * (os.cpu_count() or 1))
    sentence = refusal(["train", *as_arguments(config)], capsys)
    assert f"come to {2 * config.pipeline.replicas} {kind}" in sentence
    assert "use fewer, or torchrun on more machines" in sentence
    assert not Path(config.run.folder).exists()


def test_a_name_that_no_folder_can_have_leaves_nothing_behind(tiny, here, capsys):
    long = changed(tiny, run__folder="some/runs", run__name="x" * 300)
    assert "cannot take the folder" in refusal(["train", *as_arguments(long)], capsys)
    assert not Path("some").exists()


def test_unreadable_data_is_refused(tiny, here, capsys, monkeypatch):
    def deny(config: object) -> None:
        raise PermissionError(13, "Permission denied", "secret.txt")

    monkeypatch.setattr("slipstream.train.build.corpus_of", deny)
    sentence = refusal(["train", *as_arguments(changed(tiny, data__sources=("secret.txt",)))], capsys)
    assert "'secret.txt', which cannot be read (Permission denied): give another" in sentence


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "config.toml cannot be read (No such file or directory): check the path"),
        ("[train", "config.toml is not valid TOML"),
        ("[train]\nstesp = 3", "config.toml: train.stesp is unknown: did you mean steps?"),
    ],
)
def test_a_mistake_in_the_file_is_one_sentence(text, sentence, here, capsys):
    if text is not None:
        Path("config.toml").write_text(text)
    assert sentence in refusal(["train", "config.toml"], capsys)


@pytest.mark.parametrize(
    ("world_size", "mistake", "sentence"),
    [
        (
            "3",
            ["--pipeline.transport", "process"],
            "pipeline.stages = 2 is not WORLD_SIZE = 3, the number of processes",
        ),
        ("2", [], "pipeline.transport = 'thread' keeps all stages in one process, and WORLD_SIZE = 2 were started"),
    ],
)
def test_a_world_that_does_not_fit_is_refused(world_size, mistake, sentence, tiny, here, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", world_size)
    assert sentence in refusal(["train", *as_arguments(tiny), *mistake], capsys)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("trian", "command 'trian' is unknown: did you mean train?"),
        (
            "fly",
            "command 'fly' is unknown: known are init, train, tune, reshape, schedule, plan, profile, bench, study",
        ),
        ("schedule", "NAME is missing: see slipstream schedule --help"),
        ("schedule pipe", "schedule 'pipe' is unknown: choose one of"),
        ("schedule two_bw --stages x", "stages = 'x' is invalid: write a whole number"),
        ("schedule two_bw --stages 0", "0 stages are too few: use at least 1"),
        ("schedule two_bw --microbatches 2", "2 microbatches are too few for two_bw on 4 stages at minimum depth: use"),
        ("schedule two_bw --stages 999 --microbatches 999", "are too many to draw: use fewer"),
        ("schedule two_bw --forward nan", "forward = nan is no time: use a finite number of 0 or more"),
        ("schedule two_bw --forward 1e40", "forward = 1e+40 cannot be drawn: use 0, or 1e-09 to 1e+09"),
        ("schedule two_bw --sync-start-steps 9", "sync_start_steps = 9 is more than steps = 3: use fewer"),
        ("schedule two_bw --latency -1", "latency = -1.0 is no time: use a finite number of 0 or more"),
        ("schedule two_bw --output a.pdf", "a.pdf cannot be drawn: end its name in one of .svg, .png"),
        (
            "schedule two_bw --output text.txt/a.svg",
            "output = 'text.txt' cannot be written (File exists): choose anoth",
        ),
        ("schedule two_bw --stagse 3", "option --stagse is unknown: did you mean --stages?"),
        ("prepare text.txt", "--output is missing: see slipstream prepare --help"),
        ("prepare --output a", "sources is empty: give at least one file, folder or glob"),
        ("prepare no.txt --output a", "sources names 'no.txt', which does not exist"),
        ("prepare text.txt --output a --shard-tokens 0", "shard_tokens is 0: set it to 1 or more"),
        ("prepare text.txt --output .", "output is '.', which names no file: write the beginning"),
        ("prepare text.txt --output ../..", "output is '../..', which names no file: write the beginning"),
        ("prepare text.txt --output text.txt/a", "output = 'text.txt' cannot be written (File exists): choose another"),
    ],
)
def test_a_mistake_with_another_command_is_one_sentence(arguments, sentence, here, capsys):
    Path("text.txt").write_text("a text")
    assert sentence in refusal(arguments.split(), capsys)
    assert [path.name for path in here.iterdir()] == ["text.txt"]


# ---- help


def test_without_a_command_it_explains_itself(capsys):
    assert cli.run([]) == 0
    assert "slipstream train [CONFIG.toml]" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["train", "schedule", "prepare"])
def test_help_explains_every_option(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.run([command, "--help"])
    assert not stop.value.code
    lines = [line.strip("│ ") for line in capsys.readouterr().out.splitlines()]
    assert lines[0].startswith(f"usage: slipstream {command}")
    options = [i for i, line in enumerate(lines) if line.startswith("--")]
    assert len(options) > 4
    for i in options:
        assert not re.search(r"^--\S+ [^ ]+ +\(default", lines[i]), f"{lines[i]} is all it says"
        assert not lines[i + 1].startswith("(default") or "  " in lines[i], f"{lines[i]} is all it says"


def test_help_shows_what_the_file_sets(here, capsys):
    Path("config.toml").write_text("[train]\nsteps = 77")
    with pytest.raises(SystemExit):
        cli.run(["train", "config.toml", "--help"])
    assert "(default: 77)" in capsys.readouterr().out


# ---- what it does


def test_an_option_wins_over_the_file(here, tiny, capsys):
    Path("config.toml").write_text("[train]\nsteps = 2\nseed = 5\n[run]\nname = 'of_file'")
    rest = changed(tiny, run__name=Config().run.name, train__steps=3)
    assert cli.run(["train", "config.toml", *as_arguments(rest)]) == 0
    summary = json.loads(Path(tiny.run.folder, "of_file", "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["config"]["train"]["seed"] == 5


def test_schedule_prints_checks_and_draws(here, capsys):
    assert cli.run(["schedule", "two_bw", "--stages", "4", "--microbatches", "4"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("S0  F0/0")
    assert "no deadlock" in said
    assert "delay          1 on every stage" in said
    assert Path("two_bw_p4_m4.svg").read_text().startswith("<svg")
    assert Path("two_bw_p4_m4.png").read_bytes().startswith(b"\x89PNG")


def test_prepared_shards_train(here, tiny, text_file, capsys):
    assert cli.run(["prepare", str(text_file), "--output", "data/web", "--shard-tokens", "20000"]) == 0
    shards = capsys.readouterr().out.split()
    assert shards == ["data/web.train.00000.bin", "data/web.train.00001.bin", "data/web.validation.00000.bin"]
    of_shards = changed(
        tiny, data__sources=("data/web.train.*.bin",), data__validation_sources=("data/web.validation.*.bin",)
    )
    assert cli.run(["train", *as_arguments(of_shards)]) == 0
    assert cli.run(["train", *as_arguments(changed(tiny, run__name="of_text"))]) == 0
    of_both = [json.loads(path.read_text()) for path in Path(tiny.run.folder).glob("*/summary.json")]
    assert of_both[0]["parameter_checksum"] == of_both[1]["parameter_checksum"]


def test_progress_is_a_line_every_so_many_steps_where_there_is_no_terminal(tiny, capsys):
    tiny = changed(tiny, train__steps=9, run__log_every_steps=4)
    assert cli.run(["train", *as_arguments(tiny)]) == 0
    said = capsys.readouterr()
    steps = re.findall(
        r"^step (\d+)/9  loss \d\.\d{4}  lr \S+  grad norm \S+(  [\d,]+ tokens/s)?", said.out, re.MULTILINE
    )
    assert [(step, speed != "") for step, speed in steps] == [("1", False), ("4", True), ("8", True), ("9", True)]
    assert "validation loss" in said.out and "by stage, since the pipeline filled: " in said.out
    assert said.err == ""


# ---- how it ends


def test_help_does_not_wait_for_torch() -> None:
    program = """
import sys
from contextlib import suppress
from slipstream.cli import run
for words in (["--help"], ["--version"], ["train", "--help"]):
    with suppress(SystemExit):
        run(words)
    assert not {"torch", "numpy"} & sys.modules.keys(), words
"""
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


def test_a_loss_that_is_not_a_number_ends_the_run_with_one_sentence(tiny, capsys):
    arguments = as_arguments(changed(tiny, optimizer__learning_rate=1e30, optimizer__adamw_learning_rate=1e30))
    assert cli.run(["train", *arguments]) == 1
    said = capsys.readouterr().err
    assert re.search(r"^slipstream: step \d stops the run: the .* is (nan|inf)", said)
    assert said.count("\n") == 1


def test_under_torchrun_a_stage_speaks_for_itself_in_one_line(tiny, capsys, monkeypatch):
    def fail(*args: object, **kwargs: object) -> None:
        raise ConnectionError("the world\nis not there")

    monkeypatch.setattr("torch.distributed.rendezvous", fail)
    world = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in (world | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    assert cli.run(["train", *as_arguments(changed(tiny, pipeline__transport="process"))]) == 1
    assert capsys.readouterr().err.startswith("slipstream: stage 0 does not find the others: the world is not there")


def test_more_processes_than_gpus_are_refused_unless_that_is_what_is_wanted(tiny, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = changed(tiny, train__device="cuda", pipeline__transport="process")
    with pytest.raises(ConfigError, match=r"2 processes .* need a GPU each and there are 1: set pipeline\.share_gpu"):
        build_components(config)
    build_components(changed(config, pipeline__share_gpu=True))


def test_the_version_is_told(capsys):
    assert cli.run(["--version"]) == 0
    assert re.fullmatch(r"slipstream \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_a_configuration_that_is_no_plain_file_is_refused_and_not_waited_for(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe.toml")
    for path in (tmp_path / "pipe.toml", Path("/dev/zero"), tmp_path):
        assert cli.run(["train", str(path)]) == 2
        assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["timeline", "reshape"])
def test_a_usage_line_names_what_is_given_once(command, capsys):
    with pytest.raises(SystemExit):
        cli.run([command, "--help"])
    assert capsys.readouterr().out.splitlines()[0].count("RUN") == 1


def test_a_run_that_has_ended_is_drawn_by_its_name_and_cannot_be_reshaped(tiny, tmp_path, monkeypatch, capsys):
    train(tiny)
    monkeypatch.chdir(tmp_path)
    assert cli.run(["timeline", "tiny", "--start", "0", "--seconds", "1000", "--output", "drawn.svg"]) == 0
    seconds = float(re.search(r"drawn in drawn.svg: ([\d.]+) s from", capsys.readouterr().out)[1])
    assert 0 < seconds < 60
    assert cli.run(["reshape", "tiny", "1"]) == 2
    assert "run = 'tiny' has ended" in capsys.readouterr().err


def test_the_ten_options_that_matter_come_first_and_exist(capsys):
    with pytest.raises(SystemExit):
        cli.run(["train", "--help"])
    first = capsys.readouterr().out.partition("All of them:")[0]
    options = re.findall(r"^  --([a-z.-]+)", first, re.MULTILINE)
    assert len(options) == 10
    for option in options:
        section, name = option.replace("-", "_").split(".")
        assert hasattr(getattr(Config(), section), name), option
    assert all(preset in first for preset in PRESETS)


@pytest.mark.parametrize("words", ["report run --output", "timeline run --output"])
def test_a_pipe_that_nobody_reads_is_not_waited_for(tiny, capsys, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(changed(tiny, run__folder="runs", run__name="run"))
    os.mkfifo("pipe.svg")
    capsys.readouterr()
    assert "output = 'pipe.svg' cannot be written" in refusal([*words.split(), "pipe.svg"], capsys)
