"""Parameters that are kept in codes: products read these, optimizers step a master copy, state dicts hold the parts."""

from __future__ import annotations

import copy

import pytest
import torch
from support import llama_mlp, randomize, results_of, saved_and_loaded

import tandem
from tandem import ops
from tandem.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling

CURRENT = tandem.Float8CurrentScalingQuantizer(torch.float8_e4m3fn)
MX = tandem.MXFP8Quantizer(torch.float8_e4m3fn)
SQUARES = tandem.Float8BlockQuantizer(torch.float8_e4m3fn, rowwise=True, columnwise=True)
LINES = tandem.Float8BlockQuantizer(torch.float8_e4m3fn, rowwise=True, columnwise=True, block_scaling_dim=1)
FOUR = tandem.NVFP4Quantizer(with_2d_quantization=True)
RECIPE_OF = {CURRENT: Float8CurrentScaling(), MX: MXFP8BlockScaling(), SQUARES: Float8BlockScaling(), FOUR: NVFP4BlockScaling()}
QUANTIZERS = pytest.mark.parametrize("quantizer", RECIPE_OF, ids=["current", "mxfp8", "squares", "nvfp4"])


def quantized(module: torch.nn.Module, quantizer: tandem.Quantizer) -> torch.nn.Module:
    """The module with its matrices in codes."""
    for part in module.modules():
        for name, param in [*part._parameters.items()]:
            if param is not None and param.dim() == 2:
                setattr(part, name, torch.nn.Parameter(tandem.quantize(param.detach(), quantizer), requires_grad=param.requires_grad))
    return module


def decoded(module: torch.nn.Module) -> torch.nn.Module:
    """A copy whose parameters are the plain numbers of the codes."""
    plain = copy.deepcopy(module)
    for part in plain.modules():
        for name, param in [*part._parameters.items()]:
            if isinstance(param, tandem.QuantizedTensor):
                setattr(part, name, torch.nn.Parameter(param.dequantize()))
    return plain


@QUANTIZERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_recipe_the_decoded_numbers_count(quantizer, dtype):
    torch.manual_seed(0)
    model = quantized(randomize(llama_mlp(16, 40)).to(dtype), quantizer)
    expected = decoded(model)
    x = torch.randn(5, 16, dtype=dtype)
    for actual, wanted in zip(results_of(model, x), results_of(expected, x), strict=True):
        assert type(actual) is torch.Tensor
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize(
    ("quantizer", "recipe"),
    [*RECIPE_OF.items(), (CURRENT, DelayedScaling(amax_history_len=4)), (LINES, Float8BlockScaling(w_block_scaling_dim=1))],
)
def test_under_a_recipe_of_its_format_the_codes_count(quantizer, recipe):
    torch.manual_seed(0)
    linear = quantized(randomize(ops.Linear(48, 40)), quantizer)
    container = ops.Sequential(linear)
    x = torch.randn(6, 48, requires_grad=True)
    with tandem.autocast(recipe=recipe):
        y = container(x)
    grad = torch.randn(6, 40)
    grad_x, grad_weight = torch.autograd.grad(y, [x, linear.weight], grad)
    text = container.explain()
    assert "dequantize" not in text and "refresh_weight" not in text
    if isinstance(recipe, Float8CurrentScaling):  # rounding what is rounded already changes nothing
        plain = decoded(linear)
        with tandem.autocast(recipe=recipe):
            z = plain(x)
        for actual, wanted in zip((y, grad_x, grad_weight), (z, *torch.autograd.grad(z, [x, plain.weight], grad)), strict=True):
            torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-6 * wanted.abs().max().item())
    if quantizer in (MX, LINES):  # rows and columns were quantized apart, from the very numbers
        wanted = tandem.quantize(grad, quantizer).dequantize() @ linear.weight.dequantize(columnwise=True)
        torch.testing.assert_close(grad_x, wanted, rtol=0, atol=1e-5 * wanted.abs().max().item())


@pytest.mark.parametrize(("quantizer", "recipe"), [(CURRENT, MXFP8BlockScaling()), (MX, Float8CurrentScaling()), (SQUARES, NVFP4BlockScaling()), (FOUR, Float8BlockScaling())])
def test_under_another_recipe_the_decoded_numbers_are_quantized(quantizer, recipe):
    torch.manual_seed(0)
    linear = quantized(randomize(ops.Linear(32, 40)), quantizer)
    plain = decoded(linear)
    x = torch.randn(6, 32)
    with tandem.autocast(recipe=recipe):
        assert torch.equal(linear(x), plain(x))


def test_an_optimizer_may_step_the_codes_themselves():
    linear = quantized(ops.Linear(8, 8, bias=False), CURRENT)
    linear.weight.grad = torch.ones(8, 8)
    before = linear.weight.dequantize()
    torch.optim.SGD(linear.parameters(), lr=0.25).step()
    assert isinstance(linear.weight, tandem.QuantizedTensor) and isinstance(linear.weight, torch.nn.Parameter)
    assert torch.equal(linear.weight.dequantize(), tandem.quantize(before - 0.25, CURRENT).dequantize())


@QUANTIZERS
def test_state_dicts_hold_the_parts(quantizer):
    torch.manual_seed(0)
    linear, other = (quantized(randomize(ops.Linear(16, 8)), quantizer) for _ in range(2))
    parts = ["rowwise_data", "rowwise_scale_inv"]
    if quantizer in (MX, FOUR):  # elsewhere one value serves both directions
        parts = [*parts, "columnwise_data", "columnwise_scale_inv"]
    if quantizer is FOUR:
        parts = [*parts[:2], "amax_rowwise", *parts[2:], "amax_columnwise"]
    assert [name for name in linear.state_dict() if "weight" in name] == [f"weight.{part}" for part in (*parts, "quantizer")]
    loaded = saved_and_loaded(linear.state_dict())
    assert all(type(tensor) is torch.Tensor for tensor in loaded.values())
    other.load_state_dict(loaded)
    for part in parts:
        assert torch.equal(getattr(other.weight, part), getattr(linear.weight, part))
    plain = ops.Linear(16, 8)
    other.load_state_dict(plain.state_dict())
    assert torch.equal(other.weight.rowwise_data, tandem.quantize(plain.weight.detach(), quantizer).rowwise_data)
    with pytest.raises(RuntimeError, match=r"weight.rowwise_data: expected shape \[8, (16|8)\], got \[8, (32|16)\]"):
        linear.load_state_dict(quantized(ops.Linear(32, 8), quantizer).state_dict())


def test_a_state_dict_without_its_quantizer_lacks_a_key():
    """Parts alone do not say what they stand for: 448 and 256 have the same shapes."""
    saved = quantized(ops.Linear(32, 8), tandem.NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=256))
    parts = saved.state_dict()
    del parts["weight.quantizer"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "weight.quantizer"'):
        quantized(ops.Linear(32, 8), tandem.NVFP4Quantizer()).load_state_dict(parts)
    loaded = quantized(ops.Linear(32, 8), saved.weight.quantizer)
    loaded.load_state_dict(parts, strict=False)
    assert torch.equal(loaded.weight.dequantize(), saved.weight.dequantize())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    ("quantizer", "recipe"), [(CURRENT, None), (CURRENT, Float8CurrentScaling()), (FOUR, None), (FOUR, NVFP4BlockScaling(disable_stochastic_rounding=True))]
)
def test_compiled_calls_equal_eager_ones(backend, quantizer, recipe, fresh_dynamo):
    torch.manual_seed(0)
    linear = quantized(randomize(ops.Linear(16, 8)), quantizer)
    compiled = torch.compile(linear, fullgraph=True, backend=backend)
    x = torch.randn(4, 16)
    torch.testing.assert_close(results_of(compiled, x, recipe=recipe), results_of(linear, x, recipe=recipe))


def test_codes_of_one_direction_suffice_where_only_these_are_read():
    torch.manual_seed(0)
    rows = tandem.MXFP8Quantizer(torch.float8_e4m3fn, columnwise=False)
    linear = quantized(randomize(ops.Linear(32, 8, bias=False)), rows)
    x = torch.randn(4, 32)
    with torch.no_grad(), tandem.autocast(recipe=MXFP8BlockScaling()):
        y = linear(x)
    wanted = tandem.quantize(x, MX).dequantize() @ linear.weight.dequantize().t()
    torch.testing.assert_close(y, wanted, rtol=0, atol=1e-5 * wanted.abs().max().item())
    leaf = x.requires_grad_()
    with tandem.autocast(recipe=MXFP8BlockScaling()):  # columns are made of the decoded numbers
        linear(leaf).sum().backward()
    assert torch.isfinite(leaf.grad).all()


def test_rotated_columns_of_a_parameter_are_not_multiplied_by_what_is_not():
    torch.manual_seed(0)
    linear = quantized(randomize(ops.Linear(32, 48)), tandem.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True))
    x, grad = torch.randn(16, 32, requires_grad=True), torch.randn(16, 48)
    with tandem.autocast(recipe=NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)):
        y = linear(x)
    wanted = grad @ linear.weight.dequantize()
    assert (torch.autograd.grad(y, x, grad)[0] - wanted).norm() < 0.2 * wanted.norm()
    assert linear.weight.dequantize(columnwise=True).shape == (48, 32)
    columns = tandem.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, rowwise=False)
    with pytest.raises(ValueError, match="expected codes of rows, got rotated ones of columns, which do not tell the numbers"):
        tandem.quantize(torch.randn(16, 32), columns).dequantize()
    quantized(linear, columns)
    with pytest.raises(ValueError, match="weight: expected a parameter with codes of rows, got rotated codes of columns alone, which do not tell"):
        linear(x)


def test_they_are_tensors():
    x = torch.randn(4, 32)
    tensor = tandem.quantize(x, MX)
    assert isinstance(tensor, torch.Tensor) and tensor.shape == x.shape and tensor.dtype == x.dtype
    plain = tensor.dequantize()
    assert torch.equal(tensor + 1, plain + 1) and torch.equal(tensor.t() @ x, plain.t() @ x)
    assert type(tensor * 1) is torch.Tensor
    copied = copy.deepcopy(tensor)
    assert torch.equal(copied.rowwise_data, tensor.rowwise_data) and copied.rowwise_data is not tensor.rowwise_data
    copied.quantize_(x * 2)
    assert torch.equal(copied.dequantize(), tandem.quantize(x * 2, MX).dequantize())
    assert torch.equal(tensor.dequantize(), plain)
    assert "QuantizedTensor([4, 32], dtype=torch.float32" in repr(tensor)
    with pytest.raises(ValueError, match="QuantizedTensor: expected codes of rows or of columns, got neither"):
        tandem.QuantizedTensor(None, None, None, None, MX, torch.float32)


@QUANTIZERS
def test_verify_reads_them(quantizer):
    torch.manual_seed(0)
    model = quantized(randomize(llama_mlp(16, 32)), quantizer)
    with tandem.autocast(recipe=RECIPE_OF[quantizer]):
        assert tandem.verify(model, torch.randn(4, 16, requires_grad=True)).passed


def test_codes_of_columns_alone_are_decoded():
    torch.manual_seed(0)
    for columns in (tandem.Float8CurrentScalingQuantizer(torch.float8_e4m3fn, rowwise=False), tandem.MXFP8Quantizer(torch.float8_e4m3fn, rowwise=False)):
        linear = quantized(randomize(ops.Linear(64, 96)), columns)
        x = torch.randn(4, 64, requires_grad=True)
        for recipe in (None, Float8CurrentScaling(), MXFP8BlockScaling()):
            with tandem.autocast(enabled=recipe is not None, recipe=recipe):
                y = linear(x)
            torch.testing.assert_close(y, decoded(linear)(x), rtol=0, atol=0.1 * y.abs().max().item())
            y.sum().backward()


@pytest.mark.parametrize("write", [lambda w: w.copy_(w * 0), lambda w: w.quantize_(w * 0), lambda w: w.fill_(0.0)], ids=["copy", "quantize", "fill"])
def test_a_write_between_forward_and_backward_is_noticed(write):
    linear = quantized(ops.Linear(64, 64), MX)
    x = torch.randn(4, 64, requires_grad=True)
    with tandem.autocast(recipe=MXFP8BlockScaling()):
        y = linear(x)
    with torch.no_grad():
        write(linear.weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(
    "write",
    [
        lambda w: torch._foreach_add_([w], -0.5),
        lambda w: torch.add(w.dequantize(), -0.5, out=w),
        lambda w: w.__setitem__(slice(None), 0.5),
        lambda w: w.sub_(0.5),
        lambda w: torch.optim.SGD([_with_gradient(w)], lr=0.5, foreach=True).step(),
        lambda w: torch.optim.SGD([_with_gradient(w)], lr=0.5, fused=True).step(),
        lambda w: torch.optim.SGD([_with_gradient(w)], lr=0.5, foreach=False).step(),
    ],
)
def test_writes_reach_the_codes(write):
    weight = torch.nn.Parameter(tandem.quantize(torch.ones(4, 32), MX))
    with torch.no_grad():
        write(weight)
    assert torch.equal(weight.dequantize(), torch.full((4, 32), 0.5))


def _with_gradient(weight):
    weight.grad = torch.ones(4, 32)
    return weight


@QUANTIZERS
@pytest.mark.parametrize("form", ["numbers", "codes", "vector"])
def test_assigned_data_is_quantized(quantizer, form):
    torch.manual_seed(0)
    linear, x = quantized(ops.Linear(48, 40, bias=False), quantizer), torch.randn(6, 48)
    param, before, new = linear.weight, linear(x), torch.randn(40, 48)
    with tandem.autocast(recipe=RECIPE_OF[quantizer]):
        linear(x)  # whatever is kept of the old codes
    if form == "numbers":
        param.data = new
    elif form == "codes":
        param.data = tandem.quantize(new, quantizer)
    else:
        torch.nn.utils.vector_to_parameters(new.view(-1), linear.parameters())
    assert linear.weight is param and param.requires_grad and isinstance(param, torch.nn.Parameter)
    expected = quantized(ops.Linear(48, 40, bias=False), quantizer)
    expected.weight = torch.nn.Parameter(tandem.quantize(new, quantizer))
    assert torch.equal(param.dequantize(), expected.weight.dequantize()) and not torch.equal(linear(x), before)
    for recipe in (None, RECIPE_OF[quantizer]):
        with tandem.autocast(enabled=recipe is not None, recipe=recipe):
            assert torch.equal(linear(x), expected(x))


def test_assigned_data_may_differ_in_dtype_shape_and_quantizer():
    param = torch.nn.Parameter(tandem.quantize(torch.randn(32, 64), CURRENT))
    new = torch.randn(64, 32, dtype=torch.bfloat16)
    param.data = tandem.quantize(new, MX)
    assert (param.shape, param.dtype, param.quantizer) == (new.shape, new.dtype, MX)
    assert torch.equal(param.dequantize(), tandem.quantize(new, MX).dequantize()) and param.data.grad_fn is None
    with pytest.raises(TypeError, match="data: expected numbers in float32, bfloat16 or float16, as a quantized tensor stands for, got torch.float64"):
        torch.nn.ParameterList([param]).to(torch.float64)
    with pytest.raises(TypeError, match="data: expected a tensor, got list"):
        param.data = [1.0]
    compiled = torch.compile(lambda weight, x: x @ weight.data.t(), backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 32, dtype=torch.bfloat16)
    assert torch.equal(compiled(param, x), x @ param.dequantize().t())
