"""Samples at evaluations are those of the whole model, through any pipeline, and do not change the training."""

import copy
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from harness import all_weights, language_model, run_ranks
from torch import Tensor

from slipstream import Evaluation, EvaluationReport
from slipstream.pipeline import Samples
from slipstream.schedule import EvaluationSteps, Op, Schedule, ScheduleError
from slipstream.schedule.action import Key, requires

SAMPLES = Samples(((1, 2, 3), (4,), (5, 6)), num_tokens=5, seed=3)


def options(samples: Samples | None, **others: Any) -> dict[str, Any]:
    tokens = torch.randint(29, (2, 9), generator=torch.Generator().manual_seed(9))
    evaluation = Evaluation(lambda index: (tokens[:, :-1], tokens[:, 1:]), 2, every_steps=2, samples=samples)
    return {"num_microbatches": 4, "num_steps": 5, "evaluation": evaluation, "error_feedback": 1.0, **others}


def drawn_by_the_whole_model(model: torch.nn.Sequential, weights: dict[str, Tensor]) -> tuple[tuple[int, ...], ...]:
    """The same random numbers, one token at a time, without a pipeline and without padding."""
    model = copy.deepcopy(model).eval()
    model.load_state_dict(weights, strict=False)
    generator = torch.Generator().manual_seed(SAMPLES.seed)
    sequences = [list(prompt) for prompt in SAMPLES.prompts]
    with torch.no_grad():
        for _ in range(SAMPLES.num_tokens):
            logits = torch.stack([model(torch.tensor([sequence]))[0, -1] for sequence in sequences])
            chosen = torch.multinomial(logits.double().softmax(-1), 1, generator=generator)
            for sequence, token in zip(sequences, chosen.flatten().tolist(), strict=True):
                sequence.append(token)
    return tuple(tuple(sequence[-SAMPLES.num_tokens :]) for sequence in sequences)


@pytest.mark.parametrize(
    ("num_stages", "tied", "others"),
    [
        (1, True, {}),
        (2, False, {}),
        (4, True, {}),
        (3, False, {"threads": False}),
        (3, True, {"threads": False, "shared_memory": False}),
        (2, False, {"num_replicas": 2}),
        (2, True, {"num_replicas": 2, "threads": False, "shard_optimizer": True}),
        (3, True, {"schedule": "one_f_one_b"}),
        (3, False, {"schedule": "gpipe"}),
        (3, True, {"depth": "double", "num_microbatches": 6, "sync_start_steps": 2}),
    ],
)
def test_the_samples_are_those_of_the_whole_model_and_the_weights_those_without(
    num_stages: int, tied: bool, others: dict[str, Any]
) -> None:
    task, sgd = language_model(tied), partial(torch.optim.SGD, lr=2.0)
    with_samples = run_ranks(task, num_stages, sgd, **options(SAMPLES, **others))
    without = run_ranks(task, num_stages, sgd, **options(None, **others))
    for rank, other in zip(with_samples, without, strict=True):
        assert rank.weights.keys() == other.weights.keys()
        assert all(torch.equal(weight, other.weights[name]) for name, weight in rank.weights.items())
        assert rank.evaluations == other.evaluations
        assert [report.loss for report in rank.steps] == [report.loss for report in other.steps]
        reports = [report for report in rank.reports if isinstance(report, EvaluationReport)]
        assert [report.step for report in reports] == [1, 3, 4]
        if rank.stage < num_stages - 1:
            assert all(report.samples == () for report in reports)
    weights = all_weights([rank for rank in with_samples if rank.replica == 0])
    last = [report for report in with_samples[-1].reports if isinstance(report, EvaluationReport)]
    assert last[-1].samples == drawn_by_the_whole_model(task.model, weights)
    assert last[0].samples != last[-1].samples  # other weights, other text


def test_a_single_token_needs_no_way_back() -> None:
    task, one = language_model(False), Samples(((1,),), 1)
    ranks = run_ranks(task, 2, partial(torch.optim.SGD, lr=0.05), **options(one))
    samples = [report.samples for report in ranks[-1].reports if isinstance(report, EvaluationReport)]
    assert [len(sample[0]) for sample in samples] == [1, 1, 1]


def test_logits_that_are_not_finite_still_give_tokens() -> None:
    from slipstream.pipeline.sampling import Sampler
    from slipstream.transport.thread import ThreadMesh

    sampler = Sampler(Samples(((1,), (2,)), 1), ThreadMesh(1).transport(0), torch.device("cpu"))
    sampler.draw(torch.full((2, 3, 7), float("nan")), lambda: "nothing")
    assert all(0 <= token < 7 for (token,) in sampler.continuations())


@pytest.mark.parametrize("name", ["two_bw", "one_f_one_b", "gpipe"])
def test_no_stage_waits_for_a_token_that_waits_for_it(name: str) -> None:
    """The first stage begins an action of the evaluation when the last one has finished the action before it. What the
    last stage does until then needs nothing that the first one does afterwards."""
    num_checked = 0
    for stages, microbatches, depth, num_sync in product(range(1, 6), range(1, 9), ("minimum", "double"), (0, 2)):
        try:
            schedule = Schedule(
                name,
                stages,
                microbatches,
                7,
                depth=depth,
                sync_start_steps=num_sync,
                evaluate_after=EvaluationSteps(7, 2),
                num_evaluations=4,
            )
        except ScheduleError:
            continue
        left = [list(schedule.actions(stage)) for stage in range(stages)]
        done: set[Key] = set()
        while any(left):
            before = len(done)
            for stage, actions in enumerate(left):
                while actions:
                    action = actions[0]
                    needed = requires(action, stages, schedule.global_update)
                    if action.op is Op.EVALUATE and stage == 0 and action.microbatch > 0:
                        needed.append(Key(stages - 1, Op.EVALUATE, action.microbatch - 1, action.version))
                    if not done.issuperset(needed):
                        break
                    done.add(actions.pop(0).key)
            assert len(done) > before, f"{schedule} is stuck before {[str(a[0]) for a in left if a]}"
        num_checked += 1
    assert num_checked > 40
