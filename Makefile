# make help    this
# make setup   create .venv and install the project with the versions of constraints.txt
# make serve   serve the bundled models on port 8000
# make test    run the tests          make test-all   the slow ones, too
# make check   linters, type checker, architecture test
# make fuzz    1,200,000 hostile inputs; goes on where it was interrupted
# make chaos   provoke every fault, TRIALS times each; goes on where it was interrupted
# make soak    random faults for SOAK_MINUTES
#
# PyTorch: pip takes the CPU build where its configuration offers one.  To choose yourself, at first
# or later (without TORCH_INDEX, the build that is installed stays):
#   make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu     (or .../cu130)

PYTHON ?= python3.11
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed-stamp
STAMP := $(VENV)/.setup-stamp
CHOSEN_INDEX := $(VENV)/.torch-index
# Without bytecode, which takes minutes for all and is made of a module when it is first imported;
# where it may not be kept, each of a hundred processes compiles all it imports.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
# Whole files go to one of two processes; all that start a Ray cluster to the same one, first.
PARALLEL := --numprocesses 2
TORCH := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)
# Scripts of an environment name the directory it was made in, so in another one it is made again.
PLACE := $(VENV)/.place
MOVED := $(shell [ -L $(VENV) ] || [ ! -f $(PLACE) ] || [ "$$(cat $(PLACE))" = "$(CURDIR)" ] || echo moved)
OLD_INDEX := $(shell cat $(CHOSEN_INDEX) 2>/dev/null)
NEW_INDEX := $(filter-out $(OLD_INDEX),$(TORCH_INDEX))
INDEX := $(or $(NEW_INDEX),$(OLD_INDEX))
FROM_INDEX := $(addprefix --index-url ,$(INDEX))

TRIALS := 10
SOAK_MINUTES := 30

.PHONY: help setup serve test test-all check fuzz chaos soak new-index
.DEFAULT_GOAL := setup

help:
	@sed -n '/^$$/q; s/^# \{0,1\}//p' Makefile

setup: $(STAMP)

# To pip, 2.13.0+cpu satisfies torch==2.13.0 in place of 2.13.0+cu130, so another build is forced;
# what it depends on follows without force, and from wherever there is the version wanted.
# Where making the environment broke off, Python is there without pip; --clear forgets the index.
$(INSTALLED): pyproject.toml constraints.txt $(if $(NEW_INDEX)$(MOVED),new-index)
	@$(if $(MOVED),false,$(BIN)/python -m pip --version >/dev/null 2>&1) || \
	  $(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -c "import torch" 2>/dev/null || \
	  $(BIN)/python -m pip install --dry-run --no-deps --quiet --report - $(TORCH) \
	    $(FROM_INDEX) 2>/dev/null | grep -q '+cpu' || \
	  echo "PyTorch: no CPU build is offered, so its CUDA build is installed, a download of" \
	       "several GB; 'make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu' takes 200 MB"
	@echo "setup 1/3: $(TORCH), 200 MB without CUDA; a minute or more"
	@$(if $(FROM_INDEX),$(PIP) $(if $(NEW_INDEX),--force-reinstall) --no-deps $(TORCH) $(FROM_INDEX))
	@$(PIP) $(TORCH) $(subst --index-url,--extra-index-url,$(FROM_INDEX))
	@echo "setup 2/3: hdserve with its packages and those of the tests; minutes"
	@$(PIP) --editable '.[test,dev]'
	@$(if $(INDEX),echo '$(INDEX)' >$(CHOSEN_INDEX))
	@[ -L $(VENV) ] || printf %s "$(CURDIR)" >$(PLACE)
	@touch $(INSTALLED)

new-index:

$(STAMP): $(INSTALLED)
	@echo "setup 3/3: compiling the kernels, once; a minute or two"
	@$(BIN)/python -c "from hdserve.engine.native.operators import load_operators as _; _()" & \
	  $(BIN)/python -c "from hdserve import LLM; LLM('hdserve-mini')" && wait $$!
	@touch $(STAMP)
	@echo "setup done; '. $(VENV)/bin/activate' puts hdserve on the PATH of a shell"

serve: setup
	@echo "starting Ray and the models; it says when it is ready"
	@$(BIN)/hdserve serve

# A thread that looks for the next parallel loop all the time keeps a core from the tests beside it.
test: setup
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest $(PARALLEL)

test-all: setup
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest $(PARALLEL) -m ''

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --quiet --noconftest tests/test_architecture.py

fuzz: setup
	@$(BIN)/python -c "import atheris, schemathesis" 2>/dev/null || $(PIP) --editable '.[fuzz]'
	$(BIN)/python -m tests.fuzz --cases 150000 --out build/fuzz

chaos: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos --trials $(TRIALS) --out out/chaos

soak: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos.soak --minutes $(SOAK_MINUTES) --out out/chaos/soak.jsonl
