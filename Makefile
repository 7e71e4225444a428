# Every target installs what it needs into .venv. PYTHON is the interpreter (3.10 or newer) the environment is made with,
# WORKERS the number of processes that share the tests.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
COMPILE := $(BIN)/uv pip compile --quiet --universal --python-version 3.10 --no-header --no-annotate --generate-hashes

.PHONY: install install-dev quickstart test test-slow test-all lint docs bench distributed matrix lock clean

$(VENV)/.installed: requirements/lock.txt setup.py requirements/runtime.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 10) or sys.exit("mrla_mm needs Python 3.10 or newer: run make PYTHON=python3.12"); v < (3, 14) or print(f"Python {v[0]}.{v[1]} has not been tried; 3.10 to 3.13 have")'
	@echo "Installing the locked torch, mmdet and the rest into $(VENV): 5 GB"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements/lock.txt
	$(PIP) --no-deps --no-build-isolation --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements/dev.txt
	@echo "Installing what tests, lint and documentation need into $(VENV)"
	$(PIP) -r requirements/dev.txt
	touch $@

install: $(VENV)/.installed

install-dev: $(VENV)/.installed-dev

quickstart: install
	$(BIN)/python tools/quickstart.py

test: install-dev  # all but the slow tests
	$(PYTEST) -m "not slow"

test-slow: install-dev
	$(PYTEST) -m slow

test-all: test test-slow

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

docs: install-dev  # Sphinx needs Python 3.11 or newer
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs docs/_build

bench: install
	$(BIN)/python .dev_scripts/benchmark.py

distributed: install
	$(BIN)/python .dev_scripts/check_distributed.py --processes 2
	$(BIN)/python .dev_scripts/check_distributed.py --processes 4

matrix: install  # of all stacks, or of those in STACKS
	$(PIP) uv
	$(BIN)/python .dev_scripts/matrix.py $(STACKS)

lock: install
	$(PIP) uv
	$(COMPILE) setup.py --extra lite --constraints requirements/lock.in -o requirements/lock.txt
	$(COMPILE) requirements/dev.in -o requirements/dev.txt

clean:
	rm -rf $(VENV) work_dirs outputs build dist docs/_build *.egg-info
