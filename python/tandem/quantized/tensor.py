"""`QuantizedTensor`: a tensor subclass of codes and scales, and its behaviour under torch's operations."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

from tandem.quantized.parts import DTYPES, PARTS, distinct, in_order
from tandem.quantized.sharding import post_all_gather, pre_all_gather
from tandem.quantized.traits import traits_of
from tandem.quantized.views import (
    FIRST_NUMBERS,
    SHARING,
    STAYING,
    ZEROS,
    Decoded,
    collective,
    has_tangent,
    is_view,
    read_only,
    views_in_inference_mode,
    without_memory,
    written,
)

OF_A_RANK = "_is_of_a_rank"  # mark of a local tensor that replaced an unquantized one of `fully_shard`
_GIVEN = ("_given_scale", "_given_amax")  # attributes for the tensors of the quantizer, which graphs take as inputs
_SOME_ROWS = 128  # a multiple of the block size of every format
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # the integer dtype by bytes of an element
_PLAIN_DATA: Any = torch.Tensor.data  # torch's descriptor, which this class overrides


def _copy_into(part: torch.Tensor, new: torch.Tensor) -> None:
    part.copy_(new)
    if not part.is_inference():
        torch.autograd.graph.increment_version(part)  # this runs below autograd, where copy_ does not count it


class QuantizedTensor(torch.Tensor):
    """x ~= decode(data) * scale_inv: a tensor that holds codes and scales of x. Codes that the quantizer did not compute are None.

    It may be a parameter: products read its codes, and its gradient is an unquantized tensor. A write quantizes the new values, unless they equal the
    dequantized values. Results stay quantized for copies, moves to another device or dtype, row slices, pickles, and for `view`, `reshape`, `flatten` and
    `unsqueeze` that keep the last dimension. Every other operation of torch reads the dequantized values and returns an unquantized tensor. Other
    views are copies and cannot be written; nor can a row slice whose scales serve other rows too. Slices of a tensor with a tangent are dequantized.
    `param.data = x` quantizes x, or takes the codes of a quantized x. An access to the memory, as by DLPack, raises RuntimeError.
    `torch.distributed.broadcast` sends the codes; other collectives cannot write into the tensor. State dicts hold the parts as unquantized tensors.

    Attributes:
        rowwise_data, columnwise_data: row codes and column codes, uint8 of the shape of x, never transposed. With one scale per tensor or per square
            both may be one tensor. Four-bit codes are two in a byte, the first in the low half: neighbours along the last dimension of x, or, for column
            codes, neighbours along the rows of x as a matrix.
        rowwise_scale_inv, columnwise_scale_inv: the factors of decoded row codes and column codes.
        amax_rowwise, amax_columnwise: with NVFP4 the amaxes that determine the scale per tensor; else None.
        quantizer: the `Quantizer` that computed the codes.
        dtype, shape: dtype of the dequantized values, and shape of x.
        requires_grad: whether autograd computes a gradient.
    """

    rowwise_data: torch.Tensor | None
    columnwise_data: torch.Tensor | None
    rowwise_scale_inv: torch.Tensor | None
    columnwise_scale_inv: torch.Tensor | None
    amax_rowwise: torch.Tensor | None
    amax_columnwise: torch.Tensor | None
    quantizer: Any

    # __torch_dispatch__ handles operations, below autograd.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls,
        rowwise_data: torch.Tensor | None,
        rowwise_scale_inv: torch.Tensor | None,
        columnwise_data: torch.Tensor | None,
        columnwise_scale_inv: torch.Tensor | None,
        quantizer: Any,
        dtype: torch.dtype,
        requires_grad: bool = False,
        amax_rowwise: torch.Tensor | None = None,
        amax_columnwise: torch.Tensor | None = None,
        shape: Sequence[int] | None = None,
    ) -> QuantizedTensor:
        """Wraps matching parts, such as those of `tandem.quantize`. `shape` is the shape of x, which four-bit codes do not determine; None: that of the
        codes. ValueError without row and column codes."""
        codes = rowwise_data if rowwise_data is not None else columnwise_data
        if codes is None:
            raise ValueError("QuantizedTensor: expected codes of rows or of columns, got neither. Pass rowwise_data or columnwise_data.")
        tensor: QuantizedTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, codes.shape if shape is None else shape, dtype=dtype, device=codes.device, requires_grad=requires_grad
        )
        tensor.rowwise_data, tensor.rowwise_scale_inv, tensor.amax_rowwise = rowwise_data, rowwise_scale_inv, amax_rowwise
        tensor.columnwise_data, tensor.columnwise_scale_inv, tensor.amax_columnwise = columnwise_data, columnwise_scale_inv, amax_columnwise
        tensor.quantizer = quantizer
        return without_memory(tensor)  # type: ignore[no-any-return]

    @property
    def data(self) -> torch.Tensor:
        """A tensor of the same codes without autograd history. An assigned tensor is quantized, unless it is a quantized tensor."""
        return _PLAIN_DATA.__get__(self)

    @data.setter
    def data(self, x: torch.Tensor) -> None:
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"data: expected a tensor, got {type(x).__name__}. Assign numbers or a quantized tensor.")
        if x.dtype not in DTYPES:
            raise TypeError(
                f"data: expected numbers in float32, bfloat16 or float16, as a quantized tensor stands for, got {x.dtype}. Put plain numbers in the place of "
                "the parameter: torch.nn.Parameter(weight.dequantize())."
            )
        numbers = x.detach().resolve_neg()  # `_is_of` compares bits
        if self._is_of(numbers):
            return
        made = x if isinstance(x, QuantizedTensor) else self.quantizer.quantize(numbers)
        _PLAIN_DATA.__set__(self, made)  # shape, dtype and device
        self.__dict__.update({name: made.__dict__.get(name) for name in (*PARTS, "quantizer", SHARING)})

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        names = [*distinct(self), *_GIVEN[: len(self.quantizer._tensors())]]
        return names, (_Held(self.quantizer), self.dtype, self.columnwise_data is not None, self.requires_grad, self._is_sharing())

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Any], context: tuple[Any, ...], size: Any, stride: Any) -> QuantizedTensor:
        held, dtype, has_columns, requires_grad, is_sharing = context
        quantizer = held.quantizer._holding([parts[name] for name in _GIVEN if name in parts])
        return assembled(in_order(parts, has_columns), quantizer, dtype, size, requires_grad)._sharing(is_sharing)

    _given_scale, _given_amax = property(lambda self: self.quantizer.scale), property(lambda self: self.quantizer.amax)

    def _stable_hash_for_caching(self) -> str:
        """A text of all properties that compiled code depends on, by which caches on disk identify the tensor."""
        names, (held, *context) = self.__tensor_flatten__()
        parts = {name: (part.shape, part.stride(), part.dtype, part.device) for name in names if (part := getattr(self, name)) is not None}
        return repr((held.quantizer._stable_traits(), context, self.shape, parts))

    @classmethod
    @views_in_inference_mode
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (change := STAYING.get(function)) and isinstance(args[0], QuantizedTensor):
            if (changed := change(*args, **kwargs)) is not None:
                return changed
        if (result := collective(function, args)) is not None:
            return result
        plain: dict[int, torch.Tensor] = {}
        targets = written(function, args, kwargs)

        def decoded(value: Any) -> Any:
            if not isinstance(value, QuantizedTensor):
                return value
            return plain.setdefault(id(value), value._latest_numbers() if targets else value._numbers())  # an initialiser of several steps rounds once

        result = function(*tree_map(decoded, args), **tree_map(decoded, kwargs))
        if is_view(function) and isinstance(args[0], QuantizedTensor):
            return Decoded.of(result)
        owners = {id(plain[id(tensor)]): tensor for tensor in targets if isinstance(tensor, QuantizedTensor)}  # by the dequantized tensor that replaced each
        for tensor in owners.values():
            tensor._write(plain[id(tensor)])
        return tree_map(lambda value: owners.get(id(value), value), result) if owners else result

    def _write_of(self, source: torch.Tensor) -> QuantizedTensor:
        """Copies the parts of a source with equal quantizer, shape and parts, or quantizes its values."""
        self._check_writable()
        if not isinstance(source, QuantizedTensor) or not self._has_parts_of(source):
            self._write(source._numbers() if isinstance(source, QuantizedTensor) else source)
            return self
        self._take_parts_of(source)
        if self._first_numbers() is not None:
            self._note_numbers(source._latest_numbers())
        for amax, new in zip(self.quantizer._tensors()[1:], source.quantizer._tensors()[1:], strict=True):
            if amax is not new:  # the amax belongs to the codes, so it is copied with them
                _copy_into(amax, new)
        return self

    def _sharing(self, mark: object) -> QuantizedTensor:
        """Itself, marked as a slice whose parts serve other rows too, or may later."""
        if mark:
            self.__dict__[SHARING] = mark
        return self

    def _is_sharing(self) -> bool:
        mark = self.__dict__.get(SHARING)
        return mark is not None and (mark is True or mark.is_written)

    def _check_writable(self) -> None:
        if self._is_sharing():
            raise RuntimeError(
                "QuantizedTensor: expected a write into a tensor that has its scales to itself, got one into a slice of rows whose scales serve other rows "
                "too. Write into the whole, as in whole[first:last] = x, or into a clone of the slice."
            )
        if zeros := self.__dict__.get(ZEROS):
            zeros.is_written = True

    def __setitem__(self, index: Any, value: Any) -> None:  # x[index] is a copy, so a write into it would be lost
        x = self._latest_numbers()
        x[index] = value
        self.quantize_(x)

    def _with(
        self, change: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype | None = None, shape: Sequence[int] | None = None
    ) -> QuantizedTensor:
        """Another quantized tensor, whose parts are `change` of the parts of this one. A part that serves both directions is changed once."""
        return self._of({name: change(part) for name, part in distinct(self).items()}, shape, dtype)

    def _of(self, parts: Mapping[str, torch.Tensor], shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> QuantizedTensor:
        """A quantized tensor with this quantizer and other parts, by the names that `distinct` gives to those of this one."""
        names = {id(part): name for name, part in distinct(self).items()}
        given = [parts.get(names.get(id(getattr(self, name)), name)) for name in PARTS]
        return assembled(given, self.quantizer, dtype or self.dtype, self.shape if shape is None else shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A deep copy, as for other tensors. Torch's own method would read the memory."""
        if id(self) in memo or not self.is_leaf:
            return super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
        made = self._of(distinct(self))
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        memo[id(self)] = made.requires_grad_(self.requires_grad)
        made.grad = copy.deepcopy(self.grad, memo)
        return made

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        attributes = {name: value for name, value in self.__dict__.items() if name not in (*PARTS, "quantizer", SHARING, ZEROS)}
        if self._is_sharing():
            attributes[SHARING] = True
        parts = [getattr(self, name) for name in PARTS]
        return _rebuilt, (self.quantizer, parts, self.dtype, tuple(self.shape), self.requires_grad, attributes)

    fsdp_pre_all_gather, fsdp_post_all_gather = pre_all_gather, post_all_gather  # torch.distributed.fsdp.fully_shard calls them

    def _has_parts_of(self, other: QuantizedTensor) -> bool:
        there = [[None if part is None else part.shape for part in (getattr(tensor, name) for name in PARTS)] for tensor in (self, other)]
        return self.quantizer.text == other.quantizer.text and self.shape == other.shape and there[0] == there[1]

    def _write(self, x: torch.Tensor) -> None:
        """Overwrites the codes by those of x."""
        self._check_writable()
        numbers = x.detach().resolve_neg().to(self.dtype).expand(self.shape)  # the kernels read memory without negating it
        if self._is_of(numbers):
            return
        self._take_parts_of(self.quantizer._wanting(self)._quantized(numbers))
        if self._first_numbers() is not None:
            self._note_numbers(numbers)

    def _is_of(self, numbers: torch.Tensor) -> bool:
        """Whether the dequantized values are `numbers` bit by bit, so that a write would only round column codes a second time.

        False while tracing, and for quantizers with a given or shared scale or stochastic rounding, whose codes each write computes."""
        if isinstance(numbers, QuantizedTensor) or (numbers.shape, numbers.dtype, numbers.device) != (self.shape, self.dtype, self.device):
            return False
        quantizer, traits = self.quantizer, traits_of(self.quantizer.text)
        if quantizer._amax_group is not None or quantizer._tensors() or traits.takes_seed or self.rowwise_data is None and traits.is_rotated:
            return False
        if any(type(part) is not torch.Tensor or part.is_meta for part in distinct(self).values()):
            return False
        bits = _BITS[self.dtype.itemsize]
        for rows in (_SOME_ROWS, None) if self.dim() > 1 and self.shape[0] > 2 * _SOME_ROWS else (None,):  # most writes differ in the first rows already
            own = self.detach()[:rows]
            own = own._numbers() if isinstance(own, QuantizedTensor) else own
            if not torch.equal(numbers[:rows].contiguous().view(bits), own.contiguous().view(bits)):
                return False
        return True

    def _first_numbers(self) -> torch.Tensor | None:
        return self.__dict__.get(FIRST_NUMBERS, (None,))[0]

    def _latest_numbers(self) -> torch.Tensor:
        """A copy of the unquantized numbers that were written last, if they are kept; else the dequantized values."""
        first = self._first_numbers()
        return self._numbers() if first is None else first.to(self.device, self.dtype, copy=True)

    def _note_numbers(self, x: torch.Tensor) -> None:
        self.__dict__[FIRST_NUMBERS][0] = x.detach().to("cpu", copy=True)

    def _take_parts_of(self, other: QuantizedTensor) -> None:
        for name, part in distinct(self).items():
            _copy_into(part, getattr(other, name))

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drops row or column codes (False), or adds them (True), which needs a format whose one set of codes serves both, else RuntimeError; None: unchanged.
        ValueError if neither would remain."""
        there = self.get_usages()
        wanted = [there[name] if usage is None else bool(usage) for name, usage in (("rowwise", rowwise_usage), ("columnwise", columnwise_usage))]
        if not any(wanted):
            raise ValueError("update_usage: expected codes of rows or of columns to be kept, got neither. Leave one of them True.")
        for (name, is_there), is_wanted in zip(there.items(), wanted, strict=True):
            if is_wanted and not is_there:
                other = "columnwise" if name == "rowwise" else "rowwise"
                if not traits_of(self.quantizer.text).serves_both_directions:
                    raise RuntimeError(
                        f"update_usage: expected {name} codes that are there or the same as {other} ones, got a tensor of {self.quantizer!r} without. Quantize "
                        f"with {name}=True."
                    )
                for part in ("data", "scale_inv"):
                    setattr(self, f"{name}_{part}", getattr(self, f"{other}_{part}"))
        for name, is_wanted in zip(there, wanted, strict=True):
            if not is_wanted:
                for part in (f"{name}_data", f"{name}_scale_inv", f"amax_{name}"):
                    setattr(self, part, None)

    def get_usages(self) -> dict[str, bool]:
        """Whether the tensor has row codes and column codes, under the keys "rowwise" and "columnwise"."""
        return {"rowwise": self.rowwise_data is not None, "columnwise": self.columnwise_data is not None}

    def __getattr__(self, name: str) -> Any:
        """Two methods exist if `quantized_model_init` has kept the initial numbers: `get_high_precision_init_val()` returns them, or None once they are
        cleared, and `clear_high_precision_init_val()` drops them."""
        if FIRST_NUMBERS in self.__dict__:
            if name == "get_high_precision_init_val":
                return self._first_numbers
            if name == "clear_high_precision_init_val":
                return lambda: self.__dict__[FIRST_NUMBERS].__setitem__(0, None)
        raise AttributeError(
            f"QuantizedTensor: expected an attribute that it has, got {name!r}. Those of first values are there where quantized_model_init has kept them."
        )

    def dequantize(self, columnwise: bool | torch.dtype = False, dtype: torch.dtype | None = None) -> torch.Tensor:  # type: ignore[override]
        """decode(data) * scale_inv, in `dtype` or by default in the dtype of the tensor, of the shape of x. Its gradient is the gradient of the tensor.

        `columnwise` reads the column codes; otherwise the row codes count, or the column codes if there are no others. The dtype may be the first
        argument. Rotated column codes give rotated values: a matrix whose number of rows is padded to a multiple of 16, without a gradient. Codes that
        do not exist, or rotated ones without `columnwise`, raise ValueError."""
        if isinstance(columnwise, torch.dtype):
            columnwise, dtype = False, columnwise
        is_rotated = columnwise and traits_of(self.quantizer.text).is_rotated
        if (torch.is_grad_enabled() and self.requires_grad or has_tangent(self)) and not is_rotated:
            made: torch.Tensor = _Dequantized.apply(self, columnwise, dtype)  # type: ignore[no-untyped-call]
            return made
        return self._numbers(columnwise, dtype)

    def _numbers(self, columnwise: bool = False, dtype: torch.dtype | None = None) -> torch.Tensor:
        """`dequantize` without recording a gradient."""
        is_rotated = traits_of(self.quantizer.text).is_rotated
        if not columnwise and self.rowwise_data is None and is_rotated:
            raise ValueError("dequantize: expected codes of rows, got rotated ones of columns, which do not tell the numbers. Pass columnwise=True for those.")
        columnwise = columnwise or self.rowwise_data is None
        data, scale, amax = [getattr(self, name) for name in (PARTS[3:] if columnwise else PARTS[:3])]
        if data is None or scale is None:
            raise ValueError("dequantize: expected columnwise codes, got a tensor quantized without. Build the quantizer with columnwise=True.")
        sizes = None if columnwise and is_rotated else list(self.shape)
        data, scale = data.contiguous(), scale.contiguous()  # slices of rows may not be
        return torch.ops.tandem.dequantize(data, scale, self.quantizer.text, columnwise, dtype or self.dtype, amax, sizes)

    def quantize_(self, x: torch.Tensor) -> QuantizedTensor:
        """Quantizes x, such as a master weight that an optimizer has stepped, into this tensor, without recording a gradient. Returns the tensor."""
        with torch.no_grad():
            return self.copy_(x)  # type: ignore[return-value]

    def share_memory_(self) -> QuantizedTensor:
        """Moves the parts to memory that processes share. Returns the tensor."""
        for part in distinct(self).values():
            part.share_memory_()  # type: ignore[no-untyped-call]
        return self

    def is_shared(self) -> bool:
        """Whether all parts lie in memory that processes share."""
        return all(part.is_shared() for part in distinct(self).values())

    def untyped_storage(self) -> torch.UntypedStorage:
        """An empty storage, as only the parts have memory."""
        storage = super().untyped_storage()
        if self.__dict__.get(OF_A_RANK):  # fully_shard compares addresses, to see whether its tensor was replaced
            storage.data_ptr = lambda: 0  # type: ignore[method-assign]
        return storage

    def numpy(self, *, force: bool = False) -> Any:
        """The dequantized values as a read-only array."""
        return read_only(self.dequantize().numpy(force=force))

    def tolist(self) -> Any:
        """The dequantized values as nested lists."""
        return self.dequantize().tolist()

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"QuantizedTensor({list(self.shape)}, dtype={self.dtype}, quantizer={self.quantizer!r})"


class _Held(NamedTuple):
    """A quantizer, compared without its tensors. Dynamo copies and compares it, as compiled code depends on it."""

    quantizer: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and bool(self.quantizer._traits() == other.quantizer._traits())

    def __hash__(self) -> int:
        return hash(self.quantizer._traits())

    def __deepcopy__(self, memo: dict[int, Any]) -> _Held:
        return self


class _Dequantized(torch.autograd.Function):
    """The autograd function of `dequantize`: gradient and tangent pass through unchanged but for the dtype."""

    generate_vmap_rule = True

    @staticmethod
    def forward(codes: QuantizedTensor, columnwise: bool, dtype: torch.dtype | None) -> torch.Tensor:
        return codes._numbers(columnwise, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # torch.func requires it apart from forward
        ctx.dtype, ctx.made = inputs[0].dtype, output.dtype

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        tangent: torch.Tensor = tangents[0].to(ctx.made)
        return tangent

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0].to(ctx.dtype), None, None


def assembled(
    parts: Sequence[torch.Tensor | None], quantizer: Any, dtype: torch.dtype, shape: Sequence[int], requires_grad: bool = False
) -> QuantizedTensor:
    """A quantized tensor of parts in the order of PARTS."""
    row, row_scale, row_amax, column, column_scale, column_amax = parts
    return QuantizedTensor(row, row_scale, column, column_scale, quantizer, dtype, requires_grad, row_amax, column_amax, shape)


def in_directions(parts: Sequence[torch.Tensor | None], quantizer: Any, dtype: torch.dtype, shape: Sequence[int]) -> QuantizedTensor:
    """A quantized tensor of those parts from the library that the quantizer computes. Without column parts the row parts serve both directions."""
    row, column, absent = parts[:3], parts[3:6], (None, None, None)
    column = row if column[0] is None else column
    return assembled([*(row if quantizer.rowwise else absent), *(column if quantizer.columnwise else absent)], quantizer, dtype, shape)


def _rebuilt(
    quantizer: Any, parts: list[Any], dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool, attributes: dict[str, Any]
) -> QuantizedTensor:
    """Creates a tensor from a pickle, also for torch.load(weights_only=True)."""
    made = assembled(parts, quantizer, dtype, shape)
    made.__dict__.update(attributes)
    return made.requires_grad_(requires_grad)


torch.serialization.add_safe_globals([_rebuilt])
