"""A fused step rounds once, to the dtype of what it writes."""

import copy

import pytest
import torch
from support import assert_equal, results_of

import tandem
import tandem.ops as ops

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
COLS, ROWS = 96, 33


def draw(*sizes, dtype):
    return torch.randn(sizes).to(dtype)


def close_to_one_rounding(got, want, sums):
    """`sums`: of the magnitudes of what a product adds up, each a float32 rounding at most."""
    bound = torch.finfo(got.dtype).eps / 2 * want.abs() + (COLS + 2) * 2.0**-23 * sums
    return bool(((got.double() - want).abs() <= bound).all())


@DTYPES
@pytest.mark.parametrize("rows", [ROWS, 1024], ids=["small", "large"])  # products of two libraries
@pytest.mark.parametrize("mode", ["eager", "compiled", "groups"])
def test_a_bias_is_added_before_the_product_is_rounded(dtype, rows, mode):
    x = draw(rows, COLS, dtype=dtype)
    if mode == "groups":
        linear = ops.GroupedLinear(1, COLS, 160, dtype=dtype)
        weight, bias, extra = linear.weight0, linear.bias0, (torch.tensor([rows]),)
    else:
        linear, extra = ops.Linear(COLS, 160, dtype=dtype), ()
        weight, bias = linear.weight, linear.bias
    with torch.no_grad():
        bias.copy_(draw(160, dtype=dtype))
    run = torch.compile(linear, backend="aot_eager", fullgraph=True) if mode == "compiled" else linear
    want = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    sums = torch.nn.functional.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
    assert close_to_one_rounding(run(x, *extra).detach(), want.detach(), sums.detach())


@DTYPES
@pytest.mark.parametrize("rows", [1, ROWS, 1024])
@pytest.mark.parametrize("scale", [None, 3.0])
@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_a_product_its_bias_and_an_extra_input_are_rounded_once(dtype, rows, scale, mode):
    """The extra input leaves nothing but a rounding: whatever is rounded before the sum is as large as the result."""
    linear = ops.Linear(COLS, 160, dtype=dtype)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.normal_()
    x = draw(rows, COLS, dtype=dtype)
    scaled = [ops.ConstantScale(scale)] if scale else []
    exact = torch.nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double()).detach() * (scale or 1)
    sums = torch.nn.functional.linear(x.double().abs(), linear.weight.double().abs(), linear.bias.double().abs()).detach() * (scale or 1)
    extra = (-exact).to(dtype)
    block = ops.Sequential(linear, *scaled, ops.AddExtraInput())
    run = torch.compile(block, backend="aot_eager", fullgraph=True) if mode == "compiled" else block
    assert close_to_one_rounding(run(x, extra).detach(), exact + extra.double(), sums + extra.double().abs())


@pytest.mark.parametrize("behind", [(), (ops.ReLU,), (ops.AddExtraInput,)], ids=["bias", "unit", "extra"])
@pytest.mark.parametrize("recipe", [None, tandem.recipe.Float8CurrentScaling()], ids=["plain", "recipe"])
@pytest.mark.parametrize("grouped", [False, True], ids=["linear", "groups"])
def test_256_plus_1_less_256(behind, recipe, grouped):
    """257 lies halfway between two numbers of bfloat16: a product that is rounded before its bias is added gives 0."""
    x, weight = torch.zeros(16, 16), torch.zeros(16, 16)
    x[:, 0], x[:, 1], x[:, 2] = 256, 1, 448  # of which the last one makes the scale 1
    weight[:, :2] = 1
    made = ops.GroupedLinear(1, 16, 16, dtype=torch.bfloat16) if grouped else ops.Linear(16, 16, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, param in made.named_parameters():
            param.copy_(weight if name.startswith("weight") else torch.full((16,), -256.0))
    extra = [torch.tensor([16])] if grouped else []
    extra += [torch.zeros(16, 16, dtype=torch.bfloat16)] if behind == (ops.AddExtraInput,) else []
    with tandem.autocast(enabled=recipe is not None, recipe=recipe):
        y = ops.Sequential(made, *[op() for op in behind])(x.bfloat16(), *extra)
    assert torch.equal(y, torch.ones_like(y))


@DTYPES
def test_a_step_that_adds_more_rounds_as_float32_does_in_the_end(dtype):
    x, extra, bias = draw(ROWS, COLS, dtype=dtype), draw(ROWS, COLS, dtype=dtype), draw(COLS, dtype=dtype)
    seed, weight = torch.tensor([7]), 1 + draw(COLS, dtype=dtype) / 8
    inv_norm = torch.rand(ROWS) + 0.5
    mask = [True, False, False, False, False]
    calls = {
        "add_bias": lambda to: torch.ops.tandem.add_bias(to(x), to(bias), 1.5, to(extra)),
        "dropout": lambda to: torch.ops.tandem.dropout(to(x), to(bias), seed, 0.25, to(extra)),
        "norm_backward": lambda to: torch.ops.tandem.norm_backward(
            to(x), to(extra), to(weight), None, None, inv_norm, to(bias.expand_as(x)), False, False, torch.float32, mask
        )[0],
    }
    for name, call in calls.items():
        assert torch.equal(call(lambda t: t), call(lambda t: t.float()).to(dtype)), name


def cast_before_the_weight(x, weight, eps=1e-5):
    """As models write it; `factor` is what the weight meets."""
    wide = x.float()
    factor = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return weight * factor, factor


@DTYPES
@pytest.mark.parametrize("mode", ["eager", "compiled", "decomposed", "pipeline"])
def test_a_norm_that_rounds_before_its_weight(dtype, mode):
    """Its bits are those of a cast there; gradients are of the float64 norm, that of the weight of what was rounded."""
    x, grad = draw(ROWS, COLS, dtype=dtype), draw(ROWS, COLS, dtype=dtype)
    norm = ops.RMSNorm(COLS, dtype=dtype, rounds_before_weight=True)
    with torch.no_grad():
        norm.weight.copy_(1 + draw(COLS, dtype=dtype) / 8)
    y, factor = cast_before_the_weight(x, norm.weight.detach())
    assert share_of_others(copy_without_rounding(norm)(x), y) > 0.1
    if mode == "decomposed":
        program = torch.export.export(ops.Sequential(norm), (x,)).run_decompositions(tandem.decompositions())
        assert share_of_others(program.module()(x), y) < 0.01
        return
    run = {"eager": norm, "compiled": torch.compile(norm, backend="aot_eager", fullgraph=True), "pipeline": ops.Sequential(norm, ops.Identity())}[mode]
    own = x.clone().requires_grad_()
    got = run(own)
    assert share_of_others(got, y) < 0.01
    got.backward(grad)
    wide, weight = x.double().requires_grad_(), norm.weight.double().detach().requires_grad_()
    (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight).backward(grad.double())
    half_unit = torch.finfo(dtype).eps / 2
    assert ((own.grad - wide.grad).abs() <= half_unit * wide.grad.abs() + 2.0**-18).all()
    of_weight = (grad.double() * factor).sum(0)
    assert ((norm.weight.grad - of_weight).abs() <= half_unit * of_weight.abs() + 2.0**-18).all()


def share_of_others(got, y):
    """Two sums of squares in float32 may differ in their last bit, and round a number halfway between two the other way."""
    assert got.dtype == y.dtype
    return (got != y).float().mean().item()


def copy_without_rounding(norm):
    plain = copy.deepcopy(norm)
    plain.rounds_before_weight = False
    return plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_in_float32_nothing_rounds_before_the_weight(dtype):
    x, norm = draw(ROWS, COLS, dtype=dtype), ops.RMSNorm(COLS, dtype=dtype, rounds_before_weight=True)
    with torch.no_grad():
        norm.weight.copy_(draw(COLS, dtype=dtype))
    plain = copy_without_rounding(norm)
    assert_equal(results_of(norm, x), results_of(plain, x))
