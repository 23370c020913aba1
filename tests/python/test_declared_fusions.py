"""Fusions that are declared: a pattern, a refusal, an implementation."""

import pytest
import torch
from python_ops import WholeSin
from support import OPS, gated, tanh_gelu
from test_fusions_python import numbers

import tandem
import tandem.ops as ops


def relu_scale(x, relu, scale):
    return torch.relu(x) * scale.scale, {relu: {"x": x}}


def negative(relu, scale):
    return "the factor is negative" if scale.scale < 0 else None


def box_of(factor=2.0):
    return ops.Sequential(ops.Linear(4, 4), ops.ReLU(), ops.ConstantScale(factor))


PATTERN = [ops.ReLU, ops.ConstantScale]


def test_a_fusion_of_forward():
    box, x = box_of(), torch.randn(3, 4, requires_grad=True)
    expected = numbers(box, x)
    with ops.register_fusion("relu_scale", PATTERN, forward=relu_scale, refuse=negative) as handle:
        assert isinstance(handle, ops.FusionHandle)
        torch.testing.assert_close(numbers(box, x), expected)
        assert "made    relu_scale at ops 2 to 3" in box.explain() and "relu_scale" in box.fusions_made()
        assert box.verify(x)
        torch._dynamo.reset()
        compiled = torch.compile(box, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), expected[0])
    before = tandem._C.plans_made()
    box(x)
    assert "relu_scale at" not in box.explain() and tandem._C.plans_made() > before, "removal plans again"


def test_a_refusal_is_told_with_its_reason():
    with ops.register_fusion("relu_scale", PATTERN, forward=relu_scale, refuse=negative):
        box, x = box_of(-2.0), torch.randn(3, 4)
        torch.testing.assert_close(box(x), -2 * torch.relu(box[0](x)))
        assert "refused relu_scale at ops 2 to 3: the factor is negative" in box.explain()
        with pytest.raises(ValueError, match="expected fusion \"relu_scale\" to be made, got a refusal: ops 2 to 3: the factor is negative"):
            box_of(-2.0).require_fusion("relu_scale")(x)


def test_a_fusion_of_backward():
    seen = []

    def backward(grad_y, relu, scale, *, saved):
        seen.append(sorted(saved[relu]))
        return grad_y * scale.scale * (saved[relu]["x"] > 0)

    box, x = box_of(), torch.randn(3, 4, requires_grad=True)
    expected = numbers(box, x)
    with ops.register_fusion("relu_scale_backward", PATTERN, backward=backward):
        torch.testing.assert_close(numbers(box, x), expected)
        assert seen == [["x"]] and "made    relu_scale_backward at ops 2 to 3" in box.explain()


def test_a_fusion_of_both_directions_keeps_what_it_likes():
    def forward(x, linear, bias, relu):
        z = torch.nn.functional.linear(x, linear.weight, bias.bias)
        return torch.relu(z), (x, z > 0)

    def backward(grad_y, linear, bias, relu, *, saved):
        x, is_positive = saved
        grad_z = grad_y * is_positive
        return grad_z @ linear.weight, {linear: {"weight": grad_z.t() @ x}, bias: {"bias": grad_z.sum(0)}}

    box, x = box_of(), torch.randn(3, 4, requires_grad=True)
    expected = numbers(box, x)
    with ops.register_fusion("linear_relu", [ops.BasicLinear, ops.Bias, (ops.ReLU, ops.GELU)], forward=forward, backward=backward):
        torch.testing.assert_close(numbers(box, x), expected)
        assert "made    linear_relu at ops 0 to 2" in box.explain()


def test_extra_inputs_and_ops_written_in_python():
    def forward(x, add, sin, *, extra_inputs):
        z = x + extra_inputs[0][0]
        return torch.sin(z), {sin: {"z": z}}

    def backward(grad_y, add, sin, *, saved):
        grad = grad_y * torch.cos(saved[sin]["0"])
        return grad, None, {add: (grad,)}

    box, x, extra = ops.Sequential(ops.AddExtraInput(), WholeSin()), torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    expected = torch.autograd.grad(box(x, extra).sum(), [x, extra])
    with ops.register_fusion("add_sin_backward", [ops.AddExtraInput, WholeSin], backward=backward):
        torch.testing.assert_close(torch.autograd.grad(box(x, extra).sum(), [x, extra]), expected)
        assert "add_sin_backward" in box.fusions_made()
    with ops.register_fusion("add_sin", [ops.AddExtraInput, WholeSin], forward=forward), torch.no_grad():
        torch.testing.assert_close(box(x, extra), torch.sin(x + extra))
        assert "add_sin" in box.fusions_made()


FORMULAS = [
    (lambda: [ops.SwiGLU()], [ops.SwiGLU], gated(torch.nn.functional.silu)),
    (lambda: [ops.GELU(), ops.ConstantScale(2.0)], [ops.GELU, ops.ConstantScale], lambda x: 2 * tanh_gelu(x)),
    (lambda: [ops.RMSNorm(32)], [ops.RMSNorm], OPS["RMSNorm"][1]),
]


@pytest.mark.parametrize(("make", "pattern", "formula"), FORMULAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_percent_of_error_is_found_in_every_dtype(make, pattern, formula, dtype):
    wrong = None

    def off(what, result):
        return (result * 1.01 if what == wrong else result).to(dtype)

    def of_float64(x, found):
        leaves = [tensor.detach().double().requires_grad_() for tensor in (x, *(param for op in found for param in op.parameters()))]
        with torch.enable_grad():
            return leaves, formula(*leaves)

    def forward(x, *found):
        return off("y", of_float64(x, found)[1]), (x,)

    def backward(grad_y, *found, saved):
        leaves, y = of_float64(saved[0], found)
        grad_x, *weights = torch.autograd.grad(y, leaves, grad_y.double())
        return off("x", grad_x), {found[0]: {"weight": off("weight", weights[0])}} if weights else {}

    torch.manual_seed(0)
    box, x = ops.Sequential(*make()).to(dtype), torch.randn(64, 32, dtype=dtype, requires_grad=True)
    with torch.no_grad():
        for param in box.parameters():
            param.uniform_(0.5, 1.5)
    with ops.register_fusion("by_formula", pattern, forward=forward, backward=backward):
        assert box.verify(x), box.verify(x)
        for wrong in ("y", "x", "weight")[: 2 + any(True for _ in box.parameters())]:
            found = box.verify(x)
            assert not found and "by_formula" in str(found), wrong


def test_verify_tells_what_it_has_not_compared():
    box, x = box_of(-2.0), torch.randn(3, 4)
    with ops.register_fusion("relu_scale", PATTERN, forward=relu_scale, refuse=negative):
        told = box.verify(x)
        assert told and ' Not compared: fusion "relu_scale" (' in str(told) and "), which was refused: the factor is negative." in str(told)
        assert "Not compared" not in str(box_of().verify(x))


def test_prepended_fusions_come_first():
    with (
        ops.register_fusion("second", PATTERN, forward=relu_scale),
        ops.register_fusion("first", PATTERN, forward=relu_scale, prepend=True),
    ):
        box = box_of()
        box(torch.randn(3, 4))
        assert "first" in box.fusions_made() and "second" not in box.fusions_made()


def test_duplicates_are_refused_and_names_are_free_again():
    with ops.register_fusion("relu_scale", PATTERN, forward=relu_scale) as handle:
        with pytest.raises(ValueError, match="register_fusion: expected a new name, got 'relu_scale', which is registered. Remove its handle first."):
            ops.register_fusion("relu_scale", PATTERN, forward=relu_scale)
        handle.remove()
        ops.register_fusion("relu_scale", PATTERN, forward=relu_scale).remove()


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (("", PATTERN), TypeError, "register_fusion: expected a name, got ''"),
        (("f", [ops.Linear]), TypeError, "register_fusion: expected classes of basic ops in the pattern of 'f', got Linear. A Linear is its"),
        (("f", ["relu"]), TypeError, "in the pattern of 'f', got 'relu'"),
        (("f", []), ValueError, "register_fusion: expected a pattern and an implementation of 'f', got no pattern"),
    ],
)
def test_wrong_declarations(arguments, kind, text):
    with pytest.raises(kind) as error:
        ops.register_fusion(*arguments, forward=relu_scale)
    assert text in str(error.value)


def test_wrong_implementations():
    with pytest.raises(ValueError, match="of 'f', got neither forward nor backward"):
        ops.register_fusion("f", PATTERN)
    with pytest.raises(TypeError, match="register_fusion: expected refuse of 'f' to be a function, got str"):
        ops.register_fusion("f", PATTERN, forward=relu_scale, refuse="never")
    with ops.register_fusion("f", PATTERN, forward=relu_scale, refuse=lambda *_: 3), pytest.raises(TypeError, match="f: expected a reason or None from refuse, got int"):
        box_of()(torch.randn(3, 4))
    with ops.register_fusion("f", PATTERN, forward=relu_scale, refuse=lambda *_: 1 / 0), pytest.raises(RuntimeError) as error:
        box_of()(torch.randn(3, 4))
    assert str(error.value).startswith("f: expected a reason or None from refuse, got ZeroDivisionError: division by zero. It is a registered fusion.")
    with (
        ops.register_fusion("f", PATTERN, forward=lambda x, relu, scale: (torch.relu(x), {"relu": {}})),
        pytest.raises(TypeError, match="f: expected saved tensors by op of the pattern, got dict"),
    ):
        box_of()(torch.randn(3, 4, requires_grad=True))
