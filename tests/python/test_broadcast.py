"""Extra inputs that broadcast, as in torch: autograd sums their gradients."""

import pytest
import torch

import tandem.ops as ops

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

PIPELINES = {
    "alone": lambda: [ops.AddExtraInput()],
    "linear_add": lambda: [ops.Linear(8, 8, bias=False), ops.AddExtraInput()],
    "linear_bias_add": lambda: [ops.Linear(8, 8), ops.AddExtraInput()],
    "linear_scale_add": lambda: [ops.Linear(8, 8, bias=False), ops.ConstantScale(2.0), ops.AddExtraInput()],
    "dropout_add": lambda: [ops.Dropout(0.0), ops.AddExtraInput()],
    "bias_dropout_add": lambda: [ops.Bias(8), ops.Dropout(0.0), ops.AddExtraInput()],
    "add_rms_norm": lambda: [ops.AddExtraInput(), ops.RMSNorm(8)],
    "add_layer_norm": lambda: [ops.AddExtraInput(), ops.LayerNorm(8)],
}


CASES = [(shape, False) for shape in [(8,), (1,), (), (3, 1), (2, 1, 8), (1, 3, 8)]] + [((3, 1), True)]


@pytest.mark.parametrize(("shape", "compiled"), CASES)
@pytest.mark.parametrize("name", PIPELINES)
def test_an_extra_input_of_the_caller_broadcasts(name, shape, compiled):
    box = ops.Sequential(*PIPELINES[name]())
    x, extra = torch.randn(2, 3, 8, requires_grad=True), torch.randn(shape, requires_grad=True)
    run = torch.compile(box, fullgraph=True) if compiled else box
    whole = extra.detach().expand(2, 3, 8).clone().requires_grad_()
    expected = box(x, whole)
    assert name == "alone" or name in box.fusions_made()
    actual = run(x, extra)
    torch.testing.assert_close(actual, expected)
    grad = torch.randn_like(expected)
    asked = [x, *box.parameters()]
    *wanted, of_whole = torch.autograd.grad(expected, [*asked, whole], grad)
    *found, of_extra = torch.autograd.grad(actual, [*asked, extra], grad)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(of_extra, of_whole.sum_to_size(shape))
    assert compiled or box.verify(x, extra), box.verify(x, extra)


@pytest.mark.parametrize("shape", [(4,), (2, 3, 9), (1, 2, 3, 8)])
@pytest.mark.parametrize("name", PIPELINES)
def test_what_does_not_broadcast_is_refused(name, shape):
    with pytest.raises(ValueError, match=r"expected .* of the shape of x, \[2, 3, 8\], got \["):
        ops.Sequential(*PIPELINES[name]())(torch.randn(2, 3, 8), torch.randn(shape))


def test_channels_and_sums_in_place_have_the_shape_of_x():
    with pytest.raises(ValueError, match=r"add_extra_input: expected the extra input of the shape of x, \[2, 8\], got \[8\]. Expand or reshape"):
        ops.AddExtraInput(in_place=True)(torch.randn(2, 8), torch.randn(8))
    narrow = ops.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "a", output_to_caller=False),
        ops.Linear(1, 8),
        ops.AddExtraInput().set_extra_input_channel(0, "a"),
    )
    with pytest.raises(ValueError, match=r"expected the extra input of the shape of x, \[8, 8\], got \[8, 1\]"):
        narrow(torch.randn(8, 1))
