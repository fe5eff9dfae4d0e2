"""Schedules are plain Python: nothing under slipstream/schedule needs torch or numpy."""

import subprocess
import sys
from pathlib import Path

import slipstream

# The package itself offers names that need torch, so an empty one with the same path stands in for it.
PROGRAM = """
import sys, types
sys.modules |= {"torch": None, "numpy": None, "matplotlib": None}
sys.modules["slipstream"] = types.ModuleType("slipstream")
sys.modules["slipstream"].__path__ = [sys.argv[1]]
from slipstream.schedule import Schedule, command, simulate
print(command.show(Schedule("two_bw", 2, 2, 3), simulate.Costs()))
"""


def test_schedules_are_made_checked_and_printed_with_torch_hidden():
    package = str(Path(slipstream.__file__).parent)
    command = [sys.executable, "-c", PROGRAM, package]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "1 on every stage" in done.stdout
