# Functions of the build scripts; sourced from the repository's root.

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

# run_ctest PRESET: runs the C++ tests and prints the closing lines of each test program. Their threads wait without spinning: the programs
# run side by side, on the same cores.
run_ctest() {
  OMP_WAIT_POLICY=passive ctest --preset "$1" -j "$(jobs_count)" ${CTEST_ARGS:-}
  grep -hE '^\[==========\] .* ran\.|^\[  (PASSED|SKIPPED) +\] [0-9]|^[0-9]+ skipped$|^\[  SKIPPED \] [^ ]+$' \
    "build/$1/Testing/Temporary/LastTest.log" || true
}
