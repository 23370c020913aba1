"""Experts under DelayedScaling: each group has scales of its own, which are those of a Linear of its own."""

from __future__ import annotations

import copy

import pytest
import torch
from delayed import settled, states
from experts import gradients_by_group, linears_of, made
from support import assert_equal

import tandem
from tandem import ops
from tandem.recipe import DelayedScaling, Float8CurrentScaling, Format

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

GROUPS, ROWS = 4, 40
RECIPE = DelayedScaling(amax_history_len=4, fp8_format=Format.E4M3)
STEPS = [[10, 0, 5, 25], [0, 40, 0, 0], [1, 2, 3, 30], [0, 0, 0, 0], [10, 10, 10, 10]]  # the third leaves rows behind


def batches(count=len(STEPS), features=64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(ROWS, features, generator=generator) * 2.0**step for step in range(count)]


def gradients(y):
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)


def step(module, x, splits, recipe=RECIPE, call=None):
    module.zero_grad()
    x = x.detach().requires_grad_()
    with tandem.autocast(recipe=recipe):
        y = (module if call is None else call)(x, torch.tensor(splits))
    y.backward(gradients(y))
    return y.detach(), x.grad, gradients_by_group(module, "weight", GROUPS)


def tables(module):
    """What is kept, as [groups] of x, weights and gradients, the next scale first."""
    forward, backward = (settled(state) for state in states(module))
    return [(forward[0][0::2], forward[1][:, 0::2]), (forward[0][1::2], forward[1][:, 1::2]), backward]


def step_of_linears(linears, x, splits, recipe):
    """The same by a Linear for each group."""
    x = x.detach().requires_grad_()
    used = sum(splits)
    with tandem.autocast(recipe=recipe):
        parts = [linear(rows) for linear, rows in zip(linears, x[:used].split(splits), strict=True)]
    y = torch.cat([*parts, torch.zeros(len(x) - used, 48, dtype=x.dtype)])
    y.backward(gradients(y))
    grads = [linear.weight.grad for linear in linears]
    for linear in linears:
        linear.zero_grad()
    return y.detach(), x.grad, grads


@pytest.mark.parametrize("fp8_format", [Format.E4M3, Format.HYBRID], ids=["E4M3", "HYBRID"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_group_is_what_a_linear_of_its_own_is(dtype, packed, fp8_format):
    recipe = DelayedScaling(amax_history_len=4, fp8_format=fp8_format)
    module = made(GROUPS, 64, 48, dtype=dtype, bias=False, single_grouped_weight=packed)
    linears = linears_of(module)
    for x, splits in zip(batches(), STEPS, strict=True):
        assert_equal(step(module, x.to(dtype), splits, recipe), step_of_linears(linears, x.to(dtype), splits, recipe))
        forward, backward = states(module)
        for g, linear in enumerate(linears):
            own_forward, own_backward = states(linear)
            for name in ("scale", "amax_history"):
                kept, own = getattr(forward, name), getattr(own_forward, name)
                assert torch.equal(kept[..., 2 * g : 2 * g + 2], own), (name, g, splits)
                assert torch.equal(getattr(backward, name)[..., g : g + 1], getattr(own_backward, name)), (name, g, splits)


@pytest.mark.parametrize("packed", [False, True])
def test_compiled(packed):
    module = made(GROUPS, 64, 48, single_grouped_weight=packed)
    other = copy.deepcopy(module)
    compiled = torch.compile(other, fullgraph=True)
    for x, splits in zip(batches(), STEPS, strict=True):
        expected, actual = step(module, x, splits), step(other, x, splits, call=compiled)
        for own, wanted in ((actual[0], expected[0]), (actual[1], expected[1]), *zip(actual[2], expected[2], strict=True)):
            torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-5 * max(1.0, wanted.abs().max().item()))
        assert_equal(tables(other), tables(module))


UNITS = {
    "SwiGLU": (ops.SwiGLU, 2, "grouped_mlp_glu"),
    "GELU": (ops.GELU, 1, "grouped_mlp_activation"),
    "ScaledSwiGLU": (ops.ScaledSwiGLU, 2, "grouped_mlp_scaled_glu"),
    "ScaledSReLU": (ops.ScaledSReLU, 1, "grouped_mlp_scaled_activation"),
}
FROZEN = {  # names of parameters that ask for no gradient, and whether x does
    "all": ((), True),
    "no x": ((), False),
    "first weights": (("0.weight",), True),
    "all weights": (("0.weight", "2.weight"), True),
    "one group": (("0.weight1", "2.weight2"), False),
    "second layer": (("2.",), False),
}


def experts(unit, packed=False, **arguments):
    made_of, factor, _ = UNITS[unit]
    return ops.Sequential(
        made(GROUPS, 64, 48 * factor, single_grouped_weight=packed, **arguments), made_of(), made(GROUPS, 48, 64, single_grouped_weight=packed, **arguments)
    )


def train(box, unit, x, splits, needs_x=True, fused=True, recipe=RECIPE):
    """Output and gradients by name of one step, as one pipeline or op by op."""
    box.zero_grad()
    leaf, counts = x.detach().requires_grad_(needs_x), torch.tensor(splits)
    scales = [torch.rand(len(x), generator=torch.Generator().manual_seed(2)).requires_grad_()] if unit.startswith("Scaled") else []
    with tandem.autocast(recipe=recipe):
        if fused:
            y = box(leaf, counts, *scales, counts) if len(box) == 3 else box(leaf, counts)
        else:
            y = box[2](box[1](box[0](leaf, counts), *scales), counts)
    y.backward(gradients(y))
    found = {"y": y.detach(), "x": leaf.grad, **{name: param.grad for name, param in box.named_parameters()}}
    return found | {f"scales {i}": scale.grad for i, scale in enumerate(scales)}


def same_tables(box, other):
    for mine, theirs in zip(box, other, strict=True):
        if isinstance(mine, ops.GroupedLinear):
            assert_equal(tables(mine), tables(theirs))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("unit", UNITS)
def test_experts_are_one_fusion_with_the_bits_of_their_ops(unit, packed):
    box = experts(unit, packed)
    other = copy.deepcopy(box)
    for x, splits in zip(batches(), STEPS, strict=True):
        assert_equal(train(box, unit, x, splits), train(other, unit, x, splits, fused=False))
        same_tables(box, other)
    assert f"made    {UNITS[unit][2]} " in box.explain()
    scales = [torch.rand(ROWS)] if unit.startswith("Scaled") else []
    counts = torch.tensor(STEPS[0])
    with tandem.autocast(recipe=RECIPE):
        report = tandem.verify(box, batches()[0].requires_grad_(), counts, *scales, counts)
    assert report, report


@pytest.mark.parametrize("frozen", FROZEN)
def test_amaxes_of_a_fusion_are_those_of_the_products_that_run(frozen):
    names, needs_x = FROZEN[frozen]
    box = experts("SwiGLU")
    for name, param in box.named_parameters():
        param.requires_grad_(not name.startswith(names) if names else True)
    other = copy.deepcopy(box)
    for x, splits in zip(batches(3), STEPS, strict=False):
        assert_equal(train(box, "SwiGLU", x, splits, needs_x), train(other, "SwiGLU", x, splits, needs_x, fused=False))
        same_tables(box, other)


def test_a_fusion_compiled_checkpointed_and_without_gradients():
    box, x = experts("SwiGLU"), batches()[1]
    compiled, checkpointed, counts = copy.deepcopy(box), copy.deepcopy(box), torch.tensor(STEPS[0])
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        results = []
        for each in (box, run, checkpointed):
            leaf = x.detach().requires_grad_()
            with tandem.autocast(recipe=RECIPE):
                y = tandem.checkpoint(each, leaf, counts, counts) if each is checkpointed else each(leaf, counts, counts)
            y.backward(gradients(y))
            results.append((y.detach(), leaf.grad))
        for actual in results[1:]:
            torch.testing.assert_close(actual, results[0], rtol=1e-5, atol=1e-5 * results[0][1].abs().max().item())
        same_tables(checkpointed, box)
        torch.testing.assert_close([tables(compiled[at]) for at in (0, 2)], [tables(box[at]) for at in (0, 2)])
    with torch.no_grad(), tandem.autocast(recipe=RECIPE):
        y = box(x, counts, counts)
    with torch.no_grad(), tandem.autocast(recipe=RECIPE):
        assert torch.equal(y, checkpointed[2](checkpointed[1](checkpointed[0](x, counts)), counts))
    assert "made    grouped_mlp_glu_forward " in box.explain() or "made    grouped_mlp_glu " in box.explain()


def test_splits_that_differ_between_the_products():
    box = experts("SwiGLU")
    other, x, first, second = copy.deepcopy(box), batches()[0], torch.tensor([10, 0, 5, 25]), torch.tensor([0, 20, 10, 10])
    for _ in range(2):
        results = []
        for each, fused in ((box, True), (other, False)):
            leaf = x.detach().requires_grad_()
            with tandem.autocast(recipe=RECIPE):
                y = each(leaf, first, second) if fused else each[2](each[1](each[0](leaf, first)), second)
            results.append([y.detach(), *torch.autograd.grad(y, [leaf, *each.parameters()], gradients(y))])
        torch.testing.assert_close(*results)
        same_tables(box, other)


def test_calibrating_experts_are_no_fusion():
    box, x, counts = experts("SwiGLU"), batches()[0].requires_grad_(), torch.tensor(STEPS[0])
    other = copy.deepcopy(box)
    with tandem.autocast(enabled=False, calibrating=True, recipe=RECIPE):
        y = box(x, counts, counts)
    y.backward(gradients(y))
    assert "the amaxes of numbers that no product quantizes are kept (calibrating)" in box.explain()
    with tandem.autocast(enabled=False, calibrating=True, recipe=RECIPE):
        y = other[2](other[1](other[0](x, counts)), counts)
    y.backward(gradients(y))
    same_tables(box, other)


def test_calibrating_keeps_amaxes_and_multiplies_numbers():
    for packed in (False, True):
        module = made(GROUPS, 64, 48, single_grouped_weight=packed)
        other = copy.deepcopy(module)
        x, splits = batches()[0], STEPS[0]
        module.zero_grad()
        leaf = x.detach().requires_grad_()
        with tandem.autocast(enabled=False, calibrating=True, recipe=RECIPE):
            y = module(leaf, torch.tensor(splits))
        y.backward(gradients(y))
        plain = other(x, torch.tensor(splits))
        assert torch.equal(y, plain)
        step(other, x, splits)
        assert_equal(tables(module), tables(other))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("is_mlp", [False, True])
def test_main_grads_and_delayed_gradients(is_mlp, packed):
    def box_of(**arguments):
        return experts("SwiGLU", packed, **arguments) if is_mlp else ops.Sequential(made(GROUPS, 64, 48, single_grouped_weight=packed, **arguments))

    plain, later = box_of(), box_of(delay_wgrad_compute=True)
    later.load_state_dict(plain.state_dict())
    into, grouped = copy.deepcopy(plain), (0, 2) if is_mlp else (0,)
    for at in grouped:
        into[at].accumulate_into_main_grad = True
    for x, splits in zip(batches(3), STEPS, strict=False):
        for param in into.parameters():
            param.main_grad = torch.zeros_like(param)
        expected = train(plain, "SwiGLU", x, splits)
        for box in (into, later):
            found = train(box, "SwiGLU", x, splits)
            assert torch.equal(found["y"], expected["y"]) and torch.equal(found["x"], expected["x"])
        for at in grouped:
            later[at].backward_dw()
            for name in plain[at]._main_grad_names:
                wanted = expected[f"{at}.{name}"]
                assert torch.equal(getattr(into[at], name).main_grad, wanted) and torch.equal(getattr(later[at], name).grad, wanted), name
        for box in (into, later):
            same_tables(box, plain)
            assert ("made    grouped_mlp_glu " in box.explain()) == is_mlp


def test_amaxes_are_kept_whichever_gradients_are_asked_for():
    expected = made(GROUPS, 64, 48)
    step(expected, batches()[0], STEPS[0])
    for frozen, needs_x in ((True, True), (False, False)):
        module = made(GROUPS, 64, 48)
        module.load_state_dict({name: tensor for name, tensor in expected.state_dict().items() if "recipe_state" not in name})
        for name in module._main_grad_names:
            getattr(module, name).requires_grad_(not frozen)
        x = batches()[0].requires_grad_(needs_x)
        with tandem.autocast(recipe=RECIPE):
            y = module(x, torch.tensor(STEPS[0]))
        y.backward(gradients(y))
        assert_equal(tables(module), tables(expected))


def test_state_is_saved_and_loaded():
    module, other = made(GROUPS, 64, 48), made(GROUPS, 64, 48)
    step(module, batches()[0], STEPS[0])
    step(module, batches()[1], STEPS[1])
    saved = module.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in saved.items() if "recipe_state" in name}
    assert shapes == {
        "recipe_state.forward.scale": (2 * GROUPS,),
        "recipe_state.forward.amax_history": (4, 2 * GROUPS),
        "recipe_state.backward.scale": (GROUPS,),
        "recipe_state.backward.amax_history": (4, GROUPS),
    }
    other.load_state_dict(saved)
    assert_equal(step(other, batches()[2], STEPS[2]), step(module, batches()[2], STEPS[2]))
    with pytest.raises(RuntimeError, match="expected scaling state with 4 slots, got scale of shape"):
        ops.GroupedLinear(2, 64, 48).load_state_dict({name: tensor for name, tensor in saved.items() if name[-1] not in "23"})


def test_quantizers_are_told_as_transformer_engine_orders_them():
    for module in (ops.GroupedLinear(3, 64, 48), tandem.GroupedLinear(3, 64, 48)):
        assert (module.num_quantizers("forward"), module.num_quantizers("backward")) == (6, 3)
        assert module.get_quantizer("forward", 5) is None
        with tandem.autocast(recipe=RECIPE):
            module(torch.randn(6, 64), torch.tensor([1, 2, 3]))
        with tandem.autocast(recipe=RECIPE):
            module(torch.randn(6, 64), torch.tensor([1, 2, 3]))
            for g in range(3):
                for role in range(2):
                    found = module.get_quantizer("forward", 2 * g + role)
                    assert isinstance(found, tandem.Float8Quantizer) and found.scale == module.recipe_state.forward.scale[2 * g + role]
                torch.testing.assert_close(found.scale, 448 / getattr(module, f"weight{g}").detach().abs().amax()[None])
        with tandem.autocast(recipe=Float8CurrentScaling()):
            assert isinstance(module.get_quantizer("backward", 2), tandem.Float8CurrentScalingQuantizer)
        with pytest.raises(IndexError, match="expected the index of one of its 3 backward quantizers, got 3, which is out of range"):
            module.get_quantizer("backward", 3)


def test_recomputed_and_used_twice():
    module, x = made(GROUPS, 64, 64, bias=False), batches()[0]
    splits, checkpointed = torch.tensor(STEPS[0]), copy.deepcopy(module)
    for _ in range(2):
        results = []
        for each in (module, checkpointed):
            leaf = x.detach().requires_grad_()
            with tandem.autocast(recipe=RECIPE):
                y = each(leaf, splits) if each is module else tandem.checkpoint(each, leaf, splits)
            y.backward(gradients(y))
            results.append((y.detach(), leaf.grad, *[param.grad for param in each.parameters()]))
        assert_equal(*results)
    assert_equal(tables(checkpointed), tables(module))
    twice = ops.Sequential(module, module)
    with tandem.autocast(recipe=RECIPE):
        twice(x, splits, splits).sum().backward()
    assert torch.equal(tables(module)[1][0], tables(checkpointed)[1][0]), "the same weights"


def test_plain_functions_and_cpp_descriptions_have_the_slots_of_groups():
    assert tandem._C.quantize_slots("grouped_linear", {"num_groups": 5}) == (10, 5)
    assert tandem._C.quantize_slots("grouped_linear") == (2, 1) and tandem._C.quantize_slots("basic_linear") == (2, 1)


def test_errors():
    region, pending = torch.tensor([1]), torch.tensor([0])
    with pytest.raises(ValueError, match="expected state with at least 5 slots, got 4"):
        torch.ops.tandem.take_scale_(torch.ones(4), torch.zeros(2, 4), pending, region, 0, "fp8_e4m3:margin=0:max", 2, 3)
    with pytest.raises(ValueError, match="expected slots with a stride of at least 1 and a count of at least 0, got 0 and 3"):
        torch.ops.tandem.take_scale_(torch.ones(4), torch.zeros(2, 4), pending, region, 0, "fp8_e4m3:margin=0:max", 0, 3)
    with pytest.raises(ValueError, match=r"grouped_amaxes: expected matrices \[3, ...\], got \[2, 4\]"):
        torch.ops.tandem.grouped_amaxes(torch.ones(2, 4), None, 3)
