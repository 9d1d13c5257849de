# Every target sets up what it needs in a virtual environment, .venv: once, and again when what is to be installed changes.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python -P
# Two processes: more would each hold a model of half a gigabyte.  In the files' order, the long end-to-end tests come early.
PYTEST := $(RUN) -m pytest --numprocesses 2 --dist loadscope --no-loadscope-reorder
PIP_INSTALL := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
DEMO := $(VENV)/.installed-demo
DEV := $(VENV)/.installed-dev

.PHONY: demo test test-all lint fuzz bench clean

demo: $(DEMO)  ## few-shot batch, agent loop and parallel sampling on a real model, with and without the cache
	$(RUN) examples/demo.py

test: $(DEV)  ## the quick suite
	$(PYTEST) -m "not full"

test-all: $(DEV)  ## everything, the whole correctness grid included
	$(PYTEST)

lint: $(DEV)  ## style, types, and which part may import which
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	# mypy and import-linter must see the package as it is installed: kernels/ and server/ inside radixkv/.
	rm -rf build/lint && mkdir -p build/lint && cp -R radixkv bench build/lint && cp -R kernels server build/lint/radixkv
	cd build/lint && MYPYPATH=. ../../$(VENV)/bin/mypy --config-file ../../pyproject.toml -p radixkv -p bench
	cd build/lint && PYTHONPATH=. ../../$(VENV)/bin/lint-imports ../../pyproject.toml --no-cache

fuzz: $(DEV)  ## 1,000,000 random operations of the prefix cache against naive models, about 20 minutes
	RADIXKV_FUZZ_EXAMPLES=25000 $(RUN) -m pytest tests/cache/test_prefix_cache_properties.py

bench: $(DEV)  ## the three serving workloads against a server started for them
	$(VENV)/bin/python -m bench local

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(DEMO): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "radixkv needs Python 3.11 or later, $(PYTHON) is " + sys.version)'
	@echo "Installing into $(VENV); torch is large, so the first time this takes minutes."
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --editable '.[demo]'
	touch $@

# After the demo's: whenever that is installed anew, so is this.
$(DEV): $(DEMO)
	@echo "Installing what tests and checks need into $(VENV)."
	$(PIP_INSTALL) --editable '.[dev]'
	touch $@
