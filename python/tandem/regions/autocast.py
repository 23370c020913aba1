"""`autocast`, the region in which a recipe is in force, its older name, and queries for the formats of recipes."""

from __future__ import annotations

import contextlib

import torch
from torch.compiler import is_dynamo_compiling
from typing_extensions import Self

from tandem import _C
from tandem.arguments import check_amax_group, flag
from tandem.recipe import DelayedScaling, Float8CurrentScaling, Recipe
from tandem.recipe.base import check_recipe
from tandem.recipe_state import history_length, traced_region, traced_regions

_DEFAULT_RECIPE = Float8CurrentScaling()


def _group_of(recipe: DelayedScaling, group: torch.distributed.ProcessGroup | None) -> str:
    """The name of the process group whose ranks share amaxes; empty if the recipe does not reduce amaxes, or the group has one rank."""
    distributed = torch.distributed
    if not recipe.reduce_amax or not distributed.is_available() or not distributed.is_initialized():
        return ""
    group = distributed.group.WORLD if group is None else group
    return str(group.group_name) if group is not None and group.size() > 1 else ""


class autocast(contextlib.ContextDecorator):
    """A region, entered by `with`, in which pipelines quantize the operands of products by a recipe.

    A weight is quantized once until it changes; on an accelerator, where its bytes are not compared, once in each outermost region.
    `enabled=False` switches quantization off inside. A region belongs to its thread and async context: other threads and tasks do not see it. One object
    may be entered several times, also by several threads at once. The innermost region must be left first: another order raises RuntimeError, and the
    regions stay in force until they are left. `with ... as region` binds the object.

    >>> import torch, tandem
    >>> linear = tandem.ops.Linear(16, 16)
    >>> with tandem.autocast(recipe=tandem.recipe.Float8CurrentScaling()):
    ...     y = linear(torch.randn(4, 16))
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        """Creates a region, which `with` enters.

        Args:
            enabled: whether operands of products inside are quantized.
            calibrating: with `enabled=False`: whether `DelayedScaling` records amaxes of operands, which are not quantized.
            recipe: formats and scaling; None: `Float8CurrentScaling()`.
            amax_reduction_group: process group whose ranks share amaxes under `DelayedScaling`; None: all processes.
        """
        cure = "Pass a recipe as recipe=."
        enabled, calibrating = flag("autocast", "enabled", enabled, cure), flag("autocast", "calibrating", calibrating, cure)
        check_amax_group("autocast", amax_reduction_group)
        check_recipe("autocast", recipe)
        recipe = _DEFAULT_RECIPE if recipe is None else recipe
        self._recipe, self._group, self._enabled, self._calibrating = recipe, amax_reduction_group, enabled, calibrating
        self._keeps_amaxes = isinstance(recipe, DelayedScaling) and (enabled or calibrating)
        if isinstance(recipe, DelayedScaling) and self._keeps_amaxes:
            self._json = recipe.to_json(calibrating=not enabled)
        else:
            self._json = recipe.to_json() if enabled else "null"
        self._outer_while_traced: list[str] = []

    @property
    def enabled(self) -> bool:
        """Whether operands of products inside are quantized."""
        return self._enabled

    @property
    def calibrating(self) -> bool:
        """Whether amaxes of operands are recorded while they are not quantized."""
        return self._calibrating

    @property
    def recipe(self) -> Recipe:
        """The recipe of the region."""
        return self._recipe

    @property
    def amax_reduction_group(self) -> torch.distributed.ProcessGroup | None:
        """The process group whose ranks share amaxes; None: all processes."""
        return self._group

    def __enter__(self) -> Self:
        # is_compiling() would also be True while another thread compiles.
        text = self._json
        if self._keeps_amaxes and (group := _group_of(self._recipe, self._group)):  # type: ignore[arg-type]
            text = self._recipe.to_json(group, not self._enabled)  # type: ignore[call-arg]
        if is_dynamo_compiling():  # compiled code enters no region, as its descriptions contain the recipe
            self._outer_while_traced.append(_C.in_force.recipe)
            if history_length(text):
                traced_regions.append(traced_region())
            _C.in_force.recipe = text
        else:
            _C.enter_autocast(text, self)
        return self

    def __exit__(self, *_: object) -> None:
        if is_dynamo_compiling():
            if history_length(_C.in_force.recipe):
                traced_regions.pop()
            _C.in_force.recipe = self._outer_while_traced.pop()
        else:
            _C.exit_autocast(self)


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: torch.distributed.ProcessGroup | None = None,
    _graph: bool = False,
) -> autocast:
    """The older name of `autocast`.

    Args:
        enabled, calibrating: as for `autocast`.
        fp8_recipe, fp8_group: `recipe` and `amax_reduction_group` of `autocast`.
        _graph: not used.
    """
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """True: every recipe works on every machine exactly as specified, and is emulated if the machine lacks instructions for its formats.

    Args:
        return_reason: whether to return the pair (True, "") of the answer and an empty reason.
    """
    return (True, "") if return_reason else True


is_fp8_block_scaling_available = is_mxfp8_available = is_nvfp4_available = is_fp8_available
