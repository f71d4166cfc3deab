# `make demo`, `make test`, `make check` and `make gate` install what they need into the folder $(VENV), so a machine
# needs only make and Python 3.10 or newer. The first call takes minutes, because it installs PyTorch.
#
#   make demo       send a real text through a KDA layer and check the result against the golden
#   make test       make check, then the test suite
#   make test-slow  the tests that take longer than every change can wait for
#   make check      ruff (lint and format) and mypy
#   make gate       hold the backend of this machine to the golden over the table of gates
#   make test-fla FLA=PATH  the KDA tests of a clone of flash-linear-attention, on our operators
#   make clean      remove the environment and what builds and checks leave behind
#
# Any of them takes another Python, another PyTorch and another choice of extras:
#
#   make demo PYTHON=python3.12 TORCH=torch==2.12.0 EXTRAS=none
#
# When one of the three differs from the last call, the environment is emptied and installed again.

PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   ?= .venv
BIN    := $(VENV)/bin

# USE is the extra of the package that this machine's accelerator needs; EXTRAS=cuda, =npu or =none overrules the search.
# The tests leave torch_npu out: where CANN is not set up, it makes `import torch` fail.
NPUS := $(wildcard /dev/davinci[0-9]*)
ifneq ($(strip $(EXTRAS)),)
  USE := $(EXTRAS)
  WHY := as asked for
else ifneq ($(shell nvidia-smi -L 2>/dev/null | grep '^GPU'),)
  USE := cuda
  WHY := this machine has an NVIDIA GPU; EXTRAS=none does without it
else ifneq ($(NPUS),)
  USE := npu
  WHY := this machine has an Ascend NPU; EXTRAS=none does without it
  test check: USE := none
  test check: WHY := this machine has an Ascend NPU, but the tests run without torch_npu
else
  USE := none
  WHY := this machine has no NVIDIA GPU and no Ascend NPU
endif

.PHONY: demo test test-slow test-fla check gate clean FORCE

demo: $(VENV)/.base
	$(BIN)/python -m kda demo

# Two processes share the test files. All tests of one file run in one of them, which compiles a kernel only once.
test: check
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-slow: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist load -m slow

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy examples

gate: $(VENV)/.base
	$(BIN)/python -m kda gate

# The clone's own requirements, triton and einops, have to be in $(VENV): nothing is fetched for it here.
test-fla: $(VENV)/.test
	$(BIN)/python tests/suites/fla.py $(FLA)
	$(BIN)/python tests/suites/fla.py $(FLA) --dispatch

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache

# Python code, for the shell between single quotes. The environment may be the very one that $(PYTHON) runs in (it is
# activated, say), so it is made by the Python that lies below it.
NEW_ENOUGH := import sys; sys.version_info >= (3, 10) or sys.exit("make: $(PYTHON) is Python %d.%d, and kda needs 3.10 \
or newer: make PYTHON=python3.12 names another one" % sys.version_info[:2])
VERSION := import sys; print("Python %d.%d.%d in %s" % (*sys.version_info[:3], sys.base_prefix))
BELOW := import os, sys; print(sys.executable if sys.prefix == sys.base_prefix else \
os.path.join(sys.base_prefix, "bin", "python%d.%d" % sys.version_info[:2]))

# .torch holds the environment's description: its recipe runs every time, and does nothing where that is what is wanted.
$(VENV)/.torch: FORCE
	@$(PYTHON) -c '$(NEW_ENOUGH)'
	@wanted="$$($(PYTHON) -c '$(VERSION)'), $(TORCH), extras: $(USE)"; \
	echo "make: $$wanted ($(WHY))"; \
	test "$$wanted" = "$$(cat $@ 2>/dev/null)" || { \
	    echo "make: installing into $(VENV) ..." && \
	    "$$($(PYTHON) -c '$(BELOW)')" -m venv --clear $(VENV) && \
	    $(BIN)/python -m pip install --quiet "$(TORCH)" numpy && \
	    echo "$$wanted" >$@; \
	}

# torch is there already, and is named once more, so that no extra can bring another one; without numpy it warns.
$(VENV)/.base: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet "$(TORCH)" --editable ".$(if $(filter none,$(USE)),,[$(USE)])"
	@touch $@

$(VENV)/.test: $(VENV)/.base
	$(BIN)/python -m pip install --quiet "$(TORCH)" --editable ".[test]"
	@touch $@
