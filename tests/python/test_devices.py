"""The meta device: the first call makes parameters that are there, every op is shape inference, and tensors on different devices are refused."""

import copy
import weakref

import pytest
import torch
from support import OPS

import tandem
import tandem.ops as ops

WITH_PARAMETERS = [name for name, (make, _) in OPS.items() if list(make().parameters())]
MAKE = {
    **{name: OPS[name][0] for name in WITH_PARAMETERS},
    "GroupedLinear": lambda **k: ops.GroupedLinear(2, 8, 6, **k),
    "LayerNormLinear": lambda **k: tandem.LayerNormLinear(8, 6, **k),
    "LayerNormMLP": lambda **k: tandem.LayerNormMLP(8, 6, **k),
}


def inputs(name, requires_grad=False):
    x = torch.randn(4, 8, requires_grad=requires_grad)
    return (x, torch.tensor([3, 1])) if name == "GroupedLinear" else (x,)


@pytest.mark.parametrize("boxed", [False, True])
@pytest.mark.parametrize("name", MAKE)
def test_the_first_call_draws_the_parameters_and_they_get_gradients(name, boxed):
    module = MAKE[name](device="meta")
    assert all(param.is_meta for param in module.parameters())
    before = list(module.parameters())
    optimizer = torch.optim.SGD(before, lr=0.5)
    box = ops.Sequential(module) if boxed else module
    y = box(*inputs(name))
    assert [id(param) for param in module.parameters()] == [id(param) for param in before]  # those that an optimizer holds
    assert not any(param.is_meta for param in before)
    y.square().sum().backward()
    assert all(param.grad is not None and not param.grad.is_meta for param in before)
    values = [param.detach().clone() for param in before]
    optimizer.step()
    assert all(param.grad.any() <= (param != value).any() for param, value in zip(before, values, strict=True))
    made = box(*inputs(name, True))
    assert made.requires_grad


@pytest.mark.parametrize("name", MAKE)
def test_first_values_are_those_of_a_module_that_was_made_at_once(name):
    torch.manual_seed(5)
    expected = MAKE[name]()
    module = MAKE[name](device="meta")
    given = inputs(name)
    torch.manual_seed(5)
    with torch.inference_mode():
        module(*given)
    assert all(map(torch.equal, module.parameters(), expected.parameters()))
    assert not any(param.is_inference() for param in module.parameters())


def test_shapes_are_inferred_before_and_the_device_may_be_assigned():
    box = ops.Sequential(ops.RMSNorm(8, device="meta"), ops.Linear(8, 4, device="meta"))
    assert box(torch.empty(2, 8, device="meta")).is_meta and box[1].weight.is_meta and box[1].device.type == "meta"
    box[1].device = "cpu"
    assert box[1].device.type == "cpu" and box[1].weight.is_meta
    assert box(torch.randn(2, 8)).device.type == "cpu" and not box[1].weight.is_meta
    assert box(torch.randn(2, 8)).shape == (2, 4)
    box[1].device = "meta"  # of parameters that are there: moves them
    assert box[1].weight.is_meta
    with pytest.raises(ValueError, match="expected x and weight on one device, got cpu and meta"):  # their values are lost, so nothing is drawn
        box(torch.randn(2, 8))
    with pytest.raises(AttributeError, match="GELU"):
        ops.GELU().device  # noqa: B018


def test_what_is_loaded_is_not_drawn_again():
    source = ops.Linear(4, 2)
    linear = ops.Linear(4, 2, device="meta")
    linear.weight.mark, linear.bias.mark = "w", "b"
    linear.load_state_dict({"weight": source.weight.detach()}, strict=False, assign=True)
    x = torch.randn(3, 4)
    assert torch.equal(linear(x), x @ source.weight.t()) and torch.equal(linear.bias, torch.zeros(2)) and linear.bias.mark == "b"
    whole = ops.Linear(4, 2, device="meta")
    whole.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(whole(x), source(x))


def test_a_parameter_that_others_hold_is_replaced():
    box = ops.Sequential(ops.RMSNorm(8, device="meta"), ops.Linear(8, 4, device="meta"))
    shapes = box(torch.empty(2, 8, device="meta"))  # whose graph holds the weights
    reference = weakref.ref(box[1].bias)
    box(torch.randn(2, 8)).sum().backward()
    assert all(not param.is_meta and param.grad is not None for param in box.parameters())
    assert shapes.is_meta and reference().is_meta


def test_copies_and_frozen_parameters():
    linear = ops.Linear(4, 2, device="meta").requires_grad_(False)
    copied = copy.deepcopy(linear)
    assert not linear(torch.randn(3, 4)).requires_grad and copied.weight.is_meta
    copied(torch.randn(3, 4))
    assert not copied.weight.is_meta and not copied.weight.requires_grad


def test_initialisers_of_a_module_count():
    def ones(weight):
        torch.nn.init.ones_(weight)

    layer = tandem.LayerNormLinear(4, 2, init_method=ones, device="meta")
    layer(torch.randn(3, 4))
    assert torch.equal(layer.weight, torch.ones(2, 4)) and layer.weight.sequence_parallel is False


@pytest.mark.parametrize("grad", (False, True))
@pytest.mark.parametrize("name", WITH_PARAMETERS)
def test_meta_parameters_with_a_real_input(name, grad):
    module = OPS[name][0]().to("meta")
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match="expected x and (weight|bias) on one device, got cpu and meta. Move the module"):
        module(torch.randn(4, 8))


@pytest.mark.parametrize("name", WITH_PARAMETERS)
def test_real_parameters_with_a_meta_input(name):
    with pytest.raises(ValueError, match="expected x and (weight|bias) on one device, got meta and cpu"):
        OPS[name][0]()(torch.randn(4, 8, device="meta"))


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("experts", [False, True])
def test_a_parameter_of_groups_elsewhere(name, single, experts):
    linears = [ops.GroupedLinear(2, *sizes, single_grouped_weight=single, single_grouped_bias=single) for sizes in ((8, 16), (8, 8))]
    module = ops.Sequential(linears[0], ops.SwiGLU(), linears[1]) if experts else linears[0]
    splits = [torch.tensor([2, 2])] * (2 if experts else 1)
    own = name if single else f"{name}1"
    setattr(linears[-1 if experts else 0], own, torch.nn.Parameter(getattr(linears[-1 if experts else 0], own).to("meta")))
    with pytest.raises(ValueError, match="expected .* on one device, got cpu and meta. Move the module"):
        module(torch.randn(4, 8), *splits)


def test_numbers_of_rows_that_are_none():
    with pytest.raises(ValueError, match="expected splits with numbers, got a tensor on the device meta. Pass the number of rows"):
        ops.GroupedLinear(2, 8, 8)(torch.randn(4, 8), torch.tensor([2, 2], device="meta"))


def test_extra_input_elsewhere():
    x, meta = torch.randn(4, 8), torch.randn(4, 8, device="meta")
    with pytest.raises(ValueError, match="expected x and extra on one device, got cpu and meta"):
        ops.AddExtraInput()(x, meta)
    with pytest.raises(ValueError, match="expected x and extra on one device, got meta and cpu"):
        ops.AddExtraInput(in_place=True)(meta, x)


def test_under_a_recipe():
    module = ops.Sequential(ops.Linear(64, 64))
    x = torch.randn(8, 64)
    with tandem.autocast(recipe=tandem.recipe.Float8CurrentScaling()):
        module(x)
        module.to("meta")
        with pytest.raises(ValueError, match="on one device, got cpu and meta"):
            module(x)


@pytest.mark.parametrize("name", OPS)
def test_all_meta_is_shape_inference(name):
    module = OPS[name][0]()
    x = torch.randn(4, 8, requires_grad=True)
    y, meta = module(x), module.to("meta")(x.detach().to("meta").requires_grad_())
    assert meta.is_meta
    assert (meta.shape, meta.dtype, meta.stride()) == (y.shape, y.dtype, y.stride())
    assert meta.requires_grad == y.requires_grad
