"""Configurations that differ in a field or two."""

from dataclasses import replace
from typing import Any

from slipstream.config.schema import Config


def changed(config: Config, **fields: Any) -> Config:
    """changed(config, train__steps=3, run__name="other")"""
    for path, value in fields.items():
        section, name = path.split("__")
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return config


def as_arguments(config: Config) -> list[str]:
    """What to write on the command line to get this configuration."""
    arguments = []
    for section in vars(config):
        default = vars(getattr(Config(), section))
        for name, value in vars(getattr(config, section)).items():
            option = name.replace("_", "-")
            if value != default[name] and isinstance(default[name], bool):
                arguments.append(f"--{section}.{option if value else f'no-{option}'}")
            elif value != default[name]:
                values = value if isinstance(value, tuple) else [value]
                arguments += [f"--{section}.{option}", *map(str, values)]
    return arguments
