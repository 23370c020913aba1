"""How much of what forward computes is kept for backward."""

from __future__ import annotations

import contextlib

from torch.compiler import is_dynamo_compiling

from tandem import _C


def budget_text(bytes_per_row: float | None) -> str:
    """A budget as descriptions and guards know it; empty where there is none. Raises TypeError and ValueError."""
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
    """Lets pipelines inside a `with` block keep at most so many bytes for backward per row of their main input.

    A row is the last dimension of the main input: `bytes_per_row` is what a node keeps, inputs and parameters aside, divided by
    `x.numel() / x.shape[-1]`. What does not fit is written again by steps of backward that could do so anyway, or computed again by steps of
    forward, the cheapest choice that fits: `explain` shows it. Results and gradients are the same bits with any budget. A `Sequential` with a
    budget of its own keeps to that one. What is in force belongs to the thread, and to the async context, as for `autocast`.

    >>> import torch, tandem
    >>> mlp = tandem.ops.Sequential(tandem.ops.Linear(16, 64), tandem.ops.GELU(), tandem.ops.Linear(64, 16))
    >>> with tandem.memory_budget(0):
    ...     y = mlp(torch.randn(4, 16))
    >>> mlp.saved_bytes()
    0
    """

    def __init__(self, bytes_per_row: float | None) -> None:
        """Makes a region; `with` enters it.

        Args:
            bytes_per_row: the budget; None: no limit inside, whatever is outside. A call whose pipeline cannot do with so little raises
                ValueError, which says how much it needs.
        """
        self._text = budget_text(bytes_per_row)
        self._bytes_per_row = None if bytes_per_row is None else float(bytes_per_row)
        self._outer_while_traced: list[str] = []

    def __enter__(self) -> None:
        if is_dynamo_compiling():  # nothing is entered when the compiled code runs: the budget is in its descriptions
            self._outer_while_traced.append(_C.in_force.memory_budget)
            _C.in_force.memory_budget = self._text
        else:
            _C.enter_memory_budget(self._bytes_per_row, self)

    def __exit__(self, *_: object) -> None:
        if is_dynamo_compiling():
            _C.in_force.memory_budget = self._outer_while_traced.pop()
        else:
            _C.exit_memory_budget(self)
