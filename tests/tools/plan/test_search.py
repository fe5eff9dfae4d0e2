"""What a search finds, and what is advised."""

from __future__ import annotations

from dataclasses import replace

import pytest
from settings import changed

from slipstream.config.models import model_of, recomputed_layers
from slipstream.config.schema import Config, ModelSection, OptimizerSection
from slipstream.schedule import TRAITS
from slipstream.tools.plan.advice import advise
from slipstream.tools.plan.costs import DeviceKind, ModelCosts, estimate
from slipstream.tools.plan.fsdp import FSDP
from slipstream.tools.plan.memory import MemoryModel
from slipstream.tools.plan.savings import ever_smaller, marks
from slipstream.tools.plan.search import DATA_PARALLEL, Cluster, Division, Option, Search, best_of
from slipstream.train.layer_profile import LayerCost

CONFIG = Config(
    model=ModelSection(dim=64, num_layers=10, num_heads=4, num_kv_heads=2, hidden_dim=256, sequence_length=8),
    optimizer=OptimizerSection(name="adamw"),
)
MODEL = model_of(CONFIG, 0)
DEVICE = DeviceKind("h200", 1e9, 1e12, 1e12, 1e12)
MEMORY = MemoryModel(CONFIG, MODEL, "cuda")  # one for all tests: it remembers


def search(num_devices: int = 4, memory: float = 1e9, batch_size: int = 32, **costs) -> Search:
    estimated = estimate(CONFIG, MODEL, DEVICE, efficiency=0.5)
    layers = tuple(replace(layer, **costs) for layer in estimated.layers)
    return Search(
        CONFIG, MODEL, replace(estimated, layers=layers), Cluster(num_devices, memory, 0.0, 1e15), batch_size, MEMORY
    )


def best(found: Search, schedule: str) -> Option:
    option = found.best(schedule)
    assert isinstance(option, Option), option
    return option


def test_devices_and_sequences_are_all_accounted_for():
    for schedule in (DATA_PARALLEL, "two_bw"):
        option = best(search(num_devices=6, batch_size=12), schedule)
        division = option.division
        assert division.num_stages * division.num_replicas == 6
        assert division.num_replicas * division.num_microbatches * division.microbatch_size == 12
        assert sum(division.layers_per_stage) == 12


def test_two_bw_is_faster_than_a_schedule_that_drains_and_keeps_more():
    found = search(update=0.0)
    late, drained = best(found, "two_bw"), best(found, "one_f_one_b")
    assert late.tokens_per_second > drained.tokens_per_second
    assert late.memory[0].weights > 2.9 * drained.memory[0].weights * len(drained.memory) / len(late.memory)


def test_less_memory_leaves_fewer_or_smaller_microbatches_in_flight():
    roomy = best(search(), "two_bw")
    tight = best(search(memory=0.95 * roomy.largest.most), "two_bw")
    assert roomy.fits and tight.fits
    assert tight.largest.most < roomy.largest.most
    assert tight.tokens_per_second <= roomy.tokens_per_second * 1.02


def test_a_schedule_of_ones_own_is_advised_where_it_is_alone_and_comes_last(monkeypatch):
    monkeypatch.setitem(TRAITS, "my_schedule", TRAITS["gpipe"])
    monkeypatch.setitem(TRAITS, "another", TRAITS["gpipe"])
    monkeypatch.setattr("slipstream.schedule.schedule.SCHEDULES", tuple(TRAITS))
    found = search()
    gpipe = best(found, "gpipe")
    own, another = (replace(gpipe, schedule=name) for name in ("my_schedule", "another"))
    for options in ([own], [own, another], [own, gpipe], [another, gpipe, own]):
        advice = advise([found], {option.schedule: option for option in options}, CONFIG, Config(), None)
        assert advice.choice == (gpipe if gpipe in options else own)


def test_what_does_not_fit_is_reported_with_what_it_would_take():
    option = best(search(memory=1e5), "one_f_one_b")
    assert not option.fits
    assert option.largest.most > 1e5


def test_a_batch_that_cannot_be_shared_is_refused_in_words():
    assert "7 sequences" in str(search(num_devices=4, batch_size=7).best(DATA_PARALLEL))


def test_stages_cost_what_their_layers_cost_in_proportion_to_the_microbatch():
    layers = tuple(LayerCost(str(i), float(i), 2.0 * i, 3.0 * i, 1.0) for i in range(4))
    stages = ModelCosts(layers, microbatch_size=2, source="").stages([1, 3], 4, latency=0.5)
    assert stages.forward == (0.0, 12.0)
    assert stages.backward_input == (0.0, 24.0)
    assert stages.backward_weight == (0.0, 36.0)
    assert stages.update == (1.0, 3.0)
    assert stages.latency == 0.5


def test_a_layer_that_is_recomputed_takes_one_forward_more():
    costs = estimate(CONFIG, MODEL, DEVICE, 0.5)
    again = costs.recomputing(["block1"])
    assert again.layers[1] == costs.layers[1]
    assert again.layers[2].forward == costs.layers[2].forward
    assert again.layers[2].compute == pytest.approx(costs.layers[2].compute + costs.layers[2].forward)


def test_a_loss_in_chunks_has_its_gradient_with_the_forward():
    plain = estimate(CONFIG, MODEL, DEVICE, 0.5).layers[-1]
    chunks = estimate(changed(CONFIG, train__loss_chunk_tokens=64), MODEL, DEVICE, 0.5).layers[-1]
    assert chunks.forward == pytest.approx(plain.compute)
    assert chunks.backward_input == 0


def test_paci_is_not_planned_with_recomputed_blocks():
    searching = search()
    again = replace(searching, config=changed(searching.config, train__recompute_every=1))
    assert "recomputed" in str(again.best("paci"))


def searched(fields: dict, num_devices: int = 4, bandwidth: float = 1e15) -> Search:
    config = changed(CONFIG, **fields)
    costs = estimate(config, MODEL, DEVICE, efficiency=0.5)
    cluster = Cluster(num_devices, 1e9, 0.0, bandwidth)
    return Search(config, MODEL, costs, cluster, 32, MemoryModel(config, MODEL, "cuda"))


def test_messages_and_sums_over_replicas_travel_in_their_dtypes():
    plain, mixed, shared = (
        searched(fields, bandwidth=1e6)
        for fields in (
            {},
            {"train__compute_dtype": "bfloat16", "train__reduction_dtype": "bfloat16"},
            {"train__compute_dtype": "bfloat16", "optimizer__sharded": True},
        )
    )
    assert mixed._latency(2, 2) == plain._latency(2, 2) / 2
    division = Division((6, 6), 2, 1, 1)
    ring, half, both = (one._with_replicas("one_f_one_b", 0.0, division) for one in (plain, mixed, shared))
    assert half == pytest.approx(ring / 2)
    assert both == pytest.approx(ring * 6 / 8)  # gradients of four bytes there, working copies of two back


def test_replicas_that_share_the_optimizer_share_the_update():
    whole, shared = searched({}), searched({"optimizer__sharded": True})
    four, one = Division((6, 6), 4, 1, 1), Division((6, 6), 1, 1, 1)
    for before, after in zip(whole.stage_costs(four).update, shared.stage_costs(four).update, strict=True):
        assert before / 4 <= after < before / 3
    assert shared.stage_costs(one) == whole.stage_costs(one)
    (alone,) = {shared.memory_model.owned_share(shared._stage_layers((1,) * 12)[0], 4)}
    assert alone == 1.0  # one embedding has one owner


def test_memory_is_saved_where_it_must_be_and_by_what_costs_least():
    config = changed(CONFIG, model__vocab_size=8192, model__sequence_length=2048, train__compute_dtype="bfloat16")
    model = model_of(config, 0)
    configs = list(ever_smaller(config, model, num_devices=2, is_profiled=False))
    assert [marks(each, 2) for each in configs] == ["", "s", "s c", "s c r2", "s c r1"]

    memory_model = MemoryModel(config, model)

    def searches(memory: float) -> list[Search]:
        cluster = Cluster(2, memory, 0.0, 1e15)
        return [
            Search(
                each,
                model,
                estimate(each, model, DEVICE).recomputing(recomputed_layers(each, model)),
                cluster,
                16,
                replace(memory_model, config=each),
            )
            for each in configs
        ]

    roomy = searches(1e12)
    assert marks(best_of(roomy, "two_bw").config, 1) == "" and best_of(roomy, "two_bw").is_free
    needs = [best(replace(one, batch_size=2), DATA_PARALLEL).memory[0].most for one in roomy]
    assert needs == sorted(needs, reverse=True) and len(set(needs)) == len(needs)
    for need, one in zip(needs, configs, strict=True):
        found = best_of([replace(each, batch_size=2) for each in searches(need)], DATA_PARALLEL)
        assert found.fits and found.config == one
    assert not best_of([replace(each, batch_size=2) for each in searches(needs[-1] - 1)], DATA_PARALLEL).fits


def test_fsdp_keeps_a_part_of_everything_and_is_as_fast_as_its_links():
    slow, fast = (searched({}, num_devices=4, bandwidth=bandwidth) for bandwidth in (1e7, 1e15))
    sharded, whole = best(fast, FSDP), best(fast, DATA_PARALLEL)
    assert sharded.memory[0].optimizer == whole.memory[0].optimizer // 4
    assert sharded.memory[0].activations <= whole.memory[0].activations * sharded.division.microbatch_size
    assert sharded.bubble == pytest.approx(0.0, abs=1e-6)
    sent = 3 / 4 * slow.num_parameters * 4 / 1e7  # of every number the weights twice, the gradient once
    assert best(slow, FSDP).step_time == pytest.approx(3 * sent, rel=0.1)
    assert "7 sequences" in str(replace(fast, batch_size=7).best(FSDP))


def test_blocks_with_experts_are_estimated_at_what_they_reached():
    config = changed(CONFIG, model__num_experts=4, model__experts_per_token=2, model__expert_dim=64)
    config = changed(config, model__num_dense_layers=1)
    model = model_of(config, 0)
    measured, even = estimate(config, model, DEVICE), estimate(config, model, DEVICE, 0.5)
    assert measured.layers[1] == even.layers[1]
    assert measured.layers[2].forward == pytest.approx(2 * even.layers[2].forward)
    assert "50%, 25% with experts, of" in measured.source


def test_an_estimate_takes_the_peak_of_the_dtype_that_is_computed_in():
    device = replace(DEVICE, bf16_flops=8e12)
    mixed = changed(CONFIG, train__compute_dtype="bfloat16")
    plain, coarse = (estimate(config, MODEL, device, 0.5) for config in (CONFIG, mixed))
    assert coarse.layers[1].forward == pytest.approx(plain.layers[1].forward / 8)
    assert coarse.layers[0].forward == pytest.approx(plain.layers[0].forward / 2)
    # Of 12 numbers an element, the one of the working copy is half as wide.
    assert coarse.layers[1].update == pytest.approx(plain.layers[1].update * 46 / 48)
    assert "8 TFLOP/s in bf16 on tensor cores" in coarse.source and "1 TFLOP/s in fp32" in plain.source
    muon = changed(CONFIG, optimizer__name="muon")
    fine, fast = (
        estimate(changed(muon, optimizer__newton_schulz_dtype=dtype), MODEL, device, 0.5).layers[1].update
        for dtype in ("float32", "bfloat16")
    )
    products = fine - plain.layers[1].update
    assert fast == pytest.approx(plain.layers[1].update + products / 8)


def test_an_estimate_halves_when_the_device_is_twice_as_efficient():
    slow, fast = (estimate(CONFIG, MODEL, DEVICE, efficiency) for efficiency in (0.25, 0.5))
    assert slow.layers[1].forward == pytest.approx(2 * fast.layers[1].forward)
    # Two products with weights in a backward, and those of attention twice: all of a forward twice.
    block = fast.layers[1]
    assert block.backward_input + block.backward_weight == pytest.approx(2 * block.forward)
    assert block.backward_input > block.forward > block.backward_weight
    assert "estimated" in fast.source
