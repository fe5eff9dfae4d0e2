"""The wheel has everything that the program needs, and nothing else."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a copy, because a build leaves files behind that the next one would take
    shutil.copytree(ROOT / "slipstream", source / "slipstream", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_has_every_file_of_the_package(wheel):
    suffixes = (".py", ".js", ".css", ".html", ".toml", ".typed")
    wanted = {path.relative_to(ROOT).as_posix() for path in (ROOT / "slipstream").rglob("*") if path.suffix in suffixes}
    found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert found == wanted


def test_the_wheel_names_its_commands_and_extras(wheel):
    (entry_points,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "slipstream = slipstream.cli:main" in wheel.read(entry_points).decode()
    (metadata,) = [name for name in wheel.namelist() if name.endswith("METADATA")]
    text = wheel.read(metadata).decode()
    assert {line for line in text.splitlines() if line.startswith("Provides-Extra")} >= {
        f"Provides-Extra: {name}" for name in ("hf", "plot", "text", "optimizers")
    }
