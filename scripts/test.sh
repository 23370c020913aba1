#!/usr/bin/env bash
# Runs all tests on what scripts/build.sh built: the C++ programs, then pytest. CTEST_ARGS and PYTEST_ARGS are passed on.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/common.sh
run_ctest release
.venv/bin/python -m pytest ${PYTEST_ARGS:-}
