"""Who watches what quantizing does, and the pipelines that tell them."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from tandem.ops.changes import structure

watchers: list[Any] = []  # each with a dictionary `pipelines`
_numbers = itertools.count(1)


def open_for(watcher: Any) -> None:
    """From now on the watcher is told of each quantization in eager code."""
    watchers.append(watcher)
    structure.change_fusions()  # pipelines are made again, with steps that tell


def close_for(watcher: Any) -> None:
    """The watcher is told no more."""
    watchers.remove(watcher)
    structure.change_fusions()


def number_of(prepared: Any) -> int:
    """A number for a pipeline that is being made, 0 where nobody watches."""
    if not watchers:
        return 0
    number = next(_numbers)
    for watcher in watchers:
        watcher.pipelines[number] = weakref.ref(prepared)
    return number
