# The one entrance. `make demo` and `make test` do all set-up on a fresh machine; `make help` lists the rest.

SHELL := /bin/sh
BIN := .venv/bin
STAMP := .venv/.set-up
PYTEST_ARGS ?=
DEMO_ARGS ?=
STORE ?=
SEEDS ?= 1:51
COG := NO_COLOR=1 TERM=dumb COLUMNS=100 cog -P -I docs
export PATH := $(CURDIR)/$(BIN):$(PATH):/usr/sbin
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types layers docs reference pytest test-long scenarios kills bench fmt wheel clean

help: ## say what each target does
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv and install what is needed; quick when nothing has changed
$(STAMP): pyproject.toml constraints.txt scripts/setup.sh
	@scripts/setup.sh
	@touch $@

demo: $(STAMP) ## train on two nodes, kill one, restore from memory, compare bit for bit; STORE=s3 for a bucket
	ckpt demo $(if $(STORE),--store $(STORE)) $(DEMO_ARGS)

test: lint types layers docs pytest ## everything that must pass before a change lands

lint: $(STAMP) ## style and format of the code
	ruff check .
	ruff format --check .

types: $(STAMP) ## mypy, strict
	mypy

layers: $(STAMP) ## who may import whom
	lint-imports

docs: $(STAMP) ## what pages take from the code is up to date, and all build without a warning
	$(COG) --check --diff --check-fail-msg 'a page is out of date: make reference' docs/reference/*.md docs/results/faults.md
	sphinx-build -n -W -q -b html docs docs/_build/html

pytest: $(STAMP) ## the tests alone; PYTEST_ARGS="tests/store -k log" for some of them
	pytest -m "not long" -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-long: $(STAMP) ## what takes longer; goes on where it stopped, records its results in docs/results/
	python scripts/test_long.py

scenarios: $(STAMP) ## break a job in each way that chaos/scenarios has, and write down what came of it (a quarter of an hour)
	python scripts/scenarios.py

kills: $(STAMP) ## kill one thing of a training at a random moment, for each of SEEDS=1:51, and add up what came of it
	python scripts/kills.py $(SEEDS)

bench: $(STAMP) ## how long saving blocks, until protected, restore: as ratios to plain copies, and beside others' ways
	python benchmarks/first.py
	python benchmarks/stall.py

reference: $(STAMP) ## write what the pages in docs/reference take from the code
	$(COG) -r docs/reference/*.md docs/results/faults.md

fmt: $(STAMP) ## put code and generated pages in order
	ruff check --fix .
	ruff format .
	$(COG) -r docs/reference/*.md docs/results/faults.md

wheel: $(STAMP) ## build dist/*.whl
	pip wheel --no-deps --no-build-isolation -q -w dist .

clean: ## remove what was built, .venv included
	rm -rf .venv build dist docs/_build .demo .test-long .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
