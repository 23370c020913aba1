"""Runs many cases in child processes, so that a crash can be traced to its case, and counts the verdicts."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from differential import case as cases
from differential.case import Case
from differential.compare import Verdict
from differential.generate import generate
from differential.shrink import shrink, signature

CASES_PER_CHILD = {"eager": 400, "compiled": 40}  # a process keeps compiled programs until it ends
SECONDS_PER_CASE = {"eager": 20.0, "compiled": 120.0}


def verdict_of(case: Case) -> Verdict:
    """The verdict on a case. An error in this package itself counts as wrong."""
    from differential.check import check

    try:
        return check(case)
    except cases.Invalid:
        raise
    except Exception as error:  # a fault of the reference or of the comparison
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Verdict("wrong", f"{type(error).__name__} in {os.path.basename(where.filename)}:{where.lineno}: {str(error)[:160]}")


def labels(case: Case) -> list[str]:
    """The modes that a case covers."""
    mode = case["mode"]
    found = [mode.get("run", "eager"), mode.get("grad", "grad")]
    found += [f"{key}={mode[key]}" for key in ("backend", "hooks", "bw", "ac", "gl", "func") if key in mode]
    found += [key for key in ("recipe", "mut", "give", "ask", "dynamic", "warm", "eval", "verify", "fuse") if mode.get(key) is not None]
    return found


@dataclass
class Count:
    """Counts of the verdicts of a campaign, and its failures."""

    statuses: collections.Counter = field(default_factory=collections.Counter)
    modes: collections.Counter = field(default_factory=collections.Counter)
    ops: collections.Counter = field(default_factory=collections.Counter)
    dtypes: collections.Counter = field(default_factory=collections.Counter)
    reasons: collections.Counter = field(default_factory=collections.Counter)
    failures: list[tuple[str, Case, Verdict]] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, name: str, case: Case, verdict: Verdict) -> None:
        self.statuses[verdict.status] += 1
        self.modes.update(labels(case))
        self.ops.update({op["k"] for op in case["ops"]})
        self.dtypes.update([case["x"].get("d", "f32")])
        if verdict.status in ("refused", "skipped"):
            self.reasons[verdict.text] += 1
        if verdict.is_failure:
            self.failures.append((name, case, verdict))


def _child(named: list[tuple[str, Case]], out: int) -> None:
    """Judges cases in order, and writes a line before and a line after each."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with os.fdopen(out, "w") as pipe:
        for index, (_, case) in enumerate(named):
            print(json.dumps([index]), file=pipe, flush=True)
            try:
                verdict = verdict_of(case)
                print(json.dumps([index, verdict.status, verdict.text]), file=pipe, flush=True)
            except cases.Invalid:
                print(json.dumps([index, "invalid", ""]), file=pipe, flush=True)


def in_child(named: list[tuple[str, Case]], seconds: float) -> Iterator[tuple[int, Verdict]]:
    """Pairs of the index of a case and its verdict, from a forked process. If that dies or hangs, the last verdict is "crashed"."""
    read, write = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(read)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 2)
            os.dup2(null, 1)
            _child(named, write)
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    last, done = -1, -1
    buffer = b""
    hung = False
    with contextlib.closing(os.fdopen(read, "rb", buffering=0)) as pipe:
        while True:
            ready, _, _ = select.select([pipe], [], [], seconds)
            if not ready:
                hung = True
                os.kill(child, signal.SIGKILL)
                break
            data = pipe.read(65536)
            if not data:
                break
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                entry = json.loads(line)
                if len(entry) == 1:
                    last = entry[0]
                else:
                    done = entry[0]
                    yield done, Verdict(entry[1], entry[2])
    _, status = os.waitpid(child, 0)
    if hung:
        yield last, Verdict("crashed", f"no answer in {seconds:.0f} s")
    elif done + 1 < len(named):
        what = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"status {os.WEXITSTATUS(status)}"
        yield last, Verdict("crashed", what)


def judge_alone(case: Case, seconds: float = 120.0) -> Verdict:
    """The verdict on one case from a process that runs no other."""
    for _, verdict in in_child([("", case)], seconds):
        return verdict
    return Verdict("crashed", "no answer")


def campaign(named: Iterable[tuple[str, Case]], kind: str, until: float | None = None, report: Callable[[str], Any] = print) -> Count:
    count, start = Count(), time.monotonic()
    iterator = iter(named)
    is_over = is_late = False
    while not is_over and not is_late:
        chunk: list[tuple[str, Case]] = []
        for item in iterator:
            chunk.append(item)
            if len(chunk) == CASES_PER_CHILD[kind]:
                break
        is_over = len(chunk) < CASES_PER_CHILD[kind]
        while chunk and not is_late:
            reached = len(chunk)
            for index, verdict in in_child(chunk, SECONDS_PER_CASE[kind]):
                if verdict.status == "invalid":
                    continue
                count.add(*chunk[index], verdict)
                if verdict.is_failure:
                    report(f"{chunk[index][0]}: {verdict.status}: {verdict.text}")
                if verdict.status == "crashed":
                    reached = index + 1
                if until is not None and time.monotonic() > until:
                    is_late = True
            chunk = chunk[reached:]
    count.seconds = time.monotonic() - start
    return count


def seeds(first: int, kind: str, how_many: int | None = None) -> Iterator[tuple[str, Case]]:
    number = first
    while how_many is None or number < first + how_many:
        yield f"{kind}:{number}", generate(number, kind)
        number += 1


def found_before() -> list[tuple[str, Case]]:
    """The cases in found.txt, which have failed before, each with the comment above it as its name."""
    named, comment = [], ""
    for line in (Path(__file__).parent / "found.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            comment = line.strip("# ")
        elif line.strip():
            named.append((comment, cases.parse(line)))
    return named


def shrunk(case: Case, verdict: Verdict, seconds: float) -> tuple[Case, Verdict]:
    return shrink(case, verdict, judge_alone, seconds)


__all__ = ["Count", "campaign", "found_before", "judge_alone", "seeds", "shrunk", "signature"]
