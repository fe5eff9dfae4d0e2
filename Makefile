# Every target makes .venv first and installs what it needs, with the versions that were tested.
PYTHON ?= python3.11
BIN := .venv/bin

.PHONY: train test test-faults test-fuzz lint types format bench results docs clean

train: .venv/.installed
	$(BIN)/slipstream train --run.overwrite

# Two tests at a time. Each worker begins with a half of them, in their order, so that what a file's tests share is made
# once; whoever is done first takes from the other.
test: .venv/.installed
	$(BIN)/python -m pytest -n 2 --dist worksteal

# Kills, stops and damage, on purpose: some forty minutes on two cores.
test-faults: .venv/.installed
	$(BIN)/python -m tests.faults.kills --kills 50
	$(BIN)/python -m tests.faults.kills --torchrun --kills 50
	$(BIN)/python -m tests.faults.others

test-fuzz: .venv/.installed
	$(BIN)/python -m tests.faults.fuzz --paths --numbers

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.installed
	$(BIN)/mypy

format: .venv/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.installed
	$(BIN)/slipstream bench

results: .venv/.installed
	$(BIN)/python experiments/results.py
	$(BIN)/python experiments/mismatch.py

# The reference pages first, which are written from the program. Open site/index.html in a browser.
docs: .venv/.docs
	$(BIN)/python docs/generate.py
	$(BIN)/zensical build --clean --strict

clean:
	rm -rf .venv runs build dist site .cache *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# torch first, and alone: the rest must not pull another build of it.
.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch numpy
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

.venv/.docs: .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@
