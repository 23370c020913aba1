"""What makes tensors in codes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch.compiler import is_dynamo_compiling
from typing_extensions import Self

from tandem import _C
from tandem.compilers.tracing import constant_while_traced
from tandem.quantized.parts import DTYPES
from tandem.quantized.tensor import QuantizedTensor, in_directions


class Quantizer:
    """Base of quantizers: `text` is what kernel ops know it by.

    Args:
        text: a format, a kind of scale and options.
        rowwise, columnwise: which codes are wanted.
    """

    text: str
    rowwise: bool
    columnwise: bool

    _heads: ClassVar[tuple[str, ...]] = ()  # what the texts of a kind begin with
    _kinds: ClassVar[dict[str, type[Quantizer]]] = {}  # by these
    _held: ClassVar[dict[str, float]] = {}  # names of the tensors of one number that it holds besides, with the number that they begin with
    _amax_group: Any = None  # the processes that share the amax of what each quantizes a part of; None: this one quantizes the whole

    def __init_subclass__(cls) -> None:
        Quantizer._kinds.update(dict.fromkeys(vars(cls).get("_heads", ()), cls))

    def __init__(self, text: str, rowwise: bool, columnwise: bool) -> None:
        self.text = _canonical(text)
        self.set_usage(rowwise=bool(rowwise), columnwise=bool(columnwise))

    def quantize(self, x: torch.Tensor, *, out: QuantizedTensor | None = None, dtype: torch.dtype | None = None) -> QuantizedTensor:
        """x in codes, or what is as good as these. Its gradient is that of the codes' numbers: rounding counts as none.

        Args:
            x: a tensor of float32, bfloat16, float16 or float64.
            out: written instead: a tensor of this quantizer and of the shape of x. It has no history then.
            dtype: that of the numbers that the codes stand for; None: that of x.
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
        """Codes of x."""
        return self._codes(x)[0]

    def update_quantized(self, x: torch.Tensor, out: QuantizedTensor) -> QuantizedTensor:
        """Writes the codes of x into `out`, a tensor of this quantizer and of the shape of x, and returns it."""
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
        """A tensor of this quantizer to be written, of zeros until then."""
        with torch.no_grad():
            made, _ = self._of_its_own()._codes(torch.zeros(tuple(shape), dtype=dtype, device=device))
        made.quantizer = self
        return made.requires_grad_(requires_grad)

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Changes which codes are wanted of what is quantized from now on; None: as it is. Tensors that are there keep theirs, and hold a quantizer of their
        own."""
        row = self.rowwise if rowwise is None else bool(rowwise)
        column = self.columnwise if columnwise is None else bool(columnwise)
        if not row and not column:
            raise ValueError(f"{type(self).__name__}: expected rowwise or columnwise codes to be wanted, got neither. Leave one of them True.")
        self.rowwise, self.columnwise = row, column

    @property
    def rowwise_usage(self) -> bool:
        """Whether codes of rows are wanted."""
        return self.rowwise

    @property
    def columnwise_usage(self) -> bool:
        """Whether codes of columns are wanted."""
        return self.columnwise

    def copy(self) -> Self:
        """Another one with the same values, and, of a `Float8Quantizer`, the same tensors."""
        return self._but()

    def _but(self, **values: Any) -> Self:
        """Another one with these values in the place of its own."""
        made = object.__new__(type(self))
        vars(made).update(vars(self), **values)
        return made

    def _wanting(self, x: QuantizedTensor) -> Quantizer:
        """This, for the directions that a tensor has."""
        return self._but(rowwise=x.rowwise_data is not None, columnwise=x.columnwise_data is not None)

    def _codes(self, x: torch.Tensor) -> tuple[QuantizedTensor, torch.Tensor]:
        """Codes of x as a whole, and the amax of it."""
        *parts, amax = torch.ops.tandem.quantize(x, self._given(x), self.text, [self.rowwise, self.columnwise, True])
        if parts[2].numel() == parts[5].numel() == 0:  # a format without second level of scale
            if parts[4].dim() == 1:  # absent: one value serves both directions
                parts[3:5] = None, None
            parts[2] = parts[5] = None
        return in_directions(parts, self, x.dtype, x.shape), amax

    def _given(self, x: torch.Tensor) -> torch.Tensor | None:
        """What kernels are given besides x: a scale, or the seed of chance."""
        return None

    def _of_all(self, group: Any) -> Quantizer:
        """The same for a part of a tensor whose other parts the processes of a group quantize at the same time; itself where scales are of blocks alone."""
        return self._but(_amax_group=group) if self._amax_group is None and self._has_scale_of_all() else self

    def _of_its_own(self) -> Quantizer:
        """The same for a whole tensor."""
        return self if self._amax_group is None else self._but(_amax_group=None)

    def _has_scale_of_all(self) -> bool:
        """Whether a scale serves the whole tensor, which parts of it can come to share."""
        return False

    def _tensors(self) -> tuple[torch.Tensor, ...]:
        """What it holds besides."""
        return tuple([getattr(self, name) for name in self._held])

    def _holding(self, tensors: Sequence[torch.Tensor]) -> Quantizer:
        """The same with these."""
        return self._but(**dict(zip(self._held, tensors, strict=True))) if tensors else self

    def _fields(self) -> tuple[Any, ...]:
        """What `quantizer_of_text` makes it of."""
        return self.text, self.rowwise, self.columnwise, *self._tensors()

    def _traits(self) -> tuple[object, ...]:
        return type(self), self.text, self.rowwise, self.columnwise, id(self._amax_group)

    def _stable_traits(self) -> tuple[object, ...]:
        """The same in words that another process understands."""
        return *self._traits()[:-1], getattr(self._amax_group, "group_name", None)

    def _values(self) -> tuple[object, ...]:
        return *self._traits(), *map(id, self._tensors())

    def __copy__(self) -> Self:
        return self._but()

    def __reduce__(self) -> tuple[Any, ...]:
        return quantizer_of_text, self._fields()

    def __deepcopy__(self, memo: dict[int, Any]) -> Quantizer:
        return self._holding(copy.deepcopy(self._tensors(), memo))  # itself is a value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Quantizer) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.text!r}, rowwise={self.rowwise}, columnwise={self.columnwise})"


class _Quantized(torch.autograd.Function):
    """Codes; the gradient of their numbers is that of x."""

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
    """As a graph can hold it: by a quantizer of plain arguments."""
    return _quantized(x, quantizer_of_text(text, rowwise, columnwise, *given))


_quantized_apart = _quantized  # outside of graphs, once Dynamo is told


@constant_while_traced
def _tell_dynamo() -> None:
    """What decorators would tell, which import Dynamo."""
    if _quantized_apart is _quantized:
        torch.compiler.allow_in_graph(_quantized_in_graph)
        globals()["_quantized_apart"] = torch.compiler.disable(_quantized, reason="processes that share an amax quantize together")


@constant_while_traced
def _canonical(text: str) -> str:
    return _C.canonical_quantizer(text)


def quantizer_of_text(text: str, rowwise: bool = True, columnwise: bool = True, *given: Any) -> Quantizer:
    """The quantizer that kernel ops know by this text; `given` is what it holds besides."""
    kind = next((kind for head, kind in Quantizer._kinds.items() if text.startswith(head)), Quantizer)
    made: Quantizer = kind.__new__(kind)
    made.text, made.rowwise, made.columnwise = text, rowwise, columnwise
    for at, (name, first) in enumerate(kind._held.items()):
        setattr(made, name, given[at] if at < len(given) else torch.full((1,), first))
    return made


torch.serialization.add_safe_globals([quantizer_of_text, (quantizer_of_text, "tandem._quantizer.quantizer_of_text")])  # whose module had another name
