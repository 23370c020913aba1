"""Rotary embedding and attention as ops of a pipeline, against plain float64; and a whole decoder layer in one pipeline."""

import json
import random
import re

import pytest
import torch
from support import TOLERANCES, assert_equal, fork, join, randomize
from torch.utils.checkpoint import checkpoint

import tandem
from tandem import ops

HEADS = [(1, 1), (2, 2), (4, 2), (6, 1)]


def parts(x, heads, groups, dim):
    return x.unflatten(-1, (-1, dim)).split([heads, groups, groups], -2)


def plain_rotary(x, cosines=None, sines=None, *, num_heads, head_dim, num_kv_heads=0, base=10000.0, rotated_features=0, interleaved=False):
    """By the definition; angles are float32."""
    groups, features = num_kv_heads or num_heads, rotated_features or head_dim
    if cosines is None:
        frequencies = 1 / base ** (torch.arange(0, features, 2, dtype=torch.float32) / features)
        angles = (torch.arange(x.shape[-2]).float().unsqueeze(-1) * frequencies).to(x.dtype)
        angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
        cosines, sines = angles.cos(), angles.sin()
    cosines, sines = cosines.unsqueeze(-2), sines.unsqueeze(-2)
    q, k, v = parts(x, num_heads, groups, head_dim)

    def turned(t):
        own, rest = t[..., :features], t[..., features:]
        (a, b), (cos_a, cos_b), (sin_a, sin_b) = ((each[..., ::2], each[..., 1::2]) if interleaved else each.chunk(2, -1) for each in (own, cosines, sines))
        both = (a * cos_a - b * sin_a, b * cos_b + a * sin_b)
        return torch.cat([torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1), rest], -1)

    return torch.cat([turned(q), turned(k), v], -2).flatten(-2)


def plain_attention(x, mask=None, *, num_heads, head_dim, num_kv_heads=0, causal=False, scale=0.0, soft_cap=0.0):
    groups = num_kv_heads or num_heads
    q, k, v = (t.transpose(-2, -3) for t in parts(x, num_heads, groups, head_dim))
    k, v = (t.repeat_interleave(num_heads // groups, -3) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (scale or head_dim**-0.5)
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    seen = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool)
    seen = seen.tril() if causal else seen
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        scores = scores + mask
    none = ~seen.any(-1, keepdim=True)
    shares = scores.masked_fill(~seen & ~none, -torch.inf).softmax(-1).masked_fill(none, 0)
    return (shares @ v).transpose(-2, -3).flatten(-2)


LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "features apart": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    "sliced": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "every other": lambda t: torch.stack([t, t], -1)[..., 0],
    "strange stride of one": lambda t: t.as_strided(t.shape, tuple(7 if size == 1 else stride for size, stride in zip(t.shape, t.stride(), strict=True))),
}


def compare(op, plain, x, extra, dtype, draw):
    """Outputs and gradients, with x and the gradient in some layout."""
    x = LAYOUTS[draw.choice([*LAYOUTS])](x.to(dtype)).requires_grad_()
    extra = [each.to(dtype).requires_grad_() if each.is_floating_point() else each for each in extra]
    leaves = [x, *[each for each in extra if each.requires_grad]]
    wide = [each.detach().double().requires_grad_(each.requires_grad) if each.is_floating_point() else each for each in (x, *extra)]
    y, want = op(x, *extra), plain(*wide)
    assert y.dtype == dtype
    assert y.shape == want.shape
    grad = LAYOUTS[draw.choice([*LAYOUTS])](torch.randn(y.shape).to(dtype))
    if y.numel() and draw.random() < 0.2:
        grad = grad[:1].expand(y.shape)
    found = torch.autograd.grad(y, leaves, grad)
    right = torch.autograd.grad(want, [each for each in wide if each.requires_grad], grad.double())
    for got, expected in zip((y, *found), (want, *right), strict=True):
        largest = max(expected.abs().max().item(), 1.0) if expected.numel() else 1.0
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=2 * TOLERANCES[dtype] * largest)


def drawn_shape(draw, heads, groups, dim):
    features = (heads + 2 * groups) * dim
    return draw.choice([(2, 5, features), (1, 1, features), (3, 1, features), (1, 40, features), (33, features), (2, 0, features), (0, 4, features), (2, 3, 7, features)])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_rotary_is_the_definition(dtype):
    for seed in range(60):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        heads, groups = draw.choice(HEADS)
        dim = draw.choice([2, 6, 16, 34, 80])
        options = {
            "num_heads": heads, "head_dim": dim, "num_kv_heads": draw.choice([groups, 0]) if heads == groups else groups, "interleaved": draw.random() < 0.5,
            "base": draw.choice([10000.0, 1.5, 5e5]), "rotated_features": draw.choice([0, dim, max(2, dim // 4 * 2)]),
        }  # fmt: skip
        shape = drawn_shape(draw, heads, groups, dim)
        rows = shape[:-1]
        of_tables = draw.choice([None, rows[-1:], rows, (), (1,), (*[1] * (len(rows) - 1), rows[-1]), (*rows[:-1], 1)])
        features, kind = options["rotated_features"] or dim, draw.choice([dtype, torch.float32])
        # To both features of a pair another number, as no angle gives them.
        tables = [] if of_tables is None else [LAYOUTS[draw.choice(["sliced", "every other"])](torch.randn(*of_tables, features).to(kind)) for _ in range(2)]
        op = ops.Rotary(**options, tables=bool(tables))
        compare(
            lambda x, op=op, tables=tables: op(x, *tables),
            lambda x, options=options, tables=tables: plain_rotary(x, *[table.to(x.dtype) for table in tables], **options),
            torch.randn(shape), [], dtype, draw,
        )  # fmt: skip


def test_tables_of_angles_are_what_positions_give():
    x, own = torch.randn(2, 5, 24), ops.Rotary(2, 4)
    angles = tandem.RotaryPositionEmbedding(4)(9)[:, 0, 0]
    op = ops.Rotary(2, 4, tables=True)
    assert torch.equal(op(x, angles[:5].cos(), angles[:5].sin()), own(x))
    later = angles[torch.tensor([[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]])]
    assert torch.equal(op(x, later.cos(), later.sin())[1], own(torch.cat([torch.zeros(4, 24), x[1]]))[4:])


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_turns_as_the_rotary_embedding_does(interleaved):
    angles = tandem.RotaryPositionEmbedding(16, rotary_percent=0.5, interleaved=interleaved)(9)
    x = torch.randn(2, 9, 6 * 16)
    q, k, v = parts(x, 4, 1, 16)
    turned = [tandem.apply_rotary_pos_emb(t, angles, "bshd", interleaved) for t in (q, k)]
    torch.testing.assert_close(ops.Rotary(4, 16, num_kv_heads=1, rotated_features=8, interleaved=interleaved)(x), torch.cat([*turned, v], -2).flatten(-2))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_attention_is_the_definition(dtype):
    for seed in range(80):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        heads, groups = draw.choice(HEADS)
        dim = draw.choice([1, 2, 8, 16, 20])
        options = {"num_heads": heads, "head_dim": dim, "num_kv_heads": groups, "causal": draw.random() < 0.5, "scale": draw.choice([0.0, 0.3]), "soft_cap": draw.choice([0.0, 0.0, 2.0])}
        shape = drawn_shape(draw, heads, groups, dim)
        length = shape[-2]
        scores = (*shape[:-2], heads, length, length)
        kind = draw.choice(["none", "bool", "bool", "numbers"])
        extra = []
        if kind != "none":
            kept = draw.randint(2, len(scores))
            sizes = [1 if draw.random() < 0.4 else size for size in scores[-kept:]]
            extra = [torch.rand(sizes) > 0.3 if kind == "bool" else torch.randn(sizes)]
        op = ops.Attention(**options, mask=bool(extra))
        try:
            compare(op, lambda x, *mask, options=options: plain_attention(x, *mask, **options), torch.randn(shape), extra, dtype, draw)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {options}, {shape}, {[each.shape for each in extra]}: {error}") from error


def test_long_sequences():
    draw = random.Random(0)
    for dtype in (torch.float32, torch.bfloat16):
        for causal in (False, True):
            options = {"num_heads": 4, "head_dim": 16, "num_kv_heads": 2, "causal": causal}
            compare(ops.Attention(**options), lambda x, options=options: plain_attention(x, **options), torch.randn(2, 700, 128), [], dtype, draw)


def test_a_query_that_sees_nothing_is_zero_and_has_no_gradient():
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[2] = False
    for more in ({}, {"soft_cap": 3.0}):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(2, 6, 24).to(dtype).requires_grad_()
            y = ops.Attention(2, 4, mask=True, **more)(x, mask)
            assert torch.equal(y[:, 2], torch.zeros_like(y[:, 2]))
            y.sum().backward()
            assert torch.equal(x.grad[:, 2, :8], torch.zeros_like(x.grad[:, 2, :8])), "of its query"
            assert torch.isfinite(x.grad).all()


def test_what_is_kept():
    block = ops.Sequential(ops.Rotary(4, 8, num_kv_heads=2), ops.Attention(4, 8, num_kv_heads=2, causal=True))
    x = torch.randn(2, 10, 64, requires_grad=True)
    block(x).sum().backward()
    assert kept_of(block) == {"rotary.y", "attention.y", "attention.logsumexp"}
    assert "by flash" in block.explain()
    alone = ops.Sequential(ops.Rotary(4, 8, num_kv_heads=2))
    alone(x).sum().backward()
    assert not kept_of(alone)
    mask = torch.zeros(10, 10, requires_grad=True)
    numbers = ops.Sequential(ops.Attention(4, 8, num_kv_heads=2, mask=True))
    numbers(x, mask.detach()).sum().backward()
    assert "by reference" not in numbers.explain()
    numbers(x, mask).sum().backward()
    assert "by reference" in numbers.explain(), "all scores are in memory for the gradient of a mask"
    with torch.no_grad():
        assert not block(x).requires_grad


def kept_of(module):
    plan = json.loads(module.explain("json"))["plans"][-1]
    return {value["value"].split(".", 1)[1] for value in plan.get("kept", []) if value["costs_memory"]}


def test_modes():
    block = ops.Sequential(ops.Rotary(4, 8, num_kv_heads=2), ops.Attention(4, 8, num_kv_heads=2, causal=True))
    x = torch.randn(2, 10, 64, requires_grad=True)
    want = block(x)
    (right,) = torch.autograd.grad(want.square().sum(), x)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(block(x), want.detach())
    for reentrant in (False, True):
        own = x.detach().requires_grad_()
        checkpoint(block, own, use_reentrant=reentrant).square().sum().backward()
        torch.testing.assert_close(own.grad, right)
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.Attention(4, 8, num_kv_heads=2)(x).dtype == torch.bfloat16
        assert ops.Attention(4, 8, num_kv_heads=2, mask=True)(x, torch.ones(10, 10, dtype=torch.bool)).dtype == torch.bfloat16
        assert ops.Rotary(4, 8, num_kv_heads=2)(x).dtype == torch.float32, "as sums and products of elements"
    assert block.verify(x).passed


def test_transforms_of_torch():
    attention = ops.Attention(2, 4, num_kv_heads=1, causal=True, mask=True)
    block = ops.Sequential(ops.Rotary(2, 4, num_kv_heads=1), attention)
    x, mask = torch.randn(3, 5, 16, dtype=torch.float64), torch.rand(5, 5) > 0.3
    plain = lambda x: plain_attention(plain_rotary(x, num_heads=2, head_dim=4, num_kv_heads=1), mask, num_heads=2, head_dim=4, num_kv_heads=1, causal=True)  # noqa: E731
    torch.testing.assert_close(torch.func.grad(lambda x: block(x, mask).square().sum())(x), torch.func.grad(lambda x: plain(x).square().sum())(x))
    torch.testing.assert_close(torch.func.vmap(lambda x: block(x, mask))(x), plain(x))
    assert torch.autograd.gradcheck(lambda x: block(x, mask), x.requires_grad_())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend, fresh_dynamo):
    block = ops.Sequential(ops.Rotary(4, 8, num_kv_heads=2), ops.Attention(4, 8, num_kv_heads=2, causal=True, mask=True))
    compiled = torch.compile(block, fullgraph=True, backend=backend, dynamic=True)
    for length in (10, 13):
        x, mask = torch.randn(2, length, 64, requires_grad=True), torch.ones(length, length, dtype=torch.bool)
        y, want = compiled(x, mask), block(x, mask)
        torch.testing.assert_close(y, want)
        torch.testing.assert_close(torch.autograd.grad(y.square().sum(), x), torch.autograd.grad(want.square().sum(), x))


HIDDEN, INNER, LAYER = 64, 96, {"num_heads": 4, "head_dim": 16, "num_kv_heads": 2}


def decoder_layer(dtype=torch.float32):
    like = {"dtype": dtype}
    layer = randomize(
        ops.Sequential(
            fork("attention"), ops.RMSNorm(HIDDEN, **like), ops.Linear(HIDDEN, 8 * 16, **like), ops.Rotary(**LAYER), ops.Attention(**LAYER, causal=True),
            ops.Linear(HIDDEN, HIDDEN, bias=False, **like), join("attention"),
            fork("mlp"), ops.RMSNorm(HIDDEN, **like), ops.Linear(HIDDEN, 2 * INNER, bias=False, **like), ops.SwiGLU(), ops.Linear(INNER, HIDDEN, **like),
            join("mlp"),
        )
    )  # fmt: skip
    with torch.no_grad():
        for each in layer.parameters():
            each.mul_(each.shape[-1] ** -0.5)
    return layer


def plain_layer(x, norm, qkv, bias, out, second_norm, up, down, down_bias):
    def normed(x, weight):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight

    joined = plain_rotary(normed(x, norm) @ qkv.T + bias, **LAYER)
    x = plain_attention(joined, **LAYER, causal=True) @ out.T + x
    a, b = (normed(x, second_norm) @ up.T).chunk(2, -1)
    return (torch.nn.functional.silu(a) * b) @ down.T + down_bias + x


def far(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def run(layer, x, seed):
    y = layer(x)
    return [y, *torch.autograd.grad(y, [x, *layer.parameters()], seed.to(y.dtype))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_decoder_layer_is_one_pipeline(dtype, fresh_dynamo):
    layer = decoder_layer(dtype)
    x, seed = torch.randn(2, 12, HIDDEN).to(dtype).requires_grad_(), torch.randn(2, 12, HIDDEN, dtype=torch.float64)
    wide = [each.detach().double().requires_grad_() for each in (x, *layer.parameters())]
    want = plain_layer(*wide)
    wanted = [want, *torch.autograd.grad(want, wide, seed.to(dtype).double())]
    layer(x).sum().backward()
    text = layer.explain()
    assert "rms_norm_backward_add" in text and "add_rms_norm" in text
    assert kept_of(layer) == {
        "rms_norm.inv_rms", "rotary.y", "attention.y", "attention.logsumexp", "add_extra_input.y", "basic_linear.y",
    }  # fmt: skip
    assert layer.verify(x).passed
    for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        for got, right in zip(run(function, x, seed), wanted, strict=True):
            assert far(got, right) < 4 * TOLERANCES[dtype]


def test_a_decoder_layer_under_a_recipe():
    layer = decoder_layer()
    x, seed = torch.randn(2, 32, HIDDEN, requires_grad=True), torch.randn(2, 32, HIDDEN)
    plain = run(layer, x, seed)
    with tandem.autocast(recipe=tandem.recipe.MXFP8BlockScaling()):
        found = run(layer, x, seed)
        assert layer.verify(x).passed
    for got, right in zip(found, plain, strict=True):
        assert far(got, right.double()) < 0.2
    assert far(found[0], plain[0].double()) > 1e-3
    assert layer.explain().count("mxfp8") >= 4


def test_a_decoder_layer_with_a_memory_budget():
    layer = decoder_layer()
    x, seed = torch.randn(2, 12, HIDDEN, requires_grad=True), torch.randn(2, 12, HIDDEN)
    want = run(layer, x, seed)
    for budget in (4000, 1500, 700):
        frugal = ops.Sequential(*layer, memory_budget=budget)
        assert_equal(run(frugal, x, seed), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_float32_mask_keeps_its_numbers(dtype):
    """Rounded to 16 bits, the least of float32 would be -infinity, and numbers around 300 would lose their differences."""
    attention, x = ops.Attention(2, 4, mask=True), torch.randn(2, 5, 24).to(dtype)
    for mask in (torch.zeros(2, 1, 5, 5).index_fill(2, torch.tensor([2]), torch.finfo(torch.float32).min), torch.randn(2, 1, 5, 5) + 300):
        want = plain_attention(x.double(), mask.double(), num_heads=2, head_dim=4)
        for given in (mask, mask.clone().requires_grad_()):
            torch.testing.assert_close(attention(x, given).double(), want, rtol=0, atol=2e-2)


@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
def test_gradients_of_a_mask_with_a_row_far_below(soft_cap):
    """The logarithm of the sums of such a row has lost the number of its keys."""
    attention = ops.Attention(2, 4, mask=True, soft_cap=soft_cap)
    x, mask, grad = torch.randn(2, 5, 24), torch.zeros(5, 5).index_fill(0, torch.tensor([2]), torch.finfo(torch.float32).min), torch.randn(2, 5, 8)
    leaves = [x.requires_grad_(), mask.requires_grad_()]
    wide = [each.detach().double().requires_grad_() for each in leaves]
    found = torch.autograd.grad(attention(*leaves), leaves, grad)
    right = torch.autograd.grad(plain_attention(*wide, num_heads=2, head_dim=4, soft_cap=soft_cap), wide, grad.double())
    for got, want in zip(found, right, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)


def call(op, *arguments):
    return lambda: op()(*arguments)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (call(lambda: ops.Rotary(2, 4), torch.ones(3, 23)), ValueError, "rotary: expected x [..., sequence, 24], 2 queries, 2 keys and as many values of 4 features, got [3, 23]. Let the product before it write"),
        (call(lambda: ops.Attention(2, 4), torch.ones(24)), ValueError, "attention: expected x [..., sequence, 24], 2 queries, 2 keys and as many values of 4 features, got [24]. Let the product before it write"),
        (call(lambda: ops.Attention(3, 4, num_kv_heads=2), torch.ones(1, 28)), ValueError, "attention: expected num_kv_heads that divides num_heads, and a head_dim, got 2, 3 and 4. Heads share keys and values evenly."),
        (call(lambda: ops.Rotary(2, 4), torch.ones(3, 24, dtype=torch.int64)), TypeError, "rotary: expected x of dtype float32, bfloat16, float16 or float64, got int64. Convert it before the call."),
        (call(lambda: ops.Rotary(2, 4, rotated_features=3), torch.ones(3, 24)), ValueError, "rotary: expected an even number of features to rotate, up to head_dim 4, got 3. Change rotated_features."),
        (call(lambda: ops.Rotary(2, 4, tables=True), torch.ones(3, 24), torch.ones(4, 4), torch.ones(4, 4)), ValueError, "rotary: expected cosines and sines of shape [3, 4], or alike and such that they broadcast to [3, 4], got [4, 4] and [4, 4]. Pass one for each position and feature that is turned."),
        (call(lambda: ops.Rotary(2, 4, tables=True), torch.ones(3, 24), torch.ones(3, 4), torch.ones(3, 2)), ValueError, "got [3, 4] and [3, 2]. Pass one for each position"),
        (call(lambda: ops.Rotary(2, 4, tables=True), torch.ones(3, 24), torch.ones(3, 4), torch.ones(3, 4, dtype=torch.int32)), TypeError, "rotary: expected cosines and sines of a floating dtype, got int32. Pass those of the angles."),
        (call(lambda: ops.Rotary(2, 4, tables=True), torch.ones(3, 24), torch.ones(3, 4), torch.ones(3, 4, requires_grad=True)), NotImplementedError, "rotary: expected sines that need no gradient, as none is computed, got a tensor that requires grad. Detach it."),
        (lambda: torch.ops.tandem.rotary(torch.ones(3, 24), torch.ones(3, 4), None, 2, 2, 4, 4, 1e4, False, False), ValueError, "rotary: expected cosines and sines, or neither, got one of them. Pass both."),
        (call(lambda: ops.Attention(2, 4, mask=True), torch.ones(3, 24), torch.ones(3, 4)), ValueError, "attention: expected a mask that broadcasts to [..., num_heads, sequence, sequence] = [2, 3, 3], got [3, 4]. Reshape it"),
        (call(lambda: ops.Attention(2, 4, mask=True), torch.ones(3, 24), torch.ones(3, 3, dtype=torch.int64)), TypeError, "attention: expected a mask of booleans, or of floating-point numbers that are added to the scores, got int64. Pass mask.bool()"),
        (lambda: torch.ops.tandem.attention_forward(torch.ones(3, 24), None, 2, 2, 4, False, -1.0, 0.0), ValueError, "attention: expected scale and soft_cap of at least 0, got -1 and 0. 0 is the usual scale, and no cap."),
        (lambda: torch.ops.tandem.attention_backward(torch.ones(3, 8), torch.ones(3, 24), torch.ones(3, 8), torch.ones(3, 2), None, 2, 2, 4, False, 0.0, 0.0, [True, True]), ValueError, "attention_backward: expected a mask of numbers where its gradient is wanted, got none. Pass it, or ask for no gradient."),
        (lambda: torch.ops.tandem.attention_backward(torch.ones(3, 9), torch.ones(3, 24), torch.ones(3, 9), torch.ones(3, 2), None, 2, 2, 4, False, 0.0, 0.0, [True, False]), ValueError, "attention_backward: expected y of shape [3, 8], got [3, 9]. Pass what the forward op returned."),
        (lambda: torch.ops.tandem.attention_backward(torch.ones(3, 8), torch.ones(3, 24), torch.ones(3, 8), torch.ones(3, 3), None, 2, 2, 4, False, 0.0, 0.0, [True, False]), ValueError, "attention_backward: expected logsumexp of shape [3, 2], got [3, 3]. Pass what the forward op returned."),
        (lambda: ops.Rotary(0, 4), ValueError, "Rotary: expected num_heads"),
    ],
)  # fmt: skip
def test_errors(make, error, text):
    with pytest.raises(error, match=re.escape(text)):
        make()
