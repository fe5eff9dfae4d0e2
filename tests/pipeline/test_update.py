"""One stage's update without a pipeline: the predicted version, with and without copies of the masters."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from slipstream import AdamW, Group
from slipstream.optim import muon_and_adamw
from slipstream.pipeline.update import Updater
from slipstream.pipeline.weight_versions import WeightVersions, is_mixed, weight_layout


def run(track_alignment: bool, num_steps: int = 4) -> tuple[list[Tensor], list[Tensor]]:
    """The newest version and the masters. Where updates are compared, the copies are needed and made."""
    torch.manual_seed(0)
    versions = WeightVersions(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)).double(), weight_layout(2, compares=True))
    groups = muon_and_adamw(
        muon_lr=0.02,
        adamw_lr=0.01,
        adamw_predictor="nesterov",
        weight_decay=0.1,
        error_feedback=0.5,
        muon_ns_dtype=torch.float64,
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


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=["alike", "coarse"])
@pytest.mark.parametrize("predictor", ["nesterov", "last"])
def test_an_update_is_compared_with_what_was_expected_of_it(predictor: str, dtype: torch.dtype | None) -> None:
    """Beside twins, stepped with and without Nesterov's term."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5)).double()
    twins = [[nn.Parameter(p.detach().clone()) for p in model.parameters()] for _ in range(2)]
    plain, nesterov = AdamW(twins[0], lr=0.01), AdamW(twins[1], lr=0.01, nesterov=True)
    versions = WeightVersions(model, weight_layout(2, compares=True, is_mixed=is_mixed(model, dtype)), dtype=dtype)
    groups = [Group("all", partial(AdamW, lr=0.01, predictor=predictor), error_feedback=0.5)]
    updater = Updater(versions, groups, {}, lambda step: 1.0, True, torch.device("cpu"))
    expected = None
    for step in range(4):
        gradients = {name: torch.randn_like(master) for name, master in versions.masters.items()}
        steps = []
        for optimizer, owned in ((plain, twins[0]), (nesterov, twins[1])):
            before = [p.detach().clone() for p in owned]
            for parameter, gradient in zip(owned, gradients.values(), strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
            steps.append(torch.cat([(a - b.detach()).flatten() for a, b in zip(before, owned, strict=True)]))
        updater.apply(step, gradients, [1.0], horizon=1)
        versions.close_next()
        update = steps[0]
        if expected is not None:
            wanted = torch.stack([update @ expected, update @ update, expected @ expected])
            torch.testing.assert_close(updater.products[0], wanted, rtol=1e-9, atol=0)
        expected = steps[1] if predictor == "nesterov" else update
