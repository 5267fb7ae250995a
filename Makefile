# Two commands on a fresh machine: `make demo` and `make test`. Each sets itself up; the second run is quick.
#
# torch: on Linux the default index serves the CUDA build (gigabytes). Where you want the CPU build, say so:
#     make demo PIP_OPTIONS="--extra-index-url https://download.pytorch.org/whl/cpu"
PYTHON ?= python3
VENV ?= .venv
PIP_OPTIONS ?=
DEMO_DIR ?= reports/adult-demo

# Spinning OpenMP threads slow small steps tenfold on a busy machine.
export OMP_WAIT_POLICY = passive

BIN = $(VENV)/bin
PIP = $(BIN)/pip --quiet --disable-pip-version-check

.PHONY: demo test test-all test-lowest test-opacus15 check lint dist lock format schema docs screens figures reproduce validate attacks wei2021 fedcdp benchmarks clean

demo: $(VENV)/.installed
	$(BIN)/indpriv demo --output-dir $(DEMO_DIR)

# One process a core, up to four: each takes half a gigabyte. More threads in each would only fight over the cores.
# Each begins with a part of its own, so that what the tests of a file share is made once.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal

test: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow"

test-all: $(VENV)/.installed-dev
	$(PYTEST)
	$(MAKE) test-opacus15

# The tests with the lowest versions that pyproject.toml names. On Linux the lowest torch is a CUDA build of
# gigabytes; where download.pytorch.org can be reached, UV_TORCH_BACKEND=cpu takes the CPU build.
LOWEST = .venv-lowest
test-lowest: BIN = $(LOWEST)/bin
test-lowest:
	$(PYTHON) -m venv $(LOWEST)
	$(BIN)/pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --resolution lowest-direct -e ".[dev]"
	$(PYTEST) -m "not slow"

# The recording tests and the README's block with Opacus 1.5.4, on the other libraries of the environment.
OPACUS15 = .venv-opacus15
SITE = -c "import sysconfig; print(sysconfig.get_path('purelib'))"
test-opacus15: $(VENV)/.installed-dev
	$(PYTHON) -m venv $(OPACUS15)
	$(OPACUS15)/bin/pip install --quiet --disable-pip-version-check --no-deps opacus==1.5.4
	$(BIN)/python $(SITE) > "$$($(OPACUS15)/bin/python $(SITE))/libraries.pth"
	PYTHONPATH="$(CURDIR)" PATH="$(abspath $(BIN)):$$PATH" OMP_NUM_THREADS=1 $(OPACUS15)/bin/python -m pytest --numprocesses auto --maxprocesses 4 -m "not slow" tests/recording tests/test_cli_replay.py "tests/test_docs.py::test_a_page_runs[README.md]"

# Wheel and source archive in dist/, as an index would take them.
dist:
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/pip install --quiet --disable-pip-version-check build twine
	rm -rf dist
	.venv-dist/bin/python -m build --outdir dist
	.venv-dist/bin/twine check --strict dist/*

# At once: types are checked on one core, and the tests leave some of the other.
check: $(VENV)/.installed-dev
	$(MAKE) --jobs 2 test lint

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# constraints.txt, for what pyproject.toml names; UV=--upgrade takes the newest versions.
lock: $(VENV)/.installed-dev
	$(PIP) install uv
	$(BIN)/python docs/tools/lock.py $(UV)

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# indpriv/report/audit.schema.json, from the findings and indpriv/analysis/columns.toml.
schema: $(VENV)/.installed
	PYTHONPATH=. $(BIN)/python docs/tools/audit_schema.py > schema.tmp
	mv schema.tmp indpriv/report/audit.schema.json

benchmarks: $(VENV)/.installed-dev
	set -e; for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script; done

# The documentation site, in site/: every warning is an error.
docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -W ignore -m mkdocs build --strict --quiet

# What the pages show of their own commands, written again; and the notebook of the first tutorial.
screens: $(VENV)/.installed-dev
	$(BIN)/python docs/tools/screens.py

# The picture and the first screen in README.md and the first tutorial, of the run of reports/adult.
figures: $(VENV)/.installed-dev
	$(BIN)/python -m reports.yu2023 adult
	$(BIN)/python -m reports.demo
	$(BIN)/python docs/tools/screens.py docs/explanation/results.md  # which runs nothing; the notebook follows its page

# reports/yu2023/README.md and docs/explanation/results.md: trains what has no finished run under reports/runs (hours on two cores), audits,
# measures and writes. It goes on where it was stopped. Data sets: INDPRIV_DATA=DIR make reproduce
reproduce: $(VENV)/.installed-dev
	$(BIN)/python -m reports.yu2023

# reports/validation/README.md: individual epsilons beside the attacker that they assume, in real Opacus runs. It goes on where it was stopped.
validate: $(VENV)/.installed-dev
	$(BIN)/python -m reports.validation

# reports/attacks/README.md: attacks on the final models of Adult and MNIST, with reference models. It goes on where it was stopped.
# MNIST: INDPRIV_DATA=DIR make attacks
attacks: $(VENV)/.installed-dev
	$(BIN)/python -m reports.attacks

# reports/wei2021/README.md: runs on MNIST with dynamic privacy parameters. It goes on where it was stopped. INDPRIV_DATA=DIR make wei2021
wei2021: $(VENV)/.installed-dev
	$(BIN)/python -m reports.wei2021

# reports/fedcdp/README.md: federated runs, and accounts of the paper. It goes on where it was stopped. INDPRIV_DATA=DIR make fedcdp
fedcdp: $(VENV)/.installed-dev
	$(BIN)/python -m reports.fedcdp

clean:
	rm -rf $(VENV) $(LOWEST) $(OPACUS15) .venv-dist dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "indpriv needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

# Whatever is installed has one of the hashes in constraints.txt, up to the part that is named. torch comes first: pip
# would take PyPI's build before that of an index without hashes. The last line finds everything there; on Linux, PyPI's
# build of torch brings CUDA's libraries, by exact versions, without hashes. Modules are compiled when they are imported,
# which most never are.
define install
	sed '/^# $(1)/,$$d' constraints.txt > $(VENV)/constraints.txt
	sed -n '/^torch==/,/[^\\]$$/p' constraints.txt > $(VENV)/torch.txt
	$(PIP) download $(PIP_OPTIONS) --no-deps --dest $(VENV)/torch "$$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' constraints.txt)"
	$(PIP) install --no-compile --require-hashes --no-deps --no-index --find-links $(VENV)/torch -r $(VENV)/torch.txt
	$(PIP) install $(PIP_OPTIONS) --no-compile --require-hashes --no-deps -r $(VENV)/constraints.txt
	$(PIP) install $(PIP_OPTIONS) --no-build-isolation -e ".$(2)"
	rm -r $(VENV)/torch
endef

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(call install,make test,[opacus])
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(call install,integrations,[dev])
	touch $@ $(VENV)/.installed
