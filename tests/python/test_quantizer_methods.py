"""What quantizers and their tensors can do besides: gradients, usages, writing, compiled code, memory of several processes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from support import each_raises
from test_quantized_tensors import same

import tandem
from tandem import QuantizedTensor

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

E4M3 = torch.float8_e4m3fn


def delayed(scale: float = 2.0) -> Any:
    return tandem.Float8Quantizer(torch.tensor([scale]), torch.zeros(1), E4M3)


KINDS: dict[str, Callable[[], Any]] = {
    "current": lambda: tandem.Float8CurrentScalingQuantizer(E4M3),
    "delayed": delayed,
    "1x128": lambda: tandem.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=1),
    "128x128": lambda: tandem.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True),
    "mxfp8": lambda: tandem.MXFP8Quantizer(E4M3),
    "nvfp4": lambda: tandem.NVFP4Quantizer(),
}
SHARED = ("current", "delayed", "128x128")  # one set of codes for both directions
each_kind = pytest.mark.parametrize("kind", KINDS)


def sample(seed: int = 0) -> torch.Tensor:
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))


OTHER = sample(1)


@each_kind
def test_the_gradient_of_the_numbers_is_that_of_the_tensor(kind: str) -> None:
    param = torch.nn.Parameter(tandem.quantize(sample(), KINDS[kind]()))
    numbers = param.dequantize()  # type: ignore[operator]
    numbers.pow(2).sum().backward()
    assert param.grad is not None and torch.equal(param.grad, 2 * numbers.detach())
    param.grad = None
    param.dequantize(torch.bfloat16).sum().backward()  # type: ignore[operator]
    assert param.grad.dtype == torch.float32 and (param.grad == 1).all()
    with torch.no_grad():
        assert not param.dequantize().requires_grad  # type: ignore[operator]


@each_kind
def test_the_gradient_of_x_is_that_of_its_codes(kind: str) -> None:
    x, grad = sample().requires_grad_(), sample(1)
    for call in (KINDS[kind](), KINDS[kind]().quantize, lambda x: tandem.quantize(x, KINDS[kind]())):
        codes = call(2 * x)
        assert isinstance(codes, QuantizedTensor) and codes.requires_grad
        codes.dequantize().backward(grad)
        assert torch.equal(x.grad, 2 * grad)  # type: ignore[arg-type]
        x.grad = None
        (call(2 * x) * 1.0).backward(grad)
        assert torch.equal(x.grad, 2 * grad)  # type: ignore[arg-type]
        x.grad = None
    with torch.no_grad():
        assert not KINDS[kind]()(x).requires_grad


def test_rotated_columns_have_no_gradient() -> None:
    param = torch.nn.Parameter(tandem.quantize(sample(), tandem.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)))
    assert not param.dequantize(columnwise=True).requires_grad  # type: ignore[operator]
    assert param.dequantize().requires_grad  # type: ignore[operator]


@each_kind
def test_quantizing_into_a_tensor(kind: str) -> None:
    quantizer = KINDS[kind]()
    out = quantizer.make_empty((64, 64), dtype=torch.bfloat16)
    assert out.dtype == torch.bfloat16 and out.quantizer is quantizer and not out.dequantize().any() and not out.requires_grad
    assert kind != "delayed" or not quantizer.amax.item()
    data = out.rowwise_data
    x = sample().bfloat16()
    for made in (quantizer.quantize(x, out=out), quantizer.update_quantized(x, out)):
        assert made is out and out.rowwise_data is data
        assert torch.equal(out.dequantize(), KINDS[kind]()(x).dequantize())
    assert quantizer(sample(), dtype=torch.bfloat16).dtype == torch.bfloat16
    assert quantizer.make_empty((4, 64), requires_grad=True).requires_grad


@each_kind
def test_usages(kind: str) -> None:
    quantizer = KINDS[kind]()
    before = quantizer(sample())
    other = quantizer.copy()
    assert other == quantizer and other is not quantizer and type(other) is type(quantizer)
    quantizer.set_usage(columnwise=False)
    assert quantizer.rowwise_usage and not quantizer.columnwise_usage and other.columnwise_usage and other != quantizer
    assert quantizer(sample()).get_usages() == {"rowwise": True, "columnwise": False}
    assert before.get_usages() == {"rowwise": True, "columnwise": True}
    before.copy_(sample(1))  # in all directions that it has
    expected = KINDS[kind]()(sample(1))
    same(before, expected)
    before.update_usage()
    before.update_usage(rowwise_usage=True, columnwise_usage=True)
    same(before, expected)
    before.update_usage(rowwise_usage=False)
    assert before.get_usages() == {"rowwise": False, "columnwise": True}
    assert before.rowwise_data is None and before.rowwise_scale_inv is None and before.amax_rowwise is None
    assert torch.equal(before.dequantize(), expected.dequantize(columnwise=True))
    if kind in SHARED:
        before.update_usage(rowwise_usage=True)
        assert torch.equal(before.dequantize(), expected.dequantize())
    else:
        with pytest.raises(RuntimeError, match=r"update_usage: expected rowwise codes that are there or the same as columnwise ones, got a tensor of .* without"):
            before.update_usage(rowwise_usage=True)


test_errors = each_raises([
    (lambda: KINDS["mxfp8"]().set_usage(rowwise=False, columnwise=False), ValueError, "MXFP8Quantizer: expected rowwise or columnwise codes to be wanted, got neither"),
    (lambda: KINDS["mxfp8"]()(sample()).update_usage(False, False), ValueError, "update_usage: expected codes of rows or of columns to be kept, got neither"),
    (lambda: KINDS["mxfp8"]()(sample(), out=sample()), TypeError, "MXFP8Quantizer: expected a quantized tensor to write into, got Tensor"),
    (lambda: KINDS["mxfp8"]()(sample(), out=KINDS["current"]()(sample())), ValueError, "MXFP8Quantizer: expected a tensor of mxfp8_e4m3 and shape [64, 64] to write into, got fp8_e4m3:current"),
    (lambda: KINDS["mxfp8"]()(sample()[:32], out=KINDS["mxfp8"]()(sample())), ValueError, "and shape [32, 64] to write into, got mxfp8_e4m3 and [64, 64]"),
])  # fmt: skip


def compiled(function: Any) -> Any:
    return torch.compile(function, backend="aot_eager", fullgraph=True)


@each_kind
def test_compiled_code_quantizes(kind: str) -> None:
    quantizer, other = KINDS[kind](), KINDS[kind]()
    function = compiled(lambda x: tandem.quantize(2 * x, quantizer))
    for seed in (0, 1):
        codes, expected = function(sample(seed)), other(2 * sample(seed))
        same(codes, expected)
        assert kind != "delayed" or torch.equal(quantizer.amax, other.amax)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "delayed"])
def test_a_quantizer_is_made_in_compiled_code(kind: str) -> None:
    assert torch.equal(compiled(lambda x: KINDS[kind]()(x).dequantize())(sample()), KINDS[kind]()(sample()).dequantize())


@each_kind
def test_compiled_gradients(kind: str) -> None:
    quantizer, x, grad = KINDS[kind](), sample().requires_grad_(), sample(1)
    compiled(lambda x: quantizer(2 * x).dequantize())(x).backward(grad)
    assert torch.equal(x.grad, 2 * grad)  # type: ignore[arg-type]
    param = torch.nn.Parameter(KINDS[kind]()(sample()))
    compiled(lambda param: 2 * param.dequantize())(param).backward(grad)
    assert torch.equal(param.grad, 2 * grad)  # type: ignore[arg-type]


@each_kind
@pytest.mark.parametrize("change", [lambda t: t.clone(), lambda t: t.mul_(2), lambda t: t.copy_(OTHER), lambda t: t + 1], ids=["clone", "mul_", "copy_", "add"])
def test_compiled_code_takes_and_writes_their_tensors(kind: str, change: Any) -> None:
    given, own = KINDS[kind]()(sample()), KINDS[kind]()(sample())
    made, expected = compiled(change)(given), change(own)
    same(given, own)
    if isinstance(expected, QuantizedTensor):
        same(made, expected)
    else:
        assert type(made) is torch.Tensor and torch.equal(made, expected)
    assert kind != "delayed" or torch.equal(given.quantizer.amax, own.quantizer.amax)


def test_compiled_code_knows_one_given_scale_from_another() -> None:
    function = compiled(lambda codes: codes.clone().mul_(1))
    for scale in (1.0, 4.0):
        codes = delayed(scale)(sample())
        assert torch.equal(function(codes).dequantize(), codes.clone().mul_(1).dequantize())
        assert function(codes).quantizer.scale.item() == scale
    assert copy.deepcopy(codes).quantizer.scale is not codes.quantizer.scale


@each_kind
def test_processes_share_parts(kind: str) -> None:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(KINDS[kind]()(sample()))
    assert not module.weight.is_shared()
    module.share_memory()
    assert module.weight.is_shared() and torch.equal(module.weight.dequantize(), KINDS[kind]()(sample()).dequantize())
    sent = pickle.loads(ForkingPickler.dumps(module.weight))
    assert sent.is_shared()
    with torch.no_grad():
        module.weight.copy_(sample(1))
    assert torch.equal(sent.dequantize(), module.weight.dequantize())


def test_copies_share_the_amax_with_the_same_processes() -> None:
    group: Any = type("Group", (), {"group_name": "pair"})()
    quantizer = tandem.Float8CurrentScalingQuantizer(E4M3, with_amax_reduction=True, amax_reduction_group=group)
    row_alone = tandem.quantize(sample(), tandem.Float8CurrentScalingQuantizer(E4M3, columnwise=False))
    for made in (quantizer.copy(), copy.copy(quantizer)):
        assert made == quantizer and made is not quantizer
    assert quantizer._wanting(row_alone)._amax_group is group and not quantizer._wanting(row_alone).columnwise
    assert pickle.loads(pickle.dumps(quantizer))._amax_group is None  # another process has other groups
