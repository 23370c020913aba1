"""How the tests run the programs, and what they read of what these wrote."""

import contextlib
import io
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from tandem_train.__main__ import main
from tandem_train.session import FORMAT, digest

TANDEM = Path(sys.executable).parent / "tandem"
TRAINER = Path(sys.executable).parent / "tandem-train"
TINY = [
    "--layers", "1", "--hidden", "32", "--heads", "2", "--context", "16", "--batch", "2", "--threads", "1", "--dtype", "float32",
]  # fmt: skip
MLP = ["rms_norm:32", "linear:32:128", "swiglu", "linear:64:32"]


def run(*command, check=True, **options):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300, **options)
    if check:
        assert done.returncode == 0, done.stderr
    return done


def tandem(*arguments, **options):
    return run(TANDEM, *arguments, **options)


def trainer(*arguments, check=True, **options):
    """The trainer in this process, which is faster; as a program if the process matters: its input, limits, environment."""
    if options:
        return run(TRAINER, *arguments, check=check, **options)
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            status = main([*map(str, arguments)])
        except SystemExit as ended:  # after --help
            status = ended.code or 0
    done = subprocess.CompletedProcess(arguments, status, out.getvalue(), errors.getvalue())
    assert done.returncode == 0 or not check, done.stderr
    return done


def train(out, *arguments, **options):
    return trainer(*TINY, "--steps", 12, "--log-every", 3, "--out", out, *arguments, **options)


def assert_refused(done, *parts, command="tandem train"):
    """One line "command: expected ..., got ...." on stderr, exit status 2, nothing on stdout."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert re.fullmatch(re.escape(command) + r": expected .+, got.+\. .+[.?]", lines[0]), lines[0]
    for part in parts:
        assert part in lines[0]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder):
    return [(row["run"], row["step"], row["bits_per_byte"]) for row in rows(folder) if "step" in row]


def validation_bits(folder):
    return [row["validation_bits_per_byte"] for row in rows(folder) if row.get("final")]


def wait_for(condition, process, seconds=120):
    limit = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "ended too early"
        assert time.monotonic() < limit, "took too long"
        time.sleep(0.005)


def start_long(out, *arguments, **options):
    """A run of three times 60 steps, in the background."""
    command = [TRAINER, *TINY, "--steps", "60", "--log-every", "1", "--out", str(out), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def resume_refused(out, *arguments):
    before = contents(out)
    done = trainer("--resume", "--out", out, *arguments, check=False)
    assert contents(out) == before, "something was overwritten"
    return done


def seal(folder, state, tensors):
    """Writes a checkpoint as the trainer itself would, whatever it holds."""
    text = json.dumps(state)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    metadata = {"format": FORMAT, "sha256": digest(text, tensors)}
    save_file(tensors | {"state": torch.tensor([*text.encode()], dtype=torch.uint8)}, folder / "checkpoint.safetensors", metadata)
