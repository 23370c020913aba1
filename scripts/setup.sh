#!/usr/bin/env bash
# setup.sh [--run | --ci]: installs the missing packages that building, testing and running need: Debian packages, and .venv with the packages
# of requirements.txt and requirements-test.txt. Takes a second if nothing is missing. --run leaves out the Python packages that only tests
# need; --ci adds the Debian packages that .ci/run needs besides.
set -euo pipefail
cd "$(dirname "$0")/.."

# Each entry is a package and something that it contains: a command, a header or a library.
needs=(g++:g++ make:make cmake:cmake ninja-build:ninja python3:python3 ccache:ccache mold:mold
       libhwy-dev:hwy/highway.h nlohmann-json3-dev:nlohmann/json.hpp libcli11-dev:CLI/CLI.hpp
       libgtest-dev:gtest/gtest.h libgmock-dev:gmock/gmock.h libbenchmark-dev:benchmark/benchmark.h)
if [ "${1:-}" = --ci ]; then needs+=(clang:clang++ libclang-rt-14-dev:libclang_rt.fuzzer clang-format:clang-format git:git); fi

is_there() {
  case "$1" in
    *.h | *.hpp) for root in /usr/include /usr/local/include; do [ -e "$root/$1" ] && return 0; done; return 1 ;;
    libclang_rt.*) compgen -G "/usr/lib/llvm-*/lib/clang/*/lib/*/$1*.a" >/dev/null ;;
    *) command -v "$1" >/dev/null ;;
  esac
}

missing=()
for need in "${needs[@]}"; do is_there "${need#*:}" || missing+=("${need%%:*}"); done
if command -v python3 >/dev/null; then
  python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
  python3 -c 'import os, sysconfig as s; os.stat(os.path.join(s.get_paths()["include"], "Python.h"))' 2>/dev/null ||
    missing+=(python3-dev)
else
  missing+=(python3-venv python3-dev)
fi

if [ ${#missing[@]} -gt 0 ]; then
  install="apt-get install -y --no-install-recommends ${missing[*]}"
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "setup: expected the Debian packages ${missing[*]}, got a machine without them and no right to install them. Run:" >&2
    echo "  sudo apt-get update && sudo $install" >&2
    exit 1
  fi
  echo "setup: installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  log=$(mktemp)
  # shellcheck disable=SC2086  # the words of $install are its arguments
  if ! { apt-get -o Acquire::Retries=3 update && $install; } </dev/null >"$log" 2>&1; then
    tail -n 30 "$log" >&2
    echo "setup: expected \`$install\` to succeed, got the error above. Run it by hand and start again." >&2
    exit 1
  fi
  rm -f "$log"
fi

version=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
  echo "setup: expected python3 3.10 or newer, got $version. Put a newer python3 first on PATH." >&2
  exit 1
}

# A venv becomes invalid if its folder moves or Python changes, so both are part of each stamp.
files=(requirements.txt)
[ "${1:-}" = --run ] || files+=(requirements-test.txt)
for file in "${files[@]}"; do
  stamp=$({ pwd; command -v python3; python3 -V; cat "$file"; } | sha256sum)
  stamp_file=.venv/$file.stamp
  [ "$(cat "$stamp_file" 2>/dev/null)" != "$stamp" ] || continue
  if ! grep -qsF "$PWD/.venv" .venv/bin/activate ||
    [ "$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" != "$version" ]; then
    echo "setup: making .venv with python3 $version"
    python3 -m venv --clear .venv
  fi
  echo "setup: installing $file into .venv"
  .venv/bin/python -m pip install -qq --disable-pip-version-check -r "$file" </dev/null
  echo "$stamp" >"$stamp_file"
done
