"""Experts under recipes: the rows of each group, and each weight, are quantized as tensors of their own."""

from __future__ import annotations

import copy

import pytest
import torch
from experts import by_group, made
from torch.testing import assert_close

import tandem
from tandem import ops
from tandem.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

RECIPES = [Float8CurrentScaling(), MXFP8BlockScaling(), Float8BlockScaling()]
SPLITS = [33, 0, 5, 64]


def by_linears(module: ops.GroupedLinear, x: torch.Tensor, splits: list[int], recipe, scales=None) -> torch.Tensor:
    """The same of one Linear for each group, with the parameters of the module, under the recipe."""
    params = dict(module.named_parameters())
    weights, biases = by_group(params, "weight", len(splits)), by_group(params, "bias", len(splits))
    parts = []
    for g, rows in enumerate(x[: sum(splits)].split(splits)):
        linear = ops.BasicLinear(module.in_features, module.out_features, dtype=weights[g].dtype)
        linear.weight = torch.nn.Parameter(weights[g].detach())
        with tandem.autocast(recipe=recipe):
            part = linear(rows)
        parts.append((linear, part, part if biases is None else part + (biases[g] if scales is None else scales[:, None] * biases[g])))
    return parts


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_each_group_is_what_a_linear_of_its_own_is(recipe, dtype, packed):
    module = made(4, 64, 48, dtype=dtype, single_grouped_weight=packed, single_grouped_bias=packed)
    with torch.no_grad():  # groups of other sizes have other scales
        for g, weight in enumerate(by_group(dict(module.named_parameters()), "weight", 4)):
            weight.mul_(4.0**g)
    x = torch.randn(sum(SPLITS), 64, dtype=dtype)
    x[:33] *= 100
    x, grad = x.requires_grad_(), torch.randn(sum(SPLITS), 48).to(dtype)
    with tandem.autocast(recipe=recipe):
        y = module(x, torch.tensor(SPLITS))
    y.backward(grad)
    rows = x.detach().requires_grad_()
    linears = by_linears(module, rows, SPLITS, recipe)
    expected = torch.cat([part for _, _, part in linears])
    expected.backward(grad)
    assert torch.equal(y, expected) and torch.equal(x.grad, rows.grad)
    params = dict(module.named_parameters())
    gradients = params["weight"].grad.unbind(0) if packed else [params[f"weight{g}"].grad for g in range(4)]
    for g, (linear, _, _) in enumerate(linears):
        assert torch.equal(gradients[g], torch.zeros_like(gradients[g]) if linear.weight.grad is None else linear.weight.grad), g


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_compiled_and_in_a_pipeline(recipe):
    first, last = made(4, 64, 96), made(4, 48, 64)
    box = ops.Sequential(ops.RMSNorm(64), first, ops.SwiGLU(), last)
    x, splits = torch.randn(sum(SPLITS), 64, requires_grad=True), torch.tensor(SPLITS)

    def gradients(call):
        with tandem.autocast(recipe=recipe):
            y = call(x, splits, splits)
        return y, *torch.autograd.grad(y.square().sum(), [x, *box.parameters()])

    expected = gradients(box)
    assert_close(gradients(torch.compile(box, fullgraph=True)), expected, rtol=1e-4, atol=1e-4)
    assert "made    grouped_mlp_glu" in box.explain()
    with tandem.autocast(recipe=recipe):
        report = tandem.verify(box, x, splits, splits)
    assert report, report


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_codes_of_weights_are_cached_and_follow_their_weights(recipe):
    module, x, splits = made(4, 64, 48), torch.randn(sum(SPLITS), 64), torch.tensor(SPLITS)
    before = tandem._C.refresh_counts()
    with tandem.autocast(recipe=recipe):
        first, again = module(x, splits), module(x, splits)
        with torch.no_grad():
            module.weight3.mul_(2)
        changed = module(x, splits)
    after = tandem._C.refresh_counts()
    assert torch.equal(first, again) and torch.equal(first[:38], changed[:38]) and not torch.equal(first[38:], changed[38:])
    assert (after.made - before.made, after.reused - before.reused) == (5, 7)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_main_grads_get_the_gradients_of_quantized_products(recipe):
    module, splits = made(4, 64, 48, accumulate_into_main_grad=True), torch.tensor(SPLITS)
    plain = copy.deepcopy(module)
    plain.accumulate_into_main_grad = False
    for g in range(4):
        getattr(module, f"weight{g}").main_grad = torch.zeros(48, 64)
    x, grad = torch.randn(sum(SPLITS), 64), torch.randn(sum(SPLITS), 48)
    for each in (module, plain):
        with tandem.autocast(recipe=recipe):
            y = each(x, splits)
        y.backward(grad)
    for g in range(4):
        assert torch.equal(getattr(module, f"weight{g}").main_grad, getattr(plain, f"weight{g}").grad)


def test_autocast_of_torch_under_a_recipe():
    module, x, splits = made(4, 64, 48), torch.randn(sum(SPLITS), 64), torch.tensor(SPLITS)
    with torch.autocast("cpu", torch.bfloat16), tandem.autocast(recipe=RECIPES[0]):
        y = module(x, splits)
    wide = module(x, splits)
    assert y.dtype == torch.bfloat16 and (y - wide).norm() < 0.06 * wide.norm()


def test_parameters_in_codes():
    module, x, splits = made(4, 64, 48), torch.randn(sum(SPLITS), 64), torch.tensor(SPLITS)
    with tandem.autocast(recipe=RECIPES[1]):
        expected = module(x, splits)
    for g in range(4):
        codes = tandem.quantize(getattr(module, f"weight{g}").detach(), tandem.MXFP8Quantizer(torch.float8_e4m3fn))
        setattr(module, f"weight{g}", torch.nn.Parameter(codes))
    with tandem.autocast(recipe=RECIPES[1]):
        assert torch.equal(module(x, splits), expected)


def test_what_recipes_cannot_have_is_told():
    module, x, splits = made(4, 64, 48), torch.randn(sum(SPLITS), 64), torch.tensor(SPLITS)
    with tandem.autocast(recipe=DelayedScaling()), pytest.raises(
        NotImplementedError, match="expected a recipe whose scales follow from the numbers, as each group of rows has its own, got one that keeps amaxes"
    ):
        module(x, splits)
    with tandem.autocast(recipe=NVFP4BlockScaling()), pytest.raises(
        NotImplementedError, match="expected a recipe whose codes are bytes, as each group of rows is quantized by itself, got the quantizer nvfp4"
    ):
        module(x, splits)
    with tandem.autocast(recipe=RECIPES[0]), pytest.raises(NotImplementedError, match="expected float32, bfloat16 or float16 under a recipe, got "):
        made(4, 64, 48, dtype=torch.float64)(x, splits)
    with pytest.raises(NotImplementedError, match="grouped_linear: expected tensors that need no gradient for quantized products, got one that requires it"):
        torch.ops.tandem.grouped_grad_weight(x.requires_grad_(), x, splits, 4, "fp8_e4m3", "fp8_e4m3")
    with tandem.autocast(recipe=RECIPES[0]), pytest.raises(NotImplementedError, match="expected ops with a composite form under torch.func"):
        torch.func.jvp(lambda x: module(x, splits), (x.detach(),), (torch.ones_like(x),))
