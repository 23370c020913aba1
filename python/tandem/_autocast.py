"""The region in which a recipe is in force."""

from __future__ import annotations

import contextlib
import json
from types import TracebackType

import torch
from torch.compiler import is_compiling

from tandem import _C
from tandem.recipe import Float8CurrentScaling, Format, Recipe


def current_recipe() -> Recipe | None:
    """The recipe of the innermost region of this thread."""
    text = _C.active_recipe()
    if text is None:
        return None
    fields = json.loads(text)
    return Float8CurrentScaling(fields["use_power_2_scales"], Format[fields["fp8_format"]], *fields["amax_epsilon"])


class _Active:
    """The recipe in force as a plain Python value, which Dynamo reads and guards. Eager calls ask the library's thread-local state."""

    def __init__(self) -> None:
        self.recipe = "null"


active = _Active()
_DEFAULT_RECIPE = Float8CurrentScaling()


class autocast(contextlib.ContextDecorator):
    """Runs the products of pipelines in low precision inside a `with` block, as `recipe` says.

    The outermost region is also one region of weight codes: each weight is quantized once in it, again after an optimizer has stepped.
    `enabled=False` switches quantization off inside.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        if calibrating:
            raise NotImplementedError(
                "autocast: expected calibrating=False, got True. Current scaling needs no calibration; leave it out."
            )
        if amax_reduction_group is not None:
            raise NotImplementedError(
                f"autocast: expected amax_reduction_group=None, got {amax_reduction_group!r}. "
                "This version reduces no amax over processes; leave it out."
            )
        if recipe is None:
            recipe = _DEFAULT_RECIPE
        if not isinstance(recipe, Recipe):
            raise TypeError(
                f"autocast: expected recipe to be a recipe of tandem.recipe or None, got {type(recipe).__name__}. "
                "Pass tandem.recipe.Float8CurrentScaling()."
            )
        self._json = recipe.to_json() if enabled else "null"
        self._outer: list[str] = []

    def __enter__(self) -> None:
        self._outer.append(active.recipe)
        if not is_compiling():
            _C.enter_autocast(self._json)
        active.recipe = self._json

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        active.recipe = self._outer.pop()
        if not is_compiling():
            _C.exit_autocast()
