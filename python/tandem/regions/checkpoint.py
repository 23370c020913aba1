"""Activation checkpointing under recipes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint
from torch.compiler import is_dynamo_compiling

from tandem import _C
from tandem.ops.arguments import at_default, flag


class _Recompute:
    """Puts what was in force in forward in force where backward recomputes it: recipe, region, and the scales that the region used."""

    def __init__(self, get_rng_state_tracker: Callable[[], Any] | None) -> None:
        self.region = _C.region_now()
        self.tracker = None if get_rng_state_tracker is None else get_rng_state_tracker()
        self.states = None if self.tracker is None else self.tracker.get_states()  # of the generators in forward
        self._now: Any = None

    def __enter__(self) -> None:
        if self.tracker is not None:
            self._now = self.tracker.get_states()
            self.tracker.set_states(self.states)
        _C.enter_recompute(self.region, self)

    def __exit__(self, *_: object) -> None:
        _C.exit_autocast(self)
        if self.tracker is not None:
            self.tracker.set_states(self._now)


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[..., Any] | None = None,
    tp_group: Any = None,
    use_reentrant: bool = True,
    **kwargs: Any,
) -> Any:
    """`function(*args, **kwargs)`, whose activations are computed again in backward, under the recipe and with the scales of this call.

    As torch.utils.checkpoint.checkpoint, which does the work and takes the same further arguments (`preserve_rng_state`, `determinism_check`,
    `debug`, ...), but backward may be called outside of the autocast region, and recipes with a state see one step, not two.

    Args:
        function: what is called, and called again.
        args: its arguments.
        distribute_saved_activations: False; no other value is known yet.
        get_rng_state_tracker: what returns an object with `get_states()` and `set_states(states)`, whose generators are set back for backward.
        tp_group, use_reentrant: not used. It is torch's newer way that does the work, with the same numbers.
        kwargs: keyword arguments of torch's function, or of `function`.

    >>> import torch, tandem
    >>> linear = tandem.ops.Linear(16, 16)
    >>> with tandem.autocast(recipe=tandem.recipe.DelayedScaling()):
    ...     y = tandem.checkpoint(linear, torch.randn(4, 16))
    >>> y.sum().backward()
    """
    at_default("checkpoint", False, distribute_saved_activations=distribute_saved_activations)
    flag("checkpoint", "use_reentrant", use_reentrant)
    if is_dynamo_compiling():  # the recipe is in what is traced, and scales are values of the graph
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)
    return torch.utils.checkpoint.checkpoint(
        function, *args, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), _Recompute(get_rng_state_tracker)), **kwargs
    )
