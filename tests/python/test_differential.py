"""The differential machine (tests/differential): that it finds what is planted, and that what it once found stays mended."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent

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


def test_what_is_planted_is_found_and_shrunk():
    done = run("-c", PLANTED)
    assert done.stdout.splitlines() == [
        "gradient: wrong ['py_sin'] {} wrong",
        "crash: {'right': 2, 'crashed': 1} ['this one']",
    ], done.stdout + done.stderr


def test_a_seed_is_a_case():
    first, second = (run("-m", "differential", "eager:17", "compiled:17") for _ in range(2))
    assert first.returncode == 0 and first.stdout == second.stdout
    text = first.stdout.splitlines()[0]
    assert run("-m", "differential", text).stdout.splitlines()[0] == text


def test_what_was_found_before_is_right_now_and_so_are_fixed_seeds():
    done = run("-m", "differential", "--found", "--first", "1", "--eager", "400")
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
