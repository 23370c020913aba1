#!/usr/bin/env bash
# ecosystem.sh [ARG...]: runs the tests of tests/ecosystem, with models and trainers of other libraries. These are installed beside .venv.
# Each ARG is passed to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/common.sh

folder=build/ecosystem/site-packages  # a name by which dill, of datasets, knows modules that are installed from those of the user
if ! cmp -s requirements-ecosystem.txt "$folder/requirements.txt"; then
  rm -rf build/ecosystem
  .venv/bin/python -m pip install -qq --disable-pip-version-check --target "$folder" -r requirements-ecosystem.txt \
    -c <(.venv/bin/python -m pip freeze | grep -E '^(torch|numpy)==') </dev/null
  rm -rf "$folder"/torch "$folder"/torch-* "$folder"/numpy "$folder"/numpy-* "$folder"/numpy.libs
  cp requirements-ecosystem.txt "$folder/requirements.txt"
fi
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONPATH=$folder .venv/bin/python -m pytest -q -s tests/ecosystem "$@"
