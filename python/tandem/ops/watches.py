"""What may change, and whether it has."""

from __future__ import annotations

import itertools
import operator
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

MISSING = types.SimpleNamespace()  # where a name leads to nothing


class Place:
    """Names that were looked up in a dict: it holds while they lead to the same objects, and neither `absent` names nor any but `known`
    ones are there."""

    __slots__ = ("absent", "fields", "known", "names", "values")

    def __init__(
        self, fields: Mapping[str, Any], names: Iterable[str], *, known: Iterable[str] | None = None, absent: Iterable[str] = ()
    ) -> None:
        self.fields, self.names = fields, tuple(names)
        self.known = None if known is None else {*known, *self.names}
        self.absent = {name for name in absent if name not in fields}
        self.values = self._now()

    def _now(self) -> list[Any]:
        return list(map(self.fields.get, self.names, itertools.repeat(MISSING)))

    def holds(self) -> bool:
        fields = self.fields
        if not all(map(operator.is_, map(fields.get, self.names, itertools.repeat(MISSING)), self.values)):
            return False
        if self.known is not None:
            return fields.keys() <= self.known
        return not self.absent or fields.keys().isdisjoint(self.absent)

    def absorb(self) -> None:
        if self.known is not None:
            self.known |= self.fields.keys()
        appeared = self.absent & self.fields.keys()
        self.absent -= appeared
        self.names += tuple(sorted(appeared))
        self.values = self._now()


class Same:
    """Holds while the same objects are there."""

    __slots__ = ("now", "values")

    def __init__(self, now: Callable[[], list[Any]]) -> None:
        self.now, self.values = now, now()

    def holds(self) -> bool:
        now = self.now()
        return len(now) == len(self.values) and all(map(operator.is_, now, self.values))

    def absorb(self) -> None:
        self.values = self.now()


class Retold:
    """Holds while something says the same."""

    __slots__ = ("now", "told")

    def __init__(self, now: Callable[[], Any]) -> None:
        self.now, self.told = now, now()

    def holds(self) -> bool:
        return bool(self.now() == self.told)

    def absorb(self) -> None:
        self.told = self.now()
