"""Views of quantized tensors: those that stay quantized, and those that are dequantized copies."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.utils._pytree import tree_leaves, tree_map

from tandem import _C
from tandem.quantized.parts import DTYPES, distinct, has_rows_of_x, matrix_rows, padded, places_of_rows, sizes_of_parts

SHARING = "_shares_scales"  # attribute of a row slice: True if its parts serve other rows too, or the `Zeros` of its source
FIRST_NUMBERS = "_high_precision_init_val"  # attribute of a parameter: a list of its unquantized numbers, or of None once they are cleared
ZEROS = "_zeros"  # attribute of a result of `new_zeros`: its `Zeros`


class Zeros:
    """State of a result of `new_zeros`. Its last rows are zeros under any scale, so the slice of its first rows has the scales to itself until a write."""

    def __init__(self) -> None:
        self.first: int | None = None  # number of rows of the first slice that was taken from row 0
        self.is_written = False

    def begin(self, first: int, last: int) -> bool:
        """Whether a slice is the one of the first rows, and nothing has written the whole tensor."""
        if self.first is None and first == 0:
            self.first = last
        return not self.is_written and first == 0 and last == self.first


def is_view(function: Any) -> bool:
    """Whether an operator returns a view of an argument without writing it."""
    return any(each.alias_info is not None and not each.alias_info.is_write for each in function._schema.returns)


def written(function: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operator writes."""
    found: list[Any] = []
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            found += given if isinstance(given, (list, tuple)) else [given]
    return found


def without_memory(x: Any) -> Any:
    """x, a wrapper without memory. An access to its memory, such as by DLPack, then raises an error instead of returning an invalid address."""
    _C.forbid_memory(
        x,
        "QuantizedTensor: expected a tensor whose numbers lie in one memory, got one in codes, or a view of one, which has several parts. Use its numbers: "
        "x.dequantize(), or view.clone(). To save it use the state_dict() of a module that holds it, whose entries are plain tensors, or torch.save.",
    )
    return x


def views_in_inference_mode(dispatch: Any) -> Any:
    """Wraps `__torch_dispatch__`: in inference mode a view of a normal tensor must be a normal tensor too, as both share a version counter."""

    @functools.wraps(dispatch)
    def dispatched(cls: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (torch.is_inference_mode_enabled() and is_view(function) and not args[0].is_inference()):
            return dispatch(cls, function, types, args, kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return dispatch(cls, function, types, args, kwargs)

    return dispatched


def collective(function: Any, args: Any) -> Any:
    """The result of a collective that writes quantized tensors; None for any other operator. A broadcast sends the codes. Other collectives raise
    RuntimeError: they write after the call has returned, into a dequantized copy."""
    name = function._schema.name
    given = tree_leaves(args[0]) if name.startswith(("c10d::", "_c10d_functional::")) and name.endswith("_") else ()
    coded = [value for value in given if isinstance(value, Decoded) or hasattr(value, "quantizer")]
    if not coded:
        return None
    whole = coded[0]._numbers if isinstance(coded[0], Decoded) else coded[0]
    if name != "c10d::broadcast_" or len(given) != 1 or not hasattr(whole, "quantizer"):
        raise RuntimeError(
            f"QuantizedTensor: expected plain tensors that a collective writes into, got one in codes for {name.partition('::')[2]}. Pass plain numbers, and "
            "write them with quantize_; a broadcast of the whole moves its codes."
        )
    before = whole._numbers() if whole._first_numbers() is not None else None
    whole._check_writable()
    for part in distinct(whole).values():
        result = function([part], *args[1:])
        result[1].wait()
        torch.autograd.graph.increment_version(part)
    if before is not None and not torch.equal(before, whole._numbers()):
        whole._note_numbers(whole._numbers())
    return args[0], result[1]


class Decoded(torch.Tensor):
    """A view of a quantized tensor as a dequantized copy. Writes into it raise RuntimeError, as they would be lost. The view in one dimension is
    dequantized when it is read: fully_shard keeps such a view of each parameter, and never reads it."""

    _numbers: Any  # the dequantized values, or the quantized tensor of a view in one dimension

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, numbers: torch.Tensor) -> Decoded:
        """Wraps dequantized values, or a quantized tensor, of which it becomes the view in one dimension."""
        is_plain = type(numbers) is torch.Tensor
        sizes, strides, offset = (numbers.shape, numbers.stride(), numbers.storage_offset()) if is_plain else ((numbers.numel(),), (1,), 0)
        made: Decoded = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, sizes, strides=strides, storage_offset=offset, dtype=numbers.dtype, device=numbers.device
        )
        made._numbers = numbers
        return without_memory(made)  # type: ignore[no-any-return]

    def read(self) -> torch.Tensor:
        """The dequantized values as an ordinary tensor."""
        numbers = self._numbers
        return numbers if type(numbers) is torch.Tensor else numbers._numbers().view(-1)

    @classmethod
    def of(cls, result: Any) -> Any:
        """The result of an operator, with each ordinary tensor in it wrapped as such a view."""
        return tree_map(lambda value: cls(value) if type(value) is torch.Tensor else value, result)

    @classmethod
    @views_in_inference_mode
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (result := collective(function, args)) is not None:
            return result
        if any(isinstance(tensor, Decoded) for tensor in written(function, args, kwargs)):
            raise RuntimeError(
                f"QuantizedTensor: expected a write into the tensor itself, got {function._schema.name.removeprefix('aten::')} of a view that is a copy "
                "of its numbers, where it would be lost. Write into the whole, as in whole[index] = x, or into view.clone()."
            )
        read = lambda value: value.read() if isinstance(value, Decoded) else value  # noqa: E731
        result = function(*tree_map(read, args), **tree_map(read, kwargs))
        return cls.of(result) if is_view(function) and isinstance(args[0], Decoded) else result

    def numpy(self, *, force: bool = False) -> Any:
        """The dequantized values as a read-only array."""
        return read_only(self.read().numpy(force=force))

    def tolist(self) -> Any:
        """The dequantized values as nested lists."""
        return self.read().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return memo.setdefault(id(self), self.read().clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)

    def __format__(self, spec: str) -> str:
        return format(self._numbers, spec) if type(self._numbers) is torch.Tensor else super().__format__(spec)  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return repr(self._numbers) if type(self._numbers) is torch.Tensor else f"{self._numbers!r}.view(-1)"


def read_only(array: Any) -> Any:
    """The array, made read-only: it is a copy, so a write would be lost."""
    array.flags.writeable = False
    return array


def _like(x: Any, made: Any, tells_first: bool = True) -> Any:
    """`made`, which has codes of x, with the marks of x. If it has the shape of x, writes into it also update the kept initial numbers of x."""
    if tells_first and (first := x.__dict__.get(FIRST_NUMBERS)) is not None:
        made.__dict__[FIRST_NUMBERS] = first
    return made._sharing(x.__dict__.get(SHARING))


def _same(x: Any) -> Any:
    return _like(x, x._of(distinct(x)))


def _converted(x: Any, *, dtype: torch.dtype | None = None, device: Any = None, **unused: Any) -> Any:
    return x._with(lambda part: part.to(device=device, copy=True), dtype) if (dtype or x.dtype) in DTYPES else None


def _viewed(x: Any, shape: Sequence[int]) -> torch.Tensor | None:
    """The codes of x under another shape with an equal last dimension; None: x must be dequantized."""
    sizes = list(shape)
    if sizes == [-1] and x.dim() > 1 and type(x.rowwise_data if x.rowwise_data is not None else x.columnwise_data) is torch.Tensor:
        return Decoded(x)
    if -1 in sizes:
        rest = math.prod(size for size in sizes if size != -1)
        sizes[sizes.index(-1)] = x.numel() // rest if rest else -1
    if not sizes or not x.dim() or sizes[-1] != x.shape[-1] or math.prod(sizes) != x.numel():
        return None
    parts = distinct(x)
    for name in parts:
        if has_rows_of_x(x.quantizer.text, name):
            parts[name] = parts[name].view(*sizes[:-1], parts[name].shape[-1])
    made = x._of(parts, sizes)
    return _like(x, made, tells_first=sizes == list(x.shape))


def rows_of(x: Any, first: int, last: int) -> Any:
    """A slice of the first dimension; None if a block lies across one of its ends. Codes and scales are views unless the slice needs padding."""
    inner = math.prod(x.shape[1:-1])
    begin, count = first * inner, (last - first) * inner
    text = x.quantizer.text
    places, sizes = places_of_rows(text), sizes_of_parts(text, count, x.shape[-1])
    parts = distinct(x)
    zeros: Zeros | None = x.__dict__.get(ZEROS)
    is_before_zeros = zeros is not None and zeros.begin(first, last)
    is_all, ends = count == matrix_rows(x) or is_before_zeros, last == x.shape[0] or is_before_zeros
    mark = x.__dict__.get(SHARING)
    is_sharing = mark is True or mark is not None and not is_all
    for name, part in parts.items():
        place, size = places[name], sizes[name]
        if has_rows_of_x(text, name):
            parts[name] = part[first:last]
        elif place is None:
            is_sharing |= not is_all
        elif begin % place.rows:
            return None
        else:
            own = part.narrow(place.dim, begin // place.rows, min(size[place.dim], part.shape[place.dim] - begin // place.rows))
            parts[name] = padded(own, size)
            is_sharing |= parts[name] is not own or not ends and own.shape[place.dim] * place.rows > count
    if any(place is not None and (not ends and (begin + count) % place.rows) for place in places.values()):
        return None
    made = x._of(parts, (last - first, *x.shape[1:]))
    return made._sharing(is_sharing or mark or (zeros if is_before_zeros else None))


def levels(x: torch.Tensor) -> list[torch.Tensor]:
    """A tensor and the tensors that torch.func has wrapped in it: each transformation differentiates one of them."""
    found = [x]
    while not is_dynamo_compiling() and torch._C._functorch.is_functorch_wrapped_tensor(found[-1]):
        found.append(torch._C._functorch.get_unwrapped(found[-1]))
    return found


def has_tangent(x: torch.Tensor) -> bool:
    """Whether a tensor, or one that torch.func has wrapped in it, has a tangent."""
    return forward_ad._current_level >= 0 and any(_C.has_tangent(each) for each in levels(x))  # type: ignore[attr-defined]


# Slices of a tensor with a tangent are dequantized: torch requires that tangent and tensor have equal strides, offsets and storage sizes.


def _sliced(x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    first, last, _ = slice(start, end).indices(x.shape[0]) if x.dim() else (0, 0, 1)
    is_of_rows = x.dim() > 1 and dim in (0, -x.dim()) and step == 1 and not has_tangent(x)
    return rows_of(x, first, max(first, last)) if is_of_rows else None


def _split(x: Any, size: int, dim: int = 0) -> Any:
    if x.dim() < 2 or dim not in (0, -x.dim()) or size <= 0 or has_tangent(x):
        return None
    made = [rows_of(x, first, min(first + size, x.shape[0])) for first in range(0, max(x.shape[0], 1), size)]
    return None if any(part is None for part in made) else made


def _zeros(x: Any, size: Sequence[int], **traits: Any) -> Any:
    if not size or not x.dim() or size[-1] != x.shape[-1] or traits.get("dtype") not in (None, x.dtype):
        return None
    made = x.quantizer.make_empty(size, dtype=x.dtype, device=traits.get("device") or x.device)
    made.__dict__[ZEROS] = Zeros()
    return made


def _empty(x: Any, dtype: torch.dtype | None = None, device: Any = None, **unused: Any) -> Any:
    return x._with(lambda part: torch.empty_like(part, device=device)) if dtype in (None, x.dtype) else None


def _strided(x: Any, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Any:
    is_all = list(size) == list(x.shape) and list(stride) == list(x.stride()) and not offset
    return _like(x, x._of(distinct(x)), tells_first=False) if is_all else None


def _unsqueezed(x: Any, dim: int) -> torch.Tensor | None:
    at = dim if dim >= 0 else dim + x.dim() + 1
    return _viewed(x, [*x.shape[:at], 1, *x.shape[at:]]) if at < x.dim() else None


STAYING: dict[Any, Callable[..., Any]] = {  # operators whose results stay quantized; None: x must be dequantized
    torch.ops.aten.detach.default: _same,
    torch.ops.aten.alias.default: _same,
    torch.ops.aten.clone.default: lambda x, **unused: x._with(torch.clone),
    torch.ops.aten._to_copy.default: _converted,
    torch.ops.aten.copy_.default: lambda x, source, *_, **__: x._write_of(source),
    torch.ops.aten.view.default: _viewed,
    torch.ops.aten._unsafe_view.default: _viewed,
    torch.ops.aten.unsqueeze.default: _unsqueezed,
    torch.ops.aten.slice.Tensor: _sliced,
    torch.ops.aten.split.Tensor: _split,
    torch.ops.aten.new_zeros.default: _zeros,
    torch.ops.aten.empty_like.default: _empty,  # Module.to_empty calls it
    torch.ops.aten.as_strided.default: _strided,
}
