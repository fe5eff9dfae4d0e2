"""Contenders take turns; one that fails or refuses does not keep the others from their rounds."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from harness import forks

from slipstream import launch
from slipstream.errors import RunFailure, StageFailure
from slipstream.tools.bench.contenders import Contender, Refused, Round, World
from slipstream.tools.bench.links import delay_links, message_seconds
from slipstream.tools.bench.turns import Stopped, _turn_deadline, compete

pytestmark = [forks, pytest.mark.filterwarnings("ignore")]  # torch's own, in the forked stages


def fake_run(contender, world, transport, num_steps):
    if contender.name == "is interrupted" and transport.stage == 0:
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)
    if contender.name == "breaks" and transport.stage == 1:
        raise RuntimeError("no such luck")
    if contender.name == "refuses":
        raise Refused("not with two")
    return Round(1.0 + transport.stage)


def test_a_contender_that_fails_is_left_behind_and_the_others_get_all_their_rounds(monkeypatch):
    monkeypatch.setattr("slipstream.tools.bench.turns.run", fake_run)
    contenders = tuple(Contender(name, 2) for name in ("first", "breaks", "refuses", "last"))
    first, breaks, refuses, last = compete(World("emulated", 2, contenders, num_rounds=2, num_steps=3))
    assert first.seconds_per_step == last.seconds_per_step == [2.0, 2.0]  # of the slower stage
    assert not first.failure and not last.failure
    assert not breaks.rounds and "no such luck" in breaks.failure
    assert not refuses.rounds and refuses.failure == "not with two"


def test_an_interrupt_keeps_the_rounds_that_are_finished(monkeypatch):
    monkeypatch.setattr("slipstream.tools.bench.turns.run", fake_run)
    contenders = tuple(Contender(name, 2) for name in ("first", "is interrupted", "last"))
    with pytest.raises(Stopped) as stopped:
        compete(World("emulated", 2, contenders, num_rounds=2, num_steps=3))
    assert isinstance(stopped.value.__cause__, KeyboardInterrupt)
    assert [each.seconds_per_step for each in stopped.value.outcomes] == [[2.0], [], []]


def test_stages_that_fail_before_the_first_contender_end_the_run(monkeypatch):
    def broken(stage, num_stages):
        raise RuntimeError("no stage")

    monkeypatch.setattr("slipstream.tools.bench.turns.settle_stage", broken)
    with pytest.raises(RunFailure, match="no stage"):
        compete(World("emulated", 2, (Contender("r", 2),), num_rounds=1, num_steps=3))


def test_stage_0_hears_of_every_turn_and_of_the_end(monkeypatch, tmp_path):
    monkeypatch.setattr("slipstream.tools.bench.turns.run", fake_run)
    log = tmp_path / "turns"

    def on_turn(turn):
        with log.open("a") as file:
            file.write(f"{turn}\n")

    compete(World("emulated", 2, (Contender("a", 2), Contender("b", 2)), num_rounds=2, num_steps=3), on_turn)
    assert log.read_text().splitlines() == ["(0, 0)", "(0, 1)", "(1, 0)", "(1, 1)", "None"]


def ping(transport):
    message = (torch.zeros(2),)
    before = message_seconds(transport, message)
    delay_links(transport, 0.02)
    return before, message_seconds(transport, message)


def test_a_ping_takes_the_latency_that_was_injected():
    (fast, slow), *others = launch(ping, 3, threads=True, timeout_seconds=60)
    assert slow >= 0.02 and slow > fast
    assert others == [(0.0, 0.0), (0.0, 0.0)]


def test_a_contender_that_hangs_is_ended_with_a_word_to_the_others(monkeypatch):
    monkeypatch.setattr("slipstream.tools.bench.turns.TIMEOUT_SECONDS", 0.2)
    with pytest.raises(StageFailure, match=r"a contender did not end within 0.2 s on stage [01]"):
        launch(hang, 2, start_method="fork", timeout_seconds=60)


def hang(transport):
    with _turn_deadline(transport, "a contender"):
        time.sleep(60)
