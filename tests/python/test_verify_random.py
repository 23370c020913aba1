"""Fused against unfused, of random pipelines: outputs, gradients of random subsets, what is kept."""

import shlex
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1]))

from differential import case as cases  # noqa: E402
from differential.build import build  # noqa: E402
from differential.compare import judge  # noqa: E402
from differential.generate import for_verify  # noqa: E402
from differential.modes import execute  # noqa: E402

DRAWN, PIPELINES, LEAST, MOST = 330, 200, 2, 12  # some of those drawn are refused, as by torch
counts = {"verified": 0, "refused": 0, "comparisons": 0, "fused": 0}


@st.composite
def pipelines(draw):
    return for_verify(draw(st.randoms(use_true_random=False)), LEAST, MOST)


def repro(case):
    return f"PYTHONPATH=tests python -m differential {shlex.quote(cases.text_of(case))}"


@settings(max_examples=DRAWN, deadline=None, derandomize=True, database=None, report_multiple_bugs=False, suppress_health_check=list(HealthCheck), print_blob=False)
@given(case=pipelines())
def check_random_pipelines(case):
    try:
        built = build(case)
    except cases.Invalid:  # a tensor in two places, whose shapes differ
        reject()
    outcome = execute(build(case), case)
    if outcome.error is not None:  # what torch refuses is refused, and the reference says whether it does
        verdict = judge(build(case), case, outcome)
        assert not verdict.is_failure, f"{verdict.status}: {verdict.text}\n{repro(case)}"
        counts["refused"] += 1
        return
    report = built.module.verify(built.x, *built.extras)
    counts["verified"] += 1
    counts["comparisons"] += report.comparisons
    counts["fused"] += bool(built.module.fusions_made())
    assert report, f"{report.text}\n{repro(case)}"


def test_random_pipelines_are_the_same_fused_and_unfused(capsys):
    check_random_pipelines()
    with capsys.disabled():
        print(
            f"\nverify: {counts['verified']} random pipelines of {LEAST} to {MOST} ops, {counts['comparisons']} tensors compared, "
            f"{counts['fused']} with fusions, {counts['refused']} that torch refuses too",
            end="",
        )
    assert counts["verified"] >= PIPELINES and counts["fused"] >= 0.3 * PIPELINES


def test_a_failure_prints_a_line_that_repeats_it(monkeypatch):
    from tandem.pipelines.reporting import ReportingMixin, Verification

    monkeypatch.setattr(ReportingMixin, "verify", lambda self, *_, **__: Verification(False, 1, "verify: planted"))
    with pytest.raises(AssertionError, match=r"(?s)verify: planted\n\s*PYTHONPATH=tests python -m differential '\{.*\}'"):
        check_random_pipelines()
