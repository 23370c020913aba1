"""`Quantizer`, the base of the classes that quantize tensors."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch.compiler import is_dynamo_compiling
from typing_extensions import Self

from tandem.quantized.parts import DTYPES
from tandem.quantized.tensor import QuantizedTensor, in_directions
from tandem.quantized.traits import traits_of
from tandem.tracing import constant_while_traced


class Quantizer:
    """Base of the quantizers: x -> codes and scales with x ~= decode(codes) * scale_inv.

    Args:
        text: the quantizer as kernel ops read it: a format, a kind of scale and options.
        rowwise, columnwise: whether to compute row codes and column codes; at least one of them.
    """

    text: str
    rowwise: bool
    columnwise: bool

    _held: ClassVar[dict[str, float]] = {}  # names and initial values of the tensors [1] that a quantizer has as attributes
    _amax_group: Any = None  # process group whose ranks each quantize a part of a tensor and share its amax; None: this process quantizes the whole

    def __init__(self, text: str, rowwise: bool, columnwise: bool) -> None:
        self.text = traits_of(text).text
        self.set_usage(rowwise=bool(rowwise), columnwise=bool(columnwise))

    def quantize(self, x: torch.Tensor, *, out: QuantizedTensor | None = None, dtype: torch.dtype | None = None) -> QuantizedTensor:
        """x as codes and scales. The gradient of x is the gradient of the result: backward ignores the rounding.

        Args:
            x: a tensor of float32, bfloat16, float16 or float64; another dtype raises TypeError.
            out: a quantized tensor of this quantizer and of the shape of x, which is written and returned, without recording a gradient; None: a new one.
            dtype: dtype of the dequantized values; None: the dtype of x.
        """
        for numbers in (x.dtype, dtype or x.dtype):
            if numbers not in (*DTYPES, torch.float64):
                raise TypeError(
                    f"{type(self).__name__}: expected numbers in float32, bfloat16, float16 or float64, got {numbers}. Convert x before: x.float()."
                )
        if dtype is not None and dtype != x.dtype:
            x = x.to(dtype)
        if out is not None:
            return self.update_quantized(x, out)
        if is_dynamo_compiling():
            _tell_dynamo()
            if self._amax_group is not None:
                return _quantized_apart(x, self)
            return _quantized_in_graph(x, self.text, self.rowwise, self.columnwise, *self._tensors())
        return _quantized(x, self)

    __call__ = quantize

    def _quantized(self, x: torch.Tensor) -> QuantizedTensor:
        """x as codes and scales, without recording a gradient."""
        return self._codes(x)[0]

    def update_quantized(self, x: torch.Tensor, out: QuantizedTensor) -> QuantizedTensor:
        """Quantizes x into `out` and returns `out`. ValueError if `out` has another quantizer or another shape than x."""
        if not isinstance(out, QuantizedTensor):
            raise TypeError(f"{type(self).__name__}: expected a quantized tensor to write into, got {type(out).__name__}. Quantize one first.")
        if out.quantizer.text != self.text or out.shape != x.shape:
            raise ValueError(
                f"{type(self).__name__}: expected a tensor of {self.text} and shape {list(x.shape)} to write into, got {out.quantizer.text} and "
                f"{list(out.shape)}. Quantize x into a new one."
            )
        with torch.no_grad():
            out._check_writable()
            out._take_parts_of(self._wanting(out)._quantized(x.detach().to(out.dtype)))
        return out

    def make_empty(
        self, shape: Sequence[int], *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None, requires_grad: bool = False
    ) -> QuantizedTensor:
        """A quantized tensor of this shape whose values are zeros, to be written later."""
        with torch.no_grad():
            made, _ = self._of_its_own()._codes(torch.zeros(tuple(shape), dtype=dtype, device=device))
        made.quantizer = self
        return made.requires_grad_(requires_grad)

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Sets whether later calls compute row codes and column codes; None: unchanged. Existing quantized tensors keep their codes. ValueError if neither
        would be computed."""
        row = self.rowwise if rowwise is None else bool(rowwise)
        column = self.columnwise if columnwise is None else bool(columnwise)
        if not row and not column:
            raise ValueError(f"{type(self).__name__}: expected rowwise or columnwise codes to be wanted, got neither. Leave one of them True.")
        self.rowwise, self.columnwise = row, column

    @property
    def rowwise_usage(self) -> bool:
        """Whether row codes are computed."""
        return self.rowwise

    @property
    def columnwise_usage(self) -> bool:
        """Whether column codes are computed."""
        return self.columnwise

    def copy(self) -> Self:
        """Another quantizer with equal attributes. The copy of a `Float8Quantizer` shares the tensors `scale` and `amax` with it."""
        return self._but()

    def _but(self, **values: Any) -> Self:
        """A copy with some attributes replaced."""
        made = object.__new__(type(self))
        vars(made).update(vars(self), **values)
        return made

    def _wanting(self, x: QuantizedTensor) -> Quantizer:
        """A copy that computes those of row and column codes that x has."""
        return self._but(rowwise=x.rowwise_data is not None, columnwise=x.columnwise_data is not None)

    def _codes(self, x: torch.Tensor) -> tuple[QuantizedTensor, torch.Tensor]:
        """x as codes and scales, and the amax of x in this process."""
        *parts, amax = torch.ops.tandem.quantize(x, self._given(x), self.text, [self.rowwise, self.columnwise, True])
        traits = traits_of(self.text)
        if traits.serves_both_directions:
            parts[3] = parts[4] = None
        if not traits.has_amax:
            parts[2] = parts[5] = None
        return in_directions(parts, self, x.dtype, x.shape), amax

    def _given(self, x: torch.Tensor) -> torch.Tensor | None:
        """The operand of the kernel besides x: a scale, or the seed of stochastic rounding; None: there is none."""
        return seed_for(self.text, x.device)

    def _of_all(self, group: Any) -> Quantizer:
        """A copy whose ranks share an amax, each quantizing a part of one tensor; itself if all scales are per block."""
        return self._but(_amax_group=group) if self._amax_group is None and self._has_scale_of_all() else self

    def _of_its_own(self) -> Quantizer:
        """A copy that quantizes whole tensors; itself if it already does."""
        return self if self._amax_group is None else self._but(_amax_group=None)

    def _has_scale_of_all(self) -> bool:
        """Whether one scale serves the whole tensor, and processes that have parts of it can share that scale."""
        return False

    def _tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that it has as attributes, in the order of `_held`."""
        return tuple([getattr(self, name) for name in self._held])

    def _holding(self, tensors: Sequence[torch.Tensor]) -> Quantizer:
        """A copy with other tensors as attributes, in the order of `_held`."""
        return self._but(**dict(zip(self._held, tensors, strict=True))) if tensors else self

    def _traits(self) -> tuple[object, ...]:
        return type(self), self.text, self.rowwise, self.columnwise, id(self._amax_group)

    def _stable_traits(self) -> tuple[object, ...]:
        """`_traits` with the name of the process group instead of its identity, for other processes."""
        return *self._traits()[:-1], getattr(self._amax_group, "group_name", None)

    def _values(self) -> tuple[object, ...]:
        return *self._traits(), *map(id, self._tensors())

    def __copy__(self) -> Self:
        return self._but()

    def __reduce__(self) -> tuple[Any, ...]:
        return quantizer_of_text, (self.text, self.rowwise, self.columnwise, *self._tensors())

    def __deepcopy__(self, memo: dict[int, Any]) -> Quantizer:
        return self._holding(copy.deepcopy(self._tensors(), memo))  # all but the tensors is immutable

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Quantizer) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.text!r}, rowwise={self.rowwise}, columnwise={self.columnwise})"


class _Quantized(torch.autograd.Function):
    """The autograd function of `Quantizer.quantize`: the gradient of x is the gradient of the result."""

    @staticmethod
    def forward(x: torch.Tensor, quantizer: Quantizer) -> QuantizedTensor:
        return quantizer._quantized(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def _quantized(x: torch.Tensor, quantizer: Quantizer) -> QuantizedTensor:
    if not torch.is_grad_enabled() or not x.requires_grad:
        return quantizer._quantized(x)
    made: QuantizedTensor = _Quantized.apply(x, quantizer)  # type: ignore[no-untyped-call]
    return made


def _quantized_in_graph(x: torch.Tensor, text: str, rowwise: bool, columnwise: bool, *given: torch.Tensor) -> QuantizedTensor:
    """`_quantized` for graphs of Dynamo, which hold text, bools and tensors but no quantizer."""
    return _quantized(x, quantizer_of_text(text, rowwise, columnwise, *given))


_quantized_apart = _quantized  # `_tell_dynamo` replaces it by a function that Dynamo calls outside of graphs


@constant_while_traced
def _tell_dynamo() -> None:
    """Registers functions with Dynamo when it first traces one. Decorators would do so at import, and would import Dynamo."""
    if _quantized_apart is _quantized:
        torch.compiler.allow_in_graph(_quantized_in_graph)
        globals()["_quantized_apart"] = torch.compiler.disable(_quantized, reason="processes that share an amax quantize together")


def seed_for(text: str, device: torch.device) -> torch.Tensor | None:
    """A seed for the quantizer of a text, drawn from the generator of a device; None if the quantizer takes none."""
    return torch.randint(torch.iinfo(torch.int64).max, (), device=device) if traits_of(text).takes_seed else None


def quantizer_of_text(text: str, rowwise: bool = True, columnwise: bool = True, *given: Any) -> Quantizer:
    """The quantizer of a text that kernel ops read; `given` are its tensors in the order of `_held`."""
    name = traits_of(text).class_name
    kind = next((kind for kind in Quantizer.__subclasses__() if kind.__name__ == name), Quantizer)  # the library's classes are the first
    made: Quantizer = kind.__new__(kind)
    made.text, made.rowwise, made.columnwise = text, rowwise, columnwise
    for at, (name, first) in enumerate(kind._held.items()):
        setattr(made, name, given[at] if at < len(given) else torch.full((1,), first))
    return made


torch.serialization.add_safe_globals([quantizer_of_text])
