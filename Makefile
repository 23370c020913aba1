# The commands. Each installs what is missing (scripts/setup.sh), builds what it needs and is not up to date, and runs.
#   make run   ARGS="..."                  tandem-train ARGS
#   make test  CTEST_ARGS= PYTEST_ARGS=    tests; `make check-all` runs those marked long too
#     as on other processors: TANDEM_MAX_CPU_ISA=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 OMP_NUM_THREADS=2 make test
#   make bench ARGS="..."                  benchmarks/run.py ARGS
#   make fuzz  MINUTES=10                  random pipelines against plain torch; prints its seeds (ARGS: python -m differential --help)
#   make dev   TESTS=rms_norm              after an edit: compiles file by file, runs the tests of that name; all tests without TESTS
#   make ecosystem ARGS="..."              models and trainers of other libraries, which it installs (ARGS: pytest's)
#   make check-all ARGS="..."              what .ci/run leaves out, hours of it (ARGS: names of stages, see scripts/check_all.sh)
# After any of them .venv holds the package and the programs. JOBS=n sets the number of compilers that run at once.
SHELL := /bin/bash
.DEFAULT_GOAL := test
.PHONY: run test dev bench ecosystem fuzz check-all setup build format clean
export TANDEM_JOBS := $(JOBS)

run: export TANDEM_STARTED := $(shell date +%s.%N)
run:
	@scripts/setup.sh --run
	@scripts/build.sh
	@.venv/bin/tandem-train $(ARGS)

test: setup
	@scripts/build.sh
	@scripts/test.sh

dev: export TANDEM_PRESET := dev
dev: setup
	@scripts/build.sh
	@TESTS="$(TESTS)" scripts/test.sh

check-all:
	@scripts/check_all.sh $(ARGS)

ecosystem: setup
	@scripts/build.sh
	@scripts/ecosystem.sh $(ARGS)

bench: setup
	@scripts/build.sh benchmarks
	@.venv/bin/python benchmarks/run.py $(ARGS)

fuzz: setup
	@scripts/build.sh
	@OMP_NUM_THREADS=1 PYTHONPATH=tests .venv/bin/python -m differential $(if $(MINUTES),--minutes $(MINUTES)) $(ARGS)

setup:
	@scripts/setup.sh

build: setup
	@scripts/build.sh all

format: setup
	@scripts/check_format.sh --fix

clean:
	rm -rf build
