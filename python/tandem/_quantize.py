"""Quantizing by hand: quantizers, and what they make of a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map

_ELEMENTS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


_PARTS = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")  # in the order of the library's groups


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
            transposed. With one scale per tensor both are the same tensor.
        rowwise_scale_inv, columnwise_scale_inv: their scales.
        quantizer: what made it.
        dtype: that of x.
        requires_grad: whether its gradient is wanted.
    """

    rowwise_data: torch.Tensor | None
    columnwise_data: torch.Tensor | None
    rowwise_scale_inv: torch.Tensor | None
    columnwise_scale_inv: torch.Tensor | None
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
    ) -> QuantizedTensor:
        """Puts parts together that belong together, such as those of `tandem.quantize`."""
        codes = rowwise_data if rowwise_data is not None else columnwise_data
        if codes is None:
            raise ValueError("QuantizedTensor: expected codes of rows or of columns, got neither. Pass rowwise_data or columnwise_data.")
        tensor: QuantizedTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, codes.shape, dtype=dtype, device=codes.device, requires_grad=requires_grad
        )
        tensor.rowwise_data, tensor.rowwise_scale_inv = rowwise_data, rowwise_scale_inv
        tensor.columnwise_data, tensor.columnwise_scale_inv = columnwise_data, columnwise_scale_inv
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
        row, row_scale, column, column_scale = [parts.get(name) for name in _PARTS]
        if has_columns and column is None:
            column, column_scale = row, row_scale
        return QuantizedTensor(row, row_scale, column, column_scale, quantizer, dtype, requires_grad)

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
        return QuantizedTensor(*made, self.quantizer, self.dtype)

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
        """The numbers of one direction, in `dtype` or in that of x. Without `columnwise`, those of rows, or of columns where these are all."""
        columnwise = columnwise or self.rowwise_data is None
        data, scale = (self.columnwise_data, self.columnwise_scale_inv) if columnwise else (self.rowwise_data, self.rowwise_scale_inv)
        if data is None or scale is None:
            raise ValueError("dequantize: expected columnwise codes, got a tensor quantized without. Build the quantizer with columnwise=True.")
        return torch.ops.tandem.dequantize(data, scale, self.quantizer.text, columnwise, dtype or self.dtype)

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
        state_dict[prefix + name] = QuantizedTensor(*[given.get(part) for part in _PARTS], param.quantizer, param.dtype)


class Quantizer:
    """Base of quantizers: `text` is what kernel ops know it by.

    Args:
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        prefix, options: what stands before and behind the element's name in `text`.
        rowwise, columnwise: which codes are wanted.
    """

    def __init__(self, fp8_dtype: torch.dtype, prefix: str, options: str, rowwise: bool, columnwise: bool) -> None:
        name = type(self).__name__
        if fp8_dtype not in _ELEMENTS:
            raise ValueError(f"{name}: expected fp8_dtype to be torch.float8_e4m3fn or torch.float8_e5m2, got {fp8_dtype!r}. Pass one of them.")
        if not rowwise and not columnwise:
            raise ValueError(f"{name}: expected rowwise or columnwise codes to be wanted, got neither. Leave one of them True.")
        self.text = prefix + _ELEMENTS[fp8_dtype] + options
        self.rowwise, self.columnwise = rowwise, columnwise

    def quantize(self, x: torch.Tensor) -> QuantizedTensor:
        """Codes of x, which must need no gradient: rounding has none."""
        return self._codes(x, None)[0]

    def _codes(self, x: torch.Tensor, scale: torch.Tensor | None) -> tuple[QuantizedTensor, torch.Tensor]:
        mask = [self.rowwise, self.columnwise, True]
        row, row_scale, column, column_scale, amax = torch.ops.tandem.quantize(x, scale, self.text, mask)
        if column.shape != x.shape:  # one value serves both directions
            column, column_scale = row, row_scale
        rows = (row, row_scale) if self.rowwise else (None, None)
        columns = (column, column_scale) if self.columnwise else (None, None)
        return QuantizedTensor(*rows, *columns, self, x.dtype), amax

    def _values(self) -> tuple[object, ...]:
        return type(self), self.text, self.rowwise, self.columnwise

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Quantizer) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.text!r}, rowwise={self.rowwise}, columnwise={self.columnwise})"


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
        own = "Float8CurrentScalingQuantizer"
        given = {"use_existing_amax": use_existing_amax, "with_amax_reduction": with_amax_reduction}
        for name, value in {**given, "amax_reduction_group": amax_reduction_group, "scale": scale, "amax": amax}.items():
            if value is not None and value is not False:
                default = False if name in given else None
                raise NotImplementedError(f"{own}: expected {name}={default}, got {value!r}. This version knows the default only.")
        if not hasattr(amax_epsilon, "__float__") or not 0 <= amax_epsilon < math.inf:
            raise ValueError(f"{own}: expected amax_epsilon to be a finite number >= 0, got {amax_epsilon!r}. It is the least amax.")
        super().__init__(fp8_dtype, "fp8_", f":current:eps={float(amax_epsilon)}:pow2={int(force_pow_2_scales)}", rowwise, columnwise)


class Float8Quantizer(Quantizer):
    """FP8 with a scale that is given: codes = cast(x * scale). The amax of x is written into `amax`.

    Args:
        scale: one float32, which x is multiplied by.
        amax: one float32, which the amax of each tensor is written into.
        fp8_dtype, rowwise, columnwise: as of `Float8CurrentScalingQuantizer`.
    """

    def __init__(self, scale: torch.Tensor, amax: torch.Tensor, fp8_dtype: torch.dtype, *, rowwise: bool = True, columnwise: bool = True) -> None:
        super().__init__(fp8_dtype, "fp8_", ":delayed", rowwise, columnwise)
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
        super().__init__(fp8_dtype, "mxfp8_", ":2d=1" if with_2d_quantization else "", rowwise, columnwise)


def quantize(x: torch.Tensor, quantizer: Quantizer) -> QuantizedTensor:
    """x in the codes that a quantizer makes of it.

    Args:
        x: a tensor that needs no gradient.
        quantizer: a `Float8CurrentScalingQuantizer`, `Float8Quantizer` or `MXFP8Quantizer`.

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
