# Each target sets up .venv by itself; see CONTRIBUTING.md.
PYTHON ?= python3
BIN := .venv/bin
.PHONY: demo test test-all lint bench validate docs clean

demo: .venv/ok
	$(BIN)/scaletrace demo

test: lint
	$(BIN)/python -P -m pytest -q

test-all: lint
	$(BIN)/python -P -m pytest -q -m "slow or not slow"

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: .venv/dev
	for script in benchmarks/[a-z]*.py; do $(BIN)/python -P $$script || exit 1; done

validate: .venv/dev
	$(BIN)/python -P benchmarks/validate.py

docs: .venv/ok
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --strict

.venv/ok: pyproject.toml constraints.txt
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e .
	touch $@

.venv/dev: .venv/ok
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info
