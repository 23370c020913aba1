"""How often weights were quantized, and whether what a call gave is of the weights as they are."""

import copy
import json

import torch

import tandem
from tandem.recipe import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling

RECIPES = {"current": Float8CurrentScaling(), "blocks": Float8BlockScaling(), "mx": MXFP8BlockScaling()}


def made_in(function):
    """How many weights were quantized, and how many found in codes."""
    before = tandem._C.refresh_counts()
    function()
    after = tandem._C.refresh_counts()
    return after.made - before.made, after.reused - before.reused


def step(module, x, recipe=RECIPES["current"], **kwargs):
    with tandem.autocast(recipe=recipe):
        y = module(x, **kwargs)
    y = y[0] if isinstance(y, tuple) else y
    if y.requires_grad:
        y.square().sum().backward()
    return y


def results_of(call, x, recipe):
    x = x.detach().requires_grad_()
    y = step(call, x, recipe)
    return [y.detach(), x.grad]


def assert_fresh(call, module, x, recipe=RECIPES["current"]):
    """That a call gives the bits which an eager copy gives that has no codes yet, of outputs and gradients."""
    for got, expected in zip(results_of(call, x, recipe), results_of(copy.deepcopy(module), x, recipe), strict=True):
        assert torch.equal(got, expected)


def fresh_numbers(module, x, recipe=RECIPES["current"]):
    """The output of a copy that has no codes yet."""
    with torch.no_grad():
        return step(copy.deepcopy(module), x, recipe)


def codes_told(module):
    """What `explain` says of the codes of the weights, of the last plan."""
    told = json.loads(f"[{tandem.explain(module, 'json')}]")[0]
    return (told if isinstance(told, dict) else told[-1])["plans"][-1]["codes_of_weights"]
