# Functions of the build scripts; sourced from the repository's root.

preset=${TANDEM_PRESET:-release}

now() { date +%s.%N; }

# seconds_since START: seconds from START, one decimal.
seconds_since() { awk -v start="$1" -v end="$(now)" 'BEGIN { printf "%.1f", end - start }'; }

# Compilers that may run at once: TANDEM_JOBS, else one per core, but no more than memory holds at 2 GiB each.
jobs_count() {
  if [ -n "${TANDEM_JOBS:-}" ]; then echo "$TANDEM_JOBS"; return; fi
  local cores memory
  cores=$(nproc)
  memory=$(awk '/^MemAvailable:/ { print int($2 / 2097152) }' /proc/meminfo)
  [ "$memory" -ge 1 ] || memory=1
  echo $((cores < memory ? cores : memory))
}

# stage NAME COMMAND...: runs a stage of checks and prints its name and its seconds.
stage() {
  local name=$1 start
  shift
  echo "== $name"
  start=$(now)
  "$@"
  echo "== $name: $(seconds_since "$start") s"
}

# side_by_side A B: runs two functions at once and shows what A prints, then what B printed; fails where one of them did.
side_by_side() {
  local log first second status=0
  log=$(mktemp)
  "$1" &
  first=$!
  "$2" >"$log" 2>&1 &
  second=$!
  wait "$first" || status=$?
  wait "$second" || status=$?
  cat "$log"
  rm -f "$log"
  return "$status"
}

# The tests of several threads with ThreadSanitizer in what threads share; nothing else is compiled for them. libtorch is not instrumented, and
# ThreadSanitizer does not know how gcc's OpenMP synchronizes.
thread_tests() {
  compile release tandem_tsan_tests
  OMP_NUM_THREADS=1 TSAN_OPTIONS=suppressions=tests/threads/suppressions.txt build/release/tests/tandem_tsan_tests --gtest_brief=1
}

cuda_kernels() {
  if ! command -v nvcc >/dev/null && [ -z "${CUDACXX:-}" ]; then
    echo "skipped: no nvcc"
  elif ! ls src/kernels/cuda/*.cu >/dev/null 2>&1; then
    echo "skipped: no CUDA sources"
  else
    configure cuda
    cmake --build --preset cuda -j "$(jobs_count)"
  fi
}

# configure PRESET: runs cmake; its output is shown only when it fails.
configure() {
  mkdir -p build
  if ! cmake --preset "$1" -DPython_EXECUTABLE="$PWD/.venv/bin/python" >"build/configure-$1.log" 2>&1; then
    cat "build/configure-$1.log" >&2
    return 1
  fi
}

# compile PRESET TARGET...
compile() {
  local preset=$1
  shift
  cmake --build --preset "$preset" -j "$(jobs_count)" --target "$@"
}

# run_ctest PRESET: runs the C++ tests and prints the closing lines of each test program and the twenty slowest tests. Threads wait without
# spinning: the programs run side by side, on the same cores.
run_ctest() {
  local log=build/$1/Testing/Temporary/LastTest.log
  OMP_WAIT_POLICY=passive ctest --preset "$1" -j "$(jobs_count)" ${CTEST_ARGS:-}
  grep -hE '^\[==========\] .* ran\.|^\[  (PASSED|SKIPPED) +\] [0-9]|^[0-9]+ skipped$|^\[  SKIPPED \] [^ ]+$' "$log" || true
  echo "slowest tests, in milliseconds:"
  sed -nE 's/^\[       OK \] ([^ ,]+).* \(([0-9]+) ms\)$/\2 \1/p' "$log" | sort -rn | sed -n 1,20p
}
