"""`make bench`: prints the figures of docs/benchmarks.md with their bars. `run.py host products` runs two sections; sections in LONG run only if named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = ("import", "host", "modules", "marginal", "indirect", "planning", "products", "grouped", "parallel", "lengths", "block", "memory", "kernels", "low_precision", "quantizers", "weights", "attention", "many", "backend", "loss")
LONG = ("many", "backend", "loss")  # these take minutes and run only if they are named


def section(name: str) -> None:
    import importlib

    print(importlib.import_module(f"benchmarks.{name}").run(), flush=True)


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--section"]:
        section(arguments[1])
        return 0
    chosen = arguments or [name for name in SECTIONS if name not in LONG]
    unknown = [name for name in chosen if name not in SECTIONS]
    if unknown:
        print(f"bench: expected sections among {', '.join(SECTIONS)}, got {', '.join(unknown)}. Leave them out to run all but many, backend and loss.", file=sys.stderr)
        return 2
    # Each section runs in its own process, as OpenMP fixes thread counts and pinning when it starts.
    environment = {**os.environ, "OMP_PROC_BIND": "true", "PYTHONPATH": str(ROOT)}
    failed = 0
    for name in chosen:
        environment["OMP_NUM_THREADS"] = "1" if name in ("host", "modules", "marginal", "indirect", "planning") else "2"
        failed += bool(subprocess.run([sys.executable, __file__, "--section", name], env=environment, cwd=ROOT, check=False).returncode)
        print(flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
