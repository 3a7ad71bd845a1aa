# `make demo` and `make test` each do all their own set-up on a machine with Python, pip, make and a compiler.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: help demo docs packages compiled test quick lint format bench drill gpu compat clean

help:
	@echo "make demo    train, kill a rank, corrupt a checkpoint, recover, compare with an undisturbed run"
	@echo "make test    lint, types and the whole test suite; make test ROOM=checkpoint: the tests of one room"
	@echo "make quick   lint, types and the tests that need no processes, in under two minutes"
	@echo "make lint    ruff and mypy only"
	@echo "make docs    the documentation as a site, in site/index.html"
	@echo "make drill   the slow fault drills"
	@echo "make bench   benchmarks against plain DCP, written to bench/results.json"
	@echo "make compat TORCH=2.15.0    the whole test suite on another torch, in an environment of its own"
	@echo "make gpu     the tests that need a CUDA device (uses the python3 that has torch)"

$(READY): pyproject.toml constraints.txt
	@echo "Setting up $(VENV): the first time this takes a minute or two"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@# Without what they ask for: torchtitan an older `datasets`, and wandb; nvidia-resiliency-ext packages of CUDA's.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps torchtitan==0.3.0 nvidia-resiliency-ext==0.4.1
	@touch $@

demo: $(READY)
	$(BIN)/holdfast demo

docs: $(READY)
	$(BIN)/python tools/reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# What tests of cut networks and of a real Slurm need; where it cannot be installed they are skipped, loudly.
packages:
	@sh tests/install_packages.sh

ROOM ?=
PURE := policy account config journal house
test: lint packages compiled
	$(BIN)/python -m pytest -m "not drill" --numprocesses 2 --dist worksteal $(if $(ROOM),tests/$(ROOM))

# Hundreds of processes import it; where PYTHONDONTWRITEBYTECODE is set, each would compile it for itself.
compiled: $(READY)
	@$(BIN)/python -m compileall -q src

quick: lint
	$(BIN)/python -m pytest -m "not drill" --numprocesses 2 --dist worksteal $(addprefix tests/,$(PURE))

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	$(BIN)/python bench/run.py

drill: $(READY) packages
	$(BIN)/python -m pytest -m drill --timeout 900
	$(BIN)/python -m pytest -m "hypothesis and not drill" --hypothesis-profile search --timeout 900

# Away from the constraints: this torch, and with it the CUDA packages that its index has for it (gigabytes).
COMPAT := .venv-torch-$(TORCH)
compat: packages
	@test -n "$(TORCH)" || { echo "say which torch: make compat TORCH=2.15.0" >&2; exit 2; }
	test -e $(COMPAT)/.ready || { $(PYTHON) -m venv $(COMPAT) && \
	  $(COMPAT)/bin/python -m pip install --quiet --disable-pip-version-check "torch==$(TORCH)" --editable ".[dev]" && \
	  touch $(COMPAT)/.ready; }
	$(COMPAT)/bin/python -m pytest -m "not drill" --numprocesses 2 --dist worksteal

gpu:
	PYTHONPATH="src:tests:$$PYTHONPATH" $(PYTHON) -m pytest -c tests/gpu/pytest.ini tests/gpu

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site
