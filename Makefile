# Everything runs in .venv, which scripts/environment.py builds, repairs, and leaves alone once it is ready.
# ARGS are passed on: make demo ARGS=-v, make test ARGS="-k tokens". docs/testing.md says how long each takes.
PYTHON ?= python3
BIN := .venv/bin
READY := @$(PYTHON) scripts/environment.py
PYTEST := $(BIN)/python -m pytest
TWO_WORKERS := -n 2 --dist loadfile
SLOW := benchmark or browser or crash or fuzz or golden or packaging or programs or serving or whole_engine

# Python keeps bytecode even where the machine says otherwise: hundreds of processes import vLLM.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-all lint bench proof releases differential fuzz docs site sizes clean
.DEFAULT_GOAL := help

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile

demo: ## run a real engine on this CPU and audit its journal
	$(READY) demo $(filter -v --verbose,$(ARGS))
	@$(BIN)/kvledger demo $(ARGS)

test: lint ## lint, type-check and run the fast tests
	$(PYTEST) -q $(TWO_WORKERS) --hypothesis-profile=fast -m "not ($(SLOW) or releases)" $(ARGS)

test-all: test ## the same, then every other test, except those in the environments of `make releases`
	$(PYTEST) -q $(TWO_WORKERS) -m "($(SLOW)) and not releases"

lint:
	$(READY) test
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy --no-error-summary

bench: ## measure what the hooks cost an engine step
	$(READY) test
	$(BIN)/python benchmarks/run.py $(ARGS)

fuzz: ## read 100,000 mutated journals, and as many texts of others; JOURNALS=n for another number
	$(READY) test
	$(BIN)/python -m tests.fuzz.run $(or $(JOURNALS),100000) $(ARGS)
	$(BIN)/python -m tests.fuzz.foreign $(or $(JOURNALS),100000) $(ARGS)

proof: ## prove a claim with real engines; NAME=routed, ARGS are passed on; without NAME it lists them
	$(READY) test
	@$(BIN)/python -m proofs $(NAME) $(ARGS)

differential: ## compare the ledger with a position-by-position oracle on 20,000 random histories; HISTORIES=n, FIRST=seed, RELEASES="0.21.0 0.33.0" or all
	$(READY) test
	$(BIN)/python scripts/differential.py $(or $(HISTORIES),20000) $(if $(FIRST),--first $(FIRST)) $(RELEASES)

releases: ## run the scenarios on every vLLM and LMCache release, or on ARGS=core, and the tests that need them
	$(READY) test
	$(BIN)/python scripts/matrix.py $(ARGS)
	$(if $(filter-out core --write,$(ARGS)),,$(PYTEST) -q $(TWO_WORKERS) -m releases)

docs: ## write the generated pages and rules
	$(READY) test
	$(BIN)/python scripts/pages.py

site: ## build the documentation as a site into build/site
	@test -x build/docs/bin/mkdocs || $(PYTHON) -m venv build/docs
	@build/docs/bin/pip install --quiet "mkdocs-material>=9.5"
	NO_MKDOCS_2_WARNING=1 build/docs/bin/mkdocs build --strict --quiet

sizes: ## print lines of code by folder, beside those of another commit: ARGS=COMMIT
	@$(PYTHON) scripts/sizes.py $(ARGS)

clean: ## remove the environment, builds and caches
	rm -rf .venv .venv.lock .venv.log .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
