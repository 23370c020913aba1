"""Recipes: the choice of low-precision format and scaling, as frozen values."""

from __future__ import annotations

import enum
import functools
import itertools
import json
import math
import types
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch

from tandem import _C
from tandem._quantizer import Quantizer

__all__ = [
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MMParams",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QParams",
    "QuantizerRole",
    "Recipe",
]


class _Largest(NamedTuple):
    """The largest numbers of a format: of inputs and weights, and of gradients."""

    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    """Formats of the operands of a product: one for all of them, or, HYBRID, E4M3 for inputs and weights and E5M2 for gradients."""

    E2M1 = _Largest(max_fwd=6, max_bwd=6)
    E4M3 = _Largest(max_fwd=448, max_bwd=448)
    E5M2 = _Largest(max_fwd=57344, max_bwd=57344)
    HYBRID = _Largest(max_fwd=448, max_bwd=57344)


class MMParams(NamedTuple):
    """How a product sums.

    Args:
        use_split_accumulator: of no meaning here: sums are float32 or wider.
    """

    use_split_accumulator: bool = True


class QParams(NamedTuple):
    """How an operand is quantized: what a recipe's `fp8_quant_fwd_inp`, `fp8_quant_fwd_weight` and `fp8_quant_bwd_grad` tell.

    Args:
        power_2_scale: whether scales are powers of two.
        amax_epsilon: the least amax.
        random_hadamard_transform: whether codes of columns are of rotated ones.
        stochastic_rounding: whether codes are rounded by chance.
        fp4_2d_quantization: whether blocks are squares.
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


class _Row(NamedTuple):
    """A field of a recipe, as the library has it: reading, writing and checks follow it."""

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
        """As JSON; by hand, as Dynamo traces it."""
        if self.type == "text":
            text = f'"{value.name if isinstance(value, Format) else "none" if value is None else value}"'
        elif self.type == "flag":
            text = "true" if value else "false"
        else:
            text = str(value if self.type == "whole" else float(value))
        return f'"{self.name}":{text}'


class Recipe:
    """Base of all recipes."""

    fp8_format: Format
    _name: ClassVar[str]  # what the library calls it
    _rows: ClassVar[tuple[_Row, ...]]
    _only_defaults: ClassVar[tuple[tuple[str, object], ...]] = ()  # arguments of TransformerEngine that the library has not

    def __init_subclass__(cls) -> None:
        if Recipe in cls.__bases__:
            cls._name, rows = cls.__name__, json.loads(_C.recipe_signature(cls.__name__))
            cls._rows = tuple([_Row(*[row[name] for name in _Row._fields]) for row in rows])

    def __post_init__(self) -> None:
        for row in self._rows:
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

    def delayed(self) -> bool:
        return isinstance(self, DelayedScaling)

    def float8_current_scaling(self) -> bool:
        return isinstance(self, Float8CurrentScaling)

    def float8_per_tensor_scaling(self) -> bool:
        return isinstance(self, (DelayedScaling, Float8CurrentScaling))

    def float8_block_scaling(self) -> bool:
        return isinstance(self, Float8BlockScaling)

    def mxfp8(self) -> bool:
        return isinstance(self, MXFP8BlockScaling)

    def nvfp4(self) -> bool:
        return isinstance(self, NVFP4BlockScaling)

    def custom(self) -> bool:
        return isinstance(self, CustomRecipe)

    def to_json(self) -> str:
        """The recipe as canonical JSON: what descriptions of pipelines hold."""
        return self._written({})

    def _written(self, instead: dict[str, object]) -> str:
        fields = [row.written(instead[row.name] if row.name in instead else getattr(self, row.name)) for row in self._rows]
        return "{" + ",".join(sorted([*fields, f'"name":"{self._name}"'])) + "}"


@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """FP8 with one scale per tensor, from the largest magnitude of the tensor as it is.

    scale = FP8 maximum / max(amax, epsilon), rounded down to a power of two with `use_power_2_scales`.

    Args:
        use_power_2_scales: whether scales are powers of two.
        fp8_format: formats of the operands.
        amax_epsilon_input, amax_epsilon_weight, amax_epsilon_grad_output: least amax of inputs, weights and gradients, at least 0.
        fp8_dpa, fp8_mha: False; no other value is known yet.
        backward_override: what backward multiplies by: None: codes, of gradients too; "high_precision": the numbers that forward has quantized, which are
            kept; "dequantized": the numbers that the codes of forward stand for, which are kept instead. Gradients are as they are then.
    """

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    amax_epsilon_input: float = 0.0
    amax_epsilon_weight: float = 0.0
    amax_epsilon_grad_output: float = 0.0
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    _only_defaults = (("fp8_dpa", False), ("fp8_mha", False))

    @property
    def fp8_quant_fwd_inp(self) -> QParams:
        return QParams(self.use_power_2_scales, self.amax_epsilon_input)

    @property
    def fp8_quant_fwd_weight(self) -> QParams:
        return QParams(self.use_power_2_scales, self.amax_epsilon_weight)

    @property
    def fp8_quant_bwd_grad(self) -> QParams:
        return QParams(self.use_power_2_scales, self.amax_epsilon_grad_output)


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

    _only_defaults = (*Float8CurrentScaling._only_defaults, ("backward_override", None))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scaling_factor_compute_algo is not None and not callable(self.scaling_factor_compute_algo):
            raise ValueError(
                f"DelayedScaling: expected scaling_factor_compute_algo to be None or a function, got {self.scaling_factor_compute_algo!r}. "
                "Leave it out."
            )
        object.__setattr__(self, "_function", _registered(self))

    def _check(self, row: _Row) -> None:
        is_other = row.name in ("amax_reduction_group", "calibrating", "scale_update")  # of the region, and of the functions
        if not is_other and not (row.name == "amax_compute_algo" and callable(self.amax_compute_algo)):
            super()._check(row)

    def __reduce__(self) -> tuple[Any, ...]:  # functions have another name in another process
        return type(self), tuple([getattr(self, field.name) for field in fields(self)])

    def to_json(self, group: str = "", calibrating: bool = False) -> str:
        """As the base class says; `group` is the name of the processes that share their amaxes, `calibrating` that products are not quantized."""
        instead: dict[str, object] = {"amax_reduction_group": group if self.reduce_amax else "", "calibrating": calibrating}
        instead["scale_update"] = self._function  # type: ignore[attr-defined]
        if callable(self.amax_compute_algo):
            instead["amax_compute_algo"] = "max"
        return self._written(instead)


def _registered(recipe: DelayedScaling) -> str:
    """The name under which the library finds the functions of a recipe; empty where it has none. Known by the functions: two recipes with the
    same ones share it, and it holds in this process only."""
    functions = (recipe.amax_compute_algo, recipe.scaling_factor_compute_algo)
    if not any(callable(function) for function in functions):
        return ""
    given = [getattr(recipe, field.name) for field in fields(recipe)]
    values = (type(recipe), *[id(value) if callable(value) else value for value in given])
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
        backward_override: as of `Float8CurrentScaling`.
    """

    margin: int = 0
    fp8_format: Format = Format.E4M3
    enable_2d_quantization: bool = False
    backward_override: str | None = None

    _only_defaults = (("margin", 0),)


@dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """FP8 with one scale per block of 128 numbers along the dimension that a product sums over, or of 128 by 128.

    scale = FP8 maximum / max(amax of the block, epsilon), rounded down to a power of two unless `use_f32_scales`.

    Args:
        use_f32_scales: whether scales are any float32 numbers, not powers of two.
        fp8_format: formats of the operands.
        x_block_scaling_dim, w_block_scaling_dim, grad_block_scaling_dim: blocks of inputs, weights and gradients, 1: lines of 128 numbers, 2: squares
            of 128 by 128, of which forward and backward see the same codes. No product takes two operands in squares.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: of no meaning: products sum in float32 or wider; split accumulators are required.
        fp8_dpa, fp8_mha: False; no other value is known yet.
        backward_override: as of `Float8CurrentScaling`.
        amax_epsilon_input, amax_epsilon_weight, amax_epsilon_grad_output: least amax of blocks of inputs, weights and gradients, at least 0.
    """

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams()
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    amax_epsilon_input: float = 0.0
    amax_epsilon_weight: float = 0.0
    amax_epsilon_grad_output: float = 0.0

    _only_defaults = (
        *[(name, MMParams()) for name in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad")],
        *Float8CurrentScaling._only_defaults,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        dims = (self.x_block_scaling_dim, self.w_block_scaling_dim, self.grad_block_scaling_dim)
        if dims.count(2) > 1:
            raise ValueError(
                f"Float8BlockScaling: expected squares for one operand at most, got x_block_scaling_dim={dims[0]}, w_block_scaling_dim={dims[1]}, "
                f"grad_block_scaling_dim={dims[2]}. No product takes two."
            )

    @property
    def fp8_quant_fwd_inp(self) -> QParams:
        return QParams(not self.use_f32_scales, self.amax_epsilon_input)

    @property
    def fp8_quant_fwd_weight(self) -> QParams:
        return QParams(not self.use_f32_scales, self.amax_epsilon_weight)

    @property
    def fp8_quant_bwd_grad(self) -> QParams:
        return QParams(not self.use_f32_scales, self.amax_epsilon_grad_output)


@dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    """Four bits, E2M1, with one E4M3 scale per block of 16 numbers along the dimension that a product sums over, and one float32 per tensor.

    The operands of the gradient of a weight are rotated by a random Hadamard transform, the same for both, which spreads outliers; gradients are rounded
    by chance, right on average; blocks of weights are 16 by 16, so that forward and backward see the same codes.

    Args:
        disable_rht: whether nothing is rotated.
        disable_stochastic_rounding: whether gradients are rounded to nearest.
        disable_2d_quantization: whether blocks of weights are lines of 16.
        row_scaled_activation: False; no other value is known yet.
        nvfp4_4over6, nvfp4_4over6_e4m3_use_256, nvfp4_4over6_err_mode: "none", "all" and "MAE"; no other values are known yet.
        fp4_format, fp8_format: Format.E2M1 and Format.E4M3; there are no others.
        fp8_dpa, fp8_mha: False; no other value is known yet.
        backward_override: as of `Float8CurrentScaling`.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    _only_defaults = (
        ("row_scaled_activation", False),
        ("nvfp4_4over6", "none"),
        ("nvfp4_4over6_e4m3_use_256", "all"),
        ("nvfp4_4over6_err_mode", "MAE"),
        ("fp4_format", Format.E2M1),
        ("fp8_format", Format.E4M3),
        *Float8CurrentScaling._only_defaults,
    )

    @property
    def fp4_quant_fwd_inp(self) -> QParams:
        return QParams(random_hadamard_transform=not self.disable_rht)

    @property
    def fp4_quant_fwd_weight(self) -> QParams:
        return QParams(fp4_2d_quantization=not self.disable_2d_quantization)

    @property
    def fp4_quant_bwd_grad(self) -> QParams:
        return QParams(random_hadamard_transform=not self.disable_rht, stochastic_rounding=not self.disable_stochastic_rounding)


class QuantizerRole(NamedTuple):
    """What a `CustomRecipe` is asked about: an operand of a product.

    Args:
        module_type: "linear", "grouped_linear", or "quantize" for `ops.Quantize`.
        tensor_type: "input", "weight" or "grad_output".
        name: the op as `explain` names it, with its place in the pipeline: "2.basic_linear"; empty where nobody calls it yet.
        slot: which of a list of operands.
    """

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""
    slot: int = 0


_QuantizerFactory = Callable[[QuantizerRole], Quantizer | None]


@dataclass(frozen=True)
class CustomRecipe(Recipe):
    """Each operand of a product as a function says.

    >>> import torch, tandem
    >>> def four_bits_forward(role: tandem.recipe.QuantizerRole) -> tandem.Quantizer | None:
    ...     if role.tensor_type == "grad_output":
    ...         return tandem.MXFP8Quantizer(torch.float8_e5m2)
    ...     return tandem.NVFP4Quantizer()
    >>> linear = tandem.ops.Linear(64, 64)
    >>> with tandem.autocast(recipe=tandem.recipe.CustomRecipe(four_bits_forward)):
    ...     y = linear(torch.randn(4, 64))

    Args:
        qfactory: given a `QuantizerRole`, the quantizer of the tensor, or None where it is not quantized; asked once for each role. It is known by its
            code and what it has captured, a method by its object, so that what it decides by must not change; one that differs each time is kept each time, of which a warning tells. Quantizers are the library's: one with
            a `quantize` of its own is refused. The codes of the other operand of a product are decoded where there is none. What products read decides which directions there are, not the quantizer.
        fp8_format, quantization_alignment: of no meaning: quantizers have formats, and padding is inside.
        fp8_dpa, fp8_mha: False; no other value is known yet.
        backward_override: as of `Float8CurrentScaling`.
    """

    qfactory: _QuantizerFactory
    fp8_format: Format = Format.HYBRID
    quantization_alignment: int = 128
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    _only_defaults = Float8CurrentScaling._only_defaults

    def __post_init__(self) -> None:
        if not callable(self.qfactory):
            raise ValueError(f"CustomRecipe: expected qfactory to be a function of a QuantizerRole, got {self.qfactory!r}. Return a quantizer in it, or None.")
        super().__post_init__()
        object.__setattr__(self, "_function", _chosen_by(self))

    def _check(self, row: _Row) -> None:
        if row.name != "quantizers":
            super()._check(row)

    def __reduce__(self) -> tuple[Any, ...]:  # functions have another name in another process
        return type(self), tuple([getattr(self, field.name) for field in fields(self)])

    def to_json(self) -> str:
        return self._written({"quantizers": self._function})  # type: ignore[attr-defined]


def _chosen_by(recipe: CustomRecipe) -> str:
    """The name under which the library finds the function of a recipe."""
    parts: list[object] = []
    key = _identity(recipe.qfactory, parts)
    if key not in _choices:
        name = f"python-{uuid.uuid4().hex[:12]}-{next(_numbers)}"
        _C.register_quantizer_choice(name, functools.partial(_choose, recipe.qfactory))
        _factories[name] = recipe.qfactory
        _choices[key] = name, parts
        _count(recipe.qfactory)
    return _choices[key][0]


def _count(function: Any) -> None:
    """Warns, once for each line, of functions that are new each time that it runs."""
    while type(function) is functools.partial:
        function = function.func
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", type(function))
    _made_of[code] = _made_of.get(code, 0) + 1
    if _made_of[code] == _MANY:
        where = f" at {code.co_filename}:{code.co_firstlineno}" if isinstance(code, types.CodeType) else ""
        warnings.warn(
            f"CustomRecipe: expected a qfactory that has captured what others of its code have, got {_MANY} of {_name_of(code)}{where} that "
            "differ. Each stays for good, as plans and files name it. Build the recipe once, outside of the loop.",
            stacklevel=5,
        )


def _name_of(code: Any) -> str:
    return code.co_name if isinstance(code, types.CodeType) else code.__qualname__


_MANY = 64
_made_of: dict[object, int] = {}  # functions by their code


_choices: dict[object, tuple[str, list[object]]] = {}  # with what the key names by number, which nothing else gets while it lives
_factories: dict[str, _QuantizerFactory] = {}


def _identity(function: object, parts: list[object]) -> object:
    """What tells a function from others: a method or a lambda is another object each time that its line runs. `parts` takes what has to stay."""

    def held(value: object) -> object:
        if isinstance(value, Quantizer):
            return value._values()
        if value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype)):
            return type(value), repr(value)
        parts.append(value)
        return id(value)

    if isinstance(function, types.MethodType):
        return "method", _identity(function.__func__, parts), held(function.__self__)
    if type(function) is functools.partial:
        return "partial", _identity(function.func, parts), *map(held, function.args), *[(name, held(value)) for name, value in function.keywords.items()]
    if not isinstance(function, types.FunctionType) or function.__dict__:
        return held(function)
    try:
        captured = [held(cell.cell_contents) for cell in function.__closure__ or ()]
    except ValueError:  # of a name that has no value yet
        return held(function)
    defaults = [held(value) for value in function.__defaults__ or ()]
    named = [(name, held(value)) for name, value in (function.__kwdefaults__ or {}).items()]
    return "function", held(function.__code__), held(function.__globals__), tuple(captured), tuple(defaults), tuple(named)


def _choose(qfactory: _QuantizerFactory, kind: str, role: str, op: str, slot: int) -> str:
    chosen = qfactory(QuantizerRole("linear" if kind == "basic_linear" else kind, role, op, slot))
    if chosen is None:
        return ""
    if not isinstance(chosen, Quantizer):
        raise TypeError(f"CustomRecipe: expected qfactory to return a quantizer or None, got {type(chosen).__name__}. Return for example tandem.MXFP8Quantizer(...).")
    if any([getattr(getattr(chosen, method), "__module__", "") not in _QUANTIZER_MODULES for method in ("quantize", "_codes")]):
        raise NotImplementedError(
            f"CustomRecipe: expected a quantizer of tandem for the {role} of {op}, as products quantize by its format alone, got {type(chosen).__name__} "
            "with a quantize of its own. Return one of the library's."
        )
    if getattr(chosen, "_amax_group", None) is not None:
        raise NotImplementedError(
            f"CustomRecipe: expected with_amax_reduction=False for the {role} of {op}, as products quantize by themselves, got True. Use a format whose "
            "scales are of blocks."
        )
    if role == "weight" and ":sr=1" in chosen.text:
        raise ValueError(
            f"CustomRecipe: expected a quantizer that rounds to nearest for the weight of {op}, as its codes are kept from call to call, got "
            "stochastic_rounding=True. Round gradients so, whose role is grad_output."
        )
    return chosen.text


_QUANTIZER_MODULES = (Quantizer.__module__, "tandem._quantize")


_RECIPES: tuple[type[Recipe], ...] = (DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling)


def recipe_from_json(text: str) -> Recipe:
    """The recipe of `to_json`: its fields are what the constructor calls them."""
    values = json.loads(text)
    name = values.pop("name")
    for of_the_region in ("amax_reduction_group", "calibrating"):
        values.pop(of_the_region, None)
    if (function := values.pop("scale_update", "")) in _with_functions:
        return _with_functions[function]
    if values.get("backward_override") == "none":
        values["backward_override"] = None
    if (function := values.pop("quantizers", "")) in _factories:
        return CustomRecipe(_factories[function], **values)
    known = {recipe._name: recipe for recipe in _RECIPES}
    if name not in known:
        raise ValueError(f"recipe: expected one of {', '.join(known)}, got {name!r}. Use the version of tandem that wrote it.")
    return known[name](**{field: Format[value] if field == "fp8_format" else value for field, value in values.items()})


def __dir__() -> list[str]:
    return __all__
