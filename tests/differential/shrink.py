"""Makes a failing case smaller as long as the signature of its verdict is unchanged."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Iterator

from differential import case as cases
from differential.case import Case
from differential.compare import Verdict

Judge = Callable[[Case], Verdict]


def signature(verdict: Verdict) -> str:
    """The part of a verdict that must not change while a case shrinks: the status, and the start of an error's text or the magnitude of a difference."""
    text = re.sub(r"[-+]?\d[\d.e+-]*", "#", verdict.text)
    numbers = re.search(r"(?:off|differs) by ([^ ,]+), where roundings explain .* \(largest ([^)]+)\)", verdict.text)
    if numbers is None:
        return f"{verdict.status}: {text[:70]}"
    is_far = not float(numbers[1]) <= 0.02 * float(numbers[2])
    return f"wrong: {text.split(' ')[0]} {'far' if is_far else 'near'}"


def _candidates(case: Case) -> Iterator[Case]:
    ops = case["ops"]
    for size in (len(ops) // 2, len(ops) // 4, 2, 1):
        if size < 1 or size >= len(ops):
            continue
        for start in range(len(ops) - size, -1, -1):
            yield without(case, start, size)
    for key in list(case["mode"]):
        yield {**case, "mode": {k: v for k, v in case["mode"].items() if k != key}}
    if isinstance(case["mode"].get("recipe"), dict):
        for key in case["mode"]["recipe"]:
            recipe = {k: v for k, v in case["mode"]["recipe"].items() if k != key}
            yield {**case, "mode": {**case["mode"], "recipe": recipe}}
    for key in ("l", "g", "d"):
        if key in case["x"]:
            yield {**case, "x": {k: v for k, v in case["x"].items() if k != key}}
    if "params" in case:
        yield {key: value for key, value in case.items() if key != "params"}
    for key in ("give", "ask", "fuse"):
        for dropped in case["mode"].get(key) or ():
            kept = tuple(entry for entry in case["mode"][key] if entry != dropped)
            yield {**case, "mode": {**case["mode"], key: kept}}
    for index, op in enumerate(ops):
        for key in op:
            if key not in ("k", "shape", "ops"):
                yield _with_op(case, index, {k: v for k, v in op.items() if k != key})
        if op.get("out", 0) > 2:
            for smaller in (2, op["out"] // 2, op["out"] - 1):
                yield _with_op(case, index, {**op, "out": smaller})
    yield from _smaller_shapes(case)
    if case.get("seed"):
        yield {**case, "seed": 0}


def _smaller_shapes(case: Case) -> Iterator[Case]:
    shape = tuple(case["x"]["s"])
    for drop in range(len(shape) - 1):
        yield {**case, "x": {**case["x"], "s": shape[:drop] + shape[drop + 1 :]}}
    for at, size in enumerate(shape):
        for smaller in sorted({1, 2, size // 2, size - 1} & set(range(size))):
            yield {**case, "x": {**case["x"], "s": (*shape[:at], smaller, *shape[at + 1 :])}}


def _with_op(case: Case, index: int, op: Case) -> Case:
    return {**case, "ops": [*case["ops"][:index], op, *case["ops"][index + 1 :]]}


def without(case: Case, start: int, size: int) -> Case:
    """The case without some ops. An op that shares a dropped op's module becomes a copy of the dropped op."""
    ops = copy.deepcopy(case["ops"])
    dropped = range(start, start + size)
    for op in ops[start + size :]:
        if "tie" in op:
            if op["tie"] in dropped:
                del op["tie"]
            elif op["tie"] >= start:
                op["tie"] -= size
        if "same" in op:
            if op["same"] in dropped:
                original = {**ops[op["same"]]}
                op.clear()
                op.update(original)
            elif op["same"] >= start:
                op["same"] -= size
    return {**case, "ops": ops[:start] + ops[start + size :]}


def shrink(case: Case, verdict: Verdict, judge: Judge, seconds: float = 30.0) -> tuple[Case, Verdict]:
    wanted, until = signature(verdict), time.monotonic() + seconds
    tried: set[str] = set()
    progress = True
    while progress and time.monotonic() < until:
        progress = False
        for candidate in _candidates(case):
            text = cases.text_of(candidate)
            if text in tried:
                continue
            tried.add(text)
            if time.monotonic() > until:
                break
            try:
                found = judge(candidate)
            except (cases.Invalid, IndexError, KeyError, ValueError):
                continue
            if found.is_failure and signature(found) == wanted:
                case, verdict, progress = candidate, found, True
                break
    return case, verdict
