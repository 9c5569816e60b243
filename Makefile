PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
READY   = $(VENV)/.ready

.PHONY: help demo test check bench clean
help:  ## Show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml scripts/install
	@PYTHON=$(PYTHON) bash scripts/install $(VENV)
	@touch $@

demo: $(READY)  ## Set everything up and run a real three-iteration flywheel on the CPU
	$(BIN)/starwheel run demo $(foreach pair,$(SET),--set $(pair))

test: $(READY)  ## Set everything up and run the test suite
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(READY)  ## Lint, format and type checks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)  ## Measure; the ratios in docs/benchmarks.md come from here
	$(BIN)/python -m tests.bench $(ARGS)

clean:  ## Remove the environment
	rm -rf $(VENV)
