"""What a user calls an op or a fusion decides nothing."""

import pytest
import torch
from python_ops import SplitScale
from test_fusions_python import JointSquare, replacing

import tandem.ops as ops

NAMES = ["add", "cast", "quantize", "dequantize", "rename", "draw_seed", "grad_x", "gelu", "rms_norm.backward"]


@pytest.mark.parametrize("name", NAMES)
def test_a_joint_fusion_may_have_any_name(name):
    fuse = replacing([ops.SiLU, ops.SiLU], JointSquare)
    fuse.__qualname__ = name
    box, x = ops.Sequential(ops.MakeExtraOutput(), ops.SiLU(), ops.SiLU(), ops.MakeExtraOutput()), torch.randn(4, requires_grad=True)
    with ops.register_forward_backward_fusion(fuse):
        y, first, second = box(x)
        assert f"made    {name} at ops 1 to 2" in box.explain()
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x, retain_graph=True)[0], 2 * x)
        torch.testing.assert_close(torch.autograd.grad(second.sum() + first.sum(), x, retain_graph=True)[0], 2 * x + 1)
        torch.testing.assert_close(torch.autograd.grad(y.sum() + 3 * second.sum() + first.sum(), x)[0], 8 * x + 1)


@pytest.mark.parametrize("name", NAMES)
def test_an_op_may_have_any_name(name):
    x = torch.randn(4, 8, requires_grad=True)
    linear, bias, op = ops.BasicLinear(8, 8), ops.Bias(8), type(name, (SplitScale,), {})  # y = 3 x
    y, extra = ops.Sequential(linear, bias, op(), ops.MakeExtraOutput(), op())(x)
    z = (x @ linear.weight.t() + bias.bias) * 3
    torch.testing.assert_close((y, extra), (3 * z, z))
    ours = torch.autograd.grad(y.sum() + extra.square().sum(), [x, linear.weight, bias.bias])
    torch.testing.assert_close(ours, torch.autograd.grad(3 * z.sum() + z.square().sum(), [x, linear.weight, bias.bias]))


class JointSplit(ops.FusedOperation):
    """silu, make_extra_output as x^2, twice."""

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **_):
        basic_op_ctxs[0].save_for_backward(input_)
        return input_ * input_, [(), (input_ * input_,)]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        (x,) = basic_op_ctxs[0].saved_tensors
        given = [grad for grad in (grad_output, basic_op_grad_extra_outputs[1][0]) if grad is not None]
        return 2 * x * sum(given), [(), ()], [(), ()]


def test_a_fused_op_gets_the_gradient_of_each_of_its_outputs():
    box, x = ops.Sequential(ops.SiLU(), ops.MakeExtraOutput()), torch.randn(4, requires_grad=True)
    with ops.register_forward_backward_fusion(replacing([ops.SiLU, ops.MakeExtraOutput], JointSplit)):
        y, extra = box(x)
        assert "made    fuse_into_JointSplit" in box.explain()
        for weights in ((1, 3), (1, 0), (0, 3)):
            terms = [weight * output.sum() for weight, output in zip(weights, (y, extra), strict=True) if weight]
            torch.testing.assert_close(torch.autograd.grad(sum(terms), x, retain_graph=True)[0], 2 * sum(weights) * x)


def test_seventy_outputs_differentiated_on_a_subset():
    box = ops.Sequential(*[op for _ in range(70) for op in (ops.MakeExtraOutput(), ops.ConstantScale(0.98))])
    x = torch.randn(3, requires_grad=True)
    outputs = box(x)
    assert len(outputs) == 71
    for chosen in ([0], [64], [1, 66, 70]):
        gradient = torch.autograd.grad(sum(outputs[i].sum() for i in chosen), x, retain_graph=True)[0]
        torch.testing.assert_close(gradient, torch.full((3,), sum(0.98 ** (70 if i == 0 else i - 1) for i in chosen)))


def test_complex_gradients_are_refused_before_anything_runs():
    x = torch.randn(2, 4, dtype=torch.complex64)
    linear = ops.Linear(4, 4, bias=False, dtype=torch.complex64)
    with pytest.raises(NotImplementedError, match="expected floating-point operands where gradients are needed, got complex64"):
        linear(x)
    with torch.no_grad():
        torch.testing.assert_close(linear(x), x @ linear.weight.t())


def test_a_sum_in_place_has_the_dtype_of_the_callers_tensor():
    box = ops.Sequential(ops.AddExtraInput(in_place=True), ops.Linear(8, 8))
    x, extra = torch.randn(4, 8), torch.randn(4, 8).bfloat16()
    expected = torch.nn.functional.linear(extra.clone().add_(x).float(), *box[1].parameters())
    torch.testing.assert_close(torch.compile(box, backend="aot_eager")(x, extra.clone()), expected)
    torch.testing.assert_close(box(x, extra), expected)
