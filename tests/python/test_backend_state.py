"""What recipes keep for products of compiled models: each has its own, all graphs go on with it, and it is saved and loaded beside the model."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from support import assert_equal
from torch import nn

import tandem
from tandem.recipe import DelayedScaling, MXFP8BlockScaling
from tandem.state import compiled as compiled_state

SIZE = 16
RECIPE = DelayedScaling(amax_history_len=4)


class Block(nn.Module):
    """Two products of one x, one behind them, and one whose weight is computed."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(SIZE, SIZE, bias=False) for _ in range(3))
        self.weight, self.change = (nn.Parameter(torch.randn(SIZE, SIZE) * 0.2) for _ in range(2))

    def forward(self, x):
        h = x + self.down(F.silu(self.gate(x)) * self.up(x))
        return h + F.linear(h.sin(), self.weight + self.change)


PRODUCTS = ["{0}.gate.weight+{0}.up.weight", "{0}.down.weight", "{0}.weight+{0}.change"]


def blocks(count=2):
    torch._dynamo.reset()
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(count)))


@pytest.fixture
def x(fresh_dynamo):
    return torch.randn(3, 5, SIZE)


def scales(model):
    return {name.removesuffix(".forward.scale"): scale for name, scale in tandem.recipe_state_dict(model).items() if name.endswith("forward.scale")}


def step(compiled, optimizer, x):
    optimizer.zero_grad()
    loss = compiled(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


WAYS = {
    "tandem.compile": lambda model: tandem.compile(model, recipe=RECIPE),
    "compile in place": lambda model: (model.compile(backend="tandem", options={"recipe": RECIPE}), model)[1],
    "each layer": lambda model: ([layer.compile(backend="tandem", options={"recipe": RECIPE}) for layer in model], model)[1],
}


def started(way):
    model = blocks()
    return model, WAYS[way](model), torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("is_called", [False, True], ids=["before the first call", "after it"])
@pytest.mark.parametrize("way", WAYS)
def test_a_run_goes_on_where_it_was_saved(x, way, is_called, tmp_path):
    """The fourth step has the bits of a run that was not interrupted."""
    model, compiled, optimizer = started(way)
    for k in range(3):
        step(compiled, optimizer, x * 3.0**k)
    torch.save([model.state_dict(), optimizer.state_dict(), tandem.recipe_state_dict(compiled)], tmp_path / "saved")
    assert not any("scale" in name for name in model.state_dict())
    expected = step(compiled, optimizer, x)

    again, compiled, optimizer = started(way)
    if is_called:
        step(compiled, optimizer, x * 100)
    weights, moments, state = torch.load(tmp_path / "saved", weights_only=True)
    again.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    without_state = copy.deepcopy(again)
    tandem.load_recipe_state_dict(again, state)
    assert_equal(tandem.recipe_state_dict(compiled), state)
    assert torch.equal(step(compiled, optimizer, x), expected)
    assert_equal([*again.parameters()], [*model.parameters()])
    assert tandem.recipe_state_dict(model).keys() == state.keys()
    assert_equal(tandem.recipe_state_dict(again), tandem.recipe_state_dict(model))
    assert not torch.equal(WAYS[way](without_state)(x).square().mean(), expected)


@pytest.mark.parametrize("way", WAYS)
def test_each_layer_has_a_state_of_its_own(x, way):
    """Layers that share a graph do not share it, also where a weight is computed. What is kept is what torch says."""
    model, compiled, _ = started(way)
    seen = []
    for layer in model:
        layer.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0].abs().max()))
    compiled(x).sum().backward()
    state = tandem.recipe_state_dict(model)
    assert {*scales(model)} == {product.format(at) for at in range(2) for product in PRODUCTS}
    for at, layer in enumerate(model):
        rows, weight = state[f"{at}.gate.weight+{at}.up.weight.forward.amax_history"][-1]
        assert weight == torch.cat([layer.gate.weight, layer.up.weight]).abs().max()
        torch.testing.assert_close(rows, seen[at])
        assert state[f"{at}.weight+{at}.change.forward.amax_history"][-1, 1] == (layer.weight + layer.change).abs().max()
        assert state[f"{at}.down.weight.backward.amax_history"][-1] > 0


def test_graphs_of_other_shapes_and_of_evaluation_go_on_with_it(x):
    model = blocks(1)
    compiled = tandem.compile(model, recipe=RECIPE)
    name = "0.gate.weight+0.up.weight.forward.amax_history"
    for factor, rows in ((1, 5), (2, 4), (4, 3)):  # the second is compiled anew, for any shape
        compiled(factor * x[:, :rows]).sum().backward()
    kept = tandem.recipe_state_dict(model)[name]
    assert kept[1:, 0].tolist() == [(factor * x[:, :rows]).abs().max().item() for factor, rows in ((1, 5), (2, 4), (4, 3))]
    with torch.no_grad():
        compiled(100 * x)
    assert tandem.recipe_state_dict(model)[name][0, 0] == (100 * x).abs().max()
    assert len(scales(model)) == len(PRODUCTS)


class Twice(nn.Module):
    """A product whose weight is multiplied by in two places, one of them as it lies."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(SIZE, SIZE)
        self.register_buffer("fixed", torch.randn(SIZE, SIZE))

    def forward(self, x):
        return F.linear(self.up(self.up(x).sin()).sin() @ self.up.weight, self.fixed)


def test_every_product_of_a_graph_has_a_name(x):
    model = Twice()
    tandem.compile(model, recipe=RECIPE)(x)
    assert [*scales(model)] == ["up.weight", "up.weight#2", "up.weight#3", "fixed"]


def test_a_region_of_the_caller_counts(x):
    """The recipe may be that of a region around the call; its steps are the region's."""
    model = blocks(1)
    compiled = tandem.compile(model)
    compiled(x)
    assert tandem.recipe_state_dict(model) == {}
    with tandem.autocast(recipe=RECIPE):
        compiled(x), compiled(2 * x)
    assert tandem.recipe_state_dict(model)["0.gate.weight+0.up.weight.forward.amax_history"][:, 0].tolist() == [0, 0, 0, 2 * x.abs().max().item()]


def test_state_ends_with_its_model(x):
    model = blocks(1)
    tandem.compile(model, recipe=RECIPE)(x)
    held = [weakref.ref(each) for each in compiled_state._all[model[0].down.weight].states.values()]
    del model
    gc.collect()
    assert held and not any(each() for each in held)


def test_histories_of_another_length_keep_the_newest(x):
    model = blocks(1)
    compiled = tandem.compile(model, recipe=RECIPE)
    for k in range(4):
        compiled(x * 2.0**k)
    state = tandem.recipe_state_dict(model)
    other = blocks(1)
    tandem.load_recipe_state_dict(other, state)
    with torch.no_grad():  # no step
        tandem.compile(other, recipe=DelayedScaling(amax_history_len=3))(0 * x)
    name = "0.gate.weight+0.up.weight.forward.amax_history"
    assert torch.equal(tandem.recipe_state_dict(other)[name][1:], state[name][2:])


def saved(x):
    model = blocks(1)
    tandem.compile(model, recipe=RECIPE)(x)
    return tandem.recipe_state_dict(model)


MISSING = r"load_recipe_state_dict: expected the state of all products, got none of {}. Load what was saved after a call of it, or pass strict=False, with which what"
WRONG = "load_recipe_state_dict: expected a recipe that keeps state for 0.down.weight, as it was saved with, got {}. Compile the model with that recipe, such as tandem.recipe.DelayedScaling"


def test_unknown_keys(x):
    state = saved(x)
    scale = state["0.down.weight.forward.scale"]
    for key in ("0.old.weight.forward.scale", "0.down.weight.forward.zoom", "0.down.weight", "0.down.weight#b.forward.scale", "0.down.weight+0.old.weight.forward.scale"):
        with pytest.raises(ValueError, match="expected names of parameters of the model, each with .forward or .backward and .scale or .amax_history behind it, got '.*'. Load the state of the same model") as error:
            tandem.load_recipe_state_dict(blocks(1), {**state, key: scale})
        assert repr(key) in str(error.value)


def test_missing_keys(x):
    state = saved(x)
    with pytest.raises(ValueError, match=MISSING.format("0.down.weight.backward.scale")):
        tandem.load_recipe_state_dict(blocks(1), {name: tensor for name, tensor in state.items() if name != "0.down.weight.backward.scale"})
    part = {name: tensor for name, tensor in state.items() if "down" not in name}
    model = blocks(1)
    compiled = tandem.compile(model, recipe=RECIPE)
    tandem.load_recipe_state_dict(model, part)
    with pytest.raises(ValueError, match=MISSING.format("0.down.weight")):  # which only a call can tell
        compiled(x)
    tandem.load_recipe_state_dict(model, part, strict=False)
    compiled(x)
    before = tandem.recipe_state_dict(model)
    with pytest.raises(ValueError, match=MISSING.format("0.down.weight")):
        tandem.load_recipe_state_dict(model, part)
    assert_equal(tandem.recipe_state_dict(model), before)  # an error changes nothing


EMPTY = "load_recipe_state_dict: expected the state of products, got an empty dict, as recipe_state_dict gives it before the first call. Where the recipe keeps state, call"


def test_an_empty_dict_is_refused(x):
    """But where a call has shown that the recipe keeps no state: that is what was saved."""
    model = blocks(1)
    compiled = tandem.compile(model, recipe=RECIPE)
    with pytest.raises(ValueError, match=EMPTY):
        tandem.load_recipe_state_dict(model, tandem.recipe_state_dict(model))
    tandem.load_recipe_state_dict(model, {}, strict=False)
    compiled(x)
    with pytest.raises(ValueError, match=EMPTY):
        tandem.load_recipe_state_dict(model, {})
    other = blocks(1)
    tandem.compile(other, recipe=MXFP8BlockScaling())(x)
    tandem.load_recipe_state_dict(other, tandem.recipe_state_dict(other))


def test_distributed_checkpoints(x, tmp_path):
    """They load into what is there: into a model that was called once."""
    import torch.distributed.checkpoint as dcp

    model, again = blocks(1), blocks(1)
    compiled, compiled_again = (tandem.compile(each, recipe=RECIPE) for each in (model, again))
    for each in (compiled, compiled, compiled_again):
        each(3 * x).sum().backward()
    dcp.save({"model": model.state_dict(), "recipe": tandem.recipe_state_dict(model)}, checkpoint_id=tmp_path, no_dist=True)
    loaded = {"model": again.state_dict(), "recipe": tandem.recipe_state_dict(again)}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    tandem.load_recipe_state_dict(again, loaded["recipe"])
    assert torch.equal(compiled_again(x), compiled(x))


def test_make_recipe_state_says_what_a_compiled_model_needs():
    with pytest.warns(UserWarning, match="make_recipe_state: expected a module with ops of this library, got Sequential without, for which nothing is made. If the backend of torch.compile runs it, call it once"):
        tandem.make_recipe_state(blocks(1), RECIPE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tandem.make_recipe_state(blocks(1), MXFP8BlockScaling())
        tandem.make_recipe_state(torch.nn.ReLU(), RECIPE)


def test_a_recipe_without_state(x):
    state = {name: tensor for name, tensor in saved(x).items() if "down" in name}
    for low, told in ((MXFP8BlockScaling(), "MXFP8BlockScaling"), (None, "none")):
        model = blocks(1)
        compiled = tandem.compile(model, recipe=low)
        tandem.load_recipe_state_dict(model, state)
        with pytest.warns(UserWarning, match=WRONG.format(told)):
            compiled(x)
        model = blocks(1)
        tandem.load_recipe_state_dict(model, state, strict=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tandem.compile(model, recipe=low)(x)
        other = blocks(1)
        tandem.compile(other, recipe=low)(x)
        with pytest.raises(ValueError, match=WRONG.format(told)):
            tandem.load_recipe_state_dict(other, state)
        assert tandem.recipe_state_dict(other) == {}


@pytest.mark.filterwarnings("error")
def test_validation_under_another_recipe_is_no_mistake(x):
    state = saved(x)
    model = blocks(1)
    tandem.load_recipe_state_dict(model, state)
    compiled = tandem.compile(model)
    for low in (RECIPE, MXFP8BlockScaling(), RECIPE):
        with torch.no_grad(), tandem.autocast(recipe=low):
            compiled(x)
    assert tandem.recipe_state_dict(model).keys() == state.keys()


@pytest.mark.parametrize("wrong", [{"scale": torch.ones(3)}, {"amax_history": torch.ones(2)}, {"amax_history": torch.ones(0, 2)}, {"amax_history": torch.ones(4, 1)}, {"scale": 1}])
def test_other_shapes(x, wrong):
    state = saved(x) | {f"0.down.weight.forward.{name}": tensor for name, tensor in wrong.items()}
    with pytest.raises(ValueError, match=r"expected 0.down.weight.forward with scale \[2\] and amax_history \[length, 2\], got .* and .*. Load what recipe_state_dict has given"):
        tandem.load_recipe_state_dict(blocks(1), state)


def test_only_modules_have_state():
    with pytest.raises(TypeError, match="recipe_state_dict: expected a module, got function. Pass the model, or what torch.compile has made of it"):
        tandem.recipe_state_dict(lambda x: x)
    with pytest.raises(TypeError, match="load_recipe_state_dict: expected a module, got int. Pass the model"):
        tandem.load_recipe_state_dict(1, {})
