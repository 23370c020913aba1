# Functions of the build scripts. Scripts source this file from the repository's root.

preset=${TANDEM_PRESET:-release}

now() { date +%s.%N; }

# seconds_since START: prints the seconds since START, with one decimal.
seconds_since() { awk -v start="$1" -v end="$(now)" 'BEGIN { printf "%.1f", end - start }'; }

# Prints how many compilers may run at once: TANDEM_JOBS, else one per core, but no more than fit in memory at 2 GiB each.
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

# side_by_side A B: runs two functions at once. Shows the output of A as it comes, then that of B. Fails if A or B fails.
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

# Runs the tests of several threads. Only the sources whose state threads share are compiled with ThreadSanitizer. OpenMP uses one thread,
# because libtorch is not instrumented and ThreadSanitizer does not know how gcc's OpenMP synchronizes.
thread_tests() {
  compile release tandem_tsan_tests
  OMP_NUM_THREADS=1 TSAN_OPTIONS=suppressions=tests/threads/suppressions.txt build/release/tests/tandem_tsan_tests --gtest_brief=1
}

# configure PRESET: runs cmake and shows its output only if it fails.
configure() {
  mkdir -p build
  if ! cmake --preset "$1" -DPython_EXECUTABLE="$PWD/.venv/bin/python" >"build/configure-$1.log" 2>&1; then
    cat "build/configure-$1.log" >&2
    return 1
  fi
}

# compile PRESET TARGET...: builds the targets.
compile() {
  local preset=$1
  shift
  cmake --build --preset "$preset" -j "$(jobs_count)" --target "$@"
}

# run_ctest PRESET: runs the C++ tests and prints the last lines of each test program and the twenty slowest tests. Threads wait without
# spinning, because the programs run side by side on the cores.
run_ctest() {
  local log=build/$1/Testing/Temporary/LastTest.log
  OMP_WAIT_POLICY=passive ctest --preset "$1" -j "$(jobs_count)" ${CTEST_ARGS:-}
  grep -hE '^\[==========\] .* ran\.|^\[  (PASSED|SKIPPED) +\] [0-9]|^[0-9]+ skipped$|^\[  SKIPPED \] [^ ]+$' "$log" || true
  echo "slowest tests, in milliseconds:"
  sed -nE 's/^\[       OK \] ([^ ,]+).* \(([0-9]+) ms\)$/\2 \1/p' "$log" | sort -rn | sed -n 1,20p
}
