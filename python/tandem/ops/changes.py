"""What pipelines depend on besides their own lists: registered fusions and options of ops that were changed in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from tandem import _C


class _Structure:
    """`token` is a new object after every change of any op and of the list of fusions. Who remembers it looks at its own ops only then."""

    def __init__(self) -> None:
        self.token = object()
        self.fusions = 0  # how often the list of fusions written in Python has changed
        self.fusions_text = "0"  # the same: Dynamo guards texts by value and numbers as symbols

    def change(self) -> None:
        """Makes every pipeline look at its ops again."""
        self.token = object()

    def change_fusions(self) -> None:
        """Fusions that Python functions make have been registered or removed."""
        self.fusions += 1
        self.fusions_text = str(self.fusions)
        _C.bump_fusions_version()
        self.change()

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
            if self.is_captured:
                self.is_captured = False
                structure.change()

    return change  # type: ignore[return-value]


class Modules(dict[str, Any]):
    """The `_modules` of a module that pipelines are made of. Once they are, each write, wherever it comes from, makes every pipeline look at
    its ops again: so a call need not compare."""

    is_captured = False

    __setitem__ = _telling(dict.__setitem__)
    __delitem__ = _telling(dict.__delitem__)
    __ior__ = _telling(dict.__ior__)
    clear = _telling(dict.clear)
    pop = _telling(dict.pop)
    popitem = _telling(dict.popitem)
    setdefault = _telling(dict.setdefault)
    update = _telling(dict.update)

    def __reduce__(self) -> Any:  # a copy is not captured yet
        return type(self), (), None, None, iter(self.items())


def watch(module: torch.nn.Module) -> None:
    """Makes the `_modules` of a module a list that may tell of writes. Best done before anyone has seen it."""
    modules = module.__dict__["_modules"]
    if type(modules) is dict:  # scripted modules have lists of their own
        module.__dict__["_modules"] = Modules(modules)


def capture(module: torch.nn.Module) -> None:
    """The next write to the list of modules of `module` is told."""
    watch(module)
    modules = module.__dict__["_modules"]
    if type(modules) is Modules:
        modules.is_captured = True
