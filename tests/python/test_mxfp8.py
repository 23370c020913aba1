"""MXFP8BlockScaling: numbers against an emulation, one value per direction, weights, compilers, refusals."""

import contextlib

import pytest
import torch
import torch.utils.checkpoint
from support import llama_mlp, randomize
from weights import made_in

import tandem
import tandem.ops as ops
from tandem.recipe import Float8CurrentScaling, Format, MXFP8BlockScaling

E4M3, E5M2 = (torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)
RECIPES = [MXFP8BlockScaling(), MXFP8BlockScaling(fp8_format=Format.HYBRID), MXFP8BlockScaling(enable_2d_quantization=True)]


def rounded(x, element, along, square=False):
    """x on the grid of blocks of 32 along a dimension, in float64: each block's scale is the power of two at or above amax / largest."""
    dtype, largest = element
    height, width = (32, 32) if square else (1, 32) if along == 1 else (32, 1)
    result = torch.zeros(x.shape, dtype=torch.float64)
    for r in range(0, x.shape[0], height):
        for c in range(0, x.shape[1], width):
            block = x[r : r + height, c : c + width].detach().float()
            mantissa, exponent = torch.frexp(block.abs().max() * torch.tensor(1 / largest, dtype=torch.float32))
            power = torch.ldexp(torch.tensor(1.0, dtype=torch.float64), exponent - (mantissa == 0.5).int())
            if mantissa == 0:
                power = torch.tensor(1.0, dtype=torch.float64)
            codes = (block.double() / power).clamp(-largest, largest).to(dtype)
            result[r : r + height, c : c + width] = codes.double() * power
    return result


def emulated(x, weight, bias, grad, recipe):
    wide, square = E5M2 if recipe.fp8_format is Format.HYBRID else E4M3, recipe.enable_2d_quantization
    y = rounded(x, E4M3, 1) @ rounded(weight, E4M3, 1, square).t() + bias.double()
    grad_x = rounded(grad, wide, 1) @ rounded(weight, E4M3, 0, square)
    return y, grad_x, rounded(grad, wide, 0).t() @ rounded(x, E4M3, 0), grad.double().sum(0)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.to_json())
@pytest.mark.parametrize("shape", [(5, 8, 6), (1, 3, 2), (33, 37, 31), (40, 64, 96), (0, 8, 4)])
def test_linear_is_the_product_of_rounded_operands(recipe, shape):
    rows, fan_in, fan_out = shape
    linear = randomize(ops.Linear(fan_in, fan_out))
    x, grad = torch.randn(rows, fan_in, requires_grad=True), torch.randn(rows, fan_out)
    with tandem.autocast(recipe=recipe):
        y = linear(x)
    grads = torch.autograd.grad(y, [x, linear.weight, linear.bias], grad)
    for actual, expected in zip((y, *grads), emulated(x, linear.weight, linear.bias, grad, recipe), strict=True):
        largest = expected.abs().max().item() if expected.numel() else 1.0
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=4e-6 * max(1.0, largest))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.to_json())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_and_unfused_agree(recipe, dtype):
    box = randomize(llama_mlp(32, 48)).to(dtype)
    with tandem.autocast(recipe=recipe):
        outcome = tandem.verify(box, torch.randn(6, 32, dtype=dtype, requires_grad=True))
    assert outcome, str(outcome)


def test_quantize_rounds_rows():
    x = torch.randn(4, 40, requires_grad=True)
    with tandem.autocast(recipe=MXFP8BlockScaling()):
        y = ops.Quantize(forward=True, backward=True)(x)
    assert torch.equal(y.double(), rounded(x, E4M3, 1))
    grad = torch.randn(4, 40)
    assert torch.equal(torch.autograd.grad(y, x, grad)[0].double(), rounded(grad, E4M3, 1))


def test_a_weight_is_quantized_once_per_set_of_directions():
    linear, x = ops.Linear(64, 64), torch.randn(4, 64, requires_grad=True)

    def region():
        with tandem.autocast(recipe=MXFP8BlockScaling()):
            for _ in range(3):
                linear(x).sum().backward()
            with torch.no_grad():
                linear(x)
                linear(x)

    assert made_in(region) == (2, 6), "with column codes, and without"


def results_of(call, module, x, grad):
    module.zero_grad()
    x = x.clone().requires_grad_()
    with tandem.autocast(recipe=MXFP8BlockScaling()):
        y = call(x)
    y.backward(grad)
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


def test_compiled_exported_and_checkpointed_calls_give_the_same_bits():
    module = randomize(llama_mlp(64, 96))
    x, grad = torch.randn(40, 64), torch.randn(40, 64)
    expected = results_of(module, module, x, grad)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    ways = {
        "compiled": compiled,
        "checkpoint": lambda t: torch.utils.checkpoint.checkpoint(
            module, t, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), tandem.autocast(recipe=MXFP8BlockScaling()))
        ),
    }
    for name, way in ways.items():
        torch.testing.assert_close(results_of(way, module, x, grad), expected, rtol=0, atol=0, msg=name)
    with tandem.autocast(recipe=MXFP8BlockScaling()), torch.no_grad():
        program = torch.export.export(module, (x,))
    assert torch.equal(program.module()(x), expected[0])
    lowered = program.run_decompositions()
    assert any("quantize" in str(node.target) for node in lowered.graph.nodes)
    with torch.no_grad():
        assert torch.equal(lowered.module()(x), expected[0])


def test_functional_transforms_say_that_gradients_are_rounded():
    linear, x = ops.Linear(32, 32), torch.randn(4, 32)
    with tandem.autocast(recipe=MXFP8BlockScaling()), pytest.raises(NotImplementedError, match="pipeline: expected no recipe where torch.func"):
        torch.func.grad(lambda t: linear(t).sum())(x)


def test_a_recipe_is_a_frozen_value_that_goes_through_json():
    recipe = MXFP8BlockScaling(fp8_format=Format.HYBRID, enable_2d_quantization=True)
    assert MXFP8BlockScaling() == MXFP8BlockScaling(0, Format.E4M3, False, False, False, None) and hash(recipe) != hash(MXFP8BlockScaling())
    for each in (recipe, MXFP8BlockScaling(), Float8CurrentScaling(amax_epsilon_weight=2.5)):
        assert tandem.recipe.recipe_from_json(each.to_json()) == each
        with tandem.autocast(recipe=each):
            assert tandem.recipe.recipe_from_json(tandem._C.active_recipe()) == each
    with pytest.raises(ValueError, match="recipe: expected one of DelayedScaling, .*, NVFP4BlockScaling, got 'MXFP4'"):
        tandem.recipe.recipe_from_json('{"name": "MXFP4"}')


ERRORS = [
    (lambda: MXFP8BlockScaling(fp8_format="E5M2"), ValueError, "MXFP8BlockScaling: expected fp8_format to be Format.HYBRID or Format.E4M3, got 'E5M2'"),
    (lambda: MXFP8BlockScaling(enable_2d_quantization=1), ValueError, "expected enable_2d_quantization to be True or False, got 1"),
    (lambda: MXFP8BlockScaling(margin=1), NotImplementedError, "MXFP8BlockScaling: expected margin=0, got 1"),
    (lambda: MXFP8BlockScaling(backward_override="half"), ValueError, "expected backward_override to be None, \"high_precision\" or \"dequantized\", got 'half'"),
    (
        lambda: torch.ops.tandem.dequantize(torch.zeros(4, 64, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.uint8), "mxfp8_e4m3", False, torch.float32),
        ValueError,
        "dequantize: expected dequant_scale of shape [128, 4], uint8, for row codes [4, 64] of mxfp8_e4m3, got shape [4, 2], uint8. Pass what quantize",
    ),
]


@pytest.mark.parametrize(("make", "kind", "text"), ERRORS)
def test_errors(make, kind, text):
    with pytest.raises(kind) as error:
        make()
    assert text in str(error.value)
