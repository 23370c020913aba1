"""Quantizing by hand: quantizers, and what they make of a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

_ELEMENTS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


_PARTS = (  # in the order of the library's groups
    "rowwise_data",
    "rowwise_scale_inv",
    "amax_rowwise",
    "columnwise_data",
    "columnwise_scale_inv",
    "amax_columnwise",
)


def _copy_into(part: torch.Tensor, new: torch.Tensor) -> None:
    part.copy_(new)
    if not part.is_inference():
        torch.autograd.graph.increment_version(part)  # below autograd, where this runs, nothing else does


class QuantizedTensor(torch.Tensor):
    """A tensor in codes: x ~= decode(data) * scale_inv. What the quantizer was not asked for is None.

    It may be a parameter: products read its codes, its gradient is a plain tensor. Writing into it quantizes again; any other operation of torch
    reads its numbers, and a view of it is a plain copy. State dicts hold the parts, as plain tensors under the parameter's name.

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

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        names, seen = [], set()
        for name in _PARTS:  # a part of both directions is one tensor
            part = getattr(self, name)
            if part is not None and id(part) not in seen:
                names.append(name)
                seen.add(id(part))
        return names, (self.quantizer, self.dtype, self.columnwise_data is not None, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Any], context: tuple[Any, ...], size: Any, stride: Any) -> QuantizedTensor:
        quantizer, dtype, has_columns, requires_grad = context
        row, row_scale, row_amax, column, column_scale, column_amax = [parts.get(name) for name in _PARTS]
        if has_columns and column is None:
            column, column_scale = row, row_scale
        return QuantizedTensor(row, row_scale, column, column_scale, quantizer, dtype, requires_grad, row_amax, column_amax, size)

    def _stable_hash_for_caching(self) -> str:  # what compiled code depends on, besides parts and shapes
        return f"{self.quantizer.text} {[getattr(self, name) is not None for name in _PARTS]}"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        aten = torch.ops.aten
        if function in (aten.detach.default, aten.alias.default):
            return args[0]._with(lambda part: part)
        if function is aten.clone.default:
            return args[0]._with(torch.clone)
        if function is aten._to_copy.default and kwargs.get("dtype") in (None, args[0].dtype):
            return args[0]._with(lambda part: part.to(device=kwargs.get("device"), copy=True))
        if function is aten.copy_.default and isinstance(args[0], QuantizedTensor):
            source = args[1]
            if isinstance(source, QuantizedTensor) and args[0]._has_parts_of(source):
                for name in _PARTS:
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

    def __setitem__(self, index: Any, value: Any) -> None:  # a view is a copy
        x = self.dequantize()
        x[index] = value
        self.quantize_(x)

    def _with(self, change: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedTensor:
        changed: dict[int, torch.Tensor] = {}
        parts = [getattr(self, name) for name in _PARTS]
        made = [None if part is None else changed.setdefault(id(part), change(part)) for part in parts]
        return self._of(made)

    def _of(self, parts: Sequence[torch.Tensor | None]) -> QuantizedTensor:
        """Another one like this, in the order of _PARTS."""
        row, row_scale, row_amax, column, column_scale, column_amax = parts
        return QuantizedTensor(
            row, row_scale, column, column_scale, self.quantizer, self.dtype, amax_rowwise=row_amax, amax_columnwise=column_amax, shape=self.shape
        )

    def _has_parts_of(self, other: QuantizedTensor) -> bool:
        there = [[getattr(tensor, name) is not None for name in _PARTS] for tensor in (self, other)]
        return self.quantizer.text == other.quantizer.text and there[0] == there[1]

    def _write(self, x: torch.Tensor) -> None:
        """Codes of x in place of those that are there."""
        made = self.quantizer.quantize(x.detach().to(self.dtype).expand(self.shape))
        for name in _PARTS:
            part, new = getattr(self, name), getattr(made, name)
            if part is not None and new is not None:
                _copy_into(part, new)

    def dequantize(self, columnwise: bool = False, dtype: torch.dtype | None = None) -> torch.Tensor:  # type: ignore[override]
        """The numbers of one direction, in `dtype` or in that of x. Without `columnwise`, those of rows, or of columns where these are all. Rotated
        columns stay rotated, as a matrix whose number of rows is padded to 16."""
        is_rotated = ":rht=1" in self.quantizer.text
        if not columnwise and self.rowwise_data is None and is_rotated:
            raise ValueError("dequantize: expected codes of rows, got rotated ones of columns, which do not tell the numbers. Pass columnwise=True for those.")
        columnwise = columnwise or self.rowwise_data is None
        row, row_scale, row_amax, column, column_scale, column_amax = [getattr(self, name) for name in _PARTS]
        data, scale, amax = (column, column_scale, column_amax) if columnwise else (row, row_scale, row_amax)
        if data is None or scale is None:
            raise ValueError("dequantize: expected columnwise codes, got a tensor quantized without. Build the quantizer with columnwise=True.")
        sizes = None if columnwise and is_rotated else list(self.shape)
        return torch.ops.tandem.dequantize(data, scale, self.quantizer.text, columnwise, dtype or self.dtype, amax, sizes)

    def quantize_(self, x: torch.Tensor) -> QuantizedTensor:
        """Writes the codes of x, such as a master copy that an optimizer has stepped."""
        with torch.no_grad():
            return self.copy_(x)  # type: ignore[return-value]

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"QuantizedTensor({list(self.shape)}, dtype={self.dtype}, quantizer={self.quantizer!r})"


def save_parts(parameters: Mapping[str, torch.Tensor | None], destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
    """Puts the parts of quantized parameters in their place in a state dict."""
    for name, param in parameters.items():
        if isinstance(param, QuantizedTensor):
            destination.pop(prefix + name, None)
            for part in _PARTS:
                if (tensor := getattr(param, part)) is not None:
                    destination[f"{prefix}{name}.{part}"] = tensor if keep_vars else tensor.detach()


def load_parts(parameters: Mapping[str, torch.Tensor | None], state_dict: dict[str, Any], prefix: str) -> None:
    """Puts quantized parameters together again, of the parts in a state dict."""
    for name, param in parameters.items():
        given = {part: state_dict.pop(f"{prefix}{name}.{part}") for part in _PARTS if f"{prefix}{name}.{part}" in state_dict}
        if not given:
            continue
        held = [part for part in _PARTS if getattr(param, part, None) is not None]
        if list(given) != held:
            raise RuntimeError(
                f"{prefix}{name}: expected {', '.join(held) or 'plain numbers'} in the state dict, as the parameter has, got {', '.join(given)}. "
                "Quantize the parameter as the saved one was: torch.nn.Parameter(tandem.quantize(...))."
            )
        assert isinstance(param, QuantizedTensor)
        for part, tensor in given.items():
            if tensor.shape != getattr(param, part).shape:
                raise RuntimeError(
                    f"{prefix}{name}.{part}: expected shape {list(getattr(param, part).shape)}, got {list(tensor.shape)}. Load the state of the "
                    "same module."
                )
        state_dict[prefix + name] = param._of([given.get(part) for part in _PARTS])


class Quantizer:
    """Base of quantizers: `text` is what kernel ops know it by.

    Args:
        text: a format, a kind of scale and options.
        rowwise, columnwise: which codes are wanted.
    """

    def __init__(self, text: str, rowwise: bool, columnwise: bool) -> None:
        if not rowwise and not columnwise:
            raise ValueError(f"{type(self).__name__}: expected rowwise or columnwise codes to be wanted, got neither. Leave one of them True.")
        self.text = text
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

    def _values(self) -> tuple[object, ...]:
        return type(self), self.text, self.rowwise, self.columnwise

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Quantizer) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.text!r}, rowwise={self.rowwise}, columnwise={self.columnwise})"


def _element(quantizer: Quantizer, fp8_dtype: torch.dtype) -> str:
    name = type(quantizer).__name__
    if fp8_dtype not in _ELEMENTS:
        raise ValueError(f"{name}: expected fp8_dtype to be torch.float8_e4m3fn or torch.float8_e5m2, got {fp8_dtype!r}. Pass one of them.")
    return _ELEMENTS[fp8_dtype]


def _only_defaults(quantizer: Quantizer, given: dict[str, tuple[object, object]]) -> None:
    """Refuses arguments of TransformerEngine that the library has not: (value, default) by name."""
    for name, (value, default) in given.items():
        if value is not default and value != default:
            raise NotImplementedError(
                f"{type(quantizer).__name__}: expected {name}={default}, got {value!r}. This version knows the default only."
            )


def _epsilon(quantizer: Quantizer, amax_epsilon: float) -> float:
    if not hasattr(amax_epsilon, "__float__") or not 0 <= amax_epsilon < math.inf:
        name = type(quantizer).__name__
        raise ValueError(f"{name}: expected amax_epsilon to be a finite number >= 0, got {amax_epsilon!r}. It is the least amax.")
    return float(amax_epsilon)


class Float8CurrentScalingQuantizer(Quantizer):
    """FP8 with one scale per tensor, from the tensor's own amax.

    Args:
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        device: of no meaning: codes lie where the tensor lies.
        rowwise, columnwise: which codes are wanted.
        force_pow_2_scales: whether scales are powers of two.
        amax_epsilon: least amax.
        use_existing_amax, with_amax_reduction: False; no other value is known yet.
        amax_reduction_group, scale, amax: None, likewise.
    """

    def __init__(
        self,
        fp8_dtype: torch.dtype,
        device: torch.device | str | None = None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        use_existing_amax: bool = False,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
        scale: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
    ) -> None:
        given = {"use_existing_amax": (use_existing_amax, False), "with_amax_reduction": (with_amax_reduction, False)}
        _only_defaults(self, {**given, "amax_reduction_group": (amax_reduction_group, None), "scale": (scale, None), "amax": (amax, None)})
        options = f"eps={_epsilon(self, amax_epsilon)}:pow2={int(force_pow_2_scales)}"
        super().__init__(f"fp8_{_element(self, fp8_dtype)}:current:{options}", rowwise, columnwise)


class Float8Quantizer(Quantizer):
    """FP8 with a scale that is given: codes = cast(x * scale). The amax of x is written into `amax`.

    Args:
        scale: one float32, which x is multiplied by.
        amax: one float32, which the amax of each tensor is written into.
        fp8_dtype, rowwise, columnwise: as of `Float8CurrentScalingQuantizer`.
    """

    def __init__(self, scale: torch.Tensor, amax: torch.Tensor, fp8_dtype: torch.dtype, *, rowwise: bool = True, columnwise: bool = True) -> None:
        super().__init__(f"fp8_{_element(self, fp8_dtype)}:delayed", rowwise, columnwise)
        for name, tensor in (("scale", scale), ("amax", amax)):
            if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float32 or tensor.numel() != 1:
                got = f"{tensor.dtype} of shape {list(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                raise ValueError(f"Float8Quantizer: expected {name} to be a tensor of one float32, got {got}. Pass torch.ones(1) to begin with.")
        self.scale, self.amax = scale, amax

    def _values(self) -> tuple[object, ...]:
        return (*super()._values(), id(self.scale), id(self.amax))

    def quantize(self, x: torch.Tensor) -> QuantizedTensor:
        codes, amax = self._codes(x, self.scale)
        self.amax.copy_(amax.view_as(self.amax))
        return codes


class MXFP8Quantizer(Quantizer):
    """FP8 with one power of two as scale per block of 32 numbers.

    Args:
        fp8_dtype, rowwise, columnwise: as of `Float8CurrentScalingQuantizer`.
        with_2d_quantization: whether blocks are 32 by 32, so that both directions have the same codes.
    """

    def __init__(self, fp8_dtype: torch.dtype, *, rowwise: bool = True, columnwise: bool = True, with_2d_quantization: bool = False) -> None:
        super().__init__(f"mxfp8_{_element(self, fp8_dtype)}" + (":2d=1" if with_2d_quantization else ""), rowwise, columnwise)


class Float8BlockQuantizer(Quantizer):
    """FP8 with one scale per block of 128 numbers of a row or a column, or of 128 by 128.

    Args:
        fp8_dtype, rowwise, columnwise: as of `Float8CurrentScalingQuantizer`.
        amax_epsilon: least amax of a block.
        force_pow_2_scales: whether scales are powers of two.
        block_scaling_dim: 1, lines, or 2, squares, of which both directions have the same codes.
    """

    def __init__(
        self,
        fp8_dtype: torch.dtype,
        *,
        rowwise: bool,
        columnwise: bool,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        if block_scaling_dim not in (1, 2):
            raise ValueError(f"Float8BlockQuantizer: expected block_scaling_dim to be 1 or 2, got {block_scaling_dim!r}. 1: lines, 2: squares.")
        blocks = "fp8_128x128" if block_scaling_dim == 2 else "fp8_1x128"
        options = f"eps={_epsilon(self, amax_epsilon)}:pow2={int(force_pow_2_scales)}"
        super().__init__(f"{blocks}_{_element(self, fp8_dtype)}:{options}", rowwise, columnwise)


class NVFP4Quantizer(Quantizer):
    """Four bits, E2M1, with one E4M3 scale per block of 16 numbers of a row or a column, and one float32 per tensor.

    Args:
        fp4_dtype: torch.float4_e2m1fn_x2; there is no other.
        rowwise, columnwise: which codes are wanted.
        with_rht: whether codes of columns are of columns that a random Hadamard transform has rotated, in bfloat16. Their product with an operand that
            is rotated too is that of the numbers.
        with_post_rht_amax: whether their amax is that of the rotated columns: as `with_rht`; there is no other.
        with_2d_quantization: whether blocks are 16 by 16, so that both directions have the same codes.
        stochastic_rounding: whether codes are rounded up or down by chance, right on average, by a seed from the generator of x's device.
        with_amax_reduction, row_scaled_nvfp4, nvfp4_use_4over6: False; no other value is known yet.
        amax_reduction_group: None, likewise.
        nvfp4_e4m3_max, nvfp4_4over6_err_mode, with_random_sign_mask: 448, "MAE" and True, likewise.
    """

    def __init__(
        self,
        fp4_dtype: torch.dtype = torch.float4_e2m1fn_x2,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        with_rht: bool = False,
        with_post_rht_amax: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        nvfp4_4over6_err_mode: str = "MAE",
        with_random_sign_mask: bool = True,
    ) -> None:
        if fp4_dtype != torch.float4_e2m1fn_x2:
            raise ValueError(f"NVFP4Quantizer: expected fp4_dtype to be torch.float4_e2m1fn_x2, got {fp4_dtype!r}. There is no other.")
        _only_defaults(
            self,
            {
                "with_amax_reduction": (with_amax_reduction, False),
                "amax_reduction_group": (amax_reduction_group, None),
                "with_post_rht_amax": (bool(with_post_rht_amax), bool(with_rht)),
                "row_scaled_nvfp4": (row_scaled_nvfp4, False),
                "nvfp4_use_4over6": (nvfp4_use_4over6, False),
                "nvfp4_e4m3_max": (nvfp4_e4m3_max, 448),
                "nvfp4_4over6_err_mode": (nvfp4_4over6_err_mode, "MAE"),
                "with_random_sign_mask": (with_random_sign_mask, True),
            },
        )
        options = {"2d": with_2d_quantization, "rht": with_rht, "sr": stochastic_rounding}
        super().__init__("nvfp4" + "".join([f":{name}=1" for name, value in options.items() if value]), rowwise, columnwise)

    @property
    def stochastic_rounding(self) -> bool:
        """Whether codes are rounded up or down by chance."""
        return ":sr=1" in self.text

    def quantize(self, x: torch.Tensor) -> QuantizedTensor:
        seed = torch.randint(torch.iinfo(torch.int64).max, (), device=x.device) if self.stochastic_rounding else None
        return self._codes(x, seed)[0]


def quantize(x: torch.Tensor, quantizer: Quantizer) -> QuantizedTensor:
    """x in the codes that a quantizer makes of it.

    Args:
        x: a tensor that needs no gradient.
        quantizer: a `Float8CurrentScalingQuantizer`, `Float8Quantizer`, `Float8BlockQuantizer`, `MXFP8Quantizer` or `NVFP4Quantizer`.

    >>> import torch, tandem
    >>> codes = tandem.quantize(torch.ones(4, 64), tandem.MXFP8Quantizer(torch.float8_e4m3fn))
    >>> codes.rowwise_scale_inv.shape, codes.dequantize().sum().item()
    (torch.Size([128, 4]), 256.0)
    """
    if not isinstance(quantizer, Quantizer):
        raise TypeError(
            f"quantize: expected a quantizer, got {type(quantizer).__name__}. Pass for example tandem.MXFP8Quantizer(torch.float8_e4m3fn)."
        )
    return quantizer.quantize(x)


_CASTS = {
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.float8_e8m0fnu: "e8m0",
    torch.float4_e2m1fn_x2: "e2m1",
}


def _cast_format(function: str, dtype: torch.dtype) -> str:
    if dtype not in _CASTS:
        raise ValueError(f"{function}: expected a dtype among {', '.join(map(str, _CASTS))}, got {dtype!r}. Pass one of them.")
    return _CASTS[dtype]


def cast(x: torch.Tensor, dtype: torch.dtype, *, saturate: bool = True, seed: torch.Tensor | None = None) -> torch.Tensor:
    """The codes of the nearest numbers of a format, in uint8 and one each, ties to even; bit by bit the same on every device.

    What rounds above the largest number becomes that number, or, without `saturate`, NaN in E4M3 and infinity in E5M2. NaN gives 0x7F, in E8M0 0xFF; E2M1
    has none, and gives 6. Signs are kept, of zeros too. E8M0 holds powers of two and rounds up, as scales are; negative numbers become its least.

    Args:
        x: float32, bfloat16 or float16; float64 is rounded to float32 before. It must need no gradient.
        dtype: torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu or, for E2M1, torch.float4_e2m1fn_x2.
        saturate: as above; E2M1 and E8M0 always do.
        seed: None, or an int64, or two with an offset: rounded up or down by chance instead, right on average. E8M0 is not.

    >>> import torch, tandem
    >>> tandem.cast(torch.tensor([1.0, 464.5]), torch.float8_e4m3fn, saturate=False)
    tensor([ 56, 127], dtype=torch.uint8)
    """
    return torch.ops.tandem.cast_to_codes(x, _cast_format("cast", dtype), saturate, seed)


def cast_back(codes: torch.Tensor, dtype: torch.dtype, to: torch.dtype = torch.float32) -> torch.Tensor:
    """The values of codes of a format.

    Args:
        codes: uint8, one code each, in its low bits.
        dtype: the format, as of `cast`.
        to: dtype of the values, to which they are rounded once.
    """
    return torch.ops.tandem.cast_from_codes(codes, _cast_format("cast_back", dtype), to)
