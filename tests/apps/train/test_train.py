"""`tandem train` from outside: what it is given, prints, writes and exits with."""

import json
import os
import re
import resource
import subprocess

import pytest
from program import TINY, TRAINER, assert_refused, losses, rows, train, trainer, validation_bits
from tandem_train.session import load_checkpoint


def test_unknown_option():
    assert_refused(trainer("--color", check=False), "--color", "tandem train --help")


@pytest.mark.parametrize(
    "option, value, expected",
    [
        ("--layers", "0", "a whole number from 1 to 1000"),
        ("--layers", "two", "a whole number from 1 to 1000"),
        ("--batch", "-5", "a whole number from 1"),
        ("--learning-rate", "fast", "a number from 0 to 10"),
        ("--steps", "+5", "a whole number from 1"),
        ("--learning-rate", "1_0", "a number from 0 to 10"),
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


# What it is given


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
    assert_refused(train(out, "--text", "/proc/self/mem", check=False), "/proc/self/mem", "--text")  # opens but cannot be read at its start, whoever runs this
    assert not out.exists()


def test_unwritable_out_folder(tmp_path):
    occupied = tmp_path / "occupied"
    occupied.write_text("mine")
    assert_refused(train(occupied, check=False), "a folder that can be written", "occupied", "--out")
    assert_refused(train(occupied / "below", check=False), "a folder that can be written", "--out")
    assert_refused(train("", check=False), "a folder that can be written", "--out")
    assert_refused(train("/proc/tandem", check=False), "a folder that can be written", "--out")
    assert occupied.read_text() == "mine"


def test_text_of_any_bytes(tmp_path):
    text = tmp_path / os.fsdecode(b"bytes\xff.bin")
    text.write_bytes(bytes(range(256)) * 8)
    done = train(tmp_path / "out", "--text", text, "--runs", "plain")
    assert "bits/byte" in done.stdout


def test_text_that_does_not_fit_in_memory(tmp_path):
    text, limit = tmp_path / "text.txt", 16 << 30
    with open(text, "wb") as file:
        file.truncate(2 * limit)  # takes no space on the disk
    limited = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit))}
    done = train(tmp_path / "out", "--text", text, check=False, **limited)
    assert_refused(done, "text.txt (34.4 GB, more than the memory that this process may use)", "--text")
    assert not (tmp_path / "out").exists()


def test_text_from_a_pipe_is_read_to_its_end(tmp_path):
    text = "a text that comes in parts, " * 20000
    train(tmp_path / "out", "--runs", "plain", "--text", "/dev/stdin", "--checkpoint-every", 1, input=text)
    assert load_checkpoint(tmp_path / "out")[0]["text_bytes"] == len(text)


def test_text_without_permission(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may read anything")
    text = tmp_path / "text.txt"
    text.write_text("mine" * 1000)
    text.chmod(0)
    assert_refused(train(tmp_path / "out", "--text", text, check=False), "text.txt (Permission denied)", "--text")


# What it writes


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
    assert {"head.linear: input", "head.linear: weight"} <= tensors and {row["run"] for row in found} == {"fp8", "delayed"}
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
    command = [TRAINER, *TINY, "--steps", "5", "--runs", "plain", "--out", tmp_path / "out"]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=secondary, timeout=300)
    os.close(secondary)
    shown = os.read(primary, 65536).decode()
    os.close(primary)
    assert done.returncode == 0
    bar = [line for line in shown.splitlines() if "ETA" in line]
    assert "\r\x1b[K" in shown and "5/5" in shown and bar


def test_progress_that_cannot_be_written_stops_nothing(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as broken:
        done = subprocess.run(
            [TRAINER, *TINY, "--steps", "2", "--runs", "plain", "--out", tmp_path / "out"],
            stdout=subprocess.PIPE,
            stderr=broken,
            timeout=300,
        )
    assert done.returncode == 0 and b"Text drawn" in done.stdout


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
        assert header["layers.0.qkv.weight"]["shape"] == [96, 32] and header["layers.0.qkv.weight"]["dtype"] == "F32"
        assert max(entry["data_offsets"][1] for entry in header.values()) == len(data) - 8 - length


def test_every_file_has_its_name(trained):
    out, _ = trained
    models = {f"model-{run}.safetensors" for run in ("plain", "tandem", "fp8")}
    assert {path.name for path in out.iterdir()} == models | {"metrics.jsonl", "report.html", "checkpoint.safetensors", "tandem-files.json"}


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


def test_json_has_no_nan(tmp_path, monkeypatch):
    monkeypatch.setattr("tandem_train.session.Training.validation_bits_per_byte", lambda _: float("nan"))
    done = train(tmp_path / "out", "--runs", "plain", "--json")
    for text in (done.stdout, *(tmp_path / "out" / "metrics.jsonl").read_text().splitlines()):
        json.loads(text, parse_constant=pytest.fail)


def test_sizes_beyond_memory(tmp_path):
    limit = 16 << 30
    done = train(tmp_path / "out", "--hidden", 65536, "--json", check=False, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
    assert_refused(done, "fit in memory", "Pass smaller sizes")


def test_peak_memory_leaves_checkpoints_out(tmp_path):
    sizes = ["--runs", "plain", "--hidden", 256, "--layers", 2, "--steps", 3, "--json"]
    peaks = [json.loads(train(tmp_path / every, *sizes, "--checkpoint-every", every).stdout)["results"][0]["peak_memory_bytes"] for every in "01"]
    assert peaks[1] < 1.2 * peaks[0]


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
