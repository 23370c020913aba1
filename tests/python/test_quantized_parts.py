"""A Linear of several named weights in codes: separate parameters and keys, one product, no number rounded again."""

from __future__ import annotations

import copy
import pickle

import pytest
import recipes
import torch
from masters import train_with_masters
from support import results_of, saved_and_loaded

import tandem
from tandem import ops
from tandem.pipelines.joined import are_adjacent
from tandem.recipe import CustomRecipe, DelayedScaling

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

E4M3 = torch.float8_e4m3fn
RECIPES = recipes.RECIPES | {"lines": CustomRecipe(lambda role: tandem.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=1))}
EACH = pytest.mark.parametrize("name", RECIPES)
MAKERS = pytest.mark.parametrize("make", [ops.Linear, tandem.Linear, tandem.LayerNormLinear], ids=["ops.Linear", "Linear", "LayerNormLinear"])


def made(name, split, make=ops.Linear, columns=64, **arguments):
    torch.manual_seed(0)
    with tandem.quantized_model_init(recipe=RECIPES[name], preserve_high_precision_init_val=True):
        return make(columns, sum(split.values()), parameters_split=split, **arguments)


def weights(module):
    return {name: param for name, param in module.named_parameters() if isinstance(param, tandem.QuantizedTensor)}


@EACH
@MAKERS
@pytest.mark.parametrize("device", [None, "meta"])
def test_each_part_is_a_parameter_in_codes_of_its_own(name, make, device):
    split = {"query": 128, "key": 256, "value": 128}
    module = made(name, split, make, device=device)
    if device == "meta":
        torch.manual_seed(0)
        module(torch.zeros(2, 64))
    plain = make(64, 512, parameters_split=split)
    found = weights(module)
    assert [*found] == ["query_weight", "key_weight", "value_weight"]
    for key, param in found.items():
        assert isinstance(param, torch.nn.Parameter) and param.shape == getattr(plain, key).shape
        wanted = tandem.quantize(param.get_high_precision_init_val(), param.quantizer)
        assert torch.equal(param.rowwise_data, wanted.rowwise_data) and torch.equal(param.rowwise_scale_inv, wanted.rowwise_scale_inv)
    assert torch.cat([param.get_high_precision_init_val() for param in found.values()]).std() > 0


@pytest.mark.parametrize("name", ["mxfp8", "blocks", "lines"])
@pytest.mark.parametrize("last", [128, 100, 7])
def test_codes_in_whole_blocks_are_the_operand(name, last):
    """Bit for bit what a Linear does whose one weight has the same codes; without a recipe grad_x is summed in another order."""
    recipe, split = RECIPES[name], {"a": 128, "b": 256, "c": last}
    parts = made(name, split, columns=160)
    whole = ops.Linear(160, sum(split.values()))
    numbers = torch.cat([param.get_high_precision_init_val() for param in weights(parts).values()])
    whole.weight = torch.nn.Parameter(tandem.quantize(numbers, parts.a_weight.quantizer))
    whole.bias = torch.nn.Parameter(torch.cat([parts.a_bias, parts.b_bias, parts.c_bias]).detach())
    x, grad = torch.randn(40, 160), torch.randn(40, sum(split.values()))
    for each in (recipe, None):
        y, grad_x, *of_parts = results_of(parts, x, grad, each)
        wanted_y, wanted_x, grad_weight, grad_bias = results_of(whole, x, grad, each)
        tolerance = {"rtol": 0, "atol": 0 if each else 1e-5}
        torch.testing.assert_close(y, wanted_y, **tolerance)
        torch.testing.assert_close(grad_x, wanted_x, **tolerance)
        assert torch.equal(torch.cat(of_parts[:3]), grad_weight) and torch.equal(torch.cat(of_parts[3:]), grad_bias)
    box = ops.Sequential(parts)
    with tandem.autocast(recipe=recipe):
        box(x.requires_grad_())
    text = box.explain()
    assert "join_codes" in text and "refresh_weight" not in text and "dequantize" not in text
    assert sum(line.strip().startswith(("linear", "basic_linear:")) for line in text.splitlines()) == 1, "one product"


@pytest.mark.parametrize(
    ("name", "split"),
    [("current", {"a": 64, "b": 64}), ("delayed", {"a": 64, "b": 64}), ("nvfp4", {"a": 64, "b": 64}), ("nvfp4", {"a": 40, "b": 24})],
)
def test_numbers_that_no_whole_has_codes_for_are_multiplied_as_they_are(name, split):
    """A scale of one part serves no other: against the product of the decoded numbers, in float64."""
    module, recipe = made(name, split, bias=False), RECIPES[name]
    numbers = torch.cat([param.dequantize() for param in weights(module).values()]).double()
    x, grad = torch.randn(32, 64), torch.randn(32, sum(split.values()))
    y, grad_x, *of_parts = results_of(module, x, grad, recipe)
    if recipe.delayed():
        y, grad_x, *of_parts = results_of(module, x, grad, recipe)  # the scales of the first call are ones
    one = CustomRecipe(lambda role: None)
    quantized_x = _as_the_recipe_has_it(x, recipe).double()
    torch.testing.assert_close(y.double(), quantized_x @ numbers.t(), rtol=0, atol=2e-5 * y.abs().max().item())
    assert not torch.equal(results_of(module, x, grad, one)[0], y), "x is rounded"
    assert (grad_x.double() - grad.double() @ numbers).norm() < 0.2 * grad_x.norm()
    assert all(torch.isfinite(each).all() for each in of_parts)
    box = ops.Sequential(module)
    with tandem.autocast(recipe=recipe):
        box(x.requires_grad_())
    assert "dequantize" in box.explain() and "join_codes" not in box.explain()


def _as_the_recipe_has_it(x, recipe):
    if recipe.nvfp4():
        return tandem.quantize(x, tandem.NVFP4Quantizer()).dequantize()
    return tandem.quantize(x, tandem.Float8CurrentScalingQuantizer(E4M3)).dequantize()


@EACH
@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_backward_overrides(name, override):
    recipe = RECIPES[name]
    if name in ("delayed", "lines"):
        recipe = CustomRecipe(RECIPES["lines"].qfactory, backward_override=override) if name == "lines" else DelayedScaling(amax_history_len=4)
    else:
        recipe = type(recipe)(backward_override=override)
    module = made(name, {"a": 128, "b": 64}, bias=False)
    numbers = torch.cat([param.dequantize() for param in weights(module).values()])
    x, grad = torch.randn(32, 64), torch.randn(32, 192)
    grad_x = results_of(module, x, grad, recipe)[1]
    tolerance = 0.1 if name == "delayed" else 1e-6
    assert (grad_x - grad @ numbers).norm() <= tolerance * grad_x.norm()


@EACH
@pytest.mark.parametrize("make", [tandem.Linear, ops.Linear])
def test_it_trains_with_master_copies(name, make):
    recipe = RECIPES[name]
    rows = 128 if name in ("blocks", "lines") else 32
    layer = made(name, {"a": rows, "b": 16}, make, columns=32)
    torch.manual_seed(1)
    target = torch.nn.Linear(32, rows + 16)
    lr = 0.3 * (rows + 16) / 16  # the loss is the mean over all columns: steps as large as of 16
    count, losses = train_with_masters(layer, target, recipe, lambda params: torch.optim.SGD(params, lr=lr))
    assert count == 2
    assert losses[-1] < (0.3 if recipe.nvfp4() else 0.1) * losses[0]


@EACH
def test_states_copies_and_pickles(name):
    recipe, split = RECIPES[name], {"gate": 128, "up": 128}
    module, other = made(name, split), made(name, split)
    other.reset_parameters()
    state = saved_and_loaded(module.state_dict())
    assert {key.split(".")[0] for key in state} == {"gate_weight", "up_weight", "gate_bias", "up_bias"}
    assert "up_weight.rowwise_data" in state and all(type(value) is torch.Tensor for value in state.values())
    other.load_state_dict(state)
    plain = ops.Linear(64, 256, parameters_split=split)
    plain.load_state_dict(state)
    assert torch.equal(plain.up_weight, module.up_weight.dequantize())
    x = torch.randn(4, 64)
    moved = copy.deepcopy(module).to(torch.float32)
    others = [other, copy.deepcopy(module), moved, *([] if name == "lines" else [pickle.loads(pickle.dumps(module))])]
    for each in others:
        assert isinstance(each.up_weight, tandem.QuantizedTensor) and isinstance(each.up_weight, torch.nn.Parameter)
        with tandem.autocast(enabled=name != "delayed", recipe=recipe):  # whose scales change from call to call
            assert torch.equal(each(x), module(x))
    with torch.no_grad():
        plain.gate_weight.add_(0.1)
    module.load_state_dict(plain.state_dict())
    assert torch.equal(module.gate_weight.rowwise_data, tandem.quantize(plain.gate_weight.detach(), module.gate_weight.quantizer).rowwise_data)


def test_codes_lie_in_one_memory_and_are_written_there():
    module = made("mxfp8", {"a": 128, "b": 128})
    for part in ("rowwise_data", "columnwise_data"):
        assert are_adjacent([getattr(module.a_weight, part), getattr(module.b_weight, part)])
    x, recipe = torch.randn(4, 64), RECIPES["mxfp8"]
    before = results_of(module, x, torch.randn(4, 256), recipe)[0]
    module.b_weight.quantize_(torch.zeros(128, 64))
    with tandem.autocast(recipe=recipe):
        after = module(x)
    assert torch.equal(after[:, :128], before[:, :128]) and not after[:, 128:].any()
    module.a_weight = torch.nn.Parameter(tandem.quantize(torch.ones(128, 64), module.a_weight.quantizer))  # apart: a copy in each call
    with tandem.autocast(recipe=recipe):
        assert torch.equal(module(x)[:, 128:], after[:, 128:])
        y = module(x.requires_grad_())
    module.b_weight.quantize_(torch.ones(128, 64))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_the_whole_is_read_as_a_copy():
    module = made("mxfp8", {"a": 32, "b": 32})
    with pytest.warns(UserWarning, match="tandem: expected Linear.weight to be read of parts that lie one behind the other, got parts that are in codes"):
        whole = module.weight
    assert torch.equal(whole, torch.cat([module.a_weight.dequantize(), module.b_weight.dequantize()]))


def test_parts_of_which_some_are_in_codes_are_quantized_as_one():
    recipe = RECIPES["mxfp8"]
    module = ops.Linear(64, 64, parameters_split=("a", "b"))
    module.a_weight = torch.nn.Parameter(tandem.quantize(module.a_weight.detach(), tandem.MXFP8Quantizer(E4M3)))
    whole = ops.Linear(64, 64)
    with torch.no_grad():
        whole.weight.copy_(torch.cat([module.a_weight.dequantize(), module.b_weight]))
        whole.bias.zero_()
    x = torch.randn(4, 64)
    with tandem.autocast(recipe=recipe):
        assert torch.equal(module(x), whole(x))


@pytest.mark.parametrize(("name", "split"), [("mxfp8", {"a": 64, "b": 32}), ("current", {"a": 64, "b": 32}), ("nvfp4", {"a": 64, "b": 32})])
def test_compiled_code_computes_the_same(name, split):
    module, recipe = made(name, split), RECIPES[name]

    def call(x):
        with tandem.autocast(recipe=recipe):
            return module(x)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    x, grad = torch.randn(8, 64), torch.randn(8, 96)
    torch.testing.assert_close(results_of(compiled, x, grad, module=module), results_of(call, x, grad, module=module))


@EACH
def test_fused_equals_unfused(name):
    mlp = ops.Sequential(ops.RMSNorm(64), made(name, {"gate": 128, "up": 128}, bias=False), ops.SwiGLU(), ops.Linear(128, 64, bias=False))
    with tandem.autocast(recipe=RECIPES[name]):
        assert tandem.verify(mlp, torch.randn(16, 64, requires_grad=True)).passed


def test_parts_that_cut_blocks():
    text = r"Linear: expected parts in whole blocks inside quantized_model_init, each but the last a multiple of {} rows, got b_weight with {}. Build one"
    for name, split, unit in (("mxfp8", {"a": 64, "b": 40, "c": 8}, 32), ("blocks", {"a": 128, "b": 64, "c": 8}, 128), ("lines", {"a": 128, "b": 64, "c": 8}, 128)):
        for make in (ops.Linear, tandem.Linear):
            with pytest.raises(ValueError, match=text.format(unit, split["b"])):
                made(name, split, make)
    rows = tandem.MXFP8Quantizer(E4M3, columnwise=False)
    module = ops.Linear(64, 64, parameters_split={"a": 40, "b": 24})
    for part in ("a_weight", "b_weight"):
        setattr(module, part, torch.nn.Parameter(tandem.quantize(getattr(module, part).detach(), rows)))
    x, recipe = torch.randn(4, 64), RECIPES["mxfp8"]
    with torch.no_grad(), tandem.autocast(recipe=recipe):
        wanted = tandem.quantize(x, rows).dequantize() @ torch.cat([module.a_weight.dequantize(), module.b_weight.dequantize()]).t()
        torch.testing.assert_close(module(x), wanted, rtol=0, atol=1e-5 * wanted.abs().max().item())  # of a row each
    for part in ("a_weight", "b_weight"):
        setattr(module, part, torch.nn.Parameter(tandem.quantize(getattr(module, part).dequantize(), tandem.MXFP8Quantizer(E4M3))))
    with tandem.autocast(recipe=recipe):
        y = module(x.requires_grad_())
    with pytest.raises(ValueError, match="join: expected parts in codes of whole blocks, each but the last a multiple of 32 rows, got 40. Keep them in plain"):
        y.sum().backward()
