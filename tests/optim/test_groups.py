"""Which parameter gets which optimizer."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from slipstream.optim import AdamW, Group, Muon, SignDescent, assign, balance_experts, is_matrix, muon_and_adamw

SHAPES = {
    "embedding.weight": (32, 8),
    "block0.norm.weight": (8,),
    "block0.attention.query.weight": (8, 8),
    "block0.mlp.gate.weight": (16, 8),
    "block0.experts.weight": (4, 16, 8),
    "block0.router.weight": (4, 8),
    "block0.router.bias": (4,),
    "head.norm.weight": (8,),
    "head.output.weight": (32, 8),
}
PARAMETERS = [(name, nn.Parameter(torch.zeros(shape))) for name, shape in SHAPES.items()]
SGD = partial(torch.optim.SGD, lr=0.1)


def names(members: list[tuple[str, nn.Parameter]]) -> list[str]:
    return [name for name, _ in members]


def test_hidden_matrices_are_told_from_embedding_head_router_and_vectors() -> None:
    assert [name for name, parameter in PARAMETERS if is_matrix(name, parameter)] == [
        "block0.attention.query.weight",
        "block0.mlp.gate.weight",
        "block0.experts.weight",
    ]


def test_only_a_whole_component_of_the_name_counts_as_head() -> None:
    assert is_matrix("block0.attention.heads.weight", torch.zeros(8, 8))
    assert is_matrix("block0.overhead.weight", torch.zeros(8, 8))


def test_first_matching_group_takes_the_parameter_and_order_is_kept() -> None:
    groups = [
        Group("matrices", SGD, is_matrix),
        Group("weights", SGD, lambda name, _: name.endswith("weight")),
        Group("rest", SGD),
    ]
    assigned = assign(PARAMETERS, groups)
    assert [group.name for group, _ in assigned] == ["matrices", "weights", "rest"]
    matrices, weights, rest = (names(members) for _, members in assigned)
    assert matrices == ["block0.attention.query.weight", "block0.mlp.gate.weight", "block0.experts.weight"]
    assert weights == [
        "embedding.weight",
        "block0.norm.weight",
        "block0.router.weight",
        "head.norm.weight",
        "head.output.weight",
    ]
    assert rest == ["block0.router.bias"]
    assert all(parameter is dict(PARAMETERS)[name] for _, members in assigned for name, parameter in members)


def test_biases_of_routers_are_balanced_without_clipping_decay_or_prediction() -> None:
    groups = [balance_experts(0.5), *muon_and_adamw(muon_lr=0.02, adamw_lr=0.01, clip_norm=1.0, error_feedback=1.0)]
    (group, members), *_ = assign(PARAMETERS, groups)
    assert names(members) == ["block0.router.bias"]
    optimizer = group.optimizer([parameter for _, parameter in members])
    assert isinstance(optimizer, SignDescent)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert (group.clip_norm, group.weight_decay, group.error_feedback) == (None, 0.0, 0.0)


def test_stage_without_parameters_keeps_its_empty_groups() -> None:
    assert [members for _, members in assign([], muon_and_adamw(muon_lr=0.02, adamw_lr=0.01))] == [[], []]


def test_parameter_without_group_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"no group matches parameter 'embedding.weight' of shape \(32, 8\): add"):
        assign(PARAMETERS, [Group("matrices", SGD, is_matrix)])


def test_two_groups_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="2 groups are called 'rest': give every group"):
        assign(PARAMETERS, [Group("rest", SGD), Group("rest", SGD)])


@pytest.mark.parametrize(("field", "value"), [("weight_decay", -0.1), ("error_feedback", -1.0), ("clip_norm", 0.0)])
def test_bad_group_setting_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{field} of group 'rest' is {value}: use"):
        Group("rest", SGD, **{field: value})  # type: ignore[arg-type]


def test_muon_and_adamw_covers_every_parameter_with_the_right_optimizer() -> None:
    groups = muon_and_adamw(
        muon_lr=0.02,
        muon_beta=0.9,
        muon_ns_dtype=torch.float64,
        adamw_lr=0.01,
        adamw_beta2=0.99,
        adamw_nesterov=True,
        weight_decay=0.1,
        error_feedback=1.0,
        clip_norm=1.0,
    )
    (matrices, hidden), (rest, others) = assign(PARAMETERS, groups)
    muon = matrices.optimizer([parameter for _, parameter in hidden])
    adamw = rest.optimizer([parameter for _, parameter in others])
    assert isinstance(muon, Muon)
    assert isinstance(adamw, AdamW)
    assert muon.defaults == {
        **Muon([PARAMETERS[2][1]], lr=0.02).defaults,
        "beta": 0.9,
        "ns_dtype": torch.float64,
    }
    assert adamw.defaults == {
        **AdamW([PARAMETERS[2][1]], lr=0.01).defaults,
        "beta2": 0.99,
        "nesterov": True,
        "predictor": "last",
    }
    for group in groups:
        assert (group.weight_decay, group.error_feedback, group.clip_norm) == (0.1, 1.0, 1.0)
    # Decay belongs to the group: inside the optimizer it would become part of the update.
    assert muon.defaults["weight_decay"] == adamw.defaults["weight_decay"] == 0.0


def test_muon_and_adamw_accepts_every_hyperparameter_of_both_and_no_other() -> None:
    accepted = {
        f"{prefix}_{field}": value
        for prefix, optimizer in [("muon", Muon), ("adamw", AdamW)]
        for field, value in optimizer([PARAMETERS[2][1]], lr=0.1).defaults.items()
        if field != "weight_decay"
    }
    muon_and_adamw(**accepted)
    with pytest.raises(TypeError, match="takes no muon_weight_decay: choose from muon_beta"):
        muon_and_adamw(**accepted, muon_weight_decay=0.1)  # type: ignore[call-arg]


def test_muon_and_adamw_needs_both_learning_rates() -> None:
    with pytest.raises(TypeError, match="adamw_lr"):
        muon_and_adamw(muon_lr=0.02)  # type: ignore[call-arg]
