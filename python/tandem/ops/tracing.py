"""What Dynamo is told about functions of this package, without importing it: that takes longer than importing torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_Function = TypeVar("_Function", bound=Callable[..., object])


def constant_while_traced(function: _Function) -> _Function:
    """`torch.compiler.assume_constant_result`: Dynamo calls the function while it traces, and takes the result for a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # all that torch's decorator does, as a test checks
    return function
