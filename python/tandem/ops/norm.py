"""Norms over the last dimensions."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tandem.arguments import check_margin, normalized_sizes, parameter_dtype
from tandem.op_base.deferred import DeferredMixin
from tandem.ops.op import BasicOperation


class _Norm(DeferredMixin, BasicOperation):
    """A norm that is also an instance of torch's class, with its attributes, because other libraries look for that class."""

    weight: torch.nn.Parameter

    def __init__(
        self,
        normalized_shape: int | Iterable[int],
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: int | dict[str, int] = 0,
    ) -> None:
        """Makes a norm that neither scales nor shifts.

        Args:
            normalized_shape: sizes of the last dimensions of x, which the norm reduces; a number: the size of the last one.
            eps: at least 0; added to the mean square or the variance, in units of x squared.
            device: device of the parameters; None: torch's default device.
            dtype: dtype of the parameters; None: `torch.get_default_dtype()`.
            zero_centered_gamma: whether the factor is 1 + weight rather than weight.
            sm_margin: accepted for TransformerEngine, without effect: the number of multiprocessors that kernels leave to others.
        """
        torch.nn.Module.__init__(self)  # the constructors of torch's norms are next and would create parameters
        self._init_channels(self.num_extra_inputs, self.num_extra_outputs)
        name = type(self).__name__
        check_margin(name, sm_margin)
        self.normalized_shape, self.elementwise_affine = normalized_sizes(name, normalized_shape), True
        self.eps = eps
        dtype = parameter_dtype(name, dtype)
        self.zero_centered_gamma = zero_centered_gamma
        for parameter in self._parameter_names:
            self.register_parameter(parameter, torch.nn.Parameter(torch.empty(self.normalized_shape, device=device, dtype=dtype)))
        self._give_first_values()

    def extra_repr(self) -> str:
        shape = tuple(self.weight.shape)
        return f"{shape if len(shape) > 1 else shape[0]}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class RMSNorm(_Norm, torch.nn.RMSNorm):  # type: ignore[misc]
    """y = x / sqrt(mean(x^2) + eps) * weight, or * (1 + weight) with `zero_centered_gamma`. y has the shape of x and the dtype of autocast or weight."""

    def __init__(
        self,
        normalized_shape: int | Iterable[int],
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: int | dict[str, int] = 0,
        rounds_before_weight: bool = False,
    ) -> None:
        """Makes a norm that does not scale.

        Args:
            normalized_shape, eps, device, dtype, zero_centered_gamma, sm_margin: as for `LayerNorm`.
            rounds_before_weight: whether x / sqrt(...) is rounded to the dtype of y before it is multiplied by the factor, as in models that
                write `weight * x_hat.to(x.dtype)`; the product is then rounded a second time. The gradient ignores the first rounding, as for a cast.
        """
        super().__init__(normalized_shape, eps=eps, device=device, dtype=dtype, zero_centered_gamma=zero_centered_gamma, sm_margin=sm_margin)
        self.rounds_before_weight = rounds_before_weight

    def extra_repr(self) -> str:
        return super().extra_repr() + (", rounds_before_weight=True" if self.rounds_before_weight else "")


class LayerNorm(_Norm, torch.nn.LayerNorm):  # type: ignore[misc]
    """y = (x - mean) / sqrt(variance + eps) * weight + bias; with `zero_centered_gamma` the factor is 1 + weight. y has the dtype of autocast or weight."""

    bias: torch.nn.Parameter


class L2Normalization(BasicOperation):
    """y = x / sqrt(sum(x^2) + eps) over the last dimension; y has the shape of x and, if it is floating, its dtype."""

    def __init__(self, *, eps: float = 1e-6, seq_length: int | None = None, micro_batch_size: int | None = None) -> None:
        """Makes the normalization, which has no parameters.

        Args:
            eps: at least 0; added to the sum of squares, in units of x squared.
            seq_length: accepted for TransformerEngine, without effect.
            micro_batch_size: accepted for TransformerEngine, without effect.
        """
        super().__init__()
        self.eps = eps
