"""The recipe whose scales come from past steps, and functions of users that compute such scales."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from tandem import _C
from tandem.recipe.base import Format, Recipe


_AmaxCompute = Callable[[torch.Tensor], torch.Tensor]
_ScaleCompute = Callable[[torch.Tensor, torch.Tensor, float, "DelayedScaling"], torch.Tensor]


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """FP8 with one scale per tensor, from the amaxes of past steps: scale = FP8 maximum 2^-margin / amax.

    Modules keep a history of amaxes for each tensor that is quantized for them, in the buffers of `recipe_state`. A step is one outermost
    `tandem.autocast`: forward's history advances when it is left with gradients enabled, backward's history after the last backward of its calls.

    Args:
        margin: from -64 to 64; scales are 2^margin times smaller than the largest without overflow.
        fp8_format: element types of the operands: Format.HYBRID or Format.E4M3.
        amax_history_len: number of steps in the history, from 1 to 65536.
        amax_compute_algo: "max" for the largest amax of the history, "most_recent", or a function of the history [length, slots] that returns the
            amaxes [slots].
        scaling_factor_compute_algo: None, or a function of the amaxes [slots], the current scales [slots], the FP8 maximum and this recipe that
            returns the new scales [slots].
        reduce_amax: whether ranks share their amaxes: those of `amax_reduction_group` of `tandem.autocast`, or all ranks without a group.
        fp8_dpa, fp8_mha: False; another value raises NotImplementedError.
        backward_override: None; another value raises an error.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | _AmaxCompute = "max"
    scaling_factor_compute_algo: _ScaleCompute | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    _only_defaults = (*Recipe._only_defaults, ("backward_override", None))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scaling_factor_compute_algo is not None and not callable(self.scaling_factor_compute_algo):
            raise ValueError(
                f"DelayedScaling: expected scaling_factor_compute_algo to be None or a function, got {self.scaling_factor_compute_algo!r}. "
                "Leave it out."
            )
        object.__setattr__(self, "_function", _registered(self))

    def __reduce__(self) -> tuple[Any, ...]:  # functions are registered under another name in another process
        return type(self), tuple([getattr(self, field.name) for field in fields(self)])

    def to_json(self, group: str = "", calibrating: bool = False) -> str:
        """The recipe as canonical JSON. `group` names the ranks that share their amaxes; `calibrating` declares that products are not quantized."""
        instead: dict[str, object] = {"amax_reduction_group": group if self.reduce_amax else "", "calibrating": calibrating}
        instead["scale_update"] = self._function  # type: ignore[attr-defined]
        if callable(self.amax_compute_algo):
            instead["amax_compute_algo"] = "max"
        return self._written(instead)


def _registered(recipe: DelayedScaling) -> str:
    """The name under which the library finds a recipe's functions; empty if it has none. Recipes with equal fields share a name, which is valid in
    this process only."""
    functions = (recipe.amax_compute_algo, recipe.scaling_factor_compute_algo)
    if not any(callable(function) for function in functions):
        return ""
    given = [getattr(recipe, field.name) for field in fields(recipe)]
    values = (type(recipe), *[id(value) if callable(value) else value for value in given])
    if values not in _functions:
        name = f"python-{uuid.uuid4().hex}"
        _C.register_scale_update(name, functools.partial(_update, recipe))
        _with_functions[name] = recipe
        _functions[values] = name
    return _functions[values]


_functions: dict[tuple[Any, ...], str] = {}
_with_functions: dict[str, DelayedScaling] = {}


def _checked(name: str, given: Any, scale: torch.Tensor) -> torch.Tensor:
    if not isinstance(given, torch.Tensor) or given.shape != scale.shape:
        got = tuple(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
        raise ValueError(f"DelayedScaling: expected {name} to give a tensor of shape {tuple(scale.shape)}, one number per slot, got {got}.")
    return given


def _update(recipe: DelayedScaling, amax_history: torch.Tensor, scale: torch.Tensor, fp8_max: float) -> None:
    """Updates scales and histories at the end of a step. Row 0 of the history is the amax over all ranks; slots with amax 0 were not used and stay."""
    with torch.no_grad():
        used = amax_history[0] != 0
        if callable(recipe.amax_compute_algo):
            amax = _checked("amax_compute_algo", recipe.amax_compute_algo(amax_history.clone()), scale)
        else:
            amax = amax_history[0] if recipe.amax_compute_algo == "most_recent" else amax_history.nan_to_num(0.0, torch.inf).amax(0)
        if recipe.scaling_factor_compute_algo is not None:
            scales = _checked("scaling_factor_compute_algo", recipe.scaling_factor_compute_algo(amax, scale.clone(), fp8_max, recipe), scale)
        else:
            scales = (torch.tensor(fp8_max * 2.0**-recipe.margin, dtype=torch.float64) / amax).float()
            scales = torch.where(torch.isfinite(amax) & (amax > 0), scales.clamp(max=torch.finfo(torch.float32).max), scale)
        moved = torch.roll(amax_history, -1, 0)
        moved[0] = 0
        amax_history.copy_(torch.where(used, moved, amax_history))
        scale.copy_(torch.where(used, scales, scale))
