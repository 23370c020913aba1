"""`backward_override` of recipes: forward multiplies codes, backward numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from experts import by_group, gradients_by_group, linears_of, made
from support import assert_equal, llama_mlp, randomize, step

import tandem
from tandem import ops
from tandem.ops import OperationContext
from tandem.recipe import CustomRecipe, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
E4M3 = torch.float8_e4m3fn


def custom(**options):
    return CustomRecipe(mxfp8, **options)


def mxfp8(role):
    return tandem.MXFP8Quantizer(E4M3)


QUANTIZERS = {  # of inputs, and of weights
    Float8CurrentScaling: (tandem.Float8CurrentScalingQuantizer(E4M3),) * 2,
    MXFP8BlockScaling: (tandem.MXFP8Quantizer(E4M3),) * 2,
    Float8BlockScaling: (
        tandem.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=1),
        tandem.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True),
    ),
    NVFP4BlockScaling: (tandem.NVFP4Quantizer(), tandem.NVFP4Quantizer(with_2d_quantization=True)),
    custom: (tandem.MXFP8Quantizer(E4M3),) * 2,
}
RECIPES = pytest.mark.parametrize("recipe", QUANTIZERS, ids=lambda recipe: recipe.__name__)
OVERRIDES = pytest.mark.parametrize("override", ["high_precision", "dequantized"])


def multiplied(recipe, override, *operands):
    """What backward multiplies by, of x and a weight, in float64."""
    if override == "dequantized":
        operands = [tandem.quantize(operand, quantizer).dequantize() for operand, quantizer in zip(operands, QUANTIZERS[recipe], strict=True)]
    return [operand.double() for operand in operands]


def assert_is_product(actual, a, b):
    """Within the bound of docs/numerics.md: that of a sum in float32, and one rounding to the dtype."""
    exact, sums = a @ b, a.shape[1] * 2**-23 * (a.abs() @ b.abs())
    assert ((actual.double() - exact).abs() <= sums + torch.finfo(actual.dtype).eps / 2 * (exact.abs() + sums)).all()


@RECIPES
@OVERRIDES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product(recipe, override, dtype):
    linear, x, grad = ops.Linear(64, 48, dtype=dtype), torch.randn(16, 64, dtype=dtype), torch.randn(16, 48, dtype=dtype)
    y, grad_x, grad_weight, grad_bias = step(linear, x, recipe(backward_override=override), grad)
    wanted, *_ = step(linear, x, recipe(), grad)
    assert torch.equal(y, wanted)  # forward is what it is
    a, b = multiplied(recipe, override, x, linear.weight.detach())
    assert_is_product(grad_x, grad.double(), b)
    assert_is_product(grad_weight, grad.double().t(), a)
    assert_is_product(grad_bias[None], torch.ones(1, 16, dtype=torch.float64), grad.double())


@RECIPES
@OVERRIDES
def test_a_block_in_every_form(recipe, override):
    recipe = recipe(backward_override=override)
    modules = [randomize(llama_mlp(32, 48)), ops.Sequential(tandem.LayerNormMLP(32, 48, activation="swiglu")), ops.Sequential(tandem.LayerNormLinear(32, 32))]
    for module in modules:
        x, grad = torch.randn(16, 32), torch.randn(16, 32)
        results = step(module, x, recipe, grad)
        plain = step(module, x, None, grad)
        for actual, wanted in zip(results, plain, strict=True):
            assert torch.isfinite(actual).all() and (actual - wanted).norm() < 0.5 * wanted.norm()
        with tandem.autocast(recipe=recipe):
            assert tandem.verify(module, x.clone().requires_grad_()).passed
            checkpointed = tandem.checkpoint(module, leaf := x.clone().requires_grad_())
        assert torch.equal(torch.autograd.grad(checkpointed, leaf, grad)[0], results[1])


@OVERRIDES
def test_backward_quantizes_nothing_and_keeps_what_it_says(override):
    linear, x = ops.Sequential(ops.Linear(64, 64, bias=False)), torch.randn(16, 64, requires_grad=True)
    with tandem.autocast(recipe=MXFP8BlockScaling(backward_override=override)):
        linear(x).sum().backward()
    text = linear.explain()
    backward = text[text.index("  backward") :]
    assert "quantize(" not in backward.replace("dequantize(", "") and "by columns" not in text
    assert ("dequantize" in backward) == (override == "dequantized")


@OVERRIDES
def test_weights_that_change_between_steps_are_seen(override):
    linear, x, grad = ops.Linear(64, 48, bias=False), torch.randn(16, 64), torch.randn(16, 48)
    recipe = MXFP8BlockScaling(backward_override=override)
    first = step(linear, x, recipe, grad)
    with torch.no_grad():
        linear.weight.mul_(2)
    second = step(linear, x, recipe, grad)
    assert torch.equal(second[1], 2 * first[1])


@OVERRIDES
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_calls_equal_eager_ones(override, backend):
    torch.manual_seed(0)
    module, x, grad = randomize(llama_mlp(32, 48)), torch.randn(16, 32), torch.randn(16, 32)
    recipe = MXFP8BlockScaling(backward_override=override)
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    torch.testing.assert_close(step(compiled, x, recipe, grad), step(module, x, recipe, grad))


def test_gradients_are_not_rounded():
    x, grad = torch.randn(4, 32, requires_grad=True), torch.randn(4, 32)
    with tandem.autocast(recipe=MXFP8BlockScaling(backward_override="dequantized")):
        y = ops.Quantize(forward=True, backward=True)(x)
    assert torch.equal(torch.autograd.grad(y, x, grad)[0], grad)


@OVERRIDES
def test_parameters_in_codes(override):
    linear, x, grad = ops.Linear(64, 48, bias=False), torch.randn(16, 64), torch.randn(16, 48)
    linear.weight = torch.nn.Parameter(tandem.quantize(linear.weight.detach(), tandem.MXFP8Quantizer(E4M3)))
    grad_x = step(linear, x, MXFP8BlockScaling(backward_override=override), grad)[1]
    torch.testing.assert_close(grad_x, grad @ linear.weight.dequantize())


SPLITS = [33, 0, 5, 64]


@RECIPES
@OVERRIDES
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_group_is_what_a_linear_of_its_own_is(recipe, override, packed, dtype):
    quantizes, recipe = recipe, recipe(backward_override=override)
    experts = made(4, 64, 48, dtype=dtype, bias=False, single_grouped_weight=packed)
    with torch.no_grad():  # groups of other sizes have other scales
        for g, weight in enumerate(by_group(dict(experts.named_parameters()), "weight", 4)):
            weight.mul_(4.0**g)
    x, grad = torch.randn(sum(SPLITS), 64).to(dtype), torch.randn(sum(SPLITS), 48).to(dtype)
    leaf = x.clone().requires_grad_()
    with tandem.autocast(recipe=recipe):
        y = experts(leaf, torch.tensor(SPLITS))
    y.backward(grad)
    gradients = gradients_by_group(experts, "weight", 4)
    parts = zip(x.split(SPLITS), grad.split(SPLITS), y.split(SPLITS), leaf.grad.split(SPLITS), linears_of(experts), gradients, strict=True)
    for rows, of_y, own, of_x, linear, of_weight in parts:
        if not len(rows):
            assert of_weight is None or not of_weight.any()
            continue
        wanted_y, *wanted = step(linear, rows, recipe, of_y)
        assert torch.equal(own, wanted_y)
        for each in ((of_x, of_weight), wanted):  # numbers: libraries sum in an order that depends on threads and addresses
            a, b = multiplied(quantizes, override, rows, linear.weight.detach())
            assert_is_product(each[0], of_y.double(), b)
            assert_is_product(each[1], of_y.double().t(), a)


@pytest.mark.parametrize("run", ["compiled", "main_grad", "later"])
@pytest.mark.parametrize("packed", [False, True])
@RECIPES
def test_decoded_operands_of_groups_wherever_gradients_go(recipe, packed, run):
    recipe, splits = recipe(backward_override="dequantized"), torch.tensor(SPLITS)
    plain = made(4, 64, 48, bias=False, single_grouped_weight=packed)
    arguments = {"main_grad": {"accumulate_into_main_grad": True}, "later": {"delay_wgrad_compute": True}}.get(run, {})
    other = ops.GroupedLinear(4, 64, 48, bias=False, single_grouped_weight=packed, **arguments)
    other.load_state_dict(plain.state_dict())
    for param in other.parameters():
        param.main_grad = torch.zeros_like(param)
    x, grad = torch.randn(sum(SPLITS), 64), torch.randn(sum(SPLITS), 48)
    call = torch.compile(other, fullgraph=True, backend="aot_eager") if run == "compiled" else other
    results = []
    for module in (plain, call):
        leaf = x.clone().requires_grad_()
        with tandem.autocast(recipe=recipe):
            y = module(leaf, splits)
        y.backward(grad)
        results.append((y.detach(), leaf.grad))
    if run == "later":
        assert all(param.grad is None for param in other.parameters())
        other.backward_dw()
    torch.testing.assert_close(results[1], results[0])
    for param, wanted in zip(other.parameters(), plain.parameters(), strict=True):
        actual = param.main_grad if run == "main_grad" else param.grad
        torch.testing.assert_close(actual, wanted.grad, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("packed", [False, True])
@OVERRIDES
@RECIPES
def test_experts_as_one_fusion(recipe, override, packed):
    recipe = recipe(backward_override=override)
    box = ops.Sequential(made(4, 64, 96, single_grouped_weight=packed), ops.SwiGLU(), made(4, 48, 64, single_grouped_weight=packed))
    x, splits, grad = torch.randn(sum(SPLITS), 64), torch.tensor(SPLITS), torch.randn(sum(SPLITS), 64)
    results = []
    for fused in (True, False):
        leaf = x.clone().requires_grad_()
        with tandem.autocast(recipe=recipe):
            y = box(leaf, splits, splits) if fused else box[2](box[1](box[0](leaf, splits)), splits)
        results.append([y.detach(), *torch.autograd.grad(y, [leaf, *box.parameters()], grad)])
    assert "made    grouped_mlp_glu" in box.explain()
    assert_equal(*results)
    with tandem.autocast(recipe=recipe):
        report = tandem.verify(box, x.requires_grad_(), splits, splits)
    assert report, report


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("override", [None, "high_precision", "dequantized"])
def test_groups_by_parts(override, delay):
    recipe, splits = MXFP8BlockScaling(backward_override=override), torch.tensor(SPLITS)
    experts = made(4, 64, 48, bias=False, delay_wgrad_compute=delay)
    other, ctx, x, grad = copy.deepcopy(experts), OperationContext(), torch.randn(sum(SPLITS), 64), torch.randn(sum(SPLITS), 48)
    with tandem.autocast(recipe=recipe):
        y, _ = experts.fuser_forward([ctx], x, basic_op_extra_inputs=[(splits,)])
        expected = other(leaf := x.clone().requires_grad_(), splits)
    ctx.saved_tensors = ctx.to_save
    grad_x, (of_weights,), _ = experts.fuser_backward([ctx], grad, basic_op_grad_extra_outputs=[()])
    expected.backward(grad)
    if delay:
        experts.backward_dw()
        other.backward_dw()
        of_weights = [param.grad for param in experts.parameters()]
    assert torch.equal(y, expected) and torch.equal(grad_x, leaf.grad)
    assert_equal([*of_weights], [param.grad for param in other.parameters()])


def test_autocast_of_torch_decodes_to_the_dtype_of_the_product():
    for packed in (False, True):
        experts = made(4, 64, 48, bias=False, single_grouped_weight=packed)
        x, grad = torch.randn(sum(SPLITS), 64, requires_grad=True), torch.randn(sum(SPLITS), 48).bfloat16()
        with torch.autocast("cpu", torch.bfloat16), tandem.autocast(recipe=MXFP8BlockScaling(backward_override="dequantized")):
            y = experts(x, torch.tensor(SPLITS))
        y.backward(grad)
        weight = by_group(dict(experts.named_parameters()), "weight", 4)[3].detach()
        decoded = tandem.quantize(weight, tandem.MXFP8Quantizer(E4M3)).dequantize()
        wanted = grad[38:].double() @ decoded.double()
        assert y.dtype == torch.bfloat16 and (x.grad[38:] - wanted).norm() < 1e-2 * wanted.norm()


def test_another_value_at_the_next_call_makes_another_plan():
    linear, x, grad = ops.Linear(64, 48), torch.randn(16, 64), torch.randn(16, 48)
    results = [step(linear, x, MXFP8BlockScaling(backward_override=value), grad) for value in (None, "high_precision", "dequantized", None)]
    assert torch.equal(results[0][1], results[3][1])
    assert len({result[1].sum().item() for result in results}) == 3


def test_refusals():
    with pytest.raises(ValueError, match="Float8CurrentScaling: expected backward_override to be None, \"high_precision\" or \"dequantized\", got 'none'"):
        Float8CurrentScaling(backward_override="none")
