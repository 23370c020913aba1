"""`LayerNorm` and `RMSNorm` with TransformerEngine's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tandem import ops
from tandem.arguments import flag


class _Norm:
    """What both norms add to their ops: the argument names of `transformer_engine.pytorch`, and a mark on the parameters for reducers of gradients."""

    sequence_parallel: bool

    def __init__(
        self: Any,
        normalized_shape: int | Sequence[int] | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **options: Any,
    ) -> None:
        """Creates a norm that neither scales nor shifts.

        Args:
            normalized_shape: sizes of the last dimensions of x, over which the norm is computed.
            eps: added to the variance, or to the mean square.
            sequence_parallel: value of the attribute `sequence_parallel` of each parameter, which reducers of gradients read; None: False.
            params_dtype: the older name of `dtype`, the dtype of the parameters. Both together raise TypeError.
            zero_centered_gamma: whether the norm multiplies by 1 + weight rather than by weight.
            hidden_size: the older name of `normalized_shape`. Both or neither raise TypeError.
            options: the other arguments of the op of this name in `tandem.ops`.
        """
        name = self._get_name()
        if (normalized_shape is None) == (hidden_size is None):
            raise TypeError(f"{name}: expected normalized_shape, or its older name hidden_size, got {'neither' if hidden_size is None else 'both'}.")
        if params_dtype is not None and options.get("dtype") is not None:
            raise TypeError(f"{name}: expected dtype, or its older name params_dtype, got both. Give one of them.")
        if params_dtype is not None:
            options["dtype"] = params_dtype
        shape = hidden_size if normalized_shape is None else normalized_shape
        super().__init__(shape, eps=eps, zero_centered_gamma=zero_centered_gamma, **options)  # type: ignore[call-arg]
        self.sequence_parallel = flag(name, "sequence_parallel", False if sequence_parallel is None else sequence_parallel)
        self._mark()

    def _mark(self: Any) -> None:
        for param in self.parameters():
            param.sequence_parallel = self.sequence_parallel

    def reset_parameters(self: Any) -> None:
        """Resets the parameters so that the norm neither scales nor shifts."""
        super().reset_parameters()  # type: ignore[misc]
        if "sequence_parallel" in self.__dict__:
            self._mark()


class LayerNorm(_Norm, ops.LayerNorm):
    """y = (x - mean) / sqrt(variance + eps) * weight + bias over the last dimensions, as `ops.LayerNorm` computes it. y has the shape of x.

    >>> import torch, tandem
    >>> tandem.LayerNorm(8, sequence_parallel=True).weight.sequence_parallel
    True
    """

    def reset_layer_norm_parameters(self) -> None:
        """The older name of `reset_parameters`."""
        self.reset_parameters()


class RMSNorm(_Norm, ops.RMSNorm):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimensions, as `ops.RMSNorm` computes it. y has the shape of x.

    >>> import torch, tandem
    >>> tandem.RMSNorm(8)(torch.full((1, 8), 3.0)).allclose(torch.ones(1, 8))
    True
    """

    def reset_rms_norm_parameters(self) -> None:
        """The older name of `reset_parameters`."""
        self.reset_parameters()
