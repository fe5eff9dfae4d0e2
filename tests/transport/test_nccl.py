"""A pipeline of GPUs over NCCL, several ranks on each GPU if there are fewer than four; skipped where there is none.

`pytest -m cuda tests/transport/test_nccl.py`: some five minutes on one H200.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=580)


def test_every_kind_of_run_ends_where_the_oracle_does():
    done = run("-m", "torch.distributed.run", "--nproc-per-node=4", "experiments/exact_on_gpus.py")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize("way", ["slipstream", "torchrun", "hand"])
def test_a_fault_in_one_rank_ends_all_of_them_in_time(way):
    done = run("-m", "tests.faults.gpus", "--ways", way, "--starts", "2")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
