# Two commands do it all: `make serve` and `make test`. The rest are their parts.
PYTHON ?= python3
PORT ?= 8000
ARGS ?=
SEEDS ?= 5000
bin := .venv/bin
sources := pyproject.toml CMakeLists.txt scripts/setup $(shell find src csrc -type f ! -name '*.pyc' ! -name '*.so')

.PHONY: help install dev serve test simulate test-sanitize check bench docs clean

help:
	@echo "make serve [PORT=8000] [ARGS='--max-model-len 2048']   install and serve the default model"
	@echo "make test                                            install with the development extra and run all tests"
	@echo "make install | check | simulate | test-sanitize | bench | docs | clean"

install: .venv/installed

.venv/installed: $(sources)
	@scripts/setup
	@touch $@

dev: .venv/dev

.venv/dev: $(sources)
	@scripts/setup dev
	@touch .venv/installed $@

serve: install
	@exec $(bin)/octavo serve --port $(PORT) $(ARGS)

test: dev
	@scripts/test $(ARGS)

simulate: dev
	@$(bin)/python scripts/simulate.py $(SEEDS)

test-sanitize: dev
	@scripts/sanitize $(ARGS)

check: dev
	@scripts/check

bench: install
	@scripts/bench $(ARGS)

docs: install
	@$(bin)/python scripts/options_page.py > docs/options.md
	@$(bin)/python scripts/models_page.py > docs/models.md

clean:
	rm -rf .venv build dist
