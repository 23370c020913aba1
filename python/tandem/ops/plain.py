"""Plain values: numbers, texts and the like, and lists of them, told as JSON."""

from __future__ import annotations

import enum
import json
import types
from collections.abc import Callable
from typing import Any

import torch

_SIMPLE = (type(None), bool, int, str)
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format, type(Ellipsis), type(NotImplemented))
DEEPEST = 32  # in a plain value
_LARGE = 1 << 64  # Python writes integers of any size in base 16 only
Told = Any  # of what JSON holds


class _Opaque(Exception):
    """Something is no plain value."""


def _refuse(value: Any, depth: int) -> Told:
    raise _Opaque


def tell_plain(value: Any) -> Told | None:
    """A plain value as JSON that tells it apart: a number, a text, None, a dtype, a device, a member of an enumeration, a list, tuple, set or dict
    of them. None where it is none."""
    try:
        return tell(value, _refuse)
    except _Opaque:
        return None


def tell(value: Any, other: Callable[[Any, int], Told], depth: int = 0) -> Told:
    """The same of any value: what is not plain in it is told by `other`, which gets the depth too."""
    kind = type(value)
    if kind is int and not -_LARGE < value < _LARGE:
        return ["int", hex(value)]
    if kind in _SIMPLE:
        return [kind.__name__, value]
    if kind in (float, complex):
        return [kind.__name__, value.hex() if kind is float else [value.real.hex(), value.imag.hex()]]
    if issubclass(kind, _NAMED):
        return [kind.__name__, str(value)]
    if kind in (bytes, bytearray):
        return [kind.__name__, value.hex()]
    if depth == DEEPEST:
        return other(value, depth)
    if kind in (tuple, list, torch.Size):
        return [kind.__name__, [tell(item, other, depth + 1) for item in value]]
    if kind in (set, frozenset):
        return [kind.__name__, sorted((tell(item, other, depth + 1) for item in value), key=json.dumps)]
    if kind in (dict, types.MappingProxyType):
        return [kind.__name__, [[tell(name, other, depth + 1), tell(item, other, depth + 1)] for name, item in value.items()]]
    if issubclass(kind, enum.Enum):
        return ["enum", kind.__module__, kind.__qualname__, value.name, tell(value.value, other, depth + 1)]
    return other(value, depth)
