"""Extra inputs that broadcast, as in torch: autograd sums their gradients."""

import pytest
import torch
from support import DYNAMO_ERRORS, fork, residual

import tandem.ops as ops

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

PIPELINES = {
    "alone": lambda: [ops.AddExtraInput()],
    "linear_add": lambda: [ops.Linear(8, 8, bias=False), ops.AddExtraInput()],
    "linear_bias_add": lambda: [ops.Linear(8, 8), ops.AddExtraInput()],
    "linear_scale_add": lambda: [ops.Linear(8, 8, bias=False), ops.ConstantScale(2.0), ops.AddExtraInput()],
    "dropout_add": lambda: [ops.Dropout(1e-9), ops.AddExtraInput()],
    "bias_dropout_add": lambda: [ops.Bias(8), ops.Dropout(1e-9), ops.AddExtraInput()],
    "add_rms_norm": lambda: [ops.AddExtraInput(), ops.RMSNorm(8)],
    "add_layer_norm": lambda: [ops.AddExtraInput(), ops.LayerNorm(8)],
}


CASES = [(shape, False) for shape in [(8,), (1,), (), (3, 1), (2, 1, 8), (1, 3, 8)]] + [((3, 1), True)]


@pytest.mark.parametrize(("shape", "compiled"), CASES)
@pytest.mark.parametrize("name", PIPELINES)
def test_an_extra_input_of_the_caller_broadcasts(name, shape, compiled):
    box = ops.Sequential(*PIPELINES[name]())
    x, extra = torch.randn(2, 3, 8, requires_grad=True), torch.randn(shape, requires_grad=True)
    run = torch.compile(box, fullgraph=True, backend="aot_eager") if compiled else box
    whole = extra.detach().expand(2, 3, 8).clone().requires_grad_()
    expected = box(x, whole)
    assert name == "alone" or name in box.fusions_made()
    actual = run(x, extra)
    torch.testing.assert_close(actual, expected)
    grad = torch.randn_like(expected)
    requested = [x, *box.parameters()]
    *wanted, of_whole = torch.autograd.grad(expected, [*requested, whole], grad)
    *found, of_extra = torch.autograd.grad(actual, [*requested, extra], grad)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(of_extra, of_whole.sum_to_size(shape))
    assert compiled or box.verify(x, extra), box.verify(x, extra)


UP = [((8,), (2, 3, 8)), ((2, 1, 8), (2, 3, 8)), ((2, 1, 8), (3, 1)), ((1, 3, 8), (2, 1, 8)), ((8,), (0, 8)), ((1, 8), (5, 3, 8))]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("shape", "extra_shape"), UP)
@pytest.mark.parametrize("name", PIPELINES)
def test_x_broadcasts(name, shape, extra_shape, compiled):
    """Everywhere in a forward, and where x is what the caller passes its gradient is a sum, as in TransformerEngine."""
    if compiled and (shape, extra_shape) != UP[1]:
        pytest.skip("one shape is compiled")
    box, x, extra = ops.Sequential(*PIPELINES[name]()).requires_grad_(False), torch.randn(shape), torch.randn(extra_shape, requires_grad=True)
    run = torch.compile(box, fullgraph=True, backend="aot_eager") if compiled else box
    parts = [op for unit in box for op in unit.flat_ops()]
    at = next(index for index, op in enumerate(parts) if isinstance(op, ops.AddExtraInput))
    before, behind = (ops.Sequential(*some) if some else torch.nn.Identity() for some in (parts[:at], parts[at + 1 :]))
    requested = [extra, *([x.requires_grad_()] if at == 0 else [])]
    expected = behind(before(x) + extra)
    actual = run(x, extra)
    torch.testing.assert_close(actual, expected)
    grad = torch.randn_like(expected)
    torch.testing.assert_close(torch.autograd.grad(actual, requested, grad), torch.autograd.grad(expected, requested, grad))
    with torch.no_grad():
        torch.testing.assert_close(run(x, extra), expected)
    assert compiled or at or box.verify(x, extra), box.verify(x, extra)  # which asks for the gradient of x, too


def test_a_mask_is_that_of_x():
    box = ops.Sequential(ops.Dropout(0.5), ops.AddExtraInput())
    y = box(torch.ones(1, 64), torch.zeros(4, 64))
    assert "dropout_add" in box.fusions_made()
    assert torch.equal(y, y[:1].expand(4, 64)) and 0 < (y == 0).sum() < y.numel()


def test_where_the_pipeline_sums_gradients_of_x_itself_x_has_the_shape_of_the_sum():
    """TransformerEngine hands such gradients on as they are: what is before fails, or computes wrong ones."""
    for box in (ops.Sequential(ops.ConstantScale(2.0), ops.AddExtraInput()), ops.Sequential(fork(to_caller=True), ops.AddExtraInput())):
        x, extra = torch.randn(8, requires_grad=True), torch.randn(3, 8)
        with pytest.raises(ValueError, match=r"expected .* of the shape of x, \[8\], got \[3, 8\]. Expand or reshape"):
            box(x, extra)
        y = box(x.detach(), extra)
        assert (y[0] if isinstance(y, tuple) else y).shape == (3, 8)


@pytest.mark.parametrize("linear", [False, True])
def test_x_broadcasts_to_what_is_written_in_place(linear):
    box = ops.Sequential(*[ops.Linear(8, 8)] * linear, ops.AddExtraInput(in_place=True)).requires_grad_(False)
    x, extra = torch.randn(8, requires_grad=not linear), torch.randn(3, 8)
    expected = (box[0](x) if linear else x) + extra
    y = box(x, extra)
    torch.testing.assert_close(y, expected)
    assert y.data_ptr() == extra.data_ptr()
    if not linear:
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(grad, torch.full((8,), 3.0))


@pytest.mark.parametrize("shape", [(4,), (2, 3, 9), (2, 2, 8)])
@pytest.mark.parametrize("name", PIPELINES)
def test_what_does_not_broadcast_is_refused(name, shape):
    with pytest.raises(ValueError, match=r"expected .* of the shape of x, \[2, 3, 8\], got \["):
        ops.Sequential(*PIPELINES[name]())(torch.randn(2, 3, 8), torch.randn(shape))


def test_channels_and_sums_in_place_have_the_shape_of_x():
    with pytest.raises(ValueError, match=r"add_extra_input: expected the extra input of the shape of x, \[2, 8\], got \[8\]. Expand or reshape"):
        ops.AddExtraInput(in_place=True)(torch.randn(2, 8), torch.randn(8))
    with pytest.raises(ValueError, match=r"expected the extra input of the shape of x, \[8, 8\], got \[8, 1\]"):
        residual(ops.Linear(1, 8))(torch.randn(8, 1))


BEHIND = {
    "gelu": lambda: [ops.GELU(), ops.AddExtraInput()],
    "between": lambda: [ops.GELU(), ops.AddExtraInput(), ops.GELU()],
    "linear": lambda: [ops.Linear(8, 8), ops.AddExtraInput()],
    "norm": lambda: [ops.ConstantScale(2.0), ops.AddExtraInput(), ops.RMSNorm(8)],
}


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("name", BEHIND)
def test_verify_where_x_broadcasts_behind_other_ops(name, needs_grad):
    box, x = ops.Sequential(*BEHIND[name]()).requires_grad_(False), torch.randn(1, 8)
    extra = torch.randn(3, 8, requires_grad=needs_grad)
    assert box(x, extra).shape == (3, 8)
    report = box.verify(x, extra)
    assert report and "Without a gradient of x: a call that asks for it refuses these sizes." in report.text
    with pytest.raises(ValueError, match=r"expected the extra input of the shape of x, \[1, 8\], got \[3, 8\]"):
        box(x.requires_grad_(), extra)
    same = box.verify(torch.randn(3, 8), extra)
    assert same and "Without" not in same.text


IN_PLACE = {
    "alone": lambda: [],
    "gelu": lambda: [ops.GELU()],
    "linear": lambda: [ops.Linear(8, 8)],
    "linear_scale": lambda: [ops.Linear(8, 8, bias=False), ops.ConstantScale(2.0)],
    "dropout": lambda: [ops.Dropout(1e-9)],
}


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
@pytest.mark.parametrize("name", IN_PLACE)
def test_a_callers_tensor_that_cannot_hold_the_sum_is_refused(name, backend, norm):
    box = ops.Sequential(*IN_PLACE[name](), ops.AddExtraInput(in_place=True), *([ops.RMSNorm(8)] if norm else []))
    run = box if backend is None else torch.compile(box, fullgraph=True, backend=backend)
    x = torch.randn(3, 8, requires_grad=True)
    with pytest.raises((ValueError, *DYNAMO_ERRORS), match=r"add_extra_input: expected the extra input of the shape of x, \[3, 8\], got \[8\]\. Expand"):
        run(x, torch.randn(8))
    whole = torch.randn(3, 8)
    torch.testing.assert_close(run(x, whole.clone()), box(x, whole.clone()))
