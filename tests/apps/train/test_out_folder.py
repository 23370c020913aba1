"""The --out folder of `tandem train`: files of others stay, and one training writes at a time."""

import json
import os
import shutil
import signal

import pytest
from program import TINY, assert_refused, contents, rows, start_long, train, trainer, wait_for

NAMES = ["metrics.jsonl", "report.html", "checkpoint.safetensors", "model-plain.safetensors"]


@pytest.mark.parametrize("name", [*NAMES, "tandem-files.json"])
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
    mine = {"checkpoint-best.safetensors", "model-fp8.safetensors", "notes.txt", ".notes.txt.tandem-part", "metrics.jsonl.tmp"}
    for name in mine:
        (out / name).write_text("mine")
    for arguments in ([], ["--resume"], ["--seed", 2]):
        if arguments == ["--resume"]:
            trainer(*arguments, "--out", out)
        else:
            train(out, "--runs", "plain", "--checkpoint-every", 5, *arguments)
        assert {name for name, data in contents(out).items() if data == b"mine"} == mine
    ours = set(contents(out)) - mine
    assert ours == {*NAMES, "tandem-files.json"}
    assert {*json.loads((out / "tandem-files.json").read_text())["files"]} == ours - {"tandem-files.json"}
    assert_refused(train(out, "--runs", "fp8", check=False), "model-fp8.safetensors (tandem train did not write it)")


def test_copied_folders_are_tandems(tmp_path):
    """A copied folder is one of Tandem's, and files there that the user has edited are replaced as the others."""
    out, copy = tmp_path / "out", tmp_path / "copy"
    train(out, "--runs", "plain", "--checkpoint-every", 5)
    shutil.copytree(out, copy, copy_function=shutil.copyfile)
    (copy / "report.html").write_text("edited")
    (copy / "report.html").chmod(0o600)
    trainer("--resume", "--out", copy)
    assert "edited" not in (copy / "report.html").read_text() and (copy / "report.html").stat().st_mode & 0o777 == 0o600
    train(copy, "--runs", "plain", "--checkpoint-every", 5)
    assert sorted(contents(copy)) == sorted(contents(out))


def test_checkpoint_restored_from_a_copy_goes_on(tmp_path):
    """A checkpoint carries its own checksum, which says that Tandem wrote it, in a folder without a list too."""
    out, other = tmp_path / "out", tmp_path / "other"
    train(out, "--runs", "plain", "--checkpoint-every", 12)
    other.mkdir()
    shutil.copy(out / "checkpoint.safetensors", other)
    trainer("--resume", "--out", other)
    assert (other / "model-plain.safetensors").read_bytes() == (out / "model-plain.safetensors").read_bytes()


class Killed(BaseException):
    """The end of a process at a given call; nothing that follows it has an effect."""


def test_killed_anywhere_its_own_files_are_not_refused(tmp_path, monkeypatch):
    """The process ends after each call that changes the folder; the next start, in the folder as it was left, refuses nothing."""
    out = tmp_path / "out"
    left = 0

    def ending(real):
        def call(*arguments, **options):
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return real(*arguments, **options)

        return call

    for calls in range(1, 200):
        with monkeypatch.context() as patch:
            left = calls
            for name in ("replace", "unlink", "fsync", "write", "ftruncate"):
                patch.setattr(os, name, ending(getattr(os, name)))
            try:
                trainer(*TINY, "--steps", 4, "--log-every", 2, "--checkpoint-every", 2, "--runs", "plain", "--out", out)
                break
            except Killed:
                continue
    assert calls > 15
    assert set(os.listdir(out)) == {*NAMES, "tandem-files.json"}, "something half written is left"


def test_list_that_is_none(tmp_path):
    out = tmp_path / "out"
    train(out, "--runs", "plain")
    for damage in ("", "[]", "[" * 100_000, "{}", '{"files": 3}', '{"files": [{}]}', '{"files": [null]}', '{"files": "abc"}'):
        (out / "tandem-files.json").write_text(damage)
        assert_refused(train(out, "--runs", "plain", check=False), "tandem-files.json (not the list of tandem train)")


def test_second_training_in_a_folder_is_refused(tmp_path):
    out = tmp_path / "out"
    first = start_long(out, "--steps", "100000")
    wait_for(lambda: (out / "metrics.jsonl").exists(), first)
    told = "a folder that no other training writes to", "(another process trains there). Wait for its end", "--out"
    for refused in (train(out, check=False), trainer("--resume", "--out", out, check=False), train(tmp_path / "." / "out", check=False)):
        assert_refused(refused, *told)
    first.kill()  # the lock ends with its process
    first.communicate(timeout=60)
    train(out, "--runs", "plain")
    assert len(rows(out)) == 5


def test_half_written_files_of_a_killed_training_are_removed(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / ".report.html.tandem-part").write_text("half")
    (tmp_path / "mine").write_text("mine")
    (out / ".metrics.jsonl.tandem-part").symlink_to(tmp_path / "mine")
    train(out, "--runs", "plain")
    assert set(os.listdir(out)) == {*NAMES, "tandem-files.json"}
    assert (tmp_path / "mine").read_text() == "mine"


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
    trainer("--resume", "--out", link)
    assert [row["step"] for row in rows(moved) if "step" in row] == list(range(1, 61))


def test_resume_in_a_folder_that_is_not_there(tmp_path):
    done = trainer("--resume", "--out", tmp_path / "none", check=False)
    assert_refused(done, "a folder that can be written", "none")
    assert not (tmp_path / "none").exists()
