"""`LayerNorm` and `RMSNorm` with TransformerEngine's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tandem import ops
from tandem.ops.arguments import flag


class _Norm:
    """What both have beside the op: the names that `transformer_engine.pytorch` takes, and the mark for who reduces gradients over ranks."""

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
        """Makes a norm that neither scales nor shifts.

        Args:
            normalized_shape: sizes of the last dimensions of x, over which it goes.
            eps: added to the variance, or to the mean square.
            sequence_parallel: what `sequence_parallel` of the parameters says to who sums up gradients over ranks.
            params_dtype: of the parameters: the older name of `dtype`.
            zero_centered_gamma: whether the factor is 1 + weight rather than weight.
            hidden_size: the older name of `normalized_shape`.
            options: the other arguments of the op of this name.
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
        """Makes it a norm that neither scales nor shifts."""
        super().reset_parameters()  # type: ignore[misc]
        if "sequence_parallel" in self.__dict__:
            self._mark()


class LayerNorm(_Norm, ops.LayerNorm):
    """y = (x - mean) / sqrt(variance + eps) * weight + bias over the last dimensions: `ops.LayerNorm`.

    >>> import torch, tandem
    >>> tandem.LayerNorm(8, sequence_parallel=True).weight.sequence_parallel
    True
    """

    def reset_layer_norm_parameters(self) -> None:
        """The older name of `reset_parameters`."""
        self.reset_parameters()


class RMSNorm(_Norm, ops.RMSNorm):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimensions: `ops.RMSNorm`.

    >>> import torch, tandem
    >>> tandem.RMSNorm(8)(torch.full((1, 8), 3.0)).allclose(torch.ones(1, 8))
    True
    """

    def reset_rms_norm_parameters(self) -> None:
        """The older name of `reset_parameters`."""
        self.reset_parameters()
