# make train   train the language model, or continue it      make train ARGS="--set epochs=8"
# make test    what a user relies on, in ten minutes         make check   lint, types, layers and the quick tests
# make test-full      every test: kills, servers, clouds, and the next two      make lint    format, lint, types, layers
# make test-extras    other people's loops, metric sinks, data streams and Ray      make test-pools    work pools of every kind, several nodes
# make test-titan     runs of torchtitan's own Trainer on a CPU, in an environment of its own
# make test-gpus      ten minutes on this machine's GPUs: measurements, then the tests of ranks, with NCCL
# make test-kernels   tests that train, with the kernels of a different CPU      make test-kernels TRAINING=tests    the suite
# make test-versions  the oldest and the newest torch, accelerate, Prefect, transformers and Lightning: docs/versions.md
# make up      a server, work pools and workers on this machine      make down    end them      make up POSTGRES=1
#              make up GPUS=2, or GPUS=all: a worker for each GPU, so that two runs never share one
#              make up RECIPES=my_models,/srv/code/: recipes that flow runs may train beside those of this repository
# make setup   only prepare .venv                            make clean   remove it
# make docs    generate pages from the code: the reference in docs/, and docs/rooms.md      make map    list every file
# make site    make a site of the pages in build/site, with a search and without a network
# make image   build the container images with docker or podman      make up-compose    run everything in containers
# make wheel   build wheel and sdist in dist/, in seconds      make check-infra    check infra/
# make dist    make wheel, then check both, and add a list of components (SBOM) and licences: what a release publishes
# make bench   measure the costs, as a table and bench.json  make bench ARGS="--full"
# make soak    search for faults, for hours: 100,000 random lives of a run on a disk, 10,000 on an object store, every
#              combination of the resume matrix with loader workers, more flipped bits, more races of two writers, more
#              kills, on pools too; and the suite with the kernels of a different CPU

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
CONFIG ?= holdfast/recipes/language.toml
ARGS ?=
WORKERS ?= 2
TRAINING ?= tests/holdfast/extensions/compare tests/holdfast/memory tests/holdfast/state tests/holdfast/testing \
	tests/holdfast/proof/test_proof.py tests/holdfast/training/test_health.py tests/holdfast/training/test_merging.py

# Turn Prefect's anonymous usage data off, unless you have set this variable yourself.
export DO_NOT_TRACK ?= 1
# If an environment turns bytecode off, every process compiles torch and Prefect anew.
unexport PYTHONDONTWRITEBYTECODE

# The tests' own files are UTF-8, whatever the locale. test_any_machine tests another locale.
test test-full test-extras test-titan test-gpus test-kernels test-versions check: export PYTHONUTF8 := 1

.PHONY: setup train up down test test-full test-extras test-titan test-pools test-image test-gpus test-kernels test-versions lint check bench soak docs site site-archive map screenshots image up-compose down-compose check-infra wheel dist clean
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
	@$(BIN)/python -m deployments.local up $(if $(POSTGRES),--postgres) $(if $(GPUS),--gpus $(GPUS)) \
		$(if $(RECIPES),--recipes '$(RECIPES)')

down: .venv/ready
	@$(BIN)/python -m deployments.local down

# The server for the tests of az://. This command of npm and the next two write into one folder, one after the other.
.venv/azurite: .venv/ready
	@npm install --silent --no-audit --no-fund --prefix .venv azurite@3.35.0 2> /dev/null && touch $@ || \
		echo "Azurite can't be installed with npm: the tests of az:// are skipped"

# The checks of the report's accessibility.
.venv/axe: .venv/ready | .venv/azurite
	@npm install --silent --no-audit --no-fund --prefix .venv axe-core@4.14.1 2> /dev/null && touch $@ || \
		echo "axe-core can't be installed with npm: the tests of the report's accessibility are skipped"

# The type checker that editors have, beside mypy, for the tests of the wheel's type hints.
.venv/pyright: .venv/ready | .venv/axe
	@npm install --silent --no-audit --no-fund --prefix .venv pyright@1.1.414 2> /dev/null && touch $@ || \
		echo "pyright can't be installed with npm: a test of the wheel's type hints is skipped"

# Libraries that only extras have.
.venv/extras: .venv/ready
	@$(PIP) --group extras
	@touch $@

# MLflow's server for the test of the sink in docs/metrics.md, in an environment of its own: its pins and Prefect's exclude each other.
.venv/mlflow/ready: .venv/ready
	@{ $(PYTHON) -m venv --clear .venv/mlflow && .venv/mlflow/bin/python -m pip install --quiet mlflow 2> /dev/null; } \
		&& touch $@ || { rm -rf .venv/mlflow; echo "MLflow can't be installed with pip: the test of its sink is skipped"; }

# The verifier of signed models, for the tests of receipts.
.venv/signing/ready: .venv/ready
	@{ $(PYTHON) -m venv --clear --without-pip .venv/signing && $(BIN)/python -m pip --python .venv/signing/bin/python \
		install --quiet --constraint constraints.txt --group signing 2> /dev/null; } && touch $@ || \
		{ rm -rf .venv/signing; echo "model-signing can't be installed with pip: its tests are skipped"; }

# torchtitan, in an environment of its own, because its pins and those of constraints.txt exclude each other.
.venv/titan/ready: .venv/ready tests/support/titan.txt
	@echo "setting up .venv/titan (a minute, once)"
	@{ $(PYTHON) -m venv --clear .venv/titan && .venv/titan/bin/python -m pip install --quiet \
		--constraint tests/support/titan.txt pip hatchling editables 2> /dev/null && .venv/titan/bin/python -m pip install \
		--quiet --constraint tests/support/titan.txt --no-build-isolation --editable '.[torchtitan]' 2> /dev/null; } \
		&& touch $@ || { rm -rf .venv/titan; echo "torchtitan can't be installed with pip: its tests are skipped"; }

test: .venv/ready .venv/azurite .venv/axe .venv/pyright
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m "(not slow or promise) and not extras and (not pool or promise)" $(ARGS)

test-full: .venv/ready .venv/azurite .venv/axe .venv/pyright
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m "not pool and not extras" $(ARGS)
	$(MAKE) test-extras test-pools

test-extras: .venv/extras .venv/mlflow/ready .venv/signing/ready .venv/titan/ready
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m extras $(ARGS)

# Some of test-extras.
test-titan: .venv/titan/ready
	$(BIN)/python -m pytest tests/holdfast/adapters/test_torchtitan.py $(ARGS)

test-image test-pools: export CONTAINERS_CONF := $(CURDIR)/tests/support/containers.conf

# Tests of containers need it; without it, or without an engine, they are skipped and say so.
test-image:
	@infra/image rank-cpu || BASE=debian infra/image rank-cpu || echo "there is no image: tests are skipped"

# Two processes, because each has a server and workers of its own.
test-pools: .venv/ready test-image
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m "pool and not extras" $(ARGS)

# Without a GPU this says so, runs nothing and succeeds.
test-gpus: .venv/ready
	@$(BIN)/python -m tests.support.gpus $(ARGS)

# Expectations must not follow from this CPU's kernels: torch, oneDNN and MKL take those of an old one.
test-kernels: export ATEN_CPU_CAPABILITY := default
test-kernels: export DNNL_MAX_CPU_ISA := SSE41
test-kernels: export MKL_CBWR := COMPATIBLE
test-kernels: .venv/ready
	$(BIN)/python -m pytest --quiet --numprocesses $(WORKERS) --dist worksteal -m "not pool and not extras" \
		$(TRAINING) $(ARGS)

# Environments of their own, in .venv/versions. ARGS=newest tests only that end.
test-versions: .venv/ready
	@$(BIN)/python -m tests.support.versions $(ARGS)

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint
	$(BIN)/python -m pytest --quiet -m "not slow" --numprocesses $(WORKERS) $(ARGS)

# Commands that nothing imports, in an environment of their own.
.venv/tools/ready: .venv/ready
	@echo "setting up .venv/tools (a minute, once)"
	@$(PYTHON) -m venv --clear --without-pip .venv/tools
	@$(BIN)/python -m pip --python .venv/tools/bin/python install --quiet --constraint constraints.txt --group tools
	@touch $@

check-infra: .venv/tools/ready
	@.venv/tools/bin/python infra/check.py

# An environment without torch, outside of .venv, which setup clears.
build/packaging/ready: constraints.txt
	@$(PYTHON) -m venv --clear build/packaging
	@build/packaging/bin/python -m pip install --quiet --constraint constraints.txt build hatchling
	@touch $@

wheel: build/packaging/ready
	@rm -rf dist
	@build/packaging/bin/python -m build --no-isolation --outdir dist

# Checks of the packages in dist/, with the environment in which the tests run.
dist: wheel .venv/tools/ready
	@.venv/tools/bin/python infra/release.py

# The search is random, covers more cases than make test, and prints how to repeat each failure.
soak: .venv/ready
	HOLDFAST_EXAMPLES=100000 $(BIN)/python -m pytest --numprocesses $(WORKERS) --timeout 0 tests $(ARGS)
	$(MAKE) test-kernels TRAINING=tests

docs: .venv/ready
	@$(BIN)/python -m tests.support.pages

.venv/site/ready: .venv/ready
	@echo "setting up .venv/site (some seconds, once)"
	@$(PYTHON) -m venv --clear --without-pip .venv/site
	@$(BIN)/python -m pip --python .venv/site/bin/python install --quiet --constraint constraints.txt --group site
	@touch $@

# A link that leads nowhere, or a page that would ask another host for anything, is an error.
site: .venv/site/ready
	@.venv/site/bin/python infra/website.py

# The site of this version, among what a release publishes.
site-archive: site
	@cd build && ../$(BIN)/python -m zipfile --create ../dist/site.zip site

# Print every file of the code, with the first line of its docstring.
map: .venv/ready
	@$(BIN)/python -m tests.support.pages map

# Write pictures of the UI to docs/. This needs an installed Chromium.
screenshots: .venv/extras
	@$(BIN)/python -m tests.support.screenshots

# The libraries that the benchmarks compare Holdfast with, on the project's own version of torch.
.venv/peers/ready: .venv/ready constraints.txt tests/bench/peers.txt
	@echo "setting up .venv/peers (a minute, once)"
	@{ $(PYTHON) -m venv --clear .venv/peers && .venv/peers/bin/python -m pip install --quiet \
		--constraint constraints.txt --requirement tests/bench/peers.txt 2> /dev/null; } && touch $@ || \
		{ rm -rf .venv/peers; echo "the peers can't be installed with pip: they are left out of the benchmarks"; }

bench: .venv/ready .venv/peers/ready
	@$(BIN)/python -m tests.bench $(ARGS)

# Variables such as BASE and WHEELS are in infra/image.
image:
	@infra/image

COMPOSE ?= $(if $(shell command -v podman-compose),podman-compose,docker compose)

# Secrets of this machine, which stay here.
infra/.env:
	@umask 077 && $(PYTHON) -c 'from secrets import token_hex as new; \
		print(f"POSTGRES_PASSWORD={new(32)}\nSTORE_PASSWORD={new(32)}\nPREFECT_AUTH=holdfast:{new(32)}")' > $@

up-compose: infra/.env
	@$(COMPOSE) --file infra/compose.yaml --env-file infra/.env up --detach
	@. infra/.env && echo "UI          http://127.0.0.1:$${PORT:-4200}   asks for a password: PREFECT_AUTH in infra/.env"

down-compose: infra/.env
	@$(COMPOSE) --file infra/compose.yaml --env-file infra/.env down

clean:
	rm -rf .venv build/packaging
