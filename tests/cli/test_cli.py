"""The `tandem` program from outside: what it prints, writes and exits with."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TANDEM = Path(sys.executable).parent / "tandem"
TINY = [
    "--layers", "1", "--hidden", "32", "--heads", "2", "--context", "16", "--batch", "2", "--threads", "1", "--dtype", "float32",
]  # fmt: skip
MLP = ["rms_norm:32", "linear:32:128", "swiglu", "linear:64:32"]


def tandem(*arguments, check=True, **options):
    done = subprocess.run([TANDEM, *map(str, arguments)], capture_output=True, text=True, timeout=300, **options)
    if check:
        assert done.returncode == 0, done.stderr
    return done


def train(out, *arguments, **options):
    return tandem("train", *TINY, "--steps", 12, "--log-every", 3, "--out", out, *arguments, **options)


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
        ("--runs", "plain,fast", "some of plain, tandem, fp8"),
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


# Stopping and going on


def wait_for(condition, process, seconds=120):
    limit = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "ended too early"
        assert time.monotonic() < limit, "took too long"
        time.sleep(0.005)


def start_long(out, *arguments):
    """A run of three times 60 steps, in the background."""
    command = [TANDEM, "train", *TINY, "--steps", "60", "--log-every", "1", "--out", str(out), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    out = tmp_path_factory.mktemp("uninterrupted")
    tandem("train", *TINY, "--steps", 60, "--log-every", 1, "--out", out)
    return out


def assert_same_training(out, reference):
    assert losses(out) == losses(reference)
    for run in ("plain", "tandem", "fp8"):
        name = f"model-{run}.safetensors"
        assert (out / name).read_bytes() == (reference / name).read_bytes()
    assert validation_bits(out) == validation_bits(reference)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("run", ["plain", "fp8"])
def test_interrupted_and_resumed_equals_uninterrupted(tmp_path, uninterrupted, number, run):
    out = tmp_path / "out"
    process = start_long(out)
    logged = out / "metrics.jsonl"
    wait_for(lambda: logged.exists() and f'"run":"{run}","step":3' in logged.read_text(), process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"stopped and saved. Go on with: tandem train --resume --out {out}" in errors
    state = json.loads((out / "checkpoint.json").read_text())
    assert state["run"] == run and 3 <= state["step"] < 60
    tandem("train", "--resume", "--out", out)
    assert_same_training(out, uninterrupted)


def test_killed_leaves_a_usable_checkpoint(tmp_path, uninterrupted):
    out = tmp_path / "out"
    process = start_long(out, "--checkpoint-every", "1")
    wait_for(lambda: (out / "checkpoint.json").exists(), process)
    for _ in range(3):  # whenever it hits, also between the two files of a checkpoint
        time.sleep(0.1)
        process.kill()
        process.communicate(timeout=60)
        state = json.loads((out / "checkpoint.json").read_text())
        assert (out / state["tensors"]["file"]).stat().st_size == state["tensors"]["bytes"]
        process = subprocess.Popen(
            [TANDEM, "train", "--resume", "--checkpoint-every", "1", "--out", str(out)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        time.sleep(0.4)
    process.communicate(timeout=120)
    assert process.returncode == 0
    assert_same_training(out, uninterrupted)


def test_finished_training_can_be_resumed_and_says_the_same(trained, tmp_path):
    out, _ = trained
    before = losses(out)
    tandem("train", "--resume", "--out", out)
    assert losses(out) == before


def test_starting_again_says_what_it_replaces(trained, tmp_path):
    out = tmp_path / "out"
    train(out, "--runs", "plain")
    assert "--resume would go on with it" in train(out, "--runs", "plain", "--seed", 3).stderr


def resume_refused(out, *arguments):
    before = contents(out)
    done = tandem("train", "--resume", "--out", out, *arguments, check=False)
    assert contents(out) == before, "something was overwritten"
    return done


def test_resume_without_checkpoint(tmp_path):
    assert_refused(resume_refused(tmp_path), "a checkpoint", "checkpoint.json (No such file", "--resume")


@pytest.fixture
def checkpoint(tmp_path):
    out = tmp_path / "out"
    train(out, "--runs", "plain", "--checkpoint-every", 5)
    return out, next(out.glob("checkpoint-*.safetensors"))


def test_damaged_checkpoint(checkpoint):
    out, tensors = checkpoint
    whole = tensors.read_bytes()
    flipped = bytearray(whole)
    flipped[-1] ^= 1
    for damage in (whole[:-10], whole[:4], b"", bytes(flipped), b"\xff" * 8 + whole[8:]):
        tensors.write_bytes(damage)
        assert_refused(resume_refused(out), "checksum", "damaged")
    tensors.unlink()
    assert_refused(resume_refused(out), tensors.name, "No such file")


def test_damaged_checkpoint_header(checkpoint):
    """A header that is wrong although size and checksum agree: each number of it is checked as well."""
    out, tensors = checkpoint
    whole = tensors.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    name = "layers.0.qkv.weight"

    def refused(document, expected, prefix=None):
        text = document if isinstance(document, bytes) else json.dumps(document).encode()
        data = (prefix or len(text).to_bytes(8, "little")) + text + whole[8 + length :]
        tensors.write_bytes(data)
        state = json.loads((out / "checkpoint.json").read_text())
        state["tensors"] |= {"bytes": len(data), "fnv1a64": fnv1a64(data)}
        (out / "checkpoint.json").write_text(json.dumps(state))
        assert_refused(resume_refused(out), expected)

    refused(b"not JSON", "a JSON object as header")
    refused(header, "bytes", prefix=(1 << 60).to_bytes(8, "little"))
    refused(header | {name: header[name] | {"dtype": "F4"}}, "a known dtype")
    refused(header | {name: header[name] | {"shape": [1 << 40, 1 << 40]}}, "a shape")
    refused(header | {name: header[name] | {"shape": [-1, 32]}}, "a shape")
    refused(header | {name: header[name] | {"data_offsets": [0, 1 << 50]}}, "bytes of data")
    refused(header | {name: {"dtype": "F32"}}, "dtype, shape and data_offsets")
    refused({key: value for key, value in header.items() if key != name}, f"{name} with shape")


def fnv1a64(data):
    state = 0xCBF29CE484222325
    for byte in data:
        state = (state ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{state:016x}"


def test_damaged_checkpoint_json(checkpoint):
    out, _ = checkpoint
    path = out / "checkpoint.json"
    whole = path.read_text()
    state = json.loads(whole)
    damages = [
        "",
        whole[: len(whole) // 2],
        "[]",
        json.dumps(state | {"format": "another"}),
        json.dumps({key: value for key, value in state.items() if key != "configuration"}),
        json.dumps({key: value for key, value in state.items() if key != "tensors"}),
        json.dumps({key: value for key, value in state.items() if key != "losses"}),
        json.dumps(state | {"step": 7}),
        json.dumps(state | {"run_index": "first"}),
    ]
    for damage in damages:
        path.write_text(damage)
        assert_refused(resume_refused(out), "start again without --resume")


def test_mismatched_checkpoint(checkpoint, tmp_path):
    out, _ = checkpoint
    assert_refused(resume_refused(out, "--layers", 2), "--layers 1 as in the checkpoint", "got 2")
    assert_refused(resume_refused(out, "--learning-rate", 0.5), "--learning-rate 0.002", "got 0.5")
    assert_refused(resume_refused(out, "--runs", "fp8"), "--runs plain", "got fp8")
    other = tmp_path / "other.txt"
    other.write_text("another text " * 100)
    assert_refused(resume_refused(out, "--text", other), "the text that the checkpoint was trained on", "other.txt")
    state = json.loads((out / "checkpoint.json").read_text())
    state["configuration"]["hidden"] = 64
    (out / "checkpoint.json").write_text(json.dumps(state))
    assert_refused(resume_refused(out), "embedding.weight with shape [256, 64]", "got [256, 32]")


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


@pytest.mark.parametrize("recipe", ["none", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_verify_passes(recipe, dtype):
    arguments = ["verify", *MLP, "--recipe", recipe, "--dtype", dtype, "--rows", 32]
    assert "passed" in tandem(*arguments).stdout
    assert json.loads(tandem(*arguments, "--json").stdout)["passed"]


EVERY_OP = [
    "make_extra_output", "make_extra_output:skip", "rms_norm:32:1e-6", "linear:32:64:nobias", "swiglu", "layer_norm:32",
    "linear:32:64", "geglu", "gelu", "silu", "relu", "identity", "dropout:0.1", "constant_scale:0.5", "reshape:-1:4:8",
    "reshape:-1:32", "quantize", "add_extra_input:skip", "add_extra_input",
]  # fmt: skip


def test_every_op_can_be_written():
    tandem("explain", *EVERY_OP, "--rows", 16)
    help_text = tandem("explain", "--help").stdout
    for op in EVERY_OP:
        assert re.search(rf"^  {op.split(':')[0]}\b", help_text, re.MULTILINE), op


@pytest.mark.parametrize("command", ["explain", "verify", "bench"])
@pytest.mark.parametrize(
    "pipeline, parts",
    [
        (["rmsnorm:32"], ["an op (", '"rmsnorm"', "Did you mean rms_norm?"]),
        (["linear:32"], ["linear:IN:OUT[:nobias]", '"linear:32"']),
        (["linear:32:x"], ["linear:IN:OUT[:nobias]", '"linear:32:x"']),
        (["linear:32:-4"], ["linear:IN:OUT[:nobias]", '"linear:32:-4"']),
        (["linear:32:4:bias"], ["linear:IN:OUT[:nobias]", '"linear:32:4:bias"']),
        (["swiglu:3"], ["expected swiglu", '"swiglu:3"']),
        (["swiglu"], ["--width", "none"]),
    ],
)
def test_pipeline_syntax_errors(command, pipeline, parts):
    assert_refused(tandem(command, *pipeline, check=False), *parts, command=f"tandem {command}")


def test_pipeline_missing():
    assert_refused(tandem("explain", check=False), "PIPELINE", command="tandem explain")


def test_shapes_that_do_not_fit():
    done = tandem("explain", "linear:32:64", "linear:63:32", check=False)
    assert done.returncode == 2
    assert re.fullmatch(r"tandem explain: .*expected .+, got .+\n", done.stderr), done.stderr


def test_bench_reports_both():
    document = json.loads(tandem("bench", *MLP, "--rounds", 3, "--json").stdout)
    for direction in ("forward", "forward_backward"):
        assert document[direction]["plain_seconds"] > 0 and document[direction]["tandem_seconds"] > 0
        assert document[direction]["unit"] == "GFLOP/s"
    document = json.loads(tandem("bench", "swiglu", "--width", 64, "--rounds", 3, "--json").stdout)
    assert document["forward"]["unit"] == "GB/s"
    text = tandem("bench", *MLP, "--rounds", 3).stdout
    assert "tandem/plain" in text and "kept for backward" in text


def test_doctor():
    text = tandem("doctor").stdout
    for part in ("tandem", "libtorch", "CPU kernels", "threads", "GPU"):
        assert part in text
    document = json.loads(tandem("doctor", "--json").stdout)
    assert document["healthy"] and document["cpu_targets"] and document["threads"] >= 1
