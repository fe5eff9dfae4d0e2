"""Optimizers known by name: one conformance suite for all, and what a configuration makes of them."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from harness import Task, even_cut, language_model, largest_difference, run_pipeline, run_reference
from settings import changed
from torch import Tensor, nn

from slipstream import reference_run
from slipstream.config.optimizers import parameter_groups, peak_rates
from slipstream.config.rules import validate
from slipstream.config.schema import Config
from slipstream.errors import ConfigError
from slipstream.optim import RECIPES, AdamW, Group, Muon, Recipe, assign
from slipstream.train.build import build_components

pytest.importorskip("pytorch_optimizer")

NAMES = list(RECIPES)
ON_EVERYTHING = [name for name in NAMES if not RECIPES[name].matrices_only]
ON_MATRICES = [name for name in NAMES if RECIPES[name].matrices_only]
BF16 = ["normuon", "scion"]
MATRICES = [(6, 10), (10, 6), (6, 10), (6, 6)]
SHAPES = {name: MATRICES if RECIPES[name].matrices_only else [*MATRICES, (7,)] for name in NAMES}


def make(name: str, held: list[nn.Parameter], lr: float = 0.01, **changes: float) -> torch.optim.Optimizer:
    return RECIPES[name].optimizer(lr, changes)(held)


def parameters(name: str, dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES[name]]


def gradients(held: list[nn.Parameter], step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(parameter.shape, generator=generator).to(parameter.dtype) for parameter in held]


def advance(optimizer: torch.optim.Optimizer, held: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for parameter, gradient in zip(held, gradients(held, step), strict=True):
            parameter.grad = gradient
        optimizer.step()


def values(held: list[nn.Parameter]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in held]


def tensors(state: Any) -> Iterator[Tensor]:
    """All those with dimensions, however deep: SOAP keeps lists."""
    if torch.is_tensor(state) and state.ndim:
        yield state
    elif isinstance(state, (dict, list)):
        for item in state.values() if isinstance(state, dict) else state:
            yield from tensors(item)


def distance(left: list[Tensor], right: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(left, right, strict=True))


def config_of(name: str, config: Config | None = None, **arguments: float) -> Config:
    rate = 0.02 if name in BF16 else 0.003
    return changed(
        config or Config(), optimizer__name=name, optimizer__learning_rate=rate, optimizer__arguments=arguments
    )


def refused(config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        validate(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- conformance


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_has_a_state_and_both_keep_dtype_and_device(name: str, dtype: torch.dtype) -> None:
    held = parameters(name, dtype)
    optimizer = make(name, held)
    advance(optimizer, held, range(12))
    assert set(optimizer.state) == set(held)
    for parameter in held:
        found = list(tensors(optimizer.state[parameter]))
        assert any(tensor.shape == parameter.shape for tensor in found)
        assert all((t.dtype, t.device) == (dtype, torch.device("cpu")) for t in [parameter, *found])
        assert all(t.isfinite().all() for t in [parameter.detach(), *found])
    assert distance(values(held), values(parameters(name, dtype))) > 0.01


@pytest.mark.parametrize("name", NAMES)
def test_two_runs_have_the_same_bits(name: str) -> None:
    first, second = parameters(name), parameters(name)
    advance(make(name, first), first, range(12))
    advance(make(name, second), second, range(12))
    assert distance(values(first), values(second)) == 0


@pytest.mark.parametrize("name", NAMES)
def test_an_update_is_proportional_to_the_learning_rate_of_its_step(name: str) -> None:
    updates = []
    for rate in (0.01, 0.0025):
        held = parameters(name)
        optimizer = make(name, held, lr=0.01)
        advance(optimizer, held, range(4))
        before = values(held)
        optimizer.param_groups[0]["lr"] = rate
        advance(optimizer, held, range(4, 5))
        updates.append([(a - b) / rate for a, b in zip(before, values(held), strict=True)])
    assert distance(*updates) < 1e-12
    assert min(float(update.abs().max()) for update in updates[0]) > 0.01


@pytest.mark.parametrize("name", NAMES)
def test_only_soap_lets_the_first_step_pass(name: str) -> None:
    held = parameters(name)
    advance(make(name, held), held, range(1))
    moved = distance(values(held), values(parameters(name)))
    assert moved == 0 if name == "soap" else moved > 0.001


@pytest.mark.parametrize("name", NAMES)
def test_only_normuon_writes_into_the_gradient(name: str) -> None:
    held = parameters(name)
    optimizer = make(name, held)
    for step in range(3):
        advance(optimizer, held, range(step, step + 1))
        kept = distance([p.grad for p in held if p.grad is not None], gradients(held, step)) == 0
        assert kept == (name != "normuon")


@pytest.mark.parametrize("name", NAMES)
def test_state_round_trips_through_a_file(name: str) -> None:
    """In fp32: on loading, torch gives NAdam's product of momenta, a fp32 number, the dtype of the parameter."""
    straight, resumed = parameters(name, torch.float32), parameters(name, torch.float32)
    optimizer = make(name, straight)
    advance(optimizer, straight, range(11))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    for target, source in zip(resumed, straight, strict=True):
        target.data.copy_(source.data)
    successor = make(name, resumed)
    successor.load_state_dict(torch.load(file, weights_only=True))
    advance(optimizer, straight, range(11, 22))
    advance(successor, resumed, range(11, 22))
    assert distance(values(straight), values(resumed)) == 0


@pytest.mark.parametrize("name", [name for name in NAMES if name != "soap"])
def test_batched_tensors_change_rounding_and_nothing_else(name: str) -> None:
    ends = []
    for foreach in (True, False):
        held = parameters(name)
        recipe = replace(RECIPES[name], fixed={**RECIPES[name].fixed, "foreach": foreach})
        advance(recipe.optimizer(0.01, {})(held), held, range(12))
        ends.append(values(held))
    travelled = distance(ends[0], values(parameters(name)))
    assert distance(*ends) < (0.01 if name in BF16 else 1e-14) * travelled


def flat_distance(optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> float:
    """How far twelve steps on one long parameter end from those on its pieces."""
    pieces = parameters("lion")
    whole = nn.Parameter(torch.cat([piece.detach().flatten() for piece in pieces]))
    apart, together = optimizer(pieces), optimizer([whole])
    for step in range(12):
        advance(apart, pieces, range(step, step + 1))
        whole.grad = torch.cat([gradient.flatten() for gradient in gradients(pieces, step)])
        together.step()
    return distance([whole.detach()], [torch.cat([piece.detach().flatten() for piece in pieces])])


@pytest.mark.parametrize("name", ON_EVERYTHING)
def test_parameters_may_lie_end_to_end_exactly_where_a_recipe_says_so(name: str) -> None:
    end = flat_distance(RECIPES[name].optimizer(0.01, {}))
    assert end < 1e-14 if RECIPES[name].elementwise else end > 1e-3


def test_parameters_may_lie_end_to_end_for_our_adamw() -> None:
    assert flat_distance(partial(AdamW, lr=0.01, nesterov=True)) < 1e-14


@pytest.mark.parametrize("name", ON_MATRICES)
@pytest.mark.parametrize("shape", [(5,), (3, 4, 5)])
def test_what_is_no_matrix_is_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"needs matrices \(2-D\) and was given a parameter of shape .*: muon takes"):
        make(name, [nn.Parameter(torch.zeros(shape))])


@pytest.mark.parametrize("name", BF16)
@pytest.mark.parametrize("shape", [(16, 8), (12, 12)])
def test_muons_learning_rates_carry_over(name: str, shape: tuple[int, ...]) -> None:
    lengths = []
    for make_optimizer in (partial(make, name), partial(Muon, lr=0.01)):
        held = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
        held.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0)).double()
        make_optimizer([held]).step()
        lengths.append(float(held.detach().norm()))
    assert lengths[0] == pytest.approx(lengths[1], rel=0.02)


# ---- what a configuration makes of them


@pytest.mark.parametrize("name", NAMES)
def test_matrices_and_the_rest_are_groups_of_their_own(name: str, tiny: Config) -> None:
    config = changed(config_of(name, tiny), optimizer__adamw_learning_rate=0.007, optimizer__beta1=0.8)
    components, recipe = build_components(config), RECIPES[name]
    groups = {group.name: group for group in components.groups}
    rate = config.optimizer.learning_rate
    assert list(groups) == ["matrices", "rest"]
    assert components.peak_rates == {"matrices": rate, "rest": 0.007 if recipe.matrices_only else rate}
    held = [("block.weight", nn.Parameter(torch.ones(2, 2))), ("block.norm", nn.Parameter(torch.ones(2)))]
    assert [[n for n, _ in members] for _, members in assign(held, components.groups)] == [
        ["block.weight"],
        ["block.norm"],
    ]
    for (group, members), peak in zip(assign(held, components.groups), components.peak_rates.values(), strict=True):
        (settings,) = group.optimizer([parameter for _, parameter in members]).param_groups
        assert (settings["lr"], settings["weight_decay"]) == (peak, 0)
        assert (group.weight_decay, group.error_feedback, group.clip_norm) == (0.1, 1.0, 1.0)
        assert group.elementwise == (recipe.elementwise or (recipe.matrices_only and group.name == "rest"))
        assert settings.get("beta1") == (0.8 if recipe.matrices_only and group.name == "rest" else None)
        pickle.dumps(group)


def test_our_own_groups_say_whether_they_are_elementwise() -> None:
    def flags(name: str) -> dict[str, bool]:
        return {g.name: g.elementwise for g in parameter_groups(changed(Config(), optimizer__name=name))}

    assert flags("muon") == {"matrices": False, "rest": True}
    assert flags("adamw") == {"all": True}
    assert flags("torch.optim.SGD") == {"all": False}
    assert not Group("all", AdamW).elementwise
    assert peak_rates(changed(Config(), optimizer__name="adamw")) == {"all": 0.001}


def test_arguments_of_a_configuration_take_the_place_of_a_recipes() -> None:
    def settings(name: str, **arguments: float) -> dict[str, Any]:
        config = config_of(name, **arguments)
        validate(config)
        return parameter_groups(config)[0].optimizer([nn.Parameter(torch.ones(2, 2))]).param_groups[0]

    assert settings("lion")["betas"] == (0.95, 0.98)
    assert settings("lion", beta1=0.9)["betas"] == (0.9, 0.98)
    assert settings("adan", beta2=0.5, beta3=0.9, eps=1e-6)["betas"] == (0.98, 0.5, 0.9)
    soap = settings("soap", precondition_frequency=5.0)
    assert (soap["precondition_frequency"], type(soap["precondition_frequency"])) == (5, int)
    normuon = settings("normuon", beta2=0.9, ns_steps=3.0, nesterov=0.0)
    assert (normuon["beta2"], normuon["ns_steps"], normuon["nesterov"]) == (0.9, 3, False)
    assert type(normuon["ns_steps"]) is int


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_argument_is_one_sentence(name: str) -> None:
    sentence = refused(config_of(name, impetus=0.5))
    known = ", ".join(RECIPES[name].arguments)
    assert sentence == f"optimizer.arguments.impetus = 0.5 means nothing to {name}: it has {known}"


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("soap", {"precondition_frequency": 2.5}, "optimizer.arguments.precondition_frequency = 2.5 is invalid: write"),
        ("lion", {"lr": 1.0}, "optimizer.arguments.lr = 1.0 has a field of its own: set optimizer.learning_rate"),
        ("mars", {"weight_decay": 1.0}, "optimizer.arguments.weight_decay = 1.0 has a field of its own"),
        ("adamw", {"eps": 1.0}, "is for other optimizers, and adamw has fields of its own: use those"),
    ],
)
def test_an_impossible_argument_is_one_sentence(name: str, arguments: dict[str, float], sentence: str) -> None:
    assert sentence in refused(config_of(name, **arguments))


def test_what_the_class_refuses_is_one_sentence(tiny: Config) -> None:
    with pytest.raises(ConfigError, match=r"optimizer.name = 'lion' with optimizer.arguments = .* \(beta1 must be in"):
        build_components(config_of("lion", tiny, beta1=2.0))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "nadamw"])
def test_a_missing_package_is_one_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(ConfigError) as caught:
        parameter_groups(config_of(name))
    sentence = str(caught.value)
    assert sentence.startswith(f"optimizer.name = {name!r} needs pytorch-optimizer 4.1 or newer (")
    assert sentence.endswith("): pip install --upgrade pytorch-optimizer")
    assert "\n" not in sentence


def test_a_package_without_the_class_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES, "lion", Recipe("pytorch_optimizer.Tiger2", 0.1, {}))
    with pytest.raises(ConfigError, match=r"'lion' needs pytorch-optimizer 4.1 or newer \(module .* no attribute"):
        parameter_groups(config_of("lion"))


def test_nadamw_needs_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    assert len(parameter_groups(config_of("nadamw"))) == 2


# ---- what they learn, on time and late


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_loss_of_a_least_squares_problem_falls(name: str, delay: int) -> None:
    """With error feedback, in fp64."""
    torch.manual_seed(0)
    inputs, truth = torch.randn(32, 6).double(), nn.Linear(6, 4).double()
    config = changed(config_of(name), optimizer__learning_rate=0.02, optimizer__adamw_learning_rate=0.02)
    weights, losses = reference_run(
        nn.Sequential(nn.Linear(6, 4).double()),
        data=lambda step, microbatch: (inputs, truth(inputs).detach()),
        loss=nn.functional.mse_loss,
        groups=parameter_groups(config),
        num_microbatches=1,
        num_steps=30,
        delays=(delay,),
    )
    assert losses[-1] < 0.3 * losses[0]
    assert all(weight.dtype == torch.float64 for weight in weights.values())


def square_network() -> Task:
    """The first gradient of a matrix that is not square leaves SOAP directions to choose, which it does by the last
    bit: only square ones can be compared."""
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(6, 6), nn.Tanh())]

    def data(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + microbatch)
        inputs, targets = torch.randn(2, 12, 6, generator=generator, dtype=torch.float64)
        return inputs, targets

    return Task(nn.Sequential(*layers).double(), data, nn.functional.mse_loss)


@pytest.mark.parametrize("name", NAMES)
def test_pipeline_with_error_feedback_follows_the_oracle(name: str) -> None:
    """One stage for those whose bits depend on how many matrices it holds."""
    task = square_network() if name == "soap" else language_model(tied=True)
    stages, steps = 1 if name in BF16 else 2, 13
    groups = parameter_groups(config_of(name))
    shared = {
        "num_microbatches": 2,
        "num_steps": steps,
        "layers_per_stage": even_cut(task, stages),
        "learning_rate": lambda step: 1 - step / (2 * steps),
    }
    expected, _ = run_reference(task, groups, delays=[1] * stages, **shared)
    outcome = run_pipeline(task, stages, groups, **shared)
    assert largest_difference(outcome.weights, expected) <= 1e-12
