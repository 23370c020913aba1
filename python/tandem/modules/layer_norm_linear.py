"""`LayerNormLinear`: a norm and a product with TransformerEngine's arguments."""

from __future__ import annotations

from typing import Any

import torch

from tandem.modules.base import Init, NormedModule
from tandem.modules.linear import OneProduct


class LayerNormLinear(NormedModule, OneProduct):
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
        self._construct(locals())
