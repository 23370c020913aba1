#!/usr/bin/env bash
# check_new_op.sh: writes an op and an activation with new_op.py in a copy of the tree, builds the copy and tests both. The copy stands in
# the place of the tree meanwhile (in a mount namespace of its own), so that what build/release holds is not built again. Where that is not
# allowed, only the kernels are built and tested: the whole would take as long as everything before.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/common.sh

# In the copy. The command line is built for the op alone: all of its sources see the table of activations.
write_and_test() {
  local python=.venv/bin/python site=build/site
  configure release
  $python scripts/new_op.py soft_clip
  compile release _C tandem_cli
  build/release/bin/tandem verify linear:64:96 soft_clip:0.5 linear:96:32
  build/release/bin/tandem bench soft_clip --width 256 --rounds 3
  $python scripts/new_op.py --activation soft_sign
  if command -v clang-format >/dev/null; then scripts/check_format.sh; fi
  $python scripts/check_layout.py
  compile release _C tandem_kernel_tests tandem_tests
  build/release/tests/tandem_kernel_tests --gtest_brief=1 --gtest_filter='*soft_sign*'
  build/release/tests/tandem_tests --gtest_brief=1 --gtest_filter='*soft_sign*:Front.*'
  mkdir -p "$site"
  cp -a python/tandem "$site/"
  cp build/release/src/_C.*.so .venv/lib/python3*/site-packages/tandem/_build.py "$site/tandem/"
  PYTHONPATH=$site $python scripts/render_ops.py --pages
  PYTHONPATH=$site $python -m pytest -q tests/python/test_soft_clip.py tests/python/test_signatures.py
}
write_and_test_kernels() {
  local python=.venv/bin/python
  configure release
  $python scripts/new_op.py soft_clip
  $python scripts/new_op.py --activation soft_sign
  $python scripts/check_layout.py
  compile release tandem_kernel_tests
  build/release/tests/tandem_kernel_tests --gtest_brief=1 --gtest_filter='*soft_sign*'
}

if [ "${1:-}" = --kernels-in-copy ]; then
  write_and_test_kernels
  exit
fi
if [ "${1:-}" = --in-copy ]; then
  write_and_test
  exit
fi

root=$PWD copy=$PWD/build/new_op
rm -rf "$copy"
mkdir -p "$copy/build" "$copy/.venv"
git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
  if [ -e "$file" ]; then printf '%s\0' "$file"; fi
done | xargs -0 cp -p --parents -t "$copy"
if [ -e build/release/build.ninja ] && unshare --mount true 2>/dev/null; then
  cp -a build/release "$copy/build/"
  unshare --mount bash -euc "
    mount --bind '$root/.venv' '$copy/.venv'
    mount --rbind '$copy' '$root'
    cd '$root'
    scripts/check_new_op.sh --in-copy"
else
  rmdir "$copy/.venv"
  ln -s "$root/.venv" "$copy/.venv"
  "$copy/scripts/check_new_op.sh" --kernels-in-copy
fi
rm -rf "$copy"
