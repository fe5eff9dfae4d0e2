"""The rules on their own: orthogonalisation, agreement with torch, and what they leave alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from muon_rule import muon_direction, muon_update
from torch import Tensor, nn

from slipstream.optim import rules
from slipstream.optim.rules import SCALES, adamw_update, newton_schulz, shape_scale

MUON: dict[str, Any] = {
    "lr": 0.02,
    "beta": 0.9,
    "nesterov": True,
    "ns_steps": 5,
    "ns_dtype": torch.float64,
    "scale": "spectral",
}
ADAMW: dict[str, Any] = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "nesterov": False}

# Some CPUs have no bf16 matrix product and say so once.
quiet_bf16 = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def matrix_with_singular_values(rows: int, cols: int, low: float, high: float) -> Tensor:
    u, _, vh = torch.linalg.svd(random(rows, cols), full_matrices=False)
    return u @ torch.diag(torch.logspace(0, 1, min(rows, cols), base=high / low, dtype=u.dtype) * low) @ vh


@quiet_bf16
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(16, 16), (8, 24), (24, 8)])
def test_newton_schulz_brings_singular_values_into_its_band(shape: tuple[int, int], dtype: torch.dtype) -> None:
    orthogonal = newton_schulz(matrix_with_singular_values(*shape, low=0.3, high=30.0), dtype=dtype)
    values = torch.linalg.svdvals(orthogonal)
    assert values.min() > 0.65
    assert values.max() < 1.25


def test_newton_schulz_keeps_the_singular_vectors() -> None:
    matrix = matrix_with_singular_values(12, 20, low=1.0, high=10.0)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    in_basis = u.T @ newton_schulz(matrix, dtype=torch.float64) @ vh.T
    torch.testing.assert_close(in_basis, torch.diag(in_basis.diag()), rtol=0, atol=1e-12)


def test_newton_schulz_commutes_with_transposition() -> None:
    matrix = random(24, 8)
    tall, wide = (newton_schulz(m, dtype=torch.float64) for m in (matrix, matrix.T))
    torch.testing.assert_close(tall, wide.T, rtol=0, atol=1e-12)


def test_newton_schulz_treats_a_stack_as_separate_matrices() -> None:
    # Sizes differ by a factor of a million: a norm shared by the stack would show.
    stack = random(3, 6, 10) * torch.tensor([1e-3, 1.0, 1e3], dtype=torch.float64)[:, None, None]
    one_by_one = torch.stack([newton_schulz(m, dtype=torch.float64) for m in stack])
    torch.testing.assert_close(newton_schulz(stack, dtype=torch.float64), one_by_one, rtol=0, atol=1e-12)


@quiet_bf16
@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (12, 12)])
def test_newton_schulz_in_bf16_is_the_same_iteration(shape: tuple[int, int]) -> None:
    sizes = torch.tensor([1e-3, 1.0, 1e3], dtype=torch.float64)[:, None, None]
    stack = torch.stack([matrix_with_singular_values(*shape, low=0.3, high=30.0)] * 3) * sizes
    found = newton_schulz(stack, dtype=torch.bfloat16, scale=0.25)
    expected = newton_schulz(stack, dtype=torch.float64, scale=0.25)
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() < 0.06 * b.norm()


@quiet_bf16
@pytest.mark.parametrize("steps", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("decades", [0, 1, 2, 4])
@pytest.mark.parametrize("is_dominated", [False, True])
def test_steps_at_once_err_hardly_more_than_one_by_one(
    is_dominated: bool, decades: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Singular values over so many decades, or one above all others: what A loses of the small ones in rounding, no
    later step may blow up."""
    low = 10.0**-decades
    matrix = matrix_with_singular_values(32, 128, low=low, high=low if is_dominated else 1.0)
    if is_dominated:
        left, right = random(32, 1, seed=1), random(1, 128, seed=2)
        matrix = matrix + left @ right / (left.norm() * right.norm())
    monkeypatch.setattr(rules, "halves_products", lambda X: True)
    expected = newton_schulz(matrix, steps, torch.float64)
    together = newton_schulz(matrix, steps, torch.bfloat16)
    monkeypatch.undo()
    one_by_one = newton_schulz(matrix, steps, torch.bfloat16)
    assert not torch.equal(together, one_by_one)
    assert (together - expected).norm() < 4 * (one_by_one - expected).norm()


@quiet_bf16
@pytest.mark.parametrize("shape", [(3, 8, 24), (3, 24, 8)])
def test_newton_schulz_in_bf16_lays_its_result_out_like_its_input(shape: tuple[int, ...]) -> None:
    """A transposed update would be slow to subtract."""
    assert newton_schulz(random(*shape, dtype=torch.bfloat16), dtype=torch.bfloat16).is_contiguous()


@quiet_bf16
@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("shape", [(3, 8, 24), (3, 24, 8)])
def test_newton_schulz_writes_its_input_only_if_it_may(shape: tuple[int, ...], steps: int) -> None:
    matrices = random(*shape, dtype=torch.bfloat16)
    kept = newton_schulz(matrices, steps, torch.bfloat16)
    assert torch.equal(matrices, random(*shape, dtype=torch.bfloat16))
    assert torch.equal(newton_schulz(matrices, steps, torch.bfloat16, may_overwrite=True), kept)


@quiet_bf16
def test_newton_schulz_in_bf16_takes_a_tiny_matrix_for_noise() -> None:
    matrix = random(6, 10, dtype=torch.float32)
    matrix /= matrix.norm()
    full, half = (newton_schulz(matrix * size, dtype=torch.bfloat16) for size in (2e-11, 1e-11))
    assert 0 < half.norm() < 0.05
    assert (full - 2 * half).norm() < 0.02 * full.norm()
    assert newton_schulz(torch.zeros(4, 6), dtype=torch.bfloat16).count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_newton_schulz_multiplies_by_a_scale(dtype: torch.dtype) -> None:
    matrix = random(6, 10)
    whole, scaled = (newton_schulz(matrix, dtype=dtype, scale=scale) for scale in (1.0, 0.25))
    assert torch.equal(scaled, whole / 4)


def test_newton_schulz_refuses_no_steps() -> None:
    with pytest.raises(ValueError, match="steps is 0: use at least 1"):
        newton_schulz(random(6, 10), steps=0)


@quiet_bf16
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_newton_schulz_returns_the_dtype_it_was_given(dtype: torch.dtype) -> None:
    assert newton_schulz(random(4, 6).to(dtype)).dtype == dtype
    assert newton_schulz(random(4, 6), dtype=dtype).dtype == torch.float64


def test_newton_schulz_maps_zero_to_zero() -> None:
    assert newton_schulz(torch.zeros(4, 6)).count_nonzero() == 0


def test_newton_schulz_refuses_a_vector() -> None:
    with pytest.raises(ValueError, match=r"shape \(5,\) is no matrix: pass"):
        newton_schulz(torch.ones(5))


def test_summation_noise_stays_small_in_fp32_and_fp64() -> None:
    """Why the dtype can be chosen: METHOD.md, section 5."""
    matrix = random(16, 32)
    noisy = matrix * (1 + 8e-8 * random(16, 32, seed=1))
    for dtype, bound in [(torch.float32, 1e-5), (torch.float64, 1e-6)]:
        moved = newton_schulz(noisy, dtype=dtype) - newton_schulz(matrix, dtype=dtype)
        assert moved.abs().max() < bound


def test_shape_scales_are_the_usual_ones() -> None:
    assert shape_scale("spectral", 32, 8) == 2.0
    assert shape_scale("spectral", 8, 32) == 1.0
    assert shape_scale("match_rms_adamw", 8, 25) == shape_scale("match_rms_adamw", 25, 8) == 1.0
    with pytest.raises(ValueError, match="scale 'rms' is unknown: choose one of spectral, match_rms_adamw"):
        shape_scale("rms", 8, 8)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_muon_is_torch_muon_with_another_newton_schulz(
    shape: tuple[int, int], nesterov: bool, scale: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exact(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
        assert (coefficients, eps) == (rules.COEFFICIENTS, rules.EPS)
        return newton_schulz(matrix, steps, torch.float64)

    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", exact)
    theirs, ours = nn.Parameter(random(*shape)), random(*shape)
    momentum = torch.zeros_like(ours)
    torch_muon = torch.optim.Muon(
        [theirs],
        lr=0.02,
        momentum=0.9,
        nesterov=nesterov,
        weight_decay=0.0,
        adjust_lr_fn="original" if scale == "spectral" else scale,
    )
    for step in range(5):
        theirs.grad = random(*shape, seed=step)
        torch_muon.step()
        ours -= muon_update(theirs.grad, momentum, **{**MUON, "nesterov": nesterov, "scale": scale})
        torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("lookahead", [0.0, 1.0, 2.5, 10.0])
def test_the_direction_looks_as_far_ahead_as_it_is_told(lookahead: float) -> None:
    momentum, gradient = random(4, 3, seed=1), random(4, 3, seed=2)
    after = 0.9 * momentum + 0.1 * gradient
    direction = muon_direction(gradient, momentum, beta=0.9, nesterov=True, lookahead=lookahead)
    torch.testing.assert_close(direction, after + lookahead * 0.1 * (gradient - after), rtol=0, atol=1e-15)
    torch.testing.assert_close(momentum, after, rtol=0, atol=1e-15)


@quiet_bf16
def test_muon_in_bf16_follows_torch_muon() -> None:
    theirs, ours = nn.Parameter(random(6, 10, dtype=torch.float32)), random(6, 10, dtype=torch.float32)
    momentum = torch.zeros_like(ours)
    torch_muon = torch.optim.Muon([theirs], lr=0.02, momentum=0.9, weight_decay=0.0)
    for step in range(5):
        theirs.grad = random(6, 10, seed=step, dtype=torch.float32)
        torch_muon.step()
        ours -= muon_update(theirs.grad, momentum, **{**MUON, "ns_dtype": torch.bfloat16})
    torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=5 * 0.02 * 0.025)


def test_muon_of_a_stack_equals_muon_of_its_matrices() -> None:
    gradient, momentum = random(3, 6, 10), random(3, 6, 10, seed=1)
    expected = torch.stack([muon_update(g, m, **MUON) for g, m in zip(gradient, momentum.clone(), strict=True)])
    torch.testing.assert_close(muon_update(gradient, momentum, **MUON), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_has_the_bits_of_torch_adamw(dtype: torch.dtype, weight_decay: float) -> None:
    # 67 elements leave a tail behind the vector instructions.
    theirs, ours = nn.Parameter(random(67, dtype=dtype)), random(67, dtype=dtype)
    mean, square = torch.zeros_like(ours), torch.zeros_like(ours)
    torch_adamw = torch.optim.AdamW(
        [theirs], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=weight_decay, foreach=False
    )
    for step in range(1, 21):
        torch_adamw.param_groups[0]["lr"] = lr = 0.01 / step
        theirs.grad = random(67, seed=step, dtype=dtype)
        torch_adamw.step()
        ours *= 1 - lr * weight_decay
        ours -= adamw_update(theirs.grad, mean, square, **{**ADAMW, "lr": lr}, step=step)
        assert torch.equal(ours, theirs.detach())


def test_adamw_nesterov_follows_its_formula() -> None:
    mean, square = random(9, seed=1), random(9, seed=2).square()
    gradient, step, beta1, beta2 = random(9), 3, ADAMW["beta1"], ADAMW["beta2"]
    m = beta1 * mean + (1 - beta1) * gradient
    v = beta2 * square + (1 - beta2) * gradient**2
    numerator = beta1 * m / (1 - beta1**step) + (1 - beta1) * gradient / (1 - beta1**step)
    expected = ADAMW["lr"] * numerator / ((v / (1 - beta2**step)).sqrt() + ADAMW["eps"])
    update = adamw_update(gradient, mean, square, **{**ADAMW, "nesterov": True}, step=step)
    torch.testing.assert_close(update, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("nesterov", [True, False])
def test_rules_write_their_state_and_nothing_else(nesterov: bool) -> None:
    muon = partial(muon_update, **{**MUON, "nesterov": nesterov})
    adamw = partial(adamw_update, **{**ADAMW, "nesterov": nesterov}, step=1)
    for rule, states in [(muon, 1), (adamw, 2)]:
        gradient, state = random(6, 10), [torch.zeros(6, 10, dtype=torch.float64) for _ in range(states)]
        update = rule(gradient, *state)
        assert torch.equal(gradient, random(6, 10))
        # The caller may write to the update: it shares no memory with gradient or state.
        held = [gradient.clone(), *(s.clone() for s in state)]
        update.fill_(7.0)
        assert all(torch.equal(a, b) for a, b in zip([gradient, *state], held, strict=True))


def test_update_is_linear_in_the_learning_rate() -> None:
    zeros = partial(torch.zeros, 6, 10, dtype=torch.float64)
    rule: Any
    for rule, settings, states in [(muon_update, MUON, 1), (adamw_update, {**ADAMW, "step": 1}, 2)]:
        full, half = (
            rule(random(6, 10), *(zeros() for _ in range(states)), **{**settings, "lr": lr}) for lr in (1.0, 0.5)
        )
        assert torch.equal(half, full / 2)
