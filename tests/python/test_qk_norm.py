"""Norms of the heads of queries and keys as an op of a pipeline, against plain float64; and the op between a product and attention."""

import random

import pytest
import torch
from support import TOLERANCES, each_raises, randomize
from test_attention_ops import HEADS, HIDDEN, LAYER, call, compare, drawn_shape, far, kept_of, parts, plain_attention, plain_rotary, run

import tandem
from tandem import ops


def plain_qk_norm(x, query_weight, key_weight, *, num_heads, num_kv_heads=0, eps=1e-5, zero_centered_gamma=False):
    q, k, v = parts(x, num_heads, num_kv_heads or num_heads, len(query_weight))

    def normed(t, weight):
        return t / (t.square().mean(-1, keepdim=True) + eps).sqrt() * (weight + 1 if zero_centered_gamma else weight)

    return torch.cat([normed(q, query_weight), normed(k, key_weight), v], -2).flatten(-2)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_is_the_definition(dtype):
    for seed in range(60):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        heads, groups = draw.choice(HEADS)
        dim = draw.choice([2, 7, 16, 33, 80])
        options = {"num_heads": heads, "num_kv_heads": draw.choice([groups, 0]) if heads == groups else groups, "eps": draw.choice([1e-5, 0.1]), "zero_centered_gamma": draw.random() < 0.5}
        op = ops.QKNorm(head_dim=dim, **options)

        def given(x, query, key, op=op):
            return torch.func.functional_call(op, {"query_weight": query, "key_weight": key}, (x,))

        weights = [torch.randn(dim), torch.randn(dim)]
        compare(given, lambda *t, options=options: plain_qk_norm(*t, **options), torch.randn(drawn_shape(draw, heads, groups, dim)), weights, dtype, draw)


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_is_rms_norm_of_each_head(dtype, rounds):
    norm, alone = randomize(ops.QKNorm(3, 8, num_kv_heads=1, dtype=dtype, rounds_before_weight=rounds)), ops.RMSNorm(8, dtype=dtype, rounds_before_weight=rounds)
    x = torch.randn(2, 5, 40).to(dtype).requires_grad_()
    q, k, v = parts(x, 3, 1, 8)
    wanted = []
    for part, weight in ((q, norm.query_weight), (k, norm.key_weight)):
        alone.weight = weight
        wanted.append(alone(part))
    y, want = norm(x), torch.cat([*wanted, v], -2).flatten(-2)
    assert torch.equal(y, want)
    leaves, grad = [x, norm.query_weight, norm.key_weight], torch.randn(2, 5, 40).to(dtype)
    found, right = torch.autograd.grad(y, leaves, grad), torch.autograd.grad(want, leaves, grad)
    assert torch.equal(found[0], right[0])
    for got, expected in zip(found[1:], right[1:], strict=True):  # summed in another order
        torch.testing.assert_close(got, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_has_the_dtypes_of_rms_norm():
    x = torch.randn(2, 5, 24)
    assert ops.QKNorm(2, 4)(x.bfloat16()).dtype == torch.float32
    assert ops.QKNorm(2, 4, dtype=torch.float64)(x).dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.QKNorm(2, 4)(x).dtype == torch.bfloat16
    for dtype, way in ((torch.bfloat16, "by cpu"), (torch.float64, "by reference")):
        box = ops.Sequential(ops.QKNorm(2, 4, dtype=dtype))
        box(x.to(dtype).requires_grad_()).sum().backward()
        assert box.explain().count(way) == 2
    one, two = torch.rand(4, dtype=torch.float64), torch.rand(4).bfloat16()
    arguments = (2, 2, 1e-5, False, False)
    y = torch.ops.tandem.qk_norm_forward(x, one, two, *arguments)
    assert y.dtype == torch.float32
    found = torch.ops.tandem.qk_norm_backward(x.double(), x, one, two, *arguments, [True] * 3)
    assert [each.dtype for each in found] == [torch.float32, torch.float64, torch.bfloat16]
    right = torch.ops.tandem.qk_norm_backward(x, x, one.float(), two.float(), *arguments, [True] * 3)
    for got, wanted in zip((y, *found), (torch.ops.tandem.qk_norm_forward(x, one.float(), two.float(), *arguments), *right), strict=True):
        torch.testing.assert_close(got.float(), wanted, atol=2e-2 if got.dtype == torch.bfloat16 else 1e-5, rtol=1e-2 if got.dtype == torch.bfloat16 else 1e-5)


def test_as_a_module():
    norm = ops.QKNorm(4, 8, num_kv_heads=2, eps=1e-3)
    assert {name: (tuple(each.shape), each.unique().tolist()) for name, each in norm.named_parameters()} == {"query_weight": ((8,), [1.0]), "key_weight": ((8,), [1.0])}
    assert repr(norm) == "QKNorm(num_heads=4, head_dim=8, num_kv_heads=2, eps=0.001, zero_centered_gamma=False)"
    x = torch.randn(3, 64)
    deferred = ops.QKNorm(4, 8, num_kv_heads=2, device="meta", zero_centered_gamma=True)
    torch.testing.assert_close(deferred(x), ops.QKNorm(4, 8, num_kv_heads=2)(x))
    assert not deferred.query_weight.any() and not deferred.key_weight.any()
    before = norm(x)
    norm.eps = 10.0
    assert not torch.equal(norm(x), before)
    norm.query_weight.requires_grad_(False)
    norm(x).sum().backward()
    assert norm.query_weight.grad is None and norm.key_weight.grad is not None
    norm.requires_grad_(False)
    assert not norm(x).requires_grad
    (alone,) = torch.autograd.grad(norm(x.requires_grad_()).square().sum(), x)
    norm.requires_grad_(True)
    assert torch.equal(torch.autograd.grad(norm(x).square().sum(), x)[0], alone)


def normed_block(dtype=torch.float32):
    like = {"dtype": dtype}
    return randomize(ops.Sequential(ops.Linear(24, 8 * 16, **like), ops.QKNorm(**LAYER, **like), ops.Rotary(**LAYER), ops.Attention(**LAYER, causal=True), ops.Linear(HIDDEN, 24, **like)))


def plain_block(x, qkv, qkv_bias, query_weight, key_weight, out, out_bias):
    options = {name: LAYER[name] for name in ("num_heads", "num_kv_heads")}
    joined = plain_rotary(plain_qk_norm(x @ qkv.T + qkv_bias, query_weight, key_weight, **options), **LAYER)
    return plain_attention(joined, **LAYER, causal=True) @ out.T + out_bias


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_between_a_product_and_attention(dtype, fresh_dynamo):
    torch.manual_seed(0)
    block = normed_block(dtype)
    compiled = [torch.compile(block, fullgraph=True, backend=backend, dynamic=True) for backend in ("aot_eager", "inductor")]
    for length in (12, 7):
        x, seed = torch.randn(2, length, 24).to(dtype).requires_grad_(), torch.randn(2, length, 24).to(dtype)
        wide = [each.detach().double().requires_grad_() for each in (x, *block.parameters())]
        want = plain_block(*wide)
        wanted = [want, *torch.autograd.grad(want, wide, seed.double())]
        for function in (block, *compiled):
            y = function(x)
            for got, right in zip([y, *torch.autograd.grad(y, [x, *block.parameters()], seed)], wanted, strict=True):
                assert far(got, right) < 4 * max(TOLERANCES[dtype], 1e-6), "angles are float32"
    assert block.verify(x).passed


def test_what_is_kept():
    block = normed_block()
    block(torch.randn(2, 12, 24, requires_grad=True)).sum().backward()
    assert kept_of(block) == {"bias.y", "rotary.y", "attention.y", "attention.logsumexp"}, "the product, no statistics"
    block.requires_grad_(False)
    block(torch.randn(2, 12, 24))
    assert not kept_of(block)


def test_of_no_rows():
    block = normed_block()
    for shape in ((2, 0, 24), (0, 5, 24)):
        x = torch.randn(shape, requires_grad=True)
        y = block(x)
        assert y.shape == shape
        found = torch.autograd.grad(y.sum(), [x, *block.parameters()])
        assert found[0].shape == shape and not any(each.any() for each in found)


def test_under_a_recipe_and_a_memory_budget():
    torch.manual_seed(0)
    block = normed_block()
    x, seed = torch.randn(2, 32, 24, requires_grad=True), torch.randn(2, 32, 24)
    want = run(block, x, seed)
    torch.testing.assert_close(run(ops.Sequential(*block, memory_budget=900), x, seed), want, rtol=0, atol=0)
    with tandem.autocast(recipe=tandem.recipe.Float8CurrentScaling()):
        run(block, x, seed)
        assert block.verify(x).passed


def test_under_transforms_of_torch():
    norm = randomize(ops.QKNorm(2, 4, num_kv_heads=1, dtype=torch.float64))
    x, weights = torch.randn(3, 5, 16, dtype=torch.float64), dict(norm.named_parameters())

    def plain(x):
        return plain_qk_norm(x, *weights.values(), num_heads=2, num_kv_heads=1)

    torch.testing.assert_close(torch.func.grad(lambda x: norm(x).square().sum())(x), torch.func.grad(lambda x: plain(x).square().sum())(x))
    torch.testing.assert_close(torch.func.vmap(norm)(x), plain(x))
    torch.testing.assert_close(torch.func.jvp(norm, (x,), (x.sin(),)), torch.func.jvp(plain, (x,), (x.sin(),)))
    assert torch.autograd.gradcheck(lambda x, *given: torch.func.functional_call(norm, dict(zip(weights, given, strict=True)), (x,)), (x.requires_grad_(), *weights.values()))


test_errors = each_raises([
    (lambda: ops.QKNorm(0, 4), ValueError, "QKNorm: expected num_heads"),
    (lambda: ops.QKNorm(2, 0), ValueError, "QKNorm: expected head_dim to be a whole number > 0, got 0. Give the features of a head."),
    (lambda: setattr(ops.QKNorm(2, 4), "head_dim", 8), ValueError, "QKNorm: expected head_dim=4, with which it was built, got 8. Build another one"),
    (lambda: ops.QKNorm(2, 4, eps=-1.0), ValueError, "QKNorm: expected eps to be a finite number >= 0, got -1"),
    (lambda: ops.QKNorm(2, 4, dtype=torch.int32), ValueError, "QKNorm: expected dtype to be torch.float32"),
    (call(lambda: ops.QKNorm(2, 4), torch.ones(3, 23)), ValueError, "qk_norm: expected x [..., sequence, 24], 2 queries, 2 keys and as many values of 4 features, got [3, 23]. Let the product before it write"),
    (lambda: torch.ops.tandem.qk_norm_forward(torch.ones(3, 24), torch.ones(4), torch.ones(3), 2, 2, 1e-5, False, False), ValueError, "qk_norm: expected query_weight and key_weight of shape [head_dim], got [4] and [3]. Pass a factor for each feature of a head."),
    (lambda: torch.ops.tandem.qk_norm_forward(torch.ones(3, 24), torch.ones(4), torch.ones(4, dtype=torch.int64), 2, 2, 1e-5, False, False), TypeError, "qk_norm: expected key_weight of dtype float32, bfloat16, float16 or float64, got int64."),
    (lambda: torch.ops.tandem.qk_norm_backward(torch.ones(3, 23), torch.ones(3, 24), torch.ones(4), torch.ones(4), 2, 2, 1e-5, False, False, [True] * 3), ValueError, "qk_norm_backward: expected grad_y of the shape of x, [3, 24], got [3, 23]."),
])  # fmt: skip
