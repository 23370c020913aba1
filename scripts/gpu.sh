#!/usr/bin/env bash
# gpu.sh [PYTHON]: builds the package into build/gpu against the torch of PYTHON (python3), which must see a GPU, and runs
# tests/python/test_cuda.py with it. Installs nothing outside build/gpu. CXX may name another compiler than g++; it must link the libstdc++
# that torch loads.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/common.sh

python=$(command -v "${1:-python3}")
folder=build/gpu
mkdir -p "$folder"
"$python" -c 'import torch; assert torch.cuda.is_available(), "gpu.sh: expected a GPU that torch sees, got none. Name a Python whose torch sees one."'
# TANDEM_FEW_KERNELS builds the CPU kernels in one form, because they are not tested here.
options=(-DPython_EXECUTABLE="$python" -DTANDEM_TESTS=OFF -DTANDEM_BENCHMARKS=OFF -DTANDEM_FEW_KERNELS=ON)
stage "configure" cmake --preset release -B "$folder" "${options[@]}"
stage "build" cmake --build "$folder" -j "$(jobs_count)" --target tandem _C tandem_cli
stage "package" "$python" -m pip install -qq --no-build-isolation --no-deps --upgrade --target "$folder/site" \
  --config-settings=build-dir="$folder" .
stage "tests" env PYTHONPATH="$folder/site" "$python" -m pytest -q -p no:cacheprovider tests/python/test_cuda.py
