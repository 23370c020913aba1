"""Runs one case in each mode that it names, and judges the results."""

from __future__ import annotations

import torch

from differential import case as cases
from differential.build import Built, build, user_fusions
from differential.case import Case
from differential.compare import UNWRITABLE, Verdict, compare_outcomes, judge
from differential.modes import Outcome, execute, regions, unfused


def check(case: Case) -> Verdict:
    mode = case["mode"]
    built = build(case)
    outcome = execute(built, case)
    verdict = judge(built, case, outcome)
    if verdict.status == "wrong" and mode.get("backend") == "inductor" and any(map(_inductor_misreads, built.leaves)):
        return Verdict("skipped", "Inductor misreads an operand")
    negated = any(leaf.is_neg() for leaf in built.leaves)  # negated tensors take another path, with another order of sums
    if verdict.status == "right" and "budget" in mode and not negated:
        found = _same_bits(built, outcome, {**case, "mode": {key: value for key, value in mode.items() if key != "budget"}})
        if found.is_failure:
            return found
    if verdict.status == "right" and mode.get("verify"):
        found = _verified(case)
        if found.is_failure:
            return found
    if verdict.status != "right" or mode.get("recipe") is None:
        return verdict
    return _check_against_itself(case, verdict)


def _inductor_misreads(operand: torch.Tensor) -> bool:
    """Whether Inductor reads an operand wrong without Tandem, as it does for [2, 1, 3, 33] with strides (100, 100, 1, 3), and for negative bits."""
    x = operand.detach()
    if (x.dim() < 3 and not x.is_neg()) or x.numel() == 0 or not x.is_floating_point():
        return False
    return not torch.allclose(torch.compile(_rows, backend="inductor")(x), _rows(x), rtol=0, atol=0, equal_nan=True)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1] if x.dim() else 1) * 2


def _same_bits(built: Built, outcome: Outcome, unlimited: Case) -> Verdict:
    """Checks that a memory budget changes no bit of an output or a gradient."""
    other = execute(build(unlimited), unlimited)
    if other.error is not None or other.in_place_error is not None:  # a write into a kept value is refused, and a budget changes which values are kept
        return Verdict("right")
    names = [f"output {i}" for i in range(len(outcome.outputs))] + [f"gradient of {name}" for name in built.names]
    for name, one, two in zip(names, outcome.outputs + outcome.grads, other.outputs + other.grads, strict=False):
        if (one is None) != (two is None) or (one is not None and two is not None and not torch.equal(one.nan_to_num(7.5), two.nan_to_num(7.5))):
            return Verdict("wrong", f"{name} has other bits under a memory budget")
    return Verdict("right")


def _verified(case: Case) -> Verdict:
    """Checks that `verify` gives no false alarm for a case that is right."""
    built = build(case)
    with user_fusions(case["mode"].get("fuse")), regions(case["mode"]):
        report = built.module.verify(built.x, *built.extras)
    return Verdict("right") if report else Verdict("wrong", f"a false alarm: {report.text}")


def _check_against_itself(case: Case, verdict: Verdict) -> Verdict:
    """Compares, under a recipe, compiled with eager or fused with unfused results, which round at equal places."""
    mode = case["mode"]
    if any(op["k"] == "dropout" for op in case["ops"]) or mode.get("func") or mode.get("mut") is not None:
        return verdict
    built = build(case)
    first = execute(built, case)
    if mode.get("run") == "compile":
        eager = {**case, "mode": {key: value for key, value in mode.items() if key not in ("run", "backend", "dynamic")}}
        other = build(case)
        second = execute(other, eager)
        if second.error is not None and judge(other, eager, second) == Verdict("refused", UNWRITABLE):  # compiled code writes no argument
            return verdict
        found = compare_outcomes(built, case, first, second, "compiled against eager")
        return found if found.is_failure else verdict
    other = build(case)
    if mode.get("run") or any(op["k"] in cases.PLAIN or op.get("hook") or op.get("ip") for op in other.resolved):
        return verdict
    found = compare_outcomes(built, case, first, execute(other, case, unfused(other, not mode.get("eval"))), "fused against unfused")
    return found if found.is_failure else verdict
