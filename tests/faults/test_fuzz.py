"""A few of the cases of faults/fuzz.py; `make test-fuzz` plays thousands."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="it looks for left-over processes in /proc")
@pytest.mark.timeout(400)
def test_generated_configurations_and_spoilt_files_run_or_are_refused_in_one_sentence():
    command = [sys.executable, "-m", "tests.faults.fuzz", "--configs", "5", "--files", "3", "--seed", "2"]
    command += ["--paths", "--numbers", "--every", "503"]
    root = Path(__file__).parents[2]
    played = subprocess.run(command, capture_output=True, text=True, timeout=380, cwd=root)
    assert played.returncode == 0, played.stdout + played.stderr
    assert " 0 violations" in played.stdout
