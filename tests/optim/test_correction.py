"""Error feedback without a buffer, and the diagnostics that say whether it pays off."""

from __future__ import annotations

import math

import pytest
import torch
from muon_rule import muon_update
from torch import Tensor

from slipstream.optim import Alignment, adamw_update, predict, update_products

SHAPE = (6, 10)


def random(seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class Rule:
    """A rule with its state and a learning rate that changes at every step."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = [torch.zeros(SHAPE, dtype=torch.float64) for _ in range(2)]
        self.step = 0

    def update(self, gradient: Tensor) -> Tensor:
        self.step += 1
        lr = 0.05 * (1.2 + math.sin(self.step))
        if self.name == "sgd":
            return lr * gradient
        if self.name == "adamw":
            return adamw_update(
                gradient,
                *self.state,
                step=self.step,
                lr=lr,
                beta1=0.9,
                beta2=0.95,
                eps=1e-8,
                nesterov=True,
            )
        return muon_update(
            gradient,
            self.state[0],
            lr=lr,
            beta=0.9,
            nesterov=True,
            ns_steps=5,
            ns_dtype=torch.float64,
            scale="spectral",
        )


def gradient_at(x: Tensor, batch: int) -> Tensor:
    """Of a quadratic around a target of the batch's own."""
    return x - random(100 + batch)


def literal_trajectory(name: str, lam: float, steps: int) -> list[Tensor]:
    """The paper's form: x[t+1] = x[t] - u[t-1] - lam (u[t-1] - u[t-2]), both updates kept."""
    rule = Rule(name)
    x = random(0)
    last = before_last = torch.zeros(SHAPE, dtype=torch.float64)
    trajectory = [x]
    for batch in range(steps):
        update = rule.update(gradient_at(x, batch))
        x = x - last - lam * (last - before_last)
        last, before_last = update, last
        trajectory.append(x)
    return trajectory


def buffer_free_trajectory(name: str, lam: float, steps: int) -> list[Tensor]:
    """Ours: a master and two working copies; batch t runs in slot t % 2, and its update refills that slot."""
    rule = Rule(name)
    master = random(0)
    slots = [master.clone(), master.clone()]
    trajectory = [slots[0].clone()]
    for batch in range(steps):
        working = slots[batch % 2]
        update = rule.update(gradient_at(working, batch))
        working.copy_(master)
        master -= update
        predict([working], [master], lam)
        trajectory.append(slots[(batch + 1) % 2].clone())
    return trajectory


@pytest.mark.parametrize("lam", [0.0, 0.6, 1.0, 1.5])
@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_buffer_free_form_follows_the_papers_for_50_steps(name: str, lam: float) -> None:
    literal, ours = (make(name, lam, 50) for make in (literal_trajectory, buffer_free_trajectory))
    assert torch.equal(ours[1], ours[0])
    assert not torch.equal(ours[2], ours[1])
    for a, b in zip(literal, ours, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_prediction_with_coefficient_one_rounds_only_twice(dtype: torch.dtype) -> None:
    working, master = random(1, dtype), random(2, dtype)
    expected = master + (master - working)
    predict([working], [master], 1.0)
    assert torch.equal(working, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_prediction_with_coefficient_zero_copies_the_master(dtype: torch.dtype) -> None:
    working, master = random(1).to(dtype), random(2).to(dtype)
    predict([working], [master], 0.0)
    assert torch.equal(working, master)


def test_prediction_leaves_the_master_alone_and_may_write_parameters() -> None:
    working, master = torch.nn.Parameter(random(1)), torch.nn.Parameter(random(2))
    predict([working], [master], 0.7)
    assert torch.equal(master, random(2))
    torch.testing.assert_close(working.detach(), random(2) - 0.7 * (random(1) - random(2)), rtol=0, atol=1e-15)


def test_prediction_into_a_live_version_makes_autograd_raise() -> None:
    working = torch.nn.Parameter(random(1))
    loss = working.square().sum()
    predict([working], [random(2)], 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_prediction_refuses_lists_of_different_length() -> None:
    with pytest.raises(ValueError, match="zip"):
        predict([random(1)], [random(1), random(2)], 1.0)


def test_products_are_the_inner_products_over_all_parameters() -> None:
    current = [(random(1), random(2)), (random(3), random(4))]
    previous = [(random(5), random(6)), (random(7), random(8))]
    u, v = (torch.cat([(a - b).flatten() for a, b in pairs]) for pairs in (current, previous))
    products = update_products(current, previous)
    assert products.dtype == torch.float64
    torch.testing.assert_close(products, torch.stack([u @ v, u @ u, v @ v]), rtol=1e-14, atol=0)
    assert torch.equal(current[0][0], random(1))


def test_previous_update_can_be_read_off_the_predicted_copy() -> None:
    lam, before, after, earlier = 0.5, random(1), random(2), random(3)
    predicted = before - lam * (earlier - before)
    products = update_products([(before, after)], [(predicted, before)], previous_scale=-1 / lam)
    expected = update_products([(before, after)], [(earlier, before)])
    torch.testing.assert_close(products, expected, rtol=1e-12, atol=0)


def test_the_scale_multiplies_the_previous_update() -> None:
    current, previous = [(random(1), random(2))], [(random(3), random(4))]
    scaled = update_products(current, previous, previous_scale=-3.0)
    factors = torch.tensor([-3.0, 1.0, 9.0], dtype=torch.float64)
    assert torch.equal(scaled, update_products(current, previous) * factors)


def test_products_see_updates_far_below_the_weights() -> None:
    weights = 1 + random(1, torch.float32).abs()
    step = torch.full(SHAPE, 2.0**-20)
    products = update_products([(weights, weights - step)], [(weights + step, weights)])
    assert Alignment.from_products(products.tolist()).cosine == pytest.approx(1.0, abs=1e-12)


def test_products_without_parameters_are_zero_and_undefined() -> None:
    alignment = Alignment.from_products(update_products([], []).tolist())
    assert math.isnan(alignment.cosine)
    assert math.isnan(alignment.best_coefficient)


def test_alignment_of_parallel_and_orthogonal_updates() -> None:
    assert Alignment.from_products([6.0, 4.0, 9.0]) == Alignment(cosine=1.0, best_coefficient=2 / 3)
    assert Alignment.from_products([0.0, 4.0, 9.0]) == Alignment(cosine=0.0, best_coefficient=0.0)


def test_best_coefficient_is_zero_when_the_next_update_vanishes() -> None:
    alignment = Alignment.from_products([0.0, 0.0, 9.0])
    assert math.isnan(alignment.cosine)
    assert alignment.best_coefficient == 0.0


def test_no_coefficient_predicts_better_than_the_best() -> None:
    u, v, zero = random(1) + random(2), random(2), torch.zeros(SHAPE, dtype=torch.float64)
    best = Alignment.from_products(update_products([(u, zero)], [(v, zero)]).tolist()).best_coefficient
    errors = [(u - lam * v).norm() for lam in (best - 0.01, best, best + 0.01)]
    assert errors[1] == min(errors)
