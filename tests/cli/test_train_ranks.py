"""`slipstream train` under torchrun, and in ranks that are started by hand."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from settings import as_arguments, changed

from slipstream import cli
from slipstream.config.schema import Config
from slipstream.config.toml import load_toml
from tests.faults.runs import Run, until, world_by_hand


def test_torchrun_trains_to_the_same_weights_as_a_run_that_starts_its_own_stages(tiny, capsys):
    own = changed(tiny, pipeline__transport="process")
    assert cli.run(["train", *as_arguments(own)]) == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    joined = changed(own, run__name="joined")
    done = subprocess.run(
        [*torchrun, "-m", "slipstream", "train", *as_arguments(joined)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert "slipstream:" not in done.stderr
    summaries = [json.loads(Path(c.run.folder, c.run.name, "summary.json").read_text()) for c in (own, joined)]
    assert summaries[0]["parameter_checksum"] == summaries[1]["parameter_checksum"]


RANKS = "by hand"
"""The run that they train."""


def by_hand(config: Config) -> list[str]:
    return as_arguments(changed(config, run__name=RANKS, pipeline__transport="process"))


@contextmanager
def started(configs: dict[int, Config], port: int = 0) -> Iterator[list[Run]]:
    """Two ranks, or one of them, in processes that have loaded torch already."""
    folder, world = Path(configs[min(configs)].run.folder), world_by_hand(2, port)
    ranks: list[Run] = []
    try:
        for rank, config in configs.items():
            log = folder.parent / f"rank {rank}.log"
            ranks.append(Run(by_hand(config), folder / RANKS, log, environment={**world, "RANK": str(rank)}))
        yield ranks
    finally:
        for rank in ranks:
            rank.end()


def ended(configs: dict[int, Config], port: int = 0) -> tuple[list[int], list[str]]:
    """Exit codes and output of two ranks, or of one of them."""
    with started(configs, port) as ranks:
        return [rank.wait(120) for rank in ranks], [rank.said for rank in ranks]


def test_ranks_that_are_started_by_hand_all_end_well(tiny):
    """As srun starts them: the first rank keeps the store, as no torchrun does, and must leave after the others."""
    world = world_by_hand(2)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "slipstream", "train", *by_hand(tiny)],
            env={**os.environ, **world, "RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=240)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said


def test_ranks_with_different_configurations_do_not_train_together(tiny):
    patient = changed(tiny, pipeline__timeout_seconds=1e4)  # nobody waits for it
    codes, said = ended({0: patient, 1: changed(patient, train__seed=3)})
    assert codes == [1, 1], said
    assert "train.seed = 3 on rank 1 is 0 on rank 0: start all ranks with the same configuration" in said[0]


def test_a_rank_that_does_not_find_the_first_one_says_so_in_time(tiny):
    began = time.monotonic()
    codes, said = ended({1: changed(tiny, pipeline__timeout_seconds=2.0)})
    assert codes == [1] and time.monotonic() - began < 60
    assert "does not reach rank 0 at MASTER_ADDR:MASTER_PORT = 127.0.0.1:" in said[0] and said[0].count("\n") == 1


def test_the_first_rank_names_one_that_does_not_come(tiny):
    codes, [said] = ended({0: changed(tiny, pipeline__timeout_seconds=1.0)})
    assert codes == [1] and re.search(
        r"^slipstream: rank 1 did not come to MASTER_ADDR:MASTER_PORT = 127\.0\.0\.1:\d+ within 1 s: start all 2 ranks "
        r"with this address, or correct WORLD_SIZE\n\Z",
        said,
        re.MULTILINE,
    )
    assert not Path(tiny.run.folder, RANKS).exists()  # which would be in the way of the next try


@pytest.mark.parametrize("again", [{"checkpoint__resume": True}, {"run__overwrite": True}])
def test_a_launch_that_fails_keeps_the_configuration_that_was_there_before(tiny, again):
    """It may be the user's own file: slipstream train runs/NAME/config.toml --checkpoint.resume."""
    folder = Path(tiny.run.folder, RANKS)
    folder.mkdir(parents=True)
    (folder / "config.toml").touch()
    codes, said = ended({0: changed(tiny, pipeline__timeout_seconds=1.0, **again)})
    assert codes == [1] and "rank 1 did not come" in said[0], said
    assert load_toml(folder / "config.toml").run.name == RANKS


def test_a_stopped_first_rank_ends_the_others_in_time(tiny):
    """It keeps the store, whose calls have no time-out."""
    config = changed(tiny, pipeline__timeout_seconds=2.0, train__steps=100_000)
    with started({0: config, 1: config}) as (first, last):
        until(lambda: "step 10/" in last.said, 60, "the tenth step")  # the last stage knows the loss
        os.kill(first.pid, signal.SIGSTOP)
        assert last.wait(60) == 1
        assert "stage 0 has been silent for 2 s: stage 1 was waiting for the" in last.said
        assert first.wait(60) == -signal.SIGKILL


def test_another_program_at_the_port_is_said_by_every_rank(tiny):
    with socket.create_server(("127.0.0.1", 0)) as other:
        config = changed(tiny, pipeline__timeout_seconds=2.0)
        codes, said = ended({0: config, 1: config}, other.getsockname()[1])
    assert codes == [1, 1], said
    assert "rank 0 cannot listen at MASTER_ADDR:MASTER_PORT = 127.0.0.1:" in said[0]
    assert "rank 0 does not answer stage 1 at MASTER_ADDR:MASTER_PORT = 127.0.0.1:" in said[1]


def test_a_rank_without_a_world_is_a_run_of_its_own(tiny, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert cli.run(["train", *as_arguments(tiny)]) == 0
    assert cli.run(["train", *as_arguments(tiny)]) == 2
    assert "run.name = 'tiny' has been used" in capsys.readouterr().err
