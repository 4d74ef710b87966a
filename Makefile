# Everything runs in .venv, which scripts/environment.py makes, heals, and leaves alone once it is ready.
# ARGS are passed on: make demo ARGS=--help, make test ARGS="-k tokens".
PYTHON ?= python3
BIN := .venv/bin
READY := @$(PYTHON) scripts/environment.py

.PHONY: help demo test bench instructions crash releases cards upstream-tests docs clean
.DEFAULT_GOAL := help

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile

demo: ## run a real engine on this CPU and audit it
	$(READY) demo
	@$(BIN)/kvledger demo $(ARGS)

test: ## lint, type-check and test
	$(READY) test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest $(ARGS)

bench: ## measure what the hooks cost an engine step
	$(READY) test
	$(BIN)/python benchmarks/run.py $(ARGS)

instructions: ## count the instructions of an engine step, bare and observed; wants valgrind
	$(READY) test
	$(BIN)/python benchmarks/instructions.py $(ARGS)

crash: ## kill the sidecar 300 times while it is scraped; KILLS=n for another number
	$(READY) test
	KVLEDGER_KILLS=$(or $(KILLS),300) $(BIN)/python -m pytest -q tests/exporters/sidecar/test_crash.py $(ARGS)

releases: ## every vLLM release of the matrix: reports expected beside found
	$(READY) test
	$(PYTHON) scripts/matrix.py $(ARGS)

cards: ## score cards of connectors, LMCache's against its own server, NIXL's between two engines
	$(READY) test
	$(PYTHON) scripts/cards.py

upstream-tests: ## vLLM's own tests, with and without the ledger
	$(READY) test
	$(PYTHON) scripts/upstream_tests.py $(ARGS)

docs: ## write the generated pages, boards and rules again
	$(READY) test
	$(BIN)/python -m kvledger.audit.checks.registry > docs/invariants.md
	$(BIN)/python -m kvledger.exporters.metrics.table > docs/metrics.md
	$(BIN)/python -m kvledger.exporters.trace.tables > docs/tables.md
	$(BIN)/python -m kvledger.dashboards.boards dashboards/generated
	$(BIN)/python -m kvledger.dashboards.rules > dashboards/generated/kvledger-rules.yaml
	$(BIN)/python -m kvledger.dashboards.rules --markdown > docs/alerts.md

clean: ## remove the environment, builds and caches
	rm -rf .venv .venv.lock .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
