# Two commands do everything on a fresh machine: `make demo` and `make test`. `make help` lists the rest.
# PYTHON=/path/to/python3.11 chooses the interpreter, VENV=dir the place of the virtual environment.

VENV    ?= .venv
PYTHON  ?=
# Some tests sleep, or wait for one another: three workers keep two cores busy.
WORKERS ?= 3
TESTS   ?=
OLDEST  ?= tests/lowering tests/runtime/test_run_*.py tests/runtime/test_meshes.py tests/runtime/test_preflight.py \
	tests/runtime/param_server/test_elementwise.py tests/runtime/input/test_transport_jax.py tests/runtime/input/test_slots.py \
	tests/runtime/input/test_same_bits.py

TORCH   ?= tests/runtime/input/test_feeds_torch.py tests/runtime/input/test_sources_libraries.py

NEWEST  ?= $(OLDEST) tests/api tests/audit

TOKENIZER := vscode-textmate@9.3.2 vscode-oniguruma@2.0.1

PY  := $(VENV)/bin/python
AUDIT := JAX_PLATFORMS=cpu COMMPLAN_AUDIT=1 VENV/bin/python -m pytest tests/audit/h100 -q
SET := PYTHON='$(PYTHON)' sh .ci/venv

# Without files of bytecode each of some thousand processes compiles the sources again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-all docs docs-test coverage lint types format grammars tokenizer audit audit-0.11 audit-newest torch oldest newest build wheels packages clean

help:  ## this list
	@sed -n 's/^\([a-z0-9.-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 16

demo:  ## make the virtual environment and train the ensemble of examples/plans/ensemble_training.plan
	@$(SET) $(VENV) demo constraints.txt
	$(PY) examples/ensemble_training.py

test:  ## install what the tests need and run them; TESTS="tests/dsl -x" runs some
	@$(SET) $(VENV) test constraints.txt
	$(PY) -m pytest $(or $(TESTS),-n $(WORKERS) --dist worksteal -q)

test-all:  ## the same, and the campaigns: more random cases, numbers of ranks and sanitizers
	@$(SET) $(VENV) test constraints.txt
	$(PY) -m pytest $(or $(TESTS),-n $(WORKERS) --dist worksteal -q) -m "campaign or not campaign"

docs:  ## build the manual as a site into site/ (needs npm, for what its pages are drawn with)
	@$(SET) $(VENV) docs constraints.txt
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build -q --strict
	@echo "the manual is in site/: $(PY) -m http.server -d site shows it"

docs-test: docs  ## open every page of the site in Chromium, use the playground, run all programs of the manual
	@$(SET) $(VENV) manual constraints.txt
	COMMPLAN_SITE=1 $(PY) -m pytest tests/site tests/test_manual.py -q

coverage:  ## the same, counting the lines that run in any process: at least 90% of them must (slower by a fifth or more)
	@$(SET) $(VENV) test constraints.txt
	@rm -f .coverage .coverage.*
	$(PY) -m coverage run -m pytest -n $(WORKERS) --dist worksteal -q
	@$(PY) -m coverage combine -q
	@$(PY) -m coverage report

lint:  ## ruff: rules and format
	@$(SET) $(VENV) lint constraints.txt
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types:  ## pyright, strict
	@$(SET) $(VENV) lint constraints.txt
	$(VENV)/bin/pyright

format:  ## rewrite the sources as ruff formats them
	@$(SET) $(VENV) lint constraints.txt
	$(PY) -m ruff check --fix-only -q .
	$(PY) -m ruff format .

grammars:  ## write the tables of the parser and the grammars of editors/ anew, from the lists of the language
	@$(SET) $(VENV) test constraints.txt
	$(PY) -m editors.grammars .

tokenizer:  ## install VS Code's tokenizer, with which the tests look at its grammar (needs npm)
	npm install --silent --fetch-retries 1 --fetch-timeout 60000 --no-save --no-package-lock --ignore-scripts --prefix .make/tokenizer $(TOKENIZER)

audit:  ## compile the plans ahead of time for 4 x 8 H100 and read the result (no GPU needed; 230 MB of wheels)
	@$(SET) .venv-audit audit constraints.txt
	$(subst VENV,.venv-audit,$(AUDIT))

audit-0.11:  ## the same with JAX 0.11.2 and CUDA 13; not where Python 3.12 or the wheels are not to be had (320 MB)
	@mkdir -p .make && sed -E 's/^(jax|jaxlib)==.*/\1==0.11.2/' constraints-newest.txt >.make/constraints-0.11.txt
	@if $(SET) .venv-audit-0.11 audit-newest .make/constraints-0.11.txt; then $(subst VENV,.venv-audit-0.11,$(AUDIT)); \
	else echo "make audit-0.11: not run, for the reason above"; fi

audit-newest:  ## the same with the newest JAX and CUDA 13
	@if $(SET) .venv-audit-newest audit-newest constraints-newest.txt; then $(subst VENV,.venv-audit-newest,$(AUDIT)); \
	else echo "make audit-newest: not run, for the reason above"; fi

torch:  ## the tests of feeds for PyTorch in an environment without JAX; skipped if PyTorch's build for CPUs is not available
	@if $(SET) .venv-torch torch constraints.txt; then \
	    .venv-torch/bin/python -m pytest $(TORCH) -q; \
	else echo "make torch: not run, for the reason above"; fi

oldest:  ## the tests that JAX has a part in, without MPI, on the oldest supported one; OLDEST="tests/runtime/test_run_*.py" runs some
	@$(SET) .venv-oldest oldest constraints-oldest.txt
	.venv-oldest/bin/python -m pytest $(OLDEST) --ignore tests/lowering/test_terms_mpi.py -n $(WORKERS) -q

newest:  ## the same on the newest JAX, whose sources pyright reads; not where Python 3.12 or the wheels are not to be had
	@if $(SET) .venv-newest newest constraints-newest.txt; then \
	    .venv-newest/bin/pyright --pythonpath .venv-newest/bin/python --pythonversion 3.12 && \
	    .venv-newest/bin/python -m pytest $(NEWEST) -n $(WORKERS) -q; \
	else echo "make newest: not run, for the reason above"; fi

build:  ## wheel and sdist into dist/
	@$(SET) $(VENV) test constraints.txt
	@rm -rf build
	$(PY) -m build --outdir dist .

wheels: build  ## the wheel for the MPI in use as well, with its engine compiled in
	$(PY) -m commplan.lowering.mpi.prebuilt.wheel dist/commplan-*-none-any.whl

packages: build  ## install the sources, the wheel and the sdist into empty environments and run the command there
	sh .ci/packages $(PY)

clean:  ## remove what make and the tools left behind, the virtual environments included
	rm -rf .venv .venv-audit* .venv-torch .venv-oldest .venv-newest .make build dist site *.egg-info .coverage .coverage.* htmlcov
	rm -rf .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
