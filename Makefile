# `make demo` and `make test` need Python 3.10 or newer and nothing else: each sets up .venv first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo bench test test-slow lint types units compatibility clean

demo: $(READY)
	$(BIN)/python examples/train_gpt.py

# Compares with torch.optim, torchopt and optax; see docs/benchmarks.md.
bench: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[bench]"
	$(BIN)/python -m benchmarks

test: lint types units

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/pyright

units: $(READY)
	$(BIN)/pytest -m "not slow" -n 2

test-slow: $(READY)
	$(BIN)/pytest -m slow

# constraints.txt pins torch; the index decides which build of it comes (the CPU build where it offers one).
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,viz]"
	touch $(READY)

clean:
	rm -rf $(VENV) runs .pytest_cache .ruff_cache .hypothesis

# docs/compatibility.md, from the outcomes of the composition matrix.
compatibility: $(READY)
	$(BIN)/pytest tests/conformance/test_composition.py --write-compatibility
