# The two commands a newcomer needs: `make demo` and `make test`. Both set up .venv first.
PYTHON ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
PEERS := dflash==0.1.0 specforge==0.2.0 speculators==0.9.0 hs-connectors==0.9.0 loguru==0.7.3

TRITON := triton==3.8.0

.PHONY: help setup demo test test-slow check peers triton clean

help:
	@echo "make demo       the whole pipeline on a small real model (2 cores, no GPU: about 12 minutes after the download)"
	@echo "make test       all CPU tests"
	@echo "make test-slow  the slow tier as well"
	@echo "make check      ruff and import-linter"
	@echo "make peers      z-lab dflash, specforge and speculators into .peers/, for the tests that run their code"
	@echo "make triton     Triton into .triton/ (248 MB to download), for the test that compiles kernels for other GPUs"
	@echo "make setup      .venv with everything (CPU torch where there is no GPU)"

setup: $(STAMP)

$(STAMP): pyproject.toml cpu-constraints.txt launch/pick_torch.sh launch/setup.sh
	@PYTHON=$(PYTHON) bash launch/setup.sh dev

demo: $(STAMP)
	@$(BIN)/python launch/demo.py

# A file's tests share fixtures, so they stay together, in the order of tests/conftest.py; a process takes about a GB.
PARALLEL := -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL)

test-slow: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) -m 'not gpu'

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache

# Their pins clash with ours, so they live in a folder of their own that only tests/test_peers.py puts on its path.
peers: $(STAMP)
	@test -d .peers || $(BIN)/python -m pip install -qq --no-deps --target .peers $(PEERS)

# The one that torch 2.14 brings to a GPU host. In .venv it would make transformers and fla look for a GPU.
triton: $(STAMP)
	@test -d .triton || $(BIN)/python -m pip install -qq --no-deps --target .triton $(TRITON)

clean:
	rm -rf $(VENV) .peers .triton runs
