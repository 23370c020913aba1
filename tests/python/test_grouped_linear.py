"""Linear layers of groups of rows, against a loop over the groups in float64."""

from __future__ import annotations

import pytest
import torch
from experts import TOLERANCE, drawn, grad_of, product, wide
from support import randomize
from torch.testing import assert_close

import tandem
from tandem import ops

SPLITS = ([3, 0, 5, 1], [0, 0, 0, 0], [9, 0, 0, 0], [2, 1, 3, 0])  # the last leaves rows behind, and so does the second


def reference(module: ops.GroupedLinear, x: torch.Tensor, splits: list[int], grad: torch.Tensor):
    """y, and the gradients of x and of all parameters, in float64."""
    params, rows = wide(module), x.detach().double().requires_grad_()
    y = product(rows.reshape(-1, rows.shape[-1]), splits, params).reshape(*x.shape[:-1], module.out_features)
    y.backward(grad.double())
    return y.detach(), rows.grad, {name: grad_of(param) for name, param in params.items()}


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_values_and_gradients(splits, packed, bias, dtype):
    module = randomize(ops.GroupedLinear(4, 6, 5, bias=bias, dtype=dtype, single_grouped_weight=packed, single_grouped_bias=packed))
    x = torch.randn(9, 6, dtype=dtype).requires_grad_()
    grad = torch.randn(9, 5, dtype=dtype)
    y = module(x, torch.tensor(splits))
    y.backward(grad)
    expected, grad_x, grads = reference(module, x, splits, grad)
    tolerance = {"rtol": TOLERANCE[dtype], "atol": 4 * TOLERANCE[dtype]}
    assert_close(y.double(), expected, **tolerance)
    assert_close(x.grad.double(), grad_x, **tolerance)
    for name, param in module.named_parameters():
        assert_close(param.grad.double(), grads[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance)


@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_compiled_and_through_the_dispatcher(splits):
    module = ops.GroupedLinear(4, 6, 5)
    call = torch.compile(lambda x, rows: module(x, rows) * 2, fullgraph=True, backend="aot_eager")
    x, rows = torch.randn(9, 6, requires_grad=True), torch.tensor(splits)
    y = call(x, rows)
    grad = torch.randn(9, 5)
    y.backward(grad)
    expected, grad_x, grads = reference(module, x, splits, 2 * grad)
    assert_close(y, 2 * expected.float())
    assert_close(x.grad, grad_x.float())
    for name, param in module.named_parameters():
        assert_close(param.grad, grads[name].float())


def test_leading_dimensions_channels_and_a_pipeline_around():
    experts = ops.GroupedLinear(3, 8, 12)
    box = ops.Sequential(ops.RMSNorm(8), experts, ops.SwiGLU(), ops.Linear(6, 8))
    x, rows = torch.randn(2, 5, 8, requires_grad=True), torch.tensor([4, 1, 5], dtype=torch.int32)
    y = box(x, rows)
    y.square().sum().backward()
    norm = box[0](x)
    expected = box[3](box[2](experts(norm, rows)))
    assert_close(y, expected)
    assert all(param.grad is not None for param in box.parameters())
    assert "grouped_linear.grad_weight" in box.explain()
    assert tandem.verify(box, x, rows)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_any_integers_count_rows(dtype):
    module = ops.GroupedLinear(2, 4, 4)
    x = torch.randn(5, 4)
    assert torch.equal(module(x, torch.tensor([2, 3], dtype=dtype)), module(x, torch.tensor([2, 3])))


def test_torch_func_and_forward_mode():
    module = ops.GroupedLinear(2, 4, 3, dtype=torch.float64)
    rows = torch.tensor([1, 2])
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: module(x, rows), [x])
    tangent = torch.randn_like(x)
    _, forward = torch.func.jvp(lambda x: module(x, rows), (x.detach(),), (tangent,))
    assert_close(forward, module(x.detach() + tangent, rows) - module(x.detach(), rows))


def test_state_dicts_are_those_of_te():
    keys = set(ops.GroupedLinear(2, 4, 3).state_dict())
    assert keys == {"weight0", "weight1", "bias0", "bias1"}
    assert set(ops.GroupedLinear(2, 4, 3, single_grouped_weight=True, bias=False).state_dict()) == {"weight"}


def test_autocast_computes_in_its_dtype():
    module = ops.GroupedLinear(2, 4, 3)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(torch.randn(5, 4), torch.tensor([2, 3]))
    assert y.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("splits", "error", "text"),
    [
        ([2, 4], ValueError, r"expected splits >= 0 whose sum is at most the 5 rows of x, got 4 for group 1 behind 2 rows"),
        ([-1, 4], ValueError, r"got -1 for group 0 behind 0 rows. Count the rows of each group"),
        ([2, 3, 0], ValueError, r"expected splits of shape \[2\], one number per group, got \[3\]"),
        ([2.0, 3.0], TypeError, r"expected splits that are integers, got Float"),
    ],
)
def test_splits_that_do_not_fit(splits, error, text):
    with pytest.raises(error, match=text):
        ops.GroupedLinear(2, 4, 3)(torch.randn(5, 4), torch.tensor(splits))


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_numbers_of_rows_count_whatever_their_shape(shape, dtype):
    module, x = drawn(ops.GroupedLinear(2, 4, 3)), torch.randn(5, 4, requires_grad=True)
    expected = torch.autograd.grad(module(x, torch.tensor([2, 3])).square().sum(), [x, *module.parameters()])
    for call in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
        y = call(x, torch.tensor([2, 3], dtype=dtype).reshape(shape))
        assert_close(torch.autograd.grad(y.square().sum(), [x, *module.parameters()]), expected)


def test_other_errors():
    module = ops.GroupedLinear(2, 4, 3)
    with pytest.raises(ValueError, match="expected num_groups to be a whole number > 0, got 0"):
        ops.GroupedLinear(0, 4, 3)
    module.weight1 = torch.nn.Parameter(torch.randn(4, 4))
    with pytest.raises(ValueError, match=r"expected weights of one shape \[out_features, in_features\], got \[3, 4\] and \[4, 4\]"):
        module(torch.randn(5, 4), torch.tensor([2, 3]))
    packed = ops.GroupedLinear(2, 4, 3, single_grouped_weight=True)
    packed.weight = torch.nn.Parameter(torch.randn(3, 3, 4))
    with pytest.raises(ValueError, match=r"expected a weight of shape \[2, out_features, in_features\], got 3 groups"):
        packed(torch.randn(5, 4), torch.tensor([2, 3]))
