"""The differential machine (tests/differential): that it finds what is planted. Its campaigns are a stage of .ci/run, `make fuzz` another."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS))

import tandem  # noqa: E402
from differential import attention  # noqa: E402
from differential import case as cases  # noqa: E402
from differential.campaign import found_before  # noqa: E402
from differential.generate import generate  # noqa: E402

FOUND = found_before()
EAGER = [case for _, case in FOUND if case["mode"].get("run") != "compile"]

PLANTED = """
import os, sys
import torch
from differential import campaign, case, python_ops
import differential.check

def slope_off_by_a_thousandth(self, ctx, grad_output):
    (x,) = ctx.saved_tensors
    return grad_output * torch.cos(x) * 1.001, ()

def crash(self, ctx, input_, **_):
    os.abort()

found = [(name, each) for name, each in campaign.found_before() if each["mode"].get("run") != "compile"]
count = campaign.campaign(found, "eager", report=lambda text: print(text, file=sys.stderr))
print("found before:", sum(count.statuses.values()), [name for name, _, _ in count.failures])
pipeline = case.parse('{"x": {"s": (2, 3, 8), "l": "t"}, "ops": [{"k": "rms"}, {"k": "linear", "out": 6}, {"k": "py_sin"}, {"k": "relu"}], "mode": {"bw": "acc"}, "seed": 3}')
assert campaign.judge_alone(pipeline).status == "right"
python_ops.Sin.op_backward = slope_off_by_a_thousandth
found = campaign.judge_alone(pipeline)
smaller, verdict = campaign.shrunk(pipeline, found, 600.0)
print("gradient:", found.status, [op["k"] for op in smaller["ops"]], smaller["mode"], verdict.status)
python_ops.Sin.op_forward = crash
plain = {**pipeline, "ops": pipeline["ops"][:1]}
count = campaign.campaign([("before", plain), ("this one", pipeline), ("after", plain)], "eager", report=lambda _: None)
print("crash:", dict(count.statuses), [name for name, _, _ in count.failures])
"""


def run(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=900, check=False)


def test_what_is_planted_is_found_and_shrunk_and_what_was_found_is_right_now():
    done = run("-c", PLANTED)
    assert done.stdout.splitlines() == [
        f"found before: {len(EAGER)} []",
        "gradient: wrong ['py_sin'] {} wrong",
        "crash: {'right': 2, 'crashed': 1} ['this one']",
    ], done.stdout + done.stderr


def test_a_seed_is_a_case():
    eager, compiled = (cases.text_of(generate(17, kind)) for kind in ("eager", "compiled"))
    done = run("-m", "differential", "eager:17", "compiled:17", eager)
    assert done.returncode == 0 and done.stdout.splitlines()[::2] == [eager, compiled, eager], done.stdout + done.stderr


def test_the_cases_that_were_found_are_read():
    """Those that are compiled run in the stage of .ci/run alone."""
    assert len(FOUND) > len(EAGER) > 0 and all(name and cases.parse(cases.text_of(case)) == case for name, case in FOUND)


def test_attention_is_plain_attention(monkeypatch):
    """Of random calls, and where a beam search forgets to reorder its cache they say so."""
    assert attention.campaign(1, 150) == []
    monkeypatch.setattr(tandem.InferenceParams, "swap_key_value_dict", lambda cache, indices: None)
    found = attention.campaign(1, 150)
    assert found and all("y is off by" in text and '"pieces"' in text for text in found)
