"""One stage's update without a pipeline: the predicted version, with and without copies of the masters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from slipstream.optim import muon_and_adamw
from slipstream.pipeline.update import Updater
from slipstream.pipeline.versions import WeightVersions


def run(track_alignment: bool, num_steps: int = 4) -> tuple[list[Tensor], list[Tensor]]:
    """The newest version and the masters. Where updates are compared, the copies are needed and made."""
    torch.manual_seed(0)
    versions = WeightVersions(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)).double(), 2, separate_masters=True)
    groups = muon_and_adamw(
        muon_lr=0.02, adamw_lr=0.01, weight_decay=0.1, error_feedback=0.5, muon_ns_dtype=torch.float64
    )
    updater = Updater(versions, groups, {}, lambda step: 1 / (1 + step), track_alignment, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    for step in range(num_steps):
        gradients = {
            name: torch.randn(master.shape, generator=generator, dtype=torch.float64)
            for name, master in versions.masters.items()
            if (name, step) != ("1.bias", 2)
        }
        updater.apply(step, gradients, [1.0, 0.5], horizon=1)
        versions.close_next()
        assert all(master.grad is None for master in versions.masters.values())
    newest = versions.parameters(versions.newest)
    return [p.detach() for p in newest.values()], [p.detach() for p in versions.masters.values()]


def test_a_prediction_made_in_the_step_is_that_from_copies() -> None:
    (newest, masters), (from_copies, same_masters) = run(track_alignment=False), run(track_alignment=True)
    for a, b in zip([*newest, *masters], [*from_copies, *same_masters], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-14)
    assert not torch.equal(newest[0], masters[0])


def test_no_copy_is_made_where_the_optimizer_predicts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("predicted from copies")

    monkeypatch.setattr("slipstream.pipeline.update.predict", refuse)
    run(track_alignment=False)
    with pytest.raises(AssertionError, match="from copies"):
        run(track_alignment=True)
