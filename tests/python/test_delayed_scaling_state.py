"""The state of DelayedScaling in state dicts, pickles, copies, and on other devices and dtypes."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from delayed import RECIPE, inputs, plain, snapshot, states, trained
from support import assert_equal

import tandem
from tandem import ops
from tandem.recipe import DelayedScaling, Format

NAMES = [f"recipe_state.{way}.{name}" for way in ("forward", "backward") for name in ("scale", "amax_history")]


def test_state_is_in_state_dicts_without_pickle():
    linear = trained(plain)
    assert [name for name in linear.state_dict() if "recipe" in name] == NAMES
    file = io.BytesIO()
    torch.save(linear.state_dict(), file)
    file.seek(0)
    fresh = ops.Linear(8, 8)
    assert not fresh.load_state_dict(torch.load(file, weights_only=True)).missing_keys
    for module in (linear, fresh):
        module.zero_grad()
        plain(module, inputs(1)[0].requires_grad_())
    assert_equal(fresh.state_dict(), linear.state_dict())
    assert torch.equal(fresh.weight.grad, linear.weight.grad)


def test_what_is_pending_is_of_another_process_once_pickled():
    linear = ops.Linear(8, 8)
    with tandem.autocast(recipe=RECIPE):
        loss = linear(inputs(1)[0]).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert states(linear)[1].pending.item() > 0
    loaded = pickle.loads(pickle.dumps(linear))
    assert states(loaded)[1].pending.item() == -1
    for module in (linear, loaded):
        plain(module, inputs(1)[0].requires_grad_())
    assert_equal(snapshot(loaded), snapshot(linear))


def test_state_is_loaded_onto_meta_modules_and_in_other_dtypes():
    linear = trained(plain)
    saved = {name: tensor.double() if "recipe" in name else tensor for name, tensor in linear.state_dict().items()}
    with torch.device("meta"):
        loaded = ops.Linear(8, 8)
    loaded.load_state_dict(saved, assign=True)
    for module in (linear, loaded):
        module.zero_grad()
        plain(module, inputs(1)[0].requires_grad_())
    assert_equal(loaded.state_dict(), linear.state_dict())
    emptied = linear.to("meta").to_empty(device="cpu")
    assert not any(state.pending.any() for state in states(emptied))


def test_a_fresh_module_has_no_state_and_loads_none():
    linear = ops.Linear(8, 8)
    assert list(linear.state_dict()) == ["weight", "bias"]
    plain(linear, inputs(1)[0].requires_grad_())
    with pytest.warns(UserWarning, match=r"expected recipe_state of every module in the state dict that was loaded, got none of one, or a part"):
        linear.load_state_dict(ops.Linear(8, 8).state_dict())
    assert states(linear)[0].scale.tolist() == [1, 1] and states(linear)[0].amax_history.count_nonzero() == 0


def test_histories_of_another_length_keep_the_newest():
    linear = trained(plain, steps=5)
    history = states(linear)[0].amax_history.clone()
    longer, shorter = (DelayedScaling(amax_history_len=length, fp8_format=Format.E4M3) for length in (6, 2))
    with torch.no_grad(), tandem.autocast(recipe=longer):
        linear(torch.zeros(4, 8))
    assert torch.equal(states(linear)[0].amax_history[3:, 0], history[1:, 0])
    assert states(linear)[0].amax_history[1:3].count_nonzero() == 0
    with torch.no_grad(), tandem.autocast(recipe=shorter):
        linear(torch.zeros(4, 8))
    assert torch.equal(states(linear)[0].amax_history[1, 0], history[3, 0])
    fresh = ops.Linear(8, 8)
    plain(fresh, inputs(1)[0].requires_grad_())
    fresh.load_state_dict(linear.state_dict())
    assert states(fresh)[0].amax_history.shape == (4, 2) and torch.equal(states(fresh)[0].amax_history[3], history[3])


def test_state_of_another_module_is_refused():
    linear, other = trained(plain), tandem.LayerNormMLP(8, 16)
    with tandem.autocast(recipe=RECIPE):
        other(inputs(1)[0])
    assert states(other)[0].scale.shape == (4,) and states(other)[1].scale.shape == (2,)
    wrong = {**linear.state_dict(), **{name: other.state_dict()[name] for name in NAMES}}
    with pytest.raises(RuntimeError, match=r"recipe_state.forward: expected scaling state with 2 slots, got scale of shape \(4,\)"):
        linear.load_state_dict(wrong)


def test_state_follows_the_module_and_stays_float32():
    linear = trained(plain).to(torch.bfloat16)
    assert linear.weight.dtype == torch.bfloat16
    assert {tensor.dtype for name, tensor in linear.state_dict().items() if "recipe" in name} == {torch.float32}
    copied = copy.deepcopy(linear)
    plain(copied, torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True))
    assert not torch.equal(states(copied)[0].amax_history, states(linear)[0].amax_history)
    assert "recipe_state.forward.scale" in dict(linear.named_buffers())
    y = torch.func.functional_call(linear, {"recipe_state.forward.scale": torch.ones(2)}, torch.zeros(4, 8, dtype=torch.bfloat16))
    assert y.shape == (4, 8)
