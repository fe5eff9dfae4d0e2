"""Emulated stages take the time they are told, and every placement gives a process the same work."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from slipstream.tools.bench.workloads import SLOW_FACTOR, Placement, SleepingLayer, emulated, real

SHAPES = ("single", "loop", "v")


class FakeTime:
    """A clock that only a sleep moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def of(self, work: Callable[[], object]) -> float:
        before = self.now
        work()
        return self.now - before


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr("slipstream.tools.bench.workloads.time", fake)
    return fake


def test_a_joint_backward_takes_all_of_its_time_and_either_half_the_half_of_it(clock):
    layer = SleepingLayer(forward_seconds=0.01, backward_seconds=0.02, divisible=True)
    inputs = torch.ones(1, 2, requires_grad=True)
    outputs = []
    assert clock.of(lambda: outputs.append(layer(inputs))) == pytest.approx(0.01)
    ones = torch.ones(1, 2)
    assert clock.of(lambda: torch.autograd.grad(outputs[0], inputs, ones, retain_graph=True)) == pytest.approx(0.01)
    assert clock.of(lambda: torch.autograd.grad(outputs[0], layer.weight, ones, retain_graph=True)) == pytest.approx(
        0.01
    )
    assert clock.of(lambda: outputs[0].backward(ones)) == pytest.approx(0.02)
    assert inputs.grad is not None and layer.weight.grad.tolist() == [2.0]


@pytest.mark.parametrize("divisible", [False, True])
def test_the_first_stage_has_a_whole_backward_too(clock, divisible):
    layer = SleepingLayer(forward_seconds=0.01, backward_seconds=0.02, divisible=divisible)
    outputs = layer(torch.ones(1, 2))
    assert clock.of(lambda: outputs.sum().backward()) == pytest.approx(0.02)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("unbalanced", [False, True])
def test_a_process_has_the_same_work_however_its_chunks_are_placed(clock, shape, unbalanced):
    placement = Placement(4, shape)
    workload = emulated(placement, unbalanced)
    for process in range(4):

        def once(process=process):
            for chunk in placement.chunks(process):
                workload.chunk(chunk)(torch.ones(1, 2)).sum().backward()

        expected = 0.03 * (SLOW_FACTOR if unbalanced and process == 2 else 1)
        assert clock.of(once) == pytest.approx(expected)


def test_a_v_turns_back_on_the_last_process():
    assert [Placement(3, "v").process(chunk) for chunk in range(6)] == [0, 1, 2, 2, 1, 0]
    assert [Placement(3, "loop").process(chunk) for chunk in range(6)] == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("unbalanced", [False, True])
def test_the_decoder_gives_the_slow_process_three_blocks_for_the_others_two(shape, unbalanced):
    placement = Placement(2, shape)
    workload = real(placement, unbalanced)
    assert sum(workload.sizes) == len(workload.model)
    blocks = [
        sum(
            name.startswith("block")
            for chunk in placement.chunks(process)
            for name, _ in workload.chunk(chunk).named_children()
        )
        for process in range(2)
    ]
    assert blocks == [2, 3 if unbalanced else 2]
