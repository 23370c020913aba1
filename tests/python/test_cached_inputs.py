"""Activations that keep their input in eight bits."""

import copy

import pytest
import torch

import tandem
import tandem.ops as ops

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

QUANTIZER = tandem.Float8CurrentScalingQuantizer(torch.float8_e4m3fn)
MADE = [ops.GELU, ops.ReLU, ops.SiLU, ops.SwiGLU, ops.SReGLU, ops.ClampedSwiGLU, ops.SiTUGLU]


def rounded(x):
    return tandem.quantize(x.detach(), QUANTIZER).dequantize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", MADE)
def test_forward_is_exact_and_backward_that_of_the_rounded_input(make, dtype):
    x = torch.randn(8, 32, dtype=dtype, requires_grad=True)
    cached, plain = make(cache_quantized_input=True), make()
    y = cached(x)
    assert torch.equal(y, plain(x))
    grad = torch.randn_like(y)
    stand_in = rounded(x).requires_grad_()
    expected = torch.autograd.grad(plain(stand_in), stand_in, grad)[0]
    assert torch.equal(torch.autograd.grad(y, x, grad)[0], expected)
    assert make is ops.ReLU or not torch.equal(torch.autograd.grad(plain(x), x, grad)[0], expected)  # whose slope the sign of x says


@pytest.mark.parametrize("compiled", [False, True])
def test_in_a_pipeline(compiled):
    box = ops.Sequential(ops.Linear(16, 64), ops.SwiGLU(cache_quantized_input=True), ops.Linear(32, 16))
    x = torch.randn(32, 16, requires_grad=True)
    run = torch.compile(box, fullgraph=True, backend="aot_eager") if compiled else box
    h = torch.nn.functional.linear(x, box[0].weight, box[0].bias)
    h.retain_grad()
    y = run(x)
    torch.testing.assert_close(y, box[2](ops.SwiGLU()(h)))
    grads = torch.autograd.grad(y.sum(), [x, *box.parameters()])
    stand_in = rounded(h).requires_grad_()
    inner = torch.autograd.grad(torch.nn.functional.linear(ops.SwiGLU()(stand_in), box[2].weight).sum(), stand_in)[0]
    torch.testing.assert_close(grads[1], inner.t() @ x.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(grads[0], inner @ box[0].weight.detach(), rtol=1e-4, atol=1e-4)


def test_a_byte_for_each_number_is_kept_and_none_without_gradients():
    held = []

    def pack(tensor):
        held.append(tensor)
        return tensor

    x = torch.randn(64, 64, requires_grad=True)
    op = ops.GELU(cache_quantized_input=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = op(x)
    assert sorted(tensor.numel() * tensor.element_size() for tensor in held) == [4, 64 * 64]
    y.sum().backward()


def test_the_attribute_counts_at_the_next_call_and_in_copies():
    op, x = ops.GELU(), torch.randn(8, 8, requires_grad=True)
    box = ops.Sequential(op, ops.ConstantScale(2.0))
    exact = torch.autograd.grad(box(x).sum(), x)[0]
    op.cache_quantized_input = True
    assert op.cache_quantized_input and copy.deepcopy(op).cache_quantized_input
    assert not torch.equal(torch.autograd.grad(box(x).sum(), x)[0], exact)
    op.cache_quantized_input = False
    assert not op.cache_quantized_input
    assert torch.equal(torch.autograd.grad(box(x).sum(), x)[0], exact)
