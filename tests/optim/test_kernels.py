"""The GPU kernels beside plain torch. Without a GPU, Triton's interpreter can run the first half of them, where Triton
is installed: TRITON_INTERPRET=1 pytest tests/optim/test_kernels.py"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from slipstream.optim import AdamW, Muon, adamw_update, kernels
from slipstream.optim.optimizer import LARGE_ELEMENTS
from slipstream.optim.rules import adamw_step_from

HAS_CUDA = torch.cuda.is_available()
INTERPRETED = kernels.HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if HAS_CUDA else "cpu"
NARROW = torch.bfloat16 if HAS_CUDA else torch.float16
"""The interpreter has no products in bf16."""

pytestmark = pytest.mark.cuda
launched = pytest.mark.skipif(not (kernels.HAS_TRITON and HAS_CUDA) and not INTERPRETED, reason="needs a CUDA device")
on_cuda = pytest.mark.skipif(not (kernels.HAS_TRITON and HAS_CUDA), reason="needs a CUDA device and Triton")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


# ---- the kernels alone


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on_cuda
def test_plain_torch_makes_the_same_symmetric_products(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    X = random(2, 256, 300, dtype=dtype) / 16
    A = (X @ X.mT).to(torch.float16)
    factors = torch.tensor([0.5, 3.0], device=DEVICE)
    calls = [
        partial(kernels.symmetric_product, X, scale=factors, dtype=torch.float16),
        partial(kernels.symmetric_product, A, A, alpha=0.01, scale=factors, dtype=torch.bfloat16),
        partial(kernels.symmetric_product, A, alpha=0.01, added=A, beta=-2.0, diagonal=3.0),
        partial(kernels.symmetric_product, A, alpha=0.01, added=A, beta=-2.0, diagonal=3.0, dtype=torch.bfloat16),
    ]
    monkeypatch.setattr(kernels, "MIN_ROWS", 1)
    by_kernel = [call() for call in calls]
    monkeypatch.setattr(kernels, "USE_TRITON", False)
    for found, call in zip(by_kernel, calls, strict=True):
        plain = call()
        assert plain.dtype == found.dtype
        assert distance(found, plain) < 5e-3


@launched
@pytest.mark.parametrize("layout", ["rows", "columns", "every other"])
@pytest.mark.parametrize(("n", "rows", "depth"), [(1, 130, 40), (3, 64, 70), (2, 257, 128), (2, 256, 192), (1, 1, 1)])
def test_symmetric_product_is_right_for_any_shape_and_stride(n: int, rows: int, depth: int, layout: str) -> None:
    from slipstream.optim.triton_kernels import symmetric_product

    X = random(n, depth, rows, dtype=NARROW).mT if layout == "columns" else random(n, rows, depth, dtype=NARROW)
    if layout == "every other":
        X = random(n, rows, 2 * depth, dtype=NARROW)[:, :, ::2]
    X = X * depth**-0.5
    wide = X.double()
    product = symmetric_product(X, X, 1.0, None, 0.0, 0.0, None, NARROW)
    assert distance(product, wide @ wide.mT) < 3e-3
    assert torch.equal(product, product.mT)
    added = random(n, rows, rows, seed=1, dtype=NARROW)
    added = added + added.mT
    found = symmetric_product(X, X, 2.5, added, -0.75, 3.0, None, NARROW)
    expected = 2.5 * wide @ wide.mT - 0.75 * added.double() + 3.0 * torch.eye(rows, device=DEVICE)
    assert distance(found, expected) < 3e-3


@launched
@pytest.mark.parametrize("rows", [64, 130, 256])
def test_symmetric_product_takes_two_matrices_that_commute(rows: int) -> None:
    from slipstream.optim.triton_kernels import TILING, symmetric_product

    X = random(2, rows, rows, dtype=NARROW) * rows**-0.5
    A = (X @ X.mT).to(NARROW)
    B = (A @ A).to(NARROW)
    product = symmetric_product(A, B, 1.0, None, 0.0, 0.0, None, NARROW)
    assert distance(product, A.double() @ B.double()) < 5e-3
    assert distance(product, product.mT) < 5e-3
    block = TILING.block
    assert torch.equal(product[:, :block, block:], product[:, block:, :block].mT), "a mirror image off the diagonal"


@launched
def test_symmetric_product_is_scaled_before_it_is_rounded() -> None:
    """The sums are beyond float16 on the one side and far below it on the other."""
    from slipstream.optim.triton_kernels import symmetric_product

    sizes = torch.tensor([1e2, 1e-3], device=DEVICE)
    X = (random(2, 130, 200) * sizes[:, None, None]).to(NARROW)
    product = symmetric_product(X, X, 1.0, None, 0.0, 0.0, sizes**-2, torch.float16)
    assert product.dtype == torch.float16
    for found, x, size in zip(product, X.double(), sizes, strict=True):
        assert distance(found, x @ x.mT / size**2) < 1e-3
    added = torch.eye(130, device=DEVICE, dtype=torch.float16).expand(2, -1, -1)
    found = symmetric_product(product, product, 0.001, added, 2.0, 3.0, sizes, torch.float32)
    expected = 0.001 * product.double() @ product.double().mT + 5 * torch.eye(130, device=DEVICE)
    assert found.dtype == torch.float32
    assert distance(found, expected * sizes[:, None, None]) < 1e-6


@launched
@pytest.mark.parametrize("num_elements", [1, 1000, 1024, 5001])
@pytest.mark.parametrize("weight", [0.95, 1.0, 0.0])
def test_momentum_and_direction_follow_their_formula(num_elements: int, weight: float) -> None:
    from slipstream.optim.triton_kernels import advance_momentum

    gradient, momentum = random(num_elements), random(num_elements, seed=1)
    direction = torch.full((num_elements,), float("nan"), dtype=NARROW, device=DEVICE)
    after = 0.9 * momentum.double() + 0.1 * gradient.double()
    expected = weight * after + (1 - weight) * gradient.double()
    advance_momentum(gradient, momentum, direction, 0.9, weight)
    assert distance(momentum, after) < 1e-6
    assert distance(direction, expected) < 3e-3
    assert torch.equal(gradient, random(num_elements))


@launched
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("expects_nesterov", [True, False])
@pytest.mark.parametrize("predicts", [True, False])
def test_adamw_step_is_the_rule_decay_and_prediction(nesterov: bool, expects_nesterov: bool, predicts: bool) -> None:
    from slipstream.optim.triton_kernels import adamw_step

    parameter, gradient, mean = random(5001), random(5001, seed=1), random(5001, seed=2)
    square, ahead = random(5001, seed=3).square(), torch.full_like(parameter, float("nan"))
    m, v = mean.double(), square.double()
    settings = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    update = adamw_update(gradient.double(), m, v, step=3, nesterov=nesterov, **settings)
    next_update = adamw_step_from(gradient.double(), m, v, step=3, nesterov=nesterov or expects_nesterov, **settings)
    expected = 0.99 * parameter.double() - update
    adamw_step(
        parameter,
        gradient,
        mean,
        square,
        ahead if predicts else None,
        rate=0.01 / (1 - 0.9**3),
        beta1=0.9,
        beta2=0.999,
        root_correction=(1 - 0.999**3) ** 0.5,
        eps=1e-8,
        nesterov=nesterov,
        expects_nesterov=expects_nesterov,
        decay=0.99,
        coefficient=0.7,
    )
    for found, wanted in [(parameter, expected), (mean, m), (square, v)]:
        assert distance(found, wanted) < 1e-6
    assert distance(ahead, expected - 0.7 * next_update) < 1e-6 if predicts else bool(ahead.isnan().all())


@launched
@pytest.mark.parametrize("predicts", [True, False])
def test_an_update_is_applied_and_extrapolated(predicts: bool) -> None:
    from slipstream.optim.triton_kernels import apply_update

    parameter, update = random(5001), random(5001, seed=1, dtype=NARROW)
    ahead = torch.full_like(parameter, float("nan"))
    expected = 0.9 * parameter.double() - update.double()
    apply_update(parameter, update, ahead if predicts else None, 0.9, 0.5)
    assert distance(parameter, expected) < 1e-6
    assert distance(ahead, expected - 0.5 * update.double()) < 1e-6 if predicts else bool(ahead.isnan().all())


# ---- the optimizers, on a GPU

LARGE = [(1024, 1536), (1536, 1024), (1024, 1100), (1024, 2560), (2560, 1024)]
SHAPES = [*LARGE, (96, 40), (96, 40), (3, 96, 40), (40, 96)]
OPTIMIZERS: list[Callable[[list[nn.Parameter]], AdamW | Muon]] = [
    partial(Muon, lr=0.02, ns_dtype=torch.bfloat16, weight_decay=0.1),
    partial(Muon, lr=0.02, ns_dtype=torch.bfloat16, nesterov=False),
    partial(Muon, lr=0.02),
    partial(AdamW, lr=0.01, weight_decay=0.1),
    partial(AdamW, lr=0.01, nesterov=True),
    partial(AdamW, lr=0.01, predictor="last"),
]


def parameters() -> list[nn.Parameter]:
    held = [nn.Parameter(random(*shape, seed=i)) for i, shape in enumerate(SHAPES)]
    for i, parameter in enumerate(held):
        parameter.grad = random(*parameter.shape, seed=100 + i)
    return held


def steps_of(make: Callable[[list[nn.Parameter]], AdamW | Muon]) -> tuple[list[Tensor], list[Tensor]]:
    """How far three steps move every parameter, and the predicted copies after the third."""
    held = parameters()
    optimizer = make(held)
    working = [torch.full_like(parameter, float("nan")) for parameter in held]
    for _ in range(2):
        optimizer.step()
    optimizer.step_ahead(dict(zip(held, working, strict=True)), 0.5)
    pairs = zip(held, parameters(), strict=True)
    return [(after - before).detach() for after, before in pairs], working


@on_cuda
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_kernels_and_plain_torch_take_the_same_steps(
    make: Callable[[list[nn.Parameter]], AdamW | Muon], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(min(shape) >= kernels.MIN_ROWS and math.prod(shape) >= LARGE_ELEMENTS for shape in LARGE)
    moved, working = steps_of(make)
    monkeypatch.setattr(kernels, "USE_TRITON", False)
    moved_plainly, working_plainly = steps_of(make)
    is_narrow = make.keywords.get("ns_dtype") == torch.bfloat16  # type: ignore[attr-defined]
    for a, b in zip(moved, moved_plainly, strict=True):
        assert distance(a, b) < (0.05 if is_narrow else 1e-3)
    for a, b in zip(working, working_plainly, strict=True):
        assert distance(a, b) < 1e-2


@pytest.fixture
def no_waiting() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@on_cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_step_does_not_wait_for_the_device(
    make: Callable[[list[nn.Parameter]], AdamW | Muon], no_waiting: None
) -> None:
    held = parameters()
    optimizer = make(held)
    working = {parameter: torch.empty_like(parameter) for parameter in held}
    optimizer.step_ahead(working, 1.0)  # everything lazy has happened
    torch.cuda.set_sync_debug_mode("error")
    optimizer.step_ahead(working, 1.0)
    optimizer.step()


@on_cuda
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_autograd_hears_of_weights_that_a_kernel_wrote(make: Callable[[list[nn.Parameter]], AdamW | Muon]) -> None:
    held = parameters()
    working = [nn.Parameter(parameter.detach().clone()) for parameter in held]
    for written in (held, working):
        optimizer = make(held)
        # The large ones: small matrices are written by torch, which tells autograd itself.
        loss = torch.stack([parameter.square().sum() for parameter in written[:3]]).sum()
        optimizer.step_ahead(dict(zip(held, working, strict=True)), 1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
