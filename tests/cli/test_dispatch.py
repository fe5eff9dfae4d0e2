"""What all commands share."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], []])
def test_a_reader_that_leaves_early_gets_no_traceback(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "slipstream", *arguments]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")
