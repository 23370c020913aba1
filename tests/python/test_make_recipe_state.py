"""`tandem.make_recipe_state`: the state of a recipe is there before the first call, for what looks at buffers."""

import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import tandem
from tandem import ops

RECIPE = tandem.recipe.DelayedScaling(amax_history_len=3)
MODELS = {
    "Linear": lambda: tandem.Linear(16, 16),
    "split": lambda: tandem.Linear(16, 16, parameters_split=("a", "b")),
    "LayerNormMLP": lambda: tandem.LayerNormMLP(16, 32),
    "TransformerLayer": lambda: tandem.TransformerLayer(16, 32, 2, hidden_dropout=0, attention_dropout=0),
    "Sequential": lambda: ops.Sequential(ops.LayerNorm(16), ops.Linear(16, 16), ops.GELU(), ops.BasicLinear(16, 16), ops.Quantize()),
    "fused op": lambda: ops.Sequential(ops.FusedOperation([ops.Linear(16, 16), ops.GELU(), ops.Linear(16, 16)])),
    "torch around": lambda: torch.nn.Sequential(torch.nn.Linear(16, 16), ops.Linear(16, 16)),
}


def step(model, optimizer=None):
    with tandem.autocast(recipe=RECIPE):
        y = model(torch.randn(4, 2, 16))
    y.square().sum().backward()
    if optimizer:
        optimizer.step()
        optimizer.zero_grad()
    return y


def shapes(module):
    return {name: tuple(buffer.shape) for name, buffer in module.named_buffers()}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_it_is_what_the_first_call_makes(make):
    made, called = tandem.make_recipe_state(make(), RECIPE), make()
    step(called)
    assert shapes(made) == shapes(called) and shapes(made)
    assert all((buffer == 1).all() for name, buffer in made.named_buffers() if name.endswith("scale"))
    before = dict(made.named_buffers())
    step(made)
    assert all(buffer is before[name] for name, buffer in made.named_buffers())


def test_experts():
    made, called = tandem.make_recipe_state(tandem.GroupedLinear(2, 16, 16), RECIPE), tandem.GroupedLinear(2, 16, 16)
    with tandem.autocast(recipe=RECIPE):
        called(torch.randn(4, 16), [2, 2])
    assert shapes(made) == shapes(called)


def test_what_is_there_stays():
    model = tandem.Linear(16, 16)
    step(model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert tandem.make_recipe_state(model, RECIPE) is model
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    tandem.make_recipe_state(model, tandem.recipe.DelayedScaling(amax_history_len=5))
    assert model.recipe_state.forward.amax_history.shape == (5, 2)
    assert torch.equal(model.recipe_state.forward.amax_history[0], before["recipe_state.forward.amax_history"][0])


def test_recipes_without_a_state_make_none():
    assert not [*tandem.make_recipe_state(tandem.Linear(16, 16), tandem.recipe.MXFP8BlockScaling()).buffers()]
    with pytest.raises(TypeError, match="make_recipe_state: expected recipe to be a recipe of tandem.recipe, got str. Pass for example"):
        tandem.make_recipe_state(tandem.Linear(4, 4), "delayed")


@pytest.mark.parametrize("use_buffers", [False, True])
def test_an_average_of_the_model(use_buffers):
    model = tandem.make_recipe_state(ops.Sequential(ops.LayerNorm(16), ops.Linear(16, 16)), RECIPE)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=use_buffers)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        step(model, optimizer)
        average.update_parameters(model)
    assert [*average.module.state_dict()] == [*model.state_dict()]
    assert step(average.module).isfinite().all()


def test_a_distributed_checkpoint_into_a_fresh_model(tmp_path):
    model = MODELS["TransformerLayer"]()
    for _ in range(2):
        step(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=tmp_path, no_dist=True)
    fresh = tandem.make_recipe_state(MODELS["TransformerLayer"](), RECIPE)
    optimizer = torch.optim.SGD(fresh.parameters(), 0.1)
    state = dict(zip(("model", "optimizer"), get_state_dict(fresh, optimizer), strict=True))
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(fresh, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    scales = {name: buffer for name, buffer in model.state_dict().items() if "recipe_state" in name}
    assert scales and all(torch.equal(fresh.state_dict()[name], buffer) for name, buffer in scales.items())


def test_modules_without_values():
    with torch.device("meta"):
        model = tandem.make_recipe_state(tandem.Linear(16, 16), RECIPE)
    assert model.recipe_state.forward.scale.is_meta
    model.to_empty(device="cpu")
    assert model.recipe_state.forward.scale.shape == (2,)


LOST = "expected recipe_state of every module in the state dict that was loaded, got none of one, or a part. Its scales start afresh."


@pytest.mark.parametrize("prepared", [False, True])
def test_a_state_dict_without_scales_is_told_of_once(prepared):
    model = MODELS["TransformerLayer"]()
    parameters = model.state_dict()
    if prepared:
        tandem.make_recipe_state(model, RECIPE)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        model.load_state_dict(parameters)
        for _ in range(2):
            step(model)
    assert [LOST in str(warning.message) for warning in seen] == [True]


def test_nothing_is_told_where_nothing_is_lost():
    model, fresh, untouched = tandem.Linear(16, 16), tandem.Linear(16, 16), tandem.Linear(16, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model)
        fresh.load_state_dict(tandem.Linear(16, 16).state_dict())
        fresh.load_state_dict(model.state_dict())
        step(fresh)
        untouched.load_state_dict(tandem.Linear(16, 16).state_dict())
        untouched(torch.randn(4, 16))
