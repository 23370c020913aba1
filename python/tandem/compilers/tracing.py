"""What Dynamo is told about functions of this package, without importing it: that takes longer than importing torch. And what torch.fx needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.compiler import is_dynamo_compiling

_Function = TypeVar("_Function", bound=Callable[..., object])


def constant_while_traced(function: _Function) -> _Function:
    """`torch.compiler.assume_constant_result`: Dynamo calls the function while it traces, and takes the result for a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # all that torch's decorator does, as a test checks
    return function


def number_while_traced(number: Any) -> Any:
    """A number as it is. While Dynamo traces, which may hold it for a symbol, the code is guarded by it, so that it is a constant."""
    if is_dynamo_compiling() and isinstance(number, (int, float)):
        from torch.fx.experimental.symbolic_shapes import guard_scalar  # which Dynamo knows, and has loaded

        return guard_scalar(number)
    return number


def extras_of_fx_root(extra: Any, count: int, *unused: Any) -> tuple[Any, ...]:
    """`*extra_inputs` of a forward that torch.fx traces as the root: one proxy, as every argument is, where calls have a tuple.

    The traced module keeps no other arguments, which would stand before the extra inputs and be ignored.
    """
    for proxy in unused if count else (*unused, extra):
        if proxy is not None:
            proxy.node.graph.erase_node(proxy.node)
    return tuple([extra[index] for index in range(count)])
