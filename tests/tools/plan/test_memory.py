"""The memory of a stage as predicted, beside that of the same stage as it runs."""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass, replace

import pytest
import torch
from harness import TIMEOUT_SECONDS
from settings import changed
from torch import Tensor, nn

from slipstream import Evaluation, Pipeline, launch
from slipstream.config.defaults import precision_of
from slipstream.config.models import model_of, recomputed_layers
from slipstream.config.optimizers import parameter_groups
from slipstream.config.schema import Config, ModelSection, TrainSection
from slipstream.model.decoder import decoder
from slipstream.pipeline.clock import Activity, TimeSplit
from slipstream.pipeline.reduction import NUM_REQUESTS, Finished, Reducer, Requests
from slipstream.schedule import TRAITS, Action, Schedule
from slipstream.tools.plan.live import LiveBytes
from slipstream.tools.plan.memory import MemoryModel
from slipstream.tools.plan.stage import Layers, Stage, StageMemory, dense_blocks, layers_of
from slipstream.transport.base import Exchange, Transport

SIZES = (2, 2)
MICROBATCHES = 4
NUM_STEPS = 3
SIZE = 3
LENGTH = 24
BASE = Config(
    model=ModelSection(
        dim=32, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=96, vocab_size=160, sequence_length=LENGTH
    ),
    train=TrainSection(microbatch_size=SIZE),
)
EXPERTS = {"model__num_experts": 4, "model__experts_per_token": 2, "model__expert_dim": 24}
"""Four of them for 2 x 72 rows: where all tokens are alike, the load is as uneven as can be."""
MESSAGE = SIZE * LENGTH * 32 * 4
STAGE = Stage(0, 2, 0, 2, versions=2, delay=1, in_flight=2, max_in_flight=2, traits=TRAITS["two_bw"])


@dataclass(frozen=True)
class Measured:
    weights: int
    optimizer: int
    activations: int
    """Of one microbatch, from the growth between the forwards of gpipe."""
    peak: int
    """Of everything."""
    evaluated: int = 0
    """What was made to evaluate with."""


def storage_bytes(tensors) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def measure(
    config: Config, schedule: str, num_replicas: int = 1, num_evaluations: int = 0, batch_waits: bool = True
) -> list[Measured]:
    """Runs three steps on two stages, as threads, each with a count of its own.

    An update that is made beside a batch may meet any action of it, or none. Here it begins when most is held: after
    the first backward of that batch, which found the gradients of the one before waiting and made its own, and with as
    many microbatches in flight as there will be. There the batch waits for it, or goes on with the next backward."""
    spec = model_of(config, 0)
    model, loss = spec.layers_and_loss(config.train.loss_chunk_tokens)
    spec.initialise(model, seed=0)
    dtypes = precision_of(config)
    model.to(dtypes.master)

    def worker(transport: Transport) -> Measured:
        live, before_forward, evaluated = LiveBytes(), [], [0]

        def data(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
            before_forward.append(live.now)
            ids = torch.zeros(SIZE, LENGTH, dtype=torch.int64)
            return (ids, ids) if transport.stage == 0 else (None, ids)

        pipeline = Pipeline(
            transport,
            copy.deepcopy(model),
            data=data,
            loss=loss,
            optimizer=parameter_groups(config),
            num_microbatches=MICROBATCHES,
            num_steps=NUM_STEPS,
            schedule=schedule,
            track_alignment=config.train.track_alignment,
            layers_per_stage=SIZES,
            precision=dtypes,
            shard_optimizer=config.optimizer.sharded,
            evaluation=Evaluation(lambda microbatch: data(0, microbatch), num_evaluations) if num_evaluations else None,
            recompute=recomputed_layers(config, model_of(config, 0)),
        )
        apply, enter, stage_thread = pipeline.updater.apply, pipeline.executor.clock.enter, threading.get_ident()
        called = [threading.Event() for _ in range(NUM_STEPS)]
        made = [threading.Event() for _ in range(NUM_STEPS)]

        def watched_apply(step: int, *arguments) -> None:
            if threading.get_ident() != stage_thread and step < NUM_STEPS - 1:
                assert called[step].wait(TIMEOUT_SECONDS)
            with live.watch():
                apply(step, *arguments)
            made[step].set()

        def watched_enter(activity: Activity, action: Action | None = None) -> None:
            enter(activity, action)
            if activity is Activity.BACKWARD and action is not None:
                step, microbatch = divmod(action.microbatch, MICROBATCHES)
                if step > 0 and microbatch == 1:
                    called[step - 1].set()
                    assert not batch_waits or made[step - 1].wait(TIMEOUT_SECONDS)

        pipeline.updater.apply = watched_apply
        pipeline.executor.clock.enter = watched_enter
        make_evaluated = pipeline.executor._module_to_evaluate

        def watched_evaluated(action) -> nn.Module:
            module = make_evaluated(action)
            owned = {master.data_ptr() for master in pipeline.versions.masters.values()}
            weights = getattr(module, "_weights", {}).values()
            evaluated[0] = storage_bytes(weight for weight in weights if weight.data_ptr() not in owned)
            return module

        pipeline.executor._module_to_evaluate = watched_evaluated
        versions = pipeline.versions
        with live.watch():
            for _ in pipeline.run():
                pass
        modules = [versions.module(versions.newest - i) for i in range(versions.num_versions)]
        kept = [t for module in modules for t in (*module.parameters(), *module.buffers())]
        weights = storage_bytes([*kept, *versions.masters.values()])
        states = [optimizer.state[master] for _, optimizer, master in pipeline.updater.optimizer_states()]
        samples = pipeline.updater.samples().values()
        optimizer = storage_bytes(v for s in states for v in s.values() if isinstance(v, Tensor))
        optimizer += storage_bytes(samples)
        return Measured(weights, optimizer, before_forward[2] - before_forward[1], weights + live.peak, evaluated[0])

    return launch(worker, 2, num_replicas=num_replicas, threads=True, timeout_seconds=TIMEOUT_SECONDS)


def predict(config: Config, schedule: str, num_replicas: int = 1) -> list[StageMemory]:
    promised = Schedule(schedule, 2, MICROBATCHES)
    memory = MemoryModel(config, model_of(config, 0), "cpu")
    in_flight = {"gpipe": (MICROBATCHES, MICROBATCHES), "pipedream": (MICROBATCHES + 1, 1)}.get(schedule, (2, 1))
    stages = [
        Stage(
            index=i,
            num_stages=2,
            first_layer=sum(SIZES[:i]),
            num_layers=SIZES[i],
            versions=promised.num_versions(i),
            delay=promised.delay(i),
            in_flight=in_flight[i],
            max_in_flight=promised.max_in_flight,
            traits=promised.traits,
            num_replicas=num_replicas,
        )
        for i in range(2)
    ]
    return [memory.stage_memory(stage, SIZE) for stage in stages]


def assert_peak(measured: int, predicted: StageMemory) -> None:
    expected = predicted.total - predicted.messages
    assert 0.9 * expected <= measured <= 1.1 * expected


def assert_as_predicted(measured: list[Measured], predicted: list[StageMemory]) -> None:
    """What a stage keeps to the byte, and its peak within a tenth."""
    for stage, memory in zip(measured, predicted, strict=True):
        assert (stage.weights, stage.optimizer) == (memory.weights, memory.optimizer)
        assert_peak(stage.peak, memory)


@pytest.mark.parametrize(
    ("optimizer", "schedule", "error_feedback", "track_alignment", "copies"),
    [
        ("muon", "two_bw", 1.0, True, 3),
        ("adamw", "two_bw", 0.0, False, 2),
        ("adamw", "one_f_one_b", 1.0, True, 1),
        ("adamw", "pipedream", 1.0, True, 3),
        ("adamw", "paci", 0.0, False, 1),
    ],
)
def test_what_a_stage_keeps_is_predicted_exactly_and_its_peak_within_a_tenth(
    optimizer, schedule, error_feedback, track_alignment, copies
):
    config = changed(
        BASE,
        optimizer__name=optimizer,
        optimizer__error_feedback=error_feedback,
        train__track_alignment=track_alignment,
    )
    measured, predicted = measure(config, schedule), predict(config, schedule)
    tables = 2 * LENGTH * 4 * 4  # of one block: cosine and sine, 4 pairs, 4 bytes
    parameters = sum(p.numel() for p in decoder(model_of(config, 0))[:2].parameters()) * 4
    assert predicted[0].weights == copies * parameters + tables
    assert_as_predicted(measured, predicted)


MIXED = changed(BASE, train__dtype="float64", train__compute_dtype="float32", evaluation__batches=0)
"""Twice the bytes of float32 and bfloat16, and much faster on a CPU."""


@pytest.mark.parametrize(
    ("optimizer", "schedule", "error_feedback", "track_alignment", "gradient_dtype"),
    [
        ("muon", "two_bw", 1.0, True, "float64"),
        ("muon", "two_bw", 1.0, True, "float32"),
        ("adamw", "two_bw", 1.0, False, "float32"),
        ("muon", "two_bw", 0.0, False, "float64"),
        ("torch.optim.RMSprop", "two_bw", 1.0, False, "float64"),  # which cannot predict: z[t] is kept
        ("torch.optim.RMSprop", "two_bw", 1.0, False, "float32"),
        ("adamw", "one_f_one_b", 0.0, True, "float32"),
        ("muon", "one_f_one_b", 1.0, False, "float64"),
        ("adamw", "pipedream", 1.0, True, "float64"),
        ("adamw", "paci", 0.0, False, "float32"),
    ],
)
def test_mixed_precision_keeps_what_is_predicted_and_peaks_within_a_tenth(
    optimizer, schedule, error_feedback, track_alignment, gradient_dtype
):
    config = changed(
        MIXED,
        optimizer__name=optimizer,
        optimizer__error_feedback=error_feedback,
        train__track_alignment=track_alignment,
        train__gradient_dtype=gradient_dtype,
    )
    predicted = predict(config, schedule)
    measured = measure(config, schedule)
    tables = 2 * LENGTH * 4 * 8  # of one block: cosine and sine, 4 pairs, in the masters' dtype
    parameters = sum(p.numel() for p in decoder(model_of(config, 0))[:2].parameters())
    versions = Schedule(schedule, 2, MICROBATCHES).num_versions(0)
    assert predicted[0].weights == (4 * versions + 8) * parameters + tables
    batches = 2 if schedule == "two_bw" else 1
    assert predicted[0].gradients == batches * parameters * getattr(torch, gradient_dtype).itemsize
    assert_as_predicted(measured, predicted)


BF16 = changed(BASE, train__compute_dtype="bfloat16", evaluation__batches=0)
"""Which is slow on a CPU."""


@pytest.mark.parametrize(("optimizer", "compute"), [("muon", None), ("adamw", "bfloat16")])
@pytest.mark.parametrize(
    "fields",
    [
        {"adapter__rank": 4},
        {"adapter__rank": 2, "adapter__targets": ("query", "down"), "model__tied_embeddings": True},
        {"train__freeze": ("embedding.*", "*norm.weight")},
    ],
    ids=["adapters", "few adapters", "frozen"],
)
def test_frozen_weights_are_predicted_once(fields, optimizer, compute):
    if "adapter__rank" in fields:
        pytest.importorskip("peft")
    config = changed(BASE, **fields, optimizer__name=optimizer, train__compute_dtype=compute, evaluation__batches=0)
    assert_as_predicted(measure(config, "two_bw"), predict(config, "two_bw"))


def test_bf16_beside_float32_peaks_within_a_tenth():
    assert_as_predicted(measure(BF16, "one_f_one_b"), predict(BF16, "one_f_one_b"))


@pytest.mark.parametrize(("config", "message"), [(MIXED, MESSAGE), (BF16, MESSAGE / 2)])
def test_activations_of_mixed_precision_are_predicted_to_the_byte(config, message):
    measured, predicted = measure(config, "gpipe"), predict(config, "gpipe")
    per_microbatch = [memory.activations / MICROBATCHES for memory in predicted]
    assert measured[0].activations == per_microbatch[0]
    assert measured[1].activations == pytest.approx(per_microbatch[1] - message, abs=8)


@pytest.mark.parametrize(("error_feedback", "sharded", "base"), [
    (1.0, False, MIXED),
    (0.0, False, MIXED),
    (1.0, True, MIXED),
    (1.0, True, BASE),
    (1.0, False, BASE),
])  # fmt: skip
def test_an_evaluation_holds_a_copy_of_the_masters_where_no_module_has_them(error_feedback, sharded, base):
    config = changed(base, optimizer__error_feedback=error_feedback, optimizer__sharded=sharded, evaluation__batches=2)
    measured = measure(config, "two_bw", num_replicas=2, num_evaluations=2)
    memory = MemoryModel(config, model_of(config, 0))
    stage = replace(STAGE, num_replicas=2)
    stepping = memory._stepping(stage)
    layers = Layers(True, 1, 0, False)
    passes = memory.passes(layers, SIZE)
    owned = memory.update(layers, stepping, 2 if sharded else 1).values
    expected = memory._evaluated(stepping, 2 if sharded else 1, passes, owned)
    smallest = min(measured[0].evaluated, measured[2].evaluated)  # of the replica that owns most
    assert smallest == expected
    assert (expected > 0) == (error_feedback > 0 and (sharded or base is MIXED))


def test_what_an_evaluation_holds_is_on_top_of_what_computes():
    """Of a stage with many parameters, of which an update takes one at a time."""
    config = changed(MIXED, model__num_layers=40, optimizer__name="adamw", train__track_alignment=False)
    stage = replace(STAGE, num_layers=31)
    without, held = (
        MemoryModel(changed(config, evaluation__batches=batches), model_of(config, 0)).stage_memory(stage, SIZE)
        for batches in (0, 2)
    )
    assert without.work < held.work <= held.weights / 4 + without.work  # four bytes of sixteen
    assert held.most >= without.most


@pytest.mark.parametrize(
    ("base", "optimizer", "tied"),  # every two of them together
    [(BASE, "muon", False), (BASE, "adamw", True), (MIXED, "muon", True), (MIXED, "adamw", False)],
)
def test_replicas_that_share_the_optimizer_keep_what_their_owners_own(base, optimizer, tied):
    config = changed(
        base,
        optimizer__sharded=True,
        optimizer__name=optimizer,
        model__tied_embeddings=tied,
        evaluation__batches=0,
    )
    predicted = predict(config, "two_bw", num_replicas=2)
    measured = measure(config, "two_bw", num_replicas=2)
    whole = predict(changed(config, optimizer__sharded=False), "two_bw", num_replicas=2)
    for stage in range(2):
        replicas = [measured[stage], measured[2 + stage]]
        largest = max(replicas, key=lambda replica: replica.weights + replica.optimizer)
        assert (largest.weights, largest.optimizer) == (predicted[stage].weights, predicted[stage].optimizer)
        assert predicted[stage].optimizer < whole[stage].optimizer
        assert predicted[stage].weights < whole[stage].weights
        assert predicted[stage].gradients == whole[stage].gradients
        if not tied:
            assert_peak(max(replica.peak for replica in replicas), predicted[stage])


@pytest.mark.parametrize(("reduction", "copies"), [("float64", 0), ("float32", 1)])
@pytest.mark.parametrize("sharded", [False, True])
def test_gradients_summed_in_another_dtype_are_copied_first(reduction, copies, sharded):
    """Against Reducer itself, and one parameter, which is all that a stage may own."""
    config = changed(MIXED, train__reduction_dtype=reduction, optimizer__sharded=sharded)
    live, seen = LiveBytes(), []
    gradients = {"weight": torch.zeros(1000, dtype=torch.float64)}
    held = dict(gradients)  # as the background does

    class Replicas(Exchange):
        def wait(self, waiting) -> None:
            seen.append(live.now)

    class Alone:
        stage, num_stages, replica, num_replicas, timeout_seconds = 0, 1, 0, 2, 60.0

        def add_replicas(self, tensors, owners=None) -> Exchange:
            return Replicas()

    zeros = torch.zeros(1, 3, dtype=torch.float64)
    reducer = Reducer(
        Alone(), ["all"], {"weight": 0}, {}, False, {"weight": 0} if sharded else None, precision_of(config).reduction
    )
    with live.watch():
        reducer.reduce(Finished(gradients, None, zeros, 0.0, 0, TimeSplit(), Requests()), lambda: "")
    stage = replace(STAGE, num_replicas=2)
    waiting, left = MemoryModel(config, model_of(config, 0))._replicas(stage, 1000, 1000)
    assert (waiting, left) == (copies * 4000, copies * 8000)
    assert seen[0] == waiting + 4 * NUM_REQUESTS  # which are summed too
    assert live.now == left
    assert held["weight"].numel() == 1000


@pytest.mark.parametrize("fields", [{"recompute_every": 1}, {"recompute_every": 2}, {"loss_chunk_tokens": 20}])
def test_the_peak_follows_what_is_recomputed_and_computed_in_chunks(fields):
    config = changed(BASE, **{f"train__{name}": value for name, value in fields.items()})
    measured, predicted = measure(config, "two_bw"), predict(config, "two_bw")
    for stage in range(2):
        assert_peak(measured[stage].peak, predicted[stage])


@pytest.mark.parametrize("config", [BASE, changed(BASE, train__recompute_every=1)])
def test_an_update_that_meets_a_backward_takes_no_more_than_the_most(config):
    measured, predicted = measure(config, "two_bw", batch_waits=False), predict(config, "two_bw")
    for stage in range(2):
        assert predicted[stage].overlap > 0
        assert measured[stage].peak <= predicted[stage].most - predicted[stage].messages


@pytest.mark.parametrize("fields", [{}, {"recompute_every": 1}, {"recompute_every": 2}, {"loss_chunk_tokens": 20}])
def test_activations_of_a_microbatch_are_predicted_to_the_byte(fields):
    config = changed(BASE, **{f"train__{name}": value for name, value in fields.items()})
    measured, predicted = measure(config, "gpipe"), predict(config, "gpipe")
    per_microbatch = [memory.activations / MICROBATCHES for memory in predicted]
    assert measured[0].activations == per_microbatch[0]
    # The second stage's inputs were made by the first; a scalar of its own is the sum of the losses.
    assert measured[1].activations == pytest.approx(per_microbatch[1] - MESSAGE, abs=8)


@pytest.mark.parametrize(("base", "dense"), [(BASE, 1), (MIXED, 0)])
def test_experts_are_predicted_as_exactly_however_uneven_their_load(dense, base):
    config = changed(base, **EXPERTS, model__num_shared_experts=1, model__num_dense_layers=dense)
    assert_as_predicted(measure(config, "two_bw"), predict(config, "two_bw"))
    measured, predicted = measure(config, "gpipe"), predict(config, "gpipe")
    assert measured[0].activations == predicted[0].activations / MICROBATCHES


@pytest.mark.parametrize(
    ("first", "count", "expected"),
    [
        (0, 12, Layers(True, 3, 7, True)),
        (0, 1, Layers(True, 0, 0, False)),
        (0, 3, Layers(True, 2, 0, False)),
        (2, 4, Layers(False, 2, 2, False)),
        (10, 2, Layers(False, 0, 1, True)),
    ],
)
def test_the_blocks_of_a_stage_are_told_apart(first, count, expected):
    config = changed(BASE, **EXPERTS, model__num_layers=10, model__num_dense_layers=3)
    assert layers_of(model_of(config, 0), first, count) == expected
    dense = changed(BASE, model__num_layers=10)
    assert layers_of(model_of(dense, 0), first, count) == replace(expected, dense=expected.blocks, sparse=0)


@pytest.mark.parametrize("every", [0, 1, 2])
def test_a_stage_of_many_blocks_of_both_kinds_is_what_it_would_be_if_all_were_played(every):
    config = changed(BASE, **EXPERTS, model__num_layers=9, model__num_dense_layers=4, train__recompute_every=every)
    memory, layers = MemoryModel(config, model_of(config, 0), "cpu"), Layers(False, 4, 5, True)
    recomputed = tuple(every > 0 and i % every == 0 for i in range(9))
    played = memory._play_passes(layers, SIZE, recomputed, 0)
    found = memory.passes(layers, SIZE, recomputed)
    assert replace(found, backward_work=0) == replace(played, backward_work=0)
    # A backward comes to the dense blocks when those with experts, of which only the last are played, have let go of
    # what they held: an upper bound.
    assert played.backward_work <= found.backward_work <= 1.2 * played.backward_work
    assert every or found == played


def test_tied_weights_are_held_by_both_stages():
    config = changed(BASE, model__tied_embeddings=True, optimizer__name="adamw")
    measured, predicted = measure(config, "two_bw"), predict(config, "two_bw")
    for stage in range(2):
        assert measured[stage].weights == predicted[stage].weights
        assert measured[stage].optimizer == predicted[stage].optimizer


def test_kernels_of_a_gpu_keep_less_of_a_norm():
    model = model_of(BASE, 0)
    cpu, cuda = (MemoryModel(BASE, model, kernels).passes(dense_blocks(1), SIZE) for kernels in ("cpu", "cuda"))
    # Two normalised inputs, and attention's output, which on the CPU is copied for the layer that follows.
    assert 3 * MESSAGE - 512 < cpu.activations - cuda.activations <= 3 * MESSAGE


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("base", [BASE, changed(MIXED, train__gradient_dtype="float32")])
def test_an_update_of_many_blocks_of_both_kinds_is_what_it_would_be_if_all_were_played(base, optimizer, monkeypatch):
    """With stacks that two blocks fill."""
    monkeypatch.setattr("slipstream.optim.optimizer.STACK_ELEMENTS", 2 * 4 * 32 * 32)
    config = changed(base, **EXPERTS, model__num_layers=9, model__num_dense_layers=4, optimizer__name=optimizer)
    memory, layers = MemoryModel(config, model_of(config, 0), "cpu"), Layers(True, 4, 5, False)
    stepping = memory._stepping(STAGE)
    played, found = memory._play_update(layers, stepping), memory.update(layers, stepping)
    assert (found.optimizer, found.values) == (played.optimizer, played.values)
    assert played.work <= found.work <= 1.1 * played.work


@pytest.mark.parametrize("base", [BASE, changed(MIXED, train__gradient_dtype="float32")])
def test_stages_of_small_matrices_are_found_from_three_that_are_played(base, monkeypatch):
    """No number of adapters fills a stack, so an update of any stage would play all of its blocks."""
    pytest.importorskip("peft")
    config = changed(base, model__num_layers=12, adapter__rank=4)
    memory, num_played, play = MemoryModel(config, model_of(config, 0), "cpu"), [], MemoryModel._play_update
    stepping = memory._stepping(STAGE)
    stages = [Layers(size > 4, size, 0, size > 5) for size in range(4, 8)]
    expected = [play(memory, layers, stepping) for layers in stages]

    def counted(*arguments):
        num_played.append(arguments[1].blocks)
        return play(*arguments)

    monkeypatch.setattr(MemoryModel, "_play_update", counted)
    assert [memory.update(layers, stepping) for layers in stages] == expected
    assert num_played == [2, 3, 12]


@pytest.mark.parametrize(("every", "has_head"), [(0, True), (0, False), (1, False), (2, True), (2, False), (3, True)])
def test_a_stage_of_many_blocks_is_what_it_would_be_if_all_were_played(every, has_head):
    config = changed(BASE, model__num_layers=8, train__recompute_every=every)
    memory = MemoryModel(config, model_of(config, 0), "cpu")
    names = [f"block{i}" for i in range(2, 8)]
    recomputed = tuple(name in recomputed_layers(config, memory.model) for name in names)
    assert sum(recomputed) == {0: 0, 1: 6, 2: 3, 3: 2}[every]
    six = Layers(False, 6, 0, has_head)
    assert memory.passes(six, SIZE, recomputed) == memory._play_passes(six, SIZE, recomputed, 0)


def test_recomputed_blocks_and_chunks_of_the_loss_take_less_room():
    config = changed(BASE, model__num_layers=8, model__vocab_size=4096)
    plain, blocks, chunks = (
        MemoryModel(changed(config, **fields), model_of(config, 0), "cuda")
        for fields in ({}, {"train__recompute_every": 1}, {"train__loss_chunk_tokens": 8})
    )
    again = blocks.passes(Layers(True, 4, 0, False), SIZE, (True,) * 4)
    kept = plain.passes(Layers(True, 4, 0, False), SIZE)
    assert again.activations < 6 * MESSAGE + 5 * 8192 < kept.activations / 4
    assert again.activations + again.backward_work < kept.activations + kept.backward_work
    logits = SIZE * LENGTH * 4096 * 4
    head, lean = (memory.passes(Layers(False, 0, 0, True), SIZE) for memory in (plain, chunks))
    assert head.activations + head.backward_work > 3 * logits
    assert lean.activations + lean.backward_work < 3 * 4 * head.parameters + 4 * MESSAGE
    assert lean.forward_work < logits
