# `make run`: install and run the main job. `make test`: install and run all tests.
# `make check`: lint, format and types. Everything lives in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test check clean

run: $(VENV)/.installed
	$(BIN)/python -m experiments.papers.fedipg --study=first_look --data=colored_digits,rotated_digits

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --numprocesses=auto --dist=loadscope

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[experiments]'
	touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	# For programs that are compiled for TPUs, in a folder of its own: JAX would look for one at every
	# start. There is none for other machines than those of Linux.
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
		--target=$(VENV)/accelerators libtpu
	touch $@

clean:
	rm -rf $(VENV) runs
