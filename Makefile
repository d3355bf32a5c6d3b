# Everything runs in .venv, which each target makes for itself. `make demo` and `make test` are all a newcomer needs.
PYTHON ?= python3
BIN := .venv/bin
# An index of CPU builds, for machines whose package index would answer with CUDA packages: see CONTRIBUTING.md.
PIP_FLAGS ?=
# Exact versions of all packages; constraints-torch-2.14.txt has those of the newest torch.
CONSTRAINTS ?= constraints.txt

# Many tests wait for processes, so there are four more workers than cores; each computes in one thread.
WORKERS ?= $(shell nproc 2>/dev/null | awk '{print ($$1 < 8 ? $$1 : 8) + 4}')

.PHONY: demo test docs lint check format learn-check test-slow test-vllm gpu-check clean

demo: .venv/installed
	$(BIN)/rally train digits

# The package is compiled once, for hundreds of processes import it; and they keep what pytest makes of the tests.
test: .venv/installed
	@$(BIN)/python -m compileall -q src
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses=$(WORKERS) --durations=15

# With four times as many examples of each property as `make test` draws.
test-slow: .venv/installed
	$(BIN)/python -m pytest -m "slow or hypothesis" --hypothesis-profile=thorough

# Draws docs/learning.png anew; fails when an algorithm does not learn.
learn-check: .venv/installed
	PYTHONPATH=tests/shared $(BIN)/python -m learning.check --out docs

# The documentation as a site, in build/site; references of commands and keys are made from the code (docs/site.py).
docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "build/site/index.html"

# Needs `rally engine install vllm`.
test-vllm: .venv/installed
	$(BIN)/python -m pytest -m vllm tests/engines

lint: .venv/installed
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/pyright
	$(BIN)/lint-imports

check: lint
	$(BIN)/python -m pytest tests/architecture

# Everything that a machine with a GPU can show, in at most eight minutes (with two GPUs twelve), with the Python that has torch: .venv's if there
# is one. DEVICE=cpu runs all of it tiny; WHEELS=folder has packages that the machine lacks; OUT=folder takes the report.
gpu-check:
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) benchmarks/gpu_check.py $(if $(DEVICE),--device $(DEVICE)) \
		$(if $(WHEELS),--wheels $(WHEELS)) $(if $(OUT),--out $(OUT))

format: .venv/installed
	$(BIN)/ruff check --fix src tests benchmarks examples
	$(BIN)/ruff format src tests benchmarks examples
	$(BIN)/python docs/house.py

.venv/installed: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "rallypoint needs Python 3.11 or newer, found %d.%d: make PYTHON=python3.12" % v[:2])'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --constraint $(CONSTRAINTS) torch
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --constraint $(CONSTRAINTS) --editable '.[dev]'
	@test ! -e .git || test -n "$$CI" || git config core.hooksPath >/dev/null || git config core.hooksPath .githooks || true
	touch $@

clean:
	rm -rf .venv runs
