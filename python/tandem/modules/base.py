"""Modules with the names, arguments and parameters of transformer_engine.pytorch: each is a pipeline of the ops of `tandem.ops`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tandem import _C
from tandem.ops.arguments import Fixed, at_default, flag, positive
from tandem.ops.collective import _Collective
from tandem.ops.composite import CompositeOperation
from tandem.ops.library import class_of
from tandem.ops.linear import BasicLinear, Bias, collectives, share
from tandem.ops.norm import LayerNorm, RMSNorm
from tandem.ops.op import BasicOperation
from tandem.ops.signature import signature_of
from tandem.ops.structure import MakeExtraOutput

Init = Callable[[torch.Tensor], Any]
Parts = list[tuple[BasicOperation, dict[str, str]]]  # with the module's name of each parameter

_NORMS: dict[str, type[LayerNorm] | type[RMSNorm]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


def _draw(weight: torch.Tensor) -> None:
    torch.nn.init.normal_(weight, mean=0.0, std=0.023)  # as TransformerEngine draws weights that nobody says more about


class _Module(CompositeOperation):
    """A norm, and products behind it."""

    layer_norm_weight: torch.nn.Parameter
    layer_norm_bias: torch.nn.Parameter | None
    normalization, use_bias, return_bias = Fixed(), Fixed(), Fixed()
    return_layernorm_output, return_layernorm_output_gathered = Fixed(), Fixed()
    sequence_parallel, tp_size = Fixed(), Fixed()

    def _build(
        self,
        features: int,
        *,
        normalization: str,
        eps: float,
        zero_centered_gamma: bool,
        bias: bool,
        return_bias: bool,
        return_layernorm_output: bool,
        return_layernorm_output_gathered: bool,
        fuse_wgrad_accumulation: bool,
        inits: dict[str, Init | None],
        before: list[BasicOperation],
        behind: Callable[[bool], Parts],
        result_bias: tuple[str, int],
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Makes the parts, and then the parameters.

        Args:
            features: over which the norm goes.
            inits: by name of a weight, in order, what draws it; None: the default.
            before: collectives between the norm and the products.
            behind: the products and what follows, told whether gradients of weights go into main_grad.
            result_bias: name and size of the bias that `return_bias` keeps out of the pipeline.
        """
        name = self._get_name()
        if normalization not in _NORMS:
            raise ValueError(f'{name}: expected normalization "LayerNorm" or "RMSNorm", got {normalization!r}. Name one of them.')
        self.normalization = normalization
        self.use_bias, self.return_bias = flag(name, "bias", bias), flag(name, "return_bias", return_bias)
        self.return_layernorm_output = flag(name, "return_layernorm_output", return_layernorm_output)
        self.return_layernorm_output_gathered = flag(name, "return_layernorm_output_gathered", return_layernorm_output_gathered)
        self._inits = inits
        self._result_bias = result_bias[0]
        norm = _NORMS[normalization](features, eps=eps, device="meta", dtype=dtype, zero_centered_gamma=zero_centered_gamma)
        fork: Parts = [(MakeExtraOutput(), {})] if self.return_layernorm_output else []
        gathering: Parts = [(part, {}) for part in before]
        parts: Parts = [
            (norm, {own: f"layer_norm_{own}" for own in norm._parameter_names}),
            *([*gathering, *fork] if self.return_layernorm_output_gathered and self.sequence_parallel else [*fork, *gathering]),
            *behind(flag(name, "fuse_wgrad_accumulation", fuse_wgrad_accumulation)),
        ]
        for part, names in parts:
            for own, ours in names.items():
                self._make(ours, part.get_parameter(own).shape, device, dtype)
            if isinstance(part, RMSNorm):
                self._lack("layer_norm_bias", 'normalization="RMSNorm"', 'normalization="LayerNorm"')
            if isinstance(part, BasicLinear):
                made = names["weight"].removesuffix("weight") + "bias"
                if not self.use_bias:
                    self._lack(made, "bias=False", "bias=True")
        if self.use_bias and self.return_bias:  # nobody's part
            self._make(self._result_bias, torch.Size(result_bias[1:]), device, dtype)
        self._own(parts)
        self.reset_parameters()
        self.__dict__["_deferred"] = any(param.is_meta for param in self._parameters.values() if param is not None)

    def _make(self, name: str, shape: torch.Size, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        self.register_parameter(name, torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))

    @property
    def eps(self) -> float:
        """That of the norm."""
        return self._norm.eps

    @eps.setter
    def eps(self, value: float) -> None:
        self._norm.eps = value

    @property
    def zero_centered_gamma(self) -> bool:
        """Whether the norm's factor is 1 + weight."""
        return self._norm.zero_centered_gamma

    @zero_centered_gamma.setter
    def zero_centered_gamma(self, value: bool) -> None:
        self._norm.zero_centered_gamma = value

    @property
    def fuse_wgrad_accumulation(self) -> bool:
        """Whether gradients of weights are added to their main_grad."""
        return any(part.accumulate_into_main_grad for part in self.basic_ops if isinstance(part, BasicLinear))

    @fuse_wgrad_accumulation.setter
    def fuse_wgrad_accumulation(self, value: bool) -> None:
        for part in self.basic_ops:
            if isinstance(part, BasicLinear):
                part.accumulate_into_main_grad = flag(self._get_name(), "fuse_wgrad_accumulation", value)

    @property
    def _norm(self) -> Any:
        return self.basic_ops[0]

    @property
    def tp_group(self) -> Any:
        """The ranks that share the weights; None where none do."""
        return next((part.process_group for part in self.basic_ops if isinstance(part, _Collective)), None)

    def reset_parameters(self) -> None:
        """Draws the weights as their init_method says, sets biases to zero, and makes the norm one that neither scales nor shifts. Tells
        what reduces gradients over ranks, as TransformerEngine does, which parameters all ranks hold."""
        self._norm.reset_parameters()
        for name, param in self.named_parameters(recurse=False):
            if name in self._inits:
                (self._inits[name] or _draw)(param)
            elif not name.startswith("layer_norm"):
                torch.nn.init.zeros_(param)
        for name, param in self.named_parameters(recurse=False):
            dimension = self._sharded_dimensions().get(name)
            if dimension is not None:
                param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, dimension, 1  # type: ignore[attr-defined]
            else:
                param.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def _transformer_engine_states(self) -> Sequence[str]:
        return ("",)

    def _sharded_dimensions(self) -> dict[str, int]:
        """The dimension of each parameter of which a rank holds a part."""
        raise NotImplementedError

    def _check_in_container(self) -> None:
        if self.return_bias:
            raise ValueError(
                f"{self._get_name()}: expected a module whose output is what the next op takes, got one with return_bias=True. Call it outside "
                "of the container, or build it with return_bias=False."
            )

    def _check_call(self, is_first_microbatch: bool | None, **unknown: bool) -> None:
        at_default(self._get_name(), False, **unknown)
        if is_first_microbatch is not None and self.fuse_wgrad_accumulation:
            raise NotImplementedError(
                f"{self._get_name()}: expected is_first_microbatch=None with fuse_wgrad_accumulation=True, got {is_first_microbatch}. Set "
                "overwrite_main_grad of the weights where main_grad starts anew."
            )

    def _outputs(self, inp: torch.Tensor, run: Any) -> Any:
        """What a call returns: y, the bias that is not added, the output of the norm."""
        outputs = super().forward(inp, _run=run)
        if not self.return_bias:
            return outputs
        y, *normed = outputs if isinstance(outputs, tuple) else (outputs,)
        bias = getattr(self, self._result_bias)
        return (y, None if bias is None else bias.to(y.dtype), *normed)


class LayerNormLinear(_Module):
    """y = norm(x) weight^T + bias, as one pipeline.

    The parameters are `layer_norm_weight`, `layer_norm_bias`, `weight` and `bias`; state dicts of TransformerEngine are read as they are.

    >>> import torch, tandem
    >>> layer = tandem.LayerNormLinear(8, 4, normalization="RMSNorm")
    >>> layer(torch.randn(2, 8)).shape, [*layer.state_dict()]
    (torch.Size([2, 4]), ['layer_norm_weight', 'weight', 'bias'])
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    parallel_mode = Fixed()

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
        """Makes a norm that neither scales nor shifts, a product whose weight is drawn, and a bias of zeros.

        Args:
            in_features: size of the last dimension of x, over all ranks.
            out_features: size of the last dimension of y, over all ranks.
            eps: of the norm, as for `ops.RMSNorm`.
            sequence_parallel: with a `parallel_mode`: the ranks share the first dimension outside.
            fuse_wgrad_accumulation: whether the gradient of `weight` is added to `weight.main_grad`, as `ops.BasicLinear` says.
            tp_group: the ranks that share the weight; None: no rank knows of another.
            tp_size: 1, or with `tp_group`, whose size counts.
            init_method: draws the weight, in place; None: from the normal distribution with a deviation of 0.023.
            bias: whether there is one; False: `bias` is None.
            normalization: "LayerNorm" or "RMSNorm".
            return_bias: whether the bias is not added but returned, behind y.
            params_dtype: of the parameters; None: `torch.get_default_dtype()`.
            parallel_mode: "column": each rank holds a part of the output features, and gives these; "row": each holds a part of the input
                features, and the bias is added behind the sum over ranks.
            return_layernorm_output: whether the output of the norm is returned too, as the last.
            return_layernorm_output_gathered: whether with `sequence_parallel` and "column" that output is the rows of all ranks.
            zero_centered_gamma: whether the norm's factor is 1 + weight rather than weight.
            device: where the parameters are made; None: torch's default device.
            ub_name, name: not used.
            get_rng_state_tracker, parameters_split, symmetric_ar_type: None; no other value is known yet.
            delay_wgrad_compute, ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_wgrad, ub_bulk_dgrad: False, likewise.
        """
        op = self._get_name()
        at_default(op, get_rng_state_tracker=get_rng_state_tracker, parameters_split=parameters_split, symmetric_ar_type=symmetric_ar_type)
        at_default(op, False, ub_overlap_ag=ub_overlap_ag, ub_overlap_rs=ub_overlap_rs, ub_overlap_rs_dgrad=ub_overlap_rs_dgrad)
        at_default(op, False, ub_bulk_wgrad=ub_bulk_wgrad, ub_bulk_dgrad=ub_bulk_dgrad, delay_wgrad_compute=delay_wgrad_compute)
        if parallel_mode not in (None, "column", "row"):
            raise ValueError(f'{op}: expected parallel_mode None, "column" or "row", got {parallel_mode!r}. Name how ranks share the weight.')
        _check_group(op, tp_group, tp_size)
        sequence_parallel = flag(op, "sequence_parallel", sequence_parallel)
        before, after, size = collectives(op, parallel_mode if tp_group is not None else None, tp_group, sequence_parallel)
        columns, rows = positive(op, "in_features", in_features), positive(op, "out_features", out_features)
        if parallel_mode == "column":
            rows = share(op, "out_features", rows, size)
        elif parallel_mode == "row":
            columns = share(op, "in_features", columns, size)

        def behind(into_main_grad: bool) -> Parts:
            made = BasicLinear(columns, rows, device="meta", dtype=params_dtype, accumulate_into_main_grad=into_main_grad)
            added: Parts = [(Bias(rows, device="meta", dtype=params_dtype), {"bias": "bias"})] if bias and not return_bias else []
            return [(made, {"weight": "weight"}), *[(part, {}) for part in after], *added]

        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = columns, rows  # of this rank, as in TransformerEngine
        self.parallel_mode, self.tp_size, self.sequence_parallel = parallel_mode, size, sequence_parallel and size > 1
        self._build(
            columns,
            normalization=normalization,
            eps=eps,
            zero_centered_gamma=zero_centered_gamma,
            bias=bias,
            return_bias=return_bias,
            return_layernorm_output=return_layernorm_output,
            return_layernorm_output_gathered=return_layernorm_output_gathered,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            inits={"weight": init_method},
            before=before,
            behind=behind,
            result_bias=("bias", rows),
            device=device,
            dtype=params_dtype,
        )

    def _sharded_dimensions(self) -> dict[str, int]:
        if self.tp_size == 1:
            return {}
        return {"weight": 0, "bias": 0} if self.parallel_mode == "column" else {"weight": 1}

    def forward(  # type: ignore[override]
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
        *,
        _run: Any = None,
    ) -> Any:
        """y, then the bias if it is not added, then the output of the norm if it was asked for.

        Args:
            inp: x.
            is_first_microbatch: not used: whether codes of a weight are stale is seen. None with `fuse_wgrad_accumulation`.
            fp8_output, fp8_grad: False; no other value is known yet.
        """
        self._check_call(is_first_microbatch, fp8_output=fp8_output, fp8_grad=fp8_grad)
        return self._outputs(inp, _run)

    def extra_repr(self) -> str:
        parallel = f", parallel_mode={self.parallel_mode}, tp_size={self.tp_size}" if self.tp_size > 1 else ""
        return f"{self.in_features}, {self.out_features}, bias={self.use_bias}, normalization={self.normalization}{parallel}"


class LayerNormMLP(_Module):
    """y = activation(norm(x) fc1_weight^T + fc1_bias) fc2_weight^T + fc2_bias, as one pipeline.

    The parameters are `layer_norm_weight`, `layer_norm_bias`, `fc1_weight`, `fc1_bias`, `fc2_weight` and `fc2_bias`; state dicts of
    TransformerEngine are read as they are.

    >>> import torch, tandem
    >>> mlp = tandem.LayerNormMLP(8, 16, activation="swiglu", normalization="RMSNorm", bias=False)
    >>> mlp(torch.randn(2, 8)).shape, {name: tuple(value.shape) for name, value in mlp.state_dict().items()}
    (torch.Size([2, 8]), {'layer_norm_weight': (8,), 'fc1_weight': (32, 8), 'fc2_weight': (8, 16)})
    """

    fc1_weight: torch.nn.Parameter
    fc1_bias: torch.nn.Parameter | None
    fc2_weight: torch.nn.Parameter
    fc2_bias: torch.nn.Parameter | None
    activation, set_parallel_mode = Fixed(), Fixed()

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
        """Makes a norm that neither scales nor shifts, two products whose weights are drawn, and biases of zeros.

        Args:
            hidden_size: size of the last dimension of x and y.
            ffn_hidden_size: size of the last dimension behind the activation, over all ranks.
            eps, sequence_parallel, fuse_wgrad_accumulation, tp_group, tp_size, normalization, params_dtype, device: as for `LayerNormLinear`.
            zero_centered_gamma, return_layernorm_output, return_layernorm_output_gathered: likewise.
            return_bias: whether `fc2_bias` is not added but returned, behind y.
            init_method, output_layer_init_method: draw the first and the second weight; None: as for `LayerNormLinear`.
            bias: whether there are biases.
            activation: an activation or gated unit of docs/ops.md; before a gated unit there are twice as many features.
            set_parallel_mode: whether the ranks of `tp_group` compute together: the first product column-parallel, the second row-parallel
                with its bias behind the sum over ranks. False: a rank computes with its part alone.
            seq_length, micro_batch_size, name: not used.
            activation_params: arguments of the class of the activation, such as {"limit": 5.0} for "clamped_swiglu".
            get_rng_state_tracker, symmetric_ar_type: None; no other value is known yet.
            checkpoint, delay_wgrad_compute, ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad: False, likewise.
        """
        op = self._get_name()
        at_default(op, get_rng_state_tracker=get_rng_state_tracker, symmetric_ar_type=symmetric_ar_type)
        at_default(op, False, ub_overlap_ag=ub_overlap_ag, ub_overlap_rs=ub_overlap_rs, ub_overlap_rs_dgrad=ub_overlap_rs_dgrad)
        at_default(op, False, ub_bulk_wgrad=ub_bulk_wgrad, ub_bulk_dgrad=ub_bulk_dgrad)
        at_default(op, False, delay_wgrad_compute=delay_wgrad_compute, checkpoint=checkpoint)
        families = {kind: signature_of(kind).family for kind in _C.op_names()}
        if families.get(activation) not in ("activation", "glu"):
            known = ", ".join(kind for kind, family in families.items() if family in ("activation", "glu"))
            raise ValueError(f"{op}: expected activation to be one of {known}, got {activation!r}. Name one of them.")
        _check_group(op, tp_group, tp_size)
        sequence_parallel = flag(op, "sequence_parallel", sequence_parallel)
        together = flag(op, "set_parallel_mode", set_parallel_mode) and tp_group is not None
        before, _, size = collectives(op, "column" if together else None, tp_group, sequence_parallel)
        _, after, _ = collectives(op, "row" if together else None, tp_group, sequence_parallel)
        size = tp_group.size() if tp_group is not None else size
        hidden = positive(op, "hidden_size", hidden_size)
        inner = share(op, "ffn_hidden_size", positive(op, "ffn_hidden_size", ffn_hidden_size), size)
        wide = 2 * inner if families[activation] == "glu" else inner

        def behind(into_main_grad: bool) -> Parts:
            made: dict[str, Any] = {"device": "meta", "dtype": params_dtype}
            first = BasicLinear(hidden, wide, accumulate_into_main_grad=into_main_grad, **made)
            second = BasicLinear(inner, hidden, accumulate_into_main_grad=into_main_grad, **made)
            first_bias: Parts = [(Bias(wide, **made), {"bias": "fc1_bias"})] if bias else []
            second_bias: Parts = [(Bias(hidden, **made), {"bias": "fc2_bias"})] if bias and not return_bias else []
            return [
                *[(first, {"weight": "fc1_weight"}), *first_bias, (class_of(activation)(**(activation_params or {})), {})],
                *[(second, {"weight": "fc2_weight"}), *[(part, {}) for part in after], *second_bias],
            ]

        torch.nn.Module.__init__(self)
        self.hidden_size, self.size_per_partition, self.activation = hidden, inner, activation
        self.set_parallel_mode, self.tp_size, self.sequence_parallel = together, size, sequence_parallel and size > 1
        self._build(
            hidden,
            normalization=normalization,
            eps=eps,
            zero_centered_gamma=zero_centered_gamma,
            bias=bias,
            return_bias=return_bias,
            return_layernorm_output=return_layernorm_output,
            return_layernorm_output_gathered=return_layernorm_output_gathered,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            inits={"fc1_weight": init_method, "fc2_weight": output_layer_init_method},
            before=before,
            behind=behind,
            result_bias=("fc2_bias", hidden),
            device=device,
            dtype=params_dtype,
        )

    def _sharded_dimensions(self) -> dict[str, int]:
        return {"fc1_weight": 0, "fc1_bias": 0, "fc2_weight": 1} if self.tp_size > 1 else {}

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None, *, _run: Any = None) -> Any:  # type: ignore[override]
        """y, then `fc2_bias` if it is not added, then the output of the norm if it was asked for.

        Args:
            inp: x.
            is_first_microbatch: as for `LayerNormLinear`.
        """
        self._check_call(is_first_microbatch)
        return self._outputs(inp, _run)

    def extra_repr(self) -> str:
        parallel = f", tp_size={self.tp_size}" if self.tp_size > 1 else ""
        sizes = f"{self.hidden_size}, {self.size_per_partition * self.tp_size}"
        return f"{sizes}, bias={self.use_bias}, normalization={self.normalization}, activation={self.activation}{parallel}"


def _check_group(op: str, group: Any, size: int) -> None:
    if group is None and size != 1:
        raise ValueError(f"{op}: expected the ranks as tp_group, as tp_size is {size}, got None. Pass the process group, or tp_size=1.")


for _class in (LayerNormLinear, LayerNormMLP):
    _class._library_forward = _class.forward  # so that containers take the parts into their pipelines

__all__: Sequence[str] = ["LayerNormLinear", "LayerNormMLP"]
