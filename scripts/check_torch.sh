#!/usr/bin/env bash
# check_torch.sh VERSION [PYTEST_ARGS...]: builds the package against another torch (2.11.0, 2.14.0), in an environment of its own below build/,
# and runs the tests of the package there: all of tests/python but those of the wheel, which is built of build/release, or the tests in PYTEST_ARGS.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/common.sh

version=${1:?"check_torch.sh: expected a version of torch, got none. Run: scripts/check_torch.sh 2.14.0"}
shift
folder=build/torch-$version
python=$PWD/$folder/venv/bin/python
if [ ! -e "$folder/venv.made" ] || [ requirements-test.txt -nt "$folder/venv.made" ]; then
  python3 -m venv --clear "$folder/venv"
  # The packages of .venv with another version of torch.
  sed "s/^torch==.*/torch==$version/" requirements.txt >"$folder/requirements.txt"
  "$python" -m pip install -qq --disable-pip-version-check -r "$folder/requirements.txt" -r requirements-test.txt </dev/null
  touch "$folder/venv.made"
fi
cmake --preset release -B "$folder" -DPython_EXECUTABLE="$python" -DTANDEM_TESTS=OFF -DTANDEM_BENCHMARKS=OFF
cmake --build "$folder" -j "$(jobs_count)" --target tandem _C tandem_cli
"$python" -m pip install -qq --disable-pip-version-check --no-build-isolation --no-deps --force-reinstall \
  --config-settings=build-dir="$folder" . </dev/null
"$folder/venv/bin/tandem" doctor
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$python" -m pytest -q --ignore tests/python/test_wheel.py "${@:-tests/python}"
