#!/usr/bin/env bash
# check_all.sh [STAGE...]: the checks that .ci/run leaves out, because they take hours and find little that .ci/run does not find. Run it before
# a larger piece of work ends. Each stage prints its seconds. Without arguments all stages run, in the order of `all` below.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/common.sh

# Runs all tests with one thread and with two, including those marked `long`. scripts/build.sh all has compiled the C++ tests.
threads() {
  local count
  for count in 1 2; do
    OMP_NUM_THREADS=$count CTEST_ARGS="-E example" run_ctest release
    OMP_NUM_THREADS=$count .venv/bin/python -m pytest -q -m "long or not long"
  done
}

# Runs the tests as on older processors: libraries and kernels are limited to the older instruction sets.
capped() {
  local cap
  for cap in "ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 TANDEM_MAX_CPU_ISA=avx2" \
    "ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 TANDEM_MAX_CPU_ISA=baseline"; do
    echo "with $cap"
    # shellcheck disable=SC2086  # each word is an assignment
    (export $cap; CTEST_ARGS="-E example" run_ctest release; OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q)
  done
}

# Compiles every source alone, which fails if a source lacks an include that another source of its group has.
file_by_file() {
  configure dev
  compile dev all
}

# Compiles library, extension, programs and tests with the second compiler, as they are shipped, and runs the C++ tests.
clang() {
  configure clang
  compile clang all
  run_ctest clang
}

# Runs the sanitizers with all forms of the kernels, and ThreadSanitizer with all code instrumented.
asan() {
  configure asan
  compile asan all
  run_ctest asan
}
tsan() {
  configure tsan
  compile tsan tandem_thread_tests
  CTEST_ARGS="-R tandem_thread_tests" run_ctest tsan
}

new_ops() { scripts/check_new_op.sh --whole; }

# Builds for the oldest torch that CMakeLists.txt accepts and runs the tests of ops; runs all Python tests with the newest torch.
torch_versions() {
  scripts/check_torch.sh 2.11.0 tests/python/test_ops.py
  scripts/check_torch.sh 2.14.0
}

differential() { make --no-print-directory fuzz MINUTES=10; }
fuzzers() { scripts/fuzz.sh 600; }
all=(threads capped file_by_file clang asan tsan new_ops torch_versions differential fuzzers)
for name in "${@:-${all[@]}}"; do
  [[ " ${all[*]} " = *" $name "* ]] || {
    echo "check_all: expected stages out of ${all[*]}, got $name. Name one of these." >&2
    exit 2
  }
done
begun=$(now)
scripts/setup.sh --ci
scripts/build.sh all
for name in "${@:-${all[@]}}"; do stage "$name" "$name"; done
echo "== all stages passed in $(seconds_since "$begun") s"
