# Every target does the set-up it needs: Python 3.10 or newer is all that must be there.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
BIN    := .venv/bin
READY  := .venv/.ready
CODE   := ucformat tests benchmarks examples specs

# Many small worker processes share few cores: one thread each is fastest.
export OMP_NUM_THREADS ?= 1

# What runs while one works: geometry, planning, values, and the suites of formats and stores.
QUICK := tests/test_box.py tests/test_catalog.py tests/test_dtypes.py tests/test_errors.py tests/test_views.py tests/values \
  tests/formats/test_suites.py tests/formats/test_registry.py tests/storage/test_stores.py \
  tests/reshard/reading/test_execute.py tests/reshard/reading/test_lazy.py tests/reshard/selection/test_select.py \
  tests/reshard/selection/test_mesh_layout.py tests/cli/test_inspect.py

.PHONY: help setup compiled check format test quick campaign conformance demo demo-failover bench clean

help: ## show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## create .venv and install ucformat with what development needs

# The stamp is written last, so that an interrupted set-up is repeated; it names what was installed.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" --editable ".[dev]"
	echo "$(TORCH)" > $(READY)

check: $(READY) ## lint, formatting, types, layers
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY) ## apply formatting and safe lint fixes
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

# Tests start hundreds of processes: where Python is told to write no bytecode, each would compile the package anew.
compiled: $(READY)
	@$(BIN)/python -m compileall -q -j 0 -x '/data/' $(CODE)

test: compiled ## all tests, on 2 processes
	$(BIN)/python -m pytest -n 2 --dist worksteal

quick: compiled ## a subset for while you work, under half a minute on 2 idle cores: no test in it starts a process
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" -k "not S3" $(QUICK)

campaign: compiled ## kills, damage, hostile input, I/O errors, races: SECONDS=3600 SEED=1 ONLY=kills
	$(BIN)/python -m tests.campaigns --seconds $(or $(SECONDS),3600) --seed $(or $(SEED),1) $(if $(ONLY),--only $(ONLY))

conformance: $(READY) ## all readers of the format through its kit, with MUTATIONS=2000 of each golden checkpoint
	$(BIN)/python specs/run_conformance.py --mutations $(or $(MUTATIONS),2000) --reader "$(BIN)/python -m specs.readers.ours"
	$(BIN)/python specs/run_conformance.py --mutations $(or $(MUTATIONS),2000) --reader "$(BIN)/python -m specs.readers.python.conformance"
	$(BIN)/python specs/run_conformance.py --mutations $(or $(MUTATIONS),2000) --reader "node specs/readers/js/conformance.js"

demo: compiled ## the main job on real input, ending in a table of what was proven
	$(BIN)/python -m examples.demo

demo-failover: compiled ## four hosts train, one vanishes with its memory, the others go on from theirs
	$(BIN)/python -m examples.demo_failover

bench: compiled ## the performance claims, a table each
	for file in benchmarks/[!_]*.py; do \
	  name=$$(basename "$$file" .py); \
	  grep -q __main__ "$$file" || continue; \
	  $(BIN)/python -m "benchmarks.$$name" || exit 1; \
	done

clean: ## remove what the other targets made
	rm -rf .venv .demo build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
