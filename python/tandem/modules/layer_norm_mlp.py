"""`LayerNormMLP`: a norm, and two products with an activation between them, with TransformerEngine's arguments."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from tandem import _C
from tandem.arguments import Fixed, flag, positive
from tandem.modules.base import Init, NormedModule, Parts
from tandem.op_base.signature import signature_of
from tandem.ops.collective import collectives, share
from tandem.ops.library import class_of
from tandem.ops.linear import BasicLinear, Bias


class LayerNormMLP(NormedModule):
    """y = activation(norm(x) fc1_weight^T + fc1_bias) fc2_weight^T + fc2_bias, as one pipeline: x and y are [..., hidden_size].

    The parameters are `layer_norm_weight`, `layer_norm_bias`, `fc1_weight`, `fc1_bias`, `fc2_weight` and `fc2_bias`. State dicts of
    TransformerEngine load unchanged.

    >>> import torch, tandem
    >>> mlp = tandem.LayerNormMLP(8, 16, activation="swiglu", normalization="RMSNorm", bias=False)
    >>> mlp(torch.randn(2, 8)).shape, {name: tuple(value.shape) for name, value in mlp.state_dict().items()}
    (torch.Size([2, 8]), {'layer_norm_weight': (8,), 'fc1_weight': (32, 8), 'fc2_weight': (8, 16)})
    """

    fc1_weight: torch.nn.Parameter
    fc1_bias: torch.nn.Parameter | None
    fc2_weight: torch.nn.Parameter
    fc2_bias: torch.nn.Parameter | None
    activation, activation_params, set_parallel_mode = Fixed(), Fixed(), Fixed()
    _result_bias = "fc2_bias"

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Init | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: dict[str, Any] | None = None,
        output_layer_init_method: Init | None = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        name: str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        checkpoint: bool = False,
    ) -> None:
        """Creates a norm that neither scales nor shifts, draws both weights, and sets the biases to zeros.

        Args:
            hidden_size: size of the last dimension of x and y.
            ffn_hidden_size: size of the last dimension of the activation's result, over all ranks.
            eps, sequence_parallel, fuse_wgrad_accumulation, tp_group, tp_size, normalization, params_dtype, device: as for `LayerNormLinear`.
            zero_centered_gamma, return_layernorm_output, return_layernorm_output_gathered: as for `LayerNormLinear`.
            return_bias: whether a call returns `fc2_bias` after y instead of adding it.
            init_method, output_layer_init_method: draw the first and the second weight in place; None: as for `LayerNormLinear`.
            bias: whether both products have biases; False: `fc1_bias` and `fc2_bias` are None.
            activation: an activation or gated unit of docs/ops.md. A gated unit halves its input, so `fc1_weight` has 2 ffn_hidden_size rows.
            set_parallel_mode: whether the ranks of `tp_group` compute together: the first product column-parallel, the second row-parallel, with its
                bias added after the sum over ranks. False: a rank computes with its part alone.
            name: stored as an attribute.
            seq_length, micro_batch_size: not used.
            activation_params: options of the activation by name, such as {"limit": 5.0} for "clamped_swiglu"; an unknown name raises ValueError.
            get_rng_state_tracker: function that returns an object whose `fork()` is a context in which weights are drawn; None: the global generator draws.
            symmetric_ar_type: None; other values raise NotImplementedError.
            delay_wgrad_compute: whether backward leaves the gradients of the weights to `backward_dw`.
            checkpoint: whether backward recomputes the norm, the first product and the activation instead of keeping their results.
            ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad: False; other values raise NotImplementedError.
        """
        self._construct(locals())
        self.checkpoint = checkpoint

    def _parts_of_products(self, given: Mapping[str, Any]) -> Parts:
        op, activation, options, group = self._get_name(), given["activation"], given["activation_params"] or {}, given["tp_group"]
        families = {kind: signature_of(kind).family for kind in _C.op_names()}
        if families.get(activation) not in ("activation", "glu"):
            known = ", ".join(kind for kind, family in families.items() if family in ("activation", "glu"))
            raise ValueError(f"{op}: expected activation to be one of {known}, got {activation!r}. Name one of them.")
        unit = class_of(activation)
        if unknown := [name for name in options if name not in unit._option_names]:
            known = ", ".join(unit._option_names) or "none, as it has no options"
            raise ValueError(f"{op}: expected names in activation_params among the options of {activation} ({known}), got {unknown[0]!r}. Leave it out.")
        sequence_parallel = flag(op, "sequence_parallel", given["sequence_parallel"])
        together = flag(op, "set_parallel_mode", given["set_parallel_mode"]) and group is not None
        before, _, _ = collectives(op, "column" if together else None, group, sequence_parallel)
        _, after, _ = collectives(op, "row" if together else None, group, sequence_parallel)
        ranks = 1 if group is None else group.size()
        hidden = positive(op, "hidden_size", given["hidden_size"])
        inner = share(op, "ffn_hidden_size", positive(op, "ffn_hidden_size", given["ffn_hidden_size"]), ranks)
        wide = 2 * inner if families[activation] == "glu" else inner
        self.hidden_size, self.size_per_partition = hidden, inner
        self.activation, self.activation_params = activation, dict(options) or None
        self.set_parallel_mode, self.tp_size, self.sequence_parallel = together, ranks, sequence_parallel and ranks > 1
        self._inits = {"fc1_weight": given["init_method"], "fc2_weight": given["output_layer_init_method"]}
        made: dict[str, Any] = {"device": "meta", "dtype": given["params_dtype"]}
        first, second = BasicLinear(hidden, wide, **made), BasicLinear(inner, hidden, **made)
        first_bias: Parts = [(Bias(wide, **made), {"bias": "fc1_bias"})] if self.use_bias else []
        second_bias: Parts = [(Bias(hidden, **made), {"bias": "fc2_bias"})] if self.use_bias else []
        return [
            *[*[(part, {}) for part in before], (first, {"weight": "fc1_weight"}), *first_bias],
            (unit(**options), {}),
            *[(second, {"weight": "fc2_weight"}), *[(part, {}) for part in after], *second_bias],
        ]

    @property
    def checkpoint(self) -> bool:
        """Whether backward recomputes the norm, the first product and the activation instead of keeping their results."""
        return self.basic_ops[0]._recompute

    @checkpoint.setter
    def checkpoint(self, value: bool) -> None:
        value = flag(self._get_name(), "checkpoint", value)
        for part in itertools.takewhile(lambda part: part is not self._products[-1], self.basic_ops):
            part._set_recompute(value)

    def _sharded_dimensions(self) -> dict[str, int]:
        return {"fc1_weight": 0, "fc1_bias": 0, "fc2_weight": 1} if self.tp_size > 1 else {}

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None, *, _run: Any = None) -> Any:  # type: ignore[override]
        """y [..., hidden_size], then with `return_bias` `fc2_bias`, then with `return_layernorm_output` the output of the norm.

        Args:
            inp: x [..., hidden_size], of the dtype of the parameters outside of `torch.autocast`. Another dtype raises TypeError.
            is_first_microbatch: as for `LayerNormLinear`.
        """
        return self._outputs(inp, _run, is_first_microbatch)

    _library_forward = forward  # containers take the parts of a module with this forward into their pipelines

    def extra_repr(self) -> str:
        parallel = f", tp_size={self.tp_size}" if self.tp_size > 1 else ""
        sizes = f"{self.hidden_size}, {self.size_per_partition * self.tp_size}"
        return f"{sizes}, bias={self.use_bias}, normalization={self.normalization}, activation={self.activation}{parallel}"
