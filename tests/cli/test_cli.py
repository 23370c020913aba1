"""The `tandem` program from outside: what it prints, writes and exits with."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from program import MLP, TANDEM, TINY, TRAINER, assert_refused, run, tandem, trainer

# The program


def test_help_is_for_new_users():
    text = tandem("--help").stdout
    for part in ("Examples:", "tandem doctor", "train", "explain", "verify", "bench"):
        assert part in text
    assert tandem().stdout == text


@pytest.mark.parametrize("command", ["train", "explain", "verify", "bench", "doctor"])
def test_each_command_has_help(command):
    assert "usage" in tandem(command, "--help").stdout.lower()


def test_version():
    assert re.fullmatch(r"tandem \d+\.\d+\S*\n", tandem("--version").stdout)


def test_unknown_command_suggests_one():
    assert_refused(tandem("trian", check=False), '"trian"', "Did you mean tandem train?", command="tandem")
    assert_refused(tandem("xyzzyx", check=False), '"xyzzyx"', "tandem --help", command="tandem")


# tandem train, which is another program


def test_train_is_the_program_beside_it(tmp_path):
    """Words, options and `--help` are all passed on, and the exit status comes back."""
    assert tandem("train", "--help").stdout == trainer("--help").stdout
    arguments = [*TINY, "--steps", "2", "--runs", "plain", "--json", "--out", tmp_path / "bench"]
    assert json.loads(tandem("train", *arguments).stdout)["finished"]
    for wrong in (["--layers", "0"], ["explain", "--json"], ["--version"]):
        refused = tandem("train", *wrong, check=False)
        assert_refused(refused, wrong[0])
        assert refused.stderr == trainer(*wrong, check=False).stderr


def test_train_without_its_program(tmp_path):
    alone = shutil.copy(TANDEM, tmp_path)
    libraries = ":".join(str(Path(package.origin).parent / "lib") for package in map(find_spec, ("tandem", "torch")))
    done = run(alone, "train", "--help", check=False, env={**os.environ, "LD_LIBRARY_PATH": libraries})
    told = f"got {tmp_path}/tandem-train (No such file or directory). Install the Python package, of which it is a part."
    assert_refused(done, "expected the program tandem-train in the folder of tandem", told)


# Pipelines


def test_explain_formats(tmp_path):
    text = tandem("explain", *MLP).stdout
    assert "forward" in text and "backward" in text and "kept for backward" in text
    assert tandem("explain", *MLP, "--format", "svg").stdout.lstrip().startswith("<svg")
    assert "<html" in tandem("explain", *MLP, "--format", "html").stdout
    document = json.loads(tandem("explain", *MLP, "--format", "json", "--rows", 7).stdout)
    assert document["rows"] == 7 and document["pipeline"] == MLP and "plans" in document
    assert json.loads(tandem("explain", *MLP, "--json").stdout)["command"] == "explain"
    output = tmp_path / "plan.svg"
    assert tandem("explain", *MLP, "--format", "svg", "--output", output).stdout == ""
    assert "<svg" in output.read_text()


@pytest.mark.parametrize("recipe", ["none", "fp8", "delayed", "block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_verify_passes(recipe, dtype):
    arguments = ["verify", *MLP, "--recipe", recipe, "--dtype", dtype, "--rows", 32]
    if dtype == "float32":  # each recipe tells both
        assert "passed" in tandem(*arguments).stdout
    else:
        assert json.loads(tandem(*arguments, "--json").stdout)["passed"]


EVERY_OP = [
    "make_extra_output", "make_extra_output:skip", "rms_norm:32:1e-6", "linear:32:64:nobias", "swiglu", "layer_norm:32",
    "linear:32:64", "geglu", "gelu", "silu", "relu", "identity", "dropout:0.1", "constant_scale:0.5", "reshape:-1:4:8",
    "reshape:-1:32", "linear:32:64", "swiglu:8", "linear:32:128", "situglu:3:20", "clamped_swiglu:5:1.5:0.5:16", "qgelu", "srelu", "sigmoid",
    "quantize", "add_extra_input:skip", "add_extra_input", "rms_norm:32:1e-5:zero_centered_gamma", "rms_norm:32:1e-5:rounds_before_weight:zero_centered_gamma",
    "rms_norm:32:1e-5:rounds_before_weight", "bias:32",
]  # fmt: skip


def test_every_op_can_be_written():
    tandem("explain", *EVERY_OP, "--rows", 16)
    help_text = tandem("explain", "--help").stdout
    for op in EVERY_OP:
        assert re.search(rf"^  {op.split(':')[0]}\b", help_text, re.MULTILINE), op


@pytest.mark.parametrize(
    "pipeline, parts",
    [
        (["rmsnorm:32"], ["an op (", '"rmsnorm"', "Did you mean rms_norm?"]),
        (["linear:32"], ['linear:IN:OUT[:nobias], got "linear:32" without OUT']),
        (["linear"], ['got "linear" without IN']),
        (["linear:32:x"], ["OUT, argument 2 of linear:IN:OUT[:nobias], to be a whole number from 1", 'got "x" in "linear:32:x"']),
        (["linear:0:8"], ["IN, argument 1 of linear:IN:OUT[:nobias], to be a whole number from 1", 'got "0" in "linear:0:8"']),
        (["linear:32:-4"], ["OUT,", 'got "-4"']),
        (["linear:32:1.5"], ["OUT,", 'got "1.5"']),
        (["linear:32:1e3"], ["OUT,", 'got "1e3"']),
        (["linear:32:"], ["OUT,", 'got ""']),
        (["linear:32:+4"], ["OUT,", 'got "+4"']),
        (["linear:32: 4"], ["OUT,", 'got " 4"']),
        (["linear:32:99999999999999999999"], ["OUT,", "from 1 to 2147483648", 'got "99999999999999999999"']),
        (["linear:32:4:bias"], ["argument 3 of linear:IN:OUT[:nobias] to be nobias", 'got "bias" in "linear:32:4:bias"']),
        (["linear:32:4:nobias:5"], ["with at most 3 arguments", 'got 4 in "linear:32:4:nobias:5"']),
        (["linear:1000000:1000000000"], ["this machine's memory", "the weight of linear:1000000:1000000000"]),
        (["reshape:0", "--width", "8"], ["SIZE, argument 1 of reshape:SIZE[:SIZE...], to be -1 or a whole number from 1", 'got "0"']),
        (["reshape:-2", "--width", "8"], ["SIZE,", 'got "-2"']),
        (["reshape", "--width", "8"], ['got "reshape" without SIZE']),
        (["reshape:1:1:1:1:1:8", "--width", "8"], ["with at most 5 arguments", "got 6"]),
        (["reshape" + 5 * ":2147483648", "--width", "8"], ["this machine's memory", "the result of reshape"]),
        *(([f"{norm}:8:{eps}"], [f"EPS, argument 2 of {norm}:HIDDEN[:EPS][:zero_centered_gamma", "], to be a finite number that is at least 0", f'got "{eps}"'])
          for norm in ("rms_norm", "layer_norm") for eps in ("nan", "inf", "-1e-5", "1e999", "", "x")),
        (["rms_norm:0"], ["HIDDEN,", 'got "0"']),
        (["dropout:1.5", "--width", "8"], ["P, argument 1 of dropout[:P], to be a number from 0 to 1", 'got "1.5"']),
        (["dropout:nan", "--width", "8"], ["P,", 'got "nan"']),
        (["constant_scale:inf", "--width", "8"], ["FACTOR,", "to be a finite number", 'got "inf"']),
        (["constant_scale:1e999", "--width", "8"], ["FACTOR,", 'got "1e999"']),
        (["quantize:sideways", "--width", "8"], ["one of forward, backward, both", 'got "sideways"']),
        (["make_extra_output:", "--width", "8"], ["CHANNEL,", "a text that is not empty", 'got ""']),
        (["layer_norm:8:1e-5:centered"], ["argument 3 of layer_norm:HIDDEN[:EPS][:zero_centered_gamma] to be zero_centered_gamma", 'got "centered"']),
        (["rms_norm:8:1e-5:rounds_before_weight:round"], ["argument 4 of rms_norm:HIDDEN[:EPS]", "to be one of zero_centered_gamma, rounds_before_weight", 'got "round"']),
        (["gelu:3"], ["expected gelu without arguments", 'got 1 in "gelu:3"']),
        (["swiglu:-1"], ["GLU_INTERLEAVE_SIZE, argument 1 of swiglu[:GLU_INTERLEAVE_SIZE], to be a whole number from 0", 'got "-1"']),
        (["situglu:inf"], ["BETA1, argument 1 of situglu[:BETA1][:BETA2][:GLU_INTERLEAVE_SIZE], to be a finite number", 'got "inf"']),
        ([""], ["an op (", 'got ""']),
        (["swiglu"] * 80 + ["rms_norm:8"], ["this machine's memory", "the input"]),
        (["gelu", "--rows", "16777216", "--width", "16777216"], ["this machine's memory", "the input"]),
        (["swiglu"], ["--width", "none"]),
    ],
)
def test_pipeline_syntax_errors(pipeline, parts):
    command = ("explain", "verify", "bench")[len(str(pipeline)) % 3]  # they share the syntax
    assert_refused(tandem(command, *pipeline, check=False), *parts, command=f"tandem {command}")


def test_pipeline_missing():
    assert_refused(tandem("explain", check=False), "PIPELINE", command="tandem explain")


def test_shapes_that_do_not_fit():
    done = tandem("explain", "linear:32:64", "linear:63:32", check=False)
    assert done.returncode == 2
    assert re.fullmatch(r"tandem explain: .*expected .+, got .+\n", done.stderr), done.stderr
    done = tandem("explain", "reshape:-1:-1", "--width", 8, check=False)
    assert done.returncode == 2 and "reshape: expected option shape to be at most 64 sizes >= 0, one of which may be -1, of a " in done.stderr


def test_bench_covers_every_quantizer():
    document = json.loads(tandem("bench", "quantizers", "--rows", 32, "--width", 64, "--rounds", 3, "--json").stdout)
    assert {row["recipe"] for row in document["quantizers"]} == {"fp8", "delayed", "block", "mxfp8", "nvfp4"}
    texts = [row["quantizer"] for row in document["quantizers"]]
    assert any("fp4" in text and ":sr" in text for text in texts) and any("e5m2" in text for text in texts)
    assert all(row["seconds"] > 0 and row["share_of_copy"] > 0 for row in document["quantizers"])
    assert "share of copy" in tandem("bench", "quantizers", "--rows", 32, "--rounds", 1, "--dtype", "bfloat16").stdout


def test_bench_reports_both():
    document = json.loads(tandem("bench", *MLP, "--rounds", 3, "--json").stdout)
    for direction in ("forward", "forward_backward"):
        assert document[direction]["plain_seconds"] > 0 and document[direction]["tandem_seconds"] > 0
        assert document[direction]["unit"] == "GFLOP/s"
    document = json.loads(tandem("bench", "swiglu", "--width", 64, "--rounds", 3, "--json").stdout)
    assert document["forward"]["unit"] == "GB/s"
    tandem("bench", *EVERY_OP, "--rows", 16, "--rounds", 3)
    text = tandem("bench", *MLP, "--rounds", 3).stdout
    assert "tandem/plain" in text and "kept for backward" in text


def test_doctor():
    text = tandem("doctor").stdout
    for part in ("tandem", "libtorch", "CPU kernels", "threads", "GPU"):
        assert part in text
    document = json.loads(tandem("doctor", "--json").stdout)
    assert document["healthy"] and document["cpu_targets"] and document["threads"] >= 1


def test_the_best_instruction_set_can_be_chosen():
    def targets(best):
        return json.loads(tandem("doctor", "--json", env={**os.environ, "TANDEM_MAX_CPU_ISA": best}).stdout)["cpu_targets"]

    everything = targets("avx512")
    assert targets("avx2") == [name for name in everything if name != "AVX3"]
    assert targets("baseline") == everything[-1:]


@pytest.mark.parametrize("command", [[TANDEM, "doctor"], [sys.executable, "-c", "import tandem"]], ids=["program", "import"])
def test_an_unknown_instruction_set_is_refused(command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "TANDEM_MAX_CPU_ISA": "sse9"})
    text = 'TANDEM_MAX_CPU_ISA: expected avx512, avx2 or baseline, got "sse9". Set it to one of these, or unset it.'
    assert done.returncode == 1 and done.stderr.endswith(text + "\n") and "terminate" not in done.stderr
