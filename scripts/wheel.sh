#!/usr/bin/env bash
# wheel.sh [FOLDER]: writes a wheel of build/release into FOLDER (default: dist), with the manylinux tag that its symbols allow: the number
# in the tag is the oldest glibc that the wheel runs on. Fails if the wheel needs a library that neither the tag nor torch guarantees. Run
# `scripts/setup.sh` and `scripts/build.sh` before.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-dist}
mkdir -p build "$out"
raw=$(mktemp -d build/wheel.XXXXXX)
trap 'rm -rf "$raw"' EXIT
.venv/bin/python -m pip wheel -qq --disable-pip-version-check --no-build-isolation --no-deps -w "$raw" \
  --config-settings=build-dir=build/release . </dev/null
# auditwheel must not copy these: torch's libraries come with torch, on which the wheel depends, and libtandem.so is in the wheel already.
PATH="$PWD/.venv/bin:$PATH" .venv/bin/auditwheel repair --exclude 'libtorch*.so' --exclude libc10.so --exclude libtandem.so \
  -w "$raw/repaired" "$raw"/*.whl >"$raw/log" 2>&1 || { tail -n 20 "$raw/log" >&2; exit 1; }
wheel=("$raw"/repaired/*.whl)
copied=$(.venv/bin/python -m zipfile -l "${wheel[0]}" | { grep -o 'tandem\.libs/[^ ]*' || true; })
if [ -n "$copied" ]; then
  echo "wheel: expected no library besides torch's and the system's, got $copied. Link it statically." >&2
  exit 1
fi
mv "${wheel[0]}" "$out/"
echo "wheel: $out/$(basename "${wheel[0]}")"
