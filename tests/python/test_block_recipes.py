"""Float8BlockScaling and NVFP4BlockScaling: numbers against an emulation, paths that agree, seeds, refusals."""

import contextlib

import pytest
import torch
import torch.utils.checkpoint
from support import assert_equal, llama_mlp, randomize, step

import tandem
import tandem.ops as ops
from tandem.recipe import DelayedScaling, Float8BlockScaling, Format, MMParams, NVFP4BlockScaling, QParams

E4M3, E5M2 = (torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)
BLOCK_RECIPES = [
    Float8BlockScaling(),
    Float8BlockScaling(use_f32_scales=True, fp8_format=Format.HYBRID, w_block_scaling_dim=1, amax_epsilon_input=1.0),
    Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
]
PLAIN_FP4 = NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)
FOUR_OVER_SIX = NVFP4BlockScaling(disable_stochastic_rounding=True, nvfp4_4over6="all")
STEADY = [*BLOCK_RECIPES, NVFP4BlockScaling(disable_stochastic_rounding=True), PLAIN_FP4, FOUR_OVER_SIX]
SHAPES = [(5, 8, 6), (1, 3, 2), (33, 37, 31), (130, 140, 129), (0, 8, 4)]


def blocks_of(x, height, width):
    for r in range(0, x.shape[0], height):
        for c in range(0, x.shape[1], width):
            yield slice(r, r + height), slice(c, c + width)


def in_blocks(x, element, along, square, pow2, epsilon=0.0):
    """x on the grid of blocks of 128 along a dimension, in float64."""
    dtype, largest = element
    result = torch.zeros(x.shape, dtype=torch.float64)
    for at in blocks_of(x, 128 if square or along == 0 else 1, 128 if square or along == 1 else 1):
        block = x[at].detach().float()
        amax = block.abs().max().clamp(min=epsilon).double()
        scale = torch.tensor(1.0) if amax == 0 else (largest / amax).float()
        if pow2:
            scale = torch.ldexp(torch.tensor(1.0), torch.frexp(scale)[1] - 1)
        codes = (block * scale).clamp(-largest, largest).to(dtype).float()
        result[at] = (codes * (1 / scale.double()).float()).double()
    return result


GRID = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def on_grid(block, scale, decode):
    """The block over its scale, as the nearest numbers of the grid: ties to the even code."""
    factor = (1 / (scale * decode).double()).float().clamp(max=torch.finfo(torch.float32).max)
    distance = ((block * factor).double().abs().clamp(max=6).unsqueeze(-1) - GRID).abs()
    nearest = distance == distance.min(-1, keepdim=True).values
    return GRID[(nearest * torch.tensor([8, 1, 8, 1, 8, 1, 8, 1])).argmax(-1)].float() * block.sign()


def in_fp4(x, along, square):
    """x on the grid of NVFP4, in float64."""
    source = x.detach().float()
    tensor = source.abs().max().double() if source.numel() else torch.tensor(0.0).double()
    encode = (2688 / tensor).float() if tensor != 0 else torch.tensor(1.0)
    per_amax, decode = encode * torch.tensor(1 / 6, dtype=torch.float32), (1 / encode.double()).float()
    result = torch.zeros(x.shape, dtype=torch.float64)
    for at in blocks_of(x, 16 if square or along == 0 else 1, 16 if square or along == 1 else 1):
        block = source[at]
        scale = (block.abs().max() * per_amax).clamp(max=448).to(torch.float8_e4m3fn).float()
        factor = scale * tensor.float() * torch.tensor(1 / 2688, dtype=torch.float32)
        result[at] = (on_grid(block, scale, decode) * factor).double()
    return result


def in_fp4_by_four_or_six(x, along, square, largest, squares):
    """The same with blocks whose largest number becomes 6 or 4, whichever errs less; and the scales. Errors are added in float64."""
    source = x.detach().float()
    amax = source.abs().max()
    encode = (torch.tensor(6.0 * largest).double() / amax.double()).float()
    decode, undo = (1 / encode.double()).float(), torch.tensor(1 / (6 * largest), dtype=torch.float32)
    result, scales = torch.zeros(x.shape, dtype=torch.float64), []
    for at in blocks_of(x, 16 if square or along == 0 else 1, 16 if square or along == 1 else 1):
        block = source[at]
        base = (block.abs().max().double() / 6).float() * encode
        tried = []
        for times in (1.0, 1.5):
            scale = (base * times).clamp(max=448).to(torch.float8_e4m3fn).float()
            signed = on_grid(block, scale, decode)
            error = ((signed * scale * amax).double() / (6 * largest)).float().double() - block.double()
            tried.append(((error.square() if squares else error.abs()).sum().item(), scale, (signed * (scale * amax * undo)).double()))
        six, four = tried
        chosen = four if four[0] < six[0] else six
        scales.append(chosen[1].item())
        result[at] = chosen[2]
    return result, scales


def emulated(x, weight, bias, grad, recipe):
    def numbers(tensor, role, along):
        if isinstance(recipe, NVFP4BlockScaling):
            return in_fp4(tensor, along, role == "w" and not recipe.disable_2d_quantization)
        dim = {"x": recipe.x_block_scaling_dim, "w": recipe.w_block_scaling_dim, "g": recipe.grad_block_scaling_dim}[role]
        epsilon = {"x": recipe.amax_epsilon_input, "w": recipe.amax_epsilon_weight, "g": recipe.amax_epsilon_grad_output}[role]
        wide = role == "g" and recipe.fp8_format is Format.HYBRID
        return in_blocks(tensor, E5M2 if wide else E4M3, along, dim == 2, not recipe.use_f32_scales, epsilon)

    y = numbers(x, "x", 1) @ numbers(weight, "w", 1).t() + bias.double()
    grad_weight = numbers(grad, "g", 0).t() @ numbers(x, "x", 0)
    return y, numbers(grad, "g", 1) @ numbers(weight, "w", 0), grad_weight, grad.double().sum(0)


@pytest.mark.parametrize("recipe", [*BLOCK_RECIPES, PLAIN_FP4], ids=lambda r: r.to_json())
@pytest.mark.parametrize("shape", SHAPES)
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


@pytest.mark.parametrize("recipe", [*STEADY, NVFP4BlockScaling()], ids=lambda r: r.to_json())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_and_unfused_agree(recipe, dtype):
    box = randomize(llama_mlp(32, 48)).to(dtype)
    with tandem.autocast(recipe=recipe):
        outcome = tandem.verify(box, torch.randn(6, 32, dtype=dtype, requires_grad=True))
    assert outcome, str(outcome)


def checkpointed(module, recipe):
    regions = lambda: (contextlib.nullcontext(), tandem.autocast(recipe=recipe))  # noqa: E731
    return lambda x: torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False, context_fn=regions)


@pytest.mark.parametrize("recipe", [STEADY[0], STEADY[3], FOUR_OVER_SIX], ids=lambda r: r.to_json())
@pytest.mark.parametrize("sizes", [(64, 96), (40, 50)])
def test_compiled_exported_and_checkpointed_calls_give_the_same_bits(recipe, sizes):
    module = randomize(llama_mlp(*sizes))
    x, grad = torch.randn(2, 19, sizes[0]), torch.randn(2, 19, sizes[0])
    expected = step(module, x, recipe, grad)
    torch._dynamo.reset()
    ways = {
        "compiled": torch.compile(module, backend="aot_eager", fullgraph=True),
        "dynamic": torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True),
        "checkpoint": checkpointed(module, recipe),
    }
    for way in ways.values():
        assert_equal(step(module, x, recipe, grad, call=way), expected)
    with tandem.autocast(recipe=recipe), torch.no_grad():
        program = torch.export.export(module, (x,))
    assert torch.equal(program.module()(x), expected[0])
    with torch.no_grad():
        assert torch.equal(program.run_decompositions().module()(x), expected[0])


def test_seeds_of_gradients_come_from_the_generator_and_stay_with_the_graph():
    module, recipe = randomize(llama_mlp(64, 96)), NVFP4BlockScaling()
    x, grad = torch.randn(40, 64), torch.randn(40, 64)
    first, again, other = (step(module, x, recipe, grad, seed=seed) for seed in (1, 1, 2))
    assert_equal(again, first)
    assert torch.equal(first[0], other[0]), "inputs and weights are rounded to nearest"
    assert not any(torch.equal(a, b) for a, b in zip(first[1:], other[1:], strict=True))
    x.requires_grad_()
    with tandem.autocast(recipe=recipe):
        y = module(x)
    twice = [torch.autograd.grad(y, x, grad, retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(*twice)
    assert_equal(step(module, x, recipe, grad, call=checkpointed(module, recipe), seed=1), first)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert torch.equal(step(module, x, recipe, grad, call=compiled, seed=1)[0], first[0])


def test_gradients_rounded_by_chance_are_right_on_average():
    linear, recipe = randomize(ops.Linear(32, 32)), NVFP4BlockScaling(disable_rht=True)
    x, grad = torch.randn(16, 32), torch.randn(16, 32)
    each = [step(linear, x, recipe, grad, seed=seed)[1] for seed in range(200)]
    weight = tandem.quantize(linear.weight.detach(), tandem.NVFP4Quantizer(with_2d_quantization=True)).dequantize()
    exact = grad @ weight
    one, mean = [(result - exact).norm() for result in (each[0], sum(each) / len(each))]
    assert 0 < mean < 0.15 * one, "errors of 200 runs cancel to a fourteenth of one"


def test_the_rotation_leaves_gradients_of_weights_near():
    x, grad = torch.randn(64, 32), torch.randn(64, 32)
    linear = randomize(ops.Linear(32, 32))
    wanted = grad.t() @ x
    for recipe in (PLAIN_FP4, NVFP4BlockScaling(disable_stochastic_rounding=True)):
        got = step(linear, x, recipe, grad)[2]
        assert (got - wanted).norm() < 0.2 * wanted.norm(), recipe


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


@pytest.mark.parametrize("recipe", STEADY, ids=lambda r: r.to_json())
def test_quantize_op_keeps_the_shape(recipe):
    x = torch.randn(3, 5, 21, requires_grad=True)
    with tandem.autocast(recipe=recipe):
        y = ops.Quantize(forward=True, backward=True)(x)
    assert y.shape == x.shape
    assert torch.autograd.grad(y, x, torch.randn(3, 5, 21))[0].shape == x.shape


def test_recipes_are_frozen_values_that_go_through_json():
    delayed = DelayedScaling(margin=1, amax_history_len=7, amax_compute_algo="most_recent", reduce_amax=False)
    for each in (*STEADY, NVFP4BlockScaling(disable_2d_quantization=True), delayed):
        assert tandem.recipe.recipe_from_json(each.to_json()) == each and hash(each) == hash(tandem.recipe.recipe_from_json(each.to_json()))
        with tandem.autocast(recipe=each):
            assert tandem.recipe.recipe_from_json(tandem._C.active_recipe()) == each
    assert Float8BlockScaling() == Float8BlockScaling(False, Format.E4M3, 1, 2, 1) and Float8BlockScaling().float8_block_scaling()
    assert Float8BlockScaling(amax_epsilon_weight=2.0).fp8_quant_fwd_weight == QParams(power_2_scale=True, amax_epsilon=2.0)
    four = NVFP4BlockScaling()
    assert four.nvfp4() and not four.delayed() and four.fp4_quant_fwd_weight == QParams(fp4_2d_quantization=True)
    assert four.fp4_quant_bwd_grad == QParams(random_hadamard_transform=True, stochastic_rounding=True)
    assert Format.HYBRID.value.max_fwd == 448 and Format.HYBRID.value.max_bwd == 57344 and Format.E2M1.value.max_fwd == 6


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


ERRORS = [
    (lambda: Float8BlockScaling(x_block_scaling_dim=3), ValueError, "Float8BlockScaling: expected x_block_scaling_dim to be"),
    (lambda: Float8BlockScaling(x_block_scaling_dim=2), ValueError, "Float8BlockScaling: expected squares for one operand at most, got x_block_scaling_dim=2"),
    (lambda: Float8BlockScaling(fp8_format=Format.E5M2), ValueError, "expected fp8_format to be Format.HYBRID or Format.E4M3, got"),
    (lambda: Float8BlockScaling(fp8_gemm_dgrad=MMParams(use_split_accumulator=False)), NotImplementedError, "Float8BlockScaling: expected fp8_gemm_dgrad=MMParams(use_split_accumulator=True), got"),
    (lambda: NVFP4BlockScaling(nvfp4_4over6="inputs"), ValueError, "NVFP4BlockScaling: expected nvfp4_4over6 to be"),
    (lambda: NVFP4BlockScaling(nvfp4_4over6_e4m3_use_256=True), ValueError, "NVFP4BlockScaling: expected nvfp4_4over6_e4m3_use_256 to be"),
    (lambda: NVFP4BlockScaling(nvfp4_4over6_err_mode="mae"), ValueError, "NVFP4BlockScaling: expected nvfp4_4over6_err_mode to be"),
    (lambda: NVFP4BlockScaling(row_scaled_activation=True), NotImplementedError, "expected row_scaled_activation=False, got True"),
    (lambda: NVFP4BlockScaling(fp4_format=Format.E4M3), NotImplementedError, "NVFP4BlockScaling: expected fp4_format="),
    (lambda: NVFP4BlockScaling(disable_rht=1), ValueError, "expected disable_rht to be True or False, got 1"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "kind", "text"), ERRORS)
def test_errors(make, kind, text):
    with pytest.raises(kind) as error:
        make()
    assert text in str(error.value)


@pytest.mark.parametrize("recipe", sorted({"Float8CurrentScaling", "DelayedScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling"}))
@pytest.mark.parametrize("unit", ["SwiGLU", "GELU"])
@pytest.mark.parametrize("bias", [False, True])
def test_units_and_their_gradients_go_to_codes_in_their_kernels(bias, unit, recipe):
    wide = 96 if unit == "SwiGLU" else 48
    box = tandem.ops.Sequential(
        tandem.ops.Linear(32, wide, bias=bias), getattr(tandem.ops, unit)(), tandem.ops.Linear(48, 32, bias=bias)
    )
    x = torch.randn(64, 32, requires_grad=True)
    with tandem.autocast(recipe=getattr(tandem.recipe, recipe)()):
        assert box.verify(x), box.verify(x)
        made = box.fusions_made()
    kind = "glu" if unit == "SwiGLU" else "activation"
    expected = {f"linear_bias_{kind}_quantize", f"{kind}_backward_bias_quantize_quantize_y", "bias_backward_quantize"}
    assert set(made) >= (expected if bias else {f"{kind}_quantize", f"{kind}_backward_quantize_quantize_y"}), made
