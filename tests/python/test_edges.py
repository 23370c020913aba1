"""The edge table of the numerics page through every recipe, and through quantizers of FP8; the same bits in every run, with any number of threads."""

import copy
import math

import pytest
import torch
from support import assert_equal, llama_mlp, randomize, step

import tandem
import tandem.ops as ops
from tandem.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format, MXFP8BlockScaling, NVFP4BlockScaling

E4M3 = torch.float8_e4m3fn
RECIPES = [
    DelayedScaling(amax_history_len=4),
    Float8CurrentScaling(),
    Float8CurrentScaling(use_power_2_scales=True, fp8_format=Format.E4M3),
    Float8BlockScaling(),
    Float8BlockScaling(use_f32_scales=True, w_block_scaling_dim=1),
    MXFP8BlockScaling(),
    MXFP8BlockScaling(enable_2d_quantization=True),
    NVFP4BlockScaling(),
    NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True),
]
EVERY = pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.to_json())
INF, NAN = math.inf, math.nan


def bits(*patterns):
    return torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)


CURRENT, POW2 = tandem.Float8CurrentScalingQuantizer(E4M3), tandem.Float8CurrentScalingQuantizer(E4M3, force_pow_2_scales=True)
BLOCK = tandem.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=1)
BLOCK_F32 = tandem.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=1, force_pow_2_scales=False)

# Quantizer, dtype, numbers (the others of the block are 0), scale, codes, numbers again where the page has them; for MXFP8 and NVFP4 see tests/kernels.
TABLE = {
    "current": (CURRENT, torch.float32, [3.0, 1.0], bits(0x3BDB6DB7), [0x7E, 0x71], bits(0x40400000, 0x3F76DB6E)),
    "current pow2": (POW2, torch.float32, [3.0, 1.0], bits(0x3C000000), [0x7C, 0x70], [3.0, 1.0]),
    "current eps": (tandem.Float8CurrentScalingQuantizer(E4M3, amax_epsilon=6.0), torch.float32, [3.0, 1.0], bits(0x3C5B6DB7), [0x76, 0x69], bits(0x40400000, 0x3F76DB6E)),
    "current inf": (CURRENT, torch.float32, [INF, 1.0, -1000.0], [1.0], [0x7E, 0x38, 0xFE], [448.0, 1.0, -448.0]),
    "current NaN": (CURRENT, torch.float32, [NAN, 3.0, 1.0], bits(0x3BDB6DB7), [0x7F, 0x7E, 0x71], bits(0x7FC00000, 0x40400000, 0x3F76DB6E)),
    "current tiny": (CURRENT, torch.float32, [1e-38, -5e-39], bits(0x00200000), [0x46, 0xBE], bits(0x00700000, 0x80380000)),
    "block NaN": (BLOCK, torch.bfloat16, [NAN, 3.0], bits(0x3C000000), [0x7F, 0x7C], [NAN, 3.0]),
    "block tiny bf16": (BLOCK_F32, torch.bfloat16, [1e-38], bits(0x00202020), [0x46], None),
    "block tiny": (BLOCK_F32, torch.float32, [1e-38], bits(0x00200000), [0x46], None),
}


def same_bits(a, b):
    return torch.equal(a.nan_to_num(12345.0, 1e38, -1e38).view(torch.int32), b.nan_to_num(12345.0, 1e38, -1e38).view(torch.int32))


@pytest.mark.parametrize("name", TABLE)
def test_whole_quantizers(name):
    quantizer, dtype, numbers, scale, codes, again = TABLE[name]
    for columnwise in (False, True):
        x = torch.zeros(1, 128, dtype=dtype)
        x[0, : len(numbers)] = torch.tensor(numbers)
        x = x.t().contiguous() if columnwise else x
        made = tandem.quantize(x, quantizer)
        data, scales = (made.columnwise_data, made.columnwise_scale_inv) if columnwise else (made.rowwise_data, made.rowwise_scale_inv)
        data, scales = data.flatten()[: len(codes)], scales if scales.dim() == 0 else scales[:, 0] if columnwise else scales[0]
        assert data.tolist() == codes
        wanted = scale if isinstance(scale, torch.Tensor) else torch.tensor(scale, dtype=scales.dtype)
        assert scales.flatten()[: len(wanted)].tolist() == wanted.tolist()
        if again is not None:
            got = made.dequantize(columnwise=columnwise, dtype=torch.float32).flatten()[: len(again)]
            assert same_bits(got, again if isinstance(again, torch.Tensor) else torch.tensor(again))


def sources(huge):
    plain = torch.randn(40, 150)
    yield "zeros", torch.zeros(40, 150)
    yield "negative zeros", -torch.zeros(40, 150)
    with_block = plain.clone()
    with_block[:, 16:32] = 0
    with_block[:32] = 0
    yield "a zero block", with_block
    yield "denormal", plain * 1e-40
    yield "huge", plain / plain.abs().max() * huge
    yield "mixed", plain * torch.logspace(-30, 30, 150)


@EVERY
def test_finite_numbers_give_no_nan(recipe):
    linear, grad = randomize(ops.Linear(150, 24, bias=False)), torch.randn(40, 24)
    with torch.no_grad():
        linear.weight.mul_(1e-3)
    # Behind 7e35 the numbers of NVFP4 overflow, as specified; a rotation makes columns four times larger.
    for name, x in sources(1e35 if isinstance(recipe, NVFP4BlockScaling) else 3e38):
        y, grad_x, grad_weight = step(linear, x, recipe, grad)
        for result in (y, grad_x):
            assert not result.isnan().any(), name
        assert name in ("huge", "mixed") or not grad_weight.isnan().any(), name
        if name.endswith("zeros"):
            assert not y.any() and not grad_weight.any(), name


@EVERY
@pytest.mark.parametrize("special", [NAN, INF], ids=["NaN", "inf"])
def test_a_special_number_stays_where_it_is(recipe, special):
    """A NaN reaches the row and the column of its products. An infinity saturates, stays one, or under NVFP4, as specified, leaves no finite number."""
    linear, x, grad = randomize(ops.Linear(64, 24, bias=False)), torch.randn(33, 64), torch.randn(33, 24)
    wanted, x[2, 5] = step(copy.deepcopy(linear), x, recipe, grad), special
    y, grad_x, grad_weight = step(linear, x, recipe, grad)
    others = torch.arange(33) != 2
    assert torch.equal(grad_x, wanted[1]), "gradients of x do not depend on x"
    is_per_tensor = isinstance(recipe, (DelayedScaling, Float8CurrentScaling))
    if math.isnan(special):
        assert y[2].isnan().all() and torch.equal(y[others], wanted[0][others])
        assert grad_weight[:, 5].isnan().all()
        assert torch.equal(grad_weight[:, :5], wanted[2][:, :5]) and torch.equal(grad_weight[:, 6:], wanted[2][:, 6:])
    elif isinstance(recipe, NVFP4BlockScaling):
        assert not y.isfinite().any()
    else:
        assert not y[others].isnan().any()
        assert is_per_tensor or torch.equal(y[others], wanted[0][others])


@EVERY
def test_runs_and_numbers_of_threads_give_the_same_bits(recipe):
    module = randomize(llama_mlp(150, 100))
    x, grad = torch.randn(300, 150), torch.randn(300, 150)
    before = torch.get_num_threads()
    runs = []
    try:
        for threads in (1, 1, 2, 3):
            torch.set_num_threads(threads)
            fresh = llama_mlp(150, 100)
            fresh.load_state_dict(module.state_dict())
            runs.append(step(fresh, x, recipe, grad))
    finally:
        torch.set_num_threads(before)
    for other in runs[1:]:
        assert_equal(other, runs[0])
