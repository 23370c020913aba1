"""Quantizing by hand: quantizers, and what they make of a tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_ELEMENTS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A tensor in codes: x ~= decode(data) * scale_inv. What the quantizer was not asked for is None.

    Attributes:
        rowwise_data, columnwise_data: uint8 codes of the shape of x, with blocks along its last dimension, and along the others; never
            transposed. With one scale per tensor both are the same tensor.
        rowwise_scale_inv, columnwise_scale_inv: their scales.
        quantizer: what made it.
        dtype: that of x.
    """

    rowwise_data: torch.Tensor | None
    columnwise_data: torch.Tensor | None
    rowwise_scale_inv: torch.Tensor | None
    columnwise_scale_inv: torch.Tensor | None
    quantizer: Quantizer
    dtype: torch.dtype

    def dequantize(self, columnwise: bool = False, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The numbers of one direction, in `dtype` or in that of x."""
        data, scale = (self.columnwise_data, self.columnwise_scale_inv) if columnwise else (self.rowwise_data, self.rowwise_scale_inv)
        if data is None or scale is None:
            word = "columnwise" if columnwise else "rowwise"
            raise ValueError(f"dequantize: expected {word} codes, got a tensor quantized without. Build the quantizer with {word}=True.")
        return torch.ops.tandem.dequantize(data, scale, self.quantizer.text, columnwise, dtype or self.dtype)


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
        return QuantizedTensor(rows[0], columns[0], rows[1], columns[1], self, x.dtype), amax

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
    """

    def __init__(
        self,
        fp8_dtype: torch.dtype,
        device: torch.device | str | None = None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
    ) -> None:
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
