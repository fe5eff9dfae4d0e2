"""What a launcher, or the user, sets in the environment."""

import pytest

from slipstream.errors import UsageError
from slipstream.transport.environment import first_address, is_first_process, under_torchrun

RIGHT = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def look(monkeypatch: pytest.MonkeyPatch, **values: str | None) -> tuple[bool, bool, tuple[str, int]]:
    for name, value in {**RIGHT, **values}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    return under_torchrun(), is_first_process(), first_address()


def test_rank_0_and_a_process_alone_decide(monkeypatch):
    assert look(monkeypatch) == (True, False, ("localhost", 29500))
    assert look(monkeypatch, RANK="0")[:2] == (True, True)
    assert look(monkeypatch, WORLD_SIZE=None)[:2] == (False, True)  # a RANK alone means nothing


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "x", "RANK = 'x' in the environment is no number from 0 on"),
        ("RANK", "-1", "RANK = '-1' in the environment is no number"),
        ("RANK", "2", "RANK = 2 is not one of WORLD_SIZE = 2 processes: use 0 to 1"),
        ("WORLD_SIZE", "two", "WORLD_SIZE = 'two' in the environment is no number from 1 on"),
        ("WORLD_SIZE", "", "WORLD_SIZE = '' in the environment"),
        ("MASTER_PORT", "99999", "MASTER_PORT = 99999 is no port"),
        ("MASTER_PORT", None, "MASTER_PORT = '' in the environment is no number"),
        ("MASTER_ADDR", None, "MASTER_ADDR is missing"),
    ],
)
def test_what_is_wrong_is_named(monkeypatch, name, value, message):
    with pytest.raises(UsageError, match=message):
        look(monkeypatch, **{name: value})
