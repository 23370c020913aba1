"""`tandem train` stopped, killed and resumed, and checkpoints that are damaged."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from program import TINY, TRAINER, assert_refused, contents, losses, resume_refused, rows, seal, start_long, train, trainer, validation_bits, wait_for
from safetensors.torch import load_file
from tandem_train.session import load_checkpoint
from tandem_train.training import Training

LONG = [*TINY, "--steps", 60, "--log-every", 1]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    out = tmp_path_factory.mktemp("uninterrupted")
    trainer(*LONG, "--out", out)
    return out


def assert_same_training(out, reference, runs=("plain", "tandem", "fp8")):
    assert losses(out) == losses(reference)
    for run in runs:
        name = f"model-{run}.safetensors"
        assert (out / name).read_bytes() == (reference / name).read_bytes()
    assert validation_bits(out) == validation_bits(reference)
    assert [without_times(row) for row in rows(out)] == [without_times(row) for row in rows(reference)]


def without_times(row):
    """A row of metrics.jsonl but what depends on the machine's speed and free memory."""
    return {key: value for key, value in row.items() if key not in ("tokens_per_second", "peak_memory_bytes")}


def interrupted(monkeypatch, out, number, run, *arguments):
    """A training that gets a signal in the third step of this run."""
    real, done = Training.step, 0

    def step(self, index):
        nonlocal done
        metrics = real(self, index)
        done += self._run == run
        if done == 4:  # a step before the first one warms up
            os.kill(os.getpid(), number)
            if number == signal.SIGHUP:
                os.kill(os.getpid(), number)  # as from a terminal and from its shell
        return metrics

    before = signal.signal(number, signal.SIG_DFL)  # under nohup SIGHUP is ignored
    monkeypatch.setattr(Training, "step", step)
    ended = trainer(*LONG, "--out", out, *arguments, check=False)
    monkeypatch.undo()
    assert signal.signal(number, before) is signal.SIG_DFL
    return ended


@pytest.mark.parametrize("number, run", [(signal.SIGINT, "fp8"), (signal.SIGTERM, "plain"), (signal.SIGHUP, "tandem")])
def test_interrupted_and_resumed_equals_uninterrupted(tmp_path, monkeypatch, uninterrupted, number, run):
    out = tmp_path / "out"
    ended = interrupted(monkeypatch, out, number, run)
    assert ended.returncode == 130 and f"stopped and saved. Go on with: tandem train --resume --out {out}" in ended.stderr
    state, _ = load_checkpoint(out)
    assert state["run_index"] == ["plain", "tandem", "fp8"].index(run) and state["step"] == 3
    trainer("--resume", "--out", out)
    assert_same_training(out, uninterrupted)


def test_a_checkpoint_holds_the_state_of_the_recipe(tmp_path, monkeypatch):
    """Scales and amaxes come from past steps: without them the steps after resuming would be others."""
    reference, out = tmp_path / "reference", tmp_path / "out"
    trainer(*LONG, "--runs", "delayed", "--out", reference)
    interrupted(monkeypatch, out, signal.SIGINT, "delayed", "--runs", "delayed")
    tensors = load_file(out / "checkpoint.safetensors")
    states = "buffer.layers.0.up.recipe_state"
    history = tensors[f"{states}.forward.amax_history"]
    assert history.shape == (1024, 2) and (history[-3:] > 0).all() and (tensors[f"{states}.backward.scale"] > 1).all()
    trainer("--resume", "--out", out)
    assert_same_training(out, reference, ["delayed"])


def test_inspection_goes_on(tmp_path, monkeypatch):
    arguments = ["--runs", "fp8", "--inspect", "--log-every", 20]
    whole = json.loads(trainer(*LONG, *arguments, "--json", "--out", tmp_path / "whole").stdout)["inspection"]
    interrupted(monkeypatch, tmp_path / "out", signal.SIGINT, "fp8", *arguments)
    assert json.loads(trainer("--resume", "--inspect", "--json", "--out", tmp_path / "out").stdout)["inspection"] == whole


def test_nohup_outlives_the_terminal(tmp_path):
    out = tmp_path / "out"
    process = start_long(out, "--runs", "plain", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    wait_for(lambda: (out / "metrics.jsonl").exists(), process)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=120)
    assert process.returncode == 0


def test_killed_leaves_a_usable_checkpoint(tmp_path, uninterrupted):
    out = tmp_path / "out"
    process = start_long(out, "--checkpoint-every", "1")
    wait_for(lambda: (out / "checkpoint.safetensors").exists(), process)
    for _ in range(2):  # whenever it hits
        time.sleep(0.2)
        process.kill()
        process.communicate(timeout=60)
        load_checkpoint(out)
        step = (out / "metrics.jsonl").stat().st_size
        process = subprocess.Popen([TRAINER, "--resume", "--checkpoint-every", "1", "--out", str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        wait_for(lambda least=step: (out / "metrics.jsonl").stat().st_size > least, process)
    process.communicate(timeout=120)
    assert process.returncode == 0
    assert_same_training(out, uninterrupted)
    assert sorted(contents(out)) == sorted(contents(uninterrupted)), "something half written is left"


def test_second_interrupt_ends_at_once(tmp_path):
    code = "import sys, os, signal, tandem_train.training as t; from tandem_train.__main__ import main\n"
    code += "t.Training.step = lambda self, i: [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)]\nmain(sys.argv[1:])"
    done = subprocess.run([sys.executable, "-c", code, *TINY, "--runs", "plain", "--out", tmp_path / "out"], capture_output=True, check=False)
    assert done.returncode == -signal.SIGINT


def test_finished_training_can_be_resumed_and_says_the_same(tmp_path):
    out = tmp_path / "out"
    train(out, "--runs", "plain,tandem", "--checkpoint-every", 5)
    before = rows(out)
    trainer("--resume", "--out", out)
    assert [without_times(row) for row in rows(out)] == [without_times(row) for row in before]


def test_starting_again_says_what_it_replaces(tmp_path):
    out = tmp_path / "out"
    train(out, "--runs", "plain")
    assert "--resume would go on with it" in train(out, "--runs", "plain", "--seed", 3).stderr


def test_resume_without_checkpoint(tmp_path):
    assert_refused(resume_refused(tmp_path), "a checkpoint", "checkpoint.safetensors (No such file", "--resume")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("finished")
    train(out, "--runs", "plain")
    return out, *load_checkpoint(out)


@pytest.fixture
def checkpoint(finished):
    """The folder with its checkpoint, which the test may damage."""
    path = finished[0] / "checkpoint.safetensors"
    whole = path.read_bytes()
    yield finished
    if path.exists() and not path.is_file():
        path.unlink()
    path.write_bytes(whole)


def test_damaged_checkpoint(checkpoint):
    out, _, tensors = checkpoint
    path = out / "checkpoint.safetensors"
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[-1] ^= 1
    counted = whole.replace(b'"step": 12', b'"step": 11')
    assert counted != whole
    for damage in (whole[:-10], whole[:4], b"", bytes(flipped), b"\xff" * 8 + whole[8:], counted):
        path.write_bytes(damage)
        assert_refused(resume_refused(out), "a whole checkpoint of tandem train", "start again without --resume")
    path.unlink()
    os.mkfifo(path)  # which is not waited for
    assert_refused(trainer("--resume", "--out", out, check=False), f"expected a checkpoint, got {path} (not a regular file). ")


# The draw is a fixed one, which has been seen to be right: those behind the first ones find what a new reader of checkpoints gets wrong.
@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_random_damage_is_refused(checkpoint, count):
    """Of damaged checkpoints none goes on: neither other numbers, nor a crash, nor a run without end."""
    out, _, _ = checkpoint
    path, draw = out / "checkpoint.safetensors", random.Random(20240)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for i in range(count):
        begin = draw.randrange(header if i % 2 else len(whole))
        end = min(len(whole), begin + draw.choice([1, 2, 8, 64, 512]))
        kinds = [bytes([whole[begin] ^ 1 << draw.randrange(8)]) + whole[begin + 1 : end], draw.randbytes(end - begin), b"", 2 * whole[begin:end]]
        damaged = whole[:begin] + draw.choice(kinds) + whole[end:]
        path.write_bytes(damaged)
        done = trainer("--resume", "--out", out, check=False)
        assert damaged == whole or (done.returncode == 2 and "--resume" in done.stderr), (begin, end, done)


def test_checkpoint_of_another_state(checkpoint):
    """States that are whole, and not what a training saves."""
    out, state, tensors = checkpoint
    for wrong in (
        *({key: value for key, value in state.items() if key != name} for name in ("configuration", "losses", "text_sha256")),
        *(state | {"step": step} for step in (7, 12.0, -1, 1e300, True, None)),
        *(state | {"run_index": index} for index in (1, -1, "first")),
        *(state | {"log": log} for log in ([{"run": "plain"}], [state["log"][0] | {"run": "another"}], [3])),
        state | {"losses": [None] * len(state["losses"])},
        state | {"results": [{"run": "plain"}]},
        state | {"inspected": [[1]]},
        [],
    ):
        seal(out, wrong, tensors)
        assert_refused(resume_refused(out), "start again without --resume")
    without = {name: tensor for name, tensor in tensors.items() if name != "layers.0.qkv.weight"}
    seal(out, state, without)
    assert_refused(resume_refused(out), "expected layers.0.qkv.weight with shape [96, 32] in the checkpoint, got no such tensor. It belongs to another model")
    seal(out, state, without | {"layers.0.qkv.weight": torch.zeros(96, 32, dtype=torch.float64)})
    assert_refused(resume_refused(out), "layers.0.qkv.weight")


@pytest.mark.parametrize(
    "option, value, expected",
    [
        *(("layers", value, "a whole number from 1 to 1000") for value in (0, 10**9, 1.5, 2**64 + 1, True, "1", None, [1])),
        ("log-every", -1, "a whole number from 1 to 1000000000"),
        ("dtype", "int8", "one of auto, float32, bfloat16"),
        ("dtype", 8, "one of auto, float32, bfloat16"),
        ("learning-rate", 11, "a number from 0 to 10"),
        ("learning-rate", "nan", "a number from 0 to 10"),
        ("clip", 0, "a number from 1e-06 to 1e+06"),
        ("runs", "plain,fast", "some of plain, tandem, float32, bfloat16, fp8"),
        ("hidden", 33, "an even multiple of --heads"),
    ],
)
def test_checkpoint_is_held_to_the_bounds_of_options(checkpoint, option, value, expected):
    out, state, tensors = checkpoint
    seal(out, state | {"configuration": state["configuration"] | {option: value}}, tensors)
    assert_refused(resume_refused(out), option, expected)


def test_mismatched_checkpoint(checkpoint, tmp_path):
    out, state, tensors = checkpoint
    assert_refused(resume_refused(out, "--layers", 2), "--layers 1 as in the checkpoint", "got 2")
    assert_refused(resume_refused(out, "--learning-rate", 0.5), "--learning-rate 0.002", "got 0.5")
    assert_refused(resume_refused(out, "--runs", "fp8"), "--runs plain", "got fp8")
    other = tmp_path / "other.txt"
    other.write_text("another text " * 100)
    assert_refused(resume_refused(out, "--text", other), "the text that the checkpoint was trained on", "other.txt")
    seal(out, state | {"configuration": state["configuration"] | {"hidden": 64}}, tensors)
    assert_refused(resume_refused(out), "embedding.weight with shape [256, 64]", "got [256, 32]")
