# Every target sets up .venv by itself. Two variables override what it uses:
#   PYTHON   the interpreter that makes .venv: 3.11 or newer
#   MPIEXEC  an MPI launcher, with its options if it needs any; without it the MPICH wheel goes into .venv

PYTHON ?= python3
RANKS ?= 4
VERIFY_ARGS ?= --dtype float64,float32,bfloat16
PYTEST_ARGS ?=
GPU_CHECK_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --quiet

# Tests launch MPI from other directories, so the launcher's path is absolute.
ifeq ($(strip $(MPIEXEC)),)
MPI := mpich
RUN_EXTRAS := mpi,mpich,bf16
override MPIEXEC := $(CURDIR)/$(BIN)/mpiexec
else
MPI := system
RUN_EXTRAS := mpi,bf16
endif

# A stamp says what is in .venv. Its name tells the MPI, or the interpreter, so that another choice installs anew.
PY_STAMP := $(VENV)/.python-$(subst /,_,$(PYTHON))
RUN_STAMP := $(VENV)/.installed-run-$(MPI)
TEST_STAMP := $(VENV)/.installed-test-$(MPI)
DEV_STAMP := $(VENV)/.installed-dev-$(MPI)
PEERS_STAMP := $(VENV)/.installed-peers-$(MPI)

PYTEST := MPIEXEC="$(MPIEXEC)" $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help verify test slow peers lint format traceability bench gpu-check clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

verify: $(RUN_STAMP) ## Check every policy, forward and backward, on RANKS=4 MPI ranks (VERIFY_ARGS)
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(MPIEXEC) -n $(RANKS) $(BIN)/thdcp verify $(VERIFY_ARGS)

test: $(TEST_STAMP) ## Run the tests, without the slow sweeps (PYTEST_ARGS)
	$(PYTEST) -m "not slow and not peers" $(PYTEST_ARGS)

slow: $(TEST_STAMP) ## Run the slow sweeps
	$(PYTEST) -m "slow and not peers" $(PYTEST_ARGS)

peers: $(PEERS_STAMP) ## Compare with other frameworks' own code
	$(PYTEST) -m peers tests/peers $(PYTEST_ARGS)

lint: $(DEV_STAMP) ## Check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV_STAMP) ## Rewrite the sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

traceability: $(RUN_STAMP) ## Write specs/traceability.txt
	$(BIN)/python -m tests.traceability --write

bench: $(TEST_STAMP) ## Time the attention against PyTorch on this machine
	$(BIN)/python bench/attention.py

# A machine with a GPU may have no network, so this takes PYTHON as it is, with its own CuPy and torch.
gpu-check: ## Check the GPU backend on this machine's GPU with PYTHON's own packages, then time it (GPU_CHECK_ARGS)
	@PYTHONPATH="$(CURDIR)" $(PYTHON) bench/gpu_check.py $(GPU_CHECK_ARGS)

clean: ## Remove .venv and everything generated
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(PY_STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  found=$$($(PYTHON) -c 'import sys; print("is %d.%d.%d" % sys.version_info[:3])' 2>/dev/null) || \
	    found='cannot be run'; \
	  echo "thdcp needs Python 3.11 or newer, and $(PYTHON) $$found: name another with PYTHON=..." >&2; \
	  exit 1; }
	@echo "Making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# An mpi4py that finds the wheel's library under another launcher makes every rank a world of its own, so the
# wheel goes when the machine's MPI is used, and so do the stamps of the other choice.
$(RUN_STAMP): pyproject.toml $(PY_STAMP)
	@echo "Installing thdcp into $(VENV) (extras $(RUN_EXTRAS))"
	@rm -f $(VENV)/.installed-*
	@$(if $(filter system,$(MPI)),$(BIN)/python -m pip --disable-pip-version-check uninstall --quiet --quiet --yes mpich)
	@$(PIP) --editable '.[$(RUN_EXTRAS)]'
	@touch $@

$(TEST_STAMP): $(RUN_STAMP)
	@echo "Installing what the tests need into $(VENV)"
	@$(PIP) --editable '.[test]'
	@touch $@

$(DEV_STAMP): $(RUN_STAMP)
	@echo "Installing the linters into $(VENV)"
	@$(PIP) --editable '.[dev]'
	@touch $@

$(PEERS_STAMP): $(TEST_STAMP)
	@echo "Installing other frameworks into $(VENV)"
	@$(PIP) --editable '.[peers]'
	@$(PIP) --no-deps ring-flash-attn==0.1.8
	@touch $@
