"""A shorter `help` for classes of this library."""

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
    """Has `help` of a class of this library leave out members that are inherited from torch. It still names torch's base classes.

    `help` uses pydoc, which prints the docstring of each inherited member: a thousand lines for torch.nn.Module and five thousand for torch.Tensor, in
    which the few members of this library are hard to find. Neither a class nor a module can tell pydoc what to leave out, and a shorter `dir()` would
    remove the members from completion too. So this function wraps the function by which pydoc finds members. For other classes, also those that a user
    derives from a class of this library, pydoc finds the same members as before.
    """
    when_imported("pydoc", _leave_out_members_of_torch)
