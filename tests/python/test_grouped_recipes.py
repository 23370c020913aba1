"""Experts under recipes: the rows of each group, and each weight, are quantized as tensors of their own."""

from __future__ import annotations

import copy

import pytest
import torch
from experts import by_group, gradients_by_group, linears_of, made
from torch.testing import assert_close

import tandem
from tandem import ops
from tandem.recipe import CustomRecipe, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

NVFP4 = NVFP4BlockScaling(disable_stochastic_rounding=True)  # whose numbers are the same in each run


def mixed_formats(role):
    """E4M3 blocks of squares for weights, lines for what they multiply."""
    return tandem.Float8BlockQuantizer(torch.float8_e4m3fn, rowwise=True, columnwise=True, block_scaling_dim=2 if role.tensor_type == "weight" else 1)


RECIPES = [
    Float8CurrentScaling(), MXFP8BlockScaling(), Float8BlockScaling(), NVFP4, CustomRecipe(qfactory=mixed_formats),
    NVFP4BlockScaling(disable_stochastic_rounding=True, disable_rht=True, disable_2d_quantization=True),
]  # fmt: skip
SPLITS = [33, 0, 5, 64]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("in_features", [64, 7])  # rows of 7 numbers end where no vector does
def test_each_group_is_what_a_linear_of_its_own_is(recipe, in_features, dtype, packed):
    module = made(4, in_features, 48, dtype=dtype, single_grouped_weight=packed, single_grouped_bias=packed)
    with torch.no_grad():  # groups of other sizes have other scales
        for g, weight in enumerate(by_group(dict(module.named_parameters()), "weight", 4)):
            weight.mul_(4.0**g)
    x = torch.randn(sum(SPLITS), in_features, dtype=dtype)
    x[:33] *= 100
    x, grad = x.requires_grad_(), torch.randn(sum(SPLITS), 48).to(dtype)
    with tandem.autocast(recipe=recipe):
        y = module(x, torch.tensor(SPLITS))
    y.backward(grad)
    rows, linears = x.detach().requires_grad_(), linears_of(module)
    with tandem.autocast(recipe=recipe):
        expected = torch.cat([linear(part) for linear, part in zip(linears, rows.split(SPLITS), strict=True)])
    expected.backward(grad)
    assert torch.equal(y, expected) and torch.equal(x.grad, rows.grad)
    for g, (linear, gradient) in enumerate(zip(linears, gradients_by_group(module, "weight", 4), strict=True)):
        assert torch.equal(gradient, torch.zeros_like(gradient) if linear.weight.grad is None else linear.weight.grad), g


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
    assert_close(gradients(torch.compile(box, fullgraph=True, backend="aot_eager")), expected, rtol=1e-4, atol=1e-4)
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


def numbers(x, text, direction, seed=None):
    """x in the codes of a quantizer and back, in float64, as a product reads them: with padding, and rotated."""
    is_row = direction == "row"
    group = torch.ops.tandem.quantize(x, seed, text, [is_row, not is_row, False])
    codes, scale, amax = group[:3] if is_row else group[3:6]
    return torch.ops.tandem.decode(codes, scale, text, not is_row, amax).double()


@pytest.mark.parametrize("run", ["eager", "compiled", "delayed", "main_grad", "packed"])
def test_each_group_has_random_numbers_of_its_own(run):
    module = made(4, 64, 48, bias=False, single_grouped_weight=run == "packed", delay_wgrad_compute=run == "delayed", accumulate_into_main_grad=run == "main_grad")
    params = dict(module.named_parameters())
    for param in params.values():
        param.main_grad = torch.zeros_like(param)
    call = torch.compile(module, fullgraph=True, backend="aot_eager") if run == "compiled" else module
    x, grad = torch.randn(sum(SPLITS), 64, requires_grad=True), torch.randn(sum(SPLITS), 48)
    torch.manual_seed(3)
    with tandem.autocast(recipe=NVFP4BlockScaling()):
        y = call(x, torch.tensor(SPLITS))
    y.backward(grad)
    torch.manual_seed(3)
    seed = torch.randint(torch.iinfo(torch.int64).max, ())
    if run == "delayed":
        assert module.weight0.grad is None
        module.backward_dw()
    gradients = by_group({name: param.main_grad if run == "main_grad" else param.grad for name, param in params.items()}, "weight", 4)
    first = 0
    for g, (count, weight) in enumerate(zip(SPLITS, by_group(params, "weight", 4), strict=True)):
        rows = slice(first, first + count)
        first += count
        if count == 0:
            assert not gradients[g].any()
            continue
        own = torch.stack([seed, torch.tensor(g)])
        of_grad = [numbers(grad[rows], "nvfp4:rht=1:sr=1", direction, own) for direction in ("row", "column")]
        of_x = [numbers(x[rows].detach(), "nvfp4:rht=1", direction) for direction in ("row", "column")]
        of_weight = [numbers(weight.detach(), "nvfp4:2d=1", direction) for direction in ("row", "column")]
        for actual, wanted in (
            (y[rows], of_x[0] @ of_weight[0].t()), (x.grad[rows], of_grad[0] @ of_weight[1]), (gradients[g], of_grad[1].t() @ of_x[1])
        ):  # fmt: skip
            assert_close(actual.double(), wanted, rtol=0, atol=4e-6 * wanted.abs().max().item())


def test_experts_whose_gradients_are_rounded_by_chance_are_one_fusion():
    first, last = made(4, 64, 96), made(4, 48, 64)
    box = ops.Sequential(ops.RMSNorm(64), first, ops.SwiGLU(), last)
    x, splits, recipe = torch.randn(sum(SPLITS), 64, requires_grad=True), torch.tensor(SPLITS), NVFP4BlockScaling()
    means, one = [torch.zeros_like(param) for param in box.parameters()], None
    for step in range(40):
        with tandem.autocast(recipe=recipe):
            y = box(x, splits, splits)
        grads = torch.autograd.grad(y.square().sum(), [*box.parameters()])
        one = grads if one is None else one
        for mean, grad in zip(means, grads, strict=True):
            mean.add_(grad / 40)
    assert "made    grouped_mlp_glu" in box.explain()
    with tandem.autocast(recipe=NVFP4):
        box(x, splits, splits)
        nearest = torch.autograd.grad(box(x, splits, splits).square().sum(), [*box.parameters()])
    for mean, grad, wanted in zip(means, one, nearest, strict=True):
        assert wanted.norm() == 0 or (mean - wanted).norm() < 0.3 * wanted.norm()
        assert wanted.norm() == 0 or not torch.equal(grad, wanted) or grad.dim() == 1
    with tandem.autocast(recipe=recipe):
        report = tandem.verify(box, x, splits, splits)
    assert report, report


def test_operands_of_groups_are_both_rotated_or_both_not():
    def qfactory(role):
        return tandem.NVFP4Quantizer(with_rht=role.tensor_type == "input", with_post_rht_amax=role.tensor_type == "input")

    module, x = made(4, 64, 48), torch.randn(sum(SPLITS), 64)
    with tandem.autocast(recipe=CustomRecipe(qfactory)), pytest.raises(ValueError, match="expected operands that are both rotated or both not, got"):
        module(x, torch.tensor(SPLITS))


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
    with pytest.raises(NotImplementedError, match="grouped_linear: expected tensors that need no gradient for quantized products, got one that requires it"):
        torch.ops.tandem.grouped_grad_weight(x.requires_grad_(), x, splits, 4, "fp8_e4m3", "fp8_e4m3")
    with tandem.autocast(recipe=RECIPES[0]), pytest.raises(NotImplementedError, match="expected ops with a composite form under torch.func"):
        torch.func.jvp(lambda x: module(x, splits), (x.detach(),), (torch.ones_like(x),))
