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
    plan.write_text("old" * 100_000)
    link.symlink_to(plan)
    tandem("explain", *MLP, "--format", "svg", "--output", link)
    assert link.is_symlink() and plan.read_text().startswith("<svg") and plan.read_text().endswith("</svg>")
    tandem("explain", *MLP, "--output", "/dev/null")
    for path, reason in (
        ("/dev/full", "No space left"),
        (tmp_path, "Is a directory"),
        (tmp_path / "none" / "plan", "No such file"),
        (plan / "below", "Not a directory"),
    ):
        done = tandem("explain", *MLP, "--output", path, check=False)
        assert_refused(done, "a file that can be", f"{path} ({reason}", command="tandem explain")


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/stderr", "/proc/thread-self/fd/1", "link"])
def test_explain_output_to_a_file_that_is_open(tmp_path, name):
    """What was written there stays, and what the shell writes next comes behind the plan."""
    shared = tmp_path / "shared"
    (tmp_path / "link").symlink_to("/dev/stdout")
    for redirection, earlier in ((">>", ["before", "first"]), (">", ["first"])):
        shared.write_text("before\n")
        script = f"{{ echo first; {TANDEM} explain {' '.join(MLP)} --output {name}; echo last; }} {redirection}{shared} 2>&1"
        subprocess.run(["sh", "-c", script], cwd=tmp_path, check=True, timeout=300)
        lines = shared.read_text().splitlines()
        assert lines[: len(earlier)] == earlier and lines[-1] == "last" and any("rms_norm" in line for line in lines)


def test_file_size_limit_is_told(tmp_path):
    """`ulimit -f` is an error of the write, not the end of the process."""
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (1024, 1024))
    done = tandem("explain", *MLP, "--output", tmp_path / "plan", check=False, preexec_fn=limit)
    told = f"expected a file that can be written, got {tmp_path / 'plan'} (File too large). Free some space or choose another folder."
    assert_refused(done, told, command="tandem explain")
    done = train(tmp_path / "out", "--runs", "plain", check=False, preexec_fn=limit)
    assert done.returncode == 2 and "(File too large). Free some space or choose another folder." in done.stderr
    assert not [name for name in os.listdir(tmp_path / "out") if name.endswith(".tandem-part")]
