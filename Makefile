# Works in a fresh clone: every target installs what it needs.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
STAMP := $(VENV)/.installed
TEST_STAMP := $(VENV)/.installed-for-tests

.PHONY: install demo test docs integration test-all faults lint clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(RUN)/python || $(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(STAMP)

# torchao and bitsandbytes, for the tests of FP8 and of quantized weights. torchao prints warnings when Transformers imports it.
$(TEST_STAMP): $(STAMP)
	$(RUN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,torchao,bitsandbytes]"
	touch $(TEST_STAMP)

demo: $(STAMP)
	$(RUN)/python -m torchstone.demo

test: $(TEST_STAMP)
	$(RUN)/python -m pytest -n 3 --dist worksteal --durations=25

# The commands of the README and of docs/.
docs: $(TEST_STAMP)
	TESTS=docs $(RUN)/python -m pytest -n 3 --dist worksteal tests/test_docs.py

integration: $(TEST_STAMP)
	PYTHON=$(CURDIR)/$(RUN)/python bash tests/run_integration_tests.sh

# All layouts, faults and pages; `make test` runs one of each kind.
test-all: $(TEST_STAMP)
	TESTS=all $(RUN)/python -m pytest -n 3 --dist worksteal --durations=25

faults: $(TEST_STAMP)
	TESTS=all $(RUN)/python -m pytest -n 2 --dist worksteal tests/faults

lint: $(STAMP)
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
