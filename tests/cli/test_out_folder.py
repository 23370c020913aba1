"""The --out folder of `tandem train`: files of others stay, and one training writes at a time."""

import json
import os
import signal

import pytest
from program import assert_refused, contents, rows, start_long, tandem, train, wait_for

NAMES = ["metrics.jsonl", "report.html", "checkpoint.json", "model-plain.safetensors"]


@pytest.mark.parametrize("name", NAMES + ["tandem-files.json", "tandem.lock"])
def test_files_of_others_are_kept(tmp_path, name):
    """A file that Tandem did not write, a folder or a link under one of its names: refused before anything is written."""
    out, target = tmp_path / "out", tmp_path / "target"
    out.mkdir()
    target.write_text("mine")
    place = out / name
    place.write_text("mine")
    assert_refused(train(out, "--runs", "plain", check=False), "without files of others", name, "Move it away")
    assert contents(out) == {name: b"mine"}
    place.unlink()
    place.symlink_to(target)
    assert_refused(train(out, "--runs", "plain", check=False), name, "a symbolic link", "--out")
    assert target.read_text() == "mine" and place.is_symlink() and os.listdir(out) == [name]
    place.unlink()
    place.mkdir()
    assert_refused(train(out, "--runs", "plain", check=False), name, "a folder", "--out")
    assert os.listdir(out) == [name]


def test_other_files_are_kept(tmp_path):
    """Nothing is removed for its name: not a model of the user's, not what looks half written."""
    out = tmp_path / "out"
    out.mkdir()
    mine = {"checkpoint-best.safetensors", "checkpoint-plain-5.safetensors", "checkpoint-x.safetensors.tmp", "model-fp8.safetensors"}
    mine |= {"notes.txt", ".notes.txt.0123abcd.tandem-tmp", "metrics.jsonl.tmp"}
    for name in mine:
        (out / name).write_text("mine")
    for arguments in ([], ["--resume"], ["--seed", 2]):
        if arguments == ["--resume"]:
            tandem("train", *arguments, "--out", out)
        else:
            train(out, "--runs", "plain", "--checkpoint-every", 5, *arguments)
        assert {name for name, data in contents(out).items() if data == b"mine"} == mine
    ours = set(contents(out)) - mine
    assert ours == {*NAMES, "checkpoint-plain-12.safetensors", "tandem-files.json"}
    assert set(json.loads((out / "tandem-files.json").read_text())["files"]) == ours - {"tandem-files.json"}


def test_file_that_appears_during_training_is_kept(tmp_path):
    out = tmp_path / "out"
    process = start_long(out, "--runs", "plain")
    wait_for(lambda: (out / "metrics.jsonl").exists(), process)
    (out / "report.html").write_text("mine")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2 and "report.html (tandem train did not write it). Move it away" in errors
    assert (out / "report.html").read_text() == "mine"


def test_list_that_is_none(tmp_path):
    out = tmp_path / "out"
    train(out, "--runs", "plain")
    for damage in ("", "[]", '{"format": "another", "files": []}', '{"format": "tandem train files 1", "files": [1]}'):
        (out / "tandem-files.json").write_text(damage)
        assert_refused(train(out, "--runs", "plain", check=False), "tandem-files.json (not the list of tandem train)")


def test_list_names_files_of_its_folder_only(tmp_path):
    out, mine = tmp_path / "out", tmp_path / "checkpoint-1.safetensors"
    train(out, "--runs", "plain")
    mine.write_text("mine")
    listed = json.loads((out / "tandem-files.json").read_text())
    listed["files"].append("../checkpoint-1.safetensors")
    (out / "tandem-files.json").write_text(json.dumps(listed))
    train(out, "--runs", "plain")
    assert mine.read_text() == "mine"


def test_second_training_in_a_folder_is_refused(tmp_path):
    out = tmp_path / "out"
    first = start_long(out, "--steps", "100000", "--checkpoint-every", "1")
    wait_for(lambda: (out / "checkpoint.json").exists(), first)
    told = "a folder that no other training writes to", f"(process {first.pid} trains there)", "--out"
    assert_refused(train(out, check=False), *told)
    assert_refused(tandem("train", "--resume", "--out", out, check=False), *told)
    assert_refused(train(tmp_path / "." / "out", check=False), *told)
    first.kill()
    first.communicate(timeout=60)
    assert (out / "tandem.lock").exists()  # the lock ended with its process, the file did not
    train(out, "--runs", "plain")
    assert not (out / "tandem.lock").exists()
    assert len(rows(out)) == 5


def test_half_written_files_of_a_killed_training_are_removed(tmp_path):
    out = tmp_path / "out"
    train(out, "--runs", "plain")
    left = [".metrics.jsonl.0123abcd.tandem-tmp", ".checkpoint-plain-12.safetensors.00000000.tandem-tmp", ".tandem-files.json.ffffffff.tandem-tmp"]
    for name in left:
        (out / name).write_text("half")
    train(out, "--runs", "plain")
    assert not [name for name in os.listdir(out) if name.endswith(".tandem-tmp")]


def test_folder_without_permission(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    out = tmp_path / "out"
    out.mkdir(mode=0o500)
    assert_refused(train(out, check=False), "a folder that can be written", "Permission denied")


def test_folder_of_another_name(tmp_path):
    """A moved folder, and a link to one, are the same folder to Tandem."""
    out, moved, link = tmp_path / "out", tmp_path / "moved", tmp_path / "link"
    process = start_long(out, "--runs", "plain", preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    wait_for(lambda: (out / "metrics.jsonl").exists() and rows(out), process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    out.rename(moved)
    link.symlink_to(moved)
    tandem("train", "--resume", "--out", link)
    assert [row["step"] for row in rows(moved) if "step" in row] == list(range(1, 61))


def test_resume_in_a_folder_that_is_not_there(tmp_path):
    done = tandem("train", "--resume", "--out", tmp_path / "none", check=False)
    assert_refused(done, "a folder that can be written", "none")
    assert not (tmp_path / "none").exists()
