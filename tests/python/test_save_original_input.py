"""`save_original_input`: x is kept as it is and quantized again in backward, to the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import assert_equal, bytes_kept, results_of

import tandem
from tandem import ops
from tandem.modules import functional

RECIPES = ["Float8CurrentScaling", "DelayedScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling"]
HIDDEN = 64
ROWS = 32


def product(saves: bool, x_seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[tandem.Linear, torch.Tensor]:
    torch.manual_seed(3)
    linear = tandem.Linear(HIDDEN, HIDDEN, save_original_input=saves, params_dtype=dtype, **options)
    x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(x_seed)).to(dtype)
    return linear, x


def step(linear: torch.nn.Module, x: torch.Tensor, recipe: Any) -> tuple[list[torch.Tensor], int]:
    box = ops.Sequential(linear)
    x = x.detach().requires_grad_()
    torch.manual_seed(5)
    with tandem.autocast(recipe=recipe):
        y = box(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype))
    return [y.detach(), x.grad, *(p.grad for p in linear.parameters())], box.saved_bytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", RECIPES)
def test_the_bits_are_those_of_kept_codes_and_no_codes_of_x_are_kept(name: str, dtype: torch.dtype) -> None:
    recipe = getattr(tandem.recipe, name)
    given, coded = (step(*product(saves, dtype=dtype), recipe()) for saves in (True, False))
    assert_equal(given[0], coded[0])
    codes_of_x = ROWS * HIDDEN // 2 if name == "NVFP4BlockScaling" else ROWS * HIDDEN
    assert coded[1] - given[1] >= codes_of_x - 8  # scales and seeds, of a few bytes, are kept in their place
    weight_codes = HIDDEN * HIDDEN if name == "DelayedScaling" else 0
    assert given[1] <= weight_codes + 16


def test_a_cast_input_is_cast_again() -> None:
    kept = []
    for saves in (True, False):
        linear, x = product(saves)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            kept.append(step(linear, x, tandem.recipe.Float8CurrentScaling()))
    assert_equal(kept[0][0], kept[1][0])
    assert kept[0][1] <= 16 < kept[1][1]


def test_behind_another_op_its_result_is_kept() -> None:
    torch.manual_seed(0)
    boxes = [ops.Sequential(ops.Dropout(0.5), tandem.Linear(HIDDEN, HIDDEN, bias=False, save_original_input=saves)) for saves in (True, False)]
    boxes[1].load_state_dict(boxes[0].state_dict())
    results = []
    for box in boxes:
        x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(0))
        results.append((results_of(box, x, recipe=tandem.recipe.Float8CurrentScaling(), seed=7), box.saved_bytes()))
    assert_equal(results[0][0], results[1][0])
    assert results[0][1] - results[1][1] > 3 * ROWS * HIDDEN - 64


@pytest.mark.parametrize("override", ["dequantized", "high_precision"])
def test_with_an_override_of_backward(override: str) -> None:
    recipe = tandem.recipe.Float8CurrentScaling
    given, coded = (step(*product(saves), recipe(backward_override=override)) for saves in (True, False))
    assert_equal(given[0], coded[0])
    assert given[1] <= 16


@pytest.mark.parametrize("delayed", [False, True])
def test_beside_gradients_that_go_elsewhere(delayed: bool) -> None:
    results = []
    for saves in (True, False):
        linear, x = product(saves, delay_wgrad_compute=delayed, fuse_wgrad_accumulation=True)
        linear.weight.main_grad = torch.ones(HIDDEN, HIDDEN)
        step(linear, x, tandem.recipe.MXFP8BlockScaling())
        if delayed:
            assert torch.equal(linear.weight.main_grad, torch.ones(HIDDEN, HIDDEN))
            linear.backward_dw()
        results.append(linear.weight.main_grad)
    assert torch.equal(*results)
    assert not torch.equal(results[0], torch.ones(HIDDEN, HIDDEN))


def test_the_input_may_not_change_before_backward() -> None:
    linear, x = product(True)
    x = x * 1
    with tandem.autocast(recipe=tandem.recipe.Float8CurrentScaling()):
        y = linear(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_the_choice_may_change_between_calls() -> None:
    linear, x = product(False)
    box = ops.Sequential(linear)
    sizes = []
    for saves in (False, True, False):
        linear.basic_ops[0].save_original_input = saves
        with tandem.autocast(recipe=tandem.recipe.MXFP8BlockScaling()):
            box(x.requires_grad_())
        sizes.append(box.saved_bytes())
    assert sizes[0] == sizes[2] > sizes[1]


@pytest.mark.parametrize("name", RECIPES)
def test_compiled(name: str, fresh_dynamo: None) -> None:
    recipe = getattr(tandem.recipe, name)()
    results = []
    for is_compiled in (False, True):
        linear, x = product(True)
        call = torch.compile(linear, fullgraph=True, backend="aot_eager") if is_compiled else linear
        results.append(results_of(call, x, recipe=recipe, seed=2))
    if name == "NVFP4BlockScaling":  # compiled code draws other seeds
        return
    assert_equal(*results)


def test_plain_functions_leave_the_codes_out() -> None:
    linear, x = product(True)
    saved = []
    gradients = []
    for saves in (False, True):
        args = functional.LinearArgs(
            inp=x, weight=linear.weight.detach(), bias=linear.bias.detach(), recipe=tandem.recipe.MXFP8BlockScaling(), save_original_input=saves
        )
        context = functional.linear_setup_context(args, functional.linear_forward(args))
        saved.append(context.saved_bytes())
        gradients.append(functional.linear_backward(context, torch.ones(ROWS, HIDDEN)))
    assert saved[1] <= saved[0] - ROWS * HIDDEN
    for field in gradients[0]:
        assert torch.equal(gradients[0][field], gradients[1][field])


def test_other_values_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^Linear: expected save_original_input to be True or False, got 'yes'"):
        tandem.Linear(8, 8, save_original_input="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^BasicLinear: expected save_original_input to be True or False, got None"):
        ops.BasicLinear(8, 8, save_original_input=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_layer_keeps_what_attention_keeps(dropout: float) -> None:
    """With dropout attention does not keep its result: then codes are less."""
    layer = tandem.TransformerLayer(64, 128, 4, hidden_dropout=0, attention_dropout=dropout)
    assert layer.self_attention.proj.basic_ops[0].save_original_input == (dropout == 0)


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "DelayedScaling"])
def test_a_layer_keeps_no_more_than_without_a_recipe(name: str) -> None:
    """All storages that autograd holds, parameters aside."""

    def kept(recipe: Any) -> int:
        torch.manual_seed(0)
        layer = tandem.TransformerLayer(64, 256, 4, hidden_dropout=0, attention_dropout=0)
        x = torch.randn(32, 2, 64, requires_grad=True)
        with tandem.autocast(enabled=recipe is not None, recipe=recipe):
            y, size = bytes_kept(lambda: layer(x), *layer.parameters())
        y.sum().backward()
        return size

    assert kept(getattr(tandem.recipe, name)()) <= kept(None) * 1.001
