"""A conformance suite for optimizers, ours and others', and what is particular to ours."""

from __future__ import annotations

import copy
import io
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from muon_rule import muon_update
from torch import Tensor, nn

from slipstream.optim import AdamW, Muon, SignDescent, adamw_update, predict
from slipstream.optim.optimizer import PredictingOptimizer
from slipstream.tools.plan.live import LiveBytes

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from pytorch_optimizer import Lion

SHAPES = [(6, 10), (10, 6), (6, 10), (3, 6, 10), (6, 6)]

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "muon": partial(Muon, lr=0.02, weight_decay=0.1),
    "muon_plain": partial(Muon, lr=0.02, nesterov=False, scale="match_rms_adamw"),
    "adamw": partial(AdamW, lr=0.01, weight_decay=0.1),
    "adamw_nesterov": partial(AdamW, lr=0.01, nesterov=True),
    "sign_descent": partial(SignDescent, lr=0.01),
    "torch_sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "lion": partial(Lion, lr=0.001),
}
OURS = [name for name in OPTIMIZERS if name.startswith(("muon", "adamw"))]


@pytest.fixture(params=OPTIMIZERS)
def make(request: pytest.FixtureRequest) -> MakeOptimizer:
    return OPTIMIZERS[request.param]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def gradients(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 + seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def advance(optimizer: torch.optim.Optimizer, held: list[nn.Parameter], steps: Iterator[int] | range) -> None:
    for step in steps:
        for parameter, gradient in zip(held, gradients(step, held[0].dtype), strict=True):
            parameter.grad = gradient
        optimizer.step()


def assert_same_bits(left: list[nn.Parameter], right: list[nn.Parameter]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# ---- conformance ----


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_parameters_and_state_keep_their_dtype(make: MakeOptimizer, dtype: torch.dtype) -> None:
    held = parameters(dtype)
    optimizer = make(held)
    advance(optimizer, held, range(2))
    assert all(parameter.dtype == dtype for parameter in held)
    tensors = [v for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v) and v.ndim]
    assert tensors or isinstance(optimizer, SignDescent)
    assert all(tensor.dtype == dtype for tensor in tensors)


def test_gradient_is_left_untouched(make: MakeOptimizer) -> None:
    held = parameters()
    optimizer = make(held)
    for step in range(3):
        advance(optimizer, held, range(step, step + 1))
        for parameter, gradient in zip(held, gradients(step), strict=True):
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, gradient)


def test_two_runs_have_the_same_bits(make: MakeOptimizer) -> None:
    first, second = parameters(), parameters()
    advance(make(first), first, range(5))
    advance(make(second), second, range(5))
    assert_same_bits(first, second)


def test_state_round_trips_through_a_file(make: MakeOptimizer) -> None:
    straight, resumed = parameters(), parameters()
    optimizer = make(straight)
    advance(optimizer, straight, range(3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    for target, source in zip(resumed, straight, strict=True):
        target.data.copy_(source.data)
    successor = make(resumed)
    successor.load_state_dict(torch.load(file, weights_only=True))
    advance(optimizer, straight, range(3, 6))
    advance(successor, resumed, range(3, 6))
    assert_same_bits(straight, resumed)


def test_parameter_without_gradient_is_left_alone(make: MakeOptimizer) -> None:
    held = parameters()
    optimizer = make(held)
    before = held[0].detach().clone()
    for parameter, gradient in zip(held[1:], gradients(0)[1:], strict=True):
        parameter.grad = gradient
    optimizer.step()
    assert torch.equal(held[0], before)
    assert not torch.equal(held[1], parameters()[1])


def test_zero_learning_rate_changes_nothing(make: MakeOptimizer) -> None:
    held = parameters()
    optimizer = make(held)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    advance(optimizer, held, range(2))
    assert_same_bits(held, parameters())


def test_closure_is_evaluated_with_gradients_on(make: MakeOptimizer) -> None:
    held = parameters()
    optimizer = make(held)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.stack([parameter.square().sum() for parameter in held]).sum()
        loss.backward()
        return loss.detach()

    losses = [optimizer.step(closure) for _ in range(3)]  # type: ignore[arg-type]
    assert losses[2] < losses[1] < losses[0]


# ---- ours ----


@pytest.mark.parametrize("name", OURS)
def test_step_is_the_rule_after_weight_decay(name: str) -> None:
    held, expected = parameters(torch.float64), [p.detach() for p in parameters(torch.float64)]
    optimizer = OPTIMIZERS[name](held)
    settings = {k: v for k, v in optimizer.param_groups[0].items() if k not in ("params", "weight_decay", "predictor")}
    decay = 1 - settings["lr"] * optimizer.param_groups[0]["weight_decay"]
    first, second = ([torch.zeros_like(p) for p in expected] for _ in range(2))
    for step in range(3):
        advance(optimizer, held, range(step, step + 1))
        for i, gradient in enumerate(gradients(step, torch.float64)):
            if isinstance(optimizer, Muon):
                update = muon_update(gradient, first[i], **settings)
            else:
                update = adamw_update(gradient, first[i], second[i], step=step + 1, **settings)
            expected[i] = decay * expected[i] - update
    for parameter, value in zip(held, expected, strict=True):
        torch.testing.assert_close(parameter.detach(), value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("stack_elements", [1, 130, 2**24])
def test_muon_in_stacks_equals_one_matrix_at_a_time(stack_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacks of one, stacks cut in the middle of a shape, one stack per shape."""
    monkeypatch.setattr("slipstream.optim.optimizer.STACK_ELEMENTS", stack_elements)
    together, apart = parameters(torch.float64), parameters(torch.float64)
    advance(Muon(together, lr=0.02, ns_dtype=torch.float64), together, range(3))
    for i, parameter in enumerate(apart):
        alone = Muon([parameter], lr=0.02, ns_dtype=torch.float64)
        for step in range(3):
            parameter.grad = gradients(step, torch.float64)[i]
            alone.step()
    for a, b in zip(together, apart, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_muon_moves_every_matrix_of_a_3d_parameter_by_an_orthogonal_one() -> None:
    parameter = nn.Parameter(torch.zeros(4, 6, 12))
    parameter.grad = torch.randn(4, 6, 12, generator=torch.Generator().manual_seed(0))
    Muon([parameter], lr=1.0).step()
    values = torch.linalg.svdvals(parameter.detach())
    assert values.min() > 0.65
    assert values.max() < 1.25


def test_muon_calls_newton_schulz_once_per_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []

    def recording(direction: Tensor, **_: object) -> Tensor:
        shapes.append(tuple(direction.shape))
        return torch.zeros_like(direction)

    monkeypatch.setattr("slipstream.optim.optimizer.orthogonal_update", recording)
    held = parameters()
    advance(Muon(held, lr=0.02), held, range(1))
    assert shapes == [(5, 6, 10), (1, 10, 6), (1, 6, 6)]


@pytest.fixture
def shared_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small matrices are stepped together, as on a GPU."""
    monkeypatch.setattr("slipstream.optim.optimizer.share_kernels", lambda parameters: True)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("ns_dtype", [torch.float64, torch.bfloat16])
def test_muon_that_shares_kernels_takes_the_same_steps(ns_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    together, apart = parameters(torch.float64), parameters(torch.float64)
    advance(Muon(apart, lr=0.02, ns_dtype=ns_dtype, weight_decay=0.1), apart, range(4))
    monkeypatch.setattr("slipstream.optim.optimizer.share_kernels", lambda parameters: True)
    advance(Muon(together, lr=0.02, ns_dtype=ns_dtype, weight_decay=0.1), together, range(4))
    for a, b in zip(together, apart, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_every_parameter_keeps_a_state_of_its_own_in_the_shared_momentum(shared_kernels: None) -> None:
    held = parameters()
    optimizer = Muon(held, lr=0.02)
    advance(optimizer, held, range(1))
    momenta = [optimizer.state[parameter]["momentum"] for parameter in held]
    assert [tuple(momentum.shape) for momentum in momenta] == SHAPES
    for momentum, gradient in zip(momenta, gradients(0), strict=True):
        torch.testing.assert_close(momentum, 0.05 * gradient)
    advance(optimizer, held, range(1, 3))
    assert all(optimizer.state[p]["momentum"] is momentum for p, momentum in zip(held, momenta, strict=True))
    storages = {momenta[i].untyped_storage().data_ptr() for i in (0, 2, 3)}
    assert len(storages) == 1


def test_shared_momentum_goes_on_from_a_state_that_was_loaded_replaced_or_made_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make = partial(Muon, lr=0.02, ns_dtype=torch.float64)
    straight, resumed = parameters(torch.float64), parameters(torch.float64)
    first, second = make(straight), make(resumed)
    advance(first, straight, range(6))
    advance(second, resumed, range(1))  # made alone
    monkeypatch.setattr("slipstream.optim.optimizer.share_kernels", lambda parameters: True)
    advance(second, resumed, range(1, 3))
    file = io.BytesIO()
    torch.save(second.state_dict(), file)
    file.seek(0)
    third = make(resumed)
    third.load_state_dict(torch.load(file, weights_only=True))  # loaded
    advance(third, resumed, range(3, 5))
    for state in third.state.values():
        replaced, state["momentum"] = state["momentum"], state["momentum"].clone()
        replaced.fill_(float("nan"))  # nobody may read it again
    advance(third, resumed, range(5, 6))
    for a, b in zip(resumed, straight, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_shared_momentum_rests_while_a_parameter_has_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[nn.Parameter]:
        held = parameters(torch.float64)
        optimizer = Muon(held, lr=0.02, ns_dtype=torch.float64)
        for step in range(4):
            for i, (parameter, gradient) in enumerate(zip(held, gradients(step, torch.float64), strict=True)):
                parameter.grad = None if (i, step) in {(0, 0), (2, 1), (2, 2)} else gradient
            optimizer.step()
        return held

    apart = run()
    monkeypatch.setattr("slipstream.optim.optimizer.share_kernels", lambda parameters: True)
    for a, b in zip(run(), apart, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_copy_of_an_optimizer_shares_no_momentum(shared_kernels: None) -> None:
    held = parameters()
    optimizer = Muon(held, lr=0.02)
    advance(optimizer, held, range(1))
    twin = copy.deepcopy(optimizer)
    before = [state["momentum"].clone() for state in twin.state.values()]
    advance(optimizer, held, range(1, 3))
    assert all(torch.equal(s["momentum"], m) for s, m in zip(twin.state.values(), before, strict=True))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_a_step_in_bf16_holds_little_more_than_two_copies_in_bf16() -> None:
    held = [nn.Parameter(torch.zeros(8, 128)) for _ in range(4)]
    for parameter in held:
        parameter.grad = torch.randn(8, 128)
    optimizer, live = Muon(held, lr=0.02, ns_dtype=torch.bfloat16), LiveBytes()
    optimizer.step()
    with live.watch():
        before = live.now
        live.restart_peak()
        optimizer.step()
    copy_in_bf16 = 4 * 8 * 128 * 2
    # Gram matrices are a sixteenth of the copy here; one direction in fp32 comes before the second copy.
    assert 2 * copy_in_bf16 <= live.peak - before < 2.5 * copy_in_bf16


@pytest.mark.parametrize("name", [*OURS, "sign_descent"])
def test_a_step_ahead_is_the_step_and_the_prediction(name: str) -> None:
    """Beside copies and `predict`, which do the same for any optimizer."""
    plain, ahead = parameters(torch.float64), parameters(torch.float64)
    one, other = OPTIMIZERS[name](plain), OPTIMIZERS[name](ahead)
    for group in (*one.param_groups, *other.param_groups):
        group["weight_decay"] = 0.0
        if "predictor" in group:
            group["predictor"] = "last"
    assert isinstance(other, PredictingOptimizer)
    working = [nn.Parameter(torch.full_like(parameter, float("nan"))) for parameter in ahead]
    for step in range(3):
        for held in (plain, ahead):
            for i, (parameter, gradient) in enumerate(zip(held, gradients(step, torch.float64), strict=True)):
                parameter.grad = gradient if (i, step) != (1, 2) else None
        predicted = [parameter.detach().clone() for parameter in plain]
        one.step()
        predict(predicted, plain, 0.5)
        other.step_ahead(dict(zip(ahead, working, strict=True)), 0.5)
        assert_same_bits(plain, ahead)
        for copied, expected in zip(working, predicted, strict=True):
            torch.testing.assert_close(copied.detach(), expected, rtol=0, atol=1e-14)
    other.step()  # and a plain step leaves the copies alone
    assert not torch.equal(ahead[0], plain[0])
    torch.testing.assert_close(working[0].detach(), predicted[0], rtol=0, atol=1e-14)


@pytest.mark.parametrize("beta1", [0.0, 0.8])
def test_adamw_expects_the_step_that_it_would_have_made_with_nesterovs_term(beta1: float) -> None:
    """Beside a twin that makes it: both have the same averages."""
    held, twins = parameters(torch.float64), parameters(torch.float64)
    optimizer, twin = AdamW(held, lr=0.01, beta1=beta1), AdamW(twins, lr=0.01, beta1=beta1, nesterov=True)
    working = [torch.full_like(parameter, float("nan")) for parameter in held]
    for step in range(3):
        for owned in (held, twins):
            for i, (parameter, gradient) in enumerate(zip(owned, gradients(step, torch.float64), strict=True)):
                parameter.grad = gradient if (i, step) != (1, 2) else None
        before = [parameter.detach().clone() for parameter in twins]
        twin.step()
        optimizer.step_ahead(dict(zip(held, working, strict=True)), 0.5)
        (group,) = optimizer.param_groups
        for parameter, copied, old, new in zip(held, working, before, twins, strict=True):
            update = old - new.detach()
            torch.testing.assert_close(copied, parameter.detach() - 0.5 * update, rtol=0, atol=1e-14)
            expected = optimizer.expected(parameter, group)
            if parameter.grad is None:
                assert expected is None
                continue
            assert expected is not None
            torch.testing.assert_close(expected, update, rtol=0, atol=1e-14)
            sampled = optimizer.expected(parameter, group, lambda tensor: tensor.flatten()[::3])
            assert sampled is not None
            torch.testing.assert_close(sampled, expected.flatten()[::3], rtol=0, atol=1e-15)
    assert all(twin.expected(parameter, twin.param_groups[0]) is None for parameter in twins)


def test_what_adamw_cannot_expect_is_refused() -> None:
    with pytest.raises(ValueError, match="predictor is 'momentum': use one of nesterov, last"):
        AdamW([nn.Parameter(torch.zeros(2))], lr=0.01, predictor="momentum")


def test_a_step_ahead_does_not_extrapolate_decay() -> None:
    parameter, working = nn.Parameter(torch.tensor([1.0])), torch.zeros(1)
    parameter.grad = torch.tensor([1.0])
    SignDescent([parameter], lr=0.25, weight_decay=2.0).step_ahead({parameter: working}, 1.0)
    assert (parameter.item(), working.item()) == (0.5 - 0.25, 0.5 - 0.25 - 0.25)


def test_a_large_parameter_off_the_cpu_is_stepped_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device, where the numbers are missing but not the bytes."""
    monkeypatch.setattr("slipstream.optim.optimizer.STACK_ELEMENTS", 100)
    parameter, live = nn.Parameter(torch.empty(1000, device="meta")), LiveBytes()
    parameter.grad = torch.empty(1000, device="meta")
    optimizer = AdamW([parameter], lr=0.01)
    optimizer.step()
    with live.watch():
        before = live.now
        live.restart_peak()
        optimizer.step()
    assert 0 < live.peak - before <= 2 * 100 * 4


def test_learning_rate_of_the_param_group_is_read_at_every_step() -> None:
    parameter = nn.Parameter(torch.zeros(6, 10))
    optimizer = Muon([parameter], lr=1.0, beta=0.0)
    parameter.grad = gradients(0)[0]
    optimizer.step()
    first = parameter.detach().clone()
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
    torch.testing.assert_close(parameter.detach() - first, first / 2)


def test_step_count_stays_off_the_device() -> None:
    held = parameters()
    optimizer = AdamW(held, lr=0.01)
    advance(optimizer, held, range(3))
    assert [type(state["step"]) for state in optimizer.state.values()] == [int] * len(SHAPES)


@pytest.mark.parametrize("name", OURS)
def test_optimizer_can_be_copied(name: str) -> None:
    held = parameters()
    optimizer = OPTIMIZERS[name](held)
    advance(optimizer, held, range(1))
    twin = copy.deepcopy(optimizer)
    advance(optimizer, held, range(1, 3))
    twins = [parameter for group in twin.param_groups for parameter in group["params"]]
    advance(twin, twins, range(1, 3))
    assert_same_bits(held, twins)


def test_sign_descent_goes_one_rate_against_the_sign_after_weight_decay() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    parameter.grad = torch.tensor([1e9, 0.0, -1e-9], dtype=torch.float64)
    SignDescent([parameter], lr=0.25, weight_decay=0.5).step()
    assert parameter.tolist() == [0.875 - 0.25, 1.75, 2.625 + 0.25]


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4, 5)])
def test_muon_refuses_what_is_no_matrix(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"a parameter of shape {shape}: give that one to AdamW")):
        Muon([nn.Parameter(torch.zeros(shape))], lr=0.02)


def test_refused_group_is_not_kept() -> None:
    optimizer = Muon(parameters(), lr=0.02)
    with pytest.raises(ValueError, match="AdamW"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(5))]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("optimizer", "field", "value", "remedy"),
    [
        (Muon, "lr", -0.1, "use 0 or more"),
        (Muon, "weight_decay", -0.1, "use 0 or more"),
        (Muon, "beta", 1.0, "use a value from 0 up to"),
        (Muon, "lookahead", -1.0, "use 0 or more"),
        (Muon, "lookahead", 21.0, "use less"),
        (Muon, "ns_steps", 0, "use at least 1"),
        (Muon, "ns_dtype", torch.int32, "use one of torch.float64"),
        (Muon, "scale", "rms", "choose one of spectral"),
        (AdamW, "lr", float("nan"), "use 0 or more"),
        (AdamW, "eps", -1e-8, "use 0 or more"),
        (AdamW, "weight_decay", -0.1, "use 0 or more"),
        (AdamW, "beta1", -0.1, "use a value from 0 up to"),
        (AdamW, "beta2", 1.5, "use a value from 0 up to"),
    ],
)
def test_bad_hyperparameter_is_refused_by_name(
    optimizer: Callable[..., torch.optim.Optimizer], field: str, value: object, remedy: str
) -> None:
    with pytest.raises(ValueError, match=f"^{field} .*{value}.*: {remedy}"):
        optimizer(parameters(), **{"lr": 0.01, field: value})
