"""Schedules are plain Python: nothing under slipstream/schedule needs torch or numpy."""

import subprocess
import sys

import slipstream

PROGRAM = """
import sys
sys.modules |= {"torch": None, "numpy": None, "matplotlib": None}
from slipstream.cli.schedule import show
from slipstream.schedule import Schedule, simulate
print(show(Schedule("two_bw", 2, 2, 3), simulate.Costs()))
"""


def test_schedules_are_made_checked_and_printed_with_torch_hidden():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "1 on every stage" in done.stdout


def test_every_public_name_is_found():
    for name in slipstream.__all__:
        assert getattr(slipstream, name).__name__ == name
