#!/usr/bin/env bash
# check_new_op.sh [--whole]: writes an op and an activation with new_op.py in a copy of the tree, and builds and tests them there.
# Without --whole, as .ci/run calls it, the op is built into the library and the activation into the tests of the kernels, and the Python tests
# run that iterate over all ops and pages. With --whole both are built into everything, and all tests run.
# The copy is mounted over the tree (in a mount namespace of its own), so that the objects in build/release stay valid. If mounting is not
# allowed, the copy is built from scratch.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/common.sh

write() {
  .venv/bin/python scripts/new_op.py "$@"
  .venv/bin/python scripts/check_layout.py
}
tests() { .venv/bin/python -m pytest -q "$@"; }

in_copy() {
  write soft_clip
  if [ "$*" = --whole ]; then
    write --activation soft_sign
    scripts/build.sh all
    scripts/test.sh
    return
  fi
  # Alone: a group that gets a new member is built again, and so are all behind it.
  echo 'set_source_files_properties(kernel_ops/elementwise/soft_clip.cpp ops/soft_clip.cpp TARGET_DIRECTORY tandem PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)' >>src/CMakeLists.txt
  scripts/build.sh
  .venv/bin/tandem bench soft_clip --width 256 --rounds 3
  tests --deselect tests/python/test_docs.py::test_python_block_runs tests/python/test_{soft_clip,kernel_ops,docs,signatures,new_op}.py
  write --activation soft_sign
  compile release tandem_kernel_tests
  build/release/tests/tandem_kernel_tests --gtest_brief=1 --gtest_filter='*soft_sign*'
  tests tests/python/test_docs.py -k pages
}

if [ "${1:-}" = --in-copy ]; then
  in_copy "${@:2}"
  exit
fi

root=$PWD copy=$PWD/build/new_op
rm -rf "$copy"
mkdir -p "$copy/build"
git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
  if [ -e "$file" ]; then printf '%s\0' "$file"; fi
done | xargs -0 cp -p --parents -t "$copy"
cp -al .venv "$copy/" # links: what is installed into the copy takes their place
if [ -e build/release/build.ninja ] && unshare --mount true 2>/dev/null; then
  flock build/lock cp -a build/release "$copy/build/"
  unshare --mount bash -euc "
    mount --rbind '$copy' '$root'
    cd '$root'
    scripts/check_new_op.sh --in-copy $*"
else
  "$copy/scripts/check_new_op.sh" --in-copy "$@"
fi
rm -rf "$copy"
