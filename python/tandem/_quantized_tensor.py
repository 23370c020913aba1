"""Tensors in codes: what torch does with them, how they are saved, loaded and sharded."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from tandem import _C

PARTS = (  # in the order of the library's groups
    "rowwise_data",
    "rowwise_scale_inv",
    "amax_rowwise",
    "columnwise_data",
    "columnwise_scale_inv",
    "amax_columnwise",
)


_SHARING = "_shares_scales"  # of a slice of rows: what it is marked by
_PLAIN_DATA: Any = torch.Tensor.data  # the descriptor: of shape, dtype and memory of a wrapper


def _copy_into(part: torch.Tensor, new: torch.Tensor) -> None:
    part.copy_(new)
    if not part.is_inference():
        torch.autograd.graph.increment_version(part)  # below autograd, where this runs, nothing else does


class QuantizedTensor(torch.Tensor):
    """A tensor in codes: x ~= decode(data) * scale_inv. What the quantizer was not asked for is None.

    It may be a parameter: products read its codes, its gradient is a plain tensor. Writing into it quantizes again. Copies, moves to another device
    or dtype (which is that of its numbers), `view`, `reshape`, `flatten` and `unsqueeze` that leave the last dimension alone, slices of rows and pickles
    stay quantized; any other operation of torch reads its numbers and gives a plain tensor, so that other views are copies. A slice of rows whose scales
    serve other rows too cannot be written. `param.data = x` quantizes x, or takes the codes that it is in. State dicts hold the parts, as plain tensors
    under the parameter's name.

    Attributes:
        rowwise_data, columnwise_data: uint8 codes of the shape of x, with blocks along its last dimension, and along the others; never
            transposed. With one scale per tensor or per square both may be the same tensor. Of four bits there are two codes in a byte, the first in the
            low half: neighbours of the last dimension, or, in columns of x as a matrix, of the first.
        rowwise_scale_inv, columnwise_scale_inv: their scales.
        amax_rowwise, amax_columnwise: of formats with a second level of scale the largest magnitudes that this comes from, else None.
        quantizer: what made it.
        dtype, shape: those of x.
        requires_grad: whether its gradient is wanted.
    """

    rowwise_data: torch.Tensor | None
    columnwise_data: torch.Tensor | None
    rowwise_scale_inv: torch.Tensor | None
    columnwise_scale_inv: torch.Tensor | None
    amax_rowwise: torch.Tensor | None
    amax_columnwise: torch.Tensor | None
    quantizer: Quantizer

    # Operations go to __torch_dispatch__, below autograd.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls,
        rowwise_data: torch.Tensor | None,
        rowwise_scale_inv: torch.Tensor | None,
        columnwise_data: torch.Tensor | None,
        columnwise_scale_inv: torch.Tensor | None,
        quantizer: Quantizer,
        dtype: torch.dtype,
        requires_grad: bool = False,
        amax_rowwise: torch.Tensor | None = None,
        amax_columnwise: torch.Tensor | None = None,
        shape: Sequence[int] | None = None,
    ) -> QuantizedTensor:
        """Puts parts together that belong together, such as those of `tandem.quantize`. `shape` is that of x, which codes of four bits do not tell."""
        codes = rowwise_data if rowwise_data is not None else columnwise_data
        if codes is None:
            raise ValueError("QuantizedTensor: expected codes of rows or of columns, got neither. Pass rowwise_data or columnwise_data.")
        tensor: QuantizedTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, codes.shape if shape is None else shape, dtype=dtype, device=codes.device, requires_grad=requires_grad
        )
        tensor.rowwise_data, tensor.rowwise_scale_inv, tensor.amax_rowwise = rowwise_data, rowwise_scale_inv, amax_rowwise
        tensor.columnwise_data, tensor.columnwise_scale_inv, tensor.amax_columnwise = columnwise_data, columnwise_scale_inv, amax_columnwise
        tensor.quantizer = quantizer
        return tensor

    @property
    def data(self) -> torch.Tensor:
        """The same codes without a history. What is assigned is quantized, unless it is quantized already."""
        return _PLAIN_DATA.__get__(self)

    @data.setter
    def data(self, x: torch.Tensor) -> None:
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"data: expected a tensor, got {type(x).__name__}. Assign numbers or a quantized tensor.")
        if x.dtype not in _DTYPES:
            raise TypeError(
                f"data: expected numbers in float32, bfloat16 or float16, as a quantized tensor stands for, got {x.dtype}. Put plain numbers in the place of "
                "the parameter: torch.nn.Parameter(weight.dequantize())."
            )
        made = x if isinstance(x, QuantizedTensor) else self.quantizer.quantize(x.detach())
        _PLAIN_DATA.__set__(self, made)  # shape, dtype and device
        self.__dict__.update({name: made.__dict__.get(name) for name in (*PARTS, "quantizer", _SHARING)})

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        names, seen = [], set()
        for name in PARTS:  # a part of both directions is one tensor
            part = getattr(self, name)
            if part is not None and id(part) not in seen:
                names.append(name)
                seen.add(id(part))
        return names, (self.quantizer, self.dtype, self.columnwise_data is not None, self.requires_grad, bool(self.__dict__.get(_SHARING)))

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Any], context: tuple[Any, ...], size: Any, stride: Any) -> QuantizedTensor:
        quantizer, dtype, has_columns, requires_grad, is_sharing = context
        row, row_scale, row_amax, column, column_scale, column_amax = [parts.get(name) for name in PARTS]
        if has_columns and column is None:
            column, column_scale = row, row_scale
        made = QuantizedTensor(row, row_scale, column, column_scale, quantizer, dtype, requires_grad, row_amax, column_amax, size)
        return made._sharing(is_sharing)

    def _stable_hash_for_caching(self) -> str:  # what compiled code depends on, besides parts and shapes
        return f"{self.quantizer.text} {[getattr(self, name) is not None for name in PARTS]}"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        aten = torch.ops.aten
        if function in (aten.detach.default, aten.alias.default):
            return args[0]._with(lambda part: part)._sharing(args[0].__dict__.get(_SHARING))
        if function is aten.clone.default:
            return args[0]._with(torch.clone)
        if function is aten._to_copy.default and (dtype := kwargs.get("dtype") or args[0].dtype) in _DTYPES:
            return args[0]._with(lambda part: part.to(device=kwargs.get("device"), copy=True), dtype)
        if (change := _STAYING.get(function)) and isinstance(args[0], QuantizedTensor):
            if (changed := change(*args, **kwargs)) is not None:
                return changed
        if function is aten.copy_.default and isinstance(args[0], QuantizedTensor):
            source = args[1]
            args[0]._check_writable()
            if isinstance(source, QuantizedTensor) and args[0]._has_parts_of(source):
                for name in PARTS:
                    if (part := getattr(args[0], name)) is not None:
                        _copy_into(part, getattr(source, name))
                return args[0]
            args[0]._write(source.dequantize() if isinstance(source, QuantizedTensor) else source)
            return args[0]
        plain: dict[int, torch.Tensor] = {}

        def decoded(value: Any) -> Any:
            if not isinstance(value, QuantizedTensor):
                return value
            return plain.setdefault(id(value), value.dequantize())

        result = function(*tree_map(decoded, args), **tree_map(decoded, kwargs))
        owners: dict[int, QuantizedTensor] = {}  # by what stood in for them
        for index, argument in enumerate(function._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            for tensor in given if isinstance(given, (list, tuple)) else (given,):
                if isinstance(tensor, QuantizedTensor):
                    tensor._write(plain[id(tensor)])
                    owners[id(plain[id(tensor)])] = tensor
        return tree_map(lambda value: owners.get(id(value), value), result) if owners else result

    def _sharing(self, is_sharing: object) -> QuantizedTensor:
        """Itself, marked as one whose parts serve other rows too."""
        if is_sharing:
            self.__dict__[_SHARING] = True
        return self

    def _check_writable(self) -> None:
        if self.__dict__.get(_SHARING):
            raise RuntimeError(
                "QuantizedTensor: expected a write into a tensor that has its scales to itself, got one into a slice of rows whose scales serve other rows "
                "too. Write into the whole, as in whole[first:last] = x, or into a clone of the slice."
            )

    def __setitem__(self, index: Any, value: Any) -> None:  # a view is a copy
        x = self.dequantize()
        x[index] = value
        self.quantize_(x)

    def _with(self, change: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype | None = None) -> QuantizedTensor:
        changed: dict[int, torch.Tensor] = {}
        parts = [getattr(self, name) for name in PARTS]
        made = [None if part is None else changed.setdefault(id(part), change(part)) for part in parts]
        return self._of(made, dtype=dtype)

    def _of(self, parts: Sequence[torch.Tensor | None], shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> QuantizedTensor:
        """Another one like this, in the order of PARTS."""
        return assembled(parts, self.quantizer, dtype or self.dtype, self.shape if shape is None else shape)

    def _viewed(self, shape: Sequence[int]) -> torch.Tensor | None:
        """The same codes under another shape, where rows stay what they are."""
        sizes = list(shape)
        if sizes == [-1] and self.dim() > 1 and not any(isinstance(part, FakeTensor) for part in _distinct(self).values()):
            return _Flat(self)
        if -1 in sizes:
            rest = math.prod(size for size in sizes if size != -1)
            sizes[sizes.index(-1)] = self.numel() // rest if rest else -1
        if not sizes or not self.dim() or sizes[-1] != self.shape[-1] or math.prod(sizes) != self.numel():
            return None

        def viewed(part: torch.Tensor | None) -> torch.Tensor | None:
            return None if part is None else part.view(*sizes[:-1], part.shape[-1])

        row, row_scale, row_amax, column, column_scale, column_amax = [getattr(self, name) for name in PARTS]
        row_viewed = viewed(row)
        if column is row:
            column = row_viewed
        elif column is not None and not self.quantizer.text.startswith("nvfp4"):  # whose columns are packed as those of a matrix
            column = viewed(column)
        viewed_parts = [row_viewed, row_scale, row_amax, column, column_scale, column_amax]
        return self._of(viewed_parts, sizes)._sharing(self.__dict__.get(_SHARING))

    def _rows(self, first: int, last: int) -> QuantizedTensor | None:
        """A slice of the first dimension, where no block lies across its ends. Codes and scales are views where they need no padding of their own."""
        inner = math.prod(self.shape[1:-1])
        begin, count = first * inner, (last - first) * inner
        places = _places_of_rows(self.quantizer.text, self.shape[-1])
        sizes = _sizes_of_parts(self.quantizer.text, count, self.shape[-1])
        done: dict[int, torch.Tensor] = {}
        parts: list[torch.Tensor | None] = []
        is_sharing = bool(self.__dict__.get(_SHARING))
        is_all, ends = count == math.prod(self.shape[:-1]), last == self.shape[0]
        for name, place, size in zip(PARTS, places, sizes, strict=True):
            part = getattr(self, name)
            if part is not None and id(part) not in done:
                if name.endswith("data") and part.shape[:-1] == self.shape[:-1]:
                    done[id(part)] = part[first:last]
                elif place is None:
                    done[id(part)] = part
                    is_sharing |= not is_all
                elif begin % place.rows:
                    return None
                else:
                    own = part.narrow(place.dim, begin // place.rows, min(size[place.dim], part.shape[place.dim] - begin // place.rows))
                    done[id(part)] = _padded(own, size)
                    is_copy = done[id(part)] is not own
                    is_sharing |= is_copy or not ends and own.shape[place.dim] * place.rows > count
            parts.append(None if part is None else done[id(part)])
        if any(place is not None and (last != self.shape[0] and (begin + count) % place.rows) for place in places):
            return None
        return self._of(parts, (last - first, *self.shape[1:]))._sharing(is_sharing)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        attributes = {name: value for name, value in self.__dict__.items() if name not in (*PARTS, "quantizer")}
        parts = [getattr(self, name) for name in PARTS]
        return _rebuilt, (self.quantizer._fields(), parts, self.dtype, tuple(self.shape), self.requires_grad, attributes)

    # What torch.distributed.fsdp.fully_shard asks of a parameter: codes are gathered, not numbers.

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        """The parts of this rank's rows, and what `fsdp_post_all_gather` has to know."""
        ranks = mesh.size()
        names, _ = self.__tensor_flatten__()
        rows = [place.rows for name, place in zip(PARTS, _places_of_rows(self.quantizer.text, self.shape[-1]), strict=True) if place is not None and name in names]
        unit = max(rows, default=1)
        if self.shape[0] * ranks != outer_size[0] or ranks > 1 and math.prod(self.shape[:-1]) % unit:
            raise ValueError(
                f"fully_shard: expected {ranks} ranks to share the first dimension of a quantized parameter evenly, each a multiple of {unit} rows, got "
                f"{outer_size[0]}. Keep this parameter in plain numbers, or in a format with smaller blocks."
            )
        return tuple(getattr(self, name).contiguous() for name in names), (self.quantizer, names, self.columnwise_data is not None)

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        """The whole parameter of the parts of all ranks: the tensor, and what of it is no memory of the gathered parts; or into `out`."""
        quantizer, names, has_columns = metadata
        whole = getattr(out, "_local_tensor", out)
        columns, codes = self.shape[-1], names.index("rowwise_data" if "rowwise_data" in names else "columnwise_data")
        ranks = all_gather_outputs[codes].shape[0] // getattr(self, names[codes]).shape[0]
        shape = (self.shape[0] * ranks, *self.shape[1:])
        places = dict(zip(PARTS, _places_of_rows(quantizer.text, columns), strict=True))
        sizes = dict(zip(PARTS, _sizes_of_parts(quantizer.text, math.prod(shape[:-1]), columns), strict=True))
        parts: dict[str, torch.Tensor] = {}
        made: list[torch.Tensor] = []
        for name, gathered in zip(names, all_gather_outputs, strict=True):
            own, place, of_ranks = getattr(self, name), places[name], gathered.unflatten(0, (ranks, -1)).unbind(0)
            if name.endswith("data") and own.shape[:-1] == self.shape[:-1]:
                parts[name] = gathered
                continue
            if place is None:
                if any(not torch.equal(part, of_ranks[0]) for part in of_ranks):
                    raise ValueError(
                        f"fully_shard: expected one {name} on all ranks, as one serves the whole tensor, got several. {_advice(quantizer)}"
                    )
                part = of_ranks[0].view(own.shape)
            else:
                entries = math.prod(self.shape[:-1]) // place.rows
                part = _padded(torch.cat([each.unflatten(0, own.shape[:1]).narrow(place.dim, 0, entries) for each in of_ranks], place.dim), sizes[name])
            if whole is None:
                parts[name] = part.clone()
                made.append(parts[name])
            else:
                target = getattr(whole, name)
                with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(target):
                    target.copy_(part)
        if whole is not None:
            return None
        if has_columns and "columnwise_data" not in parts:
            parts["columnwise_data"], parts["columnwise_scale_inv"] = parts["rowwise_data"], parts["rowwise_scale_inv"]
        return assembled([parts.get(name) for name in PARTS], quantizer, param_dtype, shape), tuple(made)

    def _has_parts_of(self, other: QuantizedTensor) -> bool:
        there = [[None if part is None else part.shape for part in (getattr(tensor, name) for name in PARTS)] for tensor in (self, other)]
        return self.quantizer.text == other.quantizer.text and self.shape == other.shape and there[0] == there[1]

    def _write(self, x: torch.Tensor) -> None:
        """Codes of x in place of those that are there."""
        self._check_writable()
        made = self.quantizer.quantize(x.detach().to(self.dtype).expand(self.shape))
        for name in PARTS:
            part, new = getattr(self, name), getattr(made, name)
            if part is not None and new is not None:
                _copy_into(part, new)

    def __getattr__(self, name: str) -> Any:
        """Where the numbers that the tensor was drawn with were kept (`quantized_model_init`) there are `get_high_precision_init_val`, which gives them,
        None once they are cleared, and `clear_high_precision_init_val`."""
        if "_high_precision_init_val" in self.__dict__:
            if name == "get_high_precision_init_val":
                return lambda: self.__dict__["_high_precision_init_val"]
            if name == "clear_high_precision_init_val":
                return lambda: self.__dict__.update(_high_precision_init_val=None)
        raise AttributeError(
            f"QuantizedTensor: expected an attribute that it has, got {name!r}. Those of first values are there where quantized_model_init has kept them."
        )

    def dequantize(self, columnwise: bool = False, dtype: torch.dtype | None = None) -> torch.Tensor:  # type: ignore[override]
        """The numbers of one direction, in `dtype` or in that of x. Without `columnwise`, those of rows, or of columns where these are all. Rotated
        columns stay rotated, as a matrix whose number of rows is padded to 16."""
        is_rotated = ":rht=1" in self.quantizer.text
        if not columnwise and self.rowwise_data is None and is_rotated:
            raise ValueError("dequantize: expected codes of rows, got rotated ones of columns, which do not tell the numbers. Pass columnwise=True for those.")
        columnwise = columnwise or self.rowwise_data is None
        row, row_scale, row_amax, column, column_scale, column_amax = [getattr(self, name) for name in PARTS]
        data, scale, amax = (column, column_scale, column_amax) if columnwise else (row, row_scale, row_amax)
        if data is None or scale is None:
            raise ValueError("dequantize: expected columnwise codes, got a tensor quantized without. Build the quantizer with columnwise=True.")
        sizes = None if columnwise and is_rotated else list(self.shape)
        data, scale = data.contiguous(), scale.contiguous()  # slices of rows may not be
        return torch.ops.tandem.dequantize(data, scale, self.quantizer.text, columnwise, dtype or self.dtype, amax, sizes)

    def quantize_(self, x: torch.Tensor) -> QuantizedTensor:
        """Writes the codes of x, such as a master copy that an optimizer has stepped."""
        with torch.no_grad():
            return self.copy_(x)  # type: ignore[return-value]

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"QuantizedTensor({list(self.shape)}, dtype={self.dtype}, quantizer={self.quantizer!r})"


class _Flat(torch.Tensor):
    """All numbers of a quantized tensor one behind the other, decoded where they are read: fully_shard holds one of each parameter and never reads it."""

    whole: QuantizedTensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, whole: QuantizedTensor) -> _Flat:
        flat: _Flat = torch.Tensor._make_wrapper_subclass(cls, [whole.numel()], dtype=whole.dtype, device=whole.device)  # type: ignore[attr-defined]
        flat.whole = whole
        return flat

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def decoded(value: Any) -> Any:
            return value.whole.dequantize().view(-1) if isinstance(value, _Flat) else value

        return function(*tree_map(decoded, args), **tree_map(decoded, kwargs or {}))

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"{self.whole!r}.view(-1)"


def assembled(parts: Sequence[torch.Tensor | None], quantizer: Quantizer, dtype: torch.dtype, shape: Sequence[int]) -> QuantizedTensor:
    row, row_scale, row_amax, column, column_scale, column_amax = parts
    return QuantizedTensor(row, row_scale, column, column_scale, quantizer, dtype, amax_rowwise=row_amax, amax_columnwise=column_amax, shape=shape)


def _rebuilt(
    quantizer: tuple[Any, ...], parts: list[Any], dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool, attributes: dict[str, Any]
) -> QuantizedTensor:
    """What a pickle holds; torch.load(weights_only=True) calls it too."""
    text, rowwise, columnwise, *given = quantizer
    made = assembled(parts, quantizer_of_text(text, rowwise, columnwise, *given), dtype, shape)
    made.__dict__.update(attributes)
    return made.requires_grad_(requires_grad)


torch.serialization.add_safe_globals([_rebuilt])


class _Place(NamedTuple):
    """Where a part has something for each so many rows: along which dimension."""

    dim: int
    rows: int


@functools.cache
def _sizes_of_parts(text: str, rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
    """Those of a matrix, in the order of PARTS."""
    x = torch.empty(rows, columns, device="meta")
    given = torch.empty((), device="meta", dtype=torch.int64 if ":sr=1" in text else torch.float32) if ":sr=1" in text or ":delayed" in text else None
    *parts, _ = torch.ops.tandem.quantize(x, given, text, [True, True, True])
    if parts[3].shape != x.shape and parts[5].numel() == 0:  # one value serves both directions
        parts[3:5] = parts[:2]
    return tuple(tuple(part.shape) for part in parts)


@functools.cache
def _places_of_rows(text: str, columns: int) -> tuple[_Place | None, ...]:
    """For each part; None where it has one value for all rows."""
    some, more = (_sizes_of_parts(text, rows, columns) for rows in (_SOME_ROWS, 2 * _SOME_ROWS))
    places: list[_Place | None] = []
    for few, many in zip(some, more, strict=True):
        growing = [dim for dim, (less, greater) in enumerate(zip(few, many, strict=True)) if greater != less]
        places.append(_Place(growing[0], _SOME_ROWS // (many[growing[0]] - few[growing[0]])) if growing else None)
    return tuple(places)


_SOME_ROWS = 1024  # whole blocks of every format
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _advice(quantizer: Quantizer) -> str:
    """What to do where ranks have quantized their parts of a tensor by themselves, and one scale serves all."""
    if quantizer.text.startswith("nvfp4"):  # whose first level is the amax of the tensor
        return "Keep this parameter in plain numbers, or in a format whose scales are of blocks alone, such as MXFP8."
    return (
        "Quantize the parts with with_amax_reduction=True and their amax_reduction_group, or use a format whose scales are of blocks, such as MXFP8, also as "
        "the recipe of quantized_model_init."
    )


def _padded(part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The part at the beginning of a tensor of these sizes, whose rest nobody reads; itself where it has them."""
    if tuple(part.shape) == tuple(sizes):
        return part
    whole = part.new_zeros(sizes)
    whole[tuple(slice(0, size) for size in part.shape)] = part
    return whole


def _sliced(x: QuantizedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> QuantizedTensor | None:
    first, last, _ = slice(start, end).indices(x.shape[0]) if x.dim() else (0, 0, 1)
    return x._rows(first, max(first, last)) if x.dim() > 1 and dim in (0, -x.dim()) and step == 1 else None


def _split(x: QuantizedTensor, size: int, dim: int = 0) -> list[QuantizedTensor] | None:
    if x.dim() < 2 or dim not in (0, -x.dim()) or size <= 0:
        return None
    made = [x._rows(first, min(first + size, x.shape[0])) for first in range(0, max(x.shape[0], 1), size)]
    return None if any(part is None for part in made) else made  # type: ignore[return-value]


def _zeros(x: QuantizedTensor, size: Sequence[int], **traits: Any) -> QuantizedTensor | None:
    if not size or not x.dim() or size[-1] != x.shape[-1] or traits.get("dtype") not in (None, x.dtype):
        return None
    return x.quantizer.quantize(torch.zeros(size, dtype=x.dtype, device=traits.get("device") or x.device))


def _strided(x: QuantizedTensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> QuantizedTensor | None:
    is_all = list(size) == list(x.shape) and list(stride) == list(x.stride()) and not offset
    return x._with(lambda part: part)._sharing(x.__dict__.get(_SHARING)) if is_all else None


def _unsqueezed(x: QuantizedTensor, dim: int) -> QuantizedTensor | None:
    at = dim if dim >= 0 else dim + x.dim() + 1
    return x._viewed([*x.shape[:at], 1, *x.shape[at:]]) if at < x.dim() else None


_STAYING: dict[Any, Callable[..., Any]] = {  # what gives a quantized tensor, or None where it must be decoded
    torch.ops.aten.view.default: QuantizedTensor._viewed,
    torch.ops.aten._unsafe_view.default: QuantizedTensor._viewed,
    torch.ops.aten.unsqueeze.default: _unsqueezed,
    torch.ops.aten.slice.Tensor: _sliced,
    torch.ops.aten.split.Tensor: _split,
    torch.ops.aten.new_zeros.default: _zeros,
    torch.ops.aten.as_strided.default: _strided,
}


_QUANTIZER = "quantizer"  # under which a state dict holds the text, as bytes
_TEXT_BYTES = 64  # at least, so that a checkpoint in another format can be read in place


def _distinct(param: QuantizedTensor) -> dict[str, torch.Tensor]:
    """The parts that are tensors of their own."""
    return {name: getattr(param, name) for name in param.__tensor_flatten__()[0]}


def save_parts(parameters: Mapping[str, torch.Tensor | None], destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
    """Puts the parts of quantized parameters in their place in a state dict, and what quantized them."""
    for name, param in parameters.items():
        if isinstance(param, QuantizedTensor):
            destination.pop(prefix + name, None)
            for part, tensor in _distinct(param).items():
                destination[f"{prefix}{name}.{part}"] = tensor if keep_vars else tensor.detach()
            text = list(param.quantizer.text.encode().ljust(_TEXT_BYTES))
            destination[f"{prefix}{name}.{_QUANTIZER}"] = torch.tensor(text, dtype=torch.uint8)


def load_parts(parameters: Mapping[str, torch.Tensor | None], state_dict: dict[str, Any], prefix: str) -> None:
    """Puts quantized parameters together again, of the parts in a state dict. What another quantizer has made is decoded, and so is what becomes a
    parameter in plain numbers."""
    for name, param in parameters.items():
        key = f"{prefix}{name}."
        given = {part: state_dict.pop(key + part) for part in PARTS if key + part in state_dict}
        saved = state_dict.pop(key + _QUANTIZER, None)
        if not given or param is None:
            continue
        held = _distinct(param) if isinstance(param, QuantizedTensor) else {}
        own = param.quantizer.text if isinstance(param, QuantizedTensor) else ""
        text = own if saved is None else bytes(saved.tolist()).decode().rstrip()
        if text == own and set(held) <= set(given) and isinstance(param, QuantizedTensor):
            for part, tensor in held.items():
                if given[part].shape != tensor.shape:
                    raise RuntimeError(
                        f"{key}{part}: expected shape {list(tensor.shape)}, got {list(given[part].shape)}. Load the state of the same module."
                    )
            made = {part: given.get(part) for part in held}
            if param.columnwise_data is not None and "columnwise_data" not in held:
                made.update({part: made[part.replace("column", "row")] for part in ("columnwise_data", "columnwise_scale_inv")})
            state_dict[prefix + name] = param._of([made.get(part) for part in PARTS])
            continue
        if not text:
            raise RuntimeError(
                f"{prefix}{name}: expected plain numbers in the state dict, as the parameter has, got {', '.join(given)}. Quantize the parameter as "
                "the saved one was: torch.nn.Parameter(tandem.quantize(...))."
            )
        expected = dict(zip(PARTS, _sizes_of_parts(text, math.prod(param.shape[:-1]), param.shape[-1] if param.dim() else 1), strict=True))
        for part, tensor in given.items():
            if math.prod(expected[part]) != tensor.numel():
                raise RuntimeError(f"{key}{part}: expected shape {list(expected[part])}, got {list(tensor.shape)}. Load the state of the same module.")
        if "rowwise_data" not in given and "columnwise_data" not in given:
            raise RuntimeError(f"{prefix}{name}: expected codes among its parts in the state dict, got {', '.join(given)}. Save all parts.")
        codes = assembled([given.get(part) for part in PARTS], quantizer_of_text(text), param.dtype, param.shape)
        state_dict[prefix + name] = codes.dequantize()


class Quantizer:
    """Base of quantizers: `text` is what kernel ops know it by.

    Args:
        text: a format, a kind of scale and options.
        rowwise, columnwise: which codes are wanted.
    """

    _heads: ClassVar[tuple[str, ...]] = ()  # what the texts of a kind begin with
    _kinds: ClassVar[dict[str, type[Quantizer]]] = {}  # by these

    def __init_subclass__(cls) -> None:
        Quantizer._kinds.update(dict.fromkeys(vars(cls).get("_heads", ()), cls))

    def __init__(self, text: str, rowwise: bool, columnwise: bool) -> None:
        if not rowwise and not columnwise:
            raise ValueError(f"{type(self).__name__}: expected rowwise or columnwise codes to be wanted, got neither. Leave one of them True.")
        self.text = _C.canonical_quantizer(text)
        self.rowwise, self.columnwise = rowwise, columnwise

    def quantize(self, x: torch.Tensor) -> QuantizedTensor:
        """Codes of x, which must need no gradient: rounding has none."""
        return self._codes(x, None)[0]

    def _codes(self, x: torch.Tensor, given: torch.Tensor | None) -> tuple[QuantizedTensor, torch.Tensor]:
        mask = [self.rowwise, self.columnwise, True]
        *parts, amax = torch.ops.tandem.quantize(x, given, self.text, mask)
        row, row_scale, row_amax, column, column_scale, column_amax = parts
        if column.shape != x.shape and column_amax.numel() == 0:  # one value serves both directions
            column, column_scale = row, row_scale
        has_amax = row_amax.numel() != 0 or column_amax.numel() != 0
        rows = (row, row_scale) if self.rowwise else (None, None)
        columns = (column, column_scale) if self.columnwise else (None, None)
        codes = QuantizedTensor(
            *rows,
            *columns,
            self,
            x.dtype,
            amax_rowwise=row_amax if has_amax and self.rowwise else None,
            amax_columnwise=column_amax if has_amax and self.columnwise else None,
            shape=x.shape,
        )
        return codes, amax

    def _fields(self) -> tuple[Any, ...]:
        """What `quantizer_of_text` makes it of."""
        return self.text, self.rowwise, self.columnwise

    def _take(self) -> None:
        """Takes what it is given besides."""

    def _values(self) -> tuple[object, ...]:
        return type(self), self.text, self.rowwise, self.columnwise

    def __deepcopy__(self, memo: dict[int, Any]) -> Quantizer:
        return self  # a value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Quantizer) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.text!r}, rowwise={self.rowwise}, columnwise={self.columnwise})"


def quantizer_of_text(text: str, rowwise: bool = True, columnwise: bool = True, *given: Any) -> Quantizer:
    """The quantizer that kernel ops know by this text; `given` is what it holds besides."""
    kind = next((kind for head, kind in Quantizer._kinds.items() if text.startswith(head)), Quantizer)
    made: Quantizer = kind.__new__(kind)
    made.text, made.rowwise, made.columnwise = text, rowwise, columnwise
    made._take(*given)
    return made


__all__ = ["PARTS", "QuantizedTensor", "Quantizer", "assembled", "load_parts", "quantizer_of_text", "save_parts"]
