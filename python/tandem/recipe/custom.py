"""The recipe in which a function of the user chooses the quantizer of each operand."""

from __future__ import annotations

import functools
import types
import uuid
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch

from tandem import _C
from tandem.quantized.quantizer import Quantizer
from tandem.recipe.base import Format, Recipe


class QuantizerRole(NamedTuple):
    """The operand of a product for which a `CustomRecipe` chooses a quantizer.

    Args:
        module_type: "linear", "grouped_linear", or "quantize" for `ops.Quantize`.
        tensor_type: "input", "weight" or "grad_output".
        name: the op's index in the pipeline and its kind, as `explain` prints them: "2.basic_linear"; empty outside of a call.
        slot: index of the operand in a list of operands.
    """

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""
    slot: int = 0


_QuantizerFactory = Callable[[QuantizerRole], Quantizer | None]


@dataclass(frozen=True)
class CustomRecipe(Recipe):
    """A function chooses the quantizer of each operand of a product.

    >>> import torch, tandem
    >>> def four_bits_forward(role: tandem.recipe.QuantizerRole) -> tandem.Quantizer | None:
    ...     if role.tensor_type == "grad_output":
    ...         return tandem.MXFP8Quantizer(torch.float8_e5m2)
    ...     return tandem.NVFP4Quantizer()
    >>> linear = tandem.ops.Linear(64, 64)
    >>> with tandem.autocast(recipe=tandem.recipe.CustomRecipe(four_bits_forward)):
    ...     y = linear(torch.randn(4, 64))

    Args:
        qfactory: a function of a `QuantizerRole` that returns the quantizer of that operand, or None for no quantization. It is called once for each role. A
            function is recognized by its code and captured values, a method by its object, so what it depends on must not change. Functions that differ
            are kept for good, and a warning reports many of them. A quantizer with a `quantize` method of its own raises NotImplementedError.
            If only one operand of a product has a quantizer, its codes are dequantized. The products that read an operand decide its directions.
        fp8_format, quantization_alignment: without effect: quantizers have formats, and kernels pad.
        fp8_dpa, fp8_mha: False; another value raises NotImplementedError.
        backward_override: as for `Float8CurrentScaling`.
    """

    qfactory: _QuantizerFactory
    fp8_format: Format = Format.HYBRID
    quantization_alignment: int = 128
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        if not callable(self.qfactory):
            raise ValueError(f"CustomRecipe: expected qfactory to be a function of a QuantizerRole, got {self.qfactory!r}. Return a quantizer in it, or None.")
        super().__post_init__()
        object.__setattr__(self, "_function", _chosen_by(self))

    def __reduce__(self) -> tuple[Any, ...]:  # functions are registered under another name in another process
        return type(self), tuple([getattr(self, field.name) for field in fields(self)])

    def to_json(self) -> str:
        return self._written({"quantizers": self._function})  # type: ignore[attr-defined]


def _chosen_by(recipe: CustomRecipe) -> str:
    """The name under which the library finds a recipe's function, which is registered if it is new."""
    parts: list[object] = []
    key = _identity(recipe.qfactory, parts)
    if key not in _choices:
        name = f"python-{uuid.uuid4().hex}"
        _C.register_quantizer_choice(name, functools.partial(_choose, recipe.qfactory))
        _factories[name] = recipe.qfactory
        _choices[key] = name, parts
        _count(recipe.qfactory)
    return _choices[key][0]


def _count(function: Any) -> None:
    """Counts different functions with equal code, and warns once for each code if they are many."""
    while type(function) is functools.partial:
        function = function.func
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", type(function))
    _made_of[code] += 1
    if _made_of[code] == _MANY:
        name = f"{code.co_name} at {code.co_filename}:{code.co_firstlineno}" if isinstance(code, types.CodeType) else code.__qualname__
        warnings.warn(
            f"CustomRecipe: expected a qfactory that has captured what others of its code have, got {_MANY} of {name} that "
            "differ. Each stays for good, as plans and files name it. Build the recipe once, outside of the loop.",
            stacklevel=5,
        )


_MANY = 64
_made_of: Counter[object] = Counter()  # code -> number of registered functions


_choices: dict[object, tuple[str, list[object]]] = {}  # key -> name, and objects whose ids the key contains, so that they stay valid
_factories: dict[str, _QuantizerFactory] = {}


def _identity(function: object, parts: list[object]) -> object:
    """A key that is equal for functions that decide alike: each run of a line makes a new method or lambda. Objects that must live go to `parts`."""

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
    except ValueError:  # a captured name has no value yet
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
    return chosen.text


_QUANTIZER_MODULES = (Quantizer.__module__, "tandem.quantized.formats")
