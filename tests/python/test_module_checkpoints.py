"""Checkpoints of the modules: TransformerEngine's load here, and ours load whatever recipe they were trained under."""

from __future__ import annotations

import io

import pytest
import torch
from recipes import RECIPES
from support import saved_and_loaded

import tandem

HIDDEN, WIDE = 32, 64
# TransformerEngine's keys and shapes of the same modules, without the `_extra_state` entries.
MODULES = {
    "Linear": (lambda: tandem.Linear(HIDDEN, WIDE), {"weight": (WIDE, HIDDEN), "bias": (WIDE,)}, [""]),
    "LayerNormLinear": (
        lambda: tandem.LayerNormLinear(HIDDEN, WIDE),
        {"layer_norm_weight": (HIDDEN,), "layer_norm_bias": (HIDDEN,), "weight": (WIDE, HIDDEN), "bias": (WIDE,)},
        [""],
    ),
    "LayerNormMLP": (
        lambda: tandem.LayerNormMLP(HIDDEN, WIDE, activation="swiglu", checkpoint=True),
        {
            "layer_norm_weight": (HIDDEN,),
            "layer_norm_bias": (HIDDEN,),
            "fc1_weight": (2 * WIDE, HIDDEN),
            "fc1_bias": (2 * WIDE,),
            "fc2_weight": (HIDDEN, WIDE),
            "fc2_bias": (HIDDEN,),
        },
        [""],
    ),
    "GroupedLinear": (
        lambda: tandem.GroupedLinear(2, HIDDEN, WIDE),
        {"weight0": (WIDE, HIDDEN), "weight1": (WIDE, HIDDEN), "bias0": (WIDE,), "bias1": (WIDE,)},
        [""],
    ),
    "LayerNorm": (lambda: tandem.LayerNorm(HIDDEN), {"weight": (HIDDEN,), "bias": (HIDDEN,)}, [""]),
    "RMSNorm": (lambda: tandem.RMSNorm(HIDDEN), {"weight": (HIDDEN,)}, [""]),
    "TransformerLayer": (
        lambda: tandem.TransformerLayer(HIDDEN, WIDE, 4, fuse_qkv_params=True, hidden_dropout=0, attention_dropout=0),
        {
            "self_attention.layernorm_qkv.layer_norm_weight": (HIDDEN,),
            "self_attention.layernorm_qkv.layer_norm_bias": (HIDDEN,),
            "self_attention.layernorm_qkv.weight": (3 * HIDDEN, HIDDEN),
            "self_attention.layernorm_qkv.bias": (3 * HIDDEN,),
            "self_attention.proj.weight": (HIDDEN, HIDDEN),
            "self_attention.proj.bias": (HIDDEN,),
            "layernorm_mlp.layer_norm_weight": (HIDDEN,),
            "layernorm_mlp.layer_norm_bias": (HIDDEN,),
            "layernorm_mlp.fc1_weight": (WIDE, HIDDEN),
            "layernorm_mlp.fc1_bias": (WIDE,),
            "layernorm_mlp.fc2_weight": (HIDDEN, WIDE),
            "layernorm_mlp.fc2_bias": (HIDDEN,),
        },
        ["self_attention.layernorm_qkv.", "self_attention.core_attention.", "self_attention.proj.", "layernorm_mlp."],
    ),
}


@pytest.fixture(params=MODULES)
def case(request):
    return MODULES[request.param]


def call(module, x, recipe):
    with tandem.autocast(enabled=recipe is not None, recipe=recipe):
        return module(x, [6, 10]) if isinstance(module, tandem.GroupedLinear) else module(x)


def step(module, x, recipe):
    y = call(module, x, recipe)
    y.square().mean().backward()
    return y


@pytest.mark.parametrize("content", [torch.empty(0, dtype=torch.uint8), io.BytesIO(b"\x80\x04"), None], ids=["empty", "pickle", "none"])
def test_those_of_transformer_engine_load(case, content):
    make, shapes, states = case
    theirs = {name: torch.randn(shape) for name, shape in shapes.items()}
    extra = {f"{prefix}_extra_state": content for prefix in states}
    module = make()
    module.load_state_dict({**theirs, **extra})
    ours = module.state_dict()
    assert {name: tuple(value.shape) for name, value in ours.items()} == shapes
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_ours_load_after_any_change_of_recipe(case):
    make, shapes, _ = case
    x = torch.randn(16, 1, HIDDEN) if any(name.startswith("self_attention") for name in shapes) else torch.randn(16, HIDDEN)
    grouped = isinstance(make(), tandem.GroupedLinear)
    recipes = [None, *(recipe for name, recipe in RECIPES.items() if not grouped or name not in ("delayed", "nvfp4"))]
    for before in recipes:
        trained = make()
        step(trained, x, before)
        state = saved_and_loaded(trained.state_dict())
        for after in recipes:
            module = make()
            if before is not after:
                step(module, x, after)  # it has a state of its own by now
            module.load_state_dict(state)
            for name in shapes:
                assert torch.equal(module.state_dict()[name], trained.state_dict()[name])
            assert torch.isfinite(step(module, x, after)).all()
        again = make()
        again.load_state_dict(state)
        with torch.no_grad():
            torch.manual_seed(7)
            expected = call(trained, x, before)
            torch.manual_seed(7)
            assert torch.equal(call(again, x, before), expected)
