"""What a configuration leaves open, and what is chosen for it."""

from __future__ import annotations

import pytest
import torch
from settings import changed

from slipstream.config.defaults import LEARNING_RATES, settled
from slipstream.config.optimizers import learning_rate, peak_rates
from slipstream.config.schema import Config
from slipstream.errors import ConfigError
from slipstream.optim import RECIPES


@pytest.mark.parametrize(("num_gpus", "device"), [(0, "cpu"), (1, "cpu"), (2, "cuda"), (8, "cuda")])
def test_two_stages_go_to_gpus_if_there_are_two(monkeypatch, num_gpus, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert settled(Config()).train.device == device
    assert settled(changed(Config(), train__device="cpu")).train.device == "cpu"


@pytest.mark.parametrize("how", [{"transport": "thread"}, {"share_gpu": True}, {"backend": "gloo"}])
def test_stages_that_share_a_gpu_want_one(monkeypatch, how):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = changed(Config(), **{f"pipeline__{name}": value for name, value in how.items()})
    assert settled(config).train.device == "cuda"
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert settled(config).train.device == "cuda" and settled(Config()).train.device == "cpu"


def test_gpus_compute_in_bfloat16_and_keep_masters_in_float32():
    config = settled(changed(Config(), train__device="cuda"))
    assert (config.train.dtype, config.train.compute_dtype) == ("float32", "bfloat16")
    assert config.optimizer.newton_schulz_dtype == "bfloat16"
    asked = changed(Config(), train__device="cuda", train__compute_dtype="float32")
    assert settled(asked).train.compute_dtype == "float32"
    in_float64 = settled(changed(Config(), train__device="cuda", train__dtype="float64"))
    assert in_float64.train.compute_dtype is None and in_float64.optimizer.newton_schulz_dtype == "float32"


def test_cpus_compute_in_what_the_weights_are_in():
    config = settled(changed(Config(), train__device="cpu"))
    assert config.train.compute_dtype is None and config.optimizer.newton_schulz_dtype == "float32"


def test_adamws_rate_is_given_where_it_takes_the_rest():
    assert settled(Config()).optimizer.adamw_learning_rate == 0.003
    assert settled(changed(Config(), optimizer__name="adamw")).optimizer.adamw_learning_rate is None


def test_what_is_settled_stays_so():
    once = settled(Config())
    assert settled(once) == once


@pytest.mark.parametrize(("name", "rate"), [("muon", 0.02), ("adamw", 0.001), ("lion", 0.0001), ("soap", 0.003)])
def test_every_optimizer_begins_with_its_own_rate(name, rate):
    assert settled(changed(Config(), optimizer__name=name)).optimizer.learning_rate == rate
    given = changed(Config(), optimizer__name=name, optimizer__learning_rate=0.5)
    assert settled(given).optimizer.learning_rate == 0.5


def test_all_optimizers_that_are_known_by_name_have_one():
    assert set(LEARNING_RATES) == {"muon", "adamw", *RECIPES}


def test_a_class_of_torch_has_its_own():
    assert peak_rates(changed(Config(), optimizer__name="torch.optim.RMSprop")) == {"all": 0.01}


class WithoutRate(torch.optim.SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr)


def test_a_class_without_one_is_refused():
    path = f"{__name__}.WithoutRate"
    with pytest.raises(ConfigError, match=r"learning_rate is missing, and .* has none to begin with: give one"):
        settled(changed(Config(), optimizer__name=path))
    assert peak_rates(changed(Config(), optimizer__name=path, optimizer__learning_rate=1.0)) == {"all": 1.0}


@pytest.mark.parametrize(("steps", "warm_up"), [(200, 20), (10_000, 1000), (1_000_000, 1000)])
def test_a_warm_up_is_a_tenth_of_a_short_run_and_no_more_of_a_long_one(steps, warm_up):
    rate = learning_rate(changed(Config(), train__steps=steps, optimizer__schedule="constant"))
    assert rate(warm_up - 2) < 1 and rate(warm_up - 1) == pytest.approx(1)
