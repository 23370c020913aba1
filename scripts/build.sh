#!/usr/bin/env bash
# build.sh [TARGET...]: builds the library, the extension and the command line into build/$TANDEM_PRESET (release), installs the package into
# .venv, then builds the targets, such as `all` for the tests, or `benchmarks`. Prints the seconds of each part. Run `scripts/setup.sh` before.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/common.sh

mkdir -p build
exec 9>build/lock
if ! flock -n 9; then
  echo "build: another build runs here; waiting for it"
  flock 9
fi

folder=build/$preset
configure "$preset"
state=incremental
[ -e "$folder/libtandem.built" ] || state=clean
start=$(now)
compile "$preset" tandem _C tandem_cli
touch "$folder/libtandem.built"
library_seconds=$(seconds_since "$start")

# A stamp of the package's files tells whether the installed package is up to date; if so, nothing is installed.
start=$(now)
package_stamp() {
  { find python apps include data cmake pyproject.toml -type f ! -path '*/__pycache__/*' -print0 | sort -z | xargs -0 sha256sum
    sha256sum "$folder"/src/libtandem.so "$folder"/src/_C.*.so "$folder"/bin/tandem; } | sha256sum
}
if [ "$(cat .venv/tandem.stamp 2>/dev/null)" != "$(package_stamp)" ] || [ ! -e .venv/bin/tandem-train ]; then
  rm -f .venv/tandem.stamp
  .venv/bin/python -m pip install -qq --disable-pip-version-check --no-build-isolation --no-deps --force-reinstall \
    --config-settings=build-dir="$folder" . </dev/null
  package_stamp >.venv/tandem.stamp
fi
echo "build: library $library_seconds s ($state, $(jobs_count) jobs), package $(seconds_since "$start") s"

if [ $# -gt 0 ]; then
  start=$(now)
  compile "$preset" "$@"
  echo "build: $* $(seconds_since "$start") s"
fi
