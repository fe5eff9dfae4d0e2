from __future__ import annotations

import pytest
import torch
from torch import nn

from slipstream.pipeline.weight_versions import WeightVersions, weight_layout


def test_writing_a_version_that_a_live_graph_reads_makes_autograd_raise():
    versions = WeightVersions(nn.Linear(3, 3), weight_layout(2))
    outputs = versions.module(0)(torch.ones(1, 3, requires_grad=True)).square().sum()
    versions.open_next()
    versions.close_next()
    versions.open_next()  # version 2 goes where version 0 was
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.backward()


def test_a_drifting_version_may_be_overwritten_and_the_backward_reads_the_new_weights():
    module = nn.Linear(3, 3, bias=False)
    versions = WeightVersions(module, weight_layout(1, 1, drifts=True))
    inputs = torch.ones(1, 3, requires_grad=True)
    outputs = versions.module(0)(inputs).sum()
    with torch.no_grad():
        versions.masters["weight"].fill_(2.0)
    outputs.backward()
    assert torch.equal(inputs.grad, torch.full((1, 3), 6.0))


def test_versions_that_are_gone_or_to_come_are_refused():
    versions = WeightVersions(nn.Linear(2, 2), weight_layout(2))
    for _ in range(2):
        versions.open_next()
        versions.close_next()
    assert versions.module(1) is not versions.module(2)
    for version in (0, 3):
        with pytest.raises(RuntimeError, match=f"version {version} is not kept"):
            versions.module(version)


def test_frozen_parameters_and_buffers_are_shared_by_all_versions():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module[0].bias.requires_grad_(False)
    versions = WeightVersions(module, weight_layout(2, 1, corrects=True))
    first, second, master = versions.module(0), versions._slots[1], versions.master_module()
    assert first[0].bias is second[0].bias is master[0].bias
    assert first[1].running_mean is second[1].running_mean is master[1].running_mean
    assert len({id(m[0].weight) for m in (first, second, master)}) == 3
    assert set(versions.masters) == {"0.weight", "1.weight", "1.bias"}


def test_a_weight_tied_within_a_stage_stays_tied_in_every_version():
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    module[1].weight = module[0].weight
    versions = WeightVersions(module, weight_layout(2, 1, corrects=True))
    for replica in (*versions._slots, versions.master_module()):
        assert replica[0].weight is replica[1].weight
