# `make run` installs the package and runs a first comparison. `make test` installs the test
# dependencies and runs all tests but the slow ones; `make test-all` runs those too. `make check` checks
# lint, format and types. `make docs` builds the site. All is installed in .venv, in the versions of
# requirements/, which `make requirements` writes. `make test-lowest` and `make test-newest` run the
# tests of `make test`, or those in TESTS, with the lowest and the newest versions that pyproject.toml
# allows, in their own folders; the latter on the newest Python. `make test-flower` runs the tests of
# Flower apps in a folder of its own. `make gpu` installs all for an NVIDIA GPU in a folder of its own,
# and measures it in eight minutes (benchmarks/gpu.py).
PYTHON ?= python3
NEWEST ?= $(shell for minor in 16 15 14 13 12 11; do \
	python3.$$minor -c "" 2>/dev/null && echo python3.$$minor && break; done)
UV ?= uv
TESTS ?=
GPU ?=
VENV := .venv
BIN := $(VENV)/bin

PIP := -m pip install --quiet --disable-pip-version-check
# Some dependencies are built here; with setuptools in its place no build fetches another one.
BUILD := $(PIP) --require-hashes -r requirements/build.txt
PACKAGE := $(PIP) --no-deps --no-build-isolation --editable .
FAST := -m pytest --numprocesses=auto --dist=loadscope -m "not slow"
COMPILE := UV_CUSTOM_COMPILE_COMMAND="make requirements" $(UV) pip compile --quiet --universal \
	--python-version=3.11 --fork-strategy=fewest --no-annotate --upgrade

.PHONY: run gpu test test-all test-lowest test-newest test-flower check docs results requirements clean

run: $(VENV)/.installed
	$(BIN)/fedjax-inv paper first_look

gpu: .venv-gpu/.installed
	.venv-gpu/bin/python -m benchmarks.gpu $(GPU)

test: $(VENV)/.installed-dev
	$(BIN)/python $(FAST) $(TESTS)

test-all: test
	$(BIN)/python -m pytest --numprocesses=auto --dist=worksteal -m slow

test-lowest test-newest: test-%: .venv-%/.installed
	.venv-$*/bin/python $(FAST) $(TESTS)

test-flower: .venv-flower/.installed
	.venv-flower/bin/python -m pytest --numprocesses=auto --dist=worksteal tests/library/test_flower*.py

# Warnings are errors, and so are links to nothing. The first page is build/docs/index.html.
docs: $(VENV)/.installed-docs
	$(BIN)/python -m sphinx -E -W --keep-going --quiet --jobs=auto -c docs -d build/doctrees . build/docs

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Writes the tables and figures of the pages from their files in docs/results/tables.
results: $(VENV)/.installed
	$(BIN)/python -m tools.results

# Writes the newest versions for all platforms, with the digests of their files. Needs uv: pip install uv
requirements:
	echo 'setuptools>=77' | $(COMPILE) --generate-hashes - -o requirements/build.txt
	$(COMPILE) --generate-hashes pyproject.toml --extra=dev --extra=docs -o requirements/dev.txt
	$(COMPILE) --generate-hashes pyproject.toml --extra=dev --extra=flower -o requirements/flower.txt
	$(COMPILE) --generate-hashes pyproject.toml --extra=experiments -c requirements/dev.txt \
		-o requirements/run.txt
	$(COMPILE) --generate-hashes pyproject.toml --extra=docs -c requirements/dev.txt \
		-o requirements/docs.txt
	echo "libtpu; sys_platform == 'linux' and platform_machine == 'x86_64'" | \
		$(COMPILE) --generate-hashes - -o requirements/libtpu.txt
	$(COMPILE) --resolution=lowest-direct pyproject.toml --extra=dev -o requirements/lowest.txt

%/bin/python:
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $*

$(VENV)/.installed: pyproject.toml requirements/build.txt requirements/run.txt | $(BIN)/python
	$(BIN)/python $(BUILD)
	$(BIN)/python $(PIP) --require-hashes --no-build-isolation -r requirements/run.txt
	$(BIN)/python $(PACKAGE)
	touch $@

$(VENV)/.installed-docs: requirements/docs.txt $(VENV)/.installed
	$(BIN)/python $(PIP) --require-hashes --no-build-isolation -r requirements/docs.txt
	touch $@

$(VENV)/.installed-dev: requirements/dev.txt requirements/libtpu.txt $(VENV)/.installed
	$(BIN)/python $(PIP) --require-hashes --no-build-isolation -r requirements/dev.txt
	# libtpu compiles programs for TPUs. It has a folder of its own, because JAX would otherwise look
	# for a TPU at every start. It exists for Linux only.
	-$(BIN)/python $(PIP) --require-hashes --no-deps --upgrade --target=$(VENV)/accelerators \
		-r requirements/libtpu.txt
	touch $@

.venv-lowest/.installed: pyproject.toml requirements/build.txt requirements/lowest.txt | .venv-lowest/bin/python
	.venv-lowest/bin/python $(BUILD)
	.venv-lowest/bin/python $(PIP) --no-build-isolation -r requirements/lowest.txt
	.venv-lowest/bin/python $(PACKAGE)
	touch $@

.venv-gpu/.installed: pyproject.toml | .venv-gpu/bin/python
	.venv-gpu/bin/python $(PIP) --upgrade --editable '.[experiments,cuda13]'
	touch $@

.venv-flower/.installed: pyproject.toml requirements/build.txt requirements/flower.txt | .venv-flower/bin/python
	.venv-flower/bin/python $(BUILD)
	.venv-flower/bin/python $(PIP) --require-hashes --no-build-isolation -r requirements/flower.txt
	.venv-flower/bin/python $(PACKAGE)
	touch $@

.venv-newest/bin/python: PYTHON = $(NEWEST)

.venv-newest/.installed: pyproject.toml | .venv-newest/bin/python
	.venv-newest/bin/python $(PIP) --upgrade --upgrade-strategy=eager --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv .venv-flower .venv-gpu .venv-lowest .venv-newest runs build dist
