#!/usr/bin/env bash
# [FUZZ_ARGS=-seed=1] fuzz.sh [SECONDS]: builds the libFuzzer program of tests/fuzz (clang++, AddressSanitizer and
# UndefinedBehaviorSanitizer) and runs it for SECONDS over its corpus. New inputs stay in build/fuzz/corpus; an input that fails is written to
# build/fuzz.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/common.sh

seconds=${1:-30}
mkdir -p build/fuzz
probe='extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }'
if ! clang++ -x c++ -fsanitize=fuzzer,address,undefined - -o build/fuzz/probe <<<"$probe" 2>/dev/null; then
  echo "skipped: no clang++ with libFuzzer (Debian package libclang-rt-14-dev)"
  exit 0
fi

configure sanitize
compile sanitize fuzz_description
# These checks are off because libtorch is not instrumented (tests/CMakeLists.txt).
export ASAN_OPTIONS=detect_leaks=0:detect_container_overflow=0:strict_string_checks=1:allocator_may_return_null=1
export UBSAN_OPTIONS=print_stacktrace=1
mkdir -p build/fuzz/corpus/description
# It also counts as a failure if a pipeline takes more than 20 s, or 4 GiB, to plan and run.
if ! build/sanitize/tests/fuzz/fuzz_description -max_total_time="$seconds" -timeout=20 -rss_limit_mb=4096 -max_len=4096 \
  -dict=tests/fuzz/description.dict -artifact_prefix=build/fuzz/description- -print_final_stats=1 ${FUZZ_ARGS:-} \
  build/fuzz/corpus/description tests/fuzz/corpus/description >build/fuzz/description.log 2>&1; then
  tail -n 200 build/fuzz/description.log >&2
  exit 1
fi
grep -E '^#[0-9]+[[:space:]]+DONE|^stat::(number|average|peak)' build/fuzz/description.log
