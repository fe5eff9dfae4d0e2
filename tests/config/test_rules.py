"""The configuration: TOML in and out, and every mistake in one sentence that names field, value and remedy."""

import dataclasses
import math
from pathlib import Path

import pytest
from settings import changed

from slipstream.config.models import model_of
from slipstream.config.optimizers import parameter_groups, peak_rates
from slipstream.config.rules import validate
from slipstream.config.schema import Config
from slipstream.config.toml import load_toml, to_toml
from slipstream.errors import ConfigError

RECIPES = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


def round_trip(config: Config, folder: Path) -> Config:
    path = folder / "config.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    return load_toml(path)


def sentence_about(text: str | bytes, folder: Path) -> str:
    path = folder / "config.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        validate(load_toml(path))
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


# ---- TOML in and out


def test_the_default_survives_a_round_trip(tmp_path):
    assert round_trip(Config(), tmp_path) == Config()


def test_an_empty_file_is_the_default(tmp_path):
    (tmp_path / "empty.toml").write_text("")
    assert load_toml(tmp_path / "empty.toml") == Config()


def test_every_kind_of_value_survives_a_round_trip(tmp_path):
    config = changed(
        Config(),
        model__vocab_size=512,
        model__tied_embeddings=False,
        data__sources=("a.txt", "b/*.txt"),
        pipeline__layers_per_stage=(1, 2, 3),
        optimizer__learning_rate=1e-05,
        optimizer__arguments={"momentum": 0.9, "strange key": 1e22},
        optimizer__nesterov=False,
        train__seed=-(2**70),
    )
    assert round_trip(config, tmp_path) == config


@pytest.mark.parametrize(
    "name", ['quo"te', "back\\slash", "tab\tnew\nline\r", "ünï 漢字 🚀", "bell\x07 del\x7f nul\x00"]
)
def test_every_text_survives_a_round_trip(name, tmp_path):
    config = changed(Config(), run__name=name, data__sources=(name, name))
    assert round_trip(config, tmp_path) == config


def test_whole_numbers_are_numbers(tmp_path):
    (tmp_path / "c.toml").write_text("[optimizer]\nlearning_rate = 1\narguments = {momentum = 1}")
    section = load_toml(tmp_path / "c.toml").optimizer
    assert isinstance(section.learning_rate, float)
    assert isinstance(section.arguments["momentum"], float)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_valid(path):
    validate(load_toml(path))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no\.toml cannot be read \(No such file or directory\): check the path"):
        load_toml(tmp_path / "no.toml")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[train\nsteps = 3", "is not valid TOML"),
        (b"\xff", "is not valid TOML"),
        ("[train]\nsteps = 1" + "0" * 5000, "is not valid TOML"),
        ("[trian]\nsteps = 3", "trian is unknown: did you mean train?"),
        ("[train]\nstep = 3", "train.step is unknown: did you mean steps?"),
        ("steps = 3", "steps is unknown: did you mean train.steps?"),
        (
            "zzz = 3",
            "zzz is unknown: known are model, data, pipeline, optimizer, train, adapter, evaluation, checkpoint, run",
        ),
        ("train = 3", "train = 3 is not a section: write it as a TOML table"),
        ("[[train]]\nsteps = 3", "is not a section: write it as a TOML table"),
        ("[train]\nsteps = '3'", "train.steps = '3' has the wrong type: write a whole number"),
        ("[train]\nsteps = 3.0", "train.steps = 3.0 has the wrong type: write a whole number"),
        ("[train]\nsteps = true", "train.steps = True has the wrong type: write a whole number"),
        ("[run]\noverwrite = 1", "run.overwrite = 1 has the wrong type: write true or false"),
        ("[run]\nname = 1", "run.name = 1 has the wrong type: write a text"),
        ("[optimizer]\nlearning_rate = false", "optimizer.learning_rate = False has the wrong type: write a number"),
        ("[optimizer]\nlearning_rate = 1" + "0" * 400, "is too large: write a smaller number"),
        ("[optimizer.arguments]\nnesterov = true", "optimizer.arguments.nesterov = True has the wrong type"),
        ("[data]\nsources = 'a.txt'", "data.sources = 'a.txt' has the wrong type: write a list, each item a text"),
        ("[pipeline]\nlayers_per_stage = [1, 'x']", "pipeline.layers_per_stage = 'x' has the wrong type"),
        ("[train]\ndevice = 'tpu'", "train.device = 'tpu' is unknown: choose one of auto, cpu, cuda"),
        ("[train]\ndevice = 3", "train.device = 3 has the wrong type: write one of auto, cpu, cuda"),
        ("[model]\ndim = '16'", "model.dim = '16' has the wrong type: write a whole number"),
        ("[optimizer]\nlearning_rate = nan", "optimizer.learning_rate = nan is not finite"),
    ],
)
def test_a_mistake_in_a_file_is_one_sentence(text, sentence, tmp_path):
    assert sentence in sentence_about(text, tmp_path)


# ---- what cannot be


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"train__steps": 0}, "train.steps = 0 is too small: use 1 or more"),
        ({"train__microbatch_size": -1}, "train.microbatch_size = -1 is too small: use 1 or more"),
        ({"pipeline__stages": 0}, "pipeline.stages = 0 is too small: use 1 or more"),
        ({"optimizer__learning_rate": -0.1}, "optimizer.learning_rate = -0.1 is too small: use 0 or more"),
        ({"optimizer__clip_norm": -1.0}, "optimizer.clip_norm = -1.0 is too small: use 0 or more"),
        ({"optimizer__weight_decay": math.inf}, "optimizer.weight_decay = inf is not finite"),
        ({"optimizer__error_feedback": math.nan}, "optimizer.error_feedback = nan is not finite"),
        ({"optimizer__arguments": {"momentum": math.nan}}, "optimizer.arguments.momentum = nan is not finite"),
        ({"optimizer__lookahead": 21.0}, "optimizer.lookahead = 21.0 is invalid: use 0 to 20, where with"),
        ({"optimizer__lookahead": -1.0}, "optimizer.lookahead = -1.0 is invalid"),
        ({"optimizer__beta1": 1.0}, "optimizer.beta1 = 1.0 is invalid: use at least 0 and less than 1"),
        (
            {"optimizer__balance_rate": 0.1},
            "balances experts, and model.preset = 'tiny' has none: leave it out, or set",
        ),
        ({"model__preset": "moe-2b", "model__num_experts": 0, "optimizer__balance_rate": 0.1}, "'moe-2b' has none"),
        (
            {"model__preset": "moe-2b", "optimizer__balance_rate": -0.1},
            "optimizer.balance_rate = -0.1 is too small: use 0 or more",
        ),
        ({"optimizer__final_fraction": 1.5}, "optimizer.final_fraction = 1.5 is too large: use 1 or less"),
        ({"optimizer__schedule": "step"}, "optimizer.schedule = 'step' is unknown: choose one of constant, cosine"),
        ({"optimizer__warmup_steps": 201}, "optimizer.warmup_steps = 201 does not fit into train.steps = 200"),
        ({"optimizer__decay_steps": -1}, "optimizer.decay_steps = -1 does not fit into train.steps = 200"),
        (
            {"optimizer__schedule": "wsd", "optimizer__warmup_steps": 150, "optimizer__decay_steps": 51},
            "optimizer.decay_steps = 51 is more than the 50 of train.steps = 200 that optimizer.warmup_steps = 150",
        ),
        (
            {"optimizer__schedule": "1-sqrt", "optimizer__warmup_steps": 150, "optimizer__decay_steps": 51},
            "optimizer.decay_steps = 51 is more than the 50 of train.steps = 200 that optimizer.warmup_steps = 150",
        ),
        ({"run__profile_steps": "20"}, "run.profile_steps = '20' is invalid: write the first and the last step to"),
        ({"run__profile_steps": "0:3"}, "run.profile_steps = '0:3' is invalid: write the first and the last step to"),
        ({"run__profile_steps": "23:20"}, "run.profile_steps = '23:20' is invalid: write the first and the last step"),
        ({"run__profile_steps": f"1:{'9' * 5000}"}, "is invalid: write the first and the last step to record"),
        ({"run__profile_steps": "199:201"}, "run.profile_steps = '199:201' ends after train.steps = 200: record"),
        (
            {"run__profile_steps": "20:23", "pipeline__transport": "thread"},
            "and pipeline.transport = 'thread' has all in one: set pipeline.transport = 'process'",
        ),
        ({"optimizer__arguments": {"x": 1.0}}, "is for other optimizers, and muon has fields of its own"),
        (
            {"optimizer__name": "torch.optim.SGD", "optimizer__arguments": {"lr": 1.0}},
            "optimizer.arguments.lr = 1.0 has a field of its own: set optimizer.learning_rate",
        ),
        (
            {"optimizer__name": "torch.optim.SGD", "optimizer__arguments": {"weight_decay": 1.0}},
            "optimizer.arguments.weight_decay = 1.0 has a field of its own: set optimizer.weight_decay",
        ),
        ({"model__preset": "huge"}, "model.preset = 'huge' is unknown: choose one of tiny, small, 135m, 360m, 1b"),
        ({"pipeline__schedule": "zb"}, "pipeline.schedule = 'zb' is unknown: choose one of gpipe, one_f_one_b, two_bw"),
        ({"pipeline__depth": "deep"}, "pipeline.depth = 'deep' is unknown: choose one of minimum, double"),
        (
            {"pipeline__depth": "double", "pipeline__schedule": "gpipe"},
            "pipeline.depth = 'double' is made for two_bw, not for gpipe: set pipeline.depth = 'minimum'",
        ),
        (
            {"pipeline__stages": 4, "pipeline__microbatches": 3},
            "pipeline.microbatches = 3 is invalid: 3 microbatches are too few for two_bw on 4 stages at minimum depth: "
            "use at least 4",
        ),
        (
            {"pipeline__schedule": "paci"},
            "paci keeps none: set optimizer.error_feedback = 0, or pipeline.schedule = 'two_bw'",
        ),
        (
            {"pipeline__schedule": "paci", "optimizer__error_feedback": 0.0, "train__recompute_every": 2},
            "train.recompute_every = 2 computes blocks again with the weights of their forward, and paci has "
            "overwritten them: set train.recompute_every = 0, or pipeline.schedule = 'two_bw'",
        ),
        (
            {"pipeline__schedule": "paci", "optimizer__error_feedback": 0.0, "train__compile": True},
            "train.compile = true leaves it to the compiler what a backward keeps of the forward's weights, and under "
            "paci it must read the newest: set train.compile = false, or pipeline.schedule = 'two_bw'",
        ),
        ({"train__loss_chunk_tokens": -1}, "train.loss_chunk_tokens = -1 is too small: use 0 or more"),
        ({"train__recompute_every": -1}, "train.recompute_every = -1 is too small: use 0 or more"),
        ({"pipeline__timeout_seconds": 0.0}, "pipeline.timeout_seconds = 0.0 is too small: use 0.01 or more"),
        ({"pipeline__timeout_seconds": 1e9}, "pipeline.timeout_seconds = 1000000000.0 is too large: use 1000000 or"),
        ({"run__name": ""}, "run.name = '' is not the name of a folder"),
        ({"run__name": ".."}, "run.name = '..' is not the name of a folder"),
        ({"run__name": "a/b"}, "run.name = 'a/b' is not the name of a folder"),
        ({"run__name": "a\x00b"}, r"run.name = 'a\x00b' is not the name of a folder"),
        ({"run__name": "a\udcff"}, r"run.name = 'a\udcff' is not Unicode: write it in UTF-8"),
        ({"run__folder": ""}, "run.folder = '' is not a path"),
        ({"data__sources": ("a\udcff",)}, r"data.sources[0] = 'a\udcff' is not Unicode"),
    ],
)
def test_an_impossible_value_is_one_sentence(fields, sentence):
    with pytest.raises(ConfigError) as caught:
        validate(changed(Config(), **fields))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_number_may_be_nan():
    """Whatever field is added later."""
    for section in dataclasses.fields(Config):
        for field in dataclasses.fields(getattr(Config(), section.name)):
            if isinstance(field.default, float):
                with pytest.raises(ConfigError, match=rf"{section.name}\.{field.name} = nan is not finite"):
                    validate(changed(Config(), **{f"{section.name}__{field.name}": math.nan}))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"model__num_experts": 4}, "model.experts_per_token is 0 of 4 experts: set it to 2"),
        ({"model__expert_dim": 4}, "model.expert_dim is 4, but model.num_experts is 0 and the model dense"),
        ({"model__preset": "moe-2b", "model__num_layers": 0}, "model.num_layers is 0: set it to 1 or more"),
    ],
)
def test_experts_that_cannot_be_are_one_sentence(fields, sentence):
    with pytest.raises(ConfigError) as caught:
        model_of(changed(Config(), **fields), 0)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_experts_are_balanced_by_a_group_of_their_own_whatever_the_optimizer():
    experts = {"model__num_experts": 4, "model__experts_per_token": 2, "model__expert_dim": 8}
    for name in ("muon", "adamw", "torch.optim.SGD"):
        dense = changed(Config(), optimizer__name=name)
        sparse = changed(dense, **experts)
        assert [group.name for group in parameter_groups(sparse)] == [
            "balance",
            *(group.name for group in parameter_groups(dense)),
        ]
        assert peak_rates(sparse) == {"balance": 0.001, **peak_rates(dense)}
    assert peak_rates(changed(sparse, optimizer__balance_rate=0.5))["balance"] == 0.5
