"""The quantizers by format, and functions that quantize and cast single tensors."""

from __future__ import annotations

import math
from typing import Any

import torch

from tandem.arguments import at_default, check_amax_group
from tandem.quantized.parts import rows_of_blocks
from tandem.quantized.quantizer import Quantizer
from tandem.quantized.tensor import QuantizedTensor
from tandem.quantized.traits import traits_of
from tandem.quantized.views import ZEROS, Zeros, rows_of

_ELEMENTS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def _element(quantizer: Quantizer, fp8_dtype: torch.dtype) -> str:
    name = type(quantizer).__name__
    if fp8_dtype not in _ELEMENTS:
        raise ValueError(f"{name}: expected fp8_dtype to be torch.float8_e4m3fn or torch.float8_e5m2, got {fp8_dtype!r}. Pass one of them.")
    return _ELEMENTS[fp8_dtype]


def _group_of(quantizer: Quantizer, with_amax_reduction: bool, group: Any) -> Any:
    """The process group whose ranks share an amax; None: each process computes its own."""
    name = type(quantizer).__name__
    if not with_amax_reduction:
        at_default(name, amax_reduction_group=group)
        return None
    check_amax_group(name, group)
    return torch.distributed.group.WORLD if group is None else group


def _amax_of_all(x: torch.Tensor, group: Any) -> torch.Tensor:
    """The amax over x on all ranks of a group, [1]. NaN counts as 0, an infinity as infinity."""
    amax = x.detach().abs().nan_to_num(0.0, torch.inf).amax().reshape(1) if x.numel() else x.new_zeros(1)
    torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=group)
    return amax


def _epsilon(quantizer: Quantizer, amax_epsilon: float) -> float:
    if not hasattr(amax_epsilon, "__float__") or not 0 <= amax_epsilon < math.inf:
        name = type(quantizer).__name__
        raise ValueError(f"{name}: expected amax_epsilon to be a finite number >= 0, got {amax_epsilon!r}. It is the least amax.")
    return float(amax_epsilon)


class Float8CurrentScalingQuantizer(Quantizer):
    """codes = cast(x * scale), scale = largest FP8 number / amax(x): FP8 with one scale per tensor, computed from the tensor itself.

    Args:
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2; another dtype raises ValueError.
        device: not used, as codes lie on the device of the tensor.
        rowwise, columnwise: whether to compute row codes and column codes.
        force_pow_2_scales: whether scales are powers of two.
        amax_epsilon: lower bound of the amax, a finite number from 0.
        with_amax_reduction, amax_reduction_group: whether ranks share the largest amax of their tensors, and their process group; None: all
            processes. All ranks of the group must quantize together then.
        use_existing_amax: False; other values raise NotImplementedError.
        scale, amax: None; other values raise NotImplementedError.
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
        at_default(type(self).__name__, False, use_existing_amax=use_existing_amax)
        at_default(type(self).__name__, scale=scale, amax=amax)
        self._amax_group = _group_of(self, with_amax_reduction, amax_reduction_group)
        options = f"eps={_epsilon(self, amax_epsilon)}:pow2={int(force_pow_2_scales)}"
        super().__init__(f"fp8_{_element(self, fp8_dtype)}:current:{options}", rowwise, columnwise)

    def _quantized(self, x: torch.Tensor) -> QuantizedTensor:
        if self._amax_group is None:
            return super()._quantized(x)
        amax = _amax_of_all(x, self._amax_group)
        codes = super()._quantized(torch.cat([x.reshape(-1), amax]))  # the added number makes the kernel compute the scale of the shared amax
        return codes._with(lambda part: part[:-1].view(x.shape).clone() if part.dtype == torch.uint8 else part, shape=x.shape)

    def _has_scale_of_all(self) -> bool:
        return True


class Float8Quantizer(Quantizer):
    """codes = cast(x * scale): FP8 with one scale per tensor, which the caller chooses. Each call sets `amax` to max(amax, amax(x)).

    Args:
        scale: tensor of one float32, the factor of x.
        amax: tensor of one float32, the largest amax of all tensors since the caller last set it to 0.
        fp8_dtype, rowwise, columnwise: as for `Float8CurrentScalingQuantizer`.
    """

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
        self.amax.copy_(torch.fmax(self.amax, amax.view_as(self.amax)))  # fmax ignores a NaN
        return codes


class MXFP8Quantizer(Quantizer):
    """codes = cast(x * scale) with a power of two as the scale of each block of 32 numbers: MXFP8.

    Args:
        fp8_dtype, rowwise, columnwise: as for `Float8CurrentScalingQuantizer`.
        with_2d_quantization: whether blocks are 32 by 32, so that one set of codes serves rows and columns.
    """

    def __init__(self, fp8_dtype: torch.dtype, *, rowwise: bool = True, columnwise: bool = True, with_2d_quantization: bool = False) -> None:
        super().__init__(f"mxfp8_{_element(self, fp8_dtype)}" + (":2d=1" if with_2d_quantization else ""), rowwise, columnwise)


class Float8BlockQuantizer(Quantizer):
    """codes = cast(x * scale) with one scale per block of 128 numbers of a row or a column, or of 128 by 128 numbers: FP8.

    Args:
        fp8_dtype, rowwise, columnwise: as for `Float8CurrentScalingQuantizer`.
        amax_epsilon: lower bound of the amax of a block, a finite number from 0.
        force_pow_2_scales: whether scales are powers of two.
        block_scaling_dim: 1: blocks are 128 numbers of a row or column; 2: blocks are 128 by 128, and one set of codes serves rows and columns.
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
    """E2M1 codes of four bits with one E4M3 scale per block of 16 numbers of a row or a column, and one float32 scale per tensor: NVFP4.

    Args:
        fp4_dtype: torch.float4_e2m1fn_x2; another dtype raises ValueError.
        rowwise, columnwise: whether to compute row codes and column codes.
        with_rht: whether a random Hadamard transform in bfloat16 rotates the columns before their codes are computed. The product of two rotated operands
            is the product of the operands. Not with `with_2d_quantization`.
        with_post_rht_amax: whether column codes use the amax of the rotated columns: the value of `with_rht`; the other raises NotImplementedError.
        with_2d_quantization: whether blocks are 16 by 16, so that one set of codes serves rows and columns.
        stochastic_rounding: whether numbers are rounded up or down at random, right on average, by a seed from the generator of x's device.
        with_amax_reduction, amax_reduction_group: as for `Float8CurrentScalingQuantizer`. Not with `with_rht`, as ranks cannot share a rotated amax.
        row_scaled_nvfp4: False; other values raise NotImplementedError.
        nvfp4_use_4over6: whether each block maps its largest number to 6 or to 4, whichever has the smaller error; not with `stochastic_rounding`.
        nvfp4_e4m3_max: the scale of a block whose amax is the tensor's amax: 448, or, with `nvfp4_use_4over6`, 256.
        nvfp4_4over6_err_mode: the error of a block for `nvfp4_use_4over6`: "MAE", the sum of absolute errors, or "MSE", the sum of their squares.
        with_random_sign_mask: True with `with_rht`, as the signs of the transform are fixed; without `with_rht` it has no effect.
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
        name = type(self).__name__
        if bool(with_rht) != bool(with_post_rht_amax):
            raise NotImplementedError(
                f"NVFP4Quantizer: expected with_post_rht_amax={bool(with_rht)} with with_rht={bool(with_rht)}, got {bool(with_post_rht_amax)}. Rotated columns "
                "are scaled by the largest rotated number, others by the largest number of x."
            )
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
        """Whether numbers are rounded up or down at random."""
        return traits_of(self.text).takes_seed

    def _has_scale_of_all(self) -> bool:
        return not traits_of(self.text).is_rotated

    def _quantized(self, x: torch.Tensor) -> QuantizedTensor:
        if self._amax_group is None:
            return super()._quantized(x)
        if x.dim() < 2 or not x.shape[-1]:
            raise ValueError(
                f"NVFP4Quantizer: expected a tensor of rows, which processes share, where they share its amax, got shape {list(x.shape)}. Quantize it without "
                "with_amax_reduction."
            )
        matrix, amax = x.reshape(-1, x.shape[-1]), _amax_of_all(x, self._amax_group)
        rows, unit = matrix.shape[0], rows_of_blocks(self.text)
        more = matrix.new_zeros(-rows % unit + unit, x.shape[-1])  # whole blocks after x, one of which contains the shared amax
        more[-1, 0] = amax[0]
        codes = super()._quantized(torch.cat([matrix, more]))
        codes.__dict__[ZEROS] = Zeros()  # the rows after x may be taken for its padding
        own: Any = rows_of(codes, 0, rows)
        return own.clone().view(x.shape)


def quantize(x: torch.Tensor, quantizer: Quantizer) -> QuantizedTensor:
    """x ~= decode(codes) * scale_inv: a `QuantizedTensor` of the shape and dtype of x.

    Args:
        x: a tensor of float32, bfloat16, float16 or float64. Its gradient is the gradient of the result: backward ignores the rounding.
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


_CASTS = {**_ELEMENTS, torch.float8_e8m0fnu: "e8m0", torch.float4_e2m1fn_x2: "e2m1"}


def _cast_format(function: str, dtype: torch.dtype) -> str:
    if dtype not in _CASTS:
        raise ValueError(f"{function}: expected a dtype among {', '.join(map(str, _CASTS))}, got {dtype!r}. Pass one of them.")
    return _CASTS[dtype]


def cast(x: torch.Tensor, dtype: torch.dtype, *, saturate: bool = True, seed: torch.Tensor | None = None) -> torch.Tensor:
    """The code of the nearest number of a format for each element of x, uint8 of the shape of x. Ties go to even. All devices give equal bits.

    A number that rounds above the largest one becomes the largest, or, without `saturate`, NaN in E4M3 and infinity in E5M2. NaN becomes the code
    0x7F, in E8M0 0xFF, and in E2M1, which has no NaN, the number 6. Codes keep signs, also of zeros. E8M0 contains powers of two only and rounds
    up, as scales must; negative numbers become its least power.

    Args:
        x: float32, bfloat16, float16 or float64. It must not require a gradient.
        dtype: torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu or, for E2M1, torch.float4_e2m1fn_x2; another dtype raises ValueError.
        saturate: whether E4M3 and E5M2 saturate; E2M1 and E8M0 always do.
        seed: int64 tensor of a seed, or of a seed and an offset: round up or down at random, right on average; None: round to nearest. Not for E8M0.

    >>> import torch, tandem
    >>> tandem.cast(torch.tensor([1.0, 464.5]), torch.float8_e4m3fn, saturate=False)
    tensor([ 56, 127], dtype=torch.uint8)
    """
    return torch.ops.tandem.cast_to_codes(x, _cast_format("cast", dtype), saturate, seed)


def cast_back(codes: torch.Tensor, dtype: torch.dtype, to: torch.dtype = torch.float32) -> torch.Tensor:
    """The number that each code of a format stands for, rounded once to `to`, of the shape of `codes`.

    Args:
        codes: uint8, one code in the low bits of each element.
        dtype: the format, as for `cast`.
        to: dtype of the result.
    """
    return torch.ops.tandem.cast_from_codes(codes, _cast_format("cast_back", dtype), to)
