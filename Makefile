# Everything a developer needs; `make help` lists it. uv is fetched into .uv/, the environment lives in .venv/.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
UV ?= .uv/bin/uv
# The machine's own interpreter and certificate store: uv downloads no Python and trusts what the machine trusts.
UV_FLAGS := --no-python-downloads --system-certs
FILE ?= examples/llmdeployment.yaml
BIN := .venv/bin
# Compiled bytecode is kept, even where the shell turns it off: tests start hundreds of processes that import the same files.
export PYTHONDONTWRITEBYTECODE :=
# uv's cache lies in the home folder; where none can be written (another user, a container), beside uv itself.
ifeq ($(UV_CACHE_DIR)$(XDG_CACHE_HOME)$(shell test -w "$$HOME" && echo writable),)
export UV_CACHE_DIR := $(CURDIR)/.uv/cache
endif
# Of the native kernels, developers have all levels that their processor runs: tests choose lower ones.
export PAGEMILL_KERNEL_LEVELS ?= fitting
PACKAGES := crds libs/protocol libs/models libs/api libs/servers libs/kube libs/routing kernels execution engine gateway operator simulator cli
# Where bench results go; each bench prints a table and a last line of JSON.
BENCHES := offline_throughput experts quantized structured_output quality kv_waste kv_sharing step_overhead routing startup sleep up gateway_streams chaos simulator_truth

# A context of your kubeconfig, whose nodes hold the images tagged PAGEMILL_TAG; empty: a one-node cluster is built,
# started, and gone at the end. CASES names files or folders below e2e/.
E2E_CONTEXT ?=
PAGEMILL_TAG ?=
CASES ?= e2e
comma := ,
ifeq ($(E2E_CONTEXT),)
on_cluster = $(BIN)/python e2e/cluster with bash -c \
	'exec $(BIN)/pytest $(CASES) $(1) --kubeconfig "$$KUBECONFIG" --image-tag "$$PAGEMILL_TAG"'
else
# Without the cases that need programs of the one-node cluster's build and nothing of yours.
on_cluster = $(BIN)/pytest $(CASES) $(1) --context "$(E2E_CONTEXT)" --image-tag "$(PAGEMILL_TAG)" \
	--ignore=e2e/crd --ignore=e2e/chart
endif

ACTIONLINT_VERSION := v1.7.12
# Beside the locked one, which is the newest.
OLDER_TRITON := 3.6.0

# Tests of one file stay in one process, which shares their engines; most tests wait for processes of their own, so that
# more than twice as many workers as a small machine has cores leave no core idle.
TEST_WORKERS ?= -n 5 --dist loadfile

.PHONY: help
help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ Use

.PHONY: up
up: .venv/.runnable ## Install what runs, then serve FILE (default: examples/llmdeployment.yaml) and show a first answer
	$(BIN)/pagemill up -f $(FILE)

.PHONY: chat
chat: .venv/.runnable ## Talk to the model that `make up` serves, from a second terminal
	$(BIN)/pagemill chat

# On the current context's cluster of kind, k3d or minikube; without one, on the one-node cluster of e2e/cluster (root), which
# runs until it is removed.
.PHONY: up-kubernetes
up-kubernetes: .venv/.runnable ## Build the images for FILE, serve it on a Kubernetes of this machine, and show a first answer
	$(BIN)/python e2e/up_kubernetes $(FILE)

.PHONY: down-kubernetes
down-kubernetes: .venv/.runnable ## Remove what `make up-kubernetes` made: deployments, release, its one-node cluster
	$(BIN)/python e2e/up_kubernetes --down

##@ Develop

.PHONY: install
install: .venv/.installed ## Install the locked dependencies and the packages of this repository into .venv

.PHONY: test
test: .venv/.installed ## Run unit and integration tests (no cluster, no GPU): a sample of each large matrix, nothing slow
	$(BIN)/pytest -m "not gpu and not full and not slow" $(TEST_WORKERS) tests

.PHONY: test-slow
test-slow: .venv/.installed ## Run the tests that take seconds, most with processes of their own; a change passes both
	$(BIN)/pytest -m "slow and not gpu and not full" $(TEST_WORKERS) tests

.PHONY: test-full
test-full: .venv/.installed ## Run every unit and integration test (no cluster, no GPU)
	$(BIN)/pytest -m "not gpu" --hypothesis-profile=full $(TEST_WORKERS) tests

.PHONY: clients
clients: .venv/.installed | $(UV) ## Run other projects' clients against a gateway (CLIENTS="openai litellm" picks some; NEWEST=1: their newest versions)
	PYTHONPATH=tests/shared $(BIN)/python tests/clients/run_clients.py --uv $(UV) $(if $(NEWEST),--newest) $(CLIENTS)

# Its packages are apart from those of the project: a browser's driver is large, and most changes do not need it.
BROWSER_ENV := .uv/browser
BROWSER_TESTS = PYTHONPATH=$(BROWSER_ENV)/site AXE_CORE=$(BROWSER_ENV)/node_modules/axe-core/axe.min.js $(BIN)/pytest
$(BROWSER_ENV)/.installed: Makefile | $(UV)
	command -v chromium >/dev/null || { echo "chromium is missing: apt-get install chromium" >&2; exit 1; }
	$(UV) pip install $(UV_FLAGS) --quiet --python $(BIN)/python --target $(BROWSER_ENV)/site playwright==1.56.0
	npm install --silent --ignore-scripts --no-save --prefix $(BROWSER_ENV) axe-core@4.11.0
	touch $@

.PHONY: browser
browser: .venv/.installed $(BROWSER_ENV)/.installed ## Test the live page in Debian's Chromium (needs chromium and npm)
	$(BROWSER_TESTS) tests/gateway/browser/check_page.py

.PHONY: pictures
pictures: .venv/.installed $(BROWSER_ENV)/.installed ## Take the pictures of page and dashboards, and measure the page (needs chromium, npm, prometheus)
	$(BROWSER_TESTS) -s tests/gateway/browser/take_pictures.py tests/gateway/browser/take_dashboards.py

.PHONY: older-triton
older-triton: .venv/.installed | $(UV) ## Compile the hot kernels with the oldest Triton that is supported; no GPU is needed
	[[ -e .venv/triton-$(OLDER_TRITON)/triton ]] || $(UV) pip install $(UV_FLAGS) --quiet --no-deps --python $(BIN)/python \
		--target .venv/triton-$(OLDER_TRITON) triton==$(OLDER_TRITON)
	PYTHONPATH=.venv/triton-$(OLDER_TRITON) $(BIN)/python -c 'import triton; assert triton.__version__ == "$(OLDER_TRITON)"'
	PYTHONPATH=$(CURDIR)/.venv/triton-$(OLDER_TRITON) $(BIN)/pytest -q tests/kernels/test_triton_compiled.py::test_hot_kernels_spill_no_registers

# The whole grid is `bench/attack.py` without `--quick`.
.PHONY: attack
attack: .venv/.installed ## Attack a gateway and its engines while an honest tenant uses them (ATTACK="--cases '^bodies'" picks some)
	timeout --verbose 600 $(BIN)/python bench/attack.py --quick $(ATTACK)

# Files that fail lie in .pagemill/fuzz.
.PHONY: fuzz
fuzz: .venv/.installed ## Read mutated files of models in a process of limited memory (FUZZ="--seed 7 --seconds 600" passes options)
	PYTHONPATH=tests/shared timeout --verbose 900 $(BIN)/python tests/fuzz/fuzz_files.py $(FUZZ)

.PHONY: lint
lint: .venv/.installed ## Check style, types, import layers, house rules and generated pages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy bench/*.py bench/attacks/*.py bench/peers/*.py bench/routers/*.py bench/truth/*.py docs/*.py charts/pagemill/files/*.py
	$(BIN)/mypy charts/*.py release/*.py
	MYPYPATH=bench $(BIN)/mypy bench/gpu/*.py
	$(BIN)/mypy tests/clients/run_clients.py tests/clients/checks.py
	$(BIN)/lint-imports
	$(BIN)/pytest -q tests/house/test_house_rules.py tests/house/test_generated_pages.py

.PHONY: format
format: .venv/.installed ## Rewrite the code in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: bench
bench: .venv/.installed ## Run every benchmark with its peers side by side (BENCHES="kv_waste up" picks some)
	for name in $(BENCHES); do echo "== bench/$$name.py"; $(BIN)/python bench/$$name.py; done

.PHONY: bench-peers
bench-peers: .venv/.installed | $(UV) ## Install other CPU engines and measure them beside ours (PEERS="--quick" passes options)
	$(BIN)/python bench/side_by_side.py --uv $(UV) $(PEERS)

.PHONY: bench-gate
bench-gate: .venv/.installed | $(UV) ## Compare decode, prefill, step and gateway with an earlier commit (GATE="--base main" passes options)
	$(UV) sync --frozen --quiet --group build $(UV_FLAGS) # compiles the earlier commit's kernels
	$(BIN)/python bench/gate.py $(GATE)

# On a machine with an NVIDIA device: the Python that has torch and Triton, nothing of ours installed, no network.
.PHONY: bench-gpu
bench-gpu: ## Measure kernels and engine on an NVIDIA device (PYTHON has torch and Triton; SECTIONS="smoke kernels" picks)
	$(PYTHON) bench/gpu $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SECTIONS),--sections $(SECTIONS))

.PHONY: bench-gpu-parts
bench-gpu-parts: .venv/.installed | $(UV) ## Pack what a bare machine with a device lacks (CHECK=python3.12 with torch imports it)
	$(BIN)/python bench/gpu/packing.py --uv $(UV) $(if $(CHECK),--python $(CHECK))

.PHONY: bench-gpu-table
bench-gpu-table: .venv/.installed ## Write the rows of all runs into docs/benchmarks.md (ROWS="out/rows.jsonl" adds a run's)
	$(BIN)/python bench/gpu/table.py $(ROWS)

.PHONY: bench-gateway
bench-gateway: .venv/.installed | $(UV) ## Install other routers and measure their cost beside ours (GATEWAY="--smoke" passes options)
	$(BIN)/python bench/gateway_overhead.py --uv $(UV) $(GATEWAY)

.PHONY: bench-routing
bench-routing: .venv/.installed | $(UV) ## Compare which pods other routers choose with ours (ROUTING="--seeds 3" passes options)
	$(BIN)/python bench/gateway_routing.py --uv $(UV) $(ROUTING)

# Where CI installs Go, for machines without one that is new enough.
up-kubernetes e2e e2e-full e2e-addresses e2e-scale e2e-measure: export PATH := $(CURDIR)/.uv/bin:$(PATH)

.PHONY: e2e
e2e: .venv/.installed ## Prove the platform on a real Kubernetes: the smoke cases (root; E2E_CONTEXT=NAME uses yours)
	$(call on_cluster,-m smoke)
	$(if $(E2E_CONTEXT),,$(BIN)/pytest e2e/crd e2e/chart)

.PHONY: e2e-full
e2e-full: .venv/.installed ## Prove all of it: every end-to-end case, the largest one too
	$(call on_cluster,-m "not measure")
	$(if $(E2E_CONTEXT)$(filter-out e2e,$(CASES)),,for families in IPv6 IPv6$(comma)IPv4; do \
		E2E_FAMILIES=$$families $(MAKE) e2e-addresses || exit 1; done)

.PHONY: e2e-addresses
e2e-addresses: .venv/.installed ## Serve over the addresses of E2E_FAMILIES: IPv4, IPv6, or both as IPv6,IPv4
	$(BIN)/python e2e/cluster with bash -c \
		'exec $(BIN)/pytest e2e/addresses --kubeconfig "$$KUBECONFIG" --image-tag "$$PAGEMILL_TAG"'

.PHONY: e2e-scale
e2e-scale: .venv/.installed ## 500 LLMDeployments on 200 hollow nodes
	$(call on_cluster,-m scale)

.PHONY: e2e-measure
e2e-measure: .venv/.installed ## Measure the platform on a real Kubernetes
	$(call on_cluster,-s -m measure)

##@ Release

# Apart from .venv: what builds and examines packages never meets what they need.
RELEASE_ENV := .uv/release
# Environments of .uv/release and of checks are synchronized from the lock alone.
.uv/release/.installed: uv.lock | $(UV)
	UV_PROJECT_ENVIRONMENT=$(RELEASE_ENV) $(UV) sync --frozen $(UV_FLAGS) --quiet --only-group release --only-group build
	touch $@

.PHONY: bump
bump: $(UV) ## Write VERSION to every place that names the version (VERSION=0.2.0)
	$(PYTHON) release/versions.py --set "$(VERSION)"
	$(UV) lock $(UV_FLAGS)

.PHONY: dist
dist: .uv/release/.installed ## Build the wheels of all packages into dist/, the kernels' for the oldest glibc that they run on
	$(RELEASE_ENV)/bin/python release/wheels.py --uv $(UV)

.PHONY: dist-check
dist-check: $(UV) ## Install the wheels of dist/ into an empty environment without a compiler, and serve with them
	$(PYTHON) release/check_wheels.py --uv $(UV)

# Linked statically, so that the emulator needs no system of that machine.
ARM64_CXX ?= aarch64-linux-gnu-g++
ARM64_CHECK := .uv/arm64/check
$(ARM64_CHECK): $(wildcard kernels/pagemill_kernels/cpu/src/*) tests/kernels/native/check.cpp
	mkdir -p $(@D)
	printf '%s\n' $(filter %.cpp,$^) | xargs -P $$(nproc) -I{} sh -c \
		'$(ARM64_CXX) -O3 -std=c++17 -ffp-contract=off -fno-math-errno -c -o $(@D)/$$(basename {} .cpp).o {}'
	$(ARM64_CXX) -static -pthread -o $@ $(@D)/*.o

.PHONY: arm64-check
arm64-check: $(ARM64_CHECK) ## Compile the native kernels for 64-bit Arm and run them in an emulator (Debian: g++-aarch64-linux-gnu qemu-user-static)
	qemu-aarch64-static $(ARM64_CHECK)

# What `git describe` finds is the tag before this commit, also where the commit itself is a release.
.PHONY: previous-wheels
previous-wheels: | $(UV) ## Fetch the wheels of the release before, for the tests that run them beside today's
	if tag=$$(git describe --tags --abbrev=0 --match 'v*' HEAD^ 2>/dev/null); then \
		$(OWN_PIP) && .uv/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest .uv/previous-wheels \
			"pagemill==$${tag#v}" $(patsubst %,"pagemill-%==$${tag#v}",$(notdir $(filter-out cli,$(PACKAGES)))); \
	else echo "no release is tagged before this commit; the tests take an earlier commit"; fi

.PHONY: sbom
sbom: $(UV) ## Write what the wheels depend on to dist/ as CycloneDX
	mkdir -p dist
	$(UV) export --frozen --quiet --format cyclonedx1.5 --no-dev --package pagemill \
		--output-file dist/pagemill.cdx.json

.PHONY: chart-package
chart-package: ## Package the chart into dist/ (needs Go: Helm comes from the modules of the test cluster)
	mkdir -p dist
	go -C e2e/cluster/modules/helm4 tool helm package $(CURDIR)/charts/pagemill --destination $(CURDIR)/dist

.PHONY: audit
audit: .uv/release/.installed ## Ask the vulnerability service of the package index about everything that the lock pins
	$(UV) export --frozen --quiet --all-packages --all-groups --no-emit-workspace --format requirements.txt \
		--output-file .uv/audit.txt
	$(RELEASE_ENV)/bin/pip-audit --disable-pip --require-hashes --requirement .uv/audit.txt

.PHONY: actionlint
actionlint: ## Check the workflows of .github (needs Go)
	go run github.com/rhysd/actionlint/cmd/actionlint@$(ACTIONLINT_VERSION)

.PHONY: release-dry-run
release-dry-run: ## Run every step of a release that publishes nothing; what is made lies in dist/
	rm -rf dist
	$(PYTHON) release/versions.py
	$(MAKE) dist sbom chart-package actionlint
	$(PYTHON) release/krew.py --repository owner/name
	$(RELEASE_ENV)/bin/python release/wheels.py --inspect
	cd dist && sha256sum * | tee SHA256SUMS

##@ Generate

.PHONY: crds
crds: .venv/.installed ## Write the custom resource's YAML and reference page from its models, and what the chart repeats
	$(BIN)/python -m pagemill_crds.generate
	$(BIN)/python charts/generate.py

.PHONY: release-freeze
release-freeze: .venv/.installed ## Freeze the custom resource and the messages between programs as this release publishes them
	PYTHONPATH=tests/shared $(BIN)/python tests/crds/freeze.py

.PHONY: docs
docs: .venv/.installed crds ## Write the reference pages from the code
	$(BIN)/python docs/generate.py

.PHONY: docs-check
docs-check: .venv/.installed ## Fail where a reference page differs from the code
	$(BIN)/python docs/generate.py --check

# Its packages are apart from those of the project, as those of a release are.
SITE_ENV := .uv/site
$(SITE_ENV)/.installed: docs/site/requirements.txt | $(UV)
	$(UV) venv $(UV_FLAGS) --quiet --clear $(SITE_ENV)
	$(UV) pip install --system-certs --quiet --python $(SITE_ENV)/bin/python --require-hashes --requirement docs/site/requirements.txt
	touch $@

.PHONY: site
site: $(SITE_ENV)/.installed ## Build the docs as a site into dist/site and check every link (SITE_REPOSITORY_URL links to the sources)
	NO_MKDOCS_2_WARNING=1 $(SITE_ENV)/bin/mkdocs build

.PHONY: lock
lock: $(UV) ## Resolve the dependencies anew into uv.lock
	$(UV) lock $(UV_FLAGS)
	$(UV) export --frozen --quiet --only-group uv --no-annotate --no-header --output-file release/uv.txt
	printf 'mkdocs\nmkdocs-material\n' | $(UV) pip compile --system-certs --quiet --generate-hashes --no-annotate --no-header --universal \
		--python-version 3.11 --output-file docs/site/requirements.txt -

.PHONY: clean
clean: ## Remove the environment, caches and build outputs
	rm -rf .venv .uv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .pagemill
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# By the interpreter's own pip, where it has one that is new enough: setting up another takes four seconds.
INSTALL_UV := install --quiet --disable-pip-version-check --require-hashes -r release/uv.txt
OWN_PIP = { .uv/bin/python -m ensurepip >/dev/null || { echo "make: $(PYTHON) has no pip; on Debian: apt-get install python3-venv"; exit 1; }; }
.uv/bin/uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "make: $(PYTHON) is older than 3.11; name a newer one: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv --without-pip .uv
	$(PYTHON) -m pip --python .uv/bin/python $(INSTALL_UV) 2>/dev/null || { $(OWN_PIP) && .uv/bin/python -m pip $(INSTALL_UV); }

INSTALLED_FROM := uv.lock pyproject.toml $(wildcard */pyproject.toml libs/*/pyproject.toml) kernels/hatch_build.py $(wildcard kernels/pagemill_kernels/cpu/src/*)
# Bytecode at once: a start from sources takes twice as long. uv compiles what it installs, not the packages of this repository.
# `date` around the lines: the first phase that `make up` reports.
define install
@start=$$(date +%s); \
$(UV) sync --frozen $(UV_FLAGS) $(1); \
$(2); \
touch $@; \
echo "phase download+install: $$(( $$(date +%s) - start )) s"
endef

COMPILE := $(BIN)/python -m compileall -q -j 0 $(PACKAGES)

.venv/.installed: $(INSTALLED_FROM) | $(UV)
	$(call install,--compile-bytecode,$(COMPILE))

# What serves models on CPUs, a tenth of what develops: no torch, and nothing of the tests. Where all is installed that is enough.
# Of its files fewer than half are ever imported: importing them leaves their bytecode, in less than half of the time.
IMPORT = $(BIN)/python -c 'import $(RUNNING)'
RUNNING := pagemill.main, pagemill.commands.up, pagemill.up.loading, pagemill.up.screen, pagemill.up.session, \
	pagemill_operator.backends.local, pagemill_gateway.processes.server, pagemill_gateway.processes.__main__, \
	pagemill_engine.server.main, pagemill_engine.loop.process, pagemill_execution.starting.load_cpu
.venv/.runnable: export PAGEMILL_KERNEL_LEVELS := $(if $(wildcard .venv/.installed),fitting,highest)
.venv/.runnable: $(INSTALLED_FROM) | $(UV)
	$(if $(wildcard .venv/.installed),$(call install,--compile-bytecode,$(COMPILE)),$(call install,--no-group dev,$(IMPORT)))
