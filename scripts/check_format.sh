#!/usr/bin/env bash
# Fails if clang-format would change a source file; with --fix it changes the files.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v clang-format >/dev/null || {
  echo "check_format: expected clang-format on PATH, got none. Run: apt-get install clang-format" >&2
  exit 1
}
action=(--dry-run -Werror)
if [ "${1:-}" = --fix ]; then action=(-i); fi
find . \( -name '.?*' -o -path ./build -o -path ./out -o -path ./dist \) -prune -o -type f \
  \( -name '*.cpp' -o -name '*.h' \) -print0 |
  xargs -0 -r clang-format "${action[@]}"
