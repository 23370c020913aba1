#!/usr/bin/env bash
# test.sh: builds and runs all tests; scripts/build.sh must have run before. The tests of the package need only the package, so they run while
# the C++ programs are compiled and run; the tests of the programs follow, with some of the package. With TESTS=word, such as TESTS=rms_norm,
# only tests run whose names contain the word. CTEST_ARGS and PYTEST_ARGS are passed on.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/common.sh

# Uses one thread, because the C++ tests use the other cores. Inductor's compile workers are not started in advance.
python_tests() {
  local start
  start=$(now)
  OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TORCHINDUCTOR_COMPILE_THREADS=1 .venv/bin/python -m pytest "$@"
  echo "tests: pytest run in $(seconds_since "$start") s"
}

# Tests of the package that compile C++ or type-check: behind the C++ tests, where both parts end at about the same time.
behind=(tests/python/test_consumer.py tests/python/test_types.py)

# shellcheck disable=SC2086  # each word of PYTEST_ARGS is an argument
package_tests() { python_tests ${PYTEST_ARGS:-tests/python ${behind[@]/#/--ignore=}}; }

cpp_tests() {
  local start
  start=$(now)
  compile "$preset" all
  echo "tests: C++ built in $(seconds_since "$start") s"
  start=$(now)
  run_ctest "$preset"
  echo "tests: C++ run in $(seconds_since "$start") s"
  [ -n "${PYTEST_ARGS:-}" ] || python_tests tests/cli tests/apps "${behind[@]}"
}

if [ -z "${TESTS:-}" ]; then
  side_by_side package_tests cpp_tests
  exit
fi
camel=$(sed -E 's/(^|_)([a-z])/\U\2/g' <<<"$TESTS")
compile "$preset" tandem_tests
"build/$preset/tests/tandem_tests" --gtest_brief=1 --gtest_filter="*$TESTS*:*$camel*"
mapfile -t files < <(grep -liE "$TESTS|$camel" tests/python/test_*.py tests/cli/test_*.py tests/apps/*/test_*.py)
python_tests -q -k "$TESTS or $camel" "${files[@]}"
