# Every target installs what it needs into .venv; PYTHON picks the interpreter (3.10 to 3.12) the environment is made with,
# WORKERS the number of processes that share the tests.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin

.PHONY: install install-dev quickstart test lint bench torture fuzz matrix licenses lock docs clean

$(VENV)/.installed: requirements/lock.txt setup.py
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 10) <= v[:2] <= (3, 12) else f"mrla_mm supports Python 3.10 to 3.12, found {v[0]}.{v[1]}: run make PYTHON=python3.11")'
	@echo "Installing the locked torch, mmdet and the rest into $(VENV), 5 GB: 2.5 minutes when measured, in which pip says nothing"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/lock.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements/dev.txt
	@echo "Installing what tests, lint and documentation need into $(VENV)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	touch $@

install: $(VENV)/.installed

install-dev: $(VENV)/.installed-dev

quickstart: install
	$(BIN)/python tools/quickstart.py

test: install-dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/pylint --jobs 1 mrla_mm tools tests

docs: install-dev  # Sphinx needs Python 3.11 or newer
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs docs/_build

bench: install
	$(BIN)/python tools/benchmark.py

torture: install
	$(BIN)/python tools/torture.py
	$(BIN)/python tools/check_distributed.py --processes 2
	$(BIN)/python tools/check_distributed.py --processes 4

fuzz: install-dev
	MRLA_FUZZ=$(or $(EFFORT),20) $(BIN)/python -m pytest tests/robustness

matrix: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/python tools/matrix.py

licenses: install-dev
	$(BIN)/python tools/licenses.py --out docs/licenses.md

lock: install
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --quiet --universal --python-version 3.10 --no-header --no-annotate --generate-hashes requirements/lock.in -o requirements/lock.txt
	$(BIN)/uv pip compile --quiet --universal --python-version 3.10 --no-header --no-annotate --generate-hashes requirements/dev.in -o requirements/dev.txt

clean:
	rm -rf $(VENV) work_dirs build dist docs/_build *.egg-info
