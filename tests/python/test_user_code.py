"""Ops and fusions of users that do what they should not: right, or an error, never a wrong number or a crash."""

import pytest
import torch
from python_ops import op_of
from support import fork
from torch.nn import functional as F

import tandem
from tandem import ops


class Sigmoid(ops.BasicOperation):
    """Keeps its output."""

    def op_forward(self, ctx, input_, **unused):
        y = torch.sigmoid(input_)
        ctx.save_for_backward(y)
        return y

    def op_backward(self, ctx, grad_output):
        (y,) = ctx.saved_tensors
        return grad_output * y * (1 - y), ()


DoubleInPlace = op_of(lambda x: x.mul_(2), lambda grad: 2 * grad)  # overwrites its input


class TripleExtraInPlace(ops.BasicOperation):
    num_extra_inputs = 1

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
        return input_ + basic_op_extra_inputs[0][0].mul_(3), [()]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        return grad_output, [()], [(3 * grad_output,)]


WRITTEN = "unchanged, as backward reads it, got an in-place write by this op. Write into a copy."


def test_a_write_to_what_an_earlier_op_keeps_raises():
    x = torch.randn(8, 16, requires_grad=True)
    with pytest.raises(RuntimeError, match=WRITTEN):
        ops.Sequential(Sigmoid(), DoubleInPlace())(x)
    with pytest.raises(RuntimeError, match=WRITTEN):
        ops.Sequential(ops.Linear(16, 16), fork("r"), ops.SiLU(), TripleExtraInPlace().set_extra_input_channel(0, "r"))(x)


def test_a_write_to_what_nothing_keeps_is_right():
    x = torch.randn(8, 16, requires_grad=True)
    y = ops.Sequential(ops.ConstantScale(3.0), DoubleInPlace(), Sigmoid())(x)
    (found,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad(torch.sigmoid(6 * x).sum(), x)
    torch.testing.assert_close(found, expected)
    with torch.no_grad():  # where nothing is kept, anything may be written
        torch.testing.assert_close(ops.Sequential(Sigmoid(), DoubleInPlace())(x), 2 * torch.sigmoid(x))


@pytest.mark.parametrize("shape", [(64, 16), (-1, 16)])
def test_a_gradient_of_another_shape_behind_a_reshape_raises(shape):
    x = torch.randn(16, 64, requires_grad=True)
    y = ops.Sequential(ops.Reshape(shape), op_of(lambda x: x * 1, lambda grad: grad.t().contiguous())())(x)
    with pytest.raises(ValueError, match=r"reshape: expected a gradient of shape \[-?\d+, 16\], got \[16, 64\]. Return a gradient of the shape"):
        y.sum().backward()


class JointLinear(ops.FusedOperation):
    """A product without quantization: a user's fusion is given what it fuses."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        basic_op_ctxs[0].save_for_backward(input_)
        return F.linear(input_, self.basic_ops[0].weight), [()]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        (x,) = basic_op_ctxs[0].saved_tensors
        weight = self.basic_ops[0].weight
        return grad_output @ weight, [(grad_output.t() @ x,)], [()]


def test_a_joint_fusion_of_a_product_under_a_recipe_is_made_or_refused():
    x = torch.randn(8, 32, requires_grad=True)
    pipeline = ops.Sequential(ops.Linear(32, 32, bias=False))

    def fuse(found, **unused):
        return [JointLinear(found[:1]), *found[1:]]

    with ops.register_forward_backward_fusion(fuse):
        with tandem.autocast():
            y = pipeline(x)
        y.sum().backward()
        assert "fuse at ops 0 to 0" in pipeline.explain()
    torch.testing.assert_close(y, F.linear(x, pipeline[0].weight))
    assert x.grad is not None and pipeline[0].weight.grad is not None


def test_a_fusion_function_that_calls_its_own_pipeline_raises():
    x = torch.randn(4, 16)
    pipeline = ops.Sequential(ops.GELU(), ops.ReLU())
    calls = []

    def fuse(found, **unused):
        if not calls:
            calls.append(1)
            pipeline(x)
        return found

    with ops.register_forward_fusion(fuse), pytest.raises(ValueError, match="expected fusion functions that do not call the pipeline that is being planned"):
        pipeline(x)
    torch.testing.assert_close(pipeline(x), F.relu(F.gelu(x, approximate="tanh")))


GIVEN_BACK = r"pipeline: expected tensors with memory, got one of shape \[64, 16\] whose storage was given back. Keep it until|data is not allocated yet"


@pytest.mark.parametrize("make", [lambda: ops.GELU(), lambda: ops.RMSNorm(16), lambda: ops.Linear(16, 16)])
def test_memory_that_was_given_back_raises(make):
    x = torch.randn(64, 16, requires_grad=True)
    pipeline = ops.Sequential(make())
    hidden = x * 1
    y = pipeline(hidden)
    hidden.untyped_storage().resize_(0)
    with pytest.raises((ValueError, RuntimeError), match=GIVEN_BACK):
        y.sum().backward()
    for region in (tandem.autocast(enabled=False), tandem.autocast()):
        with region, pytest.raises((ValueError, RuntimeError), match=GIVEN_BACK):
            pipeline(hidden)


def test_torch_func_under_a_recipe_whose_backward_rounds_is_refused():
    pipeline = ops.Sequential(ops.Quantize(forward=False, backward=True))
    x = torch.randn(4, 16)
    with tandem.autocast(), pytest.raises(NotImplementedError, match="expected no recipe where torch.func differentiates, got one whose backward rounds gradients"):
        torch.func.vjp(pipeline, x)
    norm = ops.Sequential(ops.RMSNorm(16))
    with tandem.autocast():
        _, pullback = torch.func.vjp(norm, x)
    pullback(x)
