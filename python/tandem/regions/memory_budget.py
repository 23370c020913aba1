"""`memory_budget`: a limit on the bytes that forward keeps for backward."""

from __future__ import annotations

import contextlib

from torch.compiler import is_dynamo_compiling

from tandem import _C


def budget_text(bytes_per_row: float | None) -> str:
    """A budget as text for descriptions and guards; empty for None. TypeError for what is no number, ValueError for a negative or infinite one."""
    if bytes_per_row is None:
        return ""
    if isinstance(bytes_per_row, bool) or not hasattr(bytes_per_row, "__float__"):
        raise TypeError(f"memory_budget: expected a number of bytes per row or None, got {type(bytes_per_row).__name__}. Pass for example 4096.")
    value = float(bytes_per_row)
    if not 0 <= value < float("inf"):
        raise ValueError(
            f"memory_budget: expected a finite number of bytes per row that is not negative, got {value}. Leave the budget out where there is no limit."
        )
    return repr(value)


class memory_budget(contextlib.ContextDecorator):
    """kept bytes <= bytes_per_row * rows: a limit on what pipelines in a `with` block keep for backward, with rows = `x.numel() / x.shape[-1]`.

    The limit counts bytes of kept values for each node, without inputs and parameters; x is the main operand. Values that do not fit are re-emitted
    by backward steps or recomputed by forward steps, by the cheapest choice that fits; `explain` shows it. A budget changes no bit of results and
    gradients. The budget of a `Sequential` overrides the block's. A block belongs to its thread and async context, as for `autocast`.

    >>> import torch, tandem
    >>> mlp = tandem.ops.Sequential(tandem.ops.Linear(16, 64), tandem.ops.GELU(), tandem.ops.Linear(64, 16))
    >>> with tandem.memory_budget(0):
    ...     y = mlp(torch.randn(4, 16))
    >>> mlp.saved_bytes()
    0
    """

    def __init__(self, bytes_per_row: float | None) -> None:
        """Creates a context, which `with` enters.

        Args:
            bytes_per_row: the budget, a finite number from 0; None: no limit inside, also within an outer block. A call of a pipeline that needs more
                raises ValueError with the number that it needs.
        """
        self._text = budget_text(bytes_per_row)
        self._bytes_per_row = None if bytes_per_row is None else float(bytes_per_row)
        self._outer_while_traced: list[str] = []

    def __enter__(self) -> None:
        if is_dynamo_compiling():  # compiled code enters no context, as its descriptions contain the budget
            self._outer_while_traced.append(_C.in_force.memory_budget)
            _C.in_force.memory_budget = self._text
        else:
            _C.enter_memory_budget(self._bytes_per_row, self)

    def __exit__(self, *_: object) -> None:
        if is_dynamo_compiling():
            _C.in_force.memory_budget = self._outer_while_traced.pop()
        else:
            _C.exit_memory_budget(self)
