"""The --out folder of `tandem train`: files of others stay, and one training writes at a time."""

import json
import os
import shutil
import signal

import pytest
from program import TINY, assert_refused, contents, rows, start_long, train, trainer, wait_for
from tandem_train.session import Session

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
    assert set(json.loads((out / "tandem-files.json").read_text())["files"]) == ours - {"tandem-files.json"}


@pytest.mark.parametrize("name", NAMES)
def test_files_changed_since_tandem_wrote_them_are_kept(tmp_path, name):
    """The name of a file proves nothing: what the user put in its place is the user's, also of the same size."""
    out = tmp_path / "out"
    train(out, "--runs", "plain", "--checkpoint-every", 6)
    place = out / name
    flipped = bytearray(place.read_bytes())
    flipped[-2] ^= 1
    for mine in (b"MY OWN NOTES\n", b"", bytes(flipped)):
        place.unlink()
        place.write_bytes(mine)
        before = contents(out)
        told = "without files of others", f"{name} (changed since Tandem wrote it)", "Move it away"
        assert_refused(train(out, "--runs", "plain", check=False), *told)
        if name != "checkpoint.safetensors":
            assert_refused(trainer("--resume", "--out", out, check=False), *told)
        assert contents(out) == before
    place.rename(tmp_path / "mine")
    train(out, "--runs", "plain")
    assert (tmp_path / "mine").read_bytes() == bytes(flipped)


def test_copied_and_touched_files_are_tandems(tmp_path):
    """What counts is the content: times, inodes and the folder may be others."""
    out, copy = tmp_path / "out", tmp_path / "copy"
    train(out, "--runs", "plain", "--checkpoint-every", 5)
    shutil.copytree(out, copy, copy_function=shutil.copyfile)
    for path in copy.iterdir():
        os.utime(path, (1, 1))
    trainer("--resume", "--out", copy)
    train(copy, "--runs", "plain", "--checkpoint-every", 5)
    assert sorted(contents(copy)) == sorted(contents(out))


def test_checkpoint_restored_from_a_copy_goes_on(tmp_path):
    """A checkpoint carries its own checksum, which says that Tandem wrote it, though the list names a later one."""
    out, saved = tmp_path / "out", tmp_path / "saved"
    train(out, "--runs", "plain", "--checkpoint-every", 12)
    shutil.copytree(out, saved)
    train(out, "--runs", "plain", "--checkpoint-every", 12, "--seed", 5)
    shutil.copy(saved / "checkpoint.safetensors", out)
    trainer("--resume", "--out", out)
    assert (out / "model-plain.safetensors").read_bytes() == (saved / "model-plain.safetensors").read_bytes()


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


def test_metrics_of_a_killed_training(tmp_path):
    """They grow between two writings of the list: as they were left they are Tandem's, changed they are not."""
    out = tmp_path / "out"
    process = start_long(out, "--runs", "plain", "--steps", "100000")
    wait_for(lambda: (out / "metrics.jsonl").exists() and len(rows(out)) > 3, process)
    process.kill()
    process.communicate(timeout=60)
    left = (out / "metrics.jsonl").read_bytes()
    for notes in (b"MY OWN NOTES\n", b'["run"]\n', b'{"run": "mine"}\n'):
        (out / "metrics.jsonl").write_bytes(left + notes)
        for _ in range(2):
            assert_refused(train(out, "--runs", "plain", check=False), "metrics.jsonl (changed since Tandem wrote it)")
            assert (out / "metrics.jsonl").read_bytes() == left + notes
    (out / "metrics.jsonl").write_bytes(left)
    train(out, "--runs", "plain")


def test_file_that_appears_during_training_is_kept(tmp_path, monkeypatch):
    out = tmp_path / "out"
    real = Session._finish_one
    monkeypatch.setattr(Session, "_finish_one", lambda *arguments: [(out / "report.html").write_text("mine"), real(*arguments)])
    done = train(out, "--runs", "plain", check=False)
    assert done.returncode == 2 and "report.html (tandem train did not write it). Move it away" in done.stderr
    assert (out / "report.html").read_text() == "mine"


def test_list_that_is_none(tmp_path):
    out, good = tmp_path / "out", [4, "0" * 64]
    train(out, "--runs", "plain")
    wrong = [{"a": 1}, {"a": [1]}, {"a": [[]]}, {"a": [[-1, good[1]]]}, {"a": [[1e300, good[1]]]}, {"a": [[*good, 1]]}, []]
    wrong = [json.dumps({"format": "tandem train files 3", "files": files}) for files in wrong]
    for damage in ("", "[]", "[" * 100_000, '{"format": "another", "files": {}}', *wrong):
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
