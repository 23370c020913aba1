"""`checkpoint`: activation checkpointing under recipes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint
from torch.compiler import is_dynamo_compiling

from tandem import _C
from tandem.arguments import at_default, flag


class _Recompute:
    """The context in which backward recomputes a function, with the recipe, region, scales and generators that were in force in forward."""

    def __init__(self, get_rng_state_tracker: Callable[[], Any] | None) -> None:
        self.region = _C.region_now()
        self.tracker = None if get_rng_state_tracker is None else get_rng_state_tracker()
        self.states = None if self.tracker is None else self.tracker.get_states()  # states of the generators at the beginning of forward
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
    """`function(*args, **kwargs)`, whose activations backward recomputes under the recipe and with the scales of this call.

    The function calls torch.utils.checkpoint.checkpoint, and passes on its further arguments (`preserve_rng_state`, `determinism_check`, `debug`, ...).
    In addition backward may run outside of the autocast region, and recipes with state count one step, not two.

    Args:
        function: the function that forward calls and backward recomputes.
        args: positional arguments of `function`.
        distribute_saved_activations: False; other values raise NotImplementedError.
        get_rng_state_tracker: function that returns an object with `get_states()` and `set_states(states)`, whose generators are reset for backward.
        tp_group, use_reentrant: not used. Torch's non-reentrant checkpoint always runs.
        kwargs: keyword arguments of torch's function, or of `function`.

    >>> import torch, tandem
    >>> linear = tandem.ops.Linear(16, 16)
    >>> with tandem.autocast(recipe=tandem.recipe.DelayedScaling()):
    ...     y = tandem.checkpoint(linear, torch.randn(4, 16))
    >>> y.sum().backward()
    """
    at_default("checkpoint", False, distribute_saved_activations=distribute_saved_activations)
    flag("checkpoint", "use_reentrant", use_reentrant)
    if is_dynamo_compiling():  # the traced graph contains the recipe, and scales are values in it
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)
    return torch.utils.checkpoint.checkpoint(
        function, *args, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), _Recompute(get_rng_state_tracker)), **kwargs
    )
