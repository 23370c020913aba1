"""The files of `tandem train`: the text, and the --out folder, in which no file of others is replaced."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

METRICS, REPORT, CHECKPOINT, LIST = "metrics.jsonl", "report.html", "checkpoint.safetensors", "tandem-files.json"
_FORMAT = "tandem train files 3"


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


def _digest(data: bytes) -> list[Any]:
    return [len(data), hashlib.sha256(data).hexdigest()]


def _is_row(line: bytes) -> bool:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and "run" in row and ("step" in row or "final" in row)


class OutFolder:
    """The folder that one training writes to.

    A file there is Tandem's if tandem-files.json lists the SHA-256 of its content; names and times prove nothing. A content is listed before its file
    gets its name, and a file gets its name whole, so that a killed process leaves nothing that its own next start would refuse. Rows of metrics.jsonl
    behind the listed content are Tandem's too, because it grows between two writings of the list. flock(2) locks the folder, because that lock ends
    with its process.

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
        self._stamps: dict[str, tuple[int, ...]] = {}  # of files whose content has been compared
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._files = self._listed()
        except BaseException as error:
            os.close(self._lock)
            if not isinstance(error, OSError):
                raise
            raise UserError(
                f"expected a folder that no other training writes to, got {path} ({'another process trains there' if isinstance(error, BlockingIOError) else error.strerror}). "
                "Wait for its end, or pass another folder with --out."
            ) from None

    def __enter__(self) -> OutFolder:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def _listed(self) -> dict[str, list[list[Any]]]:
        self._refuse_oddity(LIST)
        if not (self.path / LIST).exists():
            return {}
        try:
            listed = json.loads(self._read(LIST))
            files = listed["files"]
            if listed["format"] != _FORMAT or not all(type(size) is int and size >= 0 for contents in files.values() for size, _ in contents):
                raise ValueError
            return dict(files)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            self._refuse(LIST, "not the list of tandem train")

    def _refuse(self, name: str, reason: str) -> NoReturn:
        raise UserError(
            f"expected {self.path} without files of others under Tandem's names, got {self.path / name} ({reason}). "
            "Move it away, or pass another folder with --out."
        )

    def _refuse_oddity(self, name: str) -> None:
        path = self.path / name
        if path.is_symlink():
            self._refuse(name, "a symbolic link")
        if path.exists() and not path.is_file():
            self._refuse(name, "a folder" if path.is_dir() else "not a regular file")

    def _read(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            self._refuse(name, error.strerror)

    def _stamp(self, name: str) -> tuple[int, ...]:
        found = os.lstat(self.path / name)
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    def require_free(self, names: Iterable[str]) -> None:
        """Throws UserError if a file of one of these names exists whose content Tandem did not write."""
        for name in names:
            self._refuse_oddity(name)
            if not (self.path / name).exists() or self._stamps.get(name) == self._stamp(name):
                continue
            if name not in self._files:
                self._refuse(name, "tandem train did not write it")
            data = self._read(name)
            if not any(_digest(data[:size]) == [size, digest] and self._is_growth(name, data[size:]) for size, digest in self._files[name]):
                self._refuse(name, "changed since Tandem wrote it")
            self._stamps[name] = self._stamp(name)

    @staticmethod
    def _is_growth(name: str, data: bytes) -> bool:
        """Whether Tandem may have appended this to the file since the list was written."""
        return all(map(_is_row, data.splitlines())) if name == METRICS else not data

    @staticmethod
    def _part(name: str) -> str:
        return f".{name}.tandem-part"

    def remove_parts(self, names: Iterable[str]) -> None:
        """Removes what a killed training had half written."""
        for name in (LIST, *names):
            try:
                (self.path / self._part(name)).unlink(missing_ok=True)
            except OSError as error:
                self._refuse(self._part(name), error.strerror)

    def _replace(self, name: str, data: bytes) -> None:
        """Writes a file so that a crash leaves either the old or the new content."""
        part = self.path / self._part(name)
        try:
            with open(part, "xb") as file:
                with contextlib.suppress(FileNotFoundError):
                    shutil.copymode(self.path / name, part)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if name != LIST:
                self._files[name] = [*self._files.get(name, []), _digest(data)]
                self._replace(LIST, json.dumps({"format": _FORMAT, "files": self._files}, indent=1).encode())
                self.require_free([name])  # a file may have appeared meanwhile
            os.replace(part, self.path / name)
            os.fsync(self._lock)
        finally:
            part.unlink(missing_ok=True)

    def write(self, name: str, data: bytes) -> None:
        """Replaces the file of this name. Throws: UserError if it is a file of others or cannot be written."""
        self.require_free([name])
        try:
            self._replace(name, data)
        except OSError as error:
            raise UserError(f"expected a file that can be written, got {self.path / name} ({error.strerror}). Free some space or choose another folder.") from None
        self._settle(name, hashlib.sha256(data), len(data))

    def append(self, data: bytes) -> None:
        """Adds rows to metrics.jsonl, which `write` has written. Throws: UserError as `write` does."""
        name = METRICS
        self.require_free([name])
        try:
            file = os.open(self.path / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                before = os.fstat(file).st_size
                if os.write(file, data) != len(data):
                    os.ftruncate(file, before)
                    raise OSError(28, "No space left on device")
            finally:
                os.close(file)
        except OSError as error:
            raise UserError(f"expected a file that can be written, got {self.path / name} ({error.strerror}). Free some space or choose another folder.") from None
        self._hash = self._hash if before else hashlib.sha256()  # somebody may remove the file
        self._hash.update(data)
        self._settle(name, self._hash, before + len(data))

    def _settle(self, name: str, content: Any, size: int) -> None:
        """Notes that the file has this content, and that none other is expected there."""
        if name == METRICS:
            self._hash = content
        self._files[name] = [[size, content.hexdigest()]]
        self._stamps[name] = self._stamp(name)

    def recognize(self, name: str) -> None:
        """Takes the present content of a file for Tandem's, because the file itself proves it."""
        self._files.setdefault(name, []).append(_digest(self._read(name)))
