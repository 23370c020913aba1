# The three ways in. Each installs what is missing (scripts/setup.sh), builds what changed and runs.
#   make run   ARGS="..."                  tandem train ARGS
#   make test  CTEST_ARGS= PYTEST_ARGS=    all tests
#   make bench ARGS="..."                  benchmarks/run.py ARGS
# JOBS=n sets the number of compilers that run at once.
SHELL := /bin/bash
.DEFAULT_GOAL := test
.PHONY: run test bench setup build format clean
export TANDEM_JOBS := $(JOBS)

run: build
	@.venv/bin/tandem train $(ARGS)

test: build
	@scripts/test.sh

bench: build
	@.venv/bin/python benchmarks/run.py $(ARGS)

setup:
	@scripts/setup.sh

build: setup
	@scripts/build.sh

format: setup
	@scripts/check_format.sh --fix

clean:
	rm -rf build
