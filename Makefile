# make train   train the language model, or continue it      make train ARGS="--set epochs=8"
# make test    the whole suite                               make check   lint, types, layers and the quick tests
# make up      a server, work pools and workers on this machine      make down    end them      make up POSTGRES=1
# make setup   only prepare .venv                            make clean   remove it
# make docs    generate pages from the code: docs/configuration.md and docs/map.md
# make bench   measure the costs, as a table and bench.json  make bench ARGS="--full"
# make soak    search for faults, for hours: 100,000 random lives of a run on a disk, 10,000 on an object store, every
#              combination of the resume matrix with loader workers, more races of two writers, more kills, on pools too

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
CONFIG ?= holdfast/recipes/language.toml
ARGS ?=
WORKERS ?= 2

# Turn Prefect's anonymous usage data off, unless you have set this variable yourself.
export DO_NOT_TRACK ?= 1
# If an environment turns bytecode off, every process compiles torch and Prefect anew.
unexport PYTHONDONTWRITEBYTECODE

# The tests' own files are UTF-8, whatever the locale. test_any_machine tests another locale.
test check: export PYTHONUTF8 := 1

.PHONY: setup train up down test check bench soak docs screenshots clean
.DEFAULT_GOAL := train

setup: .venv/ready

# Make .venv anew when its requirements have changed. Otherwise this needs no network.
.venv/ready: constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is $$($(PYTHON) -V 2>&1), but 3.11 or later is needed"; \
		  echo "hint: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "setting up .venv (a few minutes, once)"
	@$(PYTHON) -m venv --clear .venv
	@$(PIP) pip hatchling editables
	@$(PIP) --no-build-isolation --editable '.[prefect]' --group dev
	@touch $@

train: .venv/ready
	@$(BIN)/python -m flows.train $(CONFIG) $(ARGS)

up: .venv/ready
	@$(BIN)/python -m deployments.local up $(if $(POSTGRES),--postgres)

down: .venv/ready
	@$(BIN)/python -m deployments.local down

# The server for the tests of az://.
.venv/azurite: .venv/ready
	@npm install --silent --no-audit --no-fund --prefix .venv azurite@3.35.0 2> /dev/null && touch $@ || \
		echo "Azurite can't be installed with npm: the tests of az:// are skipped"

test: .venv/ready .venv/azurite
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(ARGS)

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest --quiet -m "not slow" --numprocesses $(WORKERS) $(ARGS)

# The search is random, covers more cases than make test, and prints how to repeat each failure.
soak: .venv/ready
	HOLDFAST_EXAMPLES=100000 $(BIN)/python -m pytest --numprocesses $(WORKERS) --timeout 0 \
		tests/holdfast/attempt/test_state_machine.py tests/holdfast/attempt/test_two_writers.py \
		tests/holdfast/training/test_matrix.py tests/holdfast/test_false_alarms.py \
		tests/flows/test_killed_anywhere.py tests/flows/test_pool.py::test_a_run_survives_a_death \
		tests/flows/test_pool.py::test_make_up_after_a_death $(ARGS)

docs: .venv/ready
	@$(BIN)/python -m tests.support.pages

# Write pictures of the UI to docs/. This needs an installed Chromium.
screenshots: .venv/ready
	@$(BIN)/python -m tests.support.screenshots

# The libraries that the benchmarks compare Holdfast with, on the project's own version of torch.
.venv/peers/ready: .venv/ready constraints.txt tests/bench/peers.txt
	@echo "setting up .venv/peers (a minute, once)"
	@{ $(PYTHON) -m venv --clear .venv/peers && .venv/peers/bin/python -m pip install --quiet \
		--constraint constraints.txt --requirement tests/bench/peers.txt 2> /dev/null; } && touch $@ || \
		{ rm -rf .venv/peers; echo "the peers can't be installed with pip: they are left out of the benchmarks"; }

bench: .venv/ready .venv/peers/ready
	@$(BIN)/python -m tests.bench $(ARGS)

clean:
	rm -rf .venv
