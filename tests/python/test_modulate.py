"""Modulation against its formula in float64: adaptive norms, gates and scales of layers."""

import random
import re

import pytest
import torch
from support import TOLERANCES, each_raises, fork
from test_attention_ops import call, compare, kept_of

import tandem
from tandem import ops

SHAPES = [(2, 5, 8), (1, 7, 33), (70, 130), (2, 3, 4, 6), (3, 0, 8), (0, 4), (400, 3)]


def formula(zero_centered):
    return lambda x, scale, shift=0: x * (scale + zero_centered) + shift


def vector(draw, shape):
    """Of a row for each group of rows, for all, for each row, and of shapes that no kernel takes."""
    some = draw.randrange(len(shape))
    by_groups = (*shape[:some], *[1] * (len(shape) - 1 - some), shape[-1])
    return torch.randn(draw.choice([by_groups, by_groups, shape[-1:], shape, shape[1:], (1,), (), (*shape[:-1], 1)]))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_it_is_the_formula(dtype):
    for seed in range(80):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        shape, zero_centered, has_shift = draw.choice(SHAPES), draw.random() < 0.5, draw.random() < 0.6
        scale = vector(draw, shape)
        shift = [torch.randn(scale.shape) if draw.random() < 0.7 else vector(draw, shape)] if has_shift else []
        op = ops.Modulate(zero_centered=zero_centered, shift=has_shift)
        compare(op, formula(zero_centered), torch.randn(shape), [scale, *shift], dtype, draw)


@pytest.mark.parametrize("vectors", [torch.float32, torch.bfloat16], ids=str)
def test_vectors_of_another_dtype_promote_as_in_torch(vectors):
    x = torch.randn(2, 5, 8, dtype=torch.bfloat16, requires_grad=True)
    scale, shift = (torch.randn(2, 1, 8, dtype=vectors, requires_grad=True) for _ in range(2))
    y = ops.Modulate()(x, scale, shift)
    assert y.dtype == (x * scale).dtype
    y.sum().backward()
    assert [each.grad.dtype for each in (x, scale, shift)] == [torch.bfloat16, vectors, vectors]
    assert torch.equal(shift.grad, torch.full_like(shift, 5))


def test_a_row_is_rounded_once():
    x, scale, shift = (torch.tensor([[value]], dtype=torch.bfloat16) for value in (17 / 16, 17 / 16, -9 / 8))
    assert ops.Modulate(zero_centered=False)(x, scale[0], shift[0]) == 1 / 256  # the product, 1 + 1/8 + 1/256, would be rounded to 1 + 1/8


def test_backward_writes_the_output_again_instead_of_keeping_it():
    block = ops.Sequential(ops.LayerNorm(8), ops.Modulate(), ops.Linear(8, 8), ops.Modulate(zero_centered=False, shift=False))
    x, *vectors = torch.randn(2, 4, 8, requires_grad=True), *torch.randn(3, 2, 1, 8).requires_grad_().unbind()
    block(x, *vectors).sum().backward()
    assert kept_of(block) == {"layer_norm.mean", "layer_norm.inv_std", "bias.y"}, "neither what the norm nor what the modulation writes"
    assert tandem.verify(block, x.detach().requires_grad_(), *[each.detach().requires_grad_() for each in vectors])


def test_gradients_keep_what_they_need():
    x, scale, shift = torch.randn(2, 5, 8, requires_grad=True), torch.randn(2, 1, 8), torch.randn(2, 1, 8, requires_grad=True)
    y = ops.Modulate()(x, scale, shift)
    with torch.no_grad():  # the gradient of x needs neither
        x.zero_()
        shift.zero_()
    gradients = torch.autograd.grad(y.sum(), (x, shift))
    assert torch.equal(gradients[0], (1 + scale).expand(2, 5, 8)) and torch.equal(gradients[1], torch.full_like(shift, 5))


def test_a_shift_of_a_channel_has_the_shape_of_x():
    block = ops.Sequential(fork("c"), ops.Reshape((1, 2, 8)), ops.Modulate().set_extra_input_channel(1, "c"))
    x, scale = torch.randn(2, 8), torch.randn(8)
    with pytest.raises(ValueError, match=re.escape("modulate: expected shift of the shape of x, [1, 2, 8], where a channel brings it, got [2, 8]. Pass it to the call: autograd")):
        block(x, scale)


@pytest.mark.parametrize("dynamic", [False, True])
def test_it_compiles(dynamic):
    op, args = ops.Modulate(), [torch.randn(2, 6, 8, requires_grad=True), *(torch.randn(2, 1, 8, requires_grad=True) for _ in range(2))]
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    torch.testing.assert_close(torch.autograd.grad(compiled(*args).square().sum(), args), torch.autograd.grad(op(*args).square().sum(), args), rtol=0, atol=0)


def test_sums_do_not_depend_on_threads():
    x, scale = torch.randn(3, 1000, 300, requires_grad=True), torch.randn(3, 1, 300, requires_grad=True)
    grad, threads, found = torch.randn(3, 1000, 300), torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(torch.autograd.grad(ops.Modulate(shift=False)(x, scale), (x, scale), grad))
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, *found))


test_errors = each_raises([
    (call(ops.Modulate, torch.ones(3, 8), torch.ones(4, 8), torch.ones(8)), ValueError, "modulate: expected scale that broadcasts to x [3, 8], got [4, 8]. One row for each sequence of x [batch, sequence, hidden] is [batch, 1, hidden]."),
    (call(ops.Modulate, torch.ones(3, 8), torch.ones(8), torch.ones(2, 3, 8)), ValueError, "modulate: expected shift that broadcasts to x [3, 8], got [2, 3, 8]. One row"),
    (call(ops.Modulate, torch.ones(3, 8, dtype=torch.int64), torch.ones(8, dtype=torch.int64), torch.ones(8, dtype=torch.int64)), TypeError, "modulate: expected x of dtype float32, bfloat16, float16 or float64, got int64. Convert it before the call."),
    (call(ops.Modulate, torch.ones(3, 8), torch.ones(8)), ValueError, "expected"),
    (lambda: torch.ops.tandem.modulate_scale_backward(torch.ones(3, 7), torch.ones(3, 8), torch.ones(8)), ValueError, "modulate_scale_backward: expected grad_y of the shape of x, [3, 8], got [3, 7]."),
])  # fmt: skip
