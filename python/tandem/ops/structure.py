"""Ops that move, copy, scale, drop or round values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch

from tandem.arguments import Fixed, flag, sizes
from tandem.op_base.context import OperationContext
from tandem.op_base.quantizers import check_mode
from tandem.ops.op import BasicOperation


class Identity(BasicOperation):
    """y = x."""


class Reshape(BasicOperation):
    """y = x.reshape(shape). One size may be -1, which follows from the number of elements."""

    def __init__(self, shape: Iterable[int]) -> None:
        """Makes a change of shape.

        Args:
            shape: sizes of y; at most one is -1, others are at least 0. Other values raise ValueError.
        """
        super().__init__()
        self.shape = sizes("Reshape", "shape", shape)

    def _context_fields(self, ctx: OperationContext, saved: Sequence[torch.Tensor | None], x: torch.Tensor | None) -> dict[str, Any]:
        shape = {} if x is None else {"input_shape": x.shape}
        return {**super()._context_fields(ctx, saved, x), **shape}


class ConstantScale(BasicOperation):
    """y = x scale. y has the shape and dtype of x; integers become torch's default dtype."""

    _names_in_library: ClassVar[dict[str, str]] = {"scale": "factor"}

    def __init__(self, scale: float) -> None:
        """Makes a multiplication by a constant.

        Args:
            scale: the factor, a finite number.
        """
        super().__init__()
        self.scale = scale


class Dropout(BasicOperation):
    """In training y = 0 with probability p, otherwise y = x / (1 - p), for each element; in evaluation y = x. Its own `training` flag decides."""

    def __init__(self, p: float) -> None:
        """Makes a dropout.

        Args:
            p: probability, from 0 to 1, with which an element becomes zero.
        """
        super().__init__()
        self.p = p

    @property
    def dropout_probability(self) -> float:
        """`p` under TransformerEngine's name."""
        return self.p

    @dropout_probability.setter
    def dropout_probability(self, value: float) -> None:
        self.p = value


class Quantize(BasicOperation):
    """y = dequantize(quantize(x)) under a recipe: x is rounded to the format of inputs (`forward`), grad_y to the format of gradients (`backward`).

    If y is a result of the pipeline as it is, it is a `tandem.QuantizedTensor`; compiled code that records a gradient of y returns dequantized values.
    """

    _names_in_library: ClassVar[dict[str, str]] = {"quantize_forward": "forward", "quantize_backward": "backward"}

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        """Makes a point of quantization.

        Args:
            forward: whether x is quantized.
            backward: whether grad_y is quantized.
        """
        super().__init__()
        self.quantize_forward = forward
        self.quantize_backward = backward

    def num_quantizers(self, mode: str) -> int:
        """The number of quantizers of a direction, "forward" or "backward": 1 if it quantizes, otherwise 0."""
        check_mode("Quantize", mode)
        return int(self.quantize_forward if mode == "forward" else self.quantize_backward)

    def extra_repr(self) -> str:
        return f"forward={self.quantize_forward}, backward={self.quantize_backward}"


class AddExtraInput(BasicOperation):
    """y = x + extra, where the extra input broadcasts to x as in torch. With `in_place` the sum may be written into the extra input."""

    _shown_names = ("in_place",)

    def __init__(self, *, in_place: bool = False) -> None:
        """Makes a sum with an extra input.

        Args:
            in_place: whether the sum may be written into the extra input. An extra input that is a leaf which requires grad stays a leaf, with the
                gradient of its old value, so it must not be read before backward. Other arguments that share its memory must not be read after
                the sum. If calls are recorded, as under torch.compile, or the extra input is quantized, it keeps its old values.
        """
        super().__init__()
        self.in_place = in_place


class MakeExtraOutput(BasicOperation):
    """y = x, and x is also an extra output. With `in_place` backward may add gradients in memory that nothing reads afterwards."""

    _shown_names = ("in_place",)

    def __init__(self, *, in_place: bool = False) -> None:
        """Makes a fork.

        Args:
            in_place: whether backward may add into the memory of a gradient.
        """
        super().__init__()
        self.in_place = in_place


class Modulate(BasicOperation):
    """y = x * (1 + scale) + shift, rounded once, as in adaptive norms, gates and scales of layers.

    The extra inputs scale and shift broadcast to x: [batch, 1, hidden] has one row for each sequence, [hidden] one row for all. Their gradients are
    sums over the broadcast dimensions. y has the shape of x, and the dtype to which x, scale and shift promote.

    >>> import torch
    >>> from tandem import ops
    >>> gate = ops.Modulate(zero_centered=False, shift=False)
    >>> block = ops.Sequential(ops.LayerNorm(64), ops.Modulate(), ops.Linear(64, 64), gate)
    >>> block(torch.randn(2, 10, 64), *torch.randn(3, 2, 1, 64)).shape
    torch.Size([2, 10, 64])
    """

    shift = Fixed()

    def __init__(self, *, zero_centered: bool = True, shift: bool = True) -> None:
        """Makes the op, which has no parameters.

        Args:
            zero_centered: whether the factor is 1 + scale rather than scale.
            shift: whether shift is an extra input after scale; otherwise it is 0.
        """
        self.__dict__["num_extra_inputs"] = 1 + flag("Modulate", "shift", shift)
        super().__init__()
        self.zero_centered, self.shift = zero_centered, shift
