"""Quantizing by hand: quantizers, and what they make of a tensor."""

from __future__ import annotations

import math
from typing import Any

import torch

from tandem.ops.arguments import at_default, check_amax_group
from tandem.quantized.quantizer import Quantizer, quantizer_of_text
from tandem.quantized.tensor import QuantizedTensor
from tandem.quantized.views import ZEROS, Zeros, rows_of

_FP4_ROWS = 16  # of a block of NVFP4 along columns
_ELEMENTS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def _element(quantizer: Quantizer, fp8_dtype: torch.dtype) -> str:
    name = type(quantizer).__name__
    if fp8_dtype not in _ELEMENTS:
        raise ValueError(f"{name}: expected fp8_dtype to be torch.float8_e4m3fn or torch.float8_e5m2, got {fp8_dtype!r}. Pass one of them.")
    return _ELEMENTS[fp8_dtype]


def _group_of(quantizer: Quantizer, with_amax_reduction: bool, group: Any) -> Any:
    """The processes that share an amax; None where none do."""
    name = type(quantizer).__name__
    if not with_amax_reduction:
        at_default(name, amax_reduction_group=group)
        return None
    check_amax_group(name, group)
    return torch.distributed.group.WORLD if group is None else group


def _amax_of_all(x: torch.Tensor, group: Any) -> torch.Tensor:
    """The largest magnitude in the parts of all processes of a group, [1]; of NaNs that of the other numbers."""
    amax = x.detach().abs().nan_to_num(0.0, torch.inf).amax().reshape(1) if x.numel() else x.new_zeros(1)
    torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=group)
    return amax


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
        with_amax_reduction, amax_reduction_group: whether processes share the amax, and which do; None: all. Each must quantize its part then.
        use_existing_amax: False; no other value is known yet.
        scale, amax: None, likewise.
    """

    _heads = ("fp8_e4m3:current", "fp8_e5m2:current")

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
        at_default(type(self).__name__, False, use_existing_amax=use_existing_amax)
        at_default(type(self).__name__, scale=scale, amax=amax)
        self._amax_group = _group_of(self, with_amax_reduction, amax_reduction_group)
        options = f"eps={_epsilon(self, amax_epsilon)}:pow2={int(force_pow_2_scales)}"
        super().__init__(f"fp8_{_element(self, fp8_dtype)}:current:{options}", rowwise, columnwise)

    def _quantized(self, x: torch.Tensor) -> QuantizedTensor:
        if self._amax_group is None:
            return super()._quantized(x)
        amax = _amax_of_all(x, self._amax_group)
        codes = super()._quantized(torch.cat([x.reshape(-1), amax]))  # one more number, so that the scale is that of all
        return codes._with(lambda part: part[:-1].view(x.shape).clone() if part.dtype == torch.uint8 else part, shape=x.shape)

    def _has_scale_of_all(self) -> bool:
        return True


class Float8Quantizer(Quantizer):
    """FP8 with a scale that is given: codes = cast(x * scale). `amax` is raised to the amax of x.

    Args:
        scale: one float32, which x is multiplied by.
        amax: one float32, the largest amax of all tensors since it was last set to 0.
        fp8_dtype, rowwise, columnwise: as of `Float8CurrentScalingQuantizer`.
    """

    _heads = ("fp8_e4m3:delayed", "fp8_e5m2:delayed")
    _held = {"scale": 1.0, "amax": 0.0}

    scale: torch.Tensor
    amax: torch.Tensor

    def __init__(self, scale: torch.Tensor, amax: torch.Tensor, fp8_dtype: torch.dtype, *, rowwise: bool = True, columnwise: bool = True) -> None:
        super().__init__(f"fp8_{_element(self, fp8_dtype)}:delayed", rowwise, columnwise)
        for name, tensor in (("scale", scale), ("amax", amax)):
            if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float32 or tensor.numel() != 1:
                got = f"{tensor.dtype} of shape {list(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                raise ValueError(f"Float8Quantizer: expected {name} to be a tensor of one float32, got {got}. Pass torch.ones(1) to begin with.")
        self.scale, self.amax = scale, amax

    def _given(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale

    def _quantized(self, x: torch.Tensor) -> QuantizedTensor:
        codes, amax = self._codes(x)
        self.amax.copy_(torch.fmax(self.amax, amax.view_as(self.amax)))  # of this step's other calls too; a NaN counts as none
        return codes


class MXFP8Quantizer(Quantizer):
    """FP8 with one power of two as scale per block of 32 numbers.

    Args:
        fp8_dtype, rowwise, columnwise: as of `Float8CurrentScalingQuantizer`.
        with_2d_quantization: whether blocks are 32 by 32, so that both directions have the same codes.
    """

    _heads = ("mxfp8_",)

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

    _heads = ("fp8_1x128_", "fp8_128x128_")

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
            is rotated too is that of the numbers. Not with `with_2d_quantization`.
        with_post_rht_amax: whether their amax is that of the rotated columns: as `with_rht`; there is no other.
        with_2d_quantization: whether blocks are 16 by 16, so that both directions have the same codes.
        stochastic_rounding: whether codes are rounded up or down by chance, right on average, by a seed from the generator of x's device.
        with_amax_reduction, amax_reduction_group: as of `Float8CurrentScalingQuantizer`; not with `with_rht`, as the largest rotated number is another one.
        row_scaled_nvfp4: False; no other value is known yet.
        nvfp4_use_4over6: whether the largest number of a block becomes 6 or 4, whichever errs less; not with `stochastic_rounding`.
        nvfp4_e4m3_max: what the scale of a block becomes whose amax is the tensor's: 448, or, with `nvfp4_use_4over6`, 256.
        nvfp4_4over6_err_mode: what errs less, by sums over a block: "MAE", of absolute errors, or "MSE", of their squares.
        with_random_sign_mask: True with `with_rht`: no other signs are known. Without, nothing rotates, and it says nothing.
    """

    _heads = ("nvfp4",)

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
        name = type(self).__name__
        at_default(name, bool(with_rht), with_post_rht_amax=bool(with_post_rht_amax))
        at_default(name, False, row_scaled_nvfp4=row_scaled_nvfp4)
        at_default(name, True, with_random_sign_mask=with_random_sign_mask or not with_rht)
        if with_amax_reduction and with_rht:
            raise NotImplementedError(
                "NVFP4Quantizer: expected with_rht=False with with_amax_reduction=True, as the largest rotated number is not that of x, got True. Rotate what each "
                "process has as a whole."
            )
        self._amax_group = _group_of(self, with_amax_reduction, amax_reduction_group)
        if nvfp4_e4m3_max != 448 and not (nvfp4_use_4over6 and nvfp4_e4m3_max == 256):
            raise ValueError(
                f"NVFP4Quantizer: expected nvfp4_e4m3_max to be 448, or, with nvfp4_use_4over6, 256, got {nvfp4_e4m3_max!r}. Without nvfp4_use_4over6 no scale "
                "needs room above it."
            )
        if nvfp4_4over6_err_mode not in ("MAE", "MSE"):
            raise ValueError(f'NVFP4Quantizer: expected nvfp4_4over6_err_mode to be "MAE" or "MSE", got {nvfp4_4over6_err_mode!r}. It says what errs less.')
        options = {"2d": with_2d_quantization, "rht": with_rht, "sr": stochastic_rounding}
        text = "nvfp4" if nvfp4_e4m3_max == 448 else "nvfp4_256"
        text += "".join([f":{name}=1" for name, value in options.items() if value])
        super().__init__(text + (f":4over6={nvfp4_4over6_err_mode.lower()}" if nvfp4_use_4over6 else ""), rowwise, columnwise)

    @property
    def stochastic_rounding(self) -> bool:
        """Whether codes are rounded up or down by chance."""
        return ":sr=1" in self.text

    def _has_scale_of_all(self) -> bool:
        return ":rht=1" not in self.text

    def _given(self, x: torch.Tensor) -> torch.Tensor | None:
        return torch.randint(torch.iinfo(torch.int64).max, (), device=x.device) if self.stochastic_rounding else None

    def _quantized(self, x: torch.Tensor) -> QuantizedTensor:
        if self._amax_group is None:
            return super()._quantized(x)
        if x.dim() < 2 or not x.shape[-1]:
            raise ValueError(
                f"NVFP4Quantizer: expected a tensor of rows, which processes share, where they share its amax, got shape {list(x.shape)}. Quantize it without "
                "with_amax_reduction."
            )
        matrix, amax = x.reshape(-1, x.shape[-1]), _amax_of_all(x, self._amax_group)
        rows = matrix.shape[0]
        more = matrix.new_zeros(-rows % _FP4_ROWS + _FP4_ROWS, x.shape[-1])  # blocks of their own behind, of which one holds the amax of all
        more[-1, 0] = amax[0]
        codes = super()._quantized(torch.cat([matrix, more]))
        codes.__dict__[ZEROS] = Zeros()  # as blocks that x ends in have behind
        own: Any = rows_of(codes, 0, rows)
        return own.clone().view(x.shape)


def quantize(x: torch.Tensor, quantizer: Quantizer) -> QuantizedTensor:
    """x in the codes that a quantizer makes of it.

    Args:
        x: a tensor. Its gradient is that of the codes' numbers: rounding counts as none.
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
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"quantize: expected a tensor, got {type(x).__name__}. Pass torch.as_tensor of it.")
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
        x: float32, bfloat16, float16 or float64. It must need no gradient.
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
