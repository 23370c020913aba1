"""What all recipes share: formats of operands, and fields that the library declares."""

from __future__ import annotations

import enum
import json
import math
from typing import Any, ClassVar, NamedTuple

from tandem import _C


class _Largest(NamedTuple):
    """The largest numbers of a format in forward (inputs and weights) and in backward (gradients)."""

    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    """The element type of the operands of a product. HYBRID is E4M3 for inputs and weights and E5M2 for gradients."""

    E2M1 = _Largest(max_fwd=6, max_bwd=6)
    E4M3 = _Largest(max_fwd=448, max_bwd=448)
    E5M2 = _Largest(max_fwd=57344, max_bwd=57344)
    HYBRID = _Largest(max_fwd=448, max_bwd=57344)


class MMParams(NamedTuple):
    """The precision in which a product sums.

    Args:
        use_split_accumulator: accepted for TransformerEngine, without effect: sums are float32 or wider.
    """

    use_split_accumulator: bool = True


class QParams(NamedTuple):
    """Options by which an operand is quantized, returned by `fp8_quant_fwd_inp`, `fp8_quant_fwd_weight` and `fp8_quant_bwd_grad` of a recipe.

    Args:
        power_2_scale: whether scales are powers of two.
        amax_epsilon: lower bound of an amax, in units of the operand.
        random_hadamard_transform: whether columns are rotated before they are quantized.
        stochastic_rounding: whether numbers are rounded stochastically.
        fp4_2d_quantization: whether blocks are squares.
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


class _Row(NamedTuple):
    """A field of a recipe as the library declares it. Constructors, checks and `to_json` follow the declaration."""

    name: str
    type: str
    default: Any
    expected: str
    least: float | None
    greatest: float | None
    words: list[str]
    doc: str

    def allows(self, value: Any) -> bool:
        if self.name == "fp8_format":
            return isinstance(value, Format) and value.name in self.words
        if self.name == "amax_compute_algo" and callable(value):
            return True
        if self.name == "backward_override":
            return value is None or isinstance(value, str) and value in self.words[1:]
        if self.type == "flag":
            return type(value) is bool
        if self.type == "text":
            return isinstance(value, str) and value in self.words
        if self.type == "whole":
            is_number = isinstance(value, int) and not isinstance(value, bool)
        else:
            is_number = hasattr(value, "__float__") and -math.inf < value < math.inf
        return is_number and (self.least is None or value >= self.least) and (self.greatest is None or value <= self.greatest)

    def written(self, value: Any) -> str:
        """The field as JSON. It is written by hand, so that Dynamo can trace it."""
        if self.type == "text":
            text = f'"{value.name if isinstance(value, Format) else "none" if value is None else value}"'
        elif self.type == "flag":
            text = "true" if value else "false"
        else:
            text = f"{int(value) if self.type == 'whole' else float(value)}"  # Dynamo does not trace str() of a number that it makes dynamic
        return f'"{self.name}":{text}'


def _is_named(*names: str) -> classmethod[Recipe, [], bool]:
    """A predicate of TransformerEngine, which tells a recipe by the library's name."""

    def is_named(cls: type[Recipe]) -> bool:
        return cls._name in names

    return classmethod(is_named)


class Recipe:
    """Base class of all recipes."""

    fp8_format: Format
    _name: ClassVar[str] = ""  # the library's name of the recipe, which subclasses of a recipe inherit
    _known: ClassVar[dict[str, type[Recipe]]] = {}  # all recipes by that name
    _rows: ClassVar[tuple[_Row, ...]]
    # TransformerEngine's arguments that accept only their default here. A recipe may have more.
    _only_defaults: ClassVar[tuple[tuple[str, object], ...]] = (("fp8_dpa", False), ("fp8_mha", False))

    def __init_subclass__(cls) -> None:
        if Recipe in cls.__bases__:
            cls._name, rows = cls.__name__, json.loads(_C.recipe_signature(cls.__name__))
            Recipe._known[cls.__name__] = cls
            cls._rows = tuple([_Row(*[row[name] for name in _Row._fields]) for row in rows])

    def __post_init__(self) -> None:
        for row in self._rows:
            if hasattr(self, row.name):  # regions and functions set the other fields, in the JSON alone
                self._check(row)
        for name, default in self._only_defaults:
            if getattr(self, name) != default:
                raise NotImplementedError(
                    f"{self._name}: expected {name}={default}, got {getattr(self, name)!r}. This version knows the default only."
                )

    def _check(self, row: _Row) -> None:
        value = getattr(self, row.name)
        if not row.allows(value):
            named = {
                "fp8_format": "Format.HYBRID or Format.E4M3",
                "amax_compute_algo": f"{row.expected} or a function",
                "backward_override": 'None, "high_precision" or "dequantized"',
            }
            expected = named.get(row.name, row.expected)
            expected = "True or False" if row.type == "flag" else expected
            raise ValueError(f"{self._name}: expected {row.name} to be {expected}, got {value!r}. {row.name}: {row.doc}.")

    delayed = _is_named("DelayedScaling")
    float8_current_scaling = _is_named("Float8CurrentScaling")
    float8_per_tensor_scaling = _is_named("DelayedScaling", "Float8CurrentScaling")
    float8_block_scaling = _is_named("Float8BlockScaling")
    mxfp8 = _is_named("MXFP8BlockScaling")
    nvfp4 = _is_named("NVFP4BlockScaling")
    custom = _is_named("CustomRecipe")

    def to_json(self) -> str:
        """The recipe as canonical JSON, which descriptions of pipelines contain."""
        return self._written({})

    def _written(self, instead: dict[str, object]) -> str:
        fields = [row.written(instead[row.name] if row.name in instead else getattr(self, row.name)) for row in self._rows]
        return "{" + ",".join(sorted([*fields, f'"name":"{self._name}"'])) + "}"


def check_recipe(op: str, recipe: object, or_none: str = " or None") -> None:
    """Raises TypeError unless `recipe` is a recipe or, if `or_none` is not empty, None."""
    if not isinstance(recipe, Recipe) and (recipe is not None or not or_none):
        raise TypeError(
            f"{op}: expected recipe to be a recipe of tandem.recipe{or_none}, got {type(recipe).__name__}. Pass for example "
            "tandem.recipe.MXFP8BlockScaling()."
        )
