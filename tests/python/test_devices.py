"""Parameters and inputs on different devices are refused; on the meta device every op is shape inference."""

import pytest
import torch
from support import OPS

import tandem
import tandem.ops as ops

WITH_PARAMETERS = [name for name, (make, _) in OPS.items() if list(make().parameters())]


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


def test_one_parameter_elsewhere():
    module = ops.Linear(8, 6)
    module.bias = torch.nn.Parameter(module.bias.to("meta"))
    with pytest.raises(ValueError, match="expected x and bias on one device, got cpu and meta"):
        module(torch.randn(4, 8))


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
