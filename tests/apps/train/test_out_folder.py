"""The --out folder of `tandem train`: files of others stay, and one training writes at a time."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import time

import pytest
from program import TINY, TRAINER, assert_refused, contents, fnv1a64, rows, start_long, trainer, train, wait_for

LOCK = "lock of tandem train\n12\n{}\n"
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
            trainer(*arguments, "--out", out)
        else:
            train(out, "--runs", "plain", "--checkpoint-every", 5, *arguments)
        assert {name for name, data in contents(out).items() if data == b"mine"} == mine
    ours = set(contents(out)) - mine
    assert ours == {*NAMES, "checkpoint-plain-12.safetensors", "tandem-files.json"}
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
        if name != "checkpoint.json":
            assert_refused(trainer("--resume", "--out", out, check=False), *told)
        assert contents(out) == before
    place.rename(tmp_path / "mine")
    train(out, "--runs", "plain")
    assert (tmp_path / "mine").read_bytes() == bytes(flipped)


def test_old_checkpoint_that_changed_is_not_removed(tmp_path):
    out = tmp_path / "out"
    train(out, "--runs", "plain", "--checkpoint-every", 12)
    mine = out / "checkpoint-plain-12.safetensors"
    size = mine.stat().st_size
    mine.write_bytes(b"m" * size)
    train(out, "--runs", "plain", "--checkpoint-every", 6)
    assert mine.read_bytes() == b"m" * size
    train(out, "--runs", "plain", "--checkpoint-every", 6)
    assert mine.read_bytes() == b"m" * size
    assert len(list(out.glob("checkpoint-*.safetensors"))) == 2


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
    for name in ("checkpoint.json", "checkpoint-plain-12.safetensors"):
        shutil.copy(saved / name, out / name)
    trainer("--resume", "--out", out)
    assert (out / "model-plain.safetensors").read_bytes() == (saved / "model-plain.safetensors").read_bytes()


KILLER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static void passed(const char* what) {  /* SIGKILL after as many calls as KILL_AFTER says */
  static int left = -1;
  if (left < 0) left = atoi(getenv("KILL_AFTER"));
  (void)what;
  if (--left == 0) kill(getpid(), SIGKILL);
}
#define CALL(name, result, parameters, ...)                          \
  result name parameters {                                           \
    result (*real) parameters = dlsym(RTLD_NEXT, #name);             \
    result returned = real(__VA_ARGS__);                             \
    passed(#name);                                                   \
    return returned;                                                 \
  }
CALL(rename, int, (const char* from, const char* to), from, to)
CALL(remove, int, (const char* path), path)
CALL(unlink, int, (const char* path), path)
CALL(pwrite, ssize_t, (int file, const void* bytes, size_t size, off_t at), file, bytes, size, at)
CALL(ftruncate, int, (int file, off_t size), file, size)
"""


def test_killed_anywhere_its_own_files_are_not_refused(tmp_path):
    """SIGKILL after each call that changes the folder; the next start, in the folder as it was left, refuses nothing."""
    if not shutil.which("cc"):
        pytest.skip("no C compiler")
    source, library, out = tmp_path / "killer.c", tmp_path / "killer.so", tmp_path / "out"
    source.write_text(KILLER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    command = [TRAINER, *TINY, "--steps", "4", "--log-every", "2", "--checkpoint-every", "2", "--runs", "plain", "--out", out]
    for calls in range(1, 200):
        environment = os.environ | {"LD_PRELOAD": str(library), "KILL_AFTER": str(calls)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, (calls, done.stderr)
    assert calls > 15 and done.returncode == 0
    names = {"metrics.jsonl", "report.html", "checkpoint.json", "model-plain.safetensors", "tandem-files.json"}
    assert names < set(os.listdir(out)) and len(os.listdir(out)) == len(names) + 1, "something half written is left"


def test_metrics_of_a_killed_training(tmp_path):
    """They grow between two writings of the list: as they were left they are Tandem's, changed they are not."""
    out = tmp_path / "out"
    for change in (False, True):
        process = start_long(out, "--runs", "plain", "--steps", "100000")
        wait_for(lambda: (out / "metrics.jsonl").exists() and len(rows(out)) > 3, process)
        process.kill()
        process.communicate(timeout=60)
        if not change:
            train(out, "--runs", "plain")
    changed = (out / "metrics.jsonl").read_text() + "MY OWN NOTES\n"
    (out / "metrics.jsonl").write_text(changed)
    for _ in range(2):
        assert_refused(train(out, "--runs", "plain", check=False), "metrics.jsonl (changed since Tandem wrote it)")
        assert (out / "metrics.jsonl").read_text() == changed
    (out / "metrics.jsonl").write_text(changed.removesuffix("MY OWN NOTES\n"))
    train(out, "--runs", "plain")


def test_file_that_appears_during_training_is_kept(tmp_path):
    out = tmp_path / "out"
    process = start_long(out, "--runs", "plain")
    wait_for(lambda: (out / "metrics.jsonl").exists(), process)
    (out / "report.html").write_text("mine")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2 and "report.html (tandem train did not write it). Move it away" in errors
    assert (out / "report.html").read_text() == "mine"


def test_list_that_is_none(tmp_path):
    out, good = tmp_path / "out", {"bytes": 4, "fnv1a64": fnv1a64(b"mine")}
    train(out, "--runs", "plain")
    wrong = [{"a": 1}, {"a": [1]}, {"a": [{}]}, {"a": [good | {"bytes": -1}]}, {"a": [good | {"bytes": 1e300}]}, {"a": [good | {"fnv1a64": "f"}]}, []]
    wrong = [json.dumps({"format": "tandem train files 2", "files": files}) for files in wrong]
    for damage in ("", "[]", '{"format": "another", "files": {}}', '{"format": "tandem train files 1", "files": []}', *wrong):
        (out / "tandem-files.json").write_text(damage)
        assert_refused(train(out, "--runs", "plain", check=False), "tandem-files.json (not the list of tandem train)")


def test_list_names_files_of_its_folder_only(tmp_path):
    out, mine = tmp_path / "out", tmp_path / "checkpoint-1.safetensors"
    train(out, "--runs", "plain")
    mine.write_text("mine")
    listed = json.loads((out / "tandem-files.json").read_text())
    listed["files"]["../checkpoint-1.safetensors"] = [{"bytes": 4, "fnv1a64": fnv1a64(b"mine")}]
    (out / "tandem-files.json").write_text(json.dumps(listed))
    train(out, "--runs", "plain", "--checkpoint-every", 6)
    assert mine.read_text() == "mine"


def test_lock_that_is_none(tmp_path):
    out = tmp_path / "out"
    train(out, "--runs", "plain")
    lock, ours = out / "tandem.lock", LOCK.format("0123456789abcdef")
    wrong = ("mine\n", "[]\n", '{"metrics.jsonl": 1}\n', "{}\nmine\n")
    for damage in ("", "12", "12\n", "12\n{}\n", ours[:-1], LOCK.format("0123"), LOCK.format("x" * 16), *(ours + mine for mine in wrong)):
        lock.write_text(damage)
        assert_refused(train(out, "--runs", "plain", check=False), "tandem.lock (not a lock of tandem train)", "Move it away")
        assert lock.read_text() == damage
    lock.write_text(ours)
    os.link(lock, tmp_path / "mine")
    assert_refused(train(out, "--runs", "plain", check=False), "tandem.lock (not a lock of tandem train)")
    assert (tmp_path / "mine").read_text() == ours
    for left in (ours, ours + '{"mine": []}\n'):
        lock.unlink(missing_ok=True)
        lock.write_text(left)
        train(out, "--runs", "plain")


def test_two_trainings_that_begin_at_once(tmp_path):
    """One of them has the folder, however the other finds its lock: the lock is written after it is made."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "tandem.lock").touch()
    with open(out / "tandem.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        told = "a folder that no other training writes to", "(process unknown trains there). Wait for its end"
        assert_refused(train(out, "--runs", "plain", check=False), *told)
    (out / "tandem.lock").unlink()
    for _ in range(5):
        both = [start_long(out, "--runs", "plain", "--steps", "1") for _ in range(2)]
        errors = [process.communicate(timeout=120)[1] for process in both]
        assert sorted(process.returncode for process in both) in ([0, 2], [0, 0]), errors
        for process, error in zip(both, errors, strict=True):
            assert process.returncode == 0 or "no other training writes to" in error


def test_second_training_in_a_folder_is_refused(tmp_path):
    out = tmp_path / "out"
    first = start_long(out, "--steps", "100000", "--checkpoint-every", "1")
    wait_for(lambda: (out / "checkpoint.json").exists(), first)
    told = "a folder that no other training writes to", f"(process {first.pid} trains there)", "--out"
    assert_refused(train(out, check=False), *told)
    assert_refused(trainer("--resume", "--out", out, check=False), *told)
    assert_refused(train(tmp_path / "." / "out", check=False), *told)
    first.kill()
    first.communicate(timeout=60)
    assert (out / "tandem.lock").exists()  # the lock ended with its process, the file did not
    train(out, "--runs", "plain")
    assert not (out / "tandem.lock").exists()
    assert len(rows(out)) == 5


def test_half_written_files_of_a_killed_training_are_removed(tmp_path):
    """They bear the owner that the lock of the killed training names. Others stay, whatever their names."""
    out, mine = tmp_path / "out", [".report.html.0123abcd.tandem-tmp", ".tandem.0123abcd.tandem-tmp", ".fedcba9876543210.00000000.tandem-tmp"]
    train(out, "--runs", "plain")
    for name in mine:
        (out / name).write_text("mine")
    for name in (".0123456789abcdef.00000000.tandem-tmp", ".0123456789abcdef.9abcdef0.tandem-tmp"):
        (out / name).write_text("half")
    (out / "tandem.lock").write_text(LOCK.format("0123456789abcdef"))
    train(out, "--runs", "plain")
    assert sorted(name for name in os.listdir(out) if name.endswith(".tandem-tmp")) == sorted(mine)
    assert all((out / name).read_text() == "mine" for name in mine)


def test_killed_while_it_writes_a_file(tmp_path):
    out = tmp_path / "out"
    process = start_long(out, "--runs", "plain", "--steps", "100000", "--checkpoint-every", "1")
    wait_for(lambda: list(out.glob(".*.tandem-tmp")), process)
    while not list(out.glob(".*.tandem-tmp")):  # stopped, it does not finish the file
        process.send_signal(signal.SIGCONT)
        time.sleep(0.001)
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.01)
    process.kill()
    process.communicate(timeout=60)
    train(out, "--runs", "plain")
    assert not list(out.glob(".*.tandem-tmp")) and not (out / "tandem.lock").exists()


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
