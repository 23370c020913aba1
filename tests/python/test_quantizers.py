"""tandem.quantize: each quantizer's codes and numbers in both directions, and refusals."""

import copy
import itertools
import pickle
import re

import pytest
import torch
from emulation import E4M3, E5M2, in_blocks_of_128, in_mxfp8, in_nvfp4, in_nvfp4_by_four_or_six
from support import each_raises, saved_and_loaded

import tandem
from tandem.quantized.parts import PARTS, has_rows_of_x, places_of_rows, sizes_of_parts
from tandem.quantized.quantizer import quantizer_of_text
from tandem.quantized.traits import traits_of

EACH_DTYPE = pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2], ids=str)


@EACH_DTYPE
@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("shape", [(33, 70), (64, 64), (1, 5)])
def test_blocks_of_rows_and_columns(fp8_dtype, square, shape):
    x = torch.randn(shape)
    codes = tandem.quantize(x, tandem.MXFP8Quantizer(fp8_dtype, with_2d_quantization=square))
    assert codes.rowwise_data.shape == codes.columnwise_data.shape == x.shape
    for columnwise in (False, True):
        assert torch.equal(codes.dequantize(columnwise=columnwise).double(), in_mxfp8(x, fp8_dtype, columnwise, square))
    assert torch.equal(codes.rowwise_data, codes.columnwise_data) or not square


@pytest.mark.parametrize("shape", [(7,), (0,), (), (3, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_vectors_and_scalars_have_numbers_in_every_dtype(shape, dtype):
    for quantizer in (
        tandem.Float8CurrentScalingQuantizer(E4M3),
        tandem.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True),
        tandem.MXFP8Quantizer(E4M3),
        tandem.NVFP4Quantizer(),
    ):
        for codes in (tandem.quantize(torch.randn(shape), quantizer), tandem.quantize(torch.randn(shape).double(), quantizer)):
            for columnwise in (False, True):
                numbers = codes.dequantize(dtype=dtype, columnwise=columnwise)
                assert numbers.shape == shape and numbers.dtype == dtype
                assert torch.equal(numbers, codes.dequantize(dtype=torch.float32, columnwise=columnwise).to(dtype))


@EACH_DTYPE
@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("shape", [(33, 70), (130, 257), (1, 5)])
def test_blocks_of_128(fp8_dtype, dim, pow2, shape):
    x = torch.randn(shape)
    codes = tandem.quantize(x, tandem.Float8BlockQuantizer(fp8_dtype, rowwise=True, columnwise=True, force_pow_2_scales=pow2, block_scaling_dim=dim))
    rows, cols = shape
    blocks = [-(-size // 128) for size in shape]
    up = [-(-size // 4) * 4 for size in (rows, cols, blocks[1])]
    assert codes.rowwise_data.shape == codes.columnwise_data.shape == x.shape
    assert list(codes.rowwise_scale_inv.shape) == ([blocks[1], up[0]] if dim == 1 else [blocks[0], up[2]])
    assert dim == 1 or codes.columnwise_data is codes.rowwise_data
    for columnwise in (False, True):
        assert torch.equal(codes.dequantize(columnwise=columnwise).double(), in_blocks_of_128(x, fp8_dtype, columnwise, dim == 2, pow2))
    assert list(codes.columnwise_scale_inv.shape) == ([blocks[0], up[1]] if dim == 1 else [blocks[0], up[2]])


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("shape", [(33, 70), (32, 64), (1, 5)])
def test_four_bits(square, shape):
    x = torch.randn(shape)
    codes = tandem.quantize(x, tandem.NVFP4Quantizer(with_2d_quantization=square))
    rows, cols = shape
    padded = [-(-size // 16) * 16 for size in shape]
    assert list(codes.rowwise_data.shape) == [rows, padded[1] // 2] and list(codes.columnwise_data.shape) == [padded[0] // 2, cols]
    assert codes.amax_rowwise.item() == codes.amax_columnwise.item() == x.abs().max().item()
    for columnwise in (False, True):
        assert torch.equal(codes.dequantize(columnwise=columnwise).double(), in_nvfp4(x, columnwise, square))
    assert not square or torch.equal(codes.dequantize(), codes.dequantize(columnwise=True))


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("metric", ["MAE", "MSE"])
@pytest.mark.parametrize("largest", [448, 256])
@pytest.mark.parametrize("shape", [(33, 70), (32, 64), (1, 5)])
def test_four_over_six(square, metric, largest, shape):
    x = torch.randn(shape)
    quantizer = tandem.NVFP4Quantizer(with_2d_quantization=square, nvfp4_use_4over6=True, nvfp4_e4m3_max=largest, nvfp4_4over6_err_mode=metric)
    codes = tandem.quantize(x, quantizer)
    for columnwise in (False, True):
        wanted = in_nvfp4_by_four_or_six(x, columnwise, square, largest, metric == "MSE")
        assert torch.equal(codes.dequantize(columnwise=columnwise).double(), wanted)
    assert not square or torch.equal(codes.dequantize(), codes.dequantize(columnwise=True))
    plain, power = tandem.quantize(x, tandem.NVFP4Quantizer(with_2d_quantization=square)), 1 if metric == "MAE" else 2
    assert square or x.numel() < 100 or (codes.dequantize() - x).norm(power) < (plain.dequantize() - x).norm(power)


def test_the_signs_of_a_rotation_say_nothing_where_nothing_rotates():
    assert tandem.NVFP4Quantizer(with_random_sign_mask=False).text == tandem.NVFP4Quantizer().text
    with pytest.raises(NotImplementedError, match="NVFP4Quantizer: expected with_random_sign_mask"):
        tandem.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, with_random_sign_mask=False)


def test_rotated_columns_of_nothing():
    quantizer = tandem.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)
    for dtype in (torch.float32, torch.float64):
        for sizes in ((16, 0), (0, 16)):
            assert tandem.quantize(torch.zeros(sizes, dtype=dtype), quantizer).dequantize().shape == sizes


def test_four_over_six_lasts():
    """What the constant of decoding follows from, 448 or 256, goes wherever codes go."""
    x = torch.randn(20, 48)
    quantizer = tandem.NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=256)
    codes = tandem.quantize(x, quantizer)
    for other in (saved_and_loaded(codes), pickle.loads(pickle.dumps(codes)), copy.deepcopy(codes), codes.clone(), codes.detach()):
        assert torch.equal(other.dequantize(), codes.dequantize()) and other.quantizer.text == "nvfp4_256:4over6=mae"
    assert torch.equal(codes[3:9].dequantize(), codes.dequantize()[3:9])
    rotated = tandem.quantize(x, tandem.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, nvfp4_use_4over6=True, nvfp4_e4m3_max=256))
    assert torch.equal(rotated.rowwise_data, codes.rowwise_data) and not torch.equal(rotated.columnwise_data, codes.columnwise_data)
    linear, y = tandem.ops.Linear(48, 32), torch.randn(20, 48)
    with tandem.autocast(recipe=tandem.recipe.NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="activations")):
        wanted = linear(y)
        torch.testing.assert_close(linear(tandem.quantize(y, quantizer)), wanted, rtol=0, atol=2e-6)


def test_rotated_columns_have_the_products_of_the_numbers():
    a, b = torch.randn(64, 32), torch.randn(64, 24)
    quantizer = tandem.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)
    rotated = [tandem.quantize(x, quantizer).dequantize(columnwise=True) for x in (a, b)]
    product, wanted = rotated[0].t() @ rotated[1], a.t() @ b
    assert (product - wanted).norm() < 0.2 * wanted.norm()
    assert (rotated[0] - a).norm() > 0.5 * a.norm()


def test_rounding_by_chance_draws_from_the_generator():
    x, quantizer = torch.randn(16, 64), tandem.NVFP4Quantizer(stochastic_rounding=True)
    torch.manual_seed(0)
    first, second = tandem.quantize(x, quantizer), tandem.quantize(x, quantizer)
    torch.manual_seed(0)
    assert torch.equal(tandem.quantize(x, quantizer).rowwise_data, first.rowwise_data)
    assert not torch.equal(first.rowwise_data, second.rowwise_data)
    mean = sum(tandem.quantize(x, quantizer).dequantize() for _ in range(300)) / 300
    torch.testing.assert_close(mean, x, rtol=0, atol=0.15)


@EACH_DTYPE
def test_one_scale_serves_both_directions(fp8_dtype):
    x = torch.randn(5, 7, dtype=torch.bfloat16)
    largest = torch.finfo(fp8_dtype).max
    codes = tandem.quantize(x, tandem.Float8CurrentScalingQuantizer(fp8_dtype))
    assert codes.columnwise_data is codes.rowwise_data and codes.dtype == torch.bfloat16
    scale = torch.tensor(largest) / x.float().abs().max()
    assert torch.equal(codes.rowwise_data, (x.float() * scale).clamp(-largest, largest).to(fp8_dtype).view(torch.uint8))
    assert torch.equal(codes.dequantize(columnwise=True), codes.dequantize())
    power = tandem.quantize(x, tandem.Float8CurrentScalingQuantizer(fp8_dtype, force_pow_2_scales=True, amax_epsilon=1000.0))
    assert torch.frexp(power.rowwise_scale_inv)[0] == 0.5 and power.rowwise_scale_inv >= 1000.0 / largest


def test_a_given_scale_is_used_and_the_amax_noted():
    scale, amax = torch.tensor([4.0]), torch.zeros(1)
    quantizer = tandem.Float8Quantizer(scale, amax, E4M3, columnwise=False)
    x = torch.randn(6, 3)
    codes = tandem.quantize(x, quantizer)
    assert amax.item() == x.abs().max().item() and codes.rowwise_scale_inv.item() == 0.25
    assert torch.equal(codes.rowwise_data, (x * 4).to(E4M3).view(torch.uint8))
    scale.fill_(2.0)
    assert tandem.quantize(x, quantizer).rowwise_scale_inv.item() == 0.5


def test_a_noted_amax_is_that_of_all_tensors():
    amax, x = torch.zeros(1), torch.randn(6, 3)
    quantizer = tandem.Float8Quantizer(torch.ones(1), amax, E4M3)
    for factor in (1.0, 0.01):
        tandem.quantize(factor * x, quantizer)
        assert amax.item() == x.abs().max().item()
    quantizer.update_quantized(3 * x, tandem.quantize(x, quantizer))
    assert amax.item() == (3 * x).abs().max().item()
    amax.fill_(torch.nan)  # of a caller's own
    tandem.quantize(x, quantizer)
    assert amax.item() == x.abs().max().item()


test_errors = each_raises([
    (lambda: tandem.MXFP8Quantizer(torch.float16), ValueError, "MXFP8Quantizer: expected fp8_dtype to be torch.float8_e4m3fn or torch.float8_e5m2, got torch.float16"),
    (lambda: tandem.MXFP8Quantizer(E5M2, rowwise=False, columnwise=False), ValueError, "expected rowwise or columnwise codes to be wanted, got neither"),
    (lambda: tandem.quantize("x", tandem.MXFP8Quantizer(E4M3)), TypeError, "quantize: expected a tensor, got str. Pass torch.as_tensor of it."),
    (lambda: tandem.quantize(torch.ones(2), "fp8"), TypeError, "quantize: expected a quantizer, got str. Pass for example tandem.MXFP8Quantizer"),
    (lambda: tandem.Float8Quantizer(torch.ones(2), torch.ones(1), E4M3), ValueError, "Float8Quantizer: expected scale to be a tensor of one float32, got torch.float32 of shape [2]"),
    (lambda: tandem.Float8Quantizer(torch.ones(1), 3.0, E4M3), ValueError, "Float8Quantizer: expected amax to be a tensor of one float32, got float"),
    (
        lambda: tandem.quantize(torch.ones(2, 2), tandem.MXFP8Quantizer(E4M3, columnwise=False)).dequantize(columnwise=True),
        ValueError,
        "dequantize: expected columnwise codes, got a tensor quantized without. Build the quantizer with columnwise=True.",
    ),
    (lambda: tandem.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=3), ValueError, "Float8BlockQuantizer: expected block_scaling_dim to be 1 or 2, got 3. 1: lines, 2: squares."),
    (lambda: tandem.NVFP4Quantizer(E4M3), ValueError, "NVFP4Quantizer: expected fp4_dtype to be torch.float4_e2m1fn_x2, got torch.float8_e4m3fn. There is no other."),
    (lambda: tandem.NVFP4Quantizer(with_rht=True), NotImplementedError, "NVFP4Quantizer: expected with_post_rht_amax=True with with_rht=True, got False. Rotated columns are scaled"),
    (lambda: tandem.NVFP4Quantizer(with_post_rht_amax=True), NotImplementedError, "NVFP4Quantizer: expected with_post_rht_amax=False with with_rht=False, got True."),
    (lambda: tandem.NVFP4Quantizer(nvfp4_e4m3_max=256), ValueError, "NVFP4Quantizer: expected nvfp4_e4m3_max to be 448, or, with nvfp4_use_4over6, 256, got 256. Without nvfp4_use_4over6 no scale needs room above it."),
    (lambda: tandem.NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=300), ValueError, "expected nvfp4_e4m3_max to be 448, or, with nvfp4_use_4over6, 256, got 300."),
    (lambda: tandem.NVFP4Quantizer(nvfp4_4over6_err_mode="L2"), ValueError, 'NVFP4Quantizer: expected nvfp4_4over6_err_mode to be "MAE" or "MSE", got \'L2\'. It says what errs less.'),
    (lambda: tandem.NVFP4Quantizer(nvfp4_use_4over6=True, stochastic_rounding=True), ValueError, "quantizer: expected 4over6 or rounding by chance (sr), got both. What is rounded by chance errs by chance: leave one of them out."),
    (lambda: tandem.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, with_2d_quantization=True), ValueError, "quantizer: expected squares (2d) or rotated columns (rht), got both. Lines of columns are rotated, squares have none."),
    (lambda: tandem.Float8CurrentScalingQuantizer(E4M3, amax_epsilon=-1.0), ValueError, "expected amax_epsilon to be a finite number >= 0, got -1.0"),
    (lambda: tandem.Float8CurrentScalingQuantizer(E4M3, use_existing_amax=True), NotImplementedError, "expected use_existing_amax=False, got True. This version knows the default only."),
    (lambda: tandem.Float8CurrentScalingQuantizer(E4M3, amax_reduction_group="0"), NotImplementedError, "expected amax_reduction_group=None, got '0'. This version knows the default only."),
    (lambda: torch.ops.tandem.quantize(torch.ones(2, requires_grad=True), None, "mxfp8_e4m3", [True, True, True]), NotImplementedError, "quantize: expected a tensor that needs no gradient"),
    (
        lambda: torch.ops.tandem.dequantize(torch.zeros(4, 64, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.uint8), "mxfp8_e4m3", False, torch.float32),
        ValueError,
        "dequantize: expected dequant_scale of shape [128, 4], uint8, for row codes [4, 64] of mxfp8_e4m3, got shape [4, 2], uint8. Pass what quantize",
    ),
])  # fmt: skip


def known_texts():
    """The text of each format with each kind of scale and the options that it has."""
    with pytest.raises(ValueError, match="quantizer: expected a format among") as error:
        traits_of("none")
    formats = re.search("among (.*), got", str(error.value))[1].split(", ")
    options = [("", option) for option in (":eps=0.5", ":pow2=1", ":2d=1", ":rht=1", ":sr=1", ":4over6=mae")]
    found = {}
    for pieces in itertools.product(formats, ("", ":current", ":delayed"), *options):
        try:
            found[traits_of("".join(pieces)).text] = None
        except ValueError:
            continue  # not an option of the format, or not together with another one
    return [*found]


def accepts(given, text):
    try:
        torch.ops.tandem.quantize(torch.ones(4, 4), given, text, [True, True, True])
    except (RuntimeError, TypeError, ValueError):
        return False
    return True


@pytest.mark.parametrize("text", known_texts())
def test_traits_are_what_quantizing_shows(text):
    traits, quantizer = traits_of(text), quantizer_of_text(text)
    assert traits.text == text and type(quantizer).__name__ == traits.class_name
    assert accepts(torch.tensor(7), text) == traits.takes_seed and accepts(None, traits.with_own_scale) == (not traits.takes_seed)
    assert (traits.with_own_scale != text) == accepts(torch.ones(1), text)
    for rows, columns in ((33, 70), (256, 128), (8, 16), (1, 5), (0, 16), (16, 0)):
        x = torch.randn(rows, columns)
        *parts, _ = torch.ops.tandem.quantize(x, quantizer._given(x), text, [True, True, True])
        assert traits.serves_both_directions == (parts[3].shape == (0,))
        shapes = [list(part.shape) for part in parts]
        shapes = [*shapes[:3], *(shapes[:3] if traits.serves_both_directions else shapes[3:])]
        assert sizes_of_parts(text, rows, columns) == dict(zip(PARTS, shapes, strict=True))
        assert traits.has_amax == (parts[2].numel() == 1) and (shapes[0] == [rows, columns]) == (not traits.is_packed or columns == 0)
        codes = quantizer.quantize(x)
        assert [None if part is None else list(part.shape) for part in map(codes.__getattribute__, PARTS)] == [
            shape if traits.has_amax or not name.startswith("amax") else None for name, shape in zip(PARTS, shapes, strict=True)
        ]
        assert (codes.columnwise_data is codes.rowwise_data) == traits.serves_both_directions
    few, many = (sizes_of_parts(text, rows, 64) for rows in (1024, 2048))
    for name, place in places_of_rows(text).items():
        growth = {dim: end - begin for dim, (begin, end) in enumerate(zip(few[name], many[name], strict=True)) if begin != end}
        assert growth == ({} if place is None else {place.dim: 1024 // place.rows}), name
        assert has_rows_of_x(text, name) == (name.endswith("_data") and place == (0, 1))
    x = torch.randn(256, 128)
    whole, *halves = [quantizer.quantize(each) for each in (x, x[:128], x[128:])]
    assert torch.equal(whole.rowwise_data, quantizer.quantize(x).rowwise_data) != traits.takes_seed
    assert ((whole.dequantize(columnwise=True) - x).norm() > 0.5 * x.norm()) == traits.is_rotated
    assert traits.joins == (not traits.is_packed and places_of_rows(text)["rowwise_scale_inv"] is not None)
    for name in ("rowwise_data", "columnwise_data") if traits.joins else ():
        assert torch.equal(torch.cat([getattr(half, name) for half in halves]), getattr(whole, name))
