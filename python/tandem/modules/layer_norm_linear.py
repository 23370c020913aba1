"""`LayerNormLinear`: a norm and a product with TransformerEngine's arguments."""

from __future__ import annotations

from typing import Any

import torch

from tandem.modules.base import Init, NormedModule, check_one_value
from tandem.modules.linear import OneProduct, Sizes, split_repr


class LayerNormLinear(OneProduct, NormedModule):  # type: ignore[misc]
    """y = norm(x) weight^T + bias, as one pipeline: x [..., in_features] -> y [..., out_features].

    The parameters are `layer_norm_weight`, `layer_norm_bias`, `weight` and `bias`. State dicts of TransformerEngine load unchanged.

    >>> import torch, tandem
    >>> layer = tandem.LayerNormLinear(8, 4, normalization="RMSNorm")
    >>> layer(torch.randn(2, 8)).shape, [*layer.state_dict()]
    (torch.Size([2, 4]), ['layer_norm_weight', 'weight', 'bias'])
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        init_method: Init | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Any = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        """Creates a norm that neither scales nor shifts, draws the weight, and sets the bias to zeros.

        Args:
            in_features, out_features, sequence_parallel, fuse_wgrad_accumulation, tp_group, tp_size, init_method, bias, return_bias: as for `Linear`.
            params_dtype, parallel_mode, parameters_split, device, delay_wgrad_compute, get_rng_state_tracker, symmetric_ar_type: as for `Linear`.
            ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_wgrad, ub_bulk_dgrad, ub_name, name: as for `Linear`.
            eps: the norm adds it to the variance or the mean square.
            normalization: "LayerNorm" or "RMSNorm".
            return_layernorm_output: whether a call returns the output of the norm too, as its last result.
            return_layernorm_output_gathered: whether with `sequence_parallel` and "column" that output contains the rows of all ranks.
            zero_centered_gamma: whether the norm multiplies by 1 + weight rather than by weight.
        """
        op = self._get_name()
        check_one_value(op, locals())
        sizes = Sizes(op, in_features, out_features, parallel_mode, tp_group, tp_size, sequence_parallel, parameters_split)
        torch.nn.Module.__init__(self)
        self.get_rng_state_tracker, self.name = get_rng_state_tracker, name
        sizes.give(self)
        self._read_norm(normalization, return_layernorm_output, return_layernorm_output_gathered)
        behind = sizes.parts(op, bias, return_bias, fuse_wgrad_accumulation, delay_wgrad_compute, params_dtype)
        parts = self._norm_and(sizes.columns, eps, zero_centered_gamma, params_dtype, sizes.before, behind)
        sizes.build(self, parts, init_method, bias, return_bias, device, params_dtype)

    def extra_repr(self) -> str:
        parallel = f", parallel_mode={self.parallel_mode}, tp_size={self.tp_size}" if self.tp_size > 1 else ""
        return f"{self.in_features}, {self.out_features}, bias={self.use_bias}, normalization={self.normalization}{parallel}{split_repr(self)}"


LayerNormLinear._library_forward = LayerNormLinear.forward  # containers take the parts of a module with this forward into their pipelines
