"""The `tandem` program from outside: what it prints, writes and exits with."""

import json
import os
import re
import subprocess
import sys

import pytest
from program import MLP, TANDEM, TINY, assert_refused, losses, rows, tandem, train, validation_bits

# The program


def test_help_is_for_new_users():
    text = tandem("--help").stdout
    for part in ("Examples:", "tandem doctor", "train", "explain", "verify", "bench"):
        assert part in text
    assert tandem().stdout == text


@pytest.mark.parametrize("command", ["train", "explain", "verify", "bench", "doctor"])
def test_each_command_has_help(command):
    assert "Usage" in tandem(command, "--help").stdout


def test_version():
    assert re.fullmatch(r"tandem \d+\.\d+\S*\n", tandem("--version").stdout)


def test_unknown_command_suggests_one():
    assert_refused(tandem("trian", check=False), '"trian"', "Did you mean tandem train?", command="tandem")
    assert_refused(tandem("xyzzyx", check=False), '"xyzzyx"', "tandem --help", command="tandem")


def test_unknown_option():
    assert_refused(tandem("train", "--color", check=False), "--color", "tandem train --help")


@pytest.mark.parametrize(
    "option, value, expected",
    [
        ("--layers", "0", "a whole number from 1 to 1000"),
        ("--layers", "two", "a whole number from 1 to 1000"),
        ("--batch", "-5", "a whole number from 1"),
        ("--learning-rate", "fast", "a number from 0 to 10"),
        ("--learning-rate", "nan", "a number from 0 to 10"),
        ("--dtype", "float64", "one of auto, float32, bfloat16"),
        ("--runs", "plain,fast", "some of plain, tandem, float32, bfloat16, fp8"),
        ("--runs", "plain,plain", "each run once"),
        ("--heads", "5", "an even multiple of --heads"),
    ],
)
def test_option_errors(tmp_path, option, value, expected):
    out = tmp_path / "out"
    assert_refused(train(out, option, value, check=False), option, expected, value)
    assert not out.exists()


# tandem train: what it is given


def test_text_errors(tmp_path):
    out = tmp_path / "out"
    empty, short = tmp_path / "empty.txt", tmp_path / "short.txt"
    empty.write_text("")
    short.write_text("too short")
    assert_refused(train(out, "--text", tmp_path / "none.txt", check=False), "none.txt (No such file", "--text")
    assert_refused(train(out, "--text", tmp_path, check=False), "(a folder)")
    assert_refused(train(out, "--text", "/dev/zero", check=False), "(a device, which need not have an end)")
    assert_refused(train(out, "--text", empty, check=False), "at least 170 bytes", "got 0 in")
    assert_refused(train(out, "--text", short, check=False), "at least 170 bytes", "got 9 in")
    assert not out.exists()


def test_unreadable_text(tmp_path):
    # /proc/self/mem opens but cannot be read at its start, whoever runs this
    assert_refused(train(tmp_path / "out", "--text", "/proc/self/mem", check=False), "/proc/self/mem", "--text")


def test_unwritable_out_folder(tmp_path):
    occupied = tmp_path / "occupied"
    occupied.write_text("mine")
    assert_refused(train(occupied, check=False), "a folder that can be written", "occupied", "--out")
    assert_refused(train(occupied / "below", check=False), "a folder that can be written", "--out")
    assert_refused(train("/proc/tandem", check=False), "a folder that can be written", "--out")
    assert occupied.read_text() == "mine"


def test_text_of_any_bytes(tmp_path):
    text = tmp_path / "bytes.bin"
    text.write_bytes(bytes(range(256)) * 8)
    done = train(tmp_path / "out", "--text", text, "--runs", "plain")
    assert "bits/byte" in done.stdout


# tandem train: what it writes


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("trained")
    return out, train(out, "--checkpoint-every", 5)


def test_runs_agree(trained):
    out, done = trained
    final = {row["run"]: row for row in rows(out) if row.get("final")}
    assert list(final) == ["plain", "tandem", "fp8"]
    bits = {run: row["validation_bits_per_byte"] for run, row in final.items()}
    assert bits["tandem"] == pytest.approx(bits["plain"], abs=1e-3)
    assert bits["fp8"] == pytest.approx(bits["plain"], abs=0.05)
    for row in final.values():
        assert 0 < row["validation_bits_per_byte"] < 8.5
        assert row["tokens_per_second"] > 0 and row["saved_bytes_per_token"] > 0
    assert final["tandem"]["saved_bytes_per_token"] <= final["plain"]["saved_bytes_per_token"]


def test_metrics_have_a_row_per_logged_step(trained):
    out, _ = trained
    expected = [(run, step) for run in ("plain", "tandem", "fp8") for step in (3, 6, 9, 12)]
    assert [row[:2] for row in losses(out)] == expected


def test_inspection_is_in_the_report(tmp_path):
    done = train(tmp_path / "out", "--runs", "plain,fp8,delayed", "--inspect", "--json")
    found = json.loads(done.stdout)["inspection"]
    tensors = {row["tensor"] for row in found}
    assert {f"layers.0.{product}: {role}" for product in ("qkv", "projection", "up", "down") for role in ("input", "weight", "grad_output")} <= tensors
    assert {"head: input", "head: weight"} <= tensors and {row["run"] for row in found} == {"fp8", "delayed"}
    assert {row["step"] for row in found} == {1, 3, 6, 9, 12}
    report = (tmp_path / "out" / "report.html").read_text()
    assert "What quantizing does to each tensor" in report and "fp8, layers.0.up: weight" in report
    plain = train(tmp_path / "other", "--runs", "plain,fp8,delayed")
    assert losses(tmp_path / "other") == losses(tmp_path / "out") and "What quantizing" not in (tmp_path / "other" / "report.html").read_text()
    assert "warning" not in plain.stderr


def test_a_step_that_saturates_is_told_of(tmp_path):
    # The first scale of delayed scaling is 1: what is larger than 448 saturates. A learning rate like this makes it so.
    done = train(tmp_path / "out", "--runs", "delayed", "--inspect", "--learning-rate", 10, "--warmup", 0, "--clip", 1000000, check=False)
    assert "tandem train: warning: expected " in done.stderr and "beyond the format's range in step" in done.stderr
    warned = [line.split(" of run ")[0] for line in done.stderr.splitlines() if "warning" in line]
    assert len(warned) == len(set(warned)), "each tensor once"


def test_every_recipe_and_dtype_is_a_run(tmp_path):
    runs = ["float32", "bfloat16", "fp8", "delayed", "block", "mxfp8", "nvfp4"]
    train(tmp_path / "out", "--runs", ",".join(runs), "--steps", 6)
    final = {row["run"]: row for row in rows(tmp_path / "out") if row.get("final")}
    assert [*final] == runs
    assert final["bfloat16"]["saved_bytes_per_token"] < final["float32"]["saved_bytes_per_token"]


def test_table_and_progress(trained):
    _, done = trained
    assert "kept for backward" in done.stdout and "Text drawn from the last model" in done.stdout
    assert "ETA" in done.stderr and "tokens/s" in done.stderr
    assert "\r" not in done.stderr  # no redrawing where nobody looks


def test_progress_is_one_line_on_a_terminal(tmp_path):
    primary, secondary = os.openpty()
    command = [TANDEM, "train", *TINY, "--steps", "5", "--runs", "plain", "--out", tmp_path / "out"]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=secondary, timeout=300)
    os.close(secondary)
    shown = os.read(primary, 65536).decode()
    os.close(primary)
    assert done.returncode == 0
    bar = [line for line in shown.splitlines() if "ETA" in line]
    assert "\r\x1b[K" in shown and "5/5" in shown and bar


def test_report_stands_alone(trained):
    out, _ = trained
    html = (out / "report.html").read_text()
    assert html.count("<polyline") == 3 and "bits per byte" in html and ">step<" in html
    assert 'class="plan"' in html and html.count("<svg") == 2
    assert "prefers-color-scheme: dark" in html
    without_namespaces = re.sub(r'xmlns(:\w+)?="[^"]*"|url\(#\w+\)', "", html)  # url(#m) is a mark of the page's own
    for reference in ("http:", "https:", "src=", "href=", "url(", "@import", "<link", "<script"):
        assert reference not in without_namespaces, reference


def test_models_are_safetensors(trained):
    out, _ = trained
    for run in ("plain", "tandem", "fp8"):
        data = (out / f"model-{run}.safetensors").read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        assert (8 + length) % 8 == 0
        assert header["layers.0.qkv.weight"]["shape"] == [96, 32] and header["layers.0.qkv.weight"]["dtype"] == "F32"
        assert max(entry["data_offsets"][1] for entry in header.values()) == len(data) - 8 - length


def test_only_the_last_checkpoint_is_kept(trained):
    out, _ = trained
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-fp8-12.safetensors"]
    assert not list(out.glob("*.tmp"))


def test_same_seed_same_numbers_other_seed_others(trained, tmp_path):
    out, _ = trained
    train(tmp_path / "same", "--runs", "plain")
    train(tmp_path / "other", "--runs", "plain", "--seed", 2)
    assert losses(tmp_path / "same") == losses(out)[:4]
    assert losses(tmp_path / "other") != losses(out)[:4]


def test_json_is_one_document(tmp_path):
    done = train(tmp_path / "out", "--runs", "tandem", "--json")
    document = json.loads(done.stdout)
    assert done.stderr == ""
    assert document["finished"] and [result["run"] for result in document["results"]] == ["tandem"]
    assert document["configuration"]["layers"] == 1 and document["log"] and document["sample"]


def test_diverged_training_says_so(tmp_path):
    explosive = ["--learning-rate", 10, "--weight-decay", 10, "--warmup", 0, "--steps", 60]
    done = train(tmp_path / "out", *explosive, check=False)
    assert done.returncode == 2
    assert re.search(r"expected a finite loss, got .*nan at step \d+ of run plain\. Pass", done.stderr)


def test_option_given_twice_counts_once(tmp_path):
    document = json.loads(train(tmp_path / "out", "--runs", "plain", "--seed", 4, "--seed", 5, "--json").stdout)
    assert document["configuration"]["seed"] == 5


def test_bfloat16_keeps_float32_copies(tmp_path):
    train(tmp_path / "out", "--runs", "plain,tandem", "--dtype", "bfloat16")
    plain, ours = validation_bits(tmp_path / "out")
    assert ours == pytest.approx(plain, abs=0.05)
    data = (tmp_path / "out" / "model-tandem.safetensors").read_bytes()
    assert b'"BF16"' not in data[: 8 + int.from_bytes(data[:8], "little")]


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
