"""Activations, with and without a gate."""

from __future__ import annotations

from tandem.ops.arguments import at_default
from tandem.ops.op import BasicOperation


class _Activation(BasicOperation):
    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        """Makes the activation; it has no parameters.

        Args:
            cache_quantized_input: False; no other value is known yet.
        """
        super().__init__()
        at_default(type(self).__name__, False, cache_quantized_input=cache_quantized_input)


class GELU(_Activation):
    """y = 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""

    _kind = "gelu"


class SiLU(_Activation):
    """y = x sigmoid(x)."""

    _kind = "silu"


class ReLU(_Activation):
    """y = max(x, 0)."""

    _kind = "relu"


class GEGLU(_Activation):
    """y = gelu(a) b, where a and b are the halves of the last dimension of x."""

    _kind = "geglu"


class SwiGLU(_Activation):
    """y = silu(a) b, where a and b are the halves of the last dimension of x."""

    _kind = "swiglu"

    def __init__(self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None) -> None:
        """Makes the gated unit; it has no parameters.

        Args:
            cache_quantized_input: False; no other value is known yet.
            glu_interleave_size: None, as a and b are halves; no other value is known yet.
        """
        super().__init__(cache_quantized_input=cache_quantized_input)
        at_default("SwiGLU", glu_interleave_size=glu_interleave_size)
