#!/usr/bin/env bash
# check_all.sh [STAGE...]: what .ci/run leaves out because it takes hours and finds little that .ci/run does not: run it before a larger piece
# of work ends. Each stage prints its seconds. Without arguments all stages run, in the order below.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/common.sh

# All tests with one thread and with two, `long` ones included; the C++ programs come with `make test`.
threads() {
  local count
  for count in 1 2; do
    OMP_NUM_THREADS=$count CTEST_ARGS="-E example" run_ctest release
    OMP_NUM_THREADS=$count .venv/bin/python -m pytest -q -m "long or not long"
  done
}

# Tests on processors that this one is not: libraries and kernels are told to use no better instructions.
capped() {
  local cap
  for cap in "ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 TANDEM_MAX_CPU_ISA=avx2" \
    "ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 TANDEM_MAX_CPU_ISA=baseline"; do
    echo "with $cap"
    # shellcheck disable=SC2086  # assignments, one a word
    (export $cap; CTEST_ARGS="-E example" run_ctest release; OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q)
  done
}

# Every source by itself: an include that only a group of sources hides is missing here.
file_by_file() {
  configure dev
  compile dev all
}

# The second compiler's code: library, extension, program and tests as they are shipped.
clang() {
  configure clang
  compile clang all
  run_ctest clang
}

# Kernels in all forms that sanitizers see, and ThreadSanitizer in everything.
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

# The oldest torch that CMakeLists.txt accepts is built for and loaded, the newest runs the tests.
torch_versions() {
  scripts/check_torch.sh 2.11.0 tests/python/test_ops.py
  scripts/check_torch.sh 2.14.0
}

differential() { make --no-print-directory fuzz MINUTES=10; }
fuzzers() { scripts/fuzz.sh 600; }
repository() {
  scripts/check_format.sh
  .venv/bin/python scripts/check_layout.py
  .venv/bin/python scripts/check_messages.py
}

all=(repository threads capped file_by_file clang asan tsan new_ops torch_versions differential fuzzers)
begun=$(now)
scripts/setup.sh --ci
scripts/build.sh all
for name in "${@:-${all[@]}}"; do
  [[ " ${all[*]} " = *" $name "* ]] || {
    echo "check_all: expected stages out of ${all[*]}, got $name. Name one of these." >&2
    exit 2
  }
done
for name in "${@:-${all[@]}}"; do stage "$name" "$name"; done
echo "== all stages passed in $(seconds_since "$begun") s"
