"""`tandem.autocast(enabled=False, calibrating=True)`: amaxes of what products read, whatever they read; and recomputes by `tandem.checkpoint`."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from delayed import RECIPE, inputs, settled, states
from support import llama_mlp, randomize

import tandem
from tandem import ops
from tandem.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling


def linear() -> ops.Linear:
    torch.manual_seed(0)
    made = ops.Linear(64, 64)
    with torch.no_grad():
        made.weight.mul_(1e-3)
    return made


def calibrated(module: torch.nn.Module, *tensors: torch.Tensor, recipe: tandem.recipe.Recipe = RECIPE) -> torch.Tensor:
    with tandem.autocast(enabled=False, calibrating=True, recipe=recipe):
        y = module(*tensors)
    y.sum().backward()
    return y


def error_of_the_next_step(module: torch.nn.Module, x: torch.Tensor) -> float:
    expected = module(x)
    with tandem.autocast(recipe=RECIPE):
        y = module(x)
    return ((y - expected).norm() / expected.norm()).item()


def test_weights_count_that_torch_autocast_casts():
    module, x = linear(), torch.randn(8, 64)
    with torch.autocast("cpu", torch.bfloat16):
        calibrated(module, x)
        torch.testing.assert_close(states(module)[0].scale[1], 448 / module.weight.detach().abs().max())
        assert error_of_the_next_step(module, x) < 0.1


def test_weights_count_that_are_in_codes_of_another_format():
    module, x = linear(), torch.randn(8, 64)
    codes = tandem.quantize(module.weight.detach(), tandem.MXFP8Quantizer(torch.float8_e4m3fn))
    module.weight = torch.nn.Parameter(codes)
    calibrated(module, x)
    assert states(module)[0].scale[1] > 1e5
    assert error_of_the_next_step(module, x) < 0.1


def test_what_has_no_slots_runs_as_without_a_recipe():
    x = torch.randn(6, 8)
    grouped, splits = ops.GroupedLinear(2, 8, 4), torch.tensor([4, 2])
    assert torch.equal(calibrated(grouped, x, splits), grouped(x, splits))
    double = ops.Linear(8, 8, dtype=torch.float64)
    assert torch.equal(calibrated(double, x.double()), double(x.double()))


@pytest.mark.parametrize("between", [None, MXFP8BlockScaling()], ids=["plain", "another recipe"])
def test_a_checkpoint_recomputes_under_its_recipe_whatever_was_called_since(between):
    module, x = linear(), torch.randn(8, 64, requires_grad=True)
    with tandem.autocast(recipe=Float8CurrentScaling()):
        expected = torch.autograd.grad(module(x).sum(), module.weight)[0]
        y = tandem.checkpoint(module, x)
    with tandem.autocast(enabled=between is not None, recipe=between):
        module(x)
    y.sum().backward()
    assert torch.equal(module.weight.grad, expected)


def test_a_checkpoint_of_an_op_that_quantizes_nothing_in_forward():
    box = ops.Sequential(linear(), ops.Quantize(forward=False, backward=True))
    x = torch.randn(8, 64, requires_grad=True)
    with tandem.autocast(recipe=RECIPE):
        y = tandem.checkpoint(box, x)
    y.sum().backward()
    assert box[0].weight.grad.abs().sum() > 0


def test_a_checkpoint_with_a_parametrized_weight_recomputes_in_an_equal_region():
    module = torch.nn.utils.parametrizations.weight_norm(linear())
    x = torch.randn(8, 64, requires_grad=True)

    def region() -> tandem.autocast:
        return tandem.autocast(recipe=Float8CurrentScaling(amax_epsilon_input=0.125))

    with region():
        y = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)
    with region():
        y.sum().backward()
    assert x.grad.abs().sum() > 0


class Safe(DelayedScaling):
    safety = 1.0


class Safer(Safe):
    safety = 8.0


def with_safety(amax, scale, format_max, recipe):
    return format_max / (amax.clamp(min=1e-9) * recipe.safety)


class Algorithm:
    __hash__ = None  # as a dataclass has it

    def __call__(self, amax, scale, format_max, recipe):
        return format_max / amax.clamp(min=1e-9)


def test_functions_of_recipes_are_known_by_the_recipes_class_and_by_which_object_they_are():
    first, second = (kind(scaling_factor_compute_algo=with_safety, amax_history_len=2) for kind in (Safe, Safer))
    scales = []
    for recipe in (first, second):
        module = linear()
        for _ in range(2):
            with tandem.autocast(recipe=recipe):
                module(torch.ones(2, 64)).sum().backward()
        scales.append(states(module)[0].scale[0])
    assert scales[0] == 8 * scales[1]
    with tandem.autocast(recipe=DelayedScaling(scaling_factor_compute_algo=Algorithm())):
        linear()(torch.ones(2, 64)).sum().backward()


def summed(module, x):
    with tandem.autocast(recipe=RECIPE):
        y = module(x)
    y.sum().backward()


@pytest.mark.parametrize("wrap", [lambda module: module, functools.partial(torch.compile, backend="aot_eager", fullgraph=True)], ids=["eager", "compiled"])
def test_calibrating_keeps_amaxes_and_rounds_nothing(wrap):
    x = inputs(1)[0].requires_grad_()
    torch.manual_seed(0)
    linear = ops.Linear(8, 8)
    quantized, unquantized = copy.deepcopy(linear), copy.deepcopy(linear)
    y = calibrated(wrap(linear), x)
    grad_x, x.grad = x.grad, None
    expected = unquantized(x)
    expected.sum().backward()
    for own, right in ((y, expected), (grad_x, x.grad), (linear.weight.grad, unquantized.weight.grad)):
        torch.testing.assert_close(own, right)  # libraries sum in an order that depends on addresses; rounding to FP8 is 10,000 times as coarse
    summed(quantized, x)
    for state, other in zip(states(linear), states(quantized), strict=True):
        for mine, its in zip(settled(state), settled(other), strict=True):
            assert torch.equal(mine, its) and mine.any()
    for module in (linear, quantized):  # what follows has the scales of what was seen
        module.zero_grad()
        summed(module, x)
    assert torch.equal(linear.weight.grad, quantized.weight.grad) and not torch.equal(linear.weight.grad, unquantized.weight.grad)


def test_calibrating_a_pipeline_writes_no_codes():
    box, x = randomize(llama_mlp(16, 32)), torch.randn(6, 16, requires_grad=True)
    expected = box(x)
    y = calibrated(box, x)
    assert torch.equal(y, expected)
    with tandem.autocast(enabled=False, calibrating=True, recipe=RECIPE):
        text = box.explain()
        assert box.verify(x)
    assert "no codes are asked for, only the amax of what is read as it is" in text and "record_amax" in text
    assert " in fp8_" not in text and "dequantize" not in text


@pytest.mark.parametrize("biased, fusion, steps", [
    (True, "linear_bias_activation_quantize", "0.basic_linear + 1.bias + 2.gelu + quantize"),
    (False, "activation_quantize", "1.gelu + quantize"),
])
def test_units_do_not_fuse_with_what_writes_no_codes(biased, fusion, steps):
    box, x = tandem.ops.Sequential(tandem.ops.Linear(16, 32, bias=biased), tandem.ops.GELU(), tandem.ops.Linear(32, 16)), torch.randn(6, 16)
    with tandem.autocast(enabled=False, calibrating=True, recipe=RECIPE):
        text = box.explain() if box(x) is not None else ""
    assert f"{fusion} at {steps}: no codes are asked for, only the amax of what is read as it is" in text, text


def test_calibrating_asks_for_no_gradient_that_nobody_wants():
    box, x = ops.Sequential(ops.Linear(8, 8), ops.Linear(8, 8)), inputs(1)[0]
    for parameter in box[0].parameters():
        parameter.requires_grad_(False)
    calibrated(box, x)
    first, second = (settled(state.recipe_state.backward)[1] for state in (box[0], box[1]))
    assert second.any() and not first.any()


def test_calibrating_is_for_recipes_that_keep_amaxes_and_products_in_plain_numbers():
    linear, x = ops.Linear(8, 8), inputs(1)[0]
    expected = linear(x)
    assert torch.equal(calibrated(linear, x, recipe=Float8CurrentScaling()), expected) and "recipe_state" not in dict(linear.named_children())
    with tandem.autocast(enabled=True, calibrating=True, recipe=RECIPE):
        assert not torch.equal(linear(x), expected)
