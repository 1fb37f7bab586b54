# Every target is a short form of commands that the README shows. One OpenMP thread a process: on
# a model this small, two made each step about five times slower on two busy cores.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: study test test-slow lint docs clean

study: .venv/ready  ## the main job: every policy on the embedded model, at three budgets
	OMP_NUM_THREADS=1 $(BIN)/kvpolicies compare --out results/study

test: .venv/ready-dev  ## all but the slow tests; KVPOLICIES_DATA=folder adds those on benchmark files
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m "not slow"

test-slow: .venv/ready-dev  ## the others: whole programs, a model of real text, Triton's compiler
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m slow

lint: .venv/ready-dev
	$(BIN)/pre-commit run --all-files

docs: .venv/ready-docs  ## the site, into build/site, without network; a warning is an error
	OMP_NUM_THREADS=1 NO_MKDOCS_2_WARNING=1 PATH="$(CURDIR)/$(BIN):$$PATH" \
		$(BIN)/mkdocs build --strict

clean:
	rm -rf .venv build dist *.egg-info results .pytest_cache .ruff_cache .hypothesis

.venv/bin/pip:
	$(PYTHON) -m venv .venv

.venv/ready: pyproject.toml constraints.txt | .venv/bin/pip
	$(BIN)/pip install -c constraints.txt -e ".[learned]"
	@touch $@

.venv/ready-dev: pyproject.toml constraints.txt | .venv/bin/pip
	$(BIN)/pip install -c constraints.txt -e ".[dev,gguf]"
	@touch $@ .venv/ready

.venv/ready-docs: pyproject.toml constraints.txt | .venv/bin/pip
	$(BIN)/pip install -c constraints.txt -e ".[docs]"
	@touch $@
