"""Tensors in codes: what torch does with them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

from tandem.quantized.parts import DTYPES, PARTS, serves_both
from tandem.quantized.sharding import post_all_gather, pre_all_gather
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

OF_A_RANK = "_is_of_a_rank"  # of what fully_shard finds in the place of plain numbers
_GIVEN = ("_given_scale", "_given_amax")  # tensors of a quantizer that holds some
_SOME_ROWS = 128  # whole blocks of every format
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a number
_PLAIN_DATA: Any = torch.Tensor.data  # the descriptor: of shape, dtype and memory of a wrapper


def _copy_into(part: torch.Tensor, new: torch.Tensor) -> None:
    part.copy_(new)
    if not part.is_inference():
        torch.autograd.graph.increment_version(part)  # below autograd, where this runs, nothing else does


class QuantizedTensor(torch.Tensor):
    """A tensor in codes: x ~= decode(data) * scale_inv. What the quantizer was not asked for is None.

    It may be a parameter: products read its codes, its gradient is a plain tensor. Writing into it quantizes again, unless these are the numbers that it
    stands for. Copies, moves to another device or dtype (which is that of its numbers), `view`, `reshape`, `flatten` and `unsqueeze` that leave the last
    dimension alone, slices of rows and pickles stay quantized; any other operation of torch reads its numbers and gives a plain tensor. Other views are
    copies of the numbers, which cannot be written, and so cannot a slice of rows whose scales serve other rows too. Of a tensor with a tangent slices are
    decoded too. `param.data = x` quantizes x, or takes the codes that it is in. What asks for the memory, as other libraries do by DLPack, gets a
    RuntimeError. `torch.distributed.broadcast` moves the codes; other collectives cannot write into it. State dicts hold the parts, as plain tensors under
    the parameter's name.

    Attributes:
        rowwise_data, columnwise_data: uint8 codes of the shape of x, with blocks along its last dimension, and along the others; never
            transposed. With one scale per tensor or per square both may be the same tensor. Of four bits there are two codes in a byte, the first in the
            low half: neighbours of the last dimension, or, in columns of x as a matrix, of the first.
        rowwise_scale_inv, columnwise_scale_inv: their scales.
        amax_rowwise, amax_columnwise: of formats with a second level of scale the largest magnitudes that this comes from, else None.
        quantizer: the `Quantizer` that made it.
        dtype, shape: those of x.
        requires_grad: whether its gradient is wanted.
    """

    rowwise_data: torch.Tensor | None
    columnwise_data: torch.Tensor | None
    rowwise_scale_inv: torch.Tensor | None
    columnwise_scale_inv: torch.Tensor | None
    amax_rowwise: torch.Tensor | None
    amax_columnwise: torch.Tensor | None
    quantizer: Any

    # Operations go to __torch_dispatch__, below autograd.
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
        return without_memory(tensor)  # type: ignore[no-any-return]

    @property
    def data(self) -> torch.Tensor:
        """The same codes without a history. What is assigned is quantized, unless it is quantized already."""
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
        numbers = x.detach().resolve_neg()  # whose bits are compared
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
        row, row_scale, row_amax, column, column_scale, column_amax = [parts.get(name) for name in PARTS]
        if has_columns and column is None:
            column, column_scale = row, row_scale
        made = QuantizedTensor(row, row_scale, column, column_scale, quantizer, dtype, requires_grad, row_amax, column_amax, size)
        return made._sharing(is_sharing)

    _given_scale, _given_amax = property(lambda self: self.quantizer.scale), property(lambda self: self.quantizer.amax)

    def _stable_hash_for_caching(self) -> str:
        """All that compiled code depends on: caches on disk know this tensor by it alone."""
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
        owners = {id(plain[id(tensor)]): tensor for tensor in targets if isinstance(tensor, QuantizedTensor)}  # by what stood in for them
        for tensor in owners.values():
            tensor._write(plain[id(tensor)])
        return tree_map(lambda value: owners.get(id(value), value), result) if owners else result

    def _write_of(self, source: torch.Tensor) -> QuantizedTensor:
        """Takes the codes of another one like this, or quantizes numbers."""
        self._check_writable()
        if not isinstance(source, QuantizedTensor) or not self._has_parts_of(source):
            self._write(source._numbers() if isinstance(source, QuantizedTensor) else source)
            return self
        self._take_parts_of(source)
        if self._first_numbers() is not None:
            self._note_numbers(source._latest_numbers())
        for amax, new in zip(self.quantizer._tensors()[1:], source.quantizer._tensors()[1:], strict=True):
            if amax is not new:  # which is that of what was written
                _copy_into(amax, new)
        return self

    def _sharing(self, mark: object) -> QuantizedTensor:
        """Itself, marked as one whose parts serve other rows too, or may come to."""
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

    def __setitem__(self, index: Any, value: Any) -> None:  # a view is a copy
        x = self._latest_numbers()
        x[index] = value
        self.quantize_(x)

    def _with(
        self, change: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype | None = None, shape: Sequence[int] | None = None
    ) -> QuantizedTensor:
        """Another one of parts that are changed, one of both directions once."""
        changed = {id(part): change(part) for part in distinct(self).values()}
        return self._of([changed.get(id(getattr(self, name))) for name in PARTS], shape, dtype)

    def _again(self) -> QuantizedTensor:
        """Another one of the same parts."""
        return self._of([getattr(self, name) for name in PARTS])

    def _of(self, parts: Sequence[torch.Tensor | None], shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> QuantizedTensor:
        """Another one like this, in the order of PARTS."""
        return assembled(parts, self.quantizer, dtype or self.dtype, self.shape if shape is None else shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """As of other tensors, whose own looks for their memory."""
        if id(self) in memo or not self.is_leaf:
            return super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
        made = self._again()
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

    fsdp_pre_all_gather, fsdp_post_all_gather = pre_all_gather, post_all_gather  # as torch.distributed.fsdp.fully_shard asks for

    def _has_parts_of(self, other: QuantizedTensor) -> bool:
        there = [[None if part is None else part.shape for part in (getattr(tensor, name) for name in PARTS)] for tensor in (self, other)]
        return self.quantizer.text == other.quantizer.text and self.shape == other.shape and there[0] == there[1]

    def _write(self, x: torch.Tensor) -> None:
        """Codes of x in place of those that are there."""
        self._check_writable()
        numbers = x.detach().resolve_neg().to(self.dtype).expand(self.shape)  # kernels called from here on read memory as it is
        if self._is_of(numbers):
            return
        self._take_parts_of(self.quantizer._wanting(self)._quantized(numbers))
        if self._first_numbers() is not None:
            self._note_numbers(numbers)

    def _is_of(self, numbers: torch.Tensor) -> bool:
        """Whether the codes stand for just these numbers, whose own codes may be others: those of columns would be rounded a second time. Where the scale is
        given, or that of several processes, or rounding is by chance, codes are made anew with each write. Nobody knows while tracing."""
        if isinstance(numbers, QuantizedTensor) or (numbers.shape, numbers.dtype, numbers.device) != (self.shape, self.dtype, self.device):
            return False
        quantizer, text = self.quantizer, self.quantizer.text
        if quantizer._amax_group is not None or quantizer._tensors() or ":sr=1" in text or self.rowwise_data is None and ":rht=1" in text:
            return False
        if any(type(part) is not torch.Tensor or part.is_meta for part in distinct(self).values()):
            return False
        bits = _BITS[self.dtype.itemsize]
        for rows in (_SOME_ROWS, None) if self.dim() > 1 and self.shape[0] > 2 * _SOME_ROWS else (None,):  # most writes bring other numbers
            own = self.detach()[:rows]
            own = own._numbers() if isinstance(own, QuantizedTensor) else own
            if not torch.equal(numbers[:rows].contiguous().view(bits), own.contiguous().view(bits)):
                return False
        return True

    def _first_numbers(self) -> torch.Tensor | None:
        return self.__dict__.get(FIRST_NUMBERS, (None,))[0]

    def _latest_numbers(self) -> torch.Tensor:
        """A copy of the numbers that were written last, where these are kept; else those of the codes."""
        first = self._first_numbers()
        return self._numbers() if first is None else first.to(self.device, self.dtype, copy=True)

    def _note_numbers(self, x: torch.Tensor) -> None:
        self.__dict__[FIRST_NUMBERS][0] = x.detach().to("cpu", copy=True)

    def _take_parts_of(self, other: QuantizedTensor) -> None:
        for name, part in distinct(self).items():
            _copy_into(part, getattr(other, name))

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drops the codes of a direction, for False, or gives those that are to be there, for True, where one set of codes serves both; None: as it is."""
        there = self.get_usages()
        wanted = [there[name] if usage is None else bool(usage) for name, usage in (("rowwise", rowwise_usage), ("columnwise", columnwise_usage))]
        if not any(wanted):
            raise ValueError("update_usage: expected codes of rows or of columns to be kept, got neither. Leave one of them True.")
        for (name, is_there), is_wanted in zip(there.items(), wanted, strict=True):
            if is_wanted and not is_there:
                other = "columnwise" if name == "rowwise" else "rowwise"
                if not serves_both(self.quantizer.text):
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
        """Whether there are codes of rows and of columns."""
        return {"rowwise": self.rowwise_data is not None, "columnwise": self.columnwise_data is not None}

    def __getattr__(self, name: str) -> Any:
        """Where the numbers that the tensor was drawn with were kept (`quantized_model_init`) there are `get_high_precision_init_val`, which gives them,
        None once they are cleared, and `clear_high_precision_init_val`."""
        if FIRST_NUMBERS in self.__dict__:
            if name == "get_high_precision_init_val":
                return self._first_numbers
            if name == "clear_high_precision_init_val":
                return lambda: self.__dict__[FIRST_NUMBERS].__setitem__(0, None)
        raise AttributeError(
            f"QuantizedTensor: expected an attribute that it has, got {name!r}. Those of first values are there where quantized_model_init has kept them."
        )

    def dequantize(self, columnwise: bool | torch.dtype = False, dtype: torch.dtype | None = None) -> torch.Tensor:  # type: ignore[override]
        """The numbers of one direction, in `dtype`, which may come first, or in that of x. Without `columnwise`, those of rows, or of columns where these are
        all. Their gradient is that of the tensor. Rotated columns stay rotated, as a matrix whose number of rows is padded to 16, and have none."""
        if isinstance(columnwise, torch.dtype):
            columnwise, dtype = False, columnwise
        is_rotated = columnwise and ":rht=1" in self.quantizer.text
        if (torch.is_grad_enabled() and self.requires_grad or has_tangent(self)) and not is_rotated:
            made: torch.Tensor = _Dequantized.apply(self, columnwise, dtype)  # type: ignore[no-untyped-call]
            return made
        return self._numbers(columnwise, dtype)

    def _numbers(self, columnwise: bool = False, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Without a history."""
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

    def share_memory_(self) -> QuantizedTensor:
        """Moves the parts to memory that other processes see. Returns itself."""
        for part in distinct(self).values():
            part.share_memory_()  # type: ignore[no-untyped-call]
        return self

    def is_shared(self) -> bool:
        """Whether other processes may see the parts."""
        return all(part.is_shared() for part in distinct(self).values())

    def untyped_storage(self) -> torch.UntypedStorage:
        """Of nothing, as the memory is that of the parts."""
        storage = super().untyped_storage()
        if self.__dict__.get(OF_A_RANK):  # fully_shard compares addresses, to see whether its numbers are there still
            storage.data_ptr = lambda: 0  # type: ignore[method-assign]
        return storage

    def numpy(self, *, force: bool = False) -> Any:
        """The numbers, as of a plain tensor, but read-only."""
        return read_only(self.dequantize().numpy(force=force))

    def tolist(self) -> Any:
        """The numbers, as of a plain tensor."""
        return self.dequantize().tolist()

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"QuantizedTensor({list(self.shape)}, dtype={self.dtype}, quantizer={self.quantizer!r})"


class _Held(NamedTuple):
    """A quantizer, without the tensors that it holds, as part of what compiled code depends on, which Dynamo copies and compares."""

    quantizer: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and bool(self.quantizer._traits() == other.quantizer._traits())

    def __hash__(self) -> int:
        return hash(self.quantizer._traits())

    def __deepcopy__(self, memo: dict[int, Any]) -> _Held:
        return self


class _Dequantized(torch.autograd.Function):
    """Numbers, whose gradient is that of the codes' tensor, and so is their tangent."""

    generate_vmap_rule = True

    @staticmethod
    def forward(codes: QuantizedTensor, columnwise: bool, dtype: torch.dtype | None) -> torch.Tensor:
        return codes._numbers(columnwise, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # apart from forward, as torch.func wants it
        ctx.dtype, ctx.made = inputs[0].dtype, output.dtype

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        tangent: torch.Tensor = tangents[0].to(ctx.made)
        return tangent

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0].to(ctx.dtype), None, None


def assembled(parts: Sequence[torch.Tensor | None], quantizer: Any, dtype: torch.dtype, shape: Sequence[int]) -> QuantizedTensor:
    row, row_scale, row_amax, column, column_scale, column_amax = parts
    return QuantizedTensor(row, row_scale, column, column_scale, quantizer, dtype, amax_rowwise=row_amax, amax_columnwise=column_amax, shape=shape)


def in_directions(parts: Sequence[torch.Tensor | None], quantizer: Any, dtype: torch.dtype, shape: Sequence[int]) -> QuantizedTensor:
    """Of parts that the library has made, those of the directions that a quantizer wants. Where there are none of columns, those of rows serve both."""
    row, column, absent = parts[:3], parts[3:6], (None, None, None)
    column = row if column[0] is None else column
    return assembled([*(row if quantizer.rowwise else absent), *(column if quantizer.columnwise else absent)], quantizer, dtype, shape)


def _rebuilt(
    quantizer: Any, parts: list[Any], dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool, attributes: dict[str, Any]
) -> QuantizedTensor:
    """What a pickle holds; torch.load(weights_only=True) calls it too."""
    made = assembled(parts, quantizer, dtype, shape)
    made.__dict__.update(attributes)
    return made.requires_grad_(requires_grad)


torch.serialization.add_safe_globals([_rebuilt, (_rebuilt, "tandem._quantized_tensor._rebuilt")])  # whose module had another name


def distinct(x: QuantizedTensor) -> dict[str, torch.Tensor]:
    """The parts that are tensors of their own: one of both directions counts as that of rows."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name in PARTS:
        if (part := getattr(x, name)) is not None:
            found.setdefault(id(part), (name, part))
    return dict(found.values())
