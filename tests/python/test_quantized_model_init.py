"""`quantized_model_init`: weights that are made in codes, and how they are trained."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from masters import train_with_masters

import tandem
from tandem import ops
from tandem.recipe import CustomRecipe, DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling

E4M3 = torch.float8_e4m3fn
QUANTIZERS = {
    Float8CurrentScaling(): tandem.Float8CurrentScalingQuantizer(E4M3),
    DelayedScaling(amax_history_len=4): tandem.Float8CurrentScalingQuantizer(E4M3),
    MXFP8BlockScaling(): tandem.MXFP8Quantizer(E4M3),
    Float8BlockScaling(): tandem.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True),
    NVFP4BlockScaling(): tandem.NVFP4Quantizer(with_2d_quantization=True),
}
RECIPES = pytest.mark.parametrize("recipe", QUANTIZERS, ids=lambda recipe: type(recipe).__name__)
MAKERS = pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda **device: ops.Linear(32, 16, **device), ["weight"]),
        (lambda **device: ops.BasicLinear(32, 16, **device), ["weight"]),
        (lambda **device: ops.GroupedLinear(2, 32, 16, **device), ["weight0", "weight1"]),
        (lambda **device: tandem.Linear(32, 16, **device), ["weight"]),
        (lambda **device: tandem.LayerNormLinear(32, 16, **device), ["weight"]),
        (lambda **device: tandem.LayerNormMLP(32, 48, activation="swiglu", **device), ["fc1_weight", "fc2_weight"]),
        (lambda **device: tandem.GroupedLinear(2, 32, 16, **device), ["weight0", "weight1"]),
    ],
    ids=["ops.Linear", "BasicLinear", "ops.GroupedLinear", "Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear"],
)


def call(module, x):
    return module(x, torch.tensor([x.shape[0] - 5, 5])) if isinstance(module, ops.GroupedLinear) else module(x)


def check_codes(module, names, recipe, numbers, keeps=True):
    """Of the names the module has the codes of these numbers, and the numbers where they were to be kept."""
    for name, param in module.named_parameters():
        assert isinstance(param, torch.nn.Parameter) and param.requires_grad and not param.is_meta
        if name not in names:
            assert type(param) is torch.nn.Parameter and torch.equal(param, numbers[name])
            continue
        assert isinstance(param, tandem.QuantizedTensor) and param.quantizer == QUANTIZERS[recipe], name
        wanted = tandem.quantize(numbers[name].detach(), QUANTIZERS[recipe])
        assert torch.equal(param.rowwise_data, wanted.rowwise_data) and torch.equal(param.rowwise_scale_inv, wanted.rowwise_scale_inv), name
        if keeps:
            assert torch.equal(param.get_high_precision_init_val(), numbers[name]), name
        else:
            assert not hasattr(param, "get_high_precision_init_val")


def numbers_of(module):
    return {name: param.detach().clone() for name, param in module.named_parameters()}


def made(make, recipe, keeps=True, device="meta"):
    with tandem.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=keeps):
        return make(device=device)


@MAKERS
@RECIPES
@pytest.mark.parametrize("device", [None, "meta"])
def test_weights_are_the_codes_of_what_would_have_been_drawn(make, names, recipe, device):
    torch.manual_seed(0)
    numbers = numbers_of(make())
    torch.manual_seed(0)
    module = made(make, recipe, device=device)
    torch.manual_seed(0)
    call(module, torch.zeros(12, 32))
    check_codes(module, names, recipe, numbers)
    for name in names:
        param = module.get_parameter(name)
        assert param.get_high_precision_init_val().device.type == "cpu"
        param.clear_high_precision_init_val()
        assert param.get_high_precision_init_val() is None


@MAKERS
@pytest.mark.parametrize("recipe", [Float8BlockScaling(), MXFP8BlockScaling()], ids=lambda recipe: type(recipe).__name__)
def test_products_read_the_codes(make, names, recipe):
    torch.manual_seed(0)
    with tandem.quantized_model_init(recipe=recipe):
        module = make()
    x = torch.randn(12, 32, requires_grad=True)
    with tandem.autocast(recipe=recipe):
        y = call(module, x)
    y.sum().backward()
    for name, param in module.named_parameters():
        assert param.grad is not None and type(param.grad) is torch.Tensor
        assert not hasattr(param, "get_high_precision_init_val")
        if isinstance(param, tandem.QuantizedTensor):
            with pytest.raises(AttributeError, match="QuantizedTensor: expected an attribute that it has, got 'clear_high_precision_init_val'"):
                param.clear_high_precision_init_val()  # noqa: B018
    box = ops.Sequential(module)
    if not isinstance(module, ops.GroupedLinear):
        with tandem.autocast(recipe=recipe):
            box(x)
        text = box.explain()
        assert "refresh_weight" not in text and "dequantize" not in text and "weight in " in text


def test_regions_nest_and_end():
    recipe = MXFP8BlockScaling()
    with tandem.quantized_model_init(recipe=recipe):
        with tandem.quantized_model_init(enabled=False):
            plain = ops.Linear(32, 16)
        with tandem.fp8_model_init():
            inner = ops.Linear(32, 16)
        outer = ops.Linear(32, 16)
    after = ops.Linear(32, 16)
    assert type(plain.weight) is type(after.weight) is torch.nn.Parameter
    assert inner.weight.quantizer == QUANTIZERS[Float8CurrentScaling()] and outer.weight.quantizer == QUANTIZERS[recipe]


def test_a_custom_recipe_says_which_weights():
    def qfactory(role):
        assert role.tensor_type == "weight" and role.name == ""
        return tandem.MXFP8Quantizer(E4M3) if role.module_type == "grouped_linear" else None

    with tandem.quantized_model_init(recipe=CustomRecipe(qfactory)):
        assert isinstance(ops.GroupedLinear(2, 32, 16).weight1, tandem.QuantizedTensor)
        assert type(ops.Linear(32, 16).weight) is torch.nn.Parameter


@RECIPES
@pytest.mark.parametrize("optimize", [torch.optim.SGD, torch.optim.AdamW])
def test_it_trains_with_a_master_copy(recipe, optimize):
    torch.manual_seed(0)
    target = torch.nn.Linear(32, 16)
    with tandem.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        layer = tandem.Linear(32, 16)
    lr = 0.3 if optimize is torch.optim.SGD else 0.02
    count, losses = train_with_masters(layer, target, recipe, lambda params: optimize(params, lr=lr))
    assert count == 1
    assert losses[-1] < (0.3 if recipe.nvfp4() else 0.1) * losses[0]


def test_copies_and_pickles():
    recipe = MXFP8BlockScaling()
    module = made(lambda **device: tandem.LayerNormMLP(32, 48, **device), recipe, device=None)
    x = torch.randn(4, 32)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert isinstance(other.fc1_weight, torch.nn.Parameter) and isinstance(other.fc1_weight, tandem.QuantizedTensor)
        with tandem.autocast(recipe=recipe):
            assert torch.equal(other(x), module(x))
        assert torch.equal(other.fc1_weight.get_high_precision_init_val(), module.fc1_weight.get_high_precision_init_val())


def test_modules_that_move_stay_in_codes():
    with tandem.quantized_model_init(recipe=MXFP8BlockScaling()):
        layer = tandem.Linear(32, 16)
    codes = layer.weight.rowwise_data.clone()
    layer.to(torch.bfloat16)
    assert isinstance(layer.weight, tandem.QuantizedTensor) and layer.weight.dtype == layer.bias.dtype == torch.bfloat16
    assert torch.equal(layer.weight.rowwise_data, codes)
    with tandem.autocast(recipe=MXFP8BlockScaling()):
        assert layer(torch.randn(4, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_errors():
    with pytest.raises(TypeError, match="quantized_model_init: expected recipe to be a recipe of tandem.recipe or None, got str"):
        with tandem.quantized_model_init(recipe="fp8"):
            pass
    with pytest.raises(ValueError, match="quantized_model_init: expected enabled to be True or False, got MXFP8BlockScaling"):
        with tandem.quantized_model_init(MXFP8BlockScaling()):
            pass


def test_codes_are_nearer_than_plain_weights_in_a_first_step_of_delayed_scaling():
    """There plain weights have the scale 1, those in codes one of their own."""
    torch.manual_seed(0)
    plain, x = tandem.Linear(64, 64, bias=False, init_method=lambda weight: torch.nn.init.normal_(weight, std=0.005)), torch.randn(32, 64)
    with tandem.quantized_model_init(recipe=DelayedScaling()):
        in_codes = tandem.Linear(64, 64, bias=False)
    with torch.no_grad():
        in_codes.weight.copy_(plain.weight)
    right, steps = x @ plain.weight.t().detach(), []
    for _ in range(2):
        for made in (plain, in_codes):
            with tandem.autocast(recipe=DelayedScaling()):
                y = made(x)
            y.sum().backward()
            steps.append(((y.detach() - right).norm() / right.norm()).item())
    assert steps[0] > 1.2 * steps[1] and steps[2] == pytest.approx(steps[3], rel=0.05)
