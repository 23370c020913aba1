"""`TransformerLayer` and `MultiheadAttention` against their formulas in float64: heads, rotary embedding, norms of heads, masks, a cache."""

import contextlib
import copy
import gc
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

import tandem

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

HIDDEN, WIDE, HEADS, LENGTH, BATCH = 32, 48, 4, 7, 2
LLAMA = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False, "num_gqa_groups": 2}
OPTIONS = {
    "gpt": {},
    "llama": LLAMA,
    "channels": {"kv_channels": 6},
    "qk RMSNorm": {**LLAMA, "qk_norm_type": "RMSNorm"},
    "qk L2 before": {"qk_norm_type": "L2Normalization", "qk_norm_before_rope": True},
    "interleaved": {"rotary_pos_interleaved": True, "zero_centered_gamma": True},
    "fused qkv": {"fuse_qkv_params": True, "num_gqa_groups": 2},
    "fused qkv not interleaved": {"fuse_qkv_params": True, "qkv_weight_interleaved": False},
    "post norm": {"output_layernorm": True},
}


def layer(dtype=torch.float64, **options):
    torch.manual_seed(3)
    options = {"hidden_dropout": 0, "attention_dropout": 0, "params_dtype": dtype, **options}
    made = tandem.TransformerLayer(HIDDEN, WIDE, HEADS, **options)
    with torch.no_grad():
        for param in made.parameters():
            param.normal_(std=0.3)
    return made


def norm(x, weight, bias, kind, zero_centered, eps=1e-5):
    weight = weight + 1 if zero_centered else weight
    if kind == "RMSNorm":
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rotated(x, angles, interleaved):
    """Each pair of features is a complex number, times e^(i angle)."""
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).transpose(-1, -2)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)[:, None, None]
    result = torch.view_as_real(turned)
    return (result if interleaved else result.transpose(-1, -2)).flatten(-2)


def attention(q, k, v, seen):
    """Heads one by one, [sequence, batch, heads, features]."""
    share = q.shape[2] // k.shape[2]
    out = torch.zeros_like(q)
    for b in range(q.shape[1]):
        for h in range(q.shape[2]):
            scores = q[:, b, h] @ k[:, b, h // share].t() / math.sqrt(q.shape[-1])
            out[:, b, h] = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v[:, b, h // share]
    return out.flatten(-2)


def expected(x, p, *, angles=None, seen=None, num_gqa_groups=HEADS, kv_channels=HIDDEN // HEADS, normalization="LayerNorm", activation="gelu",
             zero_centered_gamma=False, qk_norm_type=None, qk_norm_before_rope=False, rotary_pos_interleaved=False, fuse_qkv_params=False,
             qkv_weight_interleaved=True, output_layernorm=False, bias=True):  # fmt: skip
    get = lambda name: p.get(name, torch.zeros((), dtype=x.dtype))  # noqa: E731
    normed = lambda x, at: norm(x, get(f"{at}layer_norm_weight"), p.get(f"{at}layer_norm_bias"), normalization, zero_centered_gamma)  # noqa: E731
    at = "self_attention.qkv." if output_layernorm else "self_attention.layernorm_qkv."
    inside = x if output_layernorm else normed(x, at)
    if fuse_qkv_params:
        weight, own_bias = p[f"{at}weight"], p[f"{at}bias"]
        mixed = inside @ weight.t() + own_bias
        if qkv_weight_interleaved:
            groups = mixed.unflatten(-1, (num_gqa_groups, HEADS // num_gqa_groups + 2, kv_channels))
            q, k, v = groups[..., :-2, :].flatten(-3), groups[..., -2, :].flatten(-2), groups[..., -1, :].flatten(-2)
        else:
            q, k, v = mixed.split([HEADS * kv_channels, num_gqa_groups * kv_channels, num_gqa_groups * kv_channels], -1)
    else:
        q, k, v = (inside @ p[f"{at}{name}_weight"].t() + get(f"{at}{name}_bias") for name in ("query", "key", "value"))
    q, k, v = (t.unflatten(-1, (-1, kv_channels)) for t in (q, k, v))

    def per_head(q, k):
        if qk_norm_type == "RMSNorm":
            return [norm(t, p[f"self_attention.{n}_norm.weight"], None, "RMSNorm", False, 1e-6) for t, n in ((q, "q"), (k, "k"))]
        if qk_norm_type == "L2Normalization":
            return [t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k)]
        return [q, k]

    if qk_norm_before_rope:
        q, k = per_head(q, k)
    if angles is not None:
        q, k = rotated(q, angles, rotary_pos_interleaved), rotated(k, angles, rotary_pos_interleaved)
    if not qk_norm_before_rope:
        q, k = per_head(q, k)
    seen = torch.ones(len(x), len(x), dtype=torch.bool).tril() if seen is None else seen
    h = x + attention(q, k, v, seen) @ p["self_attention.proj.weight"].t() + get("self_attention.proj.bias")
    z = normed(h, "layernorm_mlp.") @ p["layernorm_mlp.fc1_weight"].t() + get("layernorm_mlp.fc1_bias")
    a, b = z.chunk(2, -1)
    act = F.silu(a) * b if activation == "swiglu" else F.gelu(z, approximate="tanh")
    y = h + act @ p["layernorm_mlp.fc2_weight"].t() + get("layernorm_mlp.fc2_bias")
    return norm(y, p["layernorm.weight"], p["layernorm.bias"], normalization, zero_centered_gamma) if output_layernorm else y


@pytest.mark.parametrize("rotary", [False, True], ids=["", "rotary"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_layer_is_its_formula(options, rotary):
    made = layer(**options)
    x = torch.randn(LENGTH, BATCH, HIDDEN, dtype=torch.float64, requires_grad=True)
    channels = options.get("kv_channels", HIDDEN // HEADS)
    freqs, angles = None, None
    if rotary:
        freqs = tandem.RotaryPositionEmbedding(channels, interleaved=options.get("rotary_pos_interleaved", False))(LENGTH)
        angles = torch.outer(torch.arange(LENGTH).double(), 10000.0 ** -(torch.arange(0, channels, 2).double() / channels))
    named = dict(made.named_parameters())
    grad = torch.randn(LENGTH, BATCH, HIDDEN, dtype=torch.float64)
    actual = made(x, rotary_pos_emb=freqs)
    reference = expected(x, named, angles=angles, **options)
    tolerance = {"atol": 2e-5, "rtol": 2e-5} if rotary else {"atol": 1e-10, "rtol": 1e-9}  # angles are float32
    assert_close(actual, reference, **tolerance)
    operands = [x, *named.values()]
    for name, a, b in zip(["x", *named], torch.autograd.grad(actual, operands, grad), torch.autograd.grad(reference, operands, grad), strict=True):
        assert_close(a, b, atol=1e-3 if rotary else 1e-9, rtol=1e-3 if rotary else 1e-8, msg=lambda text, name=name: f"{name}: {text}")


def test_from_the_attention_on_it_is_one_pipeline():
    made = layer(torch.float32, hidden_dropout=0.1, **LLAMA)
    made(torch.randn(LENGTH, BATCH, HIDDEN, requires_grad=True)).sum().backward()
    text = made.explain()
    for fusion in ("made    dropout_add", "made    linear_glu"):
        assert fusion in text
    assert "add_rms_norm" in text
    made.eval()
    x = torch.randn(LENGTH, BATCH, HIDDEN)
    with torch.no_grad():
        assert torch.equal(made(x), made(x)), "no dropout in evaluation"
        made.train()
        assert not torch.equal(made(x), made(x))


def test_names_are_those_of_transformer_engine():
    assert [*layer(**LLAMA, qk_norm_type="RMSNorm").state_dict()] == [
        "self_attention.layernorm_qkv.layer_norm_weight",
        "self_attention.layernorm_qkv.query_weight",
        "self_attention.layernorm_qkv.key_weight",
        "self_attention.layernorm_qkv.value_weight",
        "self_attention.q_norm.weight",
        "self_attention.k_norm.weight",
        "self_attention.proj.weight",
        "layernorm_mlp.layer_norm_weight",
        "layernorm_mlp.fc1_weight",
        "layernorm_mlp.fc2_weight",
    ]


def test_which_dimension_comes_first():
    first, second = layer(), layer(attn_input_format="bshd")
    x = torch.randn(LENGTH, BATCH, HIDDEN, dtype=torch.float64)
    freqs = tandem.RotaryPositionEmbedding(HIDDEN // HEADS)(LENGTH)
    assert_close(second(x.transpose(0, 1), rotary_pos_emb=freqs), first(x, rotary_pos_emb=freqs).transpose(0, 1))


@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_a_cache_gives_what_the_whole_sequence_gives(form):
    made = layer(layer_number=3, attn_input_format=form, **LLAMA).eval()
    x = torch.randn(LENGTH, BATCH, HIDDEN, dtype=torch.float64)
    freqs = tandem.RotaryPositionEmbedding(HIDDEN // HEADS)(LENGTH)
    turn = (lambda t: t) if form == "sbhd" else (lambda t: t.transpose(0, 1))
    cache = tandem.InferenceParams(BATCH, LENGTH)
    pieces = []
    with torch.no_grad():
        whole = turn(made(turn(x), rotary_pos_emb=freqs))
        for piece in x.split([3, 1, 2, 1]):
            pieces.append(turn(made(turn(piece), rotary_pos_emb=freqs, inference_params=cache)))
            cache.sequence_len_offset += len(piece)
    assert_close(torch.cat(pieces), whole)
    cache.swap_key_value_dict(torch.tensor([1, 0]))
    assert cache.key_value_memory_dict[3][0].shape == (LENGTH, BATCH, 2, HIDDEN // HEADS)
    for offset in (-1, 2.5):
        wrong = tandem.InferenceParams(BATCH, LENGTH)
        wrong.sequence_len_offset = offset
        with pytest.raises(ValueError, match=f"expected sequence_len_offset to be a whole number of at least 0, got {offset}. Count what"), torch.no_grad():
            made(turn(x[:1]), inference_params=wrong)
    with pytest.raises(ValueError, match="InferenceParams: expected at most 7 positions of 2 sequences, got 8 of 2. Make it larger."), torch.no_grad():
        made(turn(x[:1]), inference_params=cache)


def generate(made, x, cache, lengths, modes=None):
    """y of `x` in pieces, each in a context of its own."""
    pieces = []
    for n, piece in enumerate(x.split(lengths)):
        with modes[n]() if modes else torch.no_grad():
            pieces.append(made(piece, inference_params=cache))
        cache.sequence_len_offset += len(piece)
    return torch.cat(pieces)


def gradients(module, y):
    module.zero_grad()
    y.square().sum().backward()
    return [param.grad for param in module.parameters()]


def test_gradients_through_a_cache_are_right_or_an_error():
    made, x = layer(layer_number=1, **LLAMA), torch.randn(LENGTH, BATCH, HIDDEN, dtype=torch.float64)
    expected, cache = gradients(made, made(x)), tandem.InferenceParams(BATCH, LENGTH)
    assert_close(gradients(made, made(x, inference_params=cache)), expected)
    pieces = generate(made, x, cache, [3, 4], [torch.enable_grad] * 2)  # forward alone is right
    assert_close(pieces, made(x))
    with pytest.raises(RuntimeError, match=r"expected gradients of keys and values of one call, got one of keys .* make earlier calls under torch.no_grad"):
        gradients(made, pieces)
    for _ in range(2):  # keys of a first call without gradient are constants, after each beginning
        cache.sequence_len_offset = 0
        y = generate(made, x, cache, [3, 4], [torch.no_grad, torch.enable_grad])
        assert all(grad.isfinite().all() for grad in gradients(made, y))
    for swaps in (False, True):  # each sequence for itself, until they change places
        for row, mode in ((1, torch.enable_grad), (0, torch.no_grad)):
            cache.sequence_len_offset, cache.batch_size_offset = 0, row
            generate(made, x[:3, row : row + 1], cache, [3], [mode])
        if swaps:
            cache.swap_key_value_dict(torch.tensor([1, 0]))
        for row, is_constant in ((0, not swaps), (1, False)):
            cache.batch_size_offset, cache.sequence_len_offset = row, 3
            y = generate(made, x[3:, row : row + 1], cache, [4], [torch.enable_grad])
            with contextlib.nullcontext() if is_constant else pytest.raises(RuntimeError, match="expected gradients of keys and values of one call"):
                gradients(made, y)


BACKWARDS = {
    "all": lambda y, x, weight: y.sum().backward(),
    "chosen": lambda y, x, weight: y.sum().backward(inputs=[x, weight]),
    "x": lambda y, x, weight: torch.autograd.grad(y.sum(), x),
    "weight": lambda y, x, weight: torch.autograd.grad(y.sum(), weight),
    "twice": lambda y, x, weight: torch.autograd.grad(y.sum(), x, create_graph=True),
}


@pytest.mark.parametrize("name", BACKWARDS)
@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_no_backward_loses_gradients_of_earlier_calls(name, form):
    made = layer(layer_number=1, attn_input_format=form)
    dim, sizes = (0, (LENGTH, BATCH)) if form == "sbhd" else (1, (BATCH, LENGTH))
    x = torch.randn(*sizes, HIDDEN, dtype=torch.float64, requires_grad=True)

    def both(x, cache):
        made(x.narrow(dim, 0, 3), inference_params=cache)
        cache.sequence_len_offset += 3
        return made(x.narrow(dim, 3, 4), inference_params=cache)

    with pytest.raises(RuntimeError, match="expected gradients of keys and values of one call, got one of keys and values that an earlier call"):
        BACKWARDS[name](both(x, tandem.InferenceParams(BATCH, LENGTH)), x, made.self_attention.layernorm_qkv.key_weight)


def test_no_transformation_loses_gradients_of_earlier_calls():
    made, xs = layer(layer_number=1), torch.randn(2, LENGTH, BATCH, HIDDEN, dtype=torch.float64)
    both = lambda x: generate(made, x, tandem.InferenceParams(BATCH, LENGTH), [3, 4], [torch.enable_grad] * 2)  # noqa: E731
    batched = torch.func.vmap(both)(xs)
    assert_close(batched, torch.stack([made(x) for x in xs]))
    for backward in (
        lambda: torch.func.grad(lambda x: both(x).sum())(xs[0]),
        lambda: torch.func.grad(lambda x: torch.func.vjp(both, x)[0].sum())(xs[0]),
        lambda: torch.func.grad(lambda x: torch.func.grad(lambda z: (both(x) * z).sum())(xs.new_ones(())))(xs[0]),
        lambda: torch.func.grad(lambda xs: torch.func.vmap(both)(xs).sum())(xs),
        lambda: torch.func.vmap(torch.func.grad(lambda x: both(x).sum()))(xs),
        lambda: torch.autograd.grad(batched.sum(), made.self_attention.layernorm_qkv.key_weight),
    ):
        with pytest.raises(RuntimeError, match="expected gradients of keys and values of one call, got one of keys and values that an earlier call"):
            backward()


def test_gradients_of_a_call_are_right_behind_constants():
    """Of a prompt without gradients, as often as it is read, and of a model that is frozen."""
    x = torch.randn(LENGTH, BATCH, HIDDEN, dtype=torch.float64)
    for frozen in (False, True):
        made, cache, new = layer(layer_number=1).requires_grad_(not frozen), tandem.InferenceParams(BATCH, LENGTH), x[3:].clone().requires_grad_()
        wanted = torch.autograd.grad(made(torch.cat((x[:3], new)))[3:].sum(), new)
        with contextlib.nullcontext() if frozen else torch.no_grad():
            made(x[:3], inference_params=cache)
        cache.sequence_len_offset = 3
        for _ in range(2):
            assert_close(torch.autograd.grad(made(new, inference_params=cache).sum(), new), wanted)
            made(new, inference_params=cache).sum().backward()


def tangent_of(f, x, tangent, way):
    if way == "torch.func":
        return torch.func.jvp(f, (x,), (tangent,))[1]
    if way == "in another":  # as an inner derivative sees it, which follows something else
        return torch.func.jvp(lambda x: torch.func.jvp(lambda z: f(x) * z, (x.new_ones(()),), (x.new_ones(()),))[1], (x,), (tangent,))[1]
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, tangent))).tangent


@pytest.mark.parametrize("way", ["dual numbers", "torch.func", "in another"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_tangents_through_a_cache_are_right_or_an_error(mode, way):
    made = layer(layer_number=1)
    x, tangent = torch.randn(2, LENGTH, BATCH, HIDDEN, dtype=torch.float64)
    cache = tandem.InferenceParams(BATCH, LENGTH)
    with torch.no_grad():
        made(x[:3], inference_params=cache)
    cache.sequence_len_offset = 3

    def behind_a_prompt(new):
        return made(new, inference_params=cache if way == "dual numbers" else copy.deepcopy(cache))

    def pieces(x):
        begun = tandem.InferenceParams(BATCH, LENGTH)
        first = made(x[:3], inference_params=begun)
        begun.swap_key_value_dict(torch.tensor([0, 1]))
        begun.sequence_len_offset = 3
        return torch.cat((first, made(x[3:], inference_params=begun)))

    with mode(), sdpa_kernel(SDPBackend.MATH):
        wanted = tangent_of(made, x, tangent, way)
        assert wanted.any()
        assert_close(tangent_of(lambda x: made(x, inference_params=tandem.InferenceParams(BATCH, LENGTH)), x, tangent, way), wanted)
        with pytest.raises(RuntimeError, match="expected tangents of keys and values of one call, got a call behind one .* make earlier calls without tangents"):
            tangent_of(pieces, x, tangent, way)
        if way == "dual numbers":
            wanted = tangent_of(lambda new: made(torch.cat((x[:3], new)))[3:], x[3:], tangent[3:], way)
            for _ in range(2):  # directions one after the other
                assert_close(tangent_of(behind_a_prompt, x[3:], tangent[3:], way), wanted)


def test_a_cache_knows_which_layer_writes():
    first, x = layer(layer_number=1), torch.randn(3, 1, HIDDEN, dtype=torch.float64)
    second, cache = copy.deepcopy(first), tandem.InferenceParams(1, 6)
    text = "expected the layer that has written keys and values under layer_number 1 before, got another one. Give each layer a layer_number"
    generate(first, x, cache, [3])
    with pytest.raises(ValueError, match=text):
        second(x, inference_params=cache)
    copied = copy.deepcopy(cache)  # whose number is free
    assert_close(generate(second, x, copied, [3]), generate(first, x, cache, [3]))
    cache.swap_key_value_dict(torch.tensor([0]))
    cache.sequence_len_offset = 3
    copied.sequence_len_offset = 3
    assert_close(generate(first, x, cache, [3]), generate(second, x, copied, [3]))
    gone = weakref.ref(first.self_attention)
    del first
    gc.collect()
    assert gone() is None, "a cache holds no module"
    with pytest.raises(ValueError, match=text):
        second(x[:0], inference_params=cache)  # in the middle of a sequence
    cache.sequence_len_offset = 0
    assert_close(generate(second, x, cache, [3]), second(x))


def test_a_cache_is_read_in_another_dtype_and_mode():
    made, x = layer(torch.float32, layer_number=1), torch.randn(LENGTH, BATCH, HIDDEN)
    low = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    for modes, near in (((torch.inference_mode, torch.no_grad, torch.inference_mode), 1e-5), ((low, torch.no_grad, low), 0.1)):
        with torch.no_grad():
            whole, pieces = made(x), generate(made, x, tandem.InferenceParams(BATCH, LENGTH), [3, 2, 2], modes)
        assert (pieces - whole).norm() / whole.norm() < near


def test_masks():
    x = torch.randn(LENGTH, 1, HIDDEN, dtype=torch.float64)
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    padding = torch.zeros(1, 1, 1, LENGTH, dtype=torch.bool)
    padding[..., 5:] = True
    made = layer()
    named = dict(made.named_parameters())
    for mask_type, mask, seen in [
        ("causal", None, causal),
        ("no_mask", None, torch.ones_like(causal)),
        ("causal_bottom_right", None, causal),
        ("padding", padding, ~padding[0, 0].expand(LENGTH, -1)),
        ("padding_causal", padding, causal & ~padding[0, 0]),
        ("arbitrary", ~causal[None, None], causal),
        ("causal", padding, causal & ~padding[0, 0]),
        ("causal", torch.zeros(LENGTH).masked_fill(padding, -math.inf), causal & ~padding[0, 0]),
        ("arbitrary", torch.full((LENGTH, LENGTH), 3.0).masked_fill(~causal, -math.inf), causal),
    ]:
        assert_close(made(x, mask, self_attn_mask_type=mask_type), expected(x, named, seen=seen), atol=1e-10, rtol=1e-9, msg=mask_type)
    added = torch.randn(HEADS, LENGTH, LENGTH, dtype=torch.float64, requires_grad=True)  # a bias of the attention that learns
    made(x, added).sum().backward()
    assert (added.grad[:, causal].abs() > 0).any() and not added.grad[:, ~causal].any()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_core_of_attention_is_computed_again(dropout, monkeypatch):
    made, x = layer(torch.float32, attention_dropout=dropout), torch.randn(LENGTH, BATCH, HIDDEN)
    results, calls, own = [], [], F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *arguments, **options: calls.append(1) or own(*arguments, **options))
    for again in (False, True):
        torch.manual_seed(1)
        y = made(x, checkpoint_core_attention=again)
        made.eval()  # what is computed again drops as it did
        results.append([y, *gradients(made, y), torch.get_rng_state()])
        made.train()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert len(calls) == 3


@pytest.mark.parametrize("options", [{}, LLAMA], ids=["gpt", "llama"])
def test_compiled(options):
    made = layer(torch.float32, **options)
    x = torch.randn(LENGTH, BATCH, HIDDEN)
    freqs = tandem.RotaryPositionEmbedding(HIDDEN // HEADS)(LENGTH)
    assert_close(torch.compile(made, fullgraph=True)(x, rotary_pos_emb=freqs), made(x, rotary_pos_emb=freqs), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("recipe", [tandem.recipe.Float8CurrentScaling(), tandem.recipe.MXFP8BlockScaling(), tandem.recipe.DelayedScaling()])
def test_under_recipes(recipe):
    made = layer(torch.float32, **LLAMA)
    x = torch.randn(LENGTH, BATCH, HIDDEN, requires_grad=True)
    for _ in range(2):
        with tandem.autocast(recipe=recipe):
            y = made(x)
        y.square().mean().backward()
    plain = made(x)
    assert 0 < (y - plain).norm() / plain.norm() < 0.2
    assert all(param.grad.isfinite().all() for param in made.parameters())


def test_attention_alone():
    torch.manual_seed(0)
    made = tandem.MultiheadAttention(HIDDEN, HEADS, attention_dropout=0, input_layernorm=True, return_layernorm_output=True, return_bias=True)
    x = torch.randn(LENGTH, BATCH, HIDDEN)
    y, bias, normed = made(x)
    assert_close(normed, F.layer_norm(x, (HIDDEN,)), atol=1e-5, rtol=1e-5)
    assert torch.equal(bias, made.proj.bias)
    q, k, v = (linear(normed) for linear in (lambda t, n=n: t @ getattr(made.layernorm_qkv, f"{n}_weight").t() for n in ("query", "key", "value")))
    heads = [t.unflatten(-1, (HEADS, -1)).double() for t in (q, k, v)]
    core = attention(*heads, torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())
    assert_close(y.double(), core @ made.proj.weight.double().t(), atol=1e-5, rtol=1e-4)


def masked(mask, mask_type):
    return layer()(torch.randn(2, 1, HIDDEN, dtype=torch.float64), mask, self_attn_mask_type=mask_type)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: layer(num_gqa_groups=3), ValueError, "expected num_gqa_groups that divides the 4 attention heads, got 3. Use a divisor."),
        (lambda: tandem.TransformerLayer(30, 8, 4), ValueError, "expected hidden_size that 4 heads share evenly, got 30. Give kv_channels."),
        (lambda: layer(self_attn_mask_type="diagonal"), ValueError, "expected attn_mask_type to be one of no_mask, causal, .* got 'diagonal'."),
        (lambda: layer(window_size=(4, 0)), NotImplementedError, r"expected window_size \(-1, 0\) or None, got \(4, 0\). Leave positions out"),
        (lambda: layer(attn_input_format="thd"), ValueError, "expected qkv_format \"sbhd\" or \"bshd\", got 'thd'."),
        (lambda: layer(qk_norm_type="Batch"), ValueError, 'expected qk_norm_type None, "RMSNorm", "LayerNorm" or "L2Normalization", got \'Batch\'.'),
        (lambda: layer(layer_type="decoder"), NotImplementedError, "expected layer_type='encoder', got 'decoder'"),
        (lambda: tandem.RotaryPositionEmbedding(7), ValueError, "expected an even number of features to rotate, up to dim, got 7."),
        (
            lambda: tandem.RotaryPositionEmbedding(8, seq_len_interpolation_factor=0),
            ValueError,
            "RotaryPositionEmbedding: expected seq_len_interpolation_factor > 0, got 0. Leave it out where positions are not divided.",
        ),
        (
            lambda: tandem.RotaryPositionEmbedding(8, pretrained_max_position_embeddings=-1),
            ValueError,
            "expected pretrained_max_position_embeddings to be a whole number > 0, got -1. Give the number of positions that the model was",
        ),
        (
            lambda: layer()(torch.randn(2, 1, HIDDEN, dtype=torch.float64), inference_params=tandem.InferenceParams(1, 4)),
            ValueError,
            "expected layer_number where inference_params are given, got None. Build each layer with its own.",
        ),
        (lambda: masked(None, "padding"), ValueError, "expected an attention_mask with the mask type 'padding', got none. True in it leaves a position"),
        (
            lambda: masked(torch.zeros(2, dtype=torch.bool), "no_mask"),
            ValueError,
            'expected no attention_mask with the mask type "no_mask", got one. Call with attn_mask_type="arbitrary".',
        ),
        (
            lambda: masked(torch.zeros(2, dtype=torch.uint8), "causal"),
            TypeError,
            "expected attention_mask to be a tensor of booleans, or of floating-point numbers that are added to the scores, got torch.uint8. Pass",
        ),
        (lambda: masked((None, None), "padding"), TypeError, "that are added to the scores, got tuple. Pass mask.bool"),
        (
            lambda: masked(torch.zeros(3, 2, dtype=torch.bool), "causal"),
            ValueError,
            r"that broadcasts to \[batch, heads, positions, positions of keys\] = \[1, 4, 2, 2\], got \[3, 2\]. Reshape it",
        ),
        (
            lambda: tandem.apply_rotary_pos_emb(torch.randn(5, 1, 1, 4), torch.randn(3, 1, 1, 4)),
            ValueError,
            r"expected freqs of at least 5 positions and at most 4 features, got \(3, 1, 1, 4\). Make them for the sequence.",
        ),
        (
            lambda: masked(torch.zeros(1, 4, 2, 2, dtype=torch.bool, device="meta"), "arbitrary"),
            ValueError,
            "expected attention_mask on cpu, where x lies, got meta. Move it there.",
        ),
        (
            lambda: tandem.MultiheadAttention(8, 2)(torch.randn(2, 8)),
            ValueError,
            r"MultiheadAttention: expected hidden_states \[sequence, batch, hidden\], got \[2, 8\]. Reshape it, or change qkv_format.",
        ),
        (lambda: tandem.MultiheadAttention(8, 0), ValueError, "expected num_attention_heads to be a whole number > 0, got 0. Give the heads of queries."),
        (lambda: tandem.MultiheadAttention(8, 2, attention_dropout="x"), ValueError, "expected attention_dropout to be a finite number, got 'x'"),
        (lambda: tandem.MultiheadAttention(8, 2, attention_dropout=2), ValueError, "expected attention_dropout between 0 and 1, got 2. Give a"),
        (lambda: tandem.RotaryPositionEmbedding(8, rotary_base=-1), ValueError, "expected rotary_base > 0, got -1. Its powers divide positions."),
        (
            lambda: tandem.MultiheadAttention(8, 2)(torch.randn(2, 1, 8), rotary_pos_emb=[1]),
            TypeError,
            "expected rotary_pos_emb to be a tensor of angles, or a tuple of those of queries and of keys, got list. Pass what Rotary",
        ),
        (
            lambda: tandem.MultiheadAttention(8, 2, layer_number=1)(torch.randn(2, 1, 8), inference_params={}),
            TypeError,
            "expected inference_params to be tandem.InferenceParams, got dict. Make them for the sequence.",
        ),
        (
            lambda: tandem.InferenceParams(2, 3).swap_key_value_dict(torch.tensor([0])),
            ValueError,
            "InferenceParams: expected an index for each of 2 sequences, got 1. Name all of them.",
        ),
        (
            lambda: tandem.apply_rotary_pos_emb(torch.randn(5, 1, 1, 8), torch.randn(5, 1, 1, 7)),
            ValueError,
            "apply_rotary_pos_emb: expected freqs of an even number of features, got 7. Features are turned in pairs.",
        ),
    ],
)
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_freqs_are_interpolated():
    rotary = tandem.RotaryPositionEmbedding(8, rotary_percent=0.5, seq_len_interpolation_factor=2, pretrained_max_position_embeddings=4)
    first = lambda *length: rotary(*length)[-1, 0, 0, 0].item()  # noqa: E731
    assert [first(4), first(8), first(9), first(16)] == [1.5, 3.5, pytest.approx(8 * 4 / 9), 15 / 4]
    assert torch.equal(rotary(4, offset=8), rotary(12)[8:]) and rotary(4).shape == (4, 1, 1, 4)
    for alone in ({"seq_len_interpolation_factor": 2}, {"pretrained_max_position_embeddings": 4}):  # no position is divided, as there
        assert tandem.RotaryPositionEmbedding(8, **alone)(9)[8, 0, 0, 0] == 8
    x = torch.randn(4, 1, 2, 8)
    assert torch.equal(tandem.apply_rotary_pos_emb(x, rotary(4))[..., 4:], x[..., 4:])


def test_frequencies_are_no_state():
    made = torch.nn.ModuleDict({"rotary": tandem.RotaryPositionEmbedding(8, rotary_base=500.0), "linear": tandem.Linear(8, 8)})
    expected = made["rotary"](40)
    assert not any("rotary" in key for key in made.state_dict())
    theirs = tandem.transformer_engine_state_dict(made)
    assert torch.equal(theirs["rotary.inv_freq"], 1 / 500.0 ** (torch.arange(0, 8, 2) / 8))
    assert not any(made.load_state_dict(theirs))
    assert torch.equal(made.to(torch.bfloat16)["rotary"](40), expected)
    assert torch.equal(made.to("meta").to_empty(device="cpu")["rotary"](40), expected)
