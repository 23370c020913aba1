"""Float8CurrentScaling: numbers against an emulation, regions, refusals."""

import dataclasses
import json

import pytest
import torch
from support import llama_mlp, randomize

import tandem
import tandem.ops as ops
from tandem.recipe import Float8CurrentScaling, Format

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def rounded(x, dtype, power_2=False, epsilon=0.0):
    """x on the grid of current scaling, in float64: scale = largest / amax, and what its inverse gives back."""
    largest = torch.tensor(LARGEST[dtype], dtype=torch.float32)
    amax = x.detach().float().abs().max().clamp(min=epsilon)
    if amax == 0:
        return x.double() * 0
    scale = largest / amax
    if power_2:
        scale = torch.exp2(torch.floor(torch.log2(scale.double()))).float()
    codes = (x.float() * scale).clamp(-largest, largest).to(dtype)
    return codes.double() * (1 / scale).double()


def emulated(x, weight, bias, grad, recipe):
    wide = torch.float8_e5m2 if recipe.fp8_format is Format.HYBRID else torch.float8_e4m3fn
    qx = rounded(x, torch.float8_e4m3fn, recipe.use_power_2_scales, recipe.amax_epsilon_input)
    qw = rounded(weight, torch.float8_e4m3fn, recipe.use_power_2_scales, recipe.amax_epsilon_weight)
    qg = rounded(grad, wide, recipe.use_power_2_scales, recipe.amax_epsilon_grad_output)
    return qx @ qw.t() + bias.double(), qg @ qw, qg.t() @ qx, grad.double().sum(0)


RECIPES = [
    Float8CurrentScaling(),
    Float8CurrentScaling(fp8_format=Format.E4M3),
    Float8CurrentScaling(use_power_2_scales=True),
    Float8CurrentScaling(amax_epsilon_input=10.0, amax_epsilon_weight=5.0, amax_epsilon_grad_output=20.0),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.to_json())
@pytest.mark.parametrize("shape", [(5, 8, 6), (1, 3, 2), (33, 17, 31)])
def test_linear_is_the_product_of_rounded_operands(recipe, shape):
    rows, fan_in, fan_out = shape
    linear = randomize(ops.Linear(fan_in, fan_out))
    x, grad = torch.randn(rows, fan_in, requires_grad=True), torch.randn(rows, fan_out)
    with tandem.autocast(recipe=recipe):
        y = linear(x)
    grads = torch.autograd.grad(y, [x, linear.weight, linear.bias], grad)
    for actual, expected in zip((y, *grads), emulated(x, linear.weight, linear.bias, grad, recipe), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=4e-6 * max(1.0, expected.abs().max().item()))


def test_quantize_rounds_where_a_recipe_is_on():
    x = torch.randn(4, 8, requires_grad=True)
    op = ops.Quantize(forward=True, backward=True)
    assert torch.equal(op(x), x)
    with tandem.autocast():
        y = op(x)
    torch.testing.assert_close(y.double(), rounded(x, torch.float8_e4m3fn), rtol=0, atol=1e-6)
    grad = torch.randn(4, 8)
    actual = torch.autograd.grad(y, x, grad)[0]
    torch.testing.assert_close(actual.double(), rounded(grad, torch.float8_e5m2), rtol=0, atol=1e-6)


def test_nested_regions_and_disabled_ones():
    linear, x = ops.Linear(8, 8), torch.randn(4, 8)
    plain, other = linear(x), Float8CurrentScaling(use_power_2_scales=True)
    with tandem.autocast():
        outer = linear(x)
        with tandem.autocast(enabled=False):
            assert torch.equal(linear(x), plain)
            with tandem.autocast(recipe=other):
                inner = linear(x)
        assert torch.equal(linear(x), outer)
    assert torch.equal(linear(x), plain)
    assert not torch.equal(outer, plain) and not torch.equal(inner, outer)

    @tandem.autocast()
    def decorated():
        return linear(x)

    assert torch.equal(decorated(), outer)
    with pytest.raises(KeyError), tandem.autocast():
        raise KeyError
    assert torch.equal(linear(x), plain)


def test_recipes_are_frozen_values():
    recipe = Float8CurrentScaling()
    assert recipe == Float8CurrentScaling() and hash(recipe) == hash(Float8CurrentScaling())
    assert recipe.fp8_format is Format.HYBRID and recipe.use_power_2_scales is False
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.use_power_2_scales = True
    assert json.loads(recipe.to_json()) == {
        "name": "Float8CurrentScaling",
        "backward_override": "none",
        "fp8_format": "HYBRID",
        "use_power_2_scales": False,
        "amax_epsilon_grad_output": 0.0,
        "amax_epsilon_input": 0.0,
        "amax_epsilon_weight": 0.0,
    }
    with tandem.autocast():
        assert json.loads(tandem._C.active_recipe()) == json.loads(recipe.to_json())


ERRORS = [
    (lambda: Float8CurrentScaling(fp8_format="HYBRID"), ValueError, "expected fp8_format to be Format.HYBRID or Format.E4M3, got 'HYBRID'"),
    (lambda: Float8CurrentScaling(use_power_2_scales=1), ValueError, "expected use_power_2_scales to be True or False, got 1"),
    (lambda: Float8CurrentScaling(amax_epsilon_input=None), ValueError, "expected amax_epsilon_input to be a finite number >= 0, got None. amax_epsilon_input: the least"),
    (lambda: Float8CurrentScaling(amax_epsilon_input="1"), ValueError, "expected amax_epsilon_input to be a finite number >= 0, got '1'. amax_epsilon_input: the least"),
    (lambda: Float8CurrentScaling(amax_epsilon_weight=-1.0), ValueError, "expected amax_epsilon_weight to be a finite number >= 0, got -1.0"),
    (
        lambda: Float8CurrentScaling(backward_override="half"),
        ValueError,
        "Float8CurrentScaling: expected backward_override to be None, \"high_precision\" or \"dequantized\", got 'half'",
    ),
    (lambda: tandem.autocast(recipe="fp8"), TypeError, "autocast: expected recipe to be a recipe of tandem.recipe or None, got str"),
]


@pytest.mark.parametrize(("make", "kind", "text"), ERRORS)
def test_errors(make, kind, text):
    with pytest.raises(kind) as error:
        make()
    assert text in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_made_again_in_backward_are_those_of_forward(dtype):
    together = randomize(llama_mlp(16, 32)).to(dtype)
    apart = [ops.Sequential(op) for op in together]  # each linear keeps its codes: nothing writes its input again
    results = []
    for stack in ([together], apart):
        together.zero_grad()
        y = x = torch.randn(9, 16, dtype=dtype, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with tandem.autocast(recipe=Float8CurrentScaling()):
            for part in stack:
                y = part(y)
        y.square().sum().backward()
        results.append([y, x.grad, *(p.grad for p in together.parameters())])
    torch.testing.assert_close(*results, rtol=0, atol=0)
    width = together[1].weight.shape[0]
    assert together.saved_bytes() == 9 * (width * x.element_size() + 4), "the product and the norm's statistic"


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), tandem.recipe.MXFP8BlockScaling()], ids=lambda recipe: type(recipe).__name__)
@pytest.mark.parametrize("shape", [(8, 100_000, 8), (64, 8192, 64), (300, 5000, 17), (130, 129, 131)])
def test_products_do_not_depend_on_the_number_of_threads(shape, recipe):
    rows, fan_in, fan_out = shape
    linear = randomize(ops.Linear(fan_in, fan_out, bias=False))
    x, grad = torch.randn(rows, fan_in, requires_grad=True), torch.randn(rows, fan_out)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with tandem.autocast(recipe=recipe):
                y = linear(x)
            results.append([y, *torch.autograd.grad(y, [x, linear.weight], grad)])
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(*results, rtol=0, atol=0)
