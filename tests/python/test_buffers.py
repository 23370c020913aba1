"""Ops that are written in Python and hold buffers, in eager and compiled code."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import tandem.ops as ops

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Offset(ops.BasicOperation):
    """y = x * factor, the factor a buffer that backward reads from the op."""

    fuser_options = ()

    def __init__(self, factor=2.0):
        super().__init__()
        self.register_buffer("factor", torch.tensor([factor, factor + 1]))

    def op_forward(self, ctx, input_, **_):
        return input_ * self.factor

    def op_backward(self, ctx, grad_output):
        return grad_output * self.factor, ()


class BatchNorm(ops.BasicOperation):
    """As torch.nn.BatchNorm1d: running statistics in buffers, which forward writes."""

    fuser_options = ()

    def __init__(self, features):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(features) + 0.5)
        self.bias = torch.nn.Parameter(torch.rand(features))
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def op_forward(self, ctx, input_, **_):
        mean, var = self.running_mean, self.running_var
        if self.training:
            mean, var = input_.mean(0), input_.var(0, correction=0)
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(mean, 0.1)
            self.running_var.lerp_(input_.var(0), 0.1)
        inv_std = torch.rsqrt(var + 1e-5)
        normed = (input_ - mean) * inv_std
        ctx.save_for_backward(normed, inv_std, self.weight)
        ctx.in_training = self.training
        return normed * self.weight + self.bias

    def op_backward(self, ctx, grad_output):
        normed, inv_std, weight = ctx.saved_tensors
        grad = grad_output * weight
        if ctx.in_training:
            grad = grad - grad.mean(0) - normed * (grad * normed).mean(0)
        return grad * inv_std, [(grad_output * normed).sum(0), grad_output.sum(0)]


class Assigning(ops.BasicOperation):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(1))

    def op_forward(self, ctx, input_, **_):
        self.steps = self.steps + 1
        return input_ * 1

    def op_backward(self, ctx, grad_output):
        return grad_output, ()


BACKENDS = [None, "aot_eager", "inductor"]


def compiled(box, backend):
    return box if backend is None else torch.compile(box, backend=backend, fullgraph=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_buffer_that_is_read(backend):
    op = Offset()
    function = compiled(ops.Sequential(op, ops.Identity()), backend)
    x = torch.randn(3, 2, requires_grad=True)
    for factor in (op.factor.clone(), torch.tensor([5.0, 7.0])):
        op.factor.copy_(factor)
        y = function(x)
        torch.testing.assert_close(y, x * factor)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], factor.expand(3, 2))
    op.factor = torch.tensor([1.0, 0.5])
    torch.testing.assert_close(function(x), x * op.factor)


@pytest.mark.parametrize("backend", BACKENDS)
def test_buffers_that_forward_writes(backend):
    op, reference = BatchNorm(4), torch.nn.BatchNorm1d(4)
    reference.load_state_dict(op.state_dict())
    box = ops.Sequential(ops.ConstantScale(1.0), op)
    function = compiled(box, backend)
    for step in range(5):
        if step == 3:
            box.eval(), reference.eval()
        x = torch.randn(6, 4, requires_grad=True)
        grad = torch.randn(6, 4)
        actual = torch.autograd.grad(y := function(x), [x, op.weight, op.bias], grad)
        expected = torch.autograd.grad(z := reference(x), [x, reference.weight, reference.bias], grad)
        torch.testing.assert_close(y, z)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(dict(op.state_dict()), dict(reference.state_dict()))


def test_an_op_that_has_changed_since_stands_in_for_none():
    """Both ops have the key of an op in training; the first one, which is alive, has left it."""
    first, second = BatchNorm(4), BatchNorm(4)
    for op in (first, second):
        torch._dynamo.reset()
        torch.compile(ops.Sequential(op), backend="aot_eager", fullgraph=True)(torch.randn(6, 4))
        assert op.num_batches_tracked == 1
        op.eval()


def test_ops_that_differ_in_the_values_of_buffers_share_code():
    counter = CompileCounterWithBackend("aot_eager")
    x = torch.randn(3, 2)
    for factor in (2.0, 3.0, 4.0):
        box = ops.Sequential(Offset(factor))
        box.compile(backend=counter, fullgraph=True)
        torch.testing.assert_close(box(x), x * torch.tensor([factor, factor + 1]))
    assert counter.frame_count == 1


def test_a_buffer_that_forward_assigns_is_refused_in_compiled_code():
    box = ops.Sequential(Assigning())
    box(torch.ones(2))
    assert box[0].steps == 1
    with pytest.raises(Exception, match=r"Assigning: expected steps to be written in place in compiled code, got another tensor assigned"):
        torch.compile(box, backend="aot_eager", fullgraph=True)(torch.ones(2))
    assert box[0].steps == 1
