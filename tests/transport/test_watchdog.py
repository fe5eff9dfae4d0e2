"""A process whose main thread is stuck in a driver is ended from outside, with a message."""

from __future__ import annotations

import time

import pytest

from slipstream.transport import watchdog
from slipstream.transport.watchdog import Watchdog


@pytest.fixture
def ends(monkeypatch) -> list[int]:
    """Exit codes that the process would have ended with."""
    codes: list[int] = []
    monkeypatch.setattr(watchdog.os, "_exit", codes.append)
    monkeypatch.setattr(watchdog, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(watchdog, "GRACE_SECONDS", 0.2)
    return codes


def wait_for(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_what_takes_too_long_ends_the_process_and_says_what_it_was_at(ends, capsys):
    said: list[str] = []
    dog = Watchdog(lambda: "stage 2", lambda: None, lambda message: said.append(message) or message)
    with dog.limit(0.05, lambda: "2F5@v3"):
        wait_for(lambda: ends)
    dog.close()
    assert ends[0] == 1
    assert said[0] == "stage 2 has been stuck for 0.05 s at 2F5@v3"
    assert "slipstream: stage 2 has been stuck for 0.05 s at 2F5@v3" in capsys.readouterr().err


def test_what_ends_in_time_is_left_alone(ends):
    dog = Watchdog(lambda: "stage 2", lambda: None, lambda message: message)
    for _ in range(20):
        with dog.limit(5.0, lambda: "2F5@v3"):
            time.sleep(0.01)
    dog.close()
    assert not ends


def test_a_failure_elsewhere_ends_a_process_that_does_not_notice(ends, capsys):
    dog = Watchdog(lambda: "stage 2", lambda: "stage 0 failed at 0F1@v0", lambda message: message)
    started = time.monotonic()
    wait_for(lambda: ends)
    dog.close()
    assert ends[0] == 1 and time.monotonic() - started >= 0.2  # it has some time to notice by itself
    assert "slipstream: stage 0 failed at 0F1@v0" in capsys.readouterr().err
