"""The smaller models of a target, and the trunks that train them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from settings import changed
from tuning_target import TARGET

from slipstream.cli import tune as command
from slipstream.config.models import model_of
from slipstream.config.schema import Config
from slipstream.model.registry import preset
from slipstream.tools.study.delayed import DelayedRun
from slipstream.tools.tune.advice import Size
from slipstream.tools.tune.proxies import choose_proxies, planned_flops, proxy_of, smaller
from slipstream.tools.tune.trunks import run_trunk
from slipstream.train.build import build_components


def test_a_smaller_model_keeps_the_family():
    big = preset("1b")
    small = smaller(big, 8, 1)
    assert (small.head_size, small.num_heads // small.num_kv_heads) == (big.head_size, 4)
    assert (small.dim, small.num_layers, small.hidden_dim) == (512, 4, 2048)
    assert small.vocab_size == big.vocab_size
    sparse = smaller(preset("moe-10b"), 3, 1)
    sparse.validate()
    assert (sparse.num_experts, sparse.experts_per_token, sparse.expert_dim) == (64, 6, 192)
    assert smaller(big, 1, 6).num_layers == 6


@pytest.mark.parametrize("budget", [0.02, 0.06])
@pytest.mark.parametrize("name", ["small", "135m", "1b", "moe-2b"])
def test_a_small_budget_buys_three_proxies_of_presets(name, budget):
    config = changed(Config(), model__preset=name)
    model = model_of(config, 0)
    size, tokens = Size.of(model), 20.0 * model.num_active_parameters()
    found = choose_proxies(config, model, tokens, budget, command.TuneArguments.reach)
    counts = [proxy.size.parameters for proxy in found]
    assert counts == sorted(counts) and counts[0] < counts[1] < counts[2] < size.parameters / 4
    assert planned_flops(found) <= budget * size.flops_per_token * tokens
    (share,) = {round(proxy.tokens / proxy.size.parameters / (tokens / size.parameters), 6) for proxy in found}
    assert share in (0.5, 1.0)
    if budget == 0.06:
        assert share == 1.0 and tokens < 32 * found[-1].tokens  # who pays more is nearer


def test_proxies_have_the_targets_delay_and_evaluate_the_same_text():
    config = changed(TARGET, pipeline__replicas=2, pipeline__stages=3, pipeline__microbatches=3, train__compile=True)
    model = model_of(config, 0)
    found = choose_proxies(config, model, 1e7, 10, 30)
    texts = set()
    for proxy in found:
        for sequences in (proxy.batch // 2, proxy.batch, proxy.batch * 2):
            cell = proxy.cell(0.01, sequences, True)
            cell.validate()
            assert cell.stage_delays == (1,) and proxy.cell(0.01, sequences, False).is_synchronous
            components = build_components(cell.config)
            assert components.batches.num_tokens(0) == sequences * 16
            texts.add(tuple(components.validation.parts[0].starts))
    assert len(texts) == 1


def test_delays_that_differ_between_stages_are_kept():
    config = changed(TARGET, pipeline__schedule="pipedream", pipeline__stages=4, pipeline__microbatches=4)
    config = changed(config, model__num_layers=4)
    found = choose_proxies(config, model_of(config, 0), 1e7, 10, 30)
    assert {proxy.cell(0.01, proxy.batch, True).stage_delays for proxy in found} == {(3, 2, 1, 0)}


def test_a_trunk_ends_where_runs_of_each_length_end(short):
    """Losses of the branches, bitwise."""
    model = model_of(TARGET, 0)
    proxy = proxy_of(TARGET, model, Size.of(model), 8e3)
    cell, horizons = proxy.cell(0.01, proxy.batch, True), proxy.horizons(proxy.batch)
    branches = run_trunk(cell, horizons, lambda flops: None, 1.0)
    for steps, loss in zip(horizons, branches, strict=True):
        config = changed(cell.config, train__steps=steps, optimizer__decay_steps=steps // 5)
        alone = DelayedRun(dataclasses.replace(cell, config=config), build_components(config), torch.device("cpu"))
        list(alone.train())
        assert alone.evaluate().item() == loss


def test_a_trunk_that_diverges_has_no_loss(short):
    model = model_of(TARGET, 0)
    proxy = proxy_of(changed(TARGET, optimizer__clip_norm=0.0), model, Size.of(model), 1e4)
    cell = proxy.cell(1e20, proxy.batch, True)
    assert run_trunk(cell, proxy.horizons(proxy.batch), lambda flops: None, 1.0) == [None, None, None]
