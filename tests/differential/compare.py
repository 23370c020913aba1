"""Judges an outcome: right, refused as documented, refused wrongly, or wrong.

A result may differ from float64 by a few roundings of the coarsest dtype in the case, relative to the tensor's largest element. A larger difference
is right if it is at most SPREAD times the difference between exact float64 runs and runs with random roundings (reference.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from differential.build import Built
from differential.case import DTYPES, Case
from differential.modes import Outcome
from differential.reference import LARGEST_FLOAT16, UNIT, Reference, Valued

ROUNDINGS = 4  # a difference of so many roundings of the coarsest dtype is right without noisy runs
SPREAD = 8  # factor of the largest difference of noisy runs: their roundings are random, while those of kernels may all have one sign
UNTOLD = 5  # up to so many unknown elements of masks, all combinations are tried
SAMPLES = (range(6), range(6, 80), range(80, 640))  # more runs follow if fewer do not explain a difference, as at kinks and between codes

UNWRITABLE = "a tensor that an in-place sum may not write"

# Refusals that are documented: the condition on a case, and the text of the error.
REFUSALS = [
    ("float64 under a recipe", r"expected float32, bfloat16 or float16 under a recipe, got float64"),
    ("an op without a composite form under torch.func", r"expected ops with a composite form under torch.func"),
    ("an in-place write to what backward reads", r"modified by an inplace operation|is a view and .* modified inplace|expected .* in place"),
    ("a recipe under torch.func", r"quantize: expected a tensor that needs no gradient|quantize: expected a tensor without a tangent|expected no recipe where torch.func differentiates"),
    ("a checkpoint whose backward runs outside of the recipe's region", r"expected a recompute under the recipe of its forward"),
    ("a Python op that returns another dtype", r"to which the op's tensors promote|which the op declares|that converts to int"),
    ("integers that torch.func would differentiate", r"All outputs of f must be floating-point"),
    ("integers before a weight", r"expected x in a floating dtype, as the weight is"),
    ("a dropout or modulation of integers", r"(dropout|modulate): expected (x|scale) of dtype"),
    ("a memory budget that is too small", r"memory_budget: expected at least"),
    (UNWRITABLE, r"in place|inplace|in-place|in_place|single memory location|unchanged until the end of the call"),
]


@dataclass
class Verdict:
    """`status` is right, refused, skipped, wrong, refused wrongly, accepted (torch raises, Tandem does not) or crashed."""

    status: str
    text: str = ""

    @property
    def is_failure(self) -> bool:
        return self.status in ("wrong", "refused wrongly", "accepted", "crashed")


def _references(built: Built, mode: Case, outcome: Outcome, noise: int | None = None, masked: int = -1):
    """One evaluation of the reference, and its results."""
    reference = Reference(built, mode, outcome.outputs or None, noise, masked)
    values = reference.run()
    return reference, values


def _gradients(reference: Reference, values: list[Valued], outcome: Outcome, factors: list[float]) -> list[torch.Tensor | None]:
    pairs = [
        (value.value * factor, grad.double())
        for value, grad, factor in zip(values, outcome.given, factors, strict=True)
        if grad is not None and value.value.requires_grad
    ]
    requested = [reference.leaves[i] for i in outcome.requested]
    if not pairs or not requested:
        return [None] * len(reference.leaves)
    asked_with_grad = [leaf for leaf in requested if leaf.requires_grad]
    found = iter(torch.autograd.grad([y for y, _ in pairs], asked_with_grad, [g for _, g in pairs], allow_unused=True, retain_graph=True))
    grads: list[torch.Tensor | None] = [None] * len(reference.leaves)
    for i in outcome.requested:
        if reference.leaves[i].requires_grad:
            grads[i] = next(found)
            if reference.built.leaves[i].dtype == torch.float16:
                reference.overflows |= _largest(grads[i]) > LARGEST_FLOAT16
    return grads


def judge(built: Built, case: Case, outcome: Outcome) -> Verdict:
    mode = case["mode"]
    try:
        if mode.get("func") in ("vjp", "grad"):
            for leaf in built.leaves:
                if leaf.is_floating_point():
                    leaf.requires_grad_(True)
        reference, values = _references(built, mode, outcome)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        if outcome.error is not None:
            return Verdict("refused", "as torch")
        return Verdict("accepted", f"torch raises {type(error).__name__}: {str(error)[:160]}")
    if reference.overflows:
        return Verdict("skipped", "overflow")
    if outcome.error is not None:
        return _judge_error(built, case, outcome, reference)
    if outcome.in_place_error is not None:
        return Verdict("refused", "in-place write to an output")
    outcome.notes += reference.notes
    if outcome.notes:
        return Verdict("wrong", outcome.notes[0])
    if len(values) != len(outcome.outputs):
        return Verdict("wrong", f"{len(outcome.outputs)} outputs for {len(values)}")
    found = Verdict("right")
    for aliased in ([False, True] if any(outcome.aliases) else [False]):
        found = _judge_numbers(built, case, outcome, reference, values, aliased)
        if not found.is_failure:
            break
    if found.is_failure and reference.overflows:
        return Verdict("skipped", "overflow")
    return _judge_masks(built, case, outcome, reference.untold, found) if found.is_failure and reference.untold else found


def _judge_masks(built: Built, case: Case, outcome: Outcome, untold: int, found: Verdict) -> Verdict:
    """Judges with each possible mask of dropped elements that are zero: outputs do not show these, but gradients do, and one mask must explain all."""
    mode = case["mode"]
    if untold > UNTOLD:
        grads = []
        for masked in (2**untold - 1, 0):
            reference, values = _references(built, mode, outcome, masked=masked)
            grads.append(_gradients(reference, values, outcome, _factors(outcome, mode, len(values), False)))
        matters = any(_distance(kept, dropped) > 0 for kept, dropped in zip(*grads, strict=True))
        return Verdict("skipped", "masks of zeros") if matters else found
    for masked in range(2**untold):
        reference, values = _references(built, mode, outcome, masked=masked)
        judged = _judge_numbers(built, case, outcome, reference, values, False, masked)
        if not judged.is_failure:
            return judged
    return found


def _judge_error(built: Built, case: Case, outcome: Outcome, reference: Reference) -> Verdict:
    mode, text = case["mode"], f"{type(outcome.error).__name__}: {outcome.error}"
    has_python = any(op["k"].startswith("py_") for op in built.resolved)
    has_groups = mode.get("recipe") is not None and any(op["k"] == "grouped" for op in built.resolved)  # quantized groups have no composite form
    in_place = any(op.get("ip") and op["k"] == "add" for op in built.resolved)
    is_outside = not mode.get("inside") or mode.get("bw") == "thread"  # a region belongs to its thread
    outside = mode.get("run") in ("ckpt", "ckpt_re") and mode.get("recipe") is not None and is_outside
    applies = [reference.refuses_float64, (has_python or has_groups) and bool(mode.get("func")), mode.get("mut") is not None, bool(mode.get("func") and mode.get("recipe") is not None), outside, reference.refuses_dtype, bool(mode.get("func")), True, True, "budget" in mode, in_place]
    for (name, pattern), is_possible in zip(REFUSALS, applies, strict=True):
        if is_possible and re.search(pattern, text):
            return Verdict("refused", name)
    return Verdict("refused wrongly", text[:300])


def _factors(outcome: Outcome, mode: Case, count: int, aliased: bool) -> list[float]:
    """The factor of each output after an in-place product of one of them with 2."""
    if mode.get("mut") is None:
        return [1.0] * count
    which = mode["mut"] % count
    return [2.0 if (i == which and outcome.outputs[i].is_floating_point()) or (aliased and outcome.aliases[i]) else 1.0 for i in range(count)]


def _judge_numbers(built: Built, case: Case, outcome: Outcome, reference: Reference, values: list[Valued], aliased: bool, masked: int = -1) -> Verdict:
    mode = case["mode"]
    factors = _factors(outcome, mode, len(values), aliased)
    differentiable = mode.get("grad", "grad") == "grad"
    expected: list[tuple[str, torch.Tensor | None, torch.Tensor | None]] = []
    for i, (value, output) in enumerate(zip(values, outcome.outputs, strict=True)):
        if value.dtype != output.dtype:
            return Verdict("wrong", f"output {i} has dtype {output.dtype}, not {value.dtype}")
        if tuple(value.value.shape) != tuple(output.shape):
            return Verdict("wrong", f"output {i} has shape {tuple(output.shape)}, not {tuple(value.value.shape)}")
        expected.append((f"output {i}", output, value.value * factors[i]))
    has_python = any(op["k"].startswith("py_") for op in built.resolved)
    may_require_more = has_python or mode.get("run") == "ckpt_re" or bool(mode.get("func"))  # here all outputs of a node require a gradient if one does
    if differentiable:
        for i, (value, grad) in enumerate(zip(values, outcome.given, strict=True)):
            wanted = mode.get("give") is None or i in mode["give"]
            if wanted and value.value.requires_grad and grad is None and mode.get("run") != "ckpt_re":
                return Verdict("wrong", f"output {i} does not require grad")
            if grad is not None and not value.value.requires_grad and not may_require_more:
                return Verdict("wrong", f"output {i} requires grad")
        grads = _gradients(reference, values, outcome, factors)
        for i in outcome.requested:
            expected.append((f"gradient of {built.names[i]}", outcome.grads[i], grads[i]))
    failed = [
        n for n, (name, actual, wanted) in enumerate(expected)
        if not _is_close(actual, wanted, _unit(built, mode) * ROUNDINGS, _least(built))
    ]
    for n in failed:
        name, actual, wanted = expected[n]
        if actual is not None and name.startswith("gradient") and actual.dtype != built.leaves[built.names.index(name[12:])].dtype:
            return Verdict("wrong", f"{name} has dtype {actual.dtype}")
    if not failed:
        return Verdict("right")
    unexplained = _unexplained(expected, failed, lambda samples: _spreads(built, mode, outcome, expected, factors, differentiable, samples, masked))
    return Verdict("wrong", "{} is off by {}".format(*unexplained)) if unexplained else Verdict("right", "by spread")


def _unexplained(expected: list, failed: list[int], spreads_of: Callable[[range], list[float]]) -> tuple[str, str] | None:
    """The name and the difference of the first of the `failed` that random roundings do not explain, or None."""
    spreads = [0.0] * len(expected)
    for samples in SAMPLES:
        if not failed:
            return None
        spreads = [*map(max, spreads, spreads_of(samples))]
        failed = [n for n in failed if not _distance(*expected[n][1:]) <= SPREAD * spreads[n]]
    for n in failed:
        name, actual, wanted = expected[n]
        return name, f"{_distance(actual, wanted):.3g}, where roundings explain {SPREAD * spreads[n]:.3g} (largest {_largest(wanted):.3g})"
    return None


def _spreads(built: Built, mode: Case, outcome: Outcome, expected: list, factors: list[float], differentiable: bool, samples: range, masked: int = -1) -> list[float]:
    spreads = [0.0] * len(expected)
    for sample in samples:
        noisy, values = _references(built, mode, outcome, noise=sample, masked=masked)
        results = [v.value * f for v, f in zip(values, factors, strict=True)]
        if differentiable:
            grads = _gradients(noisy, values, outcome, factors)
            results += [grads[i] for i in outcome.requested]
        for n, (result, (_, _, wanted)) in enumerate(zip(results, expected, strict=True)):
            spreads[n] = max(spreads[n], _distance(result, wanted))
    return spreads


def _zero_like(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor:
    return torch.zeros(()) if a is None and b is None else torch.zeros_like(b if a is None else a, dtype=torch.float64) if a is None else a


def _distance(actual: torch.Tensor | None, wanted: torch.Tensor | None) -> float:
    if actual is None and wanted is None:
        return 0.0
    a, w = _zero_like(actual, wanted).detach().double(), _zero_like(wanted, actual).detach().double()
    if a.shape != w.shape:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    difference = (a - w).abs()
    difference = torch.where((a == w) | (a.isnan() & w.isnan()), 0.0, difference)
    return float("inf") if difference.isnan().any() else difference.max().item()


def _largest(wanted: torch.Tensor | None) -> float:
    return 0.0 if wanted is None or wanted.numel() == 0 else wanted.detach().double().abs().max().item()


def _is_close(actual: torch.Tensor | None, wanted: torch.Tensor | None, bound: float, least: float) -> bool:
    own = actual is not None and actual.is_floating_point()
    return _distance(actual, wanted) <= bound * _largest(wanted) + max(least, _least_of(actual.dtype) if own else 0.0)


def _least_of(dtype: torch.dtype) -> float:
    """The largest error from rounding in the range of a dtype's subnormal numbers."""
    return 2 * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def _least(built: Built) -> float:
    """The largest such error of the operands' dtypes, through which gradients pass, without float16, whose large error the noisy runs cover."""
    return max((_least_of(leaf.dtype) for leaf in built.leaves if leaf.is_floating_point() and leaf.dtype != torch.float16), default=0.0)


def _unit(built: Built, mode: Case) -> float:
    dtypes = {t.dtype for t in built.leaves if t.is_floating_point()} | {DTYPES[mode["ac"]] for _ in range("ac" in mode)}
    return max((UNIT[d] for d in dtypes), default=2.0**-23)


def compare_outcomes(built: Built, case: Case, a: Outcome, b: Outcome, what: str) -> Verdict:
    """Judges two outcomes of one case, both of Tandem, which may differ by roundings only."""
    if (a.error is None) != (b.error is None):
        raised = a.error or b.error
        return Verdict("wrong", f"{what}: one raises {type(raised).__name__}: {str(raised)[:200]}")
    if a.error is not None:
        return Verdict("refused", "both")
    mode = case["mode"]
    factors = [1.0] * len(a.outputs)
    expected = [(f"output {i}", x, y) for i, (x, y) in enumerate(zip(a.outputs, b.outputs, strict=True))]
    expected += [(f"gradient of {built.names[i]}", a.grads[i], b.grads[i]) for i in a.requested]
    failed = [n for n, (_, x, y) in enumerate(expected) if not _is_close(x, y, ROUNDINGS * _unit(built, mode), _least(built))]
    if not failed:
        return Verdict("right")
    reference, values = _references(built, mode, a)
    exact = [v.value for v in values]
    if a.requested:
        grads = _gradients(reference, values, a, factors)
        exact += [grads[i] for i in a.requested]
    exact_only = [(None, None, e) for e in exact]
    unexplained = _unexplained(expected, failed, lambda samples: _spreads(built, mode, a, exact_only, factors, bool(a.requested), samples))
    return Verdict("wrong", "{}: {} differs by {}".format(what, *unexplained)) if unexplained else Verdict("right", "by spread")
