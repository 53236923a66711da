.PHONY: demo test unit check install clean
RUN ?= demo

install:
	@scripts/install.sh

demo: install ## SFT, then RL, of a new model on this machine
	.venv/bin/rlpipe run tiny --run $(RUN) $(ARGS)

test: ## lint, types, unit tests, then the end-to-end ones
	@scripts/install.sh test
	@scripts/check.sh

unit: ## the unit tests alone (under 2 minutes)
	@scripts/install.sh test
	.venv/bin/python -m pytest -q -m "not e2e"
