"""`slipstream tune` from end to end: what it runs, what it leaves, and what it refuses."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from settings import as_arguments, changed
from tuning_target import TARGET

from slipstream import cli
from slipstream.cli import tune as command
from slipstream.config.models import model_of
from slipstream.config.schema import Config
from slipstream.config.toml import load_toml
from slipstream.data import prepare
from slipstream.tools.study.cell import Cell
from slipstream.tools.study.delayed import DelayedRun
from slipstream.tools.tune import fit as fitting
from slipstream.tools.tune import page as pages
from slipstream.tools.tune import proxies as sizes
from slipstream.tools.tune import trials, trunks
from slipstream.tools.tune.advice import Size, batch_of
from slipstream.tools.tune.fit import Fit
from slipstream.tools.tune.proxies import proxy_of
from slipstream.train.build import build_components, read_corpus

TOKENS = 8e3
SMALL = changed(Config(), model__preset="small", train__device="cpu", model__sequence_length=64)


@pytest.fixture(autouse=True)
def few_samples(monkeypatch):
    """Bands from few fits, which take most of the time here."""
    monkeypatch.setattr(fitting, "NUM_SAMPLES", 16)


def best_rate(parameters: float, batch: float) -> float:
    return 0.01 * (parameters / 1e6) ** -0.2 * (batch / 8192) ** 0.5


def best_batch(tokens: float) -> float:
    return 6000 * (tokens / 1e7) ** 0.5


def known_losses(cell: Cell, horizons: tuple[int, ...], progress: object, flops_per_token: float) -> list[float]:
    components = build_components(cell.config)
    n, batch = Size.of(components.model).parameters, components.batches.num_tokens(0)
    x = math.log(cell.config.optimizer.learning_rate / best_rate(n, batch))
    found = []
    for steps in horizons:
        d = steps * batch
        floor = 0.5 + 0.5 * (n / 1e6) ** -0.3 + 0.5 * (d / 1e7) ** -0.3
        gap = 0.0 if cell.is_synchronous else 60 / steps
        wrong = 0.04 * (math.expm1(x) - x)  # too high a rate costs more
        found.append(floor + wrong + 0.01 * math.log(batch / best_batch(d)) ** 2 + gap)
    return found


@pytest.fixture
def fake(monkeypatch):
    """Proxies whose losses follow a known law instead of being trained, and a page without figures."""
    monkeypatch.setattr(trunks, "run_trunk", known_losses)
    monkeypatch.setattr(pages, "figures", lambda *_: {})


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """The output of a tuning with such proxies, and what it said."""
    out, said = tmp_path_factory.mktemp("tuned"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(fitting, "NUM_SAMPLES", 16)
        patch.setattr(trunks, "run_trunk", known_losses)
        patch.setattr(pages, "figures", lambda *_: {})
        assert tune("--budget", "60%", "--jobs", "2", "--output", str(out), config=SMALL, tokens=5e7) == 0
    return out, said.getvalue()


def tune(*arguments: str, config: Config = TARGET, tokens: float = TOKENS) -> int:
    return cli.run(["tune", *as_arguments(config), "--tokens", str(tokens), *arguments])


def read(folder: Path) -> dict:
    return json.loads((folder / "tune.json").read_text())


def test_level_0_writes_a_configuration_that_trains(tmp_path, capsys):
    assert tune("--output", str(tmp_path / "out"), tokens=2e4) == 0
    made = load_toml(tmp_path / "out" / "tuned.toml")
    build_components(made)
    said, tree = capsys.readouterr().out, read(tmp_path / "out")
    assert "Step Law, arXiv:2503.04715" in said and "The delay costs about" in said
    assert tree["setting"]["learning_rate"] == made.optimizer.learning_rate and tree["fit"] is None
    assert "Power Lines" in (tmp_path / "out" / "tune.html").read_text()
    arguments = ["--train.steps", "2", "--optimizer.warmup-steps", "1", "--optimizer.decay-steps", "1"]
    path = str(tmp_path / "out" / "tuned.toml")
    assert cli.run(["train", path, *arguments, "--run.folder", str(tmp_path), "--pipeline.transport", "thread"]) == 0


def test_level_0_counts_the_vocabulary_of_the_corpus(tmp_path, text_file, capsys):
    prepare([str(text_file)], "bytes", str(tmp_path / "web"))
    config = changed(TARGET, data__sources=(str(tmp_path / "web.train.*.bin"),))
    flops = []
    for size in (256, 60000):
        for path in tmp_path.glob("*.json"):
            path.write_text(path.read_text().replace('"vocab_size": 256', f'"vocab_size": {size}'))
        assert tune("--output", str(tmp_path / "out"), config=config) == 0
        flops.append(float(re.search(r"tokens, (\S+) FLOPs", capsys.readouterr().out)[1]))
    assert flops[1] - flops[0] == pytest.approx(6 * 32 * (60000 - 256) * TOKENS, rel=0.01)


def test_too_few_tokens_for_a_law(tmp_path, capsys):
    assert tune("--output", str(tmp_path / "out"), tokens=100) == 2
    said = capsys.readouterr().err
    assert "tokens = 100 is too few: a step that keeps the pipeline full has 32, so give 640 or more" in said


def test_more_stages_than_microbatches_are_no_mistake_because_their_number_is_chosen(tmp_path):
    config = changed(TARGET, pipeline__stages=6, pipeline__microbatches=4)
    assert tune("--output", str(tmp_path / "out"), config=config, tokens=1e6) == 0
    assert load_toml(tmp_path / "out" / "tuned.toml").pipeline.microbatches >= 6


def test_level_1_from_end_to_end_and_again_without_a_run(tmp_path, capsys, short, monkeypatch):
    monkeypatch.setattr(trunks, "FIRST_RATES", (0.7, 1.4))
    monkeypatch.setattr(trunks, "RATES", (1.0,))
    monkeypatch.setattr(trunks, "MAX_EXTENSIONS", 0)
    monkeypatch.setattr(trunks, "FINER_RATES", ())
    out = tmp_path / "out"
    assert tune("--budget", "1000%", "--output", str(out)) == 0
    first, tree = capsys.readouterr().out, read(out)
    rows = tree["trunks"]
    assert len({row["parameters"] for row in rows}) == 3
    assert sum(not row["is_late"] for row in rows) == 9  # at each batch of each size
    assert len({(row["size"], row["batch"]) for row in rows}) == 9
    assert len(list((out / "trunks").glob("*.json"))) == len(rows)
    assert math.isclose(tree["spent_flops"], sum(row["flops"] for row in rows))
    prediction, setting = tree["prediction"], tree["setting"]
    assert prediction["loss_band"][0] < prediction["loss"] < prediction["loss_band"][1]
    assert prediction["gap_band"][0] < prediction["gap"] < prediction["gap_band"][1]
    assert math.isclose(setting["learning_rate"], prediction["rate"], rel_tol=5e-3)
    made = load_toml(out / "tuned.toml")
    components = build_components(made)
    assert components.batches.num_tokens(0) == prediction["batch"] == setting["batch"]
    page = (out / "tune.html").read_text()
    assert page.count("<svg") == 7 and "Delayed or synchronous" in page and "twice the rate" in page
    assert "cost: " in first and "slipstream train" in first
    assert "Warning: the law misses the losses of the proxies by" in first  # which make a handful of steps
    assert f"misses the losses of the largest one by {tree['fit']['backtest']['error']:.1%}" in first

    monkeypatch.setattr(DelayedRun, "train", None)  # nothing is trained again
    monkeypatch.setattr(pages, "figures", lambda *_: {})
    assert tune("--budget", "1000%", "--output", str(out)) == 0
    again = read(out)
    assert {**again, "trunks": None} == {**tree, "trunks": None}


def test_other_text_under_the_same_name_makes_another_trunk(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be " * 400)

    def trunk_id():
        read_corpus.cache_clear()
        config = changed(TARGET, data__sources=(str(text),))
        model = model_of(config, 256)
        return trunks.Trunk(proxy_of(config, model, Size.of(model), TOKENS), 0.01, 4, True).id

    first = trunk_id()
    assert trunk_id() == first
    text.write_text("to be or not to me " * 400)
    assert trunk_id() != first


def test_a_trunk_that_is_done_or_wanted_twice_is_paid_once(tmp_path, short, monkeypatch):
    monkeypatch.setattr(trunks, "run_trunk", lambda cell, horizons, *_: [1.0] * len(horizons))
    proxy = proxy_of(TARGET, model_of(TARGET, 256), Size.of(model_of(TARGET, 256)), TOKENS)
    done, other = (trunks.Trunk(proxy, rate, 4, True) for rate in (0.0123456, 0.0223456))
    laboratory = trunks.Laboratory(tmp_path, 1.5 * proxy.flops(4), lambda flops: None, lambda line: None, None)
    assert laboratory.affordable([other, other]) == [other, other]
    (record,) = laboratory.run([done])
    assert record.rate == 0.0123
    assert laboratory.affordable([other, done]) == [done]


def test_trunks_of_other_text_in_the_folder_are_told(tmp_path, fake, capsys):
    (tmp_path / "trunks").mkdir()
    (tmp_path / "trunks" / "of-other-text.json").touch()
    assert tune("--budget", "60%", "--output", str(tmp_path), config=SMALL, tokens=5e7) == 0
    said = capsys.readouterr().out.splitlines()
    line = said.index(f"trunks of other text or settings in {tmp_path / 'trunks'}, which are not used: 1")
    assert said[line + 1].startswith("[1] ")


@pytest.mark.parametrize("output", ["file", "file/tune", "."])
def test_an_output_that_cannot_be_written_is_refused_before_any_work(output, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "model_of", lambda *_: pytest.fail("work was begun"))
    Path("file").touch()
    Path("tuned.toml").mkdir()
    assert tune("--output", output) == 2
    assert f"output = '{output}' cannot be written (" in capsys.readouterr().err


def test_the_number_of_jobs_changes_nothing(tuned, tmp_path, fake, monkeypatch):
    monkeypatch.setattr(fitting, "NUM_SAMPLES", 16)
    out = tmp_path / "out"
    assert tune("--budget", "60%", "--jobs", "1", "--output", str(out), config=SMALL, tokens=5e7) == 0
    one, two = read(out), read(tuned[0])
    for tree in (one, two):
        tree["trunks"] = sorted([row["id"], row["losses"]] for row in tree["trunks"])
    assert one["trunks"] == two["trunks"] and one["prediction"] == two["prediction"]


def test_a_known_law_is_found_by_the_whole_command(tuned):
    out, said = tuned
    tree = read(out)
    assert "cost: " in said and "the law misses" not in said
    prediction, n = tree["prediction"], tree["target"]["parameters"]
    assert tree["spent_flops"] < 0.6 * tree["target"]["flops"]
    rates = Counter((row["size"], row["batch"]) for row in tree["trunks"] if row["is_late"])
    usual = [number for number in rates.values() if number > 1]  # others are beyond the edge
    assert len(usual) >= 9 and min(usual) >= 3  # the rest of the budget paid for two more at every batch
    assert max(row["parameters"] for row in tree["trunks"]) < n / 4
    assert 1 / 1.5 < prediction["rate"] / best_rate(n, prediction["batch"]) < 1.5
    steps = 5e7 / prediction["batch"]
    assert prediction["gap_band"][0] < 60 / steps < prediction["gap_band"][1]
    floor = 0.5 + 0.5 * (n / 1e6) ** -0.3 + 0.5 * 5**-0.3
    lowest = min(
        floor + 0.01 * math.log(batch / best_batch(5e7)) ** 2 + 60 * batch / 5e7 for batch in range(500, 20000, 25)
    )
    off = 0.01 * math.log(prediction["batch"] / best_batch(5e7)) ** 2
    assert (floor + off + 60 / steps) / lowest - 1 < 0.005
    assert prediction["loss_band"][0] < lowest < prediction["loss_band"][1]
    # A better rate adapted to another batch never costs more than the same rate there.
    wrong = prediction["wrong"]
    assert wrong["twice the rate"] > 0.005
    assert wrong["twice the batch, rate adapted"] <= wrong["twice the batch, same rate"]


def test_synchronous_training_is_chosen_where_the_delay_costs_more_than_the_bubbles(tmp_path, fake, capsys):
    config = changed(SMALL, pipeline__stages=2, train__microbatch_size=1, optimizer__error_feedback=0.0)
    assert tune("--budget", "60%", "--output", str(tmp_path), config=config, tokens=5e7) == 0
    prediction = read(tmp_path)["prediction"]
    said = capsys.readouterr().out
    word = "better" if prediction["synchronous_loss"] < prediction["loss"] else "worse"
    assert f"which is {word}" in said
    assert prediction["synchronous_batch"] >= prediction["batch"]  # a gap of 60 / steps grows with the batch


def test_a_synchronous_target_has_no_gap(tmp_path, fake):
    config = changed(SMALL, pipeline__schedule="one_f_one_b")
    assert tune("--budget", "60%", "--output", str(tmp_path), config=config, tokens=4e7) == 0
    tree = read(tmp_path)
    assert tree["prediction"]["gap"] == 0 and not any(row["is_late"] for row in tree["trunks"])
    assert "Delayed or synchronous" not in (tmp_path / "tune.html").read_text()


@pytest.mark.parametrize("damage", [{"parameters": None}, {"parameters": "x"}, {"noise": "x"}, {"noise": None}])
def test_damaged_laws_are_one_sentence(tmp_path, capsys, tuned, damage):
    tree = read(tuned[0])
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(tree | {"fit": tree["fit"] | damage}))
    assert tune("--laws", str(path), config=SMALL, tokens=5e7) == 2
    said = capsys.readouterr().err
    assert "is no whole tune.json" in said and said.count("\n") == 1


def test_a_damaged_record_is_named_and_laws_can_be_used_again(tmp_path, capsys, fake, tuned):
    out = shutil.copytree(tuned[0], tmp_path / "out")
    tree = read(out)
    laws = ["--laws", str(out / "tune.json"), "--output", str(tmp_path / "again")]
    assert tune(*laws, config=SMALL, tokens=5e7) == 0
    again = read(tmp_path / "again")
    assert again["setting"] == tree["setting"] and again["spent_flops"] == 0
    assert tune(*laws, config=SMALL, tokens=1e12) == 2
    assert "reach = 64 is less than" in capsys.readouterr().err
    assert tune(*laws, config=changed(SMALL, optimizer__name="adamw"), tokens=5e7) == 2
    assert "is of optimizer.name = 'muon', not of 'adamw'" in capsys.readouterr().err
    tree["trunks"] = [trunk for trunk in tree["trunks"] if not trunk["is_late"]]
    synchronous = tmp_path / "synchronous.json"
    synchronous.write_text(json.dumps(tree))
    assert tune("--laws", str(synchronous), config=SMALL, tokens=5e7) == 2
    assert "is of synchronous runs, and pipeline.schedule = 'two_bw' delays gradients" in capsys.readouterr().err
    record = next((out / "trunks").glob("*.json"))
    record.write_text("{}")
    assert tune("--budget", "60%", "--output", str(out), config=SMALL, tokens=5e7) == 2
    assert f"{record} is no record of a trunk" in capsys.readouterr().err


def test_a_folder_counts_as_the_tokens_after_which_its_loss_is_expected(
    tmp_path, capsys, fake, monkeypatch, tuned, folder
):
    fit, folder = Fit.from_tree(read(tuned[0])["fit"]), shutil.copytree(folder, tmp_path / "folder")
    config = changed(SMALL, model__preset="tiny", model__initial=str(folder))
    size = Size.of(model_of(config, 0))
    loss = float(fit.floor(size.parameters, 3e7))
    monkeypatch.setattr(DelayedRun, "evaluate", lambda self: torch.tensor(loss, dtype=torch.float64))
    laws = ["--laws", str(tuned[0] / "tune.json"), "--output", str(tmp_path / "continued")]
    assert tune(*laws, config=config, tokens=1e8) == 0
    prediction = read(tmp_path / "continued")["prediction"]
    assert math.isclose(prediction["equivalent_tokens"], 3e7, rel_tol=0.01)
    assert math.isclose(prediction["rate"], float(fit.rate(size.parameters, 1.3e8, prediction["batch"])), rel_tol=0.01)
    said = capsys.readouterr().out
    assert "Muon may forget" in said and "This is little for trained weights" not in said
    assert tune(*laws, "--tokens-before", "5e6", config=config, tokens=1e8) == 0
    prediction = read(tmp_path / "continued")["prediction"]
    assert prediction["equivalent_tokens"] == 5e6
    assert math.isclose(prediction["rate"], float(fit.rate(size.parameters, 1.05e8, prediction["batch"])), rel_tol=0.01)
    assert "This is little for trained weights" in capsys.readouterr().out
    monkeypatch.setattr(DelayedRun, "evaluate", lambda self: torch.tensor(0.01, dtype=torch.float64))
    assert tune(*laws, config=config, tokens=1e8) == 2
    assert "has a held-out loss of 0.0100, and the law goes from" in capsys.readouterr().err
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    assert tune(*laws, config=config, tokens=1e8) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "model.initial = " in said


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Weights of the target that were trained for a step."""
    path = tmp_path_factory.mktemp("trained")
    trained = changed(TARGET, train__steps=1, evaluation__batches=1, run__folder=str(path))
    assert cli.run(["train", *as_arguments(trained), "--pipeline.transport", "thread"]) == 0
    assert cli.run(["export", str(path / "default"), str(path / "folder")]) == 0
    return path / "folder"


def continued(folder: Path) -> Config:
    return changed(
        Config(),
        model__initial=str(folder),
        model__sequence_length=16,
        optimizer__name="adamw",
        train__microbatch_size=2,
        train__device="cpu",
        evaluation__batches=4,
    )


@pytest.mark.parametrize(("rate", "batch", "num_trials"), [(1 / 6, 1, 7), (0.5, 0.25, 6), (0.5, 2, 6)])
def test_trials_find_a_rate_and_a_batch_that_no_law_knows(rate, batch, num_trials, tmp_path, folder, monkeypatch):
    """Best are so many times the rate and the batch of the law."""
    runs, law, sequences = [], 0.0, 1

    def losses(cell: Cell, horizons: tuple[int, ...], *_: object) -> list[float]:
        runs.append(cell.config)
        scale = batch_of(cell.config, 16) / (16 * sequences)
        x = math.log(cell.config.optimizer.learning_rate / (law * rate * math.sqrt(scale)))
        return [2 + 0.02 * x**2 + 0.1 * math.log(scale / batch) ** 2 for _ in horizons]

    monkeypatch.setattr(trunks, "run_trunk", losses)
    monkeypatch.setattr(trials, "MIN_STEPS", 10)
    out = ["--output", str(tmp_path / "out")]
    assert tune(*out, tokens=1e6) == 0
    before = read(tmp_path / "out")["setting"]
    law, sequences = before["learning_rate"], before["batch"] // 16
    assert tune("--trials", "20%", "--jobs", "1", *out, config=continued(folder), tokens=1e6) == 0
    tree = read(tmp_path / "out")
    tokens = [config.train.steps * batch_of(config, 16) for config in runs]
    assert len(runs) == len(tree["trials"]) == num_trials and 2e4 < min(tokens) <= max(tokens) <= 2.5e4
    assert all(config.model.initial == str(folder) for config in runs)
    sections = [(config.optimizer, batch_of(config, 16)) for config in runs]
    decays = [section.weight_decay * section.learning_rate / tokens for section, tokens in sections]
    assert max(decays) < 1.01 * min(decays)  # that of the whole run for all of them
    assert math.isclose(tree["setting"]["batch"], batch * before["batch"], rel_tol=0.1)
    scale = math.sqrt(tree["setting"]["batch"] / before["batch"]) * 40**trials.RATE_BY_TOKENS
    assert math.isclose(tree["setting"]["learning_rate"], law * rate * scale, rel_tol=0.02)
    assert any(f"nats in {tree['setting']['steps']:,} steps" in remark for remark in tree["remarks"])
    assert tree["prediction"] is None and "<h2>Trials</h2>" in (tmp_path / "out" / "tune.html").read_text()
    runs.clear()
    assert tune("--trials", "20%", "--jobs", "1", *out, config=continued(folder), tokens=1e6) == 0
    assert not runs and read(tmp_path / "out") == tree
    other = shutil.copytree(folder, tmp_path / "folder")
    assert tune("--trials", "20%", "--jobs", "1", *out, config=continued(other), tokens=1e6) == 0
    runs.clear()
    [weights] = other.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\0")
    assert tune("--trials", "20%", "--jobs", "1", *out, config=continued(other), tokens=1e6) == 0
    assert len(runs) == num_trials  # the folder has other weights than before


def test_trials_train_the_weights_of_the_folder(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(trials, "MIN_STEPS", 2)
    monkeypatch.setattr(sizes, "VALIDATION_TOKENS", 512)
    assert tune("--trials", "50%", "--output", str(tmp_path / "out"), config=continued(folder), tokens=4e3) == 0
    tree = read(tmp_path / "out")
    assert all(0 < trial["losses"][0] < 6 for trial in tree["trials"])
    made = load_toml(tmp_path / "out" / "tuned.toml")
    assert made.model.initial == str(folder) and made.optimizer.learning_rate == tree["setting"]["learning_rate"]


def test_trials_that_are_too_short_are_refused(tmp_path, folder, capsys):
    capsys.readouterr()
    assert tune("--trials", "1%", "--output", str(tmp_path / "out"), config=continued(folder), tokens=1e5) == 2
    said = capsys.readouterr().err
    assert re.search(r"trials = 1% is too small: each of 8 trials would make \d+ steps, .* use --trials \d+%\n$", said)
    assert not (tmp_path / "out").exists()


# ---- what is refused: one sentence, exit code 2, nothing left behind

REFUSED = {
    "--budget 2%": r"tokens = 2e\+04 is too few: the shortest branch of the proxies would make \d+ steps",
    "--budget 0": r"budget = '0' is no share: write a percentage, such as 2%",
    "--budget two": r"budget = 'two' is no share",
    "--budget 2": r"budget = '2' is no share: write a percentage, such as 2%",
    "--tokens 0": r"tokens = 0.0 is invalid: use a number above 0",
    "--tokens 1e9 --budget 1e-9%": r"budget = 1e-09% is too small: the smallest proxies cost [\d.e-]+%",
    "--tokens 1e9 --budget 900%": r"data.sources = \['builtin'\] has [\d,]+ tokens, and a proxy of [\d.e-]+M",
    "--tokens 1e7 --budget 1000% --reach 1.5": r"reach = 1.5 is less than the [\d.]+ times by which",
    "--reach 0": r"reach = 0.0 is invalid",
    "--adapter.rank 4": r"adapter.rank and train.freeze are unknown to slipstream tune",
    "--trials 20%": r"trials = '20%' needs the weights to try: give --model.initial",
    "--tokens-before 1e6": r"tokens_before = 1000000.0 needs --model.initial",
    "--model.num-heads 2 --tokens 1e7 --budget 2%": r"model.num_heads = 2 leaves no three smaller models",
    "--laws none.json": r"laws = 'none.json' cannot be read \(No such file or directory\)",
    "--laws none.json --budget 2%": r"budget and laws are two ways to get laws",
    "--optimizer.name torch.optim.SGD": r"optimizer.name = 'torch.optim.SGD' has no law",
    "--model.initial nothing": r"model.initial = 'nothing' has no config.json",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_a_mistake_is_one_sentence(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert tune(*arguments.split(), tokens=20e3) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and re.search(REFUSED[arguments], said), said
    assert not list(tmp_path.iterdir())


def test_the_bottom_of_a_valley_with_noise_is_found_from_all_points_that_are_close():
    losses = {2.0**x: 1 + 0.002 * x**2 for x in range(-3, 4)} | {8.0: 1.5}
    assert trials.bottom(losses)[0] == pytest.approx(1)
    losses[4.0] = 0.999  # the lowest by chance, beside a wall
    assert 1 < trials.bottom(losses, within=0.03)[0] < 2 < 2.5 < trials.bottom(losses)[0]
    assert trials.bottom({1.0: 3.0, 2.0: 2.0}) == (2.0, 2.0) == trials.bottom({1.0: 3.0, 2.0: 2.0, 4.0: math.inf})
