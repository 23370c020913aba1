"""Marks and helpers for functions that Dynamo or torch.fx traces. None imports Dynamo, which takes longer than importing torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.compiler import is_dynamo_compiling

_Function = TypeVar("_Function", bound=Callable[..., object])


def constant_while_traced(function: _Function) -> _Function:
    """A decorator like `torch.compiler.assume_constant_result`: Dynamo calls the function while tracing, and takes the result for a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # all that torch's decorator does, as a test checks
    return function


def number_while_traced(number: Any) -> Any:
    """The number itself. While Dynamo traces, which may represent it by a symbol, this adds a guard that makes it a constant."""
    if is_dynamo_compiling() and isinstance(number, (int, float)):
        from torch.fx.experimental.symbolic_shapes import guard_scalar  # Dynamo has imported this module already, and traces the call

        return guard_scalar(number)
    return number


def extras_of_fx_root(extra: Any, count: int, *unused: Any) -> tuple[Any, ...]:
    """The `count` extra inputs of a forward that torch.fx traces as the root. There `*extra_inputs` is one proxy instead of a tuple.

    Proxies of unused arguments are erased: the traced module would take their arguments before the extra inputs, and ignore them.
    """
    for proxy in unused if count else (*unused, extra):
        if proxy is not None:
            proxy.node.graph.erase_node(proxy.node)
    return tuple([extra[index] for index in range(count)])
