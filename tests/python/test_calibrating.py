"""`tandem.autocast(enabled=False, calibrating=True)`: amaxes of what products read, whatever they read; and recomputes by `tandem.checkpoint`."""

from __future__ import annotations

import pytest
import torch
from delayed import states

import tandem
from tandem import ops
from tandem.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling

RECIPE = DelayedScaling(amax_history_len=4)


def linear() -> ops.Linear:
    torch.manual_seed(0)
    made = ops.Linear(64, 64)
    with torch.no_grad():
        made.weight.mul_(1e-3)
    return made


def calibrated(module: torch.nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    with tandem.autocast(enabled=False, calibrating=True, recipe=RECIPE):
        y = module(*inputs)
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


def test_what_has_no_quantized_form_runs_as_without_a_recipe():
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
