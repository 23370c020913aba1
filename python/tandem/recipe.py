"""Recipes: the choice of low-precision format and scaling, as frozen values."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass

__all__ = ["Float8CurrentScaling", "Format", "MXFP8BlockScaling", "Recipe"]


class Format(enum.Enum):
    """FP8 formats of the operands of a product: E4M3 everywhere, or, HYBRID, E5M2 for gradients."""

    E4M3 = "E4M3"
    HYBRID = "HYBRID"


class Recipe:
    """Base of all recipes."""

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
        if not isinstance(self.fp8_format, Format):
            raise ValueError(
                f"Float8CurrentScaling: expected fp8_format to be Format.HYBRID or Format.E4M3, got {self.fp8_format!r}. "
                "Take it from tandem.recipe.Format."
            )
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
        for name, default in (("fp8_dpa", False), ("fp8_mha", False), ("backward_override", None)):
            if getattr(self, name) != default:
                raise NotImplementedError(
                    f"Float8CurrentScaling: expected {name}={default}, got {getattr(self, name)!r}. "
                    "This version knows the default only."
                )

    def to_json(self) -> str:  # formatted by hand, as Dynamo traces it
        power_2 = "true" if self.use_power_2_scales else "false"
        return (
            f'{{"amax_epsilon_grad_output":{float(self.amax_epsilon_grad_output)},"amax_epsilon_input":{float(self.amax_epsilon_input)},'
            f'"amax_epsilon_weight":{float(self.amax_epsilon_weight)},"fp8_format":"{self.fp8_format.value}",'
            f'"name":"Float8CurrentScaling","use_power_2_scales":{power_2}}}'
        )


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
        if not isinstance(self.fp8_format, Format):
            raise ValueError(
                f"MXFP8BlockScaling: expected fp8_format to be Format.E4M3 or Format.HYBRID, got {self.fp8_format!r}. "
                "Take it from tandem.recipe.Format."
            )
        if type(self.enable_2d_quantization) is not bool:
            raise ValueError(
                f"MXFP8BlockScaling: expected enable_2d_quantization to be True or False, got {self.enable_2d_quantization!r}. "
                "Pass a bool."
            )
        for name, default in (("margin", 0), ("backward_override", None)):
            if getattr(self, name) != default:
                raise NotImplementedError(
                    f"MXFP8BlockScaling: expected {name}={default}, got {getattr(self, name)!r}. This version knows the default only."
                )

    def to_json(self) -> str:
        square = "true" if self.enable_2d_quantization else "false"
        return f'{{"enable_2d_quantization":{square},"fp8_format":"{self.fp8_format.value}","name":"MXFP8BlockScaling"}}'


_RECIPES: tuple[type[Recipe], ...] = (Float8CurrentScaling, MXFP8BlockScaling)


def recipe_from_json(text: str) -> Recipe:
    """The recipe of `to_json`: its fields are what the constructor calls them."""
    fields = json.loads(text)
    name = fields.pop("name")
    known = {recipe.__name__: recipe for recipe in _RECIPES}
    if name not in known:
        raise ValueError(f"recipe: expected one of {', '.join(known)}, got {name!r}. Use the version of tandem that wrote it.")
    return known[name](**{field: Format(value) if field == "fp8_format" else value for field, value in fields.items()})


def __dir__() -> list[str]:
    return __all__
