# Every target works from a fresh clone with only python3 (>= 3.11) and make: .venv is made when it is missing.
PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
# One thread each: several processes on the same cores stand in each other's way with more.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: quickstart test test-chaos test-package docs lint types check bench clean

quickstart: $(VENV)/.base
	$(BIN)/lightning-rl quickstart $(ARGS)

test: $(VENV)/.dev
	$(PYTEST) tests -m "not chaos and not package" -n 2 --dist loadscope $(ARGS)

test-chaos: $(VENV)/.dev
	$(PYTEST) tests/chaos -m chaos $(ARGS)

test-package: $(VENV)/.dev
	$(PYTEST) tests/e2e -m package $(ARGS)

docs: $(VENV)/.base
	$(BIN)/python -m lightning_rl.config.reference > docs/config.md

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.dev
	$(BIN)/mypy

check: lint types test

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/gateway.py

$(VENV)/.base: pyproject.toml
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -e .
	touch $@

$(VENV)/.dev: pyproject.toml
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -e ".[dev]"
	touch $@ $(VENV)/.base

clean:
	rm -rf $(VENV) dist build
