"""Functions that run when somebody else imports a module, for modules that take too long for this library to import."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from typing import Any


class _Finder(MetaPathFinder):
    """Finds one module by the other finders, and calls a function with the module after its code has run."""

    def __init__(self, name: str, tell: Callable[[Any], None]) -> None:
        self.name, self.tell = name, tell

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            self.tell(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def when_imported(name: str, tell: Callable[[Any], None]) -> None:
    """Calls `tell(module)`: now if the module is imported, else when somebody imports it."""
    if module := sys.modules.get(name):
        tell(module)
    else:
        sys.meta_path.insert(0, _Finder(name, tell))
