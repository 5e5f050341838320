# Everything a developer does here. `make` alone lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TRITON_VENV ?= .venv-triton
TRITON_STAMP := $(TRITON_VENV)/.installed
VLLM_VENV ?= .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
DOCS_VENV ?= .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.installed
VLLM_PIP = $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check --no-input install
PYTEST_ARGS ?=
SOAK_S ?= 3600
SOAK_MESSAGES ?= 100000
# Processes for the tests that start no Ray. By default one for each core at night, and one more by day,
# when they share the machine with the tests that start one.
PYTEST_WORKERS ?=
PYTEST := $(BIN)/python -m pytest
BENCH_ARGS ?=
DEMO_MODEL_ARGS ?=
WHEEL_MACHINES ?= x86_64 aarch64

# Quiet pip, visible progress: one line that changes on a terminal, a line per package elsewhere.
# Errors stay; pip's warnings are about the user's own pip settings. pip would compile
# every file of these packages, which takes longer than all else: below, what is imported is compiled.
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input install --no-compile
QUIET := 2> >(grep -v '^WARNING: ' >&2)
PROGRESS := awk -v tty="$$([ -t 2 ] && echo 1 || echo 0)" \
	'/^ *(Downloading|Building|Installing|Preparing)/ { $$1 = $$1; line = substr($$0, 1, 76); \
	if (tty) printf "\r\033[K  %s", line; else if (!/Downloading.*metadata/) print "  " line; fflush() } \
	END { if (tty) printf "\r\033[K" }'

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: install
install: $(STAMP) ## create .venv and install everything in it (the other targets do it by themselves)

# Python 3.11 is what the constraints were tested with; the newer ones that work come after it. A
# command of that name may be a launcher without a Python behind it, so each candidate is run.
$(BIN)/python:
	@for python in $(or $(PYTHON),python3.11 python3 python3.12 python3.13); do \
	  if "$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	      2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$${found:-}" ]; then \
	  echo "Paceline needs Python 3.11, 3.12 or 3.13; $(or $(PYTHON),python3 here) is \
	$$($(or $(PYTHON),python3) --version 2>/dev/null || echo missing). Install one, or name it:" \
	  "make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; \
	fi; \
	if ! command -v $${CC:-cc} >/dev/null && ! command -v gcc >/dev/null; then \
	  echo "Paceline builds its CPU kernels with a C compiler, and there is none: install gcc or" \
	  "clang (Debian: apt install gcc), or name one in CC" >&2; exit 1; \
	fi; \
	echo "[1/4] $(VENV): $$($$found --version)"; \
	rm -rf "$(VENV)"; "$$found" -m venv "$(VENV)" || { rm -rf "$(VENV)"; \
	  echo "Python's venv module does not work here (Debian: apt install python3-venv)" >&2; exit 1; }

$(STAMP): pyproject.toml setup.py constraints.txt | $(BIN)/python
	@start=$$SECONDS; pin=$$(grep '^torch==' constraints.txt); \
	said=$(VENV)/kernels.txt; $(BIN)/python -m paceline.models.kernels > $$said 2>&1 & kernels=$$!; \
	echo "[2/4] $$pin (the largest download)"; \
	$(PIP) -c constraints.txt "$$pin" "$$(grep -i '^setuptools==' constraints.txt)" $(QUIET) | $(PROGRESS); \
	$(BIN)/python -m compileall -qq $(VENV)/lib/python*/site-packages/torch > /dev/null & torch=$$!; \
	echo "[3/4] Paceline and $$(grep -c == constraints.txt) packages"; \
	$(PIP) -c constraints.txt --no-build-isolation -e '.[dev]' $(QUIET) | $(PROGRESS); \
	$(BIN)/python -m compileall -q paceline rpc deployments cluster tuning; wait $$torch || true; \
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -c 'import ray.serve, ray.tune, transformers.models.llama.modeling_llama, \
	  paceline.cluster.cli, paceline.deployments.app, paceline.deployments.gateway, paceline.loading'; \
	wait $$kernels || echo "without kernels Paceline computes with torch, more slowly:"; \
	echo "[4/4] kernels: $$(tail -n 1 $$said)"; \
	$(BIN)/paceline models get smollm2 > /dev/null || echo "without SmolLM2, whose tests are skipped"; \
	touch $@; echo "installed in $$((SECONDS - start)) s"

.PHONY: demo
demo: $(STAMP) ## generate real text through a draft actor and a target actor on a local Ray
	@$(BIN)/paceline demo

# Where Python may not write what it compiled, each of the processes compiles the packages anew: four
# for the demo, hundreds for the tests.
demo test test-slow test-all test-nightly soak: export PYTHONDONTWRITEBYTECODE :=

.PHONY: test
test: $(STAMP) ## run the test suite (a quarter of an hour on 2 cores)
	@$(BIN)/python tests/run.py $(PYTEST_ARGS)

.PHONY: test-slow
test-slow: $(STAMP) ## run what is left out of it: a wheel, a browser, a whole demo (about 14 minutes)
	@$(BIN)/python tests/run.py --slow $(PYTEST_ARGS)

.PHONY: test-all
test-all: $(STAMP) ## both at once, in less time: they share imports, models and a Ray
	@$(BIN)/python tests/run.py --all $(PYTEST_ARGS)

# Arm's kernels run in an emulator where Debian's gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and
# qemu-user are installed.
.PHONY: test-nightly
test-nightly: $(STAMP) ## run the long tests, which take hours
	@$(PYTEST) -n $(or $(PYTEST_WORKERS),auto) --dist load -m "nightly and not serve" $(PYTEST_ARGS) || [ $$? -eq 5 ]
	@$(PYTEST) -m "nightly and serve" $(PYTEST_ARGS) || [ $$? -eq 5 ]

.PHONY: soak
soak: $(STAMP) ## a server under all sorts of clients for SOAK_S seconds (an hour), and SOAK_MESSAGES hostile ones
	@PACELINE_SOAK_S=$(SOAK_S) PACELINE_HOSTILE_MESSAGES=$(SOAK_MESSAGES) \
	  $(PYTEST) -n 2 -m nightly tests/nightly/test_soak.py tests/nightly/test_hostile.py

# Triton is large and of no use to torch's builds for CPUs: it lies in an environment of its own, which
# has everything else from .venv.
$(TRITON_STAMP): $(STAMP)
	@rm -rf "$(TRITON_VENV)"; pin=$$(grep '^triton==' constraints.txt); \
	echo "[1/1] $(TRITON_VENV): $$pin (about 200 MB)"; \
	$(BIN)/python -m venv --without-pip "$(TRITON_VENV)"; \
	packages='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	echo "import site; site.addsitedir('$$($(BIN)/python -c "$$packages")')" \
	  > "$$($(TRITON_VENV)/bin/python -c "$$packages")/paceline.pth"; \
	$(BIN)/python -m pip --disable-pip-version-check --no-input --python "$(TRITON_VENV)/bin/python" \
	  install --no-compile --no-deps "$$pin" $(QUIET) | $(PROGRESS); \
	touch $@

.PHONY: test-triton
test-triton: $(TRITON_STAMP) ## run the kernels for CUDA devices on the CPU, in Triton's interpreter
	@TRITON_INTERPRET=1 $(TRITON_VENV)/bin/python -m pytest -p no:cacheprovider \
	  -n $(or $(PYTEST_WORKERS),auto) --maxschedchunk=1 \
	  tests/core/test_triton_kernels.py tests/core/test_gpu_writer.py $(PYTEST_ARGS)

# vLLM and what it needs are large, and pin other versions than ours: an environment of its own.
$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	@start=$$SECONDS; rm -rf "$(VLLM_VENV)"; \
	echo "[1/3] $(VLLM_VENV)"; $(or $(PYTHON),python3.11) -m venv "$(VLLM_VENV)"; \
	export PATH="$(abspath $(VLLM_VENV))/bin:$$PATH"; \
	echo "[2/3] vLLM and $$(grep -c == constraints-vllm.txt) packages (about 4 GB)"; \
	$(VLLM_PIP) --no-deps -r <(grep -v '^arctic' constraints-vllm.txt) $(QUIET) | $(PROGRESS); \
	echo "[3/3] arctic-inference, which is built here, and Paceline"; \
	$(VLLM_PIP) --no-deps --no-build-isolation -r <(grep '^arctic' constraints-vllm.txt) -e . \
	  $(QUIET) | $(PROGRESS); \
	touch $@; echo "installed in $$((SECONDS - start)) s"

.PHONY: test-vllm
test-vllm: $(VLLM_STAMP) ## run the tests of the engine vLLM in an environment of its own (.venv-vllm)
	@$(VLLM_VENV)/bin/python -m pytest -p no:cacheprovider tests/engines $(PYTEST_ARGS)

# What builds the site has nothing to do with what Paceline needs: an environment of its own, too.
$(DOCS_STAMP): constraints-docs.txt
	@rm -rf "$(DOCS_VENV)"; \
	echo "[1/1] $(DOCS_VENV): $$(grep -c == constraints-docs.txt) packages (about 100 MB)"; \
	$(or $(PYTHON),python3.11) -m venv "$(DOCS_VENV)"; \
	$(DOCS_VENV)/bin/python -m pip --disable-pip-version-check --no-input install --no-compile --no-deps \
	  -r constraints-docs.txt $(QUIET) | $(PROGRESS); \
	touch $@

.PHONY: docs
docs: $(DOCS_STAMP) ## build the site of the documents in site/, which needs no network (site/index.html)
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -B -m mkdocs --color build --strict

.PHONY: lint
lint: $(STAMP) ## style, types, import contracts, commit subjects, generated code and documents
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python -m paceline.rpc.generate --check
	@$(BIN)/python -m paceline.methods_table --check
	@$(BIN)/python -m paceline.deployments.dashboard --check
	@$(BIN)/python helm/generate.py --check
	@$(BIN)/python .ci/release.py --check
	@long=$$(git log --since=2026-11-26T01:00:00Z --no-merges --format='%h %s' 2>/dev/null | \
	  awk '{ subject = $$0; sub(/^[^ ]+ /, "", subject); if (length(subject) > 72) print }'); \
	if [ -n "$$long" ]; then echo "commit subjects of more than 72 characters:" >&2; \
	  echo "$$long" >&2; exit 1; fi

.PHONY: format
format: $(STAMP) ## format the code and mend what ruff can mend
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

.PHONY: bench
bench: $(STAMP) ## compare methods and AR on this machine (BENCH_ARGS="--methods draft_model")
	@$(BIN)/paceline bench $(BENCH_ARGS)

# Debian has a compiler for the other architecture: gcc-aarch64-linux-gnu, on Arm gcc-x86-64-linux-gnu.
.PHONY: wheel
wheel: $(STAMP) ## wheels with compiled kernels for x86-64 and Arm, in dist/ (WHEEL_MACHINES="x86_64")
	@failed=; for machine in $(WHEEL_MACHINES); do \
	  cc=$${CC:-}; [ $$machine = "$$(uname -m)" ] || cc=$$machine-linux-gnu-gcc; \
	  if [ -n "$$cc" ] && ! command -v $$cc >/dev/null; then \
	    echo "no wheel for $$machine without $$cc (Debian: apt install" \
	    "gcc-$${machine/_/-}-linux-gnu); to leave it out: make wheel WHEEL_MACHINES=$$(uname -m)" >&2; \
	    failed=1; continue; \
	  fi; \
	  rm -rf build/lib; echo "$$machine"; \
	  CC=$$cc PACELINE_WHEEL_MACHINE=$$machine $(BIN)/python -m pip --disable-pip-version-check \
	    --no-input wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .; \
	done; [ -n "$$failed" ] || ls dist/*.whl; [ -z "$$failed" ]

# The source archive has no chart dependencies or images in it: those need a network (.github/workflows).
.PHONY: release
release: $(STAMP) ## everything of a release that needs no network, in dist/: wheels, sources, chart, SBOM, checksums
	@$(BIN)/python .ci/release.py --check
	@rm -rf dist; mkdir dist; $(MAKE) wheel
	@$(BIN)/python -c 'from setuptools.build_meta import build_sdist; build_sdist("dist")' >/dev/null
	@$(BIN)/python .ci/release.py; cat dist/SHA256SUMS

.PHONY: demo-models
demo-models: $(STAMP) ## train the demo pair again (DEMO_MODEL_ARGS="--extra-corpus FILE"; resumable)
	@$(BIN)/python -m paceline.train.demo --out paceline/demo $(DEMO_MODEL_ARGS)

.PHONY: constraints
constraints: ## write constraints.txt anew from the ranges in pyproject.toml
	@rm -rf build/constraints
	@$(MAKE) build/constraints/bin/python VENV=build/constraints
	@pin=$$(grep '^torch==' constraints.txt); pip="build/constraints/bin/python -m pip"; \
	$$pip install -q "$$pin" "setuptools>=77"; \
	$$pip install -q --no-build-isolation -e '.[dev,cuda,gguf,peers]' \
	  "$$(grep '^triton==' constraints.txt)"; \
	{ sed '/^torch==/q' constraints.txt; \
	  $$pip freeze --all --exclude-editable --exclude pip | sed 's/+.*//' | grep -v '^torch=='; \
	} > build/constraints.txt; \
	mv build/constraints.txt constraints.txt; rm -rf build/constraints

.PHONY: clean
clean: ## remove .venv, caches and build results (not the trained weights or their checkpoints)
	@rm -rf $(VENV) $(TRITON_VENV) $(DOCS_VENV) site build/constraints build/lib build/bdist.* dist *.egg-info results \
	  .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
