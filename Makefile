# `make demo` and `make test` do all set-up on a machine with Python and (better, not required) a C++ compiler.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEMO   := $(or $(wildcard $(STAMP)),$(VENV)/.installed-bench)
NATIVE := CMakeLists.txt $(wildcard src/cpp/* src/cpp/*/*)

.PHONY: help demo figure test test-ray test-browser cells fuzz sanitize wheels lint docs bench format clean
help:     ## show this list
	@grep -hE '^[a-z-]+: .*##|^[a-z-]+:  *##' $(MAKEFILE_LIST) | sed -E 's/: *[^#]*## /\t/' | expand -t 10

$(STAMP): EXTRA = dev
$(VENV)/.installed-bench: EXTRA = bench
$(STAMP) $(VENV)/.installed-bench: pyproject.toml constraints/dev.txt $(NATIVE)
	@echo installing and compiling: a few minutes
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints/dev.txt -e '.[$(EXTRA)]'
	touch $@

demo: $(DEMO) ## the main job: five methods on five tasks of digits, three seeds, a table and an HTML report
	$(BIN)/infssm run --seed 0 10 100 --jobs 2

test: $(STAMP) lint docs ## format, lint, types, import layers, documentation, all tests, on other instruction sets too
	$(BIN)/python -m pytest -q -n 2
	$(BIN)/python -m tests.cells

cells: $(STAMP) ## the numerical packages with older instruction sets, and the package without a compiler (part of test)
	$(BIN)/python -m tests.cells

fuzz: $(STAMP) ## thousands of damaged files: every one is read or refused in one line (not part of test)
	$(BIN)/python -m tests.fuzz --count 4000

sanitize: $(STAMP) ## kernels and geometry under the address and undefined-behaviour sanitizers (not part of test)
	$(BIN)/python -m tests.cells sanitize

figure: demo ## the README's figure of the main job's report (needs chromium)
	chromium --headless --no-sandbox --hide-scrollbars --window-size=1200,960 --screenshot=docs/report.png runs/digits-5/comparison.html

test-ray: $(STAMP) ## runs on a Ray cluster of this machine give the results of one process (not part of test: installs ray)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints/dev.txt 'ray[default]'
	$(BIN)/python -m pytest -q tests/bench/executors/on_ray.py

test-browser: $(STAMP) ## the page of `infssm serve` in a real Chromium (not part of test: installs playwright, needs chromium)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints/dev.txt playwright
	$(BIN)/python -m pytest -q -s tests/integrations/serve/in_browser.py

wheels: $(STAMP) ## what a user installs: sdist and wheel in dist/, tested in an environment without a compiler
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m tests.cells wheel

lint: $(STAMP) ## format, lint, types, import layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(STAMP) ## build the documentation into build/site, warnings as errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(STAMP) ## kernels, distances and training steps beside other implementations and beside their aims (BENCH=--cpu-time: on a busy machine)
	$(BIN)/python -m benchmarks $(BENCH) --json build/bench/operations.json
	$(BIN)/python -m benchmarks.steps $(BENCH) --json build/bench/steps.json
	$(BIN)/python -m benchmarks.kernels.mamba2 $(BENCH) --json build/bench/mamba2.json

format: $(STAMP) ## rewrite the sources in house style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:    ## remove everything that was built or installed here
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
