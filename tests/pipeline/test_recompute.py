"""Layers computed again in the backward: the same numbers under every schedule, in less memory."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import replace
from functools import partial

import pytest
import torch
from harness import (
    TIMEOUT_SECONDS,
    Outcome,
    Task,
    even_cut,
    language_model,
    largest_difference,
    network,
    run_pipeline,
    run_reference,
)
from torch import Tensor, nn

from slipstream import AdamW, Evaluation, Group, Pipeline, launch, muon_and_adamw
from slipstream.errors import StageFailure
from slipstream.model.chunked_loss import chunked_next_token_loss
from slipstream.pipeline.recompute import Recomputing
from slipstream.pipeline.weight_versions import WeightVersions, weight_layout
from slipstream.tools.plan.live import LiveBytes
from slipstream.transport.base import Transport

ALL_BLOCKS = ("block0", "block1", "block2")
NUM_STEPS = 5


def groups_of(lam: float) -> list[Group]:
    return muon_and_adamw(
        muon_lr=0.02, adamw_lr=0.01, muon_ns_dtype=torch.float64, error_feedback=lam, clip_norm=0.05, weight_decay=0.1
    )


def assert_equal(one: Outcome, other: Outcome) -> None:
    for name, weight in one.weights.items():
        assert torch.equal(weight, other.weights[name]), name
    assert [[r.loss for r in reports] for reports in one.reports] == [
        [r.loss for r in reports] for reports in other.reports
    ]
    assert [[r.gradient_norms for r in reports] for reports in one.reports] == [
        [r.gradient_norms for r in reports] for reports in other.reports
    ]
    assert one.evaluations == other.evaluations


# ---- the same numbers


@pytest.mark.parametrize(
    ("schedule", "stages", "options"),
    [
        ("two_bw", 2, {"tied": True, "lam": 1.0}),
        ("two_bw", 4, {"tied": True, "lam": 0.5, "sync_start_steps": 2}),
        ("two_bw", 2, {"depth": "double", "lam": 1.0}),
        ("two_bw", 2, {"lam": 0.0, "track_alignment": False}),
        ("one_f_one_b", 2, {"tied": True}),
        ("gpipe", 2, {}),
        ("pipedream", 3, {"lam": 0.3}),
    ],
)
def test_recomputed_blocks_change_no_bit(schedule, stages, options):
    options = dict(options)
    task = language_model(tied=options.pop("tied", False))
    groups = groups_of(options.pop("lam", 0.0))
    held_out = task.data(10**6, 0)
    shared = {
        "schedule": schedule,
        "num_microbatches": 4,
        "num_steps": NUM_STEPS,
        "evaluation": Evaluation(lambda microbatch: held_out, 1, 2),
        **options,
    }
    plain = run_pipeline(task, stages, groups, **shared)
    for recompute in (ALL_BLOCKS, ALL_BLOCKS[::2]):
        assert_equal(run_pipeline(task, stages, groups, recompute=recompute, **shared), plain)


@pytest.mark.parametrize(("stages", "m"), [(1, 2), (2, 2), (4, 5)])
def test_with_the_loss_in_chunks_too_the_oracle_is_followed(stages, m):
    task = language_model(tied=True)
    groups = groups_of(1.0)
    shared = {"num_microbatches": m, "num_steps": NUM_STEPS, "sync_start_steps": 1}
    expected, _ = run_reference(task, groups, delays=[1] * stages, layers_per_stage=even_cut(task, stages), **shared)
    lean = copy.deepcopy(task.model)
    lean.head.logits = False

    def loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        return chunked_next_token_loss(outputs, targets, 5) / targets.numel()

    outcome = run_pipeline(
        replace(task, model=lean, loss=loss),
        stages,
        groups,
        recompute=ALL_BLOCKS,
        layers_per_stage=even_cut(task, stages),
        **shared,
    )
    assert largest_difference(outcome.weights, expected) <= 1e-12


def test_layers_of_ones_own_are_named_by_their_place():
    task = network()
    groups = [Group("all", partial(AdamW, lr=0.01), error_feedback=1.0)]
    options = {"num_microbatches": 3, "num_steps": NUM_STEPS}
    everything = [name for name, _ in task.model.named_children()]
    recomputed = run_pipeline(task, 3, groups, recompute=everything, **options)
    assert_equal(recomputed, run_pipeline(task, 3, groups, **options))


def test_layers_may_pass_tuples():
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((3,), 2.0))

        def forward(self, value: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            first, second = value if isinstance(value, tuple) else (value, value)
            return first * self.weight, second + self.weight

    layers = OrderedDict(a=Pair(), b=Pair())
    inputs = torch.ones(3)
    found = []
    for recomputed in ((), ("a", "b")):
        model = Recomputing(copy.deepcopy(layers), recomputed)
        first, second = model(inputs)
        (first.square().sum() + second.square().sum()).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_what_is_drawn_at_random_is_drawn_again():
    model = nn.Sequential(OrderedDict(a=nn.Linear(8, 8), b=nn.Dropout(0.5), c=nn.Linear(8, 8)))
    gradients = []
    for recomputed in ((), ("a", "b", "c")):
        copied = Recomputing(OrderedDict(copy.deepcopy(model).named_children()), recomputed)
        torch.manual_seed(0)
        copied(torch.ones(4, 8)).square().sum().backward()
        gradients.append([parameter.grad for parameter in copied.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, in its compiler
def test_a_compiled_model_is_the_same():
    task = language_model(tied=False, num_layers=1)
    inputs, targets = task.data(0, 0)
    model = Recomputing(OrderedDict(task.model.named_children()), ["block0"])
    task.loss(task.model(inputs), targets).backward()
    expected = {name: parameter.grad for name, parameter in task.model.named_parameters()}
    model.zero_grad()
    task.loss(torch.compile(model, backend="aot_eager")(inputs), targets).backward()
    for name, parameter in model.named_parameters():
        assert float((parameter.grad - expected[name]).abs().max()) <= 1e-12, name


# ---- weights that change


def test_overwriting_a_version_that_will_be_recomputed_makes_autograd_raise():
    module = Recomputing(OrderedDict(a=nn.Linear(3, 3)), ["a"])
    versions = WeightVersions(module, weight_layout(2))
    outputs = versions.module(0)(torch.ones(1, 3, requires_grad=True)).square().sum()
    versions.open_next()
    versions.close_next()
    versions.open_next()  # version 2 goes where version 0 was
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.backward()


def test_paci_is_refused_for_it_overwrites_what_would_be_needed():
    task = network()
    with pytest.raises(StageFailure, match=r"recompute .* paci has overwritten them: leave it empty, or use two_bw"):
        run_pipeline(
            task,
            2,
            [Group("all", partial(AdamW, lr=0.01))],
            schedule="paci",
            num_microbatches=2,
            num_steps=2,
            recompute=["0"],
        )


def test_a_name_that_is_no_layer_is_refused():
    task = network(num_layers=4)
    with pytest.raises(StageFailure, match="recompute names 'block7', which is no layer: the layers are 0, 1, 2, 3"):
        run_pipeline(
            task,
            2,
            [Group("all", partial(AdamW, lr=0.01))],
            num_microbatches=2,
            num_steps=2,
            recompute=["block7"],
        )


def test_an_evaluation_recomputes_nothing_and_keeps_nothing():
    module = Recomputing(OrderedDict(a=nn.Linear(3, 3)), ["a"])
    calls = []
    module.a.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        assert not module(torch.ones(1, 3)).requires_grad
    assert len(calls) == 1


# ---- less memory


def activations(task: Task, recompute: tuple[str, ...]) -> list[int]:
    """Per stage: bytes that one microbatch holds between forward and backward, from the forwards of gpipe."""

    def worker(transport: Transport) -> int:
        live, before_forward = LiveBytes(), []

        def data(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
            before_forward.append(live.now)
            return task.data(step, microbatch)

        pipeline = Pipeline(
            transport,
            copy.deepcopy(task.model),
            data=data,
            loss=task.loss,
            optimizer=partial(torch.optim.SGD, lr=0.1),
            schedule="gpipe",
            num_microbatches=4,
            num_steps=1,
            layers_per_stage=[3, 2],
            recompute=recompute,
        )
        with live.watch():
            for _ in pipeline.run():
                pass
        return before_forward[2] - before_forward[1]

    return launch(worker, 2, threads=True, timeout_seconds=TIMEOUT_SECONDS)


def test_a_recomputed_block_keeps_its_input_alone():
    task = language_model(tied=False)
    message = 2 * 8 * 16 * 8  # sequences, positions, width, bytes
    tokens = 2 * 2 * 8 * 8  # inputs and targets: what this test's data makes
    kept, half, none = (activations(task, names)[0] for names in ((), ("block0",), ALL_BLOCKS))
    assert none <= tokens + 3 * message + 2 * 8192  # each block's input and the output; generators' states
    assert kept > 4 * none
    assert half - none == pytest.approx((kept - none) / 2, rel=0.1)
