"""Activation checkpointing under recipes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch.utils.checkpoint
from torch.compiler import is_dynamo_compiling

from tandem import _C


class _Recompute:
    """Puts what was in force in forward in force where backward recomputes it: recipe, region, and the scales that the region used."""

    def __init__(self) -> None:
        self.region = _C.region_now()

    def __enter__(self) -> None:
        _C.enter_recompute(self.region, self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _C.exit_autocast(self)


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[..., Any] | None = None,
    tp_group: Any = None,
    use_reentrant: bool = False,
    **kwargs: Any,
) -> Any:
    """`function(*args, **kwargs)`, whose activations are computed again in backward, under the recipe and with the scales of this call.

    As torch.utils.checkpoint.checkpoint, which does the work and takes the same further arguments (`preserve_rng_state`, `determinism_check`,
    `debug`, ...), but backward may be called outside of the autocast region, and recipes with a state see one step, not two.

    Args:
        function: what is called, and called again.
        args: its arguments.
        distribute_saved_activations, get_rng_state_tracker, tp_group: False and None; no other value is known yet.
        use_reentrant: False; torch's older way is not supported.
        kwargs: keyword arguments of torch's function, or of `function`.

    >>> import torch, tandem
    >>> linear = tandem.ops.Linear(16, 16)
    >>> with tandem.autocast(recipe=tandem.recipe.DelayedScaling()):
    ...     y = tandem.checkpoint(linear, torch.randn(4, 16))
    >>> y.sum().backward()
    """
    for name, value, default in (
        ("distribute_saved_activations", distribute_saved_activations, False),
        ("get_rng_state_tracker", get_rng_state_tracker, None),
        ("tp_group", tp_group, None),
        ("use_reentrant", use_reentrant, False),
    ):
        if value != default:
            raise NotImplementedError(
                f"checkpoint: expected {name}={default!r}, got {value!r}. This version knows the default only."
            )
    if is_dynamo_compiling():  # the recipe is in what is traced, and scales are values of the graph
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)
    return torch.utils.checkpoint.checkpoint(
        function, *args, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), _Recompute()), **kwargs
    )
