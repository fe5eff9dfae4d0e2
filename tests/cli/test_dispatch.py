"""What all commands share."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("words", [["--model.tied-embeddings", "true"], ["--model.tied-embeddings=true"]])
def test_what_may_be_not_set_is_switched_with_true_and_false(words):
    from slipstream.cli.parse import parse
    from slipstream.config.schema import Config

    assert parse(Config, words, "slipstream train").model.tied_embeddings is True
    assert parse(Config, [word.replace("true", "false") for word in words], "x y").model.tied_embeddings is False


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], []])
def test_a_reader_that_leaves_early_gets_no_traceback(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "slipstream", *arguments]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_default_that_is_a_newline_is_shown_as_an_escape(capsys):
    from slipstream.cli.dispatch import run

    with pytest.raises(SystemExit):
        run(["generate", "--help"])
    assert r"The beginning of the text. (default: '\n')" in capsys.readouterr().out


IMPORTS = """
import os, signal, sys, threading, time
from slipstream.cli.dispatch import _end_stages_on_signals

_end_stages_on_signals()
sys.path.insert(0, sys.argv[1])
def tell():
    for _ in range(2):  # as `timeout` does
        os.kill(os.getpid(), signal.{name})
threading.Timer(0.2, tell).start()
try:
    import slow
    time.sleep(10)
except KeyboardInterrupt:
    print("done" if hasattr(sys.modules["slow"], "done") else "half a module")
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_during_an_import_waits_for_its_end_and_counts_once(name, tmp_path):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(1)\ndone = 1\n")
    command = [sys.executable, "-c", IMPORTS.format(name=name), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
