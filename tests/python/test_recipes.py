"""Recipes: numbers against an emulation, regions, paths that agree, seeds, plans."""

import contextlib
import itertools

import emulation
import pytest
import torch
import torch.utils.checkpoint
from support import assert_equal, llama_mlp, randomize, results_of
from weights import made_in

import tandem
import tandem.ops as ops
from tandem.recipe import Float8BlockScaling, Float8CurrentScaling, Format, MXFP8BlockScaling, NVFP4BlockScaling

CURRENT = [
    Float8CurrentScaling(),
    Float8CurrentScaling(fp8_format=Format.E4M3),
    Float8CurrentScaling(use_power_2_scales=True),
    Float8CurrentScaling(amax_epsilon_input=10.0, amax_epsilon_weight=5.0, amax_epsilon_grad_output=20.0),
]
MX = [MXFP8BlockScaling(), MXFP8BlockScaling(fp8_format=Format.HYBRID), MXFP8BlockScaling(enable_2d_quantization=True)]
BLOCKS = [
    Float8BlockScaling(),
    Float8BlockScaling(use_f32_scales=True, fp8_format=Format.HYBRID, w_block_scaling_dim=1, amax_epsilon_input=1.0),
    Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
]
STEADY_FP4 = NVFP4BlockScaling(disable_stochastic_rounding=True)
PLAIN_FP4 = NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)
FOUR_OVER_SIX = NVFP4BlockScaling(disable_stochastic_rounding=True, nvfp4_4over6="all")

SHAPES = [(5, 8, 6), (1, 3, 2), (33, 37, 31), (0, 8, 4)]
PRODUCTS = [
    *itertools.product(CURRENT, SHAPES),
    *itertools.product(MX, [*SHAPES, (40, 64, 96)]),
    *itertools.product([*BLOCKS, PLAIN_FP4], [*SHAPES, (130, 140, 129)]),
]


def text_of(value):
    return str(value) if isinstance(value, tuple) else value.to_json()


@pytest.mark.parametrize(("recipe", "shape"), PRODUCTS, ids=text_of)
def test_linear_is_the_product_of_rounded_operands(recipe, shape):
    rows, fan_in, fan_out = shape
    linear = randomize(ops.Linear(fan_in, fan_out))
    x, grad = torch.randn(rows, fan_in), torch.randn(rows, fan_out)
    expected = emulation.linear(recipe, x, linear.weight, linear.bias, grad)
    for actual, wanted in zip(results_of(linear, x, grad, recipe), expected, strict=True):
        largest = wanted.abs().max().item() if wanted.numel() else 1.0
        torch.testing.assert_close(actual.double(), wanted, rtol=0, atol=4e-6 * max(1.0, largest))


@pytest.mark.parametrize("recipe", [CURRENT[0], MX[0], *BLOCKS, STEADY_FP4, PLAIN_FP4, FOUR_OVER_SIX], ids=text_of)
def test_quantize_rounds_rows_where_a_recipe_is_on(recipe):
    x, grad = torch.randn(3, 5, 21, requires_grad=True), torch.randn(3, 5, 21)
    op = ops.Quantize(forward=True, backward=True)
    assert torch.equal(op(x), x)
    with tandem.autocast(recipe=recipe):
        y = op(x)
    for actual, role, numbers in ((y, "input", x), (torch.autograd.grad(y, x, grad)[0], "grad_output", grad)):
        assert actual.shape == x.shape
        if recipe is not FOUR_OVER_SIX:
            assert torch.equal(actual.double(), emulation.operand(recipe, role, numbers.flatten(0, 1), False).view(x.shape))


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


def test_older_names():
    linear, x = ops.Linear(16, 8), torch.randn(4, 16)
    with tandem.autocast(recipe=Float8BlockScaling()):
        wanted = linear(x)
    with tandem.fp8_autocast(fp8_recipe=Float8BlockScaling()):
        assert torch.equal(linear(x), wanted)
    with tandem.fp8_autocast(enabled=False, fp8_recipe=Float8BlockScaling()):
        assert not torch.equal(linear(x), wanted)
    for available in (tandem.is_fp8_available, tandem.is_fp8_block_scaling_available, tandem.is_mxfp8_available, tandem.is_nvfp4_available):
        assert available() and available(return_reason=True) == (True, "")


@pytest.mark.parametrize("recipe", [*MX, *BLOCKS, STEADY_FP4, PLAIN_FP4, FOUR_OVER_SIX, NVFP4BlockScaling()], ids=text_of)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_and_unfused_agree(recipe, dtype):
    box = randomize(llama_mlp(32, 48)).to(dtype)
    with tandem.autocast(recipe=recipe):
        outcome = tandem.verify(box, torch.randn(6, 32, dtype=dtype, requires_grad=True))
    assert outcome, str(outcome)


@pytest.mark.parametrize("recipe", ["Float8CurrentScaling", "DelayedScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling"])
@pytest.mark.parametrize("unit", ["SwiGLU", "GELU"])
@pytest.mark.parametrize("bias", [False, True])
def test_units_and_their_gradients_go_to_codes_in_their_kernels(bias, unit, recipe):
    wide = 96 if unit == "SwiGLU" else 48
    box = ops.Sequential(ops.Linear(32, wide, bias=bias), getattr(ops, unit)(), ops.Linear(48, 32, bias=bias))
    x = torch.randn(64, 32, requires_grad=True)
    with tandem.autocast(recipe=getattr(tandem.recipe, recipe)()):
        assert box.verify(x), box.verify(x)
        made = box.fusions_made()
    kind = "glu" if unit == "SwiGLU" else "activation"
    expected = {f"linear_bias_{kind}_quantize", f"{kind}_backward_bias_quantize_quantize_y", "bias_backward_quantize"}
    assert set(made) >= (expected if bias else {f"{kind}_quantize", f"{kind}_backward_quantize_quantize_y"}), made


def checkpointed(module, recipe):
    regions = lambda: (contextlib.nullcontext(), tandem.autocast(recipe=recipe))  # noqa: E731
    return lambda x: torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False, context_fn=regions)


@pytest.mark.parametrize(
    ("recipe", "sizes"), [(MX[0], (64, 96)), *itertools.product([BLOCKS[0], STEADY_FP4, FOUR_OVER_SIX], [(64, 96), (40, 50)])], ids=text_of
)
def test_compiled_exported_and_checkpointed_calls_give_the_same_bits(recipe, sizes, fresh_dynamo):
    module = randomize(llama_mlp(*sizes))
    x, grad = torch.randn(2, 19, sizes[0]), torch.randn(2, 19, sizes[0])
    expected = results_of(module, x, grad, recipe)
    ways = [
        torch.compile(module, backend="aot_eager", fullgraph=True),
        torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True),
        checkpointed(module, recipe),
    ]
    for way in ways:
        assert_equal(results_of(way, x, grad, recipe, module), expected)
    with tandem.autocast(recipe=recipe), torch.no_grad():
        program = torch.export.export(module, (x,))
    lowered = program.run_decompositions()
    assert any("quantize" in str(node.target) for node in lowered.graph.nodes)
    with torch.no_grad():
        for exported in (program, lowered):
            assert torch.equal(exported.module()(x), expected[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_made_again_in_backward_are_those_of_forward(dtype):
    together = randomize(llama_mlp(16, 32)).to(dtype)
    apart = [ops.Sequential(op) for op in together]  # each linear keeps its codes: nothing writes its input again
    x = torch.randn(9, 16, dtype=dtype)

    def one_by_one(y):
        for part in apart:
            y = part(y)
        return y

    assert_equal(results_of(together, x, recipe=Float8CurrentScaling()), results_of(one_by_one, x, recipe=Float8CurrentScaling(), module=together))
    width = together[1].weight.shape[0]
    assert together.saved_bytes() == 9 * (width * x.element_size() + 4), "the product and the norm's statistic"


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), MXFP8BlockScaling()], ids=text_of)
@pytest.mark.parametrize("shape", [(8, 100_000, 8), (64, 8192, 64), (300, 5000, 17), (130, 129, 131)])
def test_products_do_not_depend_on_the_number_of_threads(shape, recipe):
    rows, fan_in, fan_out = shape
    linear = randomize(ops.Linear(fan_in, fan_out, bias=False))
    x, grad = torch.randn(rows, fan_in), torch.randn(rows, fan_out)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(results_of(linear, x, grad, recipe))
    finally:
        torch.set_num_threads(before)
    assert_equal(*results)


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


def test_seeds_of_gradients_come_from_the_generator_and_stay_with_the_graph():
    module, recipe = randomize(llama_mlp(64, 96)), NVFP4BlockScaling()
    x, grad = torch.randn(40, 64), torch.randn(40, 64)
    first, again, other = (results_of(module, x, grad, recipe, seed=seed) for seed in (1, 1, 2))
    assert_equal(again, first)
    assert torch.equal(first[0], other[0]), "inputs and weights are rounded to nearest"
    assert not any(torch.equal(a, b) for a, b in zip(first[1:], other[1:], strict=True))
    assert_equal(results_of(checkpointed(module, recipe), x, grad, recipe, module, seed=1), first)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert torch.equal(results_of(compiled, x, grad, recipe, seed=1)[0], first[0])
    x.requires_grad_()
    with tandem.autocast(recipe=recipe):
        y = module(x)
    twice = [torch.autograd.grad(y, x, grad, retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(*twice)


def test_gradients_rounded_by_chance_are_right_on_average():
    linear, recipe = randomize(ops.Linear(32, 32)), NVFP4BlockScaling(disable_rht=True)
    x, grad = torch.randn(16, 32), torch.randn(16, 32)
    each = [results_of(linear, x, grad, recipe, seed=seed)[1] for seed in range(200)]
    weight = tandem.quantize(linear.weight.detach(), tandem.NVFP4Quantizer(with_2d_quantization=True)).dequantize()
    exact = grad @ weight
    one, mean = [(result - exact).norm() for result in (each[0], sum(each) / len(each))]
    assert 0 < mean < 0.15 * one, "errors of 200 runs cancel to a fourteenth of one"


@pytest.mark.parametrize("recipe", [PLAIN_FP4, STEADY_FP4], ids=text_of)
def test_the_rotation_leaves_gradients_of_weights_near(recipe):
    x, grad, linear = torch.randn(64, 32), torch.randn(64, 32), randomize(ops.Linear(32, 32))
    wanted = grad.t() @ x
    assert (results_of(linear, x, grad, recipe)[2] - wanted).norm() < 0.2 * wanted.norm()


def plan_of(module, recipe, x):
    with tandem.autocast(recipe=recipe):
        module(x)
    return module.explain().split("plan:")[-1]


def test_plans_say_the_formats_and_make_what_is_read():
    x = torch.randn(64, 32, requires_grad=True)
    values = plan_of(ops.Sequential(ops.Linear(32, 32)), Float8BlockScaling(), x)
    assert "x in fp8_1x128_e4m3 by columns" in values and "weight in fp8_128x128_e4m3" in values
    assert "weight in fp8_128x128_e4m3 by" not in values, "one value serves both directions"
    values = plan_of(ops.Sequential(ops.Linear(32, 32)), NVFP4BlockScaling(), x)
    assert "x in nvfp4 by rows" in values and "weight in nvfp4 by columns" in values and ".seed" in values
    with torch.no_grad():
        values = plan_of(ops.Sequential(ops.Linear(32, 32)), NVFP4BlockScaling(), x)
    assert "by columns" not in values and ".seed" not in values


def test_wrong_features_are_refused_in_numbers_not_in_packed_codes():
    linear = ops.Linear(20, 8)
    with tandem.autocast(recipe=NVFP4BlockScaling()), pytest.raises(ValueError, match=r"expected x with 20 features .* got x of shape \[4, 17\]"):
        linear(torch.randn(4, 17))
