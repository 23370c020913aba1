"""Steps of a Linear under delayed scaling, and the state that they leave."""

import copy

import torch

import tandem
from tandem import ops
from tandem.recipe import DelayedScaling, Format


FORMAT = "e4m3"
RECIPE = DelayedScaling(amax_history_len=4, fp8_format=Format.E4M3)


def states(module: torch.nn.Module):
    """The state of each direction."""
    return module.recipe_state.forward, module.recipe_state.backward


def snapshot(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items() if "recipe_state" in name}


def inputs(count=3):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 8, generator=generator) * (i + 1) for i in range(count)]


def trained(step, steps=3):
    """The state of a Linear after `steps` of `step(linear, x)`."""
    torch.manual_seed(0)
    linear = ops.Linear(8, 8)
    for x in inputs(steps):
        step(linear, x.requires_grad_())
    return linear


def plain(linear, x, recipe=RECIPE):
    with tandem.autocast(recipe=recipe):
        y = linear(x)
    y.square().sum().backward()


def settled(state) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and history once what is pending has been used: as the next step finds them."""
    copied = copy.deepcopy(state)
    if copied.pending.item():
        region = torch.tensor([2**40])
        torch.ops.tandem.take_scale_(copied.scale, copied.amax_history, copied.pending, region, 0, f"fp8_{FORMAT}:margin=0:max", 1, 0)
    return copied.scale, copied.amax_history
