# Everything runs in .venv, which scripts/environment.py builds, repairs, and leaves alone once it is ready.
# ARGS are passed on: make demo ARGS=-v, make test ARGS="-k tokens". docs/testing.md says how long each takes.
PYTHON ?= python3
BIN := .venv/bin
READY := @$(PYTHON) scripts/environment.py
PYTEST := $(BIN)/python -m pytest
TWO_WORKERS := -n 2 --dist loadfile
SLOW := benchmark or browser or crash or fuzz or packaging or programs or serving or whole_engine

.PHONY: help demo test test-all lint bench instructions crash long-run parallel-servers routed differential fuzz releases whatif-proof repro-proof cards content-runs content-sketches upstream-tests docs site pictures clean
.DEFAULT_GOAL := help

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile

demo: ## run a real engine on this CPU and audit its journal
	$(READY) demo $(filter -v --verbose,$(ARGS))
	@$(BIN)/kvledger demo $(ARGS)

test: lint ## lint, type-check and run the fast tests
	$(PYTEST) -q $(TWO_WORKERS) --hypothesis-profile=fast -m "not ($(SLOW) or releases)" $(ARGS)

test-all: lint ## lint, type-check and run every test, except those in the environments of `make releases`
	$(PYTEST) -q $(TWO_WORKERS) -m "not ($(SLOW) or releases)"
	$(PYTEST) -q $(TWO_WORKERS) -m "($(SLOW)) and not releases"

lint:
	$(READY) test
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy --no-error-summary

bench: ## measure what the hooks cost an engine step
	$(READY) test
	$(BIN)/python benchmarks/run.py $(ARGS)

instructions: ## count the instructions of an engine step, bare and observed; needs valgrind
	$(READY) test
	$(BIN)/python benchmarks/instructions.py $(ARGS)

crash: ## kill the sidecar 300 times while it is scraped; KILLS=n for another number
	$(READY) test
	KVLEDGER_KILLS=$(or $(KILLS),300) $(BIN)/python -m pytest -q tests/exporters/sidecar/test_crash.py $(ARGS)

long-run: ## send a day of requests through journal, sidecar and Prometheus, accelerated; ARGS="--hours 2" for less
	$(READY) test
	PYTHONPATH=src:. $(BIN)/python -m tests.serving.long_run.run $(ARGS)

routed: ## send requests through vllm-router and Dynamo's KvRouter before two servers; ARGS=--write writes docs/routing.md
	$(READY) test
	@test -x build/routers/bin/vllm-router || $(PYTHON) -m venv build/routers
	@build/routers/bin/pip install --quiet vllm-router==0.1.17 ai-dynamo-runtime==1.6.1
	PYTHONPATH=src:. $(BIN)/python -m tests.serving.routed build/routers $(ARGS)

parallel-servers: ## compare what clients of servers with several processes were told with the ledger; ARGS=data-parallel for one
	$(READY) test
	PYTHONPATH=src:. $(BIN)/python -m tests.serving.parallel.run $(ARGS)

fuzz: ## read 100,000 mutated journals; JOURNALS=n for another number
	$(READY) test
	$(BIN)/python -m tests.fuzz.run $(or $(JOURNALS),100000) $(ARGS)

differential: ## compare the ledger with a position-by-position oracle on 20,000 random histories; HISTORIES=n, FIRST=seed, RELEASE=0.33.0
	$(READY) test
	PYTHONPATH=src VLLM_LOGGING_LEVEL=ERROR $(if $(RELEASE),$(PYTHON) scripts/releases.py run $(RELEASE) -- python,$(BIN)/python) \
		-m tests.differential.compare $(or $(HISTORIES),20000) $(if $(FIRST),--first $(FIRST)) --processes 2 $(ARGS)

releases: ## run the scenarios on every vLLM and LMCache release, or on ARGS=core, and the tests that need them
	$(READY) test
	$(BIN)/python scripts/matrix.py $(ARGS)
	$(if $(filter-out core --write,$(ARGS)),,$(PYTEST) -q -m releases)

whatif-proof: ## compare predictions of kvledger whatif with real engines of half and of twice the size
	$(READY) test
	PYTHONPATH=src $(BIN)/python scripts/whatif_proof.py $(ARGS)

repro-proof: ## reproduce each known fault from a crowd of requests; ARGS=--write writes docs/repro-proof.md
	$(READY) test
	$(BIN)/python scripts/repro_proof.py $(ARGS)

cards: ## write the score cards of connectors into docs/connectors.md
	$(READY) test
	$(PYTHON) scripts/cards.py

content-runs: ## run the real engine at level content with many features; ARGS=--write writes docs/content.md
	$(READY) test
	$(BIN)/python scripts/content_runs.py $(ARGS)

content-sketches: ## measure how much two computations of a block differ; ARGS=--write writes docs/content.md
	$(READY) test
	$(BIN)/python scripts/content_sketches.py $(ARGS)

upstream-tests: ## run vLLM's own tests with and without the ledger
	$(READY) test
	$(PYTHON) scripts/upstream_tests.py $(ARGS)

docs: ## write the generated pages, boards and rules
	$(READY) test
	$(BIN)/python -m kvledger.audit.checks > docs/invariants.md
	$(BIN)/python -m kvledger.audit.checks.figures_page docs/reconciliation.md
	$(BIN)/python -m kvledger.audit.glossary > docs/glossary.md
	$(BIN)/python -m kvledger.exporters.metrics.table > docs/metrics.md
	$(BIN)/python -m kvledger.exporters.trace.tables > docs/tables.md
	$(BIN)/python -m kvledger.dashboards.boards dashboards/generated
	$(BIN)/python -m kvledger.dashboards.rules > dashboards/generated/kvledger-rules.yaml
	$(BIN)/python -m kvledger.dashboards.rules --markdown > docs/alerts.md

site: ## build the documentation as a site into build/site
	@test -x build/docs/bin/mkdocs || $(PYTHON) -m venv build/docs
	@build/docs/bin/pip install --quiet "mkdocs-material>=9.5"
	NO_MKDOCS_2_WARNING=1 build/docs/bin/mkdocs build --strict --quiet

pictures: ## draw the report and the boards of a real run into docs/pictures; needs Chromium
	$(READY) test
	PYTHONPATH=src:. $(BIN)/python -m tests.serving.pictures docs/pictures

clean: ## remove the environment, builds and caches
	rm -rf .venv .venv.lock .venv.log .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
