# `make quickstart` and `make test` set up everything they need in .venv and run; a second run installs nothing.

VENV ?= .venv
PYTHON ?=
EXTRAS ?= dev,quickstart
TORCH_INDEX ?=
TEST_PROCESSES ?= 2
ready := $(VENV)/.strop-ready

.PHONY: help setup quickstart test lint format clean

help:
	@echo "make quickstart   train a small model by SFT, DPO and GRPO on this machine (minutes); ARGS= passes options on"
	@echo "make test         run the tests; ARGS= passes options to pytest"
	@echo "make lint         ruff and pyright, as in CI"
	@echo "make format       let ruff fix and format what it can"
	@echo "make clean        remove the virtual environment and caches"

setup: $(ready)

$(ready): pyproject.toml tools/setup.sh
	PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" tools/setup.sh $(VENV) $(EXTRAS)
	@touch $@

quickstart: $(ready)
	$(VENV)/bin/strop quickstart $(ARGS)

# One thread a process: two processes of two threads each on two cores wait for each other most of the time.
test: $(ready)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q -n $(TEST_PROCESSES) $(ARGS)

lint: $(ready)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

format: $(ready)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache *.egg-info
