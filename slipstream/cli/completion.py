"""`slipstream completion`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, Literal

import tyro

from .parse import flag, options_of, parse

SCRIPT = """{zsh}_slipstream() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" words=""
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    elif [ "${{current#-}}" != "$current" ]; then
        case "${{COMP_WORDS[1]}}" in
{cases}
        esac
    else
        return
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _slipstream slipstream
"""


@dataclass(frozen=True)
class CompletionArguments:
    """Prints a script that completes commands and options in a shell. In bash: source <(slipstream completion bash)."""

    shell: Annotated[Literal["bash", "zsh"], tyro.conf.Positional, tyro.conf.arg(metavar="SHELL")]
    """bash or zsh."""


def main(arguments: list[str]) -> None:
    from .dispatch import COMMANDS

    given = parse(CompletionArguments, arguments, "slipstream completion")
    flags = {name: " ".join(["--help", *map(flag, options_of(arguments_of(name)))]) for name in COMMANDS}
    cases = (f'            {name}) words="{words}" ;;' for name, words in flags.items())
    zsh = "autoload -U +X bashcompinit && bashcompinit\n" if given.shell == "zsh" else ""
    print(SCRIPT.format(zsh=zsh, commands=" ".join(COMMANDS), cases="\n".join(cases)), end="")


def arguments_of(command: str) -> Any:
    """Returns the dataclass of a command's arguments. `train` takes the configuration and nothing else."""
    from ..config.schema import Config

    module = import_module(f".{command}", __package__)
    own = (
        value
        for name, value in vars(module).items()
        if name.endswith("Arguments") and dataclasses.is_dataclass(value) and value.__module__ == module.__name__
    )
    return next(own, Config)
