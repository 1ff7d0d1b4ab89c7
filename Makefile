# Every target that needs packages sets them up first, in the virtual environment $(VENV); a second call is quick.
# PYTHON is the interpreter that the environment is made from. `make gpu` and its like use $(GPU_PYTHON) as
# it is, install nothing and reach for no network: they are meant for a machine that has torch, triton and the build tools already. Its results
# go to RESULTS_DIR; COMMIT names the commit of a copy of the project that has no history; GPU_ARGS are options of the command.
PYTHON ?= python3
VENV ?= .venv
VENV_PYTHON := $(VENV)/bin/python
RESULTS_DIR ?=
COMMIT ?=
GPU_ARGS ?=
TESTS ?=
OUTER_ARGS ?=
KERNELS_ARGS ?=
TAG ?=
LINKS ?=
GPU_PYTHON ?= $(if $(wildcard $(VENV_PYTHON)),$(VENV_PYTHON),$(PYTHON))

.PHONY: help demo test lint format cpp sanitize bench gpu gpu-ahead gpu-smoke gpu-sanitize gpu-status kernels outer plots results site dist release-notes clean distclean python gpu-python setup setup-demo

help:
	@echo "make demo        the main job end to end on real text and real weights, about two minutes"
	@echo "make test        lint, type checks, C++ tests under sanitizers, all Python tests"
	@echo "make lint        ruff, mypy and clang-format, checks only;  make format  rewrites"
	@echo "make cpp         the C++ tests alone, under sanitizers"
	@echo "make sanitize    the Python extension under sanitizers, driven by the tests of ops and tokenizer"
	@echo "make bench       benchmarks on this machine's processor"
	@echo "make gpu         all that needs a GPU, in nine minutes, into RESULTS_DIR (benchmarks/results)"
	@echo "make gpu-smoke   every kernel once on a GPU, in 90 seconds: the first thing to run on one"
	@echo "make gpu-ahead   compiles for these two on a machine without a GPU"
	@echo "make gpu-sanitize  every kernel once under compute-sanitizer, on small shapes"
	@echo "make gpu-status  kernels that no GPU result is of as they are; nothing when none is owed"
	@echo "make kernels     all that a change to a Triton kernel or its launcher makes due; seconds where nothing changed"
	@echo "make outer       another project's tests, untouched and with every model fused: make outer TESTS=path OUTER_ARGS=options"
	@echo "make plots       draws the stored results into build/benchmarks"
	@echo "make results     README, docs/results.md and its pictures from the stored results; drops what newer ones replace"
	@echo "make site        the documentation as a site in build/site, in an environment of its own (.venv-site)"
	@echo "make dist        source archive and wheel in dist/, checked (.venv-dist)"
	@echo "make release-notes  the changelog's section of this version, for a TAG and with LINKS if given, in build"
	@echo "make clean       removes what was built;  make distclean  the environment as well"

python:
	@$(PYTHON) tools/require_python.py

gpu-python:
	@$(GPU_PYTHON) tools/require_python.py

setup: python
	@$(PYTHON) tools/setup_environment.py test --venv $(VENV)

setup-demo: python
	@$(PYTHON) tools/setup_environment.py demo --venv $(VENV)

demo: setup-demo
	@$(VENV_PYTHON) examples/demo.py

test: setup
	@$(VENV_PYTHON) tools/check.py

lint: setup
	@$(VENV_PYTHON) tools/check.py lint

cpp: setup
	@$(VENV_PYTHON) tools/check.py cpp

sanitize: setup
	@$(VENV_PYTHON) tools/check.py sanitize

format: setup
	@$(VENV_PYTHON) -m ruff check --fix
	@$(VENV_PYTHON) -m ruff format
	@find csrc tools -name '*.c' -o -name '*.cpp' -o -name '*.h' | xargs -r $(VENV)/bin/clang-format -i

bench: setup-demo
	@$(VENV_PYTHON) -m benchmarks.run

GPU_COMMAND = $(GPU_PYTHON) -m benchmarks.gpu $(if $(RESULTS_DIR),--results $(RESULTS_DIR)) $(if $(COMMIT),--commit $(COMMIT))

gpu: gpu-python
	@$(GPU_COMMAND) $(GPU_ARGS)

gpu-smoke: gpu-python
	@$(GPU_COMMAND) --parts smoke --minutes 1.5 $(GPU_ARGS)

gpu-ahead: gpu-python
	@$(GPU_PYTHON) -m benchmarks.gpu --parts ahead --device sm_90 --minutes 60 $(GPU_ARGS)

gpu-sanitize: gpu-python
	@$(GPU_COMMAND) --parts memcheck,racecheck $(GPU_ARGS)

gpu-status: python
	@$(PYTHON) -m benchmarks.gpu.status

kernels: setup
	@$(VENV_PYTHON) -m tools.kernels $(KERNELS_ARGS)

outer: setup
	@$(VENV_PYTHON) -m tools.outer_tests $(TESTS) $(OUTER_ARGS)

plots: setup
	@$(VENV_PYTHON) -m benchmarks.plot

results: setup
	@$(VENV_PYTHON) -m benchmarks.kit.settle
	@$(VENV_PYTHON) -m benchmarks.table --write

site: python
	@$(PYTHON) tools/setup_environment.py site --venv $(VENV)-site
	@$(VENV)-site/bin/python -m tools.site

dist: python
	@$(PYTHON) tools/setup_environment.py dist --venv $(VENV)-dist
	@$(VENV)-dist/bin/python -m tools.wheels build

release-notes: python
	@mkdir -p build
	@$(PYTHON) -m tools.release_notes $(if $(TAG),--tag $(TAG)) $(if $(LINKS),--links $(LINKS)) > build/release_notes.md || { rm -f build/release_notes.md; exit 1; }
	@cat build/release_notes.md

clean:
	rm -rf build dist demo_output .compat .pytest_cache .mypy_cache .ruff_cache .hypothesis bert_fast.egg-info
	rm -f bert_fast/_native*.so
	find bert_fast benchmarks tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(VENV)-site $(VENV)-dist
