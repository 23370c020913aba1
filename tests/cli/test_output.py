"""Output that cannot be written, of all commands, and files that `--output` names."""

import os
import resource
import subprocess
from functools import partial

import pytest
from program import MLP, TANDEM, TINY, assert_refused, contents, tandem, train

COMMANDS = {
    "help": ["--help"],
    "no command": [],
    "version": ["--version"],
    "help of a command": ["verify", "--help"],
    "explain": ["explain", *MLP],
    "explain json": ["explain", *MLP, "--json"],
    "verify": ["verify", *MLP],
    "verify json": ["verify", *MLP, "--json"],
    "bench": ["bench", *MLP, "--rounds", "1"],
    "bench json": ["bench", *MLP, "--rounds", "1", "--json"],
    "doctor": ["doctor"],
    "doctor json": ["doctor", "--json"],
    "train": ["train", *TINY, "--steps", "1", "--runs", "plain"],
    "train json": ["train", *TINY, "--steps", "1", "--runs", "plain", "--json"],
}


def run_with_output(arguments, stdout, **options):
    return subprocess.run([TANDEM, *arguments], stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=300, **options)


@pytest.mark.parametrize("command", COMMANDS)
def test_output_that_cannot_be_written(tmp_path, command):
    arguments = COMMANDS[command]
    if arguments[:1] == ["train"]:
        arguments = [*arguments, "--out", tmp_path / "out"]
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as full, os.fdopen(writer, "w") as broken:
        for stdout, reason in ((full, "No space left on device"), (broken, "Broken pipe")):
            done = run_with_output(arguments, stdout)
            assert done.returncode == 2, done.stderr
            assert f"expected a standard output that can be written, got an error ({reason}). Free" in done.stderr


def test_closed_output_is_not_a_file_that_is_opened_later(tmp_path):
    """Without file number 1, the next file opened would get it, and the table."""
    out = tmp_path / "out"
    done = run_with_output(["train", *TINY, "--steps", "1", "--runs", "plain", "--out", out], None, preexec_fn=lambda: os.close(1))
    assert done.returncode == 2 and "(Bad file descriptor)" in done.stderr
    assert not any(b"Curves and plan:" in data for data in contents(out).values())


def test_explain_output(tmp_path):
    """--output replaces a file and the file behind a link, writes to devices, and says what cannot be written."""
    plan, link = tmp_path / "plan.svg", tmp_path / "link.svg"
    plan.write_text("old")
    link.symlink_to(plan)
    tandem("explain", *MLP, "--format", "svg", "--output", link)
    assert link.is_symlink() and "<svg" in plan.read_text()
    assert os.listdir(tmp_path) in (["plan.svg", "link.svg"], ["link.svg", "plan.svg"])
    tandem("explain", *MLP, "--output", "/dev/null")
    assert not os.path.isfile("/dev/null")
    for path, reason in (
        ("/dev/full", "No space left"),
        (tmp_path, "a folder"),
        (tmp_path / "none" / "plan", "No such file"),
        (plan / "below", "Not a directory"),
    ):
        done = tandem("explain", *MLP, "--output", path, check=False)
        assert_refused(done, "a file that can be", f"{path} ({reason}", command="tandem explain")


def test_explain_output_through_links_to_nothing(tmp_path):
    """The file that the last of the links names is made, wherever the links lie."""
    (tmp_path / "below").mkdir()
    first, second, plan = tmp_path / "first", tmp_path / "below" / "second", tmp_path / "plan"
    first.symlink_to("below/second")
    second.symlink_to("../plan")
    tandem("explain", *MLP, "--output", "first", cwd=tmp_path)
    assert "rms_norm" in plan.read_text() and first.is_symlink() and second.is_symlink() and not plan.is_symlink()
    plan.unlink()
    second.unlink()
    second.symlink_to(tmp_path / "none" / "plan")
    assert_refused(tandem("explain", *MLP, "--output", first, check=False), "No such file", command="tandem explain")
    second.unlink()
    second.symlink_to("../first")
    assert_refused(tandem("explain", *MLP, "--output", first, check=False), "symbolic links", command="tandem explain")
    assert sorted(os.listdir(tmp_path)) == ["below", "first"] and os.listdir(tmp_path / "below") == ["second"]


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/stderr", "/dev/fd/1", "/proc/self/fd/2", "/proc/thread-self/fd/1", "link"])
def test_explain_output_to_a_file_that_is_open(tmp_path, name):
    """What was written there stays, and what the shell writes next comes behind the plan."""
    shared = tmp_path / "shared"
    (tmp_path / "link").symlink_to("/dev/stdout")
    for redirection in ("", ">>" if "thread" in name else ">"):
        shared.write_text("before\n")
        script = f"{{ echo first; {TANDEM} explain {' '.join(MLP)} --output {name}; echo last; }}"
        script += f" >>{shared} 2>&1" if not redirection else f" {redirection}{shared} 2>&1"
        inode = shared.stat().st_ino
        subprocess.run(["sh", "-c", script], cwd=tmp_path, check=True, timeout=300)
        lines = shared.read_text().splitlines()
        assert lines[:2] == ["before", "first"] if redirection != ">" else lines[0] == "first"
        assert lines[-1] == "last" and any("rms_norm" in line for line in lines)
        assert shared.stat().st_ino == inode and sorted(os.listdir(tmp_path)) == ["link", "shared"]
    done = subprocess.run([TANDEM, "explain", *MLP, "--output", "/dev/fd/0"], stdin=open(shared), capture_output=True, text=True)
    assert_refused(done, "expected a file that can be written, got /dev/fd/0 (Bad file descriptor)", command="tandem explain")
    assert shared.read_text().splitlines() == lines


def test_explain_output_keeps_permissions(tmp_path):
    plan = tmp_path / ("p" * 255)
    for mode in (0o600, 0o664, 0o777):
        plan.write_text("old")
        plan.chmod(mode)
        tandem("explain", *MLP, "--output", plan, umask=0o077)
        assert plan.stat().st_mode & 0o7777 == mode and "rms_norm" in plan.read_text()
    assert os.listdir(tmp_path) == [plan.name]


def test_explain_output_to_a_protected_file(tmp_path):
    plan, link = tmp_path / "plan", tmp_path / "link"
    plan.write_text("old")
    plan.chmod(0o444)
    link.symlink_to(plan)
    for path in (plan, link):
        told = f"expected a file that can be written, got {path} (it is write-protected). Permit writing with chmod u+w, or name another file."
        assert_refused(tandem("explain", *MLP, "--output", path, check=False), told, command="tandem explain")
    assert plan.read_text() == "old" and plan.stat().st_mode & 0o777 == 0o444


def test_file_size_limit_is_told(tmp_path):
    """`ulimit -f` is an error of the write, not the end of the process."""
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (1024, 1024))
    done = tandem("explain", *MLP, "--output", tmp_path / "plan", check=False, preexec_fn=limit)
    told = f"expected a file that can be written, got {tmp_path / 'plan'} (File too large). Free some space or choose another folder."
    assert_refused(done, told, command="tandem explain")
    done = train(tmp_path / "out", "--runs", "plain", check=False, preexec_fn=limit)
    assert done.returncode == 2 and "(File too large). Free some space or choose another folder." in done.stderr
    assert not [name for name in os.listdir(tmp_path / "out") if name.endswith(".tandem-part")]
