# make demo | test | test-sglang | lint | licenses | clean. Everything runs in plain virtual environments, made on first use.
PYTHON ?=
VENV ?= .venv
SGLANG_VENV ?= .venv-sglang
SEED ?= 1
ARGS ?=

# Three at a time fill two cores, since whole runs wait a lot. Files stay whole, since their tests share what they start,
# and keep their order: whole runs first, the many short tests last, so that all processes end together.
PARALLEL = -n 3 --dist loadfile --no-loadscope-reorder

.PHONY: help setup setup-sglang demo test test-cpu test-sglang lint licenses clean

help:
	@echo "make demo [SEED=1]      train the quickstart task on this machine; the last line is a JSON summary"
	@echo "make test [ARGS=...]    the whole test suite, test-sglang included; with ARGS, pytest with those in .venv"
	@echo "make test-sglang        the tests of rollout=sglang, in an environment of their own, .venv-sglang"
	@echo "make lint               ruff, mypy, import-linter"
	@echo "make licenses           write docs/licenses.md: the licences of all that requirements/ pins"
	@echo "make setup [PYTHON=...] only make .venv (Python 3.11 or 3.12) and install into it"
	@echo "make clean              remove .venv, caches and build products; runs in outputs/ stay"

setup:
	@PYTHON="$(PYTHON)" bash scripts/setup_env.sh $(VENV)

setup-sglang:
	@PYTHON="$(PYTHON)" bash scripts/setup_env.sh $(SGLANG_VENV) sglang

demo: setup
	@$(VENV)/bin/python -m rlpost.main experiment=quickstart seed=$(SEED)

ifdef ARGS
test: setup
	$(VENV)/bin/python -m pytest $(ARGS)
else
test:
	@$(MAKE) --no-print-directory -j2 setup setup-sglang
	@$(MAKE) --no-print-directory -j1 --keep-going test-cpu test-sglang
endif

test-cpu: setup
	$(VENV)/bin/python -m pytest $(PARALLEL)

test-sglang: setup-sglang
	$(SGLANG_VENV)/bin/python -m pytest $(PARALLEL) tests/e2e -k sglang

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

licenses: setup setup-sglang
	$(VENV)/bin/python scripts/licenses.py $(VENV) $(SGLANG_VENV) >docs/licenses.md

clean:
	rm -rf $(VENV) $(SGLANG_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find rlpost tests examples benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
