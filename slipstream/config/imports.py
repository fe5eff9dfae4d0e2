"""Finds an object that a configuration names: an entry of a registry, or anything that can be imported."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError


def find(field: str, name: str, known: Mapping[str, Any], remedy: str = "") -> Any:
    """Returns the entry of that name, or the object at an import path such as `package.module.Class`."""
    if name in known:
        return known[name]
    module, _, attribute = name.rpartition(".")
    remedy = remedy or f"use {', '.join(known)} or the import path of your own, package.module.Name"
    if not module:
        raise ConfigError(f"{field} = {name!r} is unknown: {remedy}")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the user's module may raise any exception
        raise ConfigError(f"{field} = {name!r} cannot be imported ({error}): {remedy}") from error
