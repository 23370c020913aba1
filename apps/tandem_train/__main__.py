"""The program `tandem-train`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Sequence

from .files import CHECKPOINT, OutFolder, UserError, tell


def _train(arguments: Sequence[str] | None, stack: contextlib.ExitStack) -> int:
    from .options import OPTIONS, parsed, resumed  # loads torch, which takes a while

    given, flags = parsed(arguments)
    try:
        from .session import Session, load_checkpoint
    except ModuleNotFoundError as error:
        raise UserError(f"expected the package safetensors, got a Python without it ({error}). Run: {sys.executable} -m pip install safetensors.") from None

    options = {option.name: given.get(option.name, option.default) for option in OPTIONS}
    out = None
    if flags["resume"]:
        out = stack.enter_context(OutFolder(options["out"], create=False))
        state, tensors = load_checkpoint(out.path)
        options = resumed(given, state["configuration"])
    session = Session(options, quiet=flags["json"], inspect=flags["inspect"])
    out = out or stack.enter_context(OutFolder(options["out"], create=True))
    out.require_free(session.file_names(), known=[CHECKPOINT] if flags["resume"] else [])  # whose own checksum proves that Tandem wrote it
    if flags["resume"]:
        session.resume(out, state, tensors)
    elif not flags["json"] and (out.path / CHECKPOINT).exists():
        tell(f"tandem train: starting again; the checkpoint in {out.path} will be replaced (--resume would go on with it).\n")
    if not flags["json"]:
        tell(session.title() + "\n")
    finished = session.run(out)
    if not finished:
        tell(f"tandem train: stopped and saved. Go on with: {session.resume_command()}\n")
    if flags["json"] or finished:
        _print(json.dumps(session.document(finished), indent=1) + "\n" if flags["json"] else "\n" + session.summary())
    return 0 if finished else 130


def _print(text: str) -> None:
    """Writes to standard output. Throws: UserError if that fails: a lost result must not look like one."""
    try:
        if sys.stdout is None:
            raise OSError(9, "Bad file descriptor")
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # for names of files
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is still buffered, which Python writes at the end of the process
        raise UserError(
            f"expected a standard output that can be written, got an error ({error.strerror}). Free some space, or send the output elsewhere."
        ) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit status: 0 after a whole training, 130 after an interrupted one, 2 after an error of the user's."""
    try:
        with contextlib.ExitStack() as stack:
            return _train(arguments, stack)
    except UserError as error:
        tell(f"tandem train: {error}\n")
        return 2
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        tell(f"tandem train: expected sizes that fit in memory, got an error ({error}). Pass smaller sizes of the model, --batch or --context.\n")
        return 2
    except KeyboardInterrupt:  # while there is nothing to save
        return 130


if __name__ == "__main__":
    sys.exit(main())
