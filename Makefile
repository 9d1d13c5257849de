# Every target sets up what it needs: a virtual environment in .venv, once, and again when what is installed changes.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python -P
# Two processes: more would each hold a model of half a gigabyte.  In the files' order, the long end-to-end tests come early.
PYTEST := $(RUN) -m pytest --numprocesses 2 --dist loadscope --no-loadscope-reorder
STAMP := $(VENV)/.installed

.PHONY: demo test test-all lint fuzz bench clean

demo: $(STAMP)  ## few-shot batch, agent loop and parallel sampling on a real model, with and without the cache
	$(RUN) examples/demo.py

test: $(STAMP)  ## the quick suite
	$(PYTEST) -m "not full"

test-all: $(STAMP)  ## everything, the whole correctness grid included
	$(PYTEST)

lint: $(STAMP)  ## style, types, and which part may import which
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	# mypy and import-linter must see the package as it is installed: kernels/ and server/ inside radixkv/.
	rm -rf build/lint && mkdir -p build/lint && cp -R radixkv bench build/lint && cp -R kernels server build/lint/radixkv
	cd build/lint && MYPYPATH=. ../../$(VENV)/bin/mypy --config-file ../../pyproject.toml -p radixkv -p bench
	cd build/lint && PYTHONPATH=. ../../$(VENV)/bin/lint-imports ../../pyproject.toml --no-cache

fuzz: $(STAMP)  ## 1,000,000 random operations of the prefix cache against naive models, about 20 minutes
	RADIXKV_FUZZ_EXAMPLES=25000 $(RUN) -m pytest tests/cache/test_prefix_cache_properties.py

bench: $(STAMP)  ## the three serving workloads against a server started for them
	$(VENV)/bin/python -m bench local

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "radixkv needs Python 3.11 or later, $(PYTHON) is " + sys.version)'
	@echo "Installing into $(VENV); torch is large, so the first time this takes minutes."
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@
