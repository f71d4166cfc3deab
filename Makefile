# `make demo` and `make test` each set up everything that they need in $(VENV), on a machine with Python alone.
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
BIN    := $(VENV)/bin

.PHONY: demo test gate clean

demo: $(VENV)/.base
	$(BIN)/python -m kda demo

test: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/python -m pytest

gate: $(VENV)/.base
	$(BIN)/python -m kda gate

# torch is installed first, so that resolving the package cannot replace the pinned build; without numpy it warns.
$(VENV)/.base: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)" numpy
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
