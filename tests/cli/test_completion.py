"""The script completes commands and options in a real shell."""

import shutil
import subprocess

import pytest

from slipstream.cli.completion import main
from slipstream.cli.dispatch import COMMANDS
from slipstream.errors import UsageError


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(("words", "expected"), [
    ("slipstream tr", "train"),
    ("slipstream train --pipeline.st", "--pipeline.stages"),
    ("slipstream generate x --top", "--top-k --top-p"),
    ("slipstream train con", ""),
])  # fmt: skip
def test_bash_completes(words, expected, capsys):
    main(["bash"])
    script = capsys.readouterr().out
    line = f'COMP_WORDS=({words}); COMP_CWORD={len(words.split()) - 1}; _slipstream; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", f"{script}\n{line}"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


def test_every_command_is_known_and_another_shell_is_refused(capsys):
    main(["zsh"])
    script = capsys.readouterr().out
    assert script.startswith("autoload") and all(f" {name}) words=" in script for name in COMMANDS)
    with pytest.raises(UsageError, match="shell"):
        main(["tcsh"])
