# Everything a newcomer needs; `make help` lists it. Only Python 3.11, make, git and g++ are expected on the machine.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
EXPERIMENT ?= conf/smollm2_arithmetic.yaml
MODEL := models/smollm2-135m-instruct
TINY := models/tiny-random
.DEFAULT_GOAL := help
.PHONY: help run test lint type check bench ui clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

run: $(VENV)/run $(MODEL) ## run the demo (EXPERIMENT=conf/x.yaml for another); again after Ctrl-C: it continues
	$(BIN)/ratchet run $(EXPERIMENT)

test: $(VENV)/test lint type check ## install what the tests need and run all of them
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(VENV)/test ## ruff: style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(VENV)/test ## mypy
	$(BIN)/mypy

check: $(VENV)/test ## load every deployment of prefect.yaml and compare it with the flow it names
	$(BIN)/python -m flows.deployments

bench: $(VENV)/test $(MODEL) $(TINY) ## run every benchmark and print its ratios
	$(BIN)/python -m benchmarks

ui: $(VENV)/run ## serve the Prefect UI over past and present runs on http://127.0.0.1:4200
	$(BIN)/ratchet ui

clean: ## delete runs and caches; models and .venv stay
	chmod -R u+w runs 2>/dev/null || true # weight packages are read-only
	rm -rf runs .pytest_cache .hypothesis .mypy_cache .ruff_cache build *.egg-info

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/run: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[demo]'
	@touch $@

$(VENV)/test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[demo,dev]'
	@touch $@ $(VENV)/run

$(MODEL): | $(VENV)/run
	$(BIN)/ratchet prepare smollm2 $@

$(TINY): | $(VENV)/run
	$(BIN)/ratchet prepare tiny $@
