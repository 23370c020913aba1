"""tandem.quantize: each quantizer's codes and numbers in both directions, and refusals."""

import pytest
import torch
from test_mxfp8 import E4M3, E5M2, rounded

import tandem

DTYPES = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}


@pytest.mark.parametrize("fp8_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("shape", [(33, 70), (64, 64), (1, 5)])
def test_blocks_of_rows_and_columns(fp8_dtype, square, shape):
    x = torch.randn(shape)
    codes = tandem.quantize(x, tandem.MXFP8Quantizer(fp8_dtype, with_2d_quantization=square))
    assert codes.rowwise_data.shape == codes.columnwise_data.shape == x.shape
    for columnwise in (False, True):
        expected = rounded(x, DTYPES[fp8_dtype], 0 if columnwise else 1, square)
        assert torch.equal(codes.dequantize(columnwise=columnwise).double(), expected)
    assert torch.equal(codes.rowwise_data, codes.columnwise_data) or not square


@pytest.mark.parametrize("fp8_dtype", DTYPES, ids=str)
def test_one_scale_serves_both_directions(fp8_dtype):
    x = torch.randn(5, 7, dtype=torch.bfloat16)
    largest = DTYPES[fp8_dtype][1]
    codes = tandem.quantize(x, tandem.Float8CurrentScalingQuantizer(fp8_dtype))
    assert codes.columnwise_data is codes.rowwise_data and codes.dtype == torch.bfloat16
    scale = torch.tensor(largest) / x.float().abs().max()
    assert torch.equal(codes.rowwise_data, (x.float() * scale).clamp(-largest, largest).to(fp8_dtype).view(torch.uint8))
    assert torch.equal(codes.dequantize(columnwise=True), codes.dequantize())
    power = tandem.quantize(x, tandem.Float8CurrentScalingQuantizer(fp8_dtype, force_pow_2_scales=True, amax_epsilon=1000.0))
    assert torch.frexp(power.rowwise_scale_inv)[0] == 0.5 and power.rowwise_scale_inv >= 1000.0 / largest


def test_a_given_scale_is_used_and_the_amax_noted():
    scale, amax = torch.tensor([4.0]), torch.zeros(1)
    quantizer = tandem.Float8Quantizer(scale, amax, torch.float8_e4m3fn, columnwise=False)
    x = torch.randn(6, 3)
    codes = tandem.quantize(x, quantizer)
    assert amax.item() == x.abs().max().item() and codes.rowwise_scale_inv.item() == 0.25
    assert torch.equal(codes.rowwise_data, (x * 4).to(torch.float8_e4m3fn).view(torch.uint8))
    scale.fill_(2.0)
    assert tandem.quantize(x, quantizer).rowwise_scale_inv.item() == 0.5


ERRORS = [
    (lambda: tandem.MXFP8Quantizer(torch.float16), ValueError, "MXFP8Quantizer: expected fp8_dtype to be torch.float8_e4m3fn or torch.float8_e5m2, got torch.float16"),
    (lambda: tandem.MXFP8Quantizer(torch.float8_e5m2, rowwise=False, columnwise=False), ValueError, "expected rowwise or columnwise codes to be wanted, got neither"),
    (lambda: tandem.quantize(torch.ones(2), "fp8"), TypeError, "quantize: expected a quantizer, got str. Pass for example tandem.MXFP8Quantizer"),
    (lambda: tandem.Float8Quantizer(torch.ones(2), torch.ones(1), torch.float8_e4m3fn), ValueError, "Float8Quantizer: expected scale to be a tensor of one float32, got torch.float32 of shape [2]"),
    (lambda: tandem.Float8Quantizer(torch.ones(1), 3.0, torch.float8_e4m3fn), ValueError, "Float8Quantizer: expected amax to be a tensor of one float32, got float"),
    (
        lambda: tandem.quantize(torch.ones(2, 2), tandem.MXFP8Quantizer(torch.float8_e4m3fn, columnwise=False)).dequantize(columnwise=True),
        ValueError,
        "dequantize: expected columnwise codes, got a tensor quantized without. Build the quantizer with columnwise=True.",
    ),
    (lambda: tandem.Float8CurrentScalingQuantizer(torch.float8_e4m3fn, amax_epsilon=-1.0), ValueError, "expected amax_epsilon to be a finite number >= 0, got -1.0"),
    (lambda: tandem.Float8CurrentScalingQuantizer(torch.float8_e4m3fn, use_existing_amax=True), NotImplementedError, "expected use_existing_amax=False, got True. This version knows the default only."),
    (lambda: tandem.Float8CurrentScalingQuantizer(torch.float8_e4m3fn, amax_reduction_group="0"), NotImplementedError, "expected amax_reduction_group=None, got '0'. This version knows the default only."),
    (lambda: tandem.quantize(torch.ones(2, requires_grad=True), tandem.MXFP8Quantizer(torch.float8_e4m3fn)), NotImplementedError, "quantize: expected a tensor that needs no gradient"),
]


@pytest.mark.parametrize(("make", "kind", "text"), ERRORS)
def test_errors(make, kind, text):
    with pytest.raises(kind) as error:
        make()
    assert text in str(error.value)
