"""Plain values: numbers, texts and the like, and lists of them, told as JSON."""

from __future__ import annotations

import enum
import json
import types
from typing import Any

import torch

_SIMPLE = (type(None), bool, int, str)
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format, type(Ellipsis), type(NotImplemented))
_DEEPEST = 32  # in a plain value
_LARGE = 1 << 64  # Python writes integers of any size in base 16 only
Told = Any  # of what JSON holds


class _Opaque(Exception):
    """Something is no plain value."""


def tell_plain(value: Any, *, enums: bool = False) -> Told | None:
    """A number, a text, None, a dtype or device, a list, tuple or dict of them as JSON that tells it apart; None where it is none. With
    `enums`, their members are plain too: by name and value."""
    try:
        return _plain(value, 0, enums)
    except _Opaque:
        return None


def _plain(value: Any, depth: int, enums: bool) -> Told:
    kind = type(value)
    if kind is int and not -_LARGE < value < _LARGE:
        return ["int", hex(value)]
    if kind in _SIMPLE:
        return [kind.__name__, value]
    if kind in (float, complex):
        return [kind.__name__, value.hex() if kind is float else [value.real.hex(), value.imag.hex()]]
    if isinstance(value, _NAMED):
        return [kind.__name__, str(value)]
    if kind in (bytes, bytearray):
        return [kind.__name__, value.hex()]
    if depth == _DEEPEST:
        raise _Opaque
    if kind in (tuple, list, torch.Size):
        return [kind.__name__, [_plain(item, depth + 1, enums) for item in value]]
    if kind in (set, frozenset):
        return [kind.__name__, sorted((_plain(item, depth + 1, enums) for item in value), key=json.dumps)]
    if kind in (dict, types.MappingProxyType):
        return ["dict", [[_plain(name, depth + 1, enums), _plain(item, depth + 1, enums)] for name, item in value.items()]]
    if issubclass(kind, enum.Enum) and enums:
        return ["enum", kind.__module__, kind.__qualname__, value.name, _plain(value.value, depth + 1, enums)]
    raise _Opaque


def is_fixed(plain: Any) -> bool:
    try:
        hash(plain)
    except TypeError:
        return False
    return True
