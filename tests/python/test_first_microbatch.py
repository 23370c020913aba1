"""`is_first_microbatch` with `fuse_wgrad_accumulation`: the first micro-batch overwrites main_grad, the others add to it."""

import contextlib

import pytest
import torch
from torch.testing import assert_close

import tandem

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

FUSED = {"fuse_wgrad_accumulation": True}
LAYER = {**FUSED, "fuse_qkv_params": True, "hidden_dropout": 0, "attention_dropout": 0}
SPLITS = torch.tensor([2, 1, 3])
CALLS = {
    "Linear": lambda **options: (tandem.Linear(8, 8, **FUSED, **options), (6, 8), ()),
    "LayerNormLinear": lambda **options: (tandem.LayerNormLinear(8, 8, **FUSED, **options), (6, 8), ()),
    "LayerNormMLP": lambda **options: (tandem.LayerNormMLP(8, 16, **FUSED, **options), (6, 8), ()),
    "GroupedLinear": lambda **options: (tandem.GroupedLinear(3, 8, 8, **FUSED, **options), (6, 8), (SPLITS,)),
    "single weight": lambda **options: (tandem.GroupedLinear(3, 8, 8, single_grouped_weight=True, **FUSED, **options), (6, 8), (SPLITS,)),
}
LAYERS = {
    "TransformerLayer": lambda: (tandem.TransformerLayer(8, 16, 2, **LAYER), (3, 2, 8), ()),
    "MultiheadAttention": lambda: (tandem.MultiheadAttention(8, 2, attention_dropout=0, fuse_qkv_params=True, **FUSED), (3, 2, 8), ()),
}
RECIPES = {"none": None, "current": tandem.recipe.Float8CurrentScaling(), "mxfp8": tandem.recipe.MXFP8BlockScaling()}


def products(module):
    return [param for name, param in module.named_parameters() if "weight" in name and "norm_weight" not in name]


def step(module, call, x, others, first, recipe=None):
    with tandem.autocast(recipe=recipe) if recipe else contextlib.nullcontext():
        y = call(x, *others, is_first_microbatch=first)
    y.square().sum().backward()
    for part in module.modules():
        if isinstance(part, (tandem.Linear, tandem.LayerNormLinear, tandem.LayerNormMLP, tandem.GroupedLinear)):
            part.backward_dw()


def gradients(module, call, x, others, recipe):
    """Of one micro-batch alone."""
    for weight in products(module):
        weight.main_grad = torch.zeros_like(weight)
    step(module, call, x, others, None, recipe)
    return [weight.main_grad for weight in products(module)]


def check(module, call, sizes, others, recipe):
    batches = [torch.randn(sizes) for _ in range(3)]
    alone = [gradients(module, call, x, others, recipe) for x in batches]
    for weight in products(module):
        weight.main_grad = torch.full_like(weight, 100.0)
    for index, x in enumerate(batches):
        step(module, call, x, others, index == 0, recipe)
        expected = [sum(each) for each in zip(*alone[: index + 1], strict=True)]
        for weight, gradient in zip(products(module), expected, strict=True):
            assert_close(weight.main_grad, gradient, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("make", [*CALLS.values(), *LAYERS.values()], ids=[*CALLS, *LAYERS])
def test_the_first_overwrites_and_the_others_add(make, recipe):
    module, sizes, others = make()
    check(module, module, sizes, others, recipe)


@pytest.mark.parametrize("recipe", [None, tandem.recipe.Float8CurrentScaling()], ids=["none", "current"])
@pytest.mark.parametrize("make", CALLS.values(), ids=CALLS)
def test_delayed_gradients_do_so_too(make, recipe):
    module, sizes, others = make(delay_wgrad_compute=True)
    check(module, module, sizes, others, recipe)


def test_a_backward_that_comes_after_the_next_forward_keeps_its_own_word():
    module = tandem.Linear(8, 8, delay_wgrad_compute=True, **FUSED)
    module.weight.main_grad = torch.full((8, 8), 100.0)
    first, second = torch.randn(4, 8), torch.randn(4, 8)
    outputs = [module(first, is_first_microbatch=True), module(second, is_first_microbatch=False)]
    for y in outputs:
        y.sum().backward()
    module.backward_dw()
    assert_close(module.weight.main_grad, torch.ones(4, 8).t() @ first)
    module.backward_dw()
    assert_close(module.weight.main_grad, torch.ones(4, 8).t() @ (first + second))


def test_compiled():
    module = tandem.LayerNormMLP(8, 16, **FUSED)
    check(module, torch.compile(module, backend="aot_eager", fullgraph=True), (6, 8), (), None)


def test_a_weight_that_says_so_itself_is_overwritten_in_every_micro_batch():
    module, x = tandem.Linear(8, 8, **FUSED), torch.randn(4, 8)
    module.weight.main_grad, module.weight.overwrite_main_grad = torch.full((8, 8), 100.0), True
    for first in (True, False):
        module(x, is_first_microbatch=first).sum().backward()
        assert_close(module.weight.main_grad, torch.ones(4, 8).t() @ x)
