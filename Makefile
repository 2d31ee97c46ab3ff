# Two commands on a fresh machine: `make demo` and `make test`. Both make their own .venv first.
PYTHON ?= python3.11
VENV   ?= .venv
BIN    := $(abspath $(VENV))/bin
STAMP  := $(VENV)/.stamp
DEV    := $(VENV)/.stamp-dev


.PHONY: help venv dev demo test lint format types imports proto proto-check pytest gpu-tests tools clean

help:            ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 14

venv: $(STAMP)   ## make .venv to run the service: the small CPU build of torch, pinned versions
dev: $(DEV)      ## the same with all that the tests need

$(STAMP) $(DEV): tools/make_venv.py constraints/cpu.txt pyproject.toml
	@p=$$(command -v $(PYTHON) || command -v python3) || { echo "Python 3.11 or newer is needed"; exit 1; }; \
	"$$p" tools/make_venv.py $(VENV) $(if $(filter $@,$(DEV)),dev)

demo: venv       ## start the service, run the agentx scenario for about a minute, stop everything
	$(BIN)/megamoe demo

test: lint types imports proto-check pytest   ## everything that CI runs, stopping at the first failure

# The order of `test` is the order of its prerequisites; make must not run them side by side.
.NOTPARALLEL:

lint: dev        ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: dev      ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: dev       ## mypy, strict
	$(BIN)/mypy

imports: dev     ## who may import whom
	$(BIN)/lint-imports --no-cache

proto: dev       ## write service/pb from proto/
	$(BIN)/python tools/gen_proto.py
	$(BIN)/python tools/check_proto_compat.py --update

proto-check: dev  ## stubs are fresh, and the wire contract breaks no caller
	$(BIN)/python tools/gen_proto.py --check
	$(BIN)/python tools/check_proto_compat.py

pytest: dev      ## the tests; `make pytest ARGS="tests/megamoe -k mx"` runs some
	$(BIN)/python -m pytest $(ARGS)

gpu-tests:       ## with PYTHON's own CUDA build of torch, on H100s or H200s: tests/gpu and the service's tests with hopper underneath
	@$(PYTHON) -m megamoe.backends.hopper
	$(PYTHON) -m service.cli compile --backend hopper
	$(PYTHON) -m pytest tests/gpu tests/e2e --backend hopper $(ARGS)

tools: dev       ## bring the programs that tests need into .tools, without root: Prometheus, Chromium, aiperf
	$(BIN)/python tools/debian_tools.py prometheus chromium
	$(BIN)/python tools/python_tools.py aiperf

clean:           ## remove what was built, keep .venv
	rm -rf build dist out .pytest_cache .mypy_cache .ruff_cache .import_linter_cache *.egg-info
