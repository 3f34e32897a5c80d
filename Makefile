# Needs Python 3.10 or newer (as `python3`, or PYTHON=...) and pip; everything else lands in $(VENV).
PYTHON ?= python3
VENV ?= .venv
OLDEST ?= .oldest
# Triton interprets its kernels on a CPU. Where torch comes with a GPU, it brings the version that it wants.
TRITON ?= .triton
TRITON_VERSION := 3.6.0
# Worker processes of pytest: one per core, but no more than eight, since each imports torch anew.
JOBS ?= auto
PYTEST_ARGS ?=
DEMO_ARGS ?=

BIN := $(VENV)/bin
# Byte code is made of what is imported when it is imported; most of what is installed never is. It must then be kept, or
# every process compiles torch and transformers again, which takes longer than importing them.
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL := $(BIN)/python -m pip install --no-compile
PYTEST := $(BIN)/python -m pytest --numprocesses $(JOBS) --maxprocesses 8 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-fast test-oldest test-kernels quality format clean

help:
	@echo "make demo         install and show a real model generating, with and without speculation"
	@echo "make test         install and run all tests"
	@echo "make test-fast    without the slow ones"
	@echo "make test-oldest  the fast ones that depend on it, on the oldest supported transformers"
	@echo "make test-kernels the GPU kernels' arithmetic, interpreted on the CPU"
	@echo "make quality      ruff and mypy"
	@echo "make format       let ruff rewrite the code"
	@echo "make clean        remove environments, builds and caches"

venv: $(VENV)/.installed

# The stamp is touched last, so an interrupted installation is done again.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 10) and f"$(PYTHON) is Python {v}; hf-dsde needs 3.10 or newer: make venv PYTHON=/path/to/python3")'
	$(PYTHON) -m venv $(VENV)
# Python 3.10 and 3.11 come with a pip that takes twice as long to choose among the wheels of an index.
	$(PIP_INSTALL) --constraint constraints.txt --upgrade pip
	$(PIP_INSTALL) --constraint constraints.txt --editable '.[demo,dev]'
	@touch $@

# Only the packages that differ are installed; on PYTHONPATH they come before those of the environment.
$(OLDEST)/.installed: constraints-oldest.txt $(VENV)/.installed
	rm -rf $(OLDEST)
	$(PIP_INSTALL) --no-deps --target $(OLDEST) --requirement constraints-oldest.txt
	@touch $@

demo: venv
	$(BIN)/hf-dsde demo $(DEMO_ARGS)

test: venv
	$(PYTEST) $(PYTEST_ARGS)

test-fast: venv
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

# What another version of transformers cannot change: files that compute with torch, numpy or recorded numbers alone, or
# that go through a generator whose own tests run. What is not listed runs, until somebody knows better.
WITHOUT_TRANSFORMERS := $(filter-out tests/policies/test_confidence.py,$(wildcard tests/policies/test_*.py)) \
	tests/replay \
	$(patsubst %,tests/trace/test_%.py,position_signals prompts recording_memory schema summary writer) \
	$(patsubst %,tests/bench/test_%.py,bench_view results workloads) \
	$(patsubst %,tests/batch/test_%.py,bad_rows batch_cli data_sets input_rows map_cache \
	memory_plan out_of_memory output output_on_disk prefetch row_results) \
	tests/cli \
	$(patsubst %,tests/kernels/test_%.py,kernels kernels_gpu) \
	$(patsubst %,tests/test_%.py,config evaluate_modules imports live_plots lossy_benchmark performance_report \
	rollouts_benchmark signals structure train_head_example train_head_stages tuning) \
	$(patsubst %,tests/execution/test_%.py,cuda_graphs row_block) \
	$(patsubst %,tests/decoding/test_%.py,lossy_rules round_plan run_ahead_plain sampling_law transfers verification) \
	$(patsubst %,tests/drafting/test_%.py,chain choice hybrid hybrid_calls launches text_index) \
	$(patsubst %,tests/measurement/test_%.py,clock costs learnt_draft_costs speculation_cost statistics)

test-oldest: $(OLDEST)/.installed
	PYTHONPATH=$(abspath $(OLDEST)) $(PYTEST) -m "not slow" $(addprefix --ignore=,$(WITHOUT_TRANSFORMERS)) \
		$(PYTEST_ARGS)

$(TRITON)/.installed: Makefile $(VENV)/.installed
	rm -rf $(TRITON)
	$(PIP_INSTALL) --no-deps --target $(TRITON) triton==$(TRITON_VERSION)
	@touch $@

# Triton decides at its import whether it interprets, so that what is interpreted and what is compiled run apart.
test-kernels: $(TRITON)/.installed
	PYTHONPATH=$(abspath $(TRITON)) TRITON_INTERPRET=1 $(PYTEST) $(wildcard tests/kernels/interpreted_*.py) $(PYTEST_ARGS)
	PYTHONPATH=$(abspath $(TRITON)) $(PYTEST) tests/kernels/test_kernels.py $(PYTEST_ARGS)


quality: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(OLDEST) $(TRITON) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find hf_dsde tests examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
