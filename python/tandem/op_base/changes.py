"""Notification of pipelines about what they depend on besides their own lists: registered fusions, and options of ops that are assigned."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from tandem import _C


class Changes:
    """Notifies one observer. `token` becomes a new object after every change of anything that the observer watches. An observer remembers the
    token from before it reads the ops, and reads them anew when the token has become another object."""

    __slots__ = ("__weakref__", "reference", "token")

    def __init__(self) -> None:
        self.token = object()
        self.reference = weakref.ref(self)
        _all[id(self)] = self


Watchers = tuple[weakref.ref[Changes], ...]  # the observers that are notified while they live
_all: weakref.WeakValueDictionary[int, Changes] = weakref.WeakValueDictionary()
_adding = threading.Lock()


def with_watcher(watchers: Watchers, changes: Changes) -> Watchers:
    """The living observers of `watchers`, and `changes` once."""
    return (*[reference for reference in watchers if reference() is not None and reference is not changes.reference], changes.reference)


def add_watcher(op: torch.nn.Module, changes: Changes) -> None:
    """Registers an observer with an op. Observers register before they read the op, so that they miss no later change."""
    fields = op.__dict__
    with _adding:
        fields["_watchers"] = with_watcher(fields.get("_watchers", ()), changes)


def tell(watchers: Iterable[weakref.ref[Changes]]) -> None:
    """Notifies observers. Callers do so after the change, so that an observer that reads at once sees the new value."""
    for reference in watchers:
        changes = reference()
        if changes is not None:
            changes.token = object()


class _Structure:
    """The registered fusions, on which every pipeline depends."""

    def __init__(self) -> None:
        self.fusions = 0  # how often the list of fusions in Python has changed
        self.fusions_text = "0"  # this number as text: Dynamo guards texts by value and numbers as symbols

    def change_fusions(self) -> None:
        """Records that fusion functions in Python were registered or removed, and notifies every observer."""
        self.fusions += 1
        self.fusions_text = str(self.fusions)
        _C.bump_fusions_version()
        tell(_all.valuerefs())

    def native_fusions(self) -> int:
        """How often the list of fusions in C++ has changed."""
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
    """The `_modules` of a module that pipelines are planned from. After `capture`, every write to it notifies the pipelines, which then read
    their ops anew; so no call has to compare lists."""

    watchers: Watchers = ()

    __setitem__ = _telling(dict.__setitem__)
    __delitem__ = _telling(dict.__delitem__)
    __ior__ = _telling(dict.__ior__)
    clear = _telling(dict.clear)
    pop = _telling(dict.pop)
    popitem = _telling(dict.popitem)
    setdefault = _telling(dict.setdefault)
    update = _telling(dict.update)

    def __reduce__(self) -> Any:  # a copy has no observers
        return type(self), (), None, None, iter(self.items())


def watch(module: torch.nn.Module) -> None:
    """Replaces the `_modules` of a module by a `Modules`. The constructor does so before other code can hold the old dict."""
    modules = module.__dict__["_modules"]
    if type(modules) is dict:  # scripted modules have another type here
        module.__dict__["_modules"] = Modules(modules)


def capture(module: torch.nn.Module, changes: Changes) -> None:
    """Makes `changes` observe the list of modules of `module` from now on."""
    watch(module)
    modules = module.__dict__["_modules"]
    if type(modules) is Modules:
        with _adding:
            modules.watchers = with_watcher(modules.watchers, changes)
