"""What pipelines depend on besides their own lists: registered fusions and options of ops that were changed in place."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from tandem import _C


class Changes:
    """Of what somebody has looked at: `token` is a new object after every change of it. Who remembers the token of before a look looks again
    only when it is another one."""

    __slots__ = ("__weakref__", "reference", "token")

    def __init__(self) -> None:
        self.token = object()
        self.reference = weakref.ref(self)
        _all[id(self)] = self


Watchers = tuple[weakref.ref[Changes], ...]  # those who have looked, and are told while they live
_all: weakref.WeakValueDictionary[int, Changes] = weakref.WeakValueDictionary()
_adding = threading.Lock()


def with_watcher(watchers: Watchers, changes: Changes) -> Watchers:
    """Those of `watchers` that live, and another one."""
    return (*[reference for reference in watchers if reference() is not None and reference is not changes.reference], changes.reference)


def add_watcher(op: torch.nn.Module, changes: Changes) -> None:
    """To be called before the look at an op: what is changed after it is told."""
    fields = op.__dict__
    with _adding:
        fields["_watchers"] = with_watcher(fields.get("_watchers", ()), changes)


def tell(watchers: Iterable[weakref.ref[Changes]]) -> None:
    """What they have looked at has changed. To be called after the change."""
    for reference in watchers:
        changes = reference()
        if changes is not None:
            changes.token = object()


class _Structure:
    """The registered fusions, on which every pipeline depends."""

    def __init__(self) -> None:
        self.fusions = 0  # how often the list of fusions written in Python has changed
        self.fusions_text = "0"  # the same: Dynamo guards texts by value and numbers as symbols

    def change_fusions(self) -> None:
        """Fusions that Python functions make have been registered or removed."""
        self.fusions += 1
        self.fusions_text = str(self.fusions)
        _C.bump_fusions_version()
        tell(_all.valuerefs())

    def native_fusions(self) -> int:
        """How often the list of fusions written in C++ has changed."""
        return _C.fusions_version() - self.fusions


structure = _Structure()


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _telling(method: _Method) -> _Method:
    @functools.wraps(method)
    def change(self: Modules, *arguments: Any, **named: Any) -> Any:
        try:
            return method(self, *arguments, **named)
        finally:
            tell(self.watchers)

    return change  # type: ignore[return-value]


class Modules(dict[str, Any]):
    """The `_modules` of a module that pipelines are made of. Once they are, each write, wherever it comes from, makes these look at their ops
    again: so a call need not compare."""

    watchers: Watchers = ()

    __setitem__ = _telling(dict.__setitem__)
    __delitem__ = _telling(dict.__delitem__)
    __ior__ = _telling(dict.__ior__)
    clear = _telling(dict.clear)
    pop = _telling(dict.pop)
    popitem = _telling(dict.popitem)
    setdefault = _telling(dict.setdefault)
    update = _telling(dict.update)

    def __reduce__(self) -> Any:  # a copy is not watched yet
        return type(self), (), None, None, iter(self.items())


def watch(module: torch.nn.Module) -> None:
    """Makes the `_modules` of a module a list that may tell of writes. Best done before anyone has seen it."""
    modules = module.__dict__["_modules"]
    if type(modules) is dict:  # scripted modules have lists of their own
        module.__dict__["_modules"] = Modules(modules)


def capture(module: torch.nn.Module, changes: Changes) -> None:
    """Writes to the list of modules of `module` are changes from now on."""
    watch(module)
    modules = module.__dict__["_modules"]
    if type(modules) is Modules:
        with _adding:
            modules.watchers = with_watcher(modules.watchers, changes)
