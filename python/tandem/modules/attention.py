"""`MultiheadAttention`: a norm and the projection to queries, keys and values as one pipeline, torch's attention, and the output projection."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from tandem import _C, ops
from tandem.arguments import Fixed, at_default, drawing, finite, flag, positive
from tandem.modules.base import GroupsInside, Init, check_one_value
from tandem.modules.inference import InferenceParams
from tandem.modules.layer_norm_linear import LayerNormLinear
from tandem.modules.linear import Linear
from tandem.modules.norm import LayerNorm, RMSNorm
from tandem.op_base.checkpoint import drop_extra_state
from tandem.quantized.weights import in_microbatch
from tandem.regions.checkpoint import checkpoint

Window = tuple[int, int]

_FORMATS = ("sbhd", "bshd")
_MASKS = _C.attn_mask_types
_OF_BOTH_PROJECTIONS = ("get_rng_state_tracker", "sequence_parallel", "fuse_wgrad_accumulation", "bias", "params_dtype", "device")
_QK_NORMS = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}


class RotaryPositionEmbedding(torch.nn.Module):
    """angle[p, i] = p / rotary_base^(2 i / dim) for position p and pair i of features: the angles of rotary position embedding.

    >>> import tandem
    >>> tandem.RotaryPositionEmbedding(64)(128).shape
    torch.Size([128, 1, 1, 64])
    """

    _place: torch.Tensor

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: int | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        """Stores the options. Each call computes its angles.

        Args:
            dim: features of a head.
            rotary_percent: the share of the features that is rotated; the first features are. With less than 1, "dim" in the formula is their number.
            seq_len_interpolation_factor: positions are divided by it, if `pretrained_max_position_embeddings` is given too; None: by 1.
            pretrained_max_position_embeddings: number of positions in training. Positions of a sequence longer than `seq_len_interpolation_factor`
                times as many are divided by length / this number, so that they stay in the range of training. None: no position is divided.
            rotary_base: base of the frequencies, above 0.
            interleaved: whether features 2 i and 2 i + 1 are a pair, rather than i and i + `dim` / 2.
        """
        super().__init__()
        op = self._get_name()
        rotated = int(positive(op, "dim", dim) * rotary_percent)
        if rotated % 2 or not 0 < rotated <= dim:
            raise ValueError(f"{op}: expected an even number of features to rotate, up to dim, got {rotated}. Change rotary_percent.")
        factor, trained = seq_len_interpolation_factor, pretrained_max_position_embeddings
        if factor is not None and not factor > 0:
            raise ValueError(f"{op}: expected seq_len_interpolation_factor > 0, got {factor!r}. Leave it out where positions are not divided.")
        if trained is not None:
            positive(op, "pretrained_max_position_embeddings", trained, "Give the number of positions that the model was trained with.")
        if not finite(op, "rotary_base", rotary_base) > 0:
            raise ValueError(f"{op}: expected rotary_base > 0, got {rotary_base!r}. Its powers divide positions.")
        self.seq_len_interpolation_factor, self.pretrained_max_position_embeddings = factor, trained
        self.rotary_base, self._rotated = rotary_base, rotated
        self.interleaved = flag(op, "interleaved", interleaved)
        self.register_buffer("_place", torch.empty(0), persistent=False)  # it moves with the model, so its device is the model's

    @property
    def inv_freq(self) -> torch.Tensor:
        """The frequency of each pair, float32 [rotated features / 2]. Each access computes it, so neither a model's cast nor the meta device changes it."""
        pairs = torch.arange(0, self._rotated, 2, dtype=torch.float32, device=self._place.device)
        return 1 / torch.pow(self.rotary_base, pairs / self._rotated)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        state_dict.pop(f"{prefix}inv_freq", None)  # TransformerEngine saves it; here it is computed from the options
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def forward(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        """The angles of positions `offset` to `offset + max_seq_len` - 1, float32 [max_seq_len, 1, 1, rotated features]."""
        positions = torch.arange(max_seq_len, device=self._place.device, dtype=torch.float32) + offset
        factor, trained = self.seq_len_interpolation_factor, self.pretrained_max_position_embeddings
        if factor is not None and trained is not None:
            positions = positions * min(1 / factor, trained / max(offset + max_seq_len, 1))
        angles = torch.outer(positions, self.inv_freq)
        both = torch.stack((angles, angles), -1).flatten(-2) if self.interleaved else torch.cat((angles, angles), -1)
        return both[:, None, None, :]


def apply_rotary_pos_emb(t: torch.Tensor, freqs: torch.Tensor, tensor_format: str = "sbhd", interleaved: bool = False) -> torch.Tensor:
    """(a cos - b sin, a sin + b cos) for each pair (a, b) of the first features of `t` and its angle. It computes in float32; the result is like `t`.

    Args:
        t: [sequence, batch, heads, features], or with "bshd" [batch, sequence, heads, features].
        freqs: angles [at least sequence, 1, 1, rotated features], as `RotaryPositionEmbedding` returns them. Other sizes raise ValueError.
        tensor_format: "sbhd" or "bshd".
        interleaved: which features are a pair, as for `RotaryPositionEmbedding`.
    """
    _check_format("apply_rotary_pos_emb", "tensor_format", tensor_format)
    length = t.shape[0] if tensor_format == "sbhd" else t.shape[1]
    if freqs.shape[0] < length or freqs.shape[-1] > t.shape[-1]:
        raise ValueError(
            f"apply_rotary_pos_emb: expected freqs of at least {length} positions and at most {t.shape[-1]} features, got {tuple(freqs.shape)}. "
            "Make them for the sequence."
        )
    if freqs.shape[-1] % 2:
        raise ValueError(f"apply_rotary_pos_emb: expected freqs of an even number of features, got {freqs.shape[-1]}. Features are turned in pairs.")
    angles = freqs[:length] if tensor_format == "sbhd" else freqs[:length].transpose(0, 1)
    turned, rest = t[..., : freqs.shape[-1]].float(), t[..., freqs.shape[-1] :]
    if interleaved:
        pairs = turned.unflatten(-1, (-1, 2))
        partner = torch.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2)
    else:
        first, second = turned.chunk(2, -1)
        partner = torch.cat((-second, first), -1)
    result = (turned * angles.cos() + partner * angles.sin()).to(t.dtype)
    return torch.cat((result, rest), -1) if rest.shape[-1] else result


class MultiheadAttention(GroupsInside, torch.nn.Module):
    """y = attention(norm(x) Wq^T, norm(x) Wk^T, norm(x) Wv^T) Wo^T, with torch's `scaled_dot_product_attention`. y has the shape of x.

    Submodules and parameters have TransformerEngine's names: `layernorm_qkv` (without a norm `qkv`) has `query_weight`, `key_weight` and
    `value_weight`, or with `fuse_qkv_params` one `weight`; the others are `proj`, `q_norm` and `k_norm`.

    >>> import torch, tandem
    >>> attention = tandem.MultiheadAttention(32, 4, num_gqa_groups=2, attention_dropout=0, bias=False)
    >>> attention(torch.randn(5, 2, 32)).shape, [*attention.state_dict()]
    (torch.Size([5, 2, 32]), ['qkv.query_weight', 'qkv.key_weight', 'qkv.value_weight', 'proj.weight'])
    """

    num_attention_heads, num_gqa_groups, hidden_size_per_attention_head = Fixed(), Fixed(), Fixed()
    hidden_size_q, hidden_size_kv = Fixed(), Fixed()

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: Window | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Any = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        qkv_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        rotary_pos_interleaved: bool = False,
        softmax_type: str = "vanilla",
    ) -> None:
        """Creates the projections and norms, and draws their weights.

        Args:
            hidden_size: features of x and y.
            num_attention_heads: heads of queries, over all ranks.
            kv_channels: features of a head; None: hidden_size / num_attention_heads.
            attention_dropout: probability, from 0 to 1, that in training an attention weight becomes zero.
            layernorm_epsilon, normalization, zero_centered_gamma: options of the norm, as for `LayerNormLinear`.
            init_method, output_layer_init_method: draw the weights of the first and of the output projection; None: as for `Linear`.
            layer_number: key of this layer in `InferenceParams`, which need one.
            attn_mask_type: "causal" and "causal_bottom_right": a query sees no later key, the last query aligned with the last key. "padding" and
                "arbitrary": a query sees the keys that `attention_mask` leaves. "padding_causal": both restrict. "no_mask": a query sees all keys.
            window_size: None or (-1, -1), with a causal mask also (-1, 0); other values raise NotImplementedError.
            tp_group, tp_size, sequence_parallel: with `set_parallel_mode`, as for `Linear`: the ranks share the heads.
            num_gqa_groups: heads of keys and of values; None: as many as heads of queries.
            fuse_wgrad_accumulation: as for `Linear`; it needs `fuse_qkv_params`.
            params_dtype, device: dtype and device of the parameters; None: torch's defaults.
            return_bias: whether a call returns the bias of the output projection after y instead of adding it.
            return_layernorm_output: with `input_layernorm`: whether a call returns the output of the norm too, as its last result.
            input_layernorm: whether a norm comes before the first projection.
            attention_type: "self"; other values raise NotImplementedError.
            set_parallel_mode: whether the ranks of `tp_group` compute together.
            fuse_qkv_params: whether queries, keys and values have one weight.
            qkv_weight_interleaved: whether the rows of that weight are ordered by group of heads, rather than all queries, all keys, all values.
            bias: whether the projections have biases.
            qkv_format: "sbhd": x is [sequence, batch, features]; "bshd": [batch, sequence, features].
            qk_norm_type: norm over the features of each head of queries and keys: "RMSNorm", "LayerNorm", "L2Normalization" or None.
            qk_norm_eps: `eps` of the norms of queries and keys.
            qk_norm_before_rope: whether these norms come before rotary position embedding, rather than after it.
            rotary_pos_interleaved: which features are a pair, as for `RotaryPositionEmbedding`.
            name: stored as an attribute.
            seq_length, micro_batch_size: not used.
            get_rng_state_tracker: as for `Linear`. Without `sequence_parallel`, attention dropout is drawn in its `fork()` too.
            ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad: False; other values raise NotImplementedError.
            softmax_type: "vanilla"; other values raise NotImplementedError.
        """
        given = locals()
        super().__init__()
        op = self._get_name()
        check_one_value(op, given)
        hidden, heads = positive(op, "hidden_size", hidden_size), positive(op, "num_attention_heads", num_attention_heads, "Give the heads of queries.")
        groups = None if num_gqa_groups is None else positive(op, "num_gqa_groups", num_gqa_groups)
        channels = None if kv_channels is None else positive(op, "kv_channels", kv_channels)
        together = flag(op, "set_parallel_mode", set_parallel_mode) and tp_group is not None
        ranks = tp_group.size() if together else 1
        self.channels, self.num_heads, self.num_groups = _C.attention_heads(op, hidden, heads, groups, channels, ranks)
        _check_format(op, "qkv_format", qkv_format)
        _check_mask(op, attn_mask_type)
        check_window(op, window_size, attn_mask_type)
        groups = heads if groups is None else groups
        self.num_attention_heads, self.num_gqa_groups, self.hidden_size_per_attention_head = heads, groups, self.channels
        self.hidden_size_q, self.hidden_size_kv = heads * self.channels, groups * self.channels
        self.window_size, self.name = window_size, name
        self.qkv_format, self.attn_mask_type, self.layer_number = qkv_format, attn_mask_type, layer_number
        self.attention_dropout = finite(op, "attention_dropout", attention_dropout)
        if not 0 <= self.attention_dropout <= 1:
            raise ValueError(f"{op}: expected attention_dropout between 0 and 1, got {attention_dropout!r}. Give a probability.")
        self.dropout_tracker = None if sequence_parallel else get_rng_state_tracker
        self.return_bias, self.input_layernorm = flag(op, "return_bias", return_bias), flag(op, "input_layernorm", input_layernorm)
        self.return_layernorm_output = flag(op, "return_layernorm_output", return_layernorm_output) and self.input_layernorm
        self.is_interleaved = flag(op, "fuse_qkv_params", fuse_qkv_params) and flag(op, "qkv_weight_interleaved", qkv_weight_interleaved)
        self.qk_norm_before_rope = flag(op, "qk_norm_before_rope", qk_norm_before_rope)
        self.rotary_pos_interleaved = flag(op, "rotary_pos_interleaved", rotary_pos_interleaved)
        shared: dict[str, Any] = {name: given[name] for name in _OF_BOTH_PROJECTIONS} | {"tp_group": tp_group if together else None, "tp_size": ranks}
        query, key = ranks * self.num_heads * self.channels, ranks * self.num_groups * self.channels
        first: dict[str, Any] = {
            **shared,
            "init_method": init_method,
            "parallel_mode": "column" if together else None,
            "parameters_split": None if fuse_qkv_params else {"query": query, "key": key, "value": key},
        }
        if self.input_layernorm:
            self.layernorm_qkv = LayerNormLinear(
                hidden_size,
                query + 2 * key,
                eps=layernorm_epsilon,
                normalization=normalization,
                zero_centered_gamma=zero_centered_gamma,
                return_layernorm_output=return_layernorm_output,
                **first,
            )
        else:
            self.qkv = Linear(hidden_size, query + 2 * key, **first)
        self.q_norm, self.k_norm = [self._norm_of_heads(qk_norm_type, qk_norm_eps, params_dtype, device) for _ in range(2)]
        self.proj = Linear(
            query,
            hidden_size,
            init_method=output_layer_init_method,
            parallel_mode="row" if together else None,
            return_bias=return_bias,
            # Without dropout the attention keeps its result for its own backward, so keeping this x costs no memory.
            save_original_input=not attention_dropout,
            **shared,
        )

    def _norm_of_heads(
        self, kind: str | None, eps: float, dtype: torch.dtype | None, device: torch.device | str | None
    ) -> torch.nn.Module | None:
        if kind is None:
            return None
        if kind == "L2Normalization":
            return ops.L2Normalization(eps=eps)
        if kind not in _QK_NORMS:
            op = self._get_name()
            raise ValueError(f'{op}: expected qk_norm_type None, "RMSNorm", "LayerNorm" or "L2Normalization", got {kind!r}. Name one of them.')
        return _QK_NORMS[kind](self.channels, eps=eps, params_dtype=dtype, device=device)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        drop_extra_state(state_dict, f"{prefix}core_attention._extra_state")  # TransformerEngine writes this entry for an attention without parameters
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _heads(self, mixed: torch.Tensor) -> list[torch.Tensor]:
        """The queries, keys and values in the projection's result, each [.., .., heads, features]."""
        per_group = self.num_heads // self.num_groups
        if self.is_interleaved:
            parts = mixed.unflatten(-1, (self.num_groups, per_group + 2, self.channels)).split([per_group, 1, 1], -2)
            return [part.flatten(-3, -2) for part in parts]
        if per_group == 1:  # equal sizes: one view and one unbind instead of a split and three views
            return list(mixed.unflatten(-1, (3, self.num_heads, self.channels)).unbind(-3))
        query, key = self.num_heads * self.channels, self.num_groups * self.channels
        return [part.unflatten(-1, (-1, self.channels)) for part in mixed.split([query, key, key], -1)]

    def _normed(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.q_norm is None or self.k_norm is None:
            return query, key
        return self.q_norm(query), self.k_norm(key)

    def _rotated(self, query: torch.Tensor, key: torch.Tensor, rotary_pos_emb: Any, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
        if rotary_pos_emb is None:
            return query, key
        of_both = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb, rotary_pos_emb)
        if len(of_both) != 2 or not all(isinstance(each, torch.Tensor) for each in of_both):
            raise TypeError(
                f"{self._get_name()}: expected rotary_pos_emb to be a tensor of angles, or a tuple of those of queries and of keys, got "
                f"{type(rotary_pos_emb).__name__}. Pass what RotaryPositionEmbedding gives for the length."
            )
        turn = lambda t, freqs: apply_rotary_pos_emb(t, freqs[offset:], self.qkv_format, self.rotary_pos_interleaved)  # noqa: E731
        return turn(query, of_both[0]), turn(key, of_both[1])

    def context(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: str | None = None,
        rotary_pos_emb: Any = None,
        inference_params: InferenceParams | None = None,
        checkpoint_core_attention: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The result of the attention, with the heads side by side, and with `return_layernorm_output` the output of the norm, else None."""
        mask_type = attn_mask_type or self.attn_mask_type
        self._check_call(attention_mask, mask_type, inference_params)
        if hidden_states.dim() != 3:
            sizes = "[sequence, batch, hidden]" if self.qkv_format == "sbhd" else "[batch, sequence, hidden]"
            raise ValueError(f"{self._get_name()}: expected hidden_states {sizes}, got {list(hidden_states.shape)}. Reshape it, or change qkv_format.")
        again = flag(self._get_name(), "checkpoint_core_attention", checkpoint_core_attention)
        outputs = self._modules["layernorm_qkv" if self.input_layernorm else "qkv"](hidden_states)  # type: ignore[misc]
        mixed, normed = outputs if isinstance(outputs, tuple) else (outputs, None)
        is_sbhd = self.qkv_format == "sbhd"
        offset = 0 if inference_params is None else inference_params.sequence_len_offset
        if attention_mask is not None:
            length, batch = mixed.shape[:2] if is_sbhd else (mixed.shape[1], mixed.shape[0])
            attention_mask = self._seen_or_added(attention_mask, (batch, self.num_heads, length, offset + length), mixed)
        is_one_view = self.num_heads == self.num_groups and not self.is_interleaved
        if is_one_view and rotary_pos_emb is None and inference_params is None and self.q_norm is None:  # this saves three views and their gradients
            heads = mixed.unflatten(-1, (3, self.num_heads, self.channels))
            by_head = [*heads.permute(*((2, 1, 3, 0, 4) if is_sbhd else (2, 0, 3, 1, 4)))]
        else:
            query, key, value = self._heads(mixed)
            if self.qk_norm_before_rope:
                query, key = self._normed(query, key)
            query, key = self._rotated(query, key, rotary_pos_emb, offset)
            if not self.qk_norm_before_rope:
                query, key = self._normed(query, key)
            if inference_params is not None:
                key, value = self._cached(key, value, inference_params)
            by_head = [t.permute(1, 2, 0, 3) if is_sbhd else t.transpose(1, 2) for t in (query, key, value)]
        y = self._attend(by_head, attention_mask, mask_type, again)
        return (y.permute(2, 0, 1, 3) if is_sbhd else y.transpose(1, 2)).flatten(-2), normed

    def _calls_of_parts(self, x: torch.Tensor, *arguments: Any) -> Iterator[tuple[Any, ...]]:
        """The pipelines and the arguments of their calls, for `verify`."""
        yield (self.layernorm_qkv if self.input_layernorm else self.qkv), x
        yield self.proj, self.context(x, *arguments)[0].detach()

    def _cached(self, key: torch.Tensor, value: torch.Tensor, params: InferenceParams) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.layer_number is not None
        if self.qkv_format == "sbhd":
            return params.step(self.layer_number, key, value, self)
        key, value = params.step(self.layer_number, key.transpose(0, 1), value.transpose(0, 1), self)
        return key.transpose(0, 1), value.transpose(0, 1)

    def _check_call(self, mask: Any, mask_type: str, params: InferenceParams | None) -> None:
        op = self._get_name()
        _check_mask(op, mask_type)
        if params is not None and not isinstance(params, InferenceParams):
            raise TypeError(f"{op}: expected inference_params to be tandem.InferenceParams, got {type(params).__name__}. Make them for the sequence.")
        if params is not None and self.layer_number is None:
            raise ValueError(f"{op}: expected layer_number where inference_params are given, got None. Build each layer with its own.")
        if mask is None and (mask_type.startswith("padding") or mask_type == "arbitrary"):
            raise ValueError(f"{op}: expected an attention_mask with the mask type {mask_type!r}, got none. True in it leaves a position out.")
        if mask is not None and mask_type == "no_mask":
            raise ValueError(f'{op}: expected no attention_mask with the mask type "no_mask", got one. Call with attn_mask_type="arbitrary".')
        if mask is not None and not (isinstance(mask, torch.Tensor) and (mask.dtype is torch.bool or mask.is_floating_point())):
            got = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise TypeError(
                f"{op}: expected attention_mask to be a tensor of booleans, or of floating-point numbers that are added to the scores, got {got}. "
                "Pass mask.bool() where 1 leaves a position out, mask == 0 where 1 keeps it."
            )

    def _attend(self, by_head: list[torch.Tensor], mask: torch.Tensor | None, mask_type: str, again: bool) -> torch.Tensor:
        query, key, value = by_head
        rows, columns = query.shape[-2], key.shape[-2]
        is_causal = "causal" in mask_type
        if is_causal and (mask is not None or rows != columns):  # torch's own causal mask aligns the first positions, not the last
            causal = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril(columns - rows)
            if mask is None:
                mask = causal
            else:
                mask = mask & causal if mask.dtype is torch.bool else mask.masked_fill(~causal, -torch.inf)
            is_causal = False
        dropout = self.attention_dropout if self.training else 0.0
        tracker = self.dropout_tracker if dropout else None

        def core(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            with drawing(tracker):
                return F.scaled_dot_product_attention(
                    query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, enable_gqa=self.num_heads != self.num_groups
                )

        if not again:
            return core(query, key, value, mask)
        y: torch.Tensor = checkpoint(core, query, key, value, mask, get_rng_state_tracker=tracker, preserve_rng_state=bool(dropout))
        return y

    def _seen_or_added(self, mask: torch.Tensor, sizes: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """The mask as torch's attention reads it: booleans with True where a key is seen, or numbers that are added to the scores."""
        if mask.dim() > 4 or any(own not in (1, size) for own, size in zip(reversed(mask.shape), reversed(sizes), strict=False)):
            raise ValueError(
                f"{self._get_name()}: expected attention_mask that broadcasts to [batch, heads, positions, positions of keys] = {list(sizes)}, got "
                f"{list(mask.shape)}. Reshape it; positions of keys are those of earlier calls too."
            )
        if mask.device != like.device:  # torch's attention does not check it, and would read invalid memory
            raise ValueError(f"{self._get_name()}: expected attention_mask on {like.device}, where x lies, got {mask.device}. Move it there.")
        mask = mask[(None,) * (4 - mask.dim())]
        return ~mask if mask.dtype is torch.bool else mask.to(like.dtype)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_output: torch.Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: Window | None = None,
        *,
        rotary_pos_emb: Any = None,
        inference_params: InferenceParams | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        **unused: Any,
    ) -> Any:
        """y, then with `return_bias` the bias of the output projection, then with `return_layernorm_output` the output of the norm.

        Args:
            hidden_states: x, [sequence, batch, hidden_size] or, with `qkv_format` "bshd", [batch, sequence, hidden_size].
            attention_mask: booleans, with True where a query does not see a key, or numbers that are added to the scores. It broadcasts to [batch,
                heads, positions, positions of keys], earlier positions of `inference_params` among the keys. A causal type hides later keys too.
            attn_mask_type: overrides the constructor's `attn_mask_type` for this call; None: the constructor's counts.
            window_size: as for the constructor.
            rotary_pos_emb: angles of `RotaryPositionEmbedding` for queries and keys, or a tuple of angles for queries and angles for keys.
            inference_params: cache of the keys and values of earlier positions. It needs `layer_number`.
            is_first_microbatch: as for `Linear`.
            checkpoint_core_attention: whether backward recomputes the attention between the projections instead of keeping what it needs.
            encoder_output: None; other values raise NotImplementedError.
            unused: the other arguments of TransformerEngine at their defaults; other values raise NotImplementedError.
        """
        if unused or encoder_output is not None:
            check_unused(self._get_name(), encoder_output=encoder_output, **unused)
        check_window(self._get_name(), self.window_size if window_size is None else window_size, attn_mask_type or self.attn_mask_type)
        with in_microbatch(is_first_microbatch):
            context, normed = self.context(
                hidden_states, attention_mask, attn_mask_type, rotary_pos_emb, inference_params, checkpoint_core_attention
            )
            outputs = self.proj(context)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        if normed is not None:
            outputs = (*outputs, normed)
        return outputs if len(outputs) > 1 else outputs[0]


_UNUSED = {  # further arguments of TransformerEngine's forward, with their defaults
    **dict.fromkeys(("encoder_output", "enc_dec_attn_mask", "enc_dec_attn_mask_type", "enc_dec_window_size")),
    **dict.fromkeys(("core_attention_bias", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_kv", "pad_between_seqs")),
    "core_attention_bias_type": "no_bias",
    "fast_zero_fill": True,
}


def check_unused(op: str, **arguments: Any) -> None:
    """Raises TypeError for an argument that TransformerEngine does not have, and NotImplementedError for one that is not at its default."""
    for name, value in arguments.items():
        if name not in _UNUSED:
            raise TypeError(f"{op}: expected arguments of its forward, got an unexpected keyword argument {name!r}. Leave it out.")
        at_default(op, _UNUSED[name], **{name: value})


def _check_format(op: str, name: str, value: str) -> None:
    if value not in _FORMATS:
        raise ValueError(f'{op}: expected {name} "sbhd" or "bshd", got {value!r}. Say which dimension comes first.')


def _check_mask(op: str, mask_type: str) -> None:
    if mask_type not in _MASKS:
        raise ValueError(f"{op}: expected attn_mask_type to be one of {', '.join(_MASKS)}, got {mask_type!r}. Name one of them.")


def check_window(op: str, window: Window | None, mask_type: str) -> None:
    """Raises NotImplementedError for a window that hides more keys than the mask type does."""
    allowed = (None, (-1, -1), (-1, 0)) if "causal" in mask_type else (None, (-1, -1))
    if (None if window is None else tuple(window)) not in allowed:
        raise NotImplementedError(f"{op}: expected window_size {allowed[-1]} or None, got {window}. Leave positions out with attention_mask.")
