"""`TransformerLayer`: attention and MLP with their residuals. All that follows the attention's result is one pipeline."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from tandem import _C, ops
from tandem.arguments import Fixed, Of, flag
from tandem.modules.attention import MultiheadAttention, Window, check_unused, check_window
from tandem.modules.base import GroupsInside, Init, check_one_value
from tandem.modules.inference import InferenceParams
from tandem.modules.layer_norm_mlp import LayerNormMLP
from tandem.modules.norm import LayerNorm, RMSNorm
from tandem.op_base import hooks
from tandem.quantized.weights import in_microbatch


_FORWARD = MultiheadAttention.forward
# The arguments with one supported value that neither the attention nor the MLP checks.
_OF_LAYER = ("parallel_attention_mlp", "apply_residual_connection_post_layernorm", "layer_type", "drop_path_rate", "ub_tp_comm_overlap")


def _passed_on(to: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Those arguments of the layer that the constructor of its attention or MLP takes by the same name. The `ub_` options are not among them: they have an
    effect with `ub_tp_comm_overlap` only, which is refused."""
    return {name: given[name] for name in inspect.signature(to).parameters if name in given and name != "name" and not name.startswith("ub_")}


class Tail:
    """The pipeline of all that follows the attention. It is no submodule of the layer, as its parts are submodules already."""

    def __init__(
        self, attention: Any, proj: torch.nn.Module | None, mlp: torch.nn.Module, last: torch.nn.Module | None, dropout: float
    ) -> None:
        """Builds the pipeline.

        Args:
            attention: the attention before it.
            proj: the output projection of the attention; None: the attention is called as a module, which calls its projection itself.
            mlp: the MLP, which follows the first residual sum.
            last: the norm at the end; None: there is none.
            dropout: probability that an element becomes zero before it is added to a residual.
        """
        self.attention, self.proj, self.made_of = attention, proj, (attention, proj, mlp, last, dropout)
        dropped = [ops.Dropout(float(dropout)) for _ in range(2)] if dropout else []
        fork, join = ops.MakeExtraOutput(), ops.AddExtraInput()
        fork.set_extra_output_channel(0, "residual", output_to_caller=False)
        join.set_extra_input_channel(0, "residual")
        first = [] if proj is None else [proj]
        behind = [] if last is None else [last]
        self.pipeline = ops.Sequential(*first, *dropped[:1], ops.AddExtraInput(), fork, mlp, *dropped[1:], join, *behind)
        self.own = (self.pipeline, *dropped)  # the modules that no other module has, and whose training flag this pipeline sets


class TransformerLayer(GroupsInside, torch.nn.Module):
    """h = x + dropout(attention(norm(x))), y = h + dropout(mlp(norm(h))). y has the shape of x.

    The layer is two pipelines with torch's attention between them. The first is the norm and the projection to queries, keys and values; the
    second is the output projection, dropout, residual, norm, MLP, dropout and residual. Parameters have TransformerEngine's names.

    >>> import torch, tandem
    >>> layer = tandem.TransformerLayer(32, 64, 4, normalization="RMSNorm", activation="swiglu", bias=False, num_gqa_groups=2)
    >>> layer(torch.randn(5, 2, 32)).shape
    torch.Size([5, 2, 32])
    """

    layer_type, output_layernorm = Fixed(), Fixed()
    _tail: Tail | None = None  # built of the submodules and options that the last call found

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: Window | None = None,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_window_size: Window | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: Any = None,
        fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        ub_tp_comm_overlap: bool = False,
        ub_overlap_ag: bool = True,
        ub_overlap_rs: bool = True,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = True,
        ub_bulk_wgrad: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: dict[str, Any] | None = None,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        attn_input_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
    ) -> None:
        """Creates the attention and the MLP, and draws their weights.

        Args:
            hidden_size: features of x and y.
            ffn_hidden_size: features of the activation's result in the MLP, over all ranks.
            num_attention_heads, num_gqa_groups, kv_channels, attention_dropout, layer_number: as for `MultiheadAttention`.
            layernorm_epsilon, normalization, zero_centered_gamma: options of both norms, as for `LayerNormLinear`.
            hidden_dropout: probability that in training an element becomes zero before it is added to the residual.
            init_method, output_layer_init_method: the first draws the weights before attention and activation, the second the weights after them.
            self_attn_mask_type, window_size: as `attn_mask_type` and `window_size` for `MultiheadAttention`.
            tp_group, tp_size, set_parallel_mode, sequence_parallel: as for `LayerNormMLP`.
            params_dtype, device: dtype and device of the parameters; None: torch's defaults.
            fuse_wgrad_accumulation, fuse_qkv_params, qkv_weight_interleaved: as for `MultiheadAttention`.
            rotary_pos_interleaved, qk_norm_type, qk_norm_eps, qk_norm_before_rope: as for `MultiheadAttention`.
            output_layernorm: whether a norm is the last step, and the attention has none before it.
            bias: whether the products of attention and MLP have biases.
            activation, activation_params: as for `LayerNormMLP`.
            attn_input_format: "sbhd": x is [sequence, batch, features]; "bshd": [batch, sequence, features].
            name: stored as an attribute.
            seq_length, micro_batch_size, enc_dec_attn_mask_type, enc_dec_window_size: not used.
            layer_type: "encoder"; other values raise NotImplementedError.
            softmax_type: "vanilla"; other values raise NotImplementedError.
            parallel_attention_mlp, ub_tp_comm_overlap: False; other values raise NotImplementedError.
            ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad: not used, as they configure `ub_tp_comm_overlap`.
            get_rng_state_tracker: as for `MultiheadAttention`.
            apply_residual_connection_post_layernorm: False; other values raise NotImplementedError.
            drop_path_rate: 0; other values raise NotImplementedError.
        """
        given = locals()
        super().__init__()
        op = self._get_name()
        check_one_value(op, {name: given[name] for name in _OF_LAYER})
        self.self_attention = MultiheadAttention(
            attn_mask_type=self_attn_mask_type,
            qkv_format=attn_input_format,
            input_layernorm=not output_layernorm,
            **_passed_on(MultiheadAttention, given),
        )
        self.layernorm_mlp = LayerNormMLP(eps=layernorm_epsilon, **_passed_on(LayerNormMLP, given))
        if output_layernorm:
            norm = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}[normalization]
            self.layernorm = norm(
                hidden_size, layernorm_epsilon, sequence_parallel, params_dtype, zero_centered_gamma=zero_centered_gamma, device=device
            )
        self.hidden_dropout, self.name = hidden_dropout, name
        self.layer_type, self.output_layernorm = layer_type, flag(op, "output_layernorm", output_layernorm)
        self.get_rng_state_tracker = get_rng_state_tracker
        self._tail_now()  # the constructor raises what building the pipeline raises, not the first call

    def _tail_now(self) -> Tail:
        """The pipeline after the attention for the current submodules and options. It is rebuilt if one of them was replaced."""
        modules = self._modules
        attention: Any = modules["self_attention"]
        is_split = (
            attention.__class__.forward is _FORWARD
            and "forward" not in attention.__dict__
            and attention._compiled_call_impl is None
            and not hooks.any_of(attention)
            and not hooks.any_of_all_modules()
        )
        proj = attention._modules["proj"] if is_split else None
        made_of: tuple[Any, ...] = (attention, proj, modules["layernorm_mlp"], modules.get("layernorm"), self.hidden_dropout)
        tail = self._tail
        if tail is None or not all(map(operator.is_, tail.made_of, made_of)):
            tail = self.__dict__["_tail"] = Tail(*made_of)
        if tail.pipeline.training is not self.training:
            for module in tail.own:
                module.training = self.training
        return tail

    _traced_tail = property(_C.native_getter(_tail_now))  # Dynamo takes the result without tracing `_tail_now`

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_tail"}

    def explain(self, format: str = "text") -> str:
        """A report of the plans of the pipeline after the attention, as `tandem.explain` returns it. `self_attention.layernorm_qkv` reports the first one."""
        text: str = self._tail_now().pipeline.explain(format)
        return text

    layer_number = Of("self_attention", "`layer_number` of the attention.")
    self_attn_mask_type = Of("self_attention", "`attn_mask_type` of the attention.", "attn_mask_type")
    window_size = Of("self_attention", "`window_size` of the attention.")

    @property
    def attn_input_format(self) -> str:
        """`qkv_format` of the attention."""
        form: str = self.self_attention.qkv_format
        return form

    def _hidden_containers(self) -> dict[str, ops.Sequential]:
        """The pipeline that is no submodule, by its name in the report of `explain`."""
        return {"behind the attention": self._tail_now().pipeline}

    def _calls_of_parts(self, x: torch.Tensor, *arguments: Any) -> Iterator[tuple[Any, ...]]:
        """The pipelines and the arguments of their calls, for `verify`."""
        tail = self._tail_now()
        if tail.proj is None:
            yield tail.pipeline, tail.attention(x, *arguments).detach(), x
            return
        first, _ = tail.attention._calls_of_parts(x, *arguments)
        yield first
        yield tail.pipeline, tail.attention.context(x, *arguments)[0].detach(), x

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        self_attn_mask_type: str | None = None,
        window_size: Window | None = None,
        *,
        is_first_microbatch: bool | None = None,
        rotary_pos_emb: Any = None,
        inference_params: InferenceParams | None = None,
        checkpoint_core_attention: bool = False,
        **unused: Any,
    ) -> torch.Tensor:
        """y, of the shape of x.

        Args:
            hidden_states: x, [sequence, batch, hidden_size] or, with `attn_input_format` "bshd", [batch, sequence, hidden_size].
            attention_mask, rotary_pos_emb, inference_params, is_first_microbatch, checkpoint_core_attention: as for `MultiheadAttention`.
            self_attn_mask_type, window_size: override the constructor's options for this call; None: the constructor's count.
            unused: the other arguments of TransformerEngine at their defaults; other values raise NotImplementedError.
        """
        if unused:
            check_unused(self._get_name(), **unused)
        with in_microbatch(is_first_microbatch):
            tail = self._traced_tail if is_dynamo_compiling() else self._tail_now()
            attention = tail.attention
            if tail.proj is not None:
                check_window(self._get_name(), attention.window_size if window_size is None else window_size, self_attn_mask_type or attention.attn_mask_type)
                context, _ = attention.context(
                    hidden_states, attention_mask, self_attn_mask_type, rotary_pos_emb, inference_params, checkpoint_core_attention
                )
            else:
                context = attention(
                    hidden_states,
                    attention_mask,
                    attn_mask_type=self_attn_mask_type,
                    window_size=window_size,
                    rotary_pos_emb=rotary_pos_emb,
                    inference_params=inference_params,
                    checkpoint_core_attention=checkpoint_core_attention,
                )
                if not isinstance(context, torch.Tensor):
                    raise TypeError(
                        f"{self._get_name()}: expected self_attention to return y alone, got {type(context).__name__}. Build it with "
                        "return_bias=False and return_layernorm_output=False."
                    )
            y: torch.Tensor = tail.pipeline(context, hidden_states)
            return y
