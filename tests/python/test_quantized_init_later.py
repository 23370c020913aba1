"""Weights of `quantized_model_init` that get their values later: in which order ever, they are the codes of these."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from support import saved_and_loaded
from test_quantized_model_init import E4M3, MAKERS, RECIPES, call, check_codes, made, numbers_of

import tandem
from tandem import ops
from tandem.recipe import Float8CurrentScaling, MXFP8BlockScaling


@MAKERS
@RECIPES
@pytest.mark.parametrize("inside", [False, True])
def test_reset_parameters_behind_to_empty(make, names, recipe, inside):
    torch.manual_seed(0)
    numbers = numbers_of(make())
    module = made(make, recipe).to_empty(device="cpu")
    torch.manual_seed(0)
    with tandem.quantized_model_init(enabled=inside, recipe=Float8CurrentScaling()):  # that of the constructor counts
        module.reset_parameters()
    check_codes(module, names, recipe, numbers)


@MAKERS
@pytest.mark.parametrize("keeps", [False, True])
def test_reset_parameters_of_weights_in_codes(make, names, keeps):
    recipe = MXFP8BlockScaling()
    torch.manual_seed(0)
    numbers = numbers_of(make())
    module = made(make, recipe, keeps, device=None)
    weights = list(module.parameters())
    torch.manual_seed(0)
    module.reset_parameters()
    assert all(map(lambda a, b: a is b, module.parameters(), weights))
    check_codes(module, names, recipe, numbers, keeps)
    emptied = copy.deepcopy(module).to("meta").to_empty(device="cpu")
    assert all(isinstance(emptied.get_parameter(name), tandem.QuantizedTensor) for name in names)
    torch.manual_seed(0)
    emptied.reset_parameters()
    for name, param in emptied.named_parameters():
        assert torch.equal(getattr(param, "rowwise_data", param), getattr(module.get_parameter(name), "rowwise_data", module.get_parameter(name)))


@pytest.mark.parametrize("inside", [False, True])
def test_a_module_that_was_made_outside_stays_plain(inside):
    plain, meta = ops.Linear(32, 16), ops.Linear(32, 16, device="meta")
    with tandem.quantized_model_init(enabled=inside, recipe=MXFP8BlockScaling()):
        plain.reset_parameters()
        meta(torch.zeros(2, 32))
        meta.load_state_dict(plain.state_dict(), assign=True)
    assert type(plain.weight) is type(meta.weight) is torch.nn.Parameter


@MAKERS
@RECIPES
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("device", ["meta", None])
def test_a_state_dict_of_numbers_is_quantized(make, names, recipe, assign, device):
    torch.manual_seed(1)
    source = make()
    module = made(make, recipe, device=device)
    if device == "meta" and not assign:
        module.to_empty(device="cpu")
    given = numbers_of(source)
    module.load_state_dict(given, assign=assign)
    check_codes(module, names, recipe, numbers_of(source))
    assert all(type(value) is torch.Tensor for value in given.values()), "the caller's tensors stay"
    call(module, torch.randn(12, 32))
    check_codes(module, names, recipe, numbers_of(source))


def test_parameters_of_others_that_are_assigned_stay_plain():
    source, module = ops.Linear(32, 16), made(lambda **k: ops.Linear(32, 16, **k), MXFP8BlockScaling())
    weight = source.weight
    module.load_state_dict(source.state_dict(keep_vars=True), assign=True)
    assert type(weight) is torch.nn.Parameter and source.weight is weight
    check_codes(module, ["weight"], MXFP8BlockScaling(), numbers_of(source))


@MAKERS
@RECIPES
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("device", ["meta", None])
def test_a_state_dict_of_codes_keeps_every_bit(make, names, recipe, assign, device):
    torch.manual_seed(1)
    source = made(make, recipe, device=None)
    module = made(make, recipe, device=device)
    if device == "meta" and not assign:
        module.to_empty(device="cpu")
    module.load_state_dict(saved_and_loaded(source.state_dict()), assign=assign)
    for name, param in module.named_parameters():
        theirs = source.get_parameter(name)
        assert torch.equal(getattr(param, "rowwise_data", param), getattr(theirs, "rowwise_data", theirs))
        assert isinstance(param, tandem.QuantizedTensor) == (name in names)
        if name in names:
            assert torch.equal(param.get_high_precision_init_val(), theirs.dequantize()), "what was loaded, as there are no other numbers"


def test_codes_of_another_format_are_quantized_again():
    torch.manual_seed(1)
    source = made(lambda **k: ops.Linear(32, 16, **k), Float8CurrentScaling(), device=None)
    for assign in (False, True):
        module = made(lambda **k: ops.Linear(32, 16, **k), MXFP8BlockScaling(), device="meta" if assign else None)
        module.load_state_dict(source.state_dict(), assign=assign)
        numbers = {"weight": source.weight.detach().dequantize(), "bias": source.bias.detach()}
        check_codes(module, ["weight"], MXFP8BlockScaling(), numbers)


@MAKERS
@RECIPES
def test_values_that_are_written_in_place_come_into_codes_at_the_first_call(make, names, recipe):
    module = made(make, recipe).to_empty(device="cpu")  # as torch.nn.utils.skip_init
    before = list(module.parameters())
    for param in before:  # an initialiser of several steps, exact as it works on plain numbers
        assert type(param) is torch.nn.Parameter
        torch.nn.init.trunc_normal_(param, std=0.02)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    numbers = numbers_of(module)
    call(module, torch.randn(12, 32))
    check_codes(module, names, recipe, numbers)
    assert [id(param) for group in optimizer.param_groups for param in group["params"]] == [id(param) for param in module.parameters()]


def test_values_that_are_written_in_place_come_into_codes_on_demand():
    recipe = MXFP8BlockScaling()
    with tandem.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True), torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Embedding(4, 32), tandem.LayerNormMLP(32, 48), ops.Sequential(ops.RMSNorm(32), ops.Linear(32, 8)))
    assert tandem.finish_quantized_init(model) is model and all(param.is_meta for param in model.parameters())
    model.to_empty(device="cpu")
    for param in model.parameters():
        torch.nn.init.normal_(param)
    numbers = numbers_of(model)
    assert tandem.finish_quantized_init(model) is model
    check_codes(model, ["1.fc1_weight", "1.fc2_weight", "2.1.weight"], recipe, numbers)
    masters = [param.get_high_precision_init_val() for param in model.parameters() if isinstance(param, tandem.QuantizedTensor)]
    assert len(masters) == 3
    tandem.finish_quantized_init(model)
    check_codes(model, ["1.fc1_weight", "1.fc2_weight", "2.1.weight"], recipe, numbers)


def empty_weights(monkeypatch):
    """As accelerate's init_empty_weights: what is registered goes to the meta device at once."""
    register = torch.nn.Module.register_parameter

    def registered(self, name, param):
        register(self, name, param)
        if param is not None:
            kept = self._parameters[name]
            attributes = {**kept.__dict__, "requires_grad": param.requires_grad}
            self._parameters[name] = type(kept)(kept.to("meta"), **attributes)

    monkeypatch.setattr(torch.nn.Module, "register_parameter", registered)


@RECIPES
def test_weights_that_a_model_library_loads_one_by_one(recipe, monkeypatch):
    """Made empty, as by accelerate, and put in place of those, one by one; what is not in the checkpoint is drawn by the library's own rule."""
    torch.manual_seed(2)
    source = torch.nn.Sequential(ops.Linear(32, 48), tandem.Linear(48, 32))
    with monkeypatch.context() as patch:
        empty_weights(patch)
        with tandem.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
            model = torch.nn.Sequential(ops.Linear(32, 48), tandem.Linear(48, 32))
    assert all(param.is_meta for param in model.parameters())
    by_hand, loaded = copy.deepcopy(model), model
    for name, value in source.state_dict().items():
        module, _, last = name.rpartition(".")
        loaded.get_submodule(module).load_state_dict({last: value}, strict=False, assign=True)  # as of transformers
        by_hand.get_submodule(module)._parameters[last] = torch.nn.Parameter(value.clone())  # as of accelerate
    check_codes(loaded, ["0.weight", "1.weight"], recipe, numbers_of(source))
    by_hand(torch.randn(4, 32))
    check_codes(by_hand, ["0.weight", "1.weight"], recipe, numbers_of(source))
    for write in (torch.nn.init.trunc_normal_, lambda weight, std: weight.data.normal_(std=std)):
        torch.manual_seed(3)
        write(loaded[0].weight, std=0.02)
        numbers = numbers_of(source)
        torch.manual_seed(3)
        write(numbers["0.weight"], std=0.02)
        check_codes(loaded, ["0.weight", "1.weight"], recipe, numbers)


def test_first_numbers_follow_what_is_written_until_they_are_cleared():
    quantizer = tandem.MXFP8Quantizer(E4M3)
    layer = made(lambda **k: ops.Linear(32, 16, **k), MXFP8BlockScaling(), device=None)
    weight, x = layer.weight, torch.randn(16, 32)
    with torch.no_grad():
        weight.copy_(x)
        assert torch.equal(weight.get_high_precision_init_val(), x)
        weight.mul_(1 / 3).add_(1)
        assert torch.equal(weight.get_high_precision_init_val(), x * (1 / 3) + 1)
        assert torch.equal(weight.rowwise_data, tandem.quantize(x * (1 / 3) + 1, quantizer).rowwise_data)
        weight[3] = 7.0
        assert torch.equal(weight.get_high_precision_init_val()[3], torch.full((32,), 7.0))
        assert torch.equal(weight.get_high_precision_init_val()[4], x[4] * (1 / 3) + 1)
        weight.copy_(codes := tandem.quantize(x, quantizer))
        assert torch.equal(weight.get_high_precision_init_val(), codes.dequantize())
    for other in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        assert torch.equal(other.get_high_precision_init_val(), codes.dequantize())
    weight.clear_high_precision_init_val()
    weight.quantize_(x)
    assert weight.get_high_precision_init_val() is None
    layer.reset_parameters()
    assert weight.get_high_precision_init_val() is None


def test_initialisers_of_a_class_of_the_users_draw_numbers():
    class Narrow(ops.Linear):
        def reset_parameters(self):
            super().reset_parameters()
            torch.nn.init.trunc_normal_(self.weight, std=0.02)

    recipe = MXFP8BlockScaling()
    plain = Narrow(32, 16)
    for keeps in (False, True):
        for device in (None, "meta"):
            module = made(lambda **k: Narrow(32, 16, **k), recipe, keeps, device)
            torch.manual_seed(4)
            plain.reset_parameters()
            torch.manual_seed(4)
            if device is None:
                module.reset_parameters()
            else:
                module(torch.zeros(2, 32))
            check_codes(module, ["weight"], recipe, numbers_of(plain), keeps)
        with tandem.quantized_model_init(recipe=recipe):
            skipped = torch.nn.utils.skip_init(Narrow, 32, 16)
        torch.manual_seed(4)
        skipped.reset_parameters()
        check_codes(skipped, ["weight"], recipe, numbers_of(plain), keeps=False)
        torch.manual_seed(4)
        with tandem.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
            made_at_once = Narrow(32, 16)
        torch.manual_seed(4)
        check_codes(made_at_once, ["weight"], recipe, numbers_of(Narrow(32, 16)))


def test_what_is_not_loaded_is_not_quantized_yet():
    module = made(lambda **k: ops.Linear(32, 16, **k), MXFP8BlockScaling())
    module.load_state_dict({"bias": torch.ones(16)}, strict=False, assign=True)
    assert module.weight.is_meta and type(module.weight) is torch.nn.Parameter
    module(torch.randn(2, 32))
    assert isinstance(module.weight, tandem.QuantizedTensor) and torch.equal(module.bias, torch.ones(16))
