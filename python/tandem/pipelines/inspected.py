"""Watchers of quantization, and the pipelines that notify them."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from tandem.op_base.changes import structure

watchers: list[Any] = []  # each has a dictionary `pipelines`
_numbers = itertools.count(1)


def open_for(watcher: Any) -> None:
    """Adds a watcher, which is notified of each quantization in eager code from now on."""
    watchers.append(watcher)
    structure.change_fusions()  # pipelines are planned anew, with steps that notify watchers


def close_for(watcher: Any) -> None:
    """Removes a watcher, which is not notified any more."""
    watchers.remove(watcher)
    structure.change_fusions()


def number_of(prepared: Any) -> int:
    """A number by which watchers know a new pipeline; 0 without watchers."""
    if not watchers:
        return 0
    number = next(_numbers)
    for watcher in watchers:
        watcher.pipelines[number] = weakref.ref(prepared)
    return number
