"""The two styles of an op in Python, and what a class must define for each.

split:      `op_forward_compute` and `op_forward_save_ctx`; with extra inputs or outputs `fuser_forward_compute` and `fuser_forward_save_ctx`
one-piece:  `op_forward(ctx, ...)`, or `fuser_forward(basic_op_ctxs, ...)`
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

PREFIXES = ("op", "fuser")


def style_of(cls: type, prefix: str) -> str | None:
    """ "split", "one-piece", or None if the class body defines no forward with this prefix. Raises TypeError for half a pair or a mix."""
    whole, compute, save = (f"{prefix}_forward{end}" for end in ("", "_compute", "_save_ctx"))
    defined = [name for name in (whole, compute, save) if name in vars(cls)]
    if not defined:
        return None
    if whole in defined and len(defined) > 1:
        raise TypeError(
            f"{cls.__qualname__}: expected either {whole} or the pair {compute} and {save}, got {' and '.join(defined)}. "
            f"Remove {whole}, or the other."
        )
    if defined == [whole]:
        return "one-piece"
    inherited = getattr(cls, "_styles", {}).get(prefix) == "split" or bool(getattr(cls, "_kind", ""))  # ops of the library have both halves
    missing = [name for name in (compute, save) if name not in defined and not inherited]
    if missing:
        raise TypeError(
            f"{cls.__qualname__}: expected the pair {compute} and {save}, got {defined[0]} alone. Define {missing[0]} too."
        )
    return "split"


@cache
def _accepted(function: Callable[..., Any]) -> frozenset[str] | None:
    """The names of the keyword arguments that a function takes; None if it takes any name."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD))


def call_accepting(method: Callable[..., Any], *arguments: Any, optional: dict[str, Any], **required: Any) -> Any:
    """Calls a bound method with all `required` keyword arguments, and with those of the `optional` ones that it takes."""
    accepted = _accepted(getattr(method, "__func__", method))
    if accepted is not None:
        optional = {name: value for name, value in optional.items() if name in accepted}
    return method(*arguments, **{**optional, **required})
