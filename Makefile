# make demo    train a stochastic binary network on handwritten digits
# make test    lint, type-check and test
# make docs    the site, in docs/build/html
# make fuzz MINUTES=10    run the property tests with new random examples for ten minutes
# make mutate MUTANTS=60    the share of small defects that the tests notice
# make torture     attack the library for an hour; MINUTES=5, SEED=1, PARTS=kills,disk, and WRITE=1 for docs/torture.md
# make sanitize    run the compiled kernels under the address and undefined-behaviour sanitizers
# All but sanitize set up everything they need in .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup -q
MINUTES ?= 10
MUTANTS ?= 60

.PHONY: help demo docs test test-all fuzz mutate torture sanitize lint format clean

help:
	@sed -n 's/^# //p' Makefile

demo: $(VENV)/ready
	$(BIN)/flipgrad train --schedule cosine --validation 0 --output runs/demo --overwrite

# One thread: what tutorials print is the same everywhere.
docs: $(VENV)/ready-for-docs
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -W --keep-going -n -b html docs docs/build/html
	@echo "Open docs/build/html/index.html"

test: lint
	$(PYTEST) -m "not slow"

test-all: lint $(VENV)/ready-for-docs
	$(PYTEST)

fuzz: $(VENV)/ready-to-test
	$(BIN)/python tests/fuzz.py --minutes $(MINUTES)

mutate: $(VENV)/ready-to-test
	$(BIN)/python tests/mutate.py --mutants $(MUTANTS)

torture: MINUTES = 60
torture: SEED = 0
torture: $(VENV)/ready-to-test
	cd tests && ../$(BIN)/python -m torture --minutes $(MINUTES) --seed $(SEED) --parts "$(PARTS)" $(if $(WRITE),--write)

sanitize:
	mkdir -p build
	$(CXX) -std=c++17 -O1 -g -Wall -Wextra -Werror -Wno-psabi -fno-math-errno -fsanitize=address,undefined -fno-sanitize-recover=all \
		-Isrc/flipgrad/csrc src/flipgrad/csrc/*.cpp tests/flips/native_main.cpp tests/packed/native_packed.cpp -pthread -o build/sanitized
	ASAN_OPTIONS=detect_leaks=1 build/sanitized

lint: $(VENV)/ready-to-test
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

format: $(VENV)/ready-to-test
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

$(VENV)/ready: pyproject.toml constraints.txt setup.py $(wildcard src/flipgrad/csrc/*)
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	touch $@

$(VENV)/ready-to-test: $(VENV)/ready
	$(PIP) --editable ".[dev]"
	touch $@

$(VENV)/ready-for-docs: $(VENV)/ready
	$(PIP) --editable ".[docs]"
	touch $@

clean:
	rm -rf $(VENV) build dist docs/build docs/reference docs/tutorials docs/paper.md .mypy_cache .pytest_cache .ruff_cache .hypothesis src/*.egg-info
