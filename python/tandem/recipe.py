"""Recipes: the choice of low-precision format and scaling, as frozen values."""

from __future__ import annotations

import enum
import functools
import itertools
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from tandem import _C

__all__ = ["DelayedScaling", "Float8CurrentScaling", "Format", "MXFP8BlockScaling", "Recipe"]


class Format(enum.Enum):
    """FP8 formats of the operands of a product: E4M3 everywhere, or, HYBRID, E5M2 for gradients."""

    E4M3 = "E4M3"
    HYBRID = "HYBRID"


class Recipe:
    """Base of all recipes."""

    fp8_format: Format

    def _check_format(self) -> None:
        if not isinstance(self.fp8_format, Format):
            raise ValueError(
                f"{type(self).__name__}: expected fp8_format to be Format.HYBRID or Format.E4M3, got {self.fp8_format!r}. "
                "Take it from tandem.recipe.Format."
            )

    def _check_defaults(self, *defaults: tuple[str, object]) -> None:
        for name, default in defaults:
            if getattr(self, name) != default:
                raise NotImplementedError(
                    f"{type(self).__name__}: expected {name}={default}, got {getattr(self, name)!r}. This version knows the default only."
                )

    def to_json(self) -> str:
        """The recipe as canonical JSON: what descriptions of pipelines hold."""
        raise NotImplementedError


@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """FP8 with one scale per tensor, from the largest magnitude of the tensor as it is.

    scale = FP8 maximum / max(amax, epsilon), rounded down to a power of two with `use_power_2_scales`.

    Args:
        use_power_2_scales: whether scales are powers of two.
        fp8_format: formats of the operands.
        amax_epsilon_input, amax_epsilon_weight, amax_epsilon_grad_output: least amax of inputs, weights and gradients, at least 0.
        fp8_dpa, fp8_mha: False; no other value is known yet.
        backward_override: None; no other value is known yet.
    """

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    amax_epsilon_input: float = 0.0
    amax_epsilon_weight: float = 0.0
    amax_epsilon_grad_output: float = 0.0
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        self._check_format()
        if type(self.use_power_2_scales) is not bool:
            raise ValueError(
                f"Float8CurrentScaling: expected use_power_2_scales to be True or False, got {self.use_power_2_scales!r}. "
                "Pass a bool."
            )
        for name in ("amax_epsilon_input", "amax_epsilon_weight", "amax_epsilon_grad_output"):
            epsilon = getattr(self, name)
            if not hasattr(epsilon, "__float__") or not 0 <= epsilon < float("inf"):
                raise ValueError(
                    f"Float8CurrentScaling: expected {name} to be finite and at least 0, got {epsilon!r}. It is the least amax."
                )
        self._check_defaults(("fp8_dpa", False), ("fp8_mha", False), ("backward_override", None))

    def to_json(self) -> str:  # formatted by hand, as Dynamo traces it
        power_2 = "true" if self.use_power_2_scales else "false"
        return (
            f'{{"amax_epsilon_grad_output":{float(self.amax_epsilon_grad_output)},"amax_epsilon_input":{float(self.amax_epsilon_input)},'
            f'"amax_epsilon_weight":{float(self.amax_epsilon_weight)},"fp8_format":"{self.fp8_format.value}",'
            f'"name":"Float8CurrentScaling","use_power_2_scales":{power_2}}}'
        )


_AmaxCompute = Callable[[torch.Tensor], torch.Tensor]
_ScaleCompute = Callable[[torch.Tensor, torch.Tensor, float, "DelayedScaling"], torch.Tensor]
_numbers = itertools.count(1)


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """FP8 with one scale per tensor, from the amaxes of past steps: scale = FP8 maximum 2^-margin / amax.

    Modules keep a history of amaxes for each tensor that is quantized for them, in the buffers of `recipe_state`. It moves on once per outermost
    `tandem.autocast`: for forward when that is left with gradients enabled, for gradients when the last backward of its calls has run.

    Args:
        margin: scales are 2^margin times smaller than they could be; from -64 to 64.
        fp8_format: formats of the operands.
        amax_history_len: steps that count, from 1 to 65536.
        amax_compute_algo: "max" (the largest of the history), "most_recent", or a function of the history [length, slots] that gives the amaxes
            [slots].
        scaling_factor_compute_algo: None, or a function of the amaxes [slots], the scales [slots] so far, the FP8 maximum and this recipe that
            gives the scales [slots].
        reduce_amax: whether processes share their amaxes: those of `amax_reduction_group` of `tandem.autocast`, else all.
        fp8_dpa, fp8_mha: False; no other value is known yet.
        backward_override: None; there is no other value.
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

    def __post_init__(self) -> None:
        self._check_format()
        for name, least, most in (("margin", -64, 64), ("amax_history_len", 1, 65536)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise ValueError(f"DelayedScaling: expected {name} to be a whole number from {least} to {most}, got {value!r}. Pass an int.")
        if type(self.reduce_amax) is not bool:
            raise ValueError(f"DelayedScaling: expected reduce_amax to be True or False, got {self.reduce_amax!r}. Pass a bool.")
        if not callable(self.amax_compute_algo) and self.amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(
                f'DelayedScaling: expected amax_compute_algo to be "max", "most_recent" or a function, got {self.amax_compute_algo!r}. '
                "Name which amax of the history counts."
            )
        if self.scaling_factor_compute_algo is not None and not callable(self.scaling_factor_compute_algo):
            raise ValueError(
                f"DelayedScaling: expected scaling_factor_compute_algo to be None or a function, got {self.scaling_factor_compute_algo!r}. "
                "Leave it out."
            )
        self._check_defaults(("fp8_dpa", False), ("fp8_mha", False), ("backward_override", None))
        object.__setattr__(self, "_function", _registered(self))

    def __reduce__(self) -> tuple[Any, ...]:  # functions have another name in another process
        return type(self), tuple([getattr(self, field.name) for field in fields(self)])

    def to_json(self, group: str = "") -> str:
        """As the base class says; `group` is the name of the processes that share their amaxes."""
        algorithm = "max" if callable(self.amax_compute_algo) else self.amax_compute_algo
        reduce = "true" if self.reduce_amax else "false"
        named_group = f'"amax_reduction_group":"{group}",' if group and self.reduce_amax else ""
        function: str = self._function  # type: ignore[attr-defined]
        named_function = f',"scale_update":"{function}"' if function else ""
        return (
            f'{{"amax_compute_algo":"{algorithm}","amax_history_len":{self.amax_history_len},{named_group}"fp8_format":"{self.fp8_format.value}",'
            f'"margin":{self.margin},"name":"DelayedScaling","reduce_amax":{reduce}{named_function}}}'
        )


def _registered(recipe: DelayedScaling) -> str:
    """The name under which the library finds the functions of a recipe; empty where it has none. Known by the functions: two recipes with the
    same ones share it, and it holds in this process only."""
    functions = (recipe.amax_compute_algo, recipe.scaling_factor_compute_algo)
    if not any(callable(function) for function in functions):
        return ""
    values = tuple([getattr(recipe, field.name) for field in fields(recipe)])
    if values not in _functions:
        name = f"python-{uuid.uuid4().hex[:12]}-{next(_numbers)}"
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
    """Ends a step of slots whose row 0 is their amax over all processes. Slots that were not used stay as they are."""
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


@dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """FP8 with one power of two as scale per block of 32 numbers, along the dimension that a product sums over (OCP MX).

    Args:
        margin: 0; these scales have no margin.
        fp8_format: formats of the operands.
        enable_2d_quantization: whether blocks of weights are 32 by 32, so that forward and backward see the same codes.
        backward_override: None; no other value is known yet.
    """

    margin: int = 0
    fp8_format: Format = Format.E4M3
    enable_2d_quantization: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        self._check_format()
        if type(self.enable_2d_quantization) is not bool:
            raise ValueError(
                f"MXFP8BlockScaling: expected enable_2d_quantization to be True or False, got {self.enable_2d_quantization!r}. "
                "Pass a bool."
            )
        self._check_defaults(("margin", 0), ("backward_override", None))

    def to_json(self) -> str:
        square = "true" if self.enable_2d_quantization else "false"
        return f'{{"enable_2d_quantization":{square},"fp8_format":"{self.fp8_format.value}","name":"MXFP8BlockScaling"}}'


_RECIPES: tuple[type[Recipe], ...] = (DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling)


def recipe_from_json(text: str) -> Recipe:
    """The recipe of `to_json`: its fields are what the constructor calls them."""
    values = json.loads(text)
    name = values.pop("name")
    values.pop("amax_reduction_group", None)  # of the region, not of the recipe
    if (function := values.pop("scale_update", "")) in _with_functions:
        return _with_functions[function]
    known = {recipe.__name__: recipe for recipe in _RECIPES}
    if name not in known:
        raise ValueError(f"recipe: expected one of {', '.join(known)}, got {name!r}. Use the version of tandem that wrote it.")
    return known[name](**{field: Format(value) if field == "fp8_format" else value for field, value in values.items()})


def __dir__() -> list[str]:
    return __all__
