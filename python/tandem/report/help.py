"""What `help` tells of classes of the library."""

from __future__ import annotations

import functools
from typing import Any

from tandem.compilers.imports import when_imported


def _package(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def _leave_out_members_of_torch(pydoc: Any) -> None:
    all_members = pydoc.classify_class_attrs

    @functools.wraps(all_members)
    def members(cls: type) -> list[tuple[str, str, type, object]]:
        found: list[tuple[str, str, type, object]] = all_members(cls)
        return [each for each in found if _package(each[2]) != "torch"] if _package(cls) == "tandem" else found

    pydoc.classify_class_attrs = members


def shorten_help() -> None:
    """Lets `help` of a class of the library show what the library says of it, and name the classes of torch that it inherits from.

    pydoc, by which `help` works, lists each inherited member with its text: those of torch.nn.Module take a thousand lines, and torch.Tensor's five
    thousand, in which the library's few are not found. Neither a class nor a module can say what pydoc shall leave out, and one that left members out of
    its `dir()` would take them from completion too. So the function by which pydoc finds members is wrapped; of any other class, one that a user derives
    included, it finds the same as before.
    """
    when_imported("pydoc", _leave_out_members_of_torch)
