#!/usr/bin/env bash
# Builds the library, the program, the tests and the benchmarks into build/release and installs the package into .venv.
# Prints the seconds that the library took. `scripts/setup.sh` has run before.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/common.sh

mkdir -p build
exec 9>build/lock
if ! flock -n 9; then
  echo "build: another build runs here; waiting for it"
  flock 9
fi

configure release
state=incremental
[ -e build/release/libtandem.built ] || state=clean
start=$(now)
compile release tandem $(targets_among release _C tandem_cli)
touch build/release/libtandem.built
library_seconds=$(seconds_since "$start")

start=$(now)
compile release all
rest_seconds=$(seconds_since "$start")

# What is installed is known by the files it is made of; nothing is done when none of them changed.
start=$(now)
package_stamp() {
  { find python include data pyproject.toml -type f ! -path '*/__pycache__/*' -print0 | sort -z | xargs -0 sha256sum
    find build/release -name 'libtandem.so' -o -name '_C.*.so' -o -path '*/bin/tandem' | sort | xargs -r sha256sum
    cat cmake/*; } | sha256sum
}
if [ "$(cat .venv/tandem.stamp 2>/dev/null)" != "$(package_stamp)" ] || [ ! -e .venv/bin/tandem ]; then
  rm -f .venv/tandem.stamp
  .venv/bin/python -m pip install -qq --disable-pip-version-check --no-build-isolation --no-deps --force-reinstall \
    --config-settings=build-dir=build/release . </dev/null
  package_stamp >.venv/tandem.stamp
fi
echo "build: library $library_seconds s ($state, $(jobs_count) jobs), tests and benchmarks $rest_seconds s," \
  "package $(seconds_since "$start") s"
