"""Experts as one fusion: a product of groups, a unit, another product of the same groups."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from experts import TOLERANCE, drawn, grad_of, product, wide
from support import clamped_swiglu, gated, of_halves, situ, squared_relu, tanh_gelu
from torch.testing import assert_close

import tandem
from tandem import ops

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

SPLITS = ([3, 0, 5, 1], [0, 0, 9, 0], [2, 1, 3, 0], [0, 0, 0, 0])  # the last two leave rows behind

# Op, what it computes in float64, and the fusion.
UNITS = {
    "SwiGLU": (ops.SwiGLU, gated(F.silu), "grouped_mlp_glu"),
    "GELU": (ops.GELU, tanh_gelu, "grouped_mlp_activation"),
    "ScaledSwiGLU": (ops.ScaledSwiGLU, gated(F.silu), "grouped_mlp_scaled_glu"),
    "ScaledSiTUGLU": (ops.ScaledSiTUGLU, of_halves(situ), "grouped_mlp_scaled_glu"),
    "ScaledClampedQGeGLU": (ops.ScaledClampedQGeGLU, of_halves(clamped_swiglu), "grouped_mlp_scaled_glu"),
    "ScaledSReLU": (ops.ScaledSReLU, squared_relu, "grouped_mlp_scaled_activation"),
}
ROWS, IN, INNER, OUT = 9, 6, 8, 5


def mlp(unit="ScaledSwiGLU", dtype=None, first=None, last=None, groups=4, **arguments):
    is_gated = "GLU" in unit
    made = ops.Sequential(
        ops.GroupedLinear(groups, IN, INNER * (2 if is_gated else 1), dtype=dtype, **arguments, **(first or {})),
        UNITS[unit][0](),
        ops.GroupedLinear(groups, INNER, OUT, dtype=dtype, **arguments, **(last or {})),
    )
    return drawn(made)


def operands(box, splits, dtype=torch.float32, next_splits=None):
    """The input and the extra inputs, all of which need gradients that can have one."""
    first, unit, last = box
    rows = torch.randn(ROWS, IN, dtype=dtype).requires_grad_()
    extra = [torch.tensor(splits)]
    scales = lambda: torch.rand(ROWS, dtype=dtype).requires_grad_()  # noqa: E731
    extra += [scales()] if first.num_extra_inputs == 2 else []
    extra += [scales()] if unit.num_extra_inputs == 1 else []
    extra.append(torch.tensor(splits if next_splits is None else next_splits))
    extra += [scales()] if last.num_extra_inputs == 2 else []
    return rows, extra


def reference(box, unit, rows, extra):
    """The output in float64, and its leaves by name and place."""
    first, op, last = box
    params = {name: tensor for name, tensor in wide(box).items()}
    of = lambda at: {name[2:]: tensor for name, tensor in params.items() if name.startswith(f"{at}.")}  # noqa: E731
    x = rows.detach().double().requires_grad_()
    given = [tensor.detach().double().requires_grad_() if tensor.is_floating_point() else tensor for tensor in extra]
    left = list(given)
    splits = left.pop(0).tolist()
    z = product(x, splits, of(0), left.pop(0) if first.num_extra_inputs == 2 else None)
    h = UNITS[unit][1](z)
    if op.num_extra_inputs:
        h = h * left.pop(0)[:, None]
    next_splits = left.pop(0).tolist()
    y = product(h, next_splits, of(2), left.pop(0) if last.num_extra_inputs == 2 else None)
    return y, x, given, params


def check(box, unit, rows, extra, dtype=torch.float32):
    y = box(rows, *extra)
    grad = torch.randn(ROWS, OUT).to(dtype)
    y.backward(grad)
    expected, x, given, params = reference(box, unit, rows, extra)
    expected.backward(grad.double())
    largest = {torch.bfloat16: 8e-2, torch.float16: 8e-3}.get(dtype, 4 * TOLERANCE[dtype])

    def near(actual, wanted, name):
        assert (actual.double() - wanted).abs().max() <= largest * max(1.0, wanted.abs().max().item()), name

    near(y.detach(), expected.detach(), "y")
    near(rows.grad, x.grad, "x")
    for place, (tensor, wanted) in enumerate(zip(extra, given, strict=True)):
        if tensor.is_floating_point():
            near(tensor.grad, grad_of(wanted), f"extra input {place}")
    for name, param in box.named_parameters():
        near(grad_of(param), grad_of(params[name]), name)


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("unit", UNITS)
def test_values_and_gradients(unit, dtype, splits):
    box = mlp(unit, dtype)
    check(box, unit, *operands(box, splits, dtype), dtype)
    assert f"made    {UNITS[unit][2]}" in box.explain()


@pytest.mark.parametrize(
    "arguments",
    [{"first": {"bias": False, "single_grouped_bias": True}}, {"scale_bias": True}, {"single_grouped_weight": True, "single_grouped_bias": True}, {"single_grouped_weight": True, "scale_bias": True}],
    ids=str,
)
@pytest.mark.parametrize("unit", ["SwiGLU", "ScaledSReLU"])
def test_biases_and_packed_parameters(unit, arguments):
    box = mlp(unit, **arguments)
    check(box, unit, *operands(box, SPLITS[0]))
    assert f"made    {UNITS[unit][2]}" in box.explain()


@pytest.mark.parametrize("unit", ["SwiGLU", "GELU", "ScaledSwiGLU"])
def test_products_whose_groups_turn_out_to_differ(unit):
    box = mlp(unit, scale_bias=True)
    check(box, unit, *operands(box, SPLITS[0], next_splits=[1, 4, 0, 3]))
    assert f"made    {UNITS[unit][2]}" in box.explain()


@pytest.mark.parametrize("unit", ["SwiGLU", "ScaledSwiGLU", "ScaledSReLU"])
def test_compiled_without_grad_and_differentiated_forward(unit):
    box = mlp(unit, scale_bias=True)
    rows, extra = operands(box, SPLITS[2])
    wanted = [rows, *[tensor for tensor in extra if tensor.is_floating_point()], *box.parameters()]
    y = box(rows, *extra)
    expected = torch.autograd.grad(y.square().sum(), wanted)
    compiled = torch.compile(box, fullgraph=True)
    again = compiled(rows, *extra)
    assert_close(again, y)
    assert_close(torch.autograd.grad(again.square().sum(), wanted), expected)
    with torch.no_grad():
        assert_close(box(rows, *extra), y)
    tangent = torch.randn_like(rows)
    _, forward = torch.func.jvp(lambda x: box(x, *extra), (rows.detach(),), (tangent,))
    (backward,) = torch.autograd.grad(box(rows, *extra), rows, torch.ones(ROWS, OUT))
    assert_close(forward.sum(), (backward * tangent).sum())


@pytest.mark.parametrize("unit", UNITS)
def test_verify_finds_no_difference_for_any_set_of_gradients(unit):
    box = mlp(unit, scale_bias=True)
    rows, extra = operands(box, SPLITS[2])
    report = tandem.verify(box, rows, *extra)
    assert report, report


def test_only_the_first_product_is_kept():
    box = mlp("ScaledSwiGLU")
    rows, extra = operands(box, SPLITS[0])
    y = box(rows, *extra)
    assert box.saved_bytes() == ROWS * 2 * INNER * 4
    y.sum().backward()
    assert [step.split(":")[0].strip() for step in box.explain().splitlines() if step.startswith("    ") and "->" in step and step[4] != " "] == [
        "grouped_mlp_scaled_glu",
        "grouped_mlp_scaled_glu",
    ]


def test_frozen_parameters_and_inputs_without_gradient():
    box = mlp("ScaledSwiGLU")
    rows, extra = operands(box, SPLITS[0])
    expected = {name: grad for name, grad in zip(dict(box.named_parameters()), torch.autograd.grad(box(rows, *extra).sum(), box.parameters(), allow_unused=True))}
    for frozen in (["0.weight1"], ["0.weight0", "0.bias0", "2.bias1"], [name for name in expected if name.startswith("0.")]):
        for name, param in box.named_parameters():
            param.requires_grad_(name not in frozen)
            param.grad = None
        box(rows.detach(), extra[0], extra[1].detach(), *extra[2:]).sum().backward()
        for name, param in box.named_parameters():
            if name in frozen:
                assert param.grad is None
            else:
                assert_close(param.grad, expected[name])


def weights_of(box):
    return {name: param for name, param in box.named_parameters() if "weight" in name}


def run(box, rows, extra, grad, recipe=None):
    with tandem.autocast(enabled=recipe is not None, recipe=recipe):
        y = box(rows, *extra)
    y.backward(grad)
    return y


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(("first", "last"), [("main_grad", "main_grad"), ("overwrite", None), (None, "dummy"), ("main_grad", "delayed")])
def test_main_grad(unit, first, last, packed, splits):
    box = mlp(unit, scale_bias=unit == "GELU", single_grouped_weight=packed)
    for op, way in ((box[0], first), (box[2], last)):
        op.accumulate_into_main_grad = way is not None
        op.delay_wgrad_compute = way == "delayed"
        for name in op._main_grad_names if way is not None else ():
            weight = op.get_parameter(name)
            weight.main_grad = torch.ones_like(weight)
            if way == "overwrite":
                weight.overwrite_main_grad = True
            if way == "dummy":
                weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, True
    rows, extra = operands(box, splits)
    grad = torch.randn(ROWS, OUT)
    y = run(box, rows, extra, grad)
    for op in (box[0], box[2]):
        op.backward_dw()
    assert box.fusions_made() == [UNITS[unit][2]]
    expected, x, given, params = reference(box, unit, rows, extra)
    expected.backward(grad.double())
    assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)
    assert_close(rows.grad.double(), x.grad, rtol=1e-4, atol=1e-4)
    for tensor, wanted in zip(extra, given, strict=True):
        if tensor.is_floating_point():
            assert_close(tensor.grad.double(), grad_of(wanted), rtol=1e-4, atol=1e-4)
    for name, param in box.named_parameters():
        way = (first if name.startswith("0.") else last) if "weight" in name else None
        wanted = grad_of(params[name])
        if way is None:
            assert_close(grad_of(param).double(), wanted, rtol=1e-4, atol=1e-4)
            continue
        assert_close(param.main_grad.double(), wanted + (way != "overwrite"), rtol=1e-4, atol=1e-4)
        assert (param.grad is not None and not param.grad.any()) if way == "dummy" else param.grad is None
        assert param.main_grad._version > 0


@pytest.mark.parametrize("frozen", ["0.weight", "2.weight"])
def test_main_grad_takes_what_is_asked_for_alone(frozen):
    box = mlp("ScaledSwiGLU", accumulate_into_main_grad=True)
    rows, extra = operands(box, SPLITS[0])
    for weight in weights_of(box).values():
        weight.main_grad = torch.zeros_like(weight)
    torch.autograd.grad(box(rows, *extra).sum(), [rows, extra[1]])
    assert not any(weight.main_grad.any() for weight in weights_of(box).values()), "no gradient of a weight was asked for"
    y = box(rows, *extra)
    wanted = [param for name, param in box.named_parameters() if name.startswith(frozen[0])]
    torch.autograd.grad(y.sum(), wanted, allow_unused=True)
    for name, weight in weights_of(box).items():
        assert weight.main_grad.any() == (name.startswith(frozen[0]) and int(name[-1]) != 1), name  # the second group has no rows
    for name, weight in weights_of(box).items():
        weight.main_grad.zero_()
        weight.requires_grad_(not name.startswith(frozen))
    box(rows.detach(), *extra).sum().backward()
    assert box.fusions_made() == ["grouped_mlp_scaled_glu"]
    for name, weight in weights_of(box).items():
        assert weight.main_grad.any() == (not name.startswith(frozen) and int(name[-1]) != 1), name


def test_main_grad_of_another_shape_is_told():
    box = mlp("SwiGLU", accumulate_into_main_grad=True)
    rows, extra = operands(box, SPLITS[0])
    for weight in weights_of(box).values():
        weight.main_grad = torch.zeros_like(weight)
    box[2].weight3.main_grad = torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"grouped_linear: expected main_grad of the weight's shape \[5, 8\], got \[3, 4\]"):
        box(rows, *extra).sum().backward()
    for weight in weights_of(box).values():
        assert not weight.main_grad.any(), "it is looked at before anything is written"


@pytest.mark.parametrize(("splits", "next_splits"), [*zip(SPLITS, SPLITS, strict=True), (SPLITS[0], [1, 4, 0, 3])], ids=str)
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("delayed", [(0,), (2,), (0, 2)])
def test_delayed_gradients(unit, delayed, splits, next_splits):
    box = mlp(unit)
    plain = copy.deepcopy(box)
    for at in delayed:
        box[at].delay_wgrad_compute = True
    batches = [(*operands(box, splits, next_splits=next_splits), torch.randn(ROWS, OUT)) for _ in range(2)]
    for each in (plain, box):
        for rows, extra, grad in batches:
            run(each, rows, extra, grad)
    for name, weight in weights_of(box).items():
        assert (weight.grad is None) == (int(name[0]) in delayed)
    for _ in batches:
        for at in reversed(delayed):
            box[at].backward_dw()
    assert box.fusions_made() == [UNITS[unit][2]]
    for param, other in zip(box.parameters(), plain.parameters(), strict=True):
        assert_close(grad_of(param), grad_of(other))


RECIPES = [tandem.recipe.Float8CurrentScaling(), tandem.recipe.MXFP8BlockScaling(), tandem.recipe.Float8BlockScaling()]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("unit", UNITS)
def test_under_a_recipe_the_bits_are_those_of_the_ops_one_by_one(unit, packed, recipe):
    box = mlp(unit, scale_bias=unit == "ScaledSwiGLU", single_grouped_weight=packed)
    for splits in SPLITS:
        rows, extra = operands(box, splits)
        grad, results = torch.randn(ROWS, OUT), []
        for call in (box, one_by_one(box)):
            tensors = [rows, *[tensor for tensor in extra if tensor.is_floating_point()], *box.parameters()]
            for tensor in tensors:
                tensor.grad = None
            y = run(call, rows, extra, grad, recipe)
            results.append([y.detach(), *[tensor.grad for tensor in tensors]])
        for place, (fused, single) in enumerate(zip(*results, strict=True)):
            assert torch.equal(fused, single), place
    assert box.fusions_made() == [UNITS[unit][2]]
    assert box.saved_bytes() <= (ROWS * INNER * (2 if "GLU" in unit else 1)) * 4 + sum(p.numel() for p in box.parameters()) * 4


def one_by_one(box):
    def call(rows, *extra):
        left, x = list(extra), rows
        for op in box:
            x = op(x, *[left.pop(0) for _ in range(op.num_extra_inputs)])
        return x

    return call


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
@pytest.mark.parametrize("way", ["main_grad", "delayed", "frozen", "compiled"])
def test_under_a_recipe_gradients_go_where_they_should(recipe, way):
    box = mlp("ScaledSwiGLU")
    rows, extra = operands(box, SPLITS[0])
    grad = torch.randn(ROWS, OUT)
    run(box, rows, extra, grad, recipe)
    expected = {name: param.grad for name, param in box.named_parameters()}
    call = box
    for name, param in box.named_parameters():
        param.grad = None
        param.main_grad = torch.zeros_like(param)
        if way == "frozen":
            param.requires_grad_(not name.startswith("0."))
    for op in (box[0], box[2]):
        op.accumulate_into_main_grad, op.delay_wgrad_compute = way == "main_grad", way == "delayed"
    if way == "compiled":
        call = torch.compile(box, fullgraph=True)
    run(call, rows.detach() if way == "frozen" else rows, [tensor.detach() for tensor in extra] if way == "frozen" else extra, grad, recipe)
    if way == "delayed":
        box[2].backward_dw()
        box[0].backward_dw()
    for name, param in box.named_parameters():
        if way == "frozen" and name.startswith("0."):
            assert param.grad is None
        else:
            assert_close(param.main_grad if way == "main_grad" and "weight" in name else param.grad, expected[name])


def test_other_refusals():
    box = ops.Sequential(ops.GroupedLinear(2, IN, INNER), ops.GELU(), ops.GroupedLinear(3, INNER, OUT))
    box(torch.randn(ROWS, IN), torch.tensor([4, 5]), torch.tensor([4, 2, 3])).sum().backward()
    assert "the products have 2 and 3 groups" in box.explain()
    box = mlp()
    rows, extra = operands(box, SPLITS[0])
    box(rows, *extra, op_kwargs={2: {"output": torch.empty(ROWS, OUT)}}).sum().backward()
    assert "a tensor of the caller is written" in box.explain()
    box = ops.Sequential(ops.GroupedLinear(2, IN, INNER), ops.GELU(), ops.GroupedLinear(2, INNER, OUT, dtype=torch.bfloat16))
    box(torch.randn(ROWS, IN), torch.tensor([4, 5]), torch.tensor([4, 5])).sum().backward()
    assert "made    grouped_mlp" not in box.explain()


def test_sizes_that_do_not_fit_are_told():
    box = ops.Sequential(ops.GroupedLinear(2, IN, 7), ops.GELU(), ops.GroupedLinear(2, INNER, OUT))
    with pytest.raises(ValueError, match=r"grouped_linear: expected x with 8 features in its last dimension, .* got x of shape \[9, 7\]"):
        box(torch.randn(ROWS, IN), torch.tensor([4, 5]), torch.tensor([4, 5]))
    box = mlp()
    rows, extra = operands(box, SPLITS[0])
    with pytest.raises(ValueError, match="expected scales with 9 elements, one per row of x"):
        box(rows, extra[0], torch.rand(3), extra[2])


def test_leading_dimensions_and_an_empty_batch():
    box = mlp("ScaledSwiGLU")
    rows, (splits, scales, again) = operands(box, SPLITS[0])
    y = box(rows.reshape(3, 3, IN), splits, scales.reshape(3, 3), again)
    assert_close(y, box(rows, splits, scales, again).reshape(3, 3, OUT))
    (grad,) = torch.autograd.grad(y.sum(), scales)
    assert grad.shape == (ROWS,)
    nothing = torch.zeros(4, dtype=torch.int64)
    x = torch.empty(0, IN, requires_grad=True)
    box(x, nothing, torch.empty(0), nothing).sum().backward()
    assert x.grad.shape == (0, IN) and not box[0].weight0.grad.any()
