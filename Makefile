# `make run` installs the package and runs a first comparison. `make test` installs the test
# dependencies and runs all tests but the slow ones; `make test-all` runs those too. `make check` checks
# lint, format and types. All is installed in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test test-all check clean

run: $(VENV)/.installed
	$(BIN)/fedjax-inv paper fedipg --study=first_look --data=colored_digits,rotated_digits

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --numprocesses=auto --dist=loadscope -m "not slow"

test-all: test
	$(BIN)/python -m pytest --numprocesses=auto --dist=loadscope -m slow

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
	# libtpu compiles programs for TPUs. It has a folder of its own, because JAX would otherwise look
	# for a TPU at every start. It exists for Linux only.
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
		--target=$(VENV)/accelerators libtpu
	touch $@

clean:
	rm -rf $(VENV) runs
