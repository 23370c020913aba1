"""Tensors in codes that come into a pipeline, and that come out of one."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from recipes import RECIPES
from support import assert_equal, results_of

import tandem
from tandem import ops, recipe

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

QUANTIZERS: dict[str, Callable[[], tandem.Quantizer]] = {
    "current": lambda: tandem.Float8CurrentScalingQuantizer(E4M3),
    "delayed": lambda: tandem.Float8Quantizer(torch.ones(1), torch.zeros(1), E4M3),  # the scale of a first step
    "blocks": lambda: tandem.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=1),
    "mxfp8": lambda: tandem.MXFP8Quantizer(E4M3),
    "nvfp4": lambda: tandem.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True),
}
every_recipe = pytest.mark.parametrize("name", RECIPES)


def matrix(rows: int = 48, cols: int = 64, dtype: torch.dtype = torch.float32, *, requires_grad: bool = True) -> torch.Tensor:
    return torch.randn(rows, cols, dtype=dtype, generator=torch.Generator().manual_seed(rows)).requires_grad_(requires_grad)


def run(layer: torch.nn.Module, x: torch.Tensor, leaf: torch.Tensor, name: str) -> list[torch.Tensor | None]:
    """y, and the gradients of x and of the parameters."""
    with tandem.autocast(recipe=RECIPES[name]):
        y = layer(x)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape))
    return [y.detach(), leaf.grad, *(param.grad for param in layer.parameters())]


# In.


@every_recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_codes_of_an_input_are_those_that_the_recipe_makes(name: str, dtype: torch.dtype, requires_grad: bool) -> None:
    layer = ops.Linear(64, 32, dtype=dtype)
    other = copy.deepcopy(layer)
    x, same = matrix(dtype=dtype, requires_grad=requires_grad), matrix(dtype=dtype, requires_grad=requires_grad)
    got = run(layer, tandem.quantize(x, QUANTIZERS[name]()), x, name)
    assert_equal(got, run(other, same, same, name))


@pytest.mark.parametrize("name", ["current", "blocks", "mxfp8", "nvfp4"])
def test_an_input_in_codes_is_not_quantized(name: str) -> None:
    for x, is_quantized in ((matrix(), True), (tandem.quantize(matrix(), QUANTIZERS[name]()), False)):
        layer = ops.Sequential(ops.Linear(64, 32, bias=False))
        with torch.no_grad(), tandem.autocast(recipe=RECIPES[name]):
            layer(x)
            assert ("quantize: x" in layer.explain()) == is_quantized


@pytest.mark.parametrize("name", ["current", "mxfp8"])
def test_a_direction_that_is_missing_is_made_of_the_numbers(name: str) -> None:
    layer = ops.Linear(64, 32)
    other = copy.deepcopy(layer)
    quantizer = QUANTIZERS[name]()
    quantizer.set_usage(rowwise=True, columnwise=False)
    codes = tandem.quantize(matrix(requires_grad=False), quantizer)
    numbers = codes.dequantize().requires_grad_()
    got = run(layer, codes, numbers, name)
    expected = run(other, numbers, numbers, name)
    expected[1] = None
    assert_equal(got, expected)


def test_another_format_is_decoded_and_quantized() -> None:
    layer = ops.Linear(64, 32)
    other = copy.deepcopy(layer)
    codes = tandem.quantize(matrix(requires_grad=False), tandem.MXFP8Quantizer(E5M2))
    numbers = codes.dequantize()
    assert_equal(run(layer, codes, numbers, "mxfp8"), run(other, numbers, numbers, "mxfp8"))


CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "ops that do not multiply": lambda x: ops.Sequential(ops.RMSNorm(64), ops.Linear(64, 64), ops.AddExtraInput())(x, x),
    "groups": lambda x: ops.GroupedLinear(2, 64, 32)(x, torch.tensor([16, 32])),
    "Linear": lambda x: tandem.Linear(64, 32)(x),
    "LayerNormLinear": lambda x: tandem.LayerNormLinear(64, 32)(x),
    "LayerNormMLP": lambda x: tandem.LayerNormMLP(64, 128)(x),
}


@pytest.mark.parametrize("low", [None, recipe.MXFP8BlockScaling()], ids=["plain", "mxfp8"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_codes_count_as_their_numbers(call: Callable[[torch.Tensor], torch.Tensor], low: recipe.Recipe | None) -> None:
    codes, results = tandem.quantize(matrix(requires_grad=False), tandem.MXFP8Quantizer(E4M3)), []
    for x in (codes, codes.dequantize()):
        torch.manual_seed(0)  # of the parameters
        with tandem.autocast(enabled=low is not None, recipe=low):
            results.append(call(x))
    assert torch.equal(*results)


def test_a_sum_in_place_leaves_codes_as_they_are() -> None:
    numbers, x = matrix(requires_grad=False), matrix()
    codes = tandem.quantize(numbers, tandem.MXFP8Quantizer(E4M3))
    before = codes.dequantize()
    pipeline = ops.Sequential(ops.AddExtraInput(in_place=True))
    for call in (pipeline, torch.compile(pipeline, backend="aot_eager")):
        y = call(x, codes)
        assert torch.equal(y, x + before)
        assert torch.equal(codes.dequantize(), before)
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.ones_like(x))


def test_codes_that_were_written_before_backward_raise() -> None:
    layer = ops.Linear(64, 32)
    codes = tandem.quantize(matrix(requires_grad=False), tandem.MXFP8Quantizer(E4M3))
    with tandem.autocast(recipe=recipe.MXFP8BlockScaling()):
        y = layer(codes)
    codes.quantize_(torch.zeros(48, 64))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def of_codes(call: Callable[..., torch.Tensor], layer: torch.nn.Module) -> list[torch.Tensor]:
    """Results for an x that is quantized before the call; backward is in the region too, under whose recipe torch's checkpoint recomputes."""
    with tandem.autocast(recipe=recipe.MXFP8BlockScaling()):
        return results_of(lambda x: call(tandem.quantize(x, tandem.MXFP8Quantizer(E4M3))), matrix(), module=layer)


@pytest.mark.parametrize("checkpoint", [tandem.checkpoint, lambda *args: torch.utils.checkpoint.checkpoint(*args, use_reentrant=False)], ids=["own", "torch"])
def test_codes_under_a_checkpoint(checkpoint: Callable[..., torch.Tensor]) -> None:
    layer = ops.Linear(64, 32)
    assert_equal(of_codes(lambda codes: checkpoint(layer, codes), layer), of_codes(layer, layer))


def test_delayed_scaling_records_no_amax_of_codes() -> None:
    layer = ops.BasicLinear(64, 32)
    with tandem.autocast(recipe=recipe.DelayedScaling()):
        layer(tandem.quantize(100 * matrix(requires_grad=False), QUANTIZERS["delayed"]()))
    quantizer = layer.get_quantizer("forward", 0)
    assert isinstance(quantizer, tandem.Float8Quantizer) and quantizer.amax.item() == 0


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_takes_codes(fresh_dynamo: None, dynamic: bool) -> None:
    layer = ops.Linear(64, 32)
    assert_equal(of_codes(torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager"), layer), of_codes(layer, layer))


# Out.


@every_recipe
@pytest.mark.parametrize("shape", [(48, 64), (3, 5, 33), (1, 1), (0, 64)], ids=str)
def test_what_quantize_makes_stays_in_codes(name: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    point = ops.Quantize()
    with tandem.autocast(recipe=RECIPES[name]):
        y = point(x)
    assert isinstance(y, tandem.QuantizedTensor)
    assert y.shape == x.shape and y.dtype == x.dtype and y.requires_grad
    assert y.get_usages() == {"rowwise": True, "columnwise": True}
    expected = tandem.quantize(x.detach(), QUANTIZERS[name]())
    for part in ("rowwise_data", "columnwise_data", "rowwise_scale_inv", "columnwise_scale_inv"):
        assert torch.equal(getattr(y, part), getattr(expected, part)), part
    y.dequantize().backward(torch.full(shape, 2.0))
    assert x.grad is not None and torch.equal(x.grad, torch.full(shape, 2.0))


@every_recipe
def test_a_product_of_another_module_reads_the_codes(name: str) -> None:
    if name == "nvfp4":
        pytest.skip("gradients draw seeds of their own where pipelines differ")
    norm, linear = ops.RMSNorm(64), ops.Linear(64, 32)
    together = ops.Sequential(copy.deepcopy(norm), ops.Quantize(), copy.deepcopy(linear))
    apart = ops.Sequential(norm, ops.Quantize())
    got = results_of(lambda x: linear(apart(x)), matrix(), recipe=RECIPES[name], module=torch.nn.ModuleList([norm, linear]))
    assert_equal(got, results_of(together, matrix(), recipe=RECIPES[name]))


def test_the_norm_writes_the_codes_that_are_handed_over() -> None:
    pipeline = ops.Sequential(ops.RMSNorm(64), ops.Quantize())
    with torch.no_grad(), tandem.autocast(recipe=recipe.MXFP8BlockScaling()):
        assert isinstance(pipeline(matrix()), tandem.QuantizedTensor)
        text = pipeline.explain()
    assert "rms_norm_quantize: x" in text and "hand_over: 0.rms_norm.y in mxfp8_e4m3 by rows" in text and "dequantize" not in text


def test_where_nothing_is_quantized_the_output_is_plain() -> None:
    point, x = ops.Quantize(), matrix(requires_grad=False)
    assert type(point(x)) is torch.Tensor
    with tandem.autocast(recipe=recipe.MXFP8BlockScaling(), calibrating=True, enabled=False):
        assert type(point(x)) is torch.Tensor
    with tandem.autocast(recipe=recipe.MXFP8BlockScaling()):
        assert type(ops.Quantize(forward=False, backward=True)(x)) is torch.Tensor


def test_every_output_that_is_that_value_is_in_codes() -> None:
    pipeline = ops.Sequential(ops.Quantize(), ops.MakeExtraOutput(), ops.GELU())
    x = matrix()
    with tandem.autocast(recipe=recipe.MXFP8BlockScaling()):
        y, extra = pipeline(x)
    assert type(y) is torch.Tensor and isinstance(extra, tandem.QuantizedTensor)
    torch.testing.assert_close(y, torch.nn.functional.gelu(extra.dequantize(), approximate="tanh"))
    (y.sum() + 3 * extra.dequantize().sum()).backward()
    leaf = extra.dequantize().detach().requires_grad_()
    torch.nn.functional.gelu(leaf, approximate="tanh").sum().backward()
    assert x.grad is not None and leaf.grad is not None
    torch.testing.assert_close(x.grad, leaf.grad + 3)


def test_an_input_in_codes_that_goes_through_is_a_copy_in_codes() -> None:
    codes = tandem.quantize(matrix(requires_grad=False), tandem.MXFP8Quantizer(E4M3))
    y = ops.Sequential(ops.Identity())(codes)
    assert isinstance(y, tandem.QuantizedTensor) and torch.equal(y.dequantize(), codes.dequantize())
    y.quantize_(torch.zeros(48, 64))
    assert codes.dequantize().abs().sum() > 0


def test_a_module_of_torch_behind_reads_the_numbers() -> None:
    x = matrix(requires_grad=False)
    with tandem.autocast(recipe=recipe.MXFP8BlockScaling()):
        y = ops.Sequential(ops.Quantize(), torch.nn.ReLU())(x)
    assert torch.equal(y, tandem.quantize(x, tandem.MXFP8Quantizer(E4M3)).dequantize().relu())


def test_a_scale_of_the_past_goes_with_the_codes() -> None:
    point = ops.Quantize()
    for _ in range(2):
        with tandem.autocast(recipe=recipe.DelayedScaling()):
            y = point(matrix(requires_grad=False))
    assert isinstance(y, tandem.QuantizedTensor) and isinstance(y.quantizer, tandem.Float8Quantizer)
    assert y.rowwise_scale_inv is not None and y.quantizer.scale.item() != 1
    torch.testing.assert_close(y.quantizer.scale.reciprocal().reshape(-1), y.rowwise_scale_inv.reshape(-1))


def test_verify_and_gradients_of_both_directions() -> None:
    pipeline = ops.Sequential(ops.RMSNorm(64), ops.Quantize(forward=True, backward=True))
    with tandem.autocast(recipe=recipe.MXFP8BlockScaling()):
        assert pipeline.verify(matrix()).passed


def test_compiled_code_hands_codes_over_where_no_gradient_is_wanted(fresh_dynamo: None) -> None:
    pipeline = ops.Sequential(ops.RMSNorm(64), ops.Quantize())
    compiled = torch.compile(pipeline, fullgraph=True, backend="aot_eager")
    x, same = matrix(), matrix()
    with tandem.autocast(recipe=recipe.MXFP8BlockScaling()):
        with torch.no_grad():
            y = compiled(x)
            assert isinstance(y, tandem.QuantizedTensor) and torch.equal(y.dequantize(), pipeline(x).dequantize())
        y, expected = compiled(x), pipeline(same)
    assert type(y) is torch.Tensor and torch.equal(y, expected.dequantize())
    y.square().sum().backward()
    expected.dequantize().square().sum().backward()
    assert_equal([x.grad], [same.grad])
