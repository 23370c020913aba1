"""Activations, gated units, and units that an extra input scales by row."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from tandem.arguments import flag, whole
from tandem.op_base.context import OperationContext
from tandem.ops.op import BasicOperation
from tandem.quantized.formats import Float8CurrentScalingQuantizer
from tandem.quantized.tensor import QuantizedTensor


class _CachedInput:
    """An activation that may keep x in FP8 for its backward. With this option it runs as an op in Python does: alone, without fusions."""

    @property
    def cache_quantized_input(self: Any) -> bool:
        """Whether forward keeps E4M3 codes of x with one scale, one byte per element, when a gradient is needed. Backward then computes with the
        dequantized values, and the op fuses with no other op."""
        return "_forward_prefix" in self.__dict__

    @cache_quantized_input.setter
    def cache_quantized_input(self: Any, value: bool) -> None:
        if flag(type(self).__name__, "cache_quantized_input", value):
            self.__dict__.update(_forward_prefix="op", _styles={"op": "one-piece"})
        else:
            for name in ("_forward_prefix", "_styles"):
                self.__dict__.pop(name, None)
        self._tell()

    def op_forward(self: Any, ctx: OperationContext, input_: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        y: torch.Tensor = super().op_forward(ctx, input_, **kwargs)  # type: ignore[misc]
        if self.cache_quantized_input and ctx.requires_grad:
            quantizer = Float8CurrentScalingQuantizer(torch.float8_e4m3fn, columnwise=False)
            (x,) = ctx.to_save or ()
            codes = quantizer.quantize(x.detach())  # type: ignore[union-attr]
            ctx.save_for_backward(codes.rowwise_data, codes.rowwise_scale_inv)
            ctx.quantizer = quantizer
        return y

    def op_backward(self: Any, ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, Iterable[torch.Tensor | None]]:
        quantizer = ctx.__dict__.pop("quantizer", None)
        if quantizer is not None:
            x = QuantizedTensor(*ctx.saved_tensors, None, None, quantizer, ctx.dtype).dequantize()
            ctx.saved_tensors, ctx.saved_names = (x,), ("x",)
        return super().op_backward(ctx, grad_output)  # type: ignore[misc, no-any-return]


class _Activation(_CachedInput, BasicOperation):
    _context_quantizers = ("prev_op_grad_output_quantizer",)

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        """Makes the activation, which has no parameters. y has the shape of x, and the dtype of autocast or x.

        Args:
            cache_quantized_input: whether backward reads x from 8-bit codes; the attribute of this name says more.
        """
        super().__init__()
        self.cache_quantized_input = cache_quantized_input


class _Interleaved(BasicOperation):
    """A gated unit, whose a and b are the halves of x or alternate in blocks of columns."""

    glu_interleave_size: int | None

    def _checked_option(self, name: str, value: Any) -> Any:
        op = type(self).__name__
        if name == "glu_interleave_size":
            if value is None:
                return None
            size = whole(value)
            if size is None or size <= 0:
                raise ValueError(f"{op}: expected {name} to be None or a whole number > 0, got {value!r}. Give the columns of a block.")
            return super()._checked_option(name, size)
        value = super()._checked_option(name, value)
        if name in ("beta1", "beta2") and value <= 0:
            raise ValueError(f"{op}: expected {name} to be a finite number > 0, got {value!r}. Give what its factor stays below.")
        return value


class _GatedUnit(_Interleaved, _Activation):
    def __init__(self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None) -> None:
        """Makes the gated unit, which has no parameters: x [..., features] -> y [..., features / 2], in the dtype of autocast or x.

        Args:
            cache_quantized_input: whether backward reads x from 8-bit codes; the attribute of this name says more.
            glu_interleave_size: columns of a block if a and b alternate in blocks; None: a and b are the halves of x.
        """
        super().__init__(cache_quantized_input=cache_quantized_input)
        self.glu_interleave_size = glu_interleave_size


class GELU(_Activation):
    """y = 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""


class QGELU(_Activation):
    """y = x sigmoid(1.702 x)."""


class SiLU(_Activation):
    """y = x sigmoid(x)."""


class ReLU(_Activation):
    """y = max(x, 0)."""


class SReLU(_Activation):
    """y = max(x, 0)^2."""


class ErfGELU(_Activation):
    """y = 0.5 x (1 + erf(x / sqrt(2)))."""


class Mish(_Activation):
    """y = x tanh(log(1 + exp(x)))."""


class Softplus(_Activation):
    """y = log(1 + exp(x))."""


class HardSwish(_Activation):
    """y = x min(max(x + 3, 0), 6) / 6."""


class LeakyReLU(_Activation):
    """y = max(x, 0.01 x)."""


class GLU(_GatedUnit):
    """y = sigmoid(a) b, where a and b are the halves of the last dimension of x. a is the first half; torch.nn.GLU gates by the second."""


class GEGLU(_GatedUnit):
    """y = gelu(a) b, where a and b are the halves of the last dimension of x, or alternate in blocks of `glu_interleave_size` columns."""


class ErfGEGLU(_GatedUnit):
    """y = erf_gelu(a) b, where a and b are the halves of the last dimension of x, or alternate in blocks of `glu_interleave_size` columns."""


class QGEGLU(_GatedUnit):
    """y = qgelu(a) b, where a and b are the halves of the last dimension of x, or alternate in blocks of `glu_interleave_size` columns."""


class ReGLU(_GatedUnit):
    """y = relu(a) b, where a and b are the halves of the last dimension of x, or alternate in blocks of `glu_interleave_size` columns."""


class SReGLU(_GatedUnit):
    """y = srelu(a) b, where a and b are the halves of the last dimension of x, or alternate in blocks of `glu_interleave_size` columns."""


class SwiGLU(_GatedUnit):
    """y = silu(a) b, where a and b are the halves of the last dimension of x, or alternate in blocks of `glu_interleave_size` columns.

    >>> import torch
    >>> from tandem import ops
    >>> ops.SwiGLU(glu_interleave_size=2)(torch.ones(3, 8)).shape
    torch.Size([3, 4])
    """


class SiTUGLU(_GatedUnit):
    """y = beta1 tanh(a / beta1) sigmoid(a) beta2 tanh(b / beta2), where a and b are the halves of the last dimension of x."""

    beta1: float
    beta2: float

    def __init__(
        self,
        *,
        beta1: float = 4.0,
        beta2: float = 25.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        """Makes the gated unit, which has no parameters: x [..., features] -> y [..., features / 2], in the dtype of autocast or x.

        Args:
            beta1: above 0; the gate beta1 tanh(a / beta1) sigmoid(a) stays below it in magnitude.
            beta2: above 0; the factor beta2 tanh(b / beta2) stays below it in magnitude.
            cache_quantized_input, glu_interleave_size: as for `SwiGLU`.
        """
        super().__init__(cache_quantized_input=cache_quantized_input, glu_interleave_size=glu_interleave_size)
        self.beta1 = beta1
        self.beta2 = beta2


class ClampedSwiGLU(_GatedUnit):
    """y = a' sigmoid(alpha a') (b' + glu_linear_offset), where a' = min(a, limit), b' = min(max(b, -limit), limit), and a and b are the
    halves of the last dimension of x. The gradient of a clamped element is 0."""

    limit: float
    alpha: float
    glu_linear_offset: float

    def __init__(
        self,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        """Makes the gated unit, which has no parameters: x [..., features] -> y [..., features / 2], in the dtype of autocast or x.

        Args:
            limit: the largest a', and the largest magnitude of b'.
            alpha: the factor of a' inside the sigmoid.
            glu_linear_offset: the number that is added to b'.
            cache_quantized_input, glu_interleave_size: as for `SwiGLU`.
        """
        super().__init__(cache_quantized_input=cache_quantized_input, glu_interleave_size=glu_interleave_size)
        self.limit = limit
        self.alpha = alpha
        self.glu_linear_offset = glu_linear_offset


class _ScaledUnit(_Interleaved):
    """y = unit(x) scales, with `scales` an extra input. The gradient of `scales` is the sum of grad_y unit(x) over each row."""

    def __init__(self, glu_interleave_size: int | None = None, *, activation_recompute_in_mlp: bool = False) -> None:
        """Makes the gated unit, which has no parameters: x [..., features] -> y [..., features / 2], in the dtype of autocast or x.

        Args:
            glu_interleave_size: columns of a block if a and b alternate in blocks; None: a and b are the halves of x.
            activation_recompute_in_mlp: accepted for TransformerEngine, without effect: forward never keeps y; backward re-emits it on demand.
        """
        super().__init__()
        self.activation_recompute_in_mlp = flag(type(self).__name__, "activation_recompute_in_mlp", activation_recompute_in_mlp)
        self.glu_interleave_size = glu_interleave_size


class ScaledSwiGLU(_ScaledUnit):
    """y = silu(a) b scales, where a and b are the halves of the last dimension of x, or alternate in blocks of `glu_interleave_size` columns.
    The extra input `scales` has the shape of x without its last dimension.

    >>> import torch
    >>> from tandem import ops
    >>> ops.ScaledSwiGLU()(torch.ones(3, 8), torch.ones(3)).shape
    torch.Size([3, 4])
    """


class ScaledSiTUGLU(_ScaledUnit):
    """y = SiTUGLU(x) scales. The extra input `scales` has the shape of x without its last dimension."""

    beta1: float
    beta2: float

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        beta1: float = 4.0,
        beta2: float = 25.0,
    ) -> None:
        """Makes the gated unit, which has no parameters: x [..., features] -> y [..., features / 2], in the dtype of autocast or x.

        Args:
            glu_interleave_size, activation_recompute_in_mlp: as for `ScaledSwiGLU`.
            beta1, beta2: as for `SiTUGLU`.
        """
        super().__init__(glu_interleave_size, activation_recompute_in_mlp=activation_recompute_in_mlp)
        self.beta1 = beta1
        self.beta2 = beta2


class ScaledClampedQGeGLU(_ScaledUnit):
    """y = ClampedSwiGLU(x) scales. The extra input `scales` has the shape of x without its last dimension."""

    limit: float
    alpha: float
    glu_linear_offset: float

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
    ) -> None:
        """Makes the gated unit, which has no parameters: x [..., features] -> y [..., features / 2], in the dtype of autocast or x.

        Args:
            glu_interleave_size, activation_recompute_in_mlp: as for `ScaledSwiGLU`.
            limit, alpha, glu_linear_offset: as for `ClampedSwiGLU`.
        """
        super().__init__(glu_interleave_size, activation_recompute_in_mlp=activation_recompute_in_mlp)
        self.limit = limit
        self.alpha = alpha
        self.glu_linear_offset = glu_linear_offset


class ScaledSReLU(BasicOperation):
    """y = max(x, 0)^2 scales. The extra input `scales` has the shape of x without its last dimension."""

    def __init__(self, *, activation_recompute_in_mlp: bool = False) -> None:
        """Makes the activation, which has no parameters. y has the shape of x, and the dtype of autocast or x.

        Args:
            activation_recompute_in_mlp: accepted for TransformerEngine, without effect: forward never keeps y; backward re-emits it on demand.
        """
        super().__init__()
        self.activation_recompute_in_mlp = flag("ScaledSReLU", "activation_recompute_in_mlp", activation_recompute_in_mlp)
