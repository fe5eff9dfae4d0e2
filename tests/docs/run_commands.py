"""Runs the commands of README and docs in a copy of the repository, page by page, and says which of them fail.

    python -m tests.docs.run_commands                 about an hour on two cores
    python -m tests.docs.run_commands README.md       only some pages
    python -m tests.docs.run_commands --list          what would be run, and what would not and why

Trainings that do not say how long they are make a few steps instead of their default; everything else runs as it is
written. What needs a GPU, root, another terminal or hours is not run: NOT_RUN says so. tests/docs/test_docs.py parses
those too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 600
STARTS = ("slipstream ", "python ", "make ", "torchrun ", "pytest ", "for ", "grep ")
NOT_RUN = {
    r"cuda|exact_on_gpus|faults\.gpus|optimizer_speed|--compile": "needs a GPU",
    r"^sudo ": "needs root",
    r"slipstream study configs/|slipstream study$|study momentum\.toml": "takes hours; make test runs a small study",
    r"slipstream tune .*--(budget|laws|trials)": "trains small models for minutes; tests/tools/tune has a small tuning",
    r"slipstream bench$|bench --only|time_to_loss|replicas\.py|reshape\.py|checkpoint_pause": "a benchmark of minutes",
    r"make (train|test|bench|results|docs|test-faults|test-fuzz)": "CI and the tests run it",
    r"tests\.faults\.(kills|others)|pytest tests/(schedule|optim)": "a part of make test and make test-faults",
    r"slipstream reshape runs/live|--run.name live": "needs two terminals; tests/train/test_reshape.py does it",
    r"python\.txt|wikitext2|mismatch|stories": "a study of an hour, with text that is not here",
    r"\$B|edumix|experiments/oracle.py runs/hosts": "belongs to a command that is not run",
    r"^[^\n]*( [A-Z]{4,}\b|\[|\.\.\.)[^\n]*$": "stands for what the reader writes",
    r"train 135m\.toml": "a model for GPUs",
    r"slipstream eval": "needs lm-eval and its tasks",
    r"web/\*|fineweb_|data/\*\.parquet": "needs large files; tests/data reads small ones of each kind",
    r"prepare hf:": "needs the network; tests/data/test_hugging_face.py streams folders",
    r"--(data\.loader|model\.name|run\.sinks) my|mydata|mymodels|mysinks": "tests/docs/test_adding.py follows the page",
}
BEFORE = {
    "reports.md": (
        "slipstream train --train.steps 6 --run.name short",
        "slipstream train --train.steps 6 --run.name joined",
    ),
}
"""What a page takes for granted that another page has."""
REFUSED = re.compile(r"--pipeline\.stages 4 --pipeline\.microbatches 3")
"""Commands that the page shows to be refused."""


def blocks(text: str) -> Iterator[list[str]]:
    """The indented blocks of a page, without their indentation."""
    for block in re.findall(r"(?:^(?: {4}.*)?\n)+", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M):
        if lines := [line[4:] for line in block.splitlines()]:
            yield lines


def commands(text: str) -> Iterator[str]:
    """A command is a line that begins with one of STARTS, and those that belong to it."""
    for lines in blocks(text):
        while lines:
            line = lines.pop(0).removeprefix("$ ")
            if not line.startswith((*STARTS, "sudo ")):
                continue
            while line.endswith("\\") or line.count('"') % 2 or ("<<'END'" in line and not line.endswith("\nEND")):
                line += "\n" + lines.pop(0)
            yield line if "\n" in line else re.sub(r" {2,}(#|->).*$", "", line).strip()


def shortened(command: str) -> str:
    if re.match(r"slipstream train|torchrun .*slipstream train", command) and "--train.steps" not in command:
        return f"{command} --train.steps {204 if '--pipeline.reshape' in command else 6}"
    return command


def why_not(command: str) -> str | None:
    return next((reason for pattern, reason in NOT_RUN.items() if re.search(pattern, command)), None)


def copy_of_the_repository(folder: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    lines = (f"document {i}: the quick brown fox jumps over the lazy dog {i * i} times. " * 40 for i in range(400))
    text = "".join(json.dumps({"text": line}) + "\n" for line in lines)
    for name in ("corpus", "new", "old", "held_out", "old_held_out"):
        (folder / f"{name}.jsonl").write_text(text)
    import tokenizers

    vocabulary = {letter: i for i, letter in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(folder / "tokenizer.json"))


def run(command: str, folder: Path) -> str | None:
    """What went wrong, or None."""
    places = [str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = os.environ | {"PATH": os.pathsep.join(places), "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"more than {LIMIT_SECONDS} s"
    expected = 2 if REFUSED.search(command) else 0
    return None if done.returncode == expected else f"exit code {done.returncode}: {done.stderr.strip()[-400:]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "pages", nargs="*", type=Path, default=[ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    )
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    num_run, num_not_run, failures = 0, 0, []
    for page in given.pages:
        found = list(dict.fromkeys(commands(page.read_text(encoding="utf-8"))))
        if page.resolve().is_relative_to(ROOT / "docs" / "reference"):
            continue  # written from the program: they show how to write a command
        with tempfile.TemporaryDirectory() as name:
            if not given.list and any(why_not(command) is None for command in found):
                copy_of_the_repository(Path(name))
                for command in BEFORE.get(page.name, ()):
                    run(command, Path(name))
            for command in map(shortened, found):
                reason = why_not(command)
                num_not_run += reason is not None
                num_run += reason is None
                began = time.monotonic()
                fault = None if reason or given.list else run(command, Path(name))
                if fault:
                    failures.append(f"{page}: {command}: {fault}")
                seconds = f"{time.monotonic() - began:6.1f} s"
                said = f"not run, {reason}" if reason else "" if given.list else f"{seconds}  {fault or 'ok'}"
                print(f"{page.name:24} {command.splitlines()[0][:110]:110}  {said}", flush=True)
    print(f"\n{num_run} commands run, {num_not_run} not, {len(failures)} failed")
    print("\n".join(failures))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
