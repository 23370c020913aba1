"""The files of `tandem train`: the text, and the --out folder, in which no file of others is replaced."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NoReturn

METRICS, REPORT, CHECKPOINT, LIST = "metrics.jsonl", "report.html", "checkpoint.safetensors", "tandem-files.json"


class UserError(Exception):
    """An error that the user can mend. Its text says what was expected, what came and what to do."""


def tell(text: str) -> None:
    """Writes to standard error, where there is one."""
    with contextlib.suppress(OSError):  # what cannot be told stops nothing
        if sys.stderr is not None:
            sys.stderr.write(text)
            sys.stderr.flush()


def bytes_text(count: float) -> str:
    """A number of bytes with three digits and a decimal unit: "1.20 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            break
        count /= 1000
    else:
        unit = "TB"
    return f"{count:.{0 if unit == 'B' or abs(count) >= 100 else 1 if abs(count) >= 10 else 2}f} {unit}"


def read_text(path: str) -> bytearray:
    """The bytes of a file, or of a pipe up to its end. Throws: UserError if it cannot be read."""

    def refuse(reason: str) -> NoReturn:
        raise UserError(f"expected a text file, got {path} ({reason}). Pass an existing file with --text.")

    try:
        found = os.stat(path)
        if stat.S_ISDIR(found.st_mode):
            refuse("a folder")
        if stat.S_ISCHR(found.st_mode) or stat.S_ISBLK(found.st_mode):
            refuse("a device, which need not have an end")
        with open(path, "rb") as file:
            return bytearray(file.read())
    except OSError as error:
        refuse(error.strerror)
    except MemoryError:
        refuse(f"{bytes_text(found.st_size)}, more than the memory that this process may use")


class OutFolder:
    """The folder that one training writes to.

    A file there is Tandem's if tandem-files.json has its name, which is written before any other file. A file gets its name whole, so that a killed
    process leaves the old content or the new one. flock(2) locks the folder, because that lock ends with its process.

    Throws: UserError if the folder cannot be written, another training writes to it, or a file of others bears a name of Tandem's.
    """

    def __init__(self, path: str, *, create: bool) -> None:
        self.path = Path(path)
        try:
            if create:
                os.makedirs(path, exist_ok=True)  # unlike Path, it refuses ""
            if self.path.exists() and not os.access(self.path, os.W_OK | os.X_OK):
                raise PermissionError(13, "Permission denied")
            self._lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise UserError(f"expected a folder that can be written, got {path} ({error.strerror}). Pass another folder with --out.") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise UserError(
                f"expected a folder that no other training writes to, got {path} ({'another process trains there' if isinstance(error, BlockingIOError) else error.strerror}). "
                "Wait for its end, or pass another folder with --out."
            ) from None

    def __enter__(self) -> OutFolder:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def _refuse(self, name: str, reason: str) -> NoReturn:
        raise UserError(
            f"expected {self.path} without files of others under Tandem's names, got {self.path / name} ({reason}). "
            "Move it away, or pass another folder with --out."
        )

    def _listed(self) -> set[str]:
        try:
            listed = json.loads((self.path / LIST).read_bytes())["files"]
            if not isinstance(listed, (list, dict)) or not all(isinstance(name, str) for name in listed):  # a dict by older versions
                raise ValueError
            return set(listed)
        except FileNotFoundError:
            return set()
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            self._refuse(LIST, "not the list of tandem train")

    def require_free(self, names: Iterable[str], known: Collection[str] = ()) -> None:
        """Throws UserError if a file of one of these names exists that is not Tandem's. `known` are names of files that are, whether listed or not."""
        for name in (LIST, *names):
            path = self.path / name
            if path.is_symlink():
                self._refuse(name, "a symbolic link")
            if path.exists() and not path.is_file():
                self._refuse(name, "a folder" if path.is_dir() else "not a regular file")
        ours = {LIST, *known, *self._listed()}
        for name in names:
            if name not in ours and (self.path / name).exists():
                self._refuse(name, "tandem train did not write it")

    def claim(self, names: Iterable[str]) -> None:
        """Lists these names as Tandem's, and removes what a killed training had half written."""
        try:
            for name in (LIST, *names):
                self._part(name).unlink(missing_ok=True)
        except OSError as error:
            self._refuse(self._part(name).name, error.strerror)
        self.write(LIST, json.dumps({"files": sorted({*names, *self._listed()})}, indent=1).encode())

    def _part(self, name: str) -> Path:
        return self.path / f".{name}.tandem-part"

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(f"expected a file that can be written, got {self.path / name} ({error.strerror}). Free some space or choose another folder.") from None

    def write(self, name: str, data: bytes) -> None:
        """Replaces the file of this name. Throws: UserError if it cannot be written."""
        part = self._part(name)
        with self._writing(name):
            try:
                with open(part, "xb") as file:
                    with contextlib.suppress(FileNotFoundError):
                        shutil.copymode(self.path / name, part)
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(part, self.path / name)
                os.fsync(self._lock)
            finally:
                part.unlink(missing_ok=True)

    def append(self, name: str, data: bytes) -> None:
        """Adds whole rows to a file. Throws: UserError if they cannot be written."""
        with self._writing(name), open(self.path / name, "ab", buffering=0, opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o666)) as file:
            before = file.tell()
            if file.write(data) != len(data):
                file.truncate(before)
                raise OSError(28, "No space left on device")
