"""The package is built in layers: a module imports only from its own package and from those below."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import slipstream

ROOT = Path(slipstream.__file__).parent
LAYERS = (
    ("errors", "precision", "schedule"),
    ("checkpoint", "optim"),
    ("model", "transport"),
    ("hf",),
    ("config", "reference"),
    ("data", "pipeline"),
    ("observe",),
    ("train",),
    ("tools",),
    ("cli",),
)
"""From the lowest to the highest. Packages of one layer do not import each other."""
LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name below `slipstream`."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(name: str, source: str) -> Iterator[str]:
    """The modules of the package that a module imports, wherever in its source."""
    package = name.split(".") if MODULES[name].name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            base = [] if node.level == 0 else package[: len(package) - node.level + 1]
            path = [*base, *(node.module.split(".") if node.module else [])]
            if node.level == 0:
                if path[0] != "slipstream":
                    continue
                path = path[1:]
            for alias in node.names:
                full = ".".join([*path, alias.name])
                yield full if full in MODULES else ".".join(path)


def violations(name: str, source: str) -> list[str]:
    own = name.split(".")[0]
    found = []
    for imported in imports(name, source):
        other = imported.split(".")[0]
        if other in ("", own):
            continue
        if LEVELS[other] >= LEVELS[own]:
            found.append(f"{name} imports {imported}")
    return found


@pytest.mark.parametrize("name", sorted(name for name in MODULES if name.split(".")[0] not in ("", "__main__")))
def test_a_module_imports_only_from_lower_layers(name):
    assert not violations(name, MODULES[name].read_text())


def test_an_arrow_that_turns_is_found():
    assert violations("pipeline.update", "from ..train.trainer import train") == [
        "pipeline.update imports train.trainer"
    ]
    assert violations("optim.rules", "def f():\n    from ..model import decoder") == [
        "optim.rules imports model.decoder"
    ]
    assert violations("schedule.check", "import torch\nfrom .action import Action\nfrom .. import Pipeline") == []


def test_no_modules_import_each_other_in_a_circle():
    graph = {name: set(imports(name, path.read_text())) - {name, ""} for name, path in MODULES.items() if name}
    # A package's own __init__ may gather what its modules have.
    graph = {name: {other for other in others if not name.startswith(f"{other}.")} for name, others in graph.items()}
    TopologicalSorter(graph).prepare()


def test_every_package_has_a_layer():
    assert {name.split(".")[0] for name in MODULES} - {"", "__main__"} == set(LEVELS)
