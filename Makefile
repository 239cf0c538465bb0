# Everything runs in an environment of its own, .venv, made on first use and renewed when its inputs change.
#
#   PYTHON       the Python to make the environment with (3.11 or later)
#   CONSTRAINTS  versions to install; give your own file to choose another PyTorch build, for example one for your
#                CUDA driver (run `make clean` first)
#   JOBS         how many tests run at a time; most of them wait for processes they start
#   ARGS         passed on: make test ARGS="-k order", make train ARGS="--workers 4"
#   BENCHMARKS   which `make bench` runs: make bench BENCHMARKS="overhead scaling"

PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
JOBS ?= 4
ARGS ?=

VENV := .venv
RUN := $(VENV)/bin
ENVIRONMENT := $(VENV)/.installed
BENCH_ENVIRONMENT := $(VENV)/.installed-bench
BENCH_RESULTS := runs/bench
BENCHMARKS ?= $$($(RUN)/python -c 'from bench.__main__ import BENCHMARKS; print(*BENCHMARKS)')

.PHONY: help train test pytest soak lint docs bench clean
.DELETE_ON_ERROR:

help: ## this list
	@awk -F ': .*## ' '/^[a-z]+:.*## / { printf "make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

train: $(ENVIRONMENT) ## train a small transformer on generated stories, with two workers (about two minutes)
	$(RUN)/paceline train examples/tiny_stories/2workers.yaml $(ARGS)

# Both at a time: mypy and the start of pytest use one core each.
test: $(ENVIRONMENT) ## lint, and every test, example and code block of the docs
	@$(MAKE) --no-print-directory --jobs=2 lint pytest

# A test that fails beside others runs again alone: where other programs keep the cores busy, processes that the tests
# start may come too late. A file that cannot be imported fails at once.
pytest: $(ENVIRONMENT)
	$(RUN)/python -m pytest --cache-clear -n $(JOBS) --dist worksteal $(ARGS) || { \
		[ $$? -eq 1 ] && $(RUN)/python -m pytest --collect-only -q $(ARGS) > /dev/null && \
		echo "make: running the failed tests again, one at a time" && \
		$(RUN)/python -m pytest --last-failed --last-failed-no-failures none $(ARGS); }

# The kills come last and alone: they say how far they are, and whose cores they have matters to when they strike.
soak: $(ENVIRONMENT) ## a thousand random programs against plain PyTorch, long matrices, a thousand kills (some 40 minutes)
	$(RUN)/python -m pytest -m soak -k 'not thousand_kills' -n $(JOBS) --dist worksteal $(ARGS)
	$(RUN)/python -m pytest -m hypothesis --hypothesis-profile=soak --timeout 1800 -n $(JOBS) --dist worksteal $(ARGS)
	$(RUN)/python -m pytest -m soak -s tests/run/membership/test_chaos_kills.py

lint: $(ENVIRONMENT) ## style, types and the direction of imports
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/lint-imports

# The variable silences an announcement of the theme. With --quiet, warnings would not count for --strict.
docs: $(ENVIRONMENT) ## the documentation site, into site/; open site/index.html (no network, no server needed)
	NO_MKDOCS_2_WARNING=1 $(RUN)/mkdocs build --strict $(ARGS)
	@echo "make: open site/index.html"

# A benchmark that this machine cannot run ends with 77. Its result in JSON goes to the file alone.
bench: $(BENCH_ENVIRONMENT) ## every benchmark beside its peers, docs/benchmarks.md, then the slow tests (long)
	@mkdir -p $(BENCH_RESULTS); rm -f $(BENCH_RESULTS)/*.txt $(BENCH_RESULTS)/.failed
	@set -e; for name in $(BENCHMARKS); do \
		echo "== bench $$name"; \
		{ $(RUN)/python -m bench $$name --json $(ARGS) || echo $$? > $(BENCH_RESULTS)/.failed; } \
			| tee $(BENCH_RESULTS)/$$name.txt | grep --line-buffered -v '^{' || true; \
		if [ -e $(BENCH_RESULTS)/.failed ]; then \
			read code < $(BENCH_RESULTS)/.failed; rm $(BENCH_RESULTS)/.failed $(BENCH_RESULTS)/$$name.txt; [ $$code -eq 77 ]; \
		fi; \
	done
	$(RUN)/python -m bench pages $(BENCH_RESULTS) -o docs/benchmarks.md
	$(RUN)/python docs/make_figures.py
	$(RUN)/python -m pytest -m slow

clean: ## remove the environment, caches and build outputs; runs/ stays
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(ENVIRONMENT): pyproject.toml $(CONSTRAINTS)
	@command -v "$(PYTHON)" >/dev/null 2>&1 || { \
		echo "make: '$(PYTHON)' was not found. Install Python 3.11 or later, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "make: $$($(PYTHON) --version 2>&1) is too old. Install Python 3.11 or later, or name one: make PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "make: $(PYTHON) cannot make virtual environments. Install its venv module (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@echo "Installing Paceline, PyTorch and the development tools into $(VENV) (once; a few minutes)"
	@"$(PYTHON)" -m venv $(VENV)
	@$(RUN)/python -m pip install --quiet -c $(CONSTRAINTS) -e '.[dev,plot]'
	@touch $@

$(BENCH_ENVIRONMENT): $(ENVIRONMENT)
	@echo "Adding the benchmarks' peers to $(VENV)"
	@$(RUN)/python -m pip install --quiet -c $(CONSTRAINTS) -e '.[bench]'
	@touch $@
