"""Plain values as JSON: numbers, texts and the like, and collections of them."""

from __future__ import annotations

import enum
import json
import types
from collections.abc import Callable
from typing import Any

import torch

_SIMPLE = (type(None), bool, int, str)
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format, type(Ellipsis), type(NotImplemented))
DEEPEST = 32  # levels of nesting in a plain value
_LARGE = 1 << 64  # Python refuses to write very long integers in base 10, but not in base 16
State = Any  # a value that JSON can hold


class _Opaque(Exception):
    """Raised for a value that is not plain."""


def _refuse(value: Any, depth: int) -> State:
    raise _Opaque


def tell_plain(value: Any) -> State | None:
    """JSON that identifies a plain value: a number, a text, None, a dtype, a device, a member of an enumeration, or a list, tuple, set or dict
    of plain values. None for other values."""
    try:
        return tell(value, _refuse)
    except _Opaque:
        return None


def tell(value: Any, other: Callable[[Any, int], State], depth: int = 0) -> State:
    """JSON that identifies any value. `other` writes what is not plain in it; it gets the value and the depth."""
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
