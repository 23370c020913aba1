"""Random models of the library's ops and modules on two ranks: under DistributedDataParallel, fully_shard and plans of tensor parallelism, against
copies that no wrapper has."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import tandem
from tandem import ops, recipe

WIDTH, HEADS, SEQUENCE, BATCH = 32, 4, 8, 4
ACTIVATIONS = [ops.GELU, ops.ReLU, ops.SiLU, ops.QGELU, ops.SReLU, ops.ErfGELU, ops.Mish, ops.Softplus]
GATED = [ops.SwiGLU, ops.GEGLU, ops.ReGLU, ops.QGEGLU, ops.ErfGEGLU]
NORMS = [ops.RMSNorm, ops.LayerNorm]
RECIPES: list[Callable[[], Any]] = [lambda: None, lambda: None, recipe.MXFP8BlockScaling, recipe.Float8CurrentScaling, recipe.Float8BlockScaling]


def unit(draw: random.Random) -> tuple[torch.nn.Module, int]:
    """An activation or a gated unit, and the columns that it takes for each that it gives."""
    return (draw.choice(GATED)(), 2) if draw.random() < 0.5 else (draw.choice(ACTIVATIONS)(), 1)


def mlp(draw: random.Random) -> ops.Sequential:
    bias, (act, columns) = draw.random() < 0.5, unit(draw)
    first = [draw.choice(NORMS)(WIDTH)] if draw.random() < 0.7 else []
    scale = [ops.ConstantScale(0.5)] if draw.random() < 0.3 else []
    body = [*first, ops.Linear(WIDTH, columns * 2 * WIDTH, bias=bias), act, ops.Linear(2 * WIDTH, WIDTH, bias=bias), *scale]
    if draw.random() < 0.5:
        head, tail = ops.MakeExtraOutput(), ops.AddExtraInput()
        head.set_extra_output_channel(0, "residual", output_to_caller=False)
        tail.set_extra_input_channel(0, "residual")
        body = [head, *body, tail]
    return ops.Sequential(*body)


def basic(draw: random.Random) -> ops.Sequential:
    return ops.Sequential(ops.BasicLinear(WIDTH, WIDTH), ops.Bias(WIDTH), ops.L2Normalization(), draw.choice(NORMS)(WIDTH))


MODULES: list[Callable[[random.Random], torch.nn.Module]] = [
    mlp,
    mlp,
    basic,
    lambda draw: tandem.Linear(WIDTH, WIDTH, bias=draw.random() < 0.5),
    lambda draw: draw.choice([tandem.LayerNorm, tandem.RMSNorm])(WIDTH),
    lambda draw: tandem.LayerNormLinear(WIDTH, WIDTH, normalization=draw.choice(["LayerNorm", "RMSNorm"])),
    lambda draw: tandem.LayerNormMLP(WIDTH, 2 * WIDTH, activation=draw.choice(["gelu", "swiglu", "srelu"])),
    lambda draw: tandem.TransformerLayer(WIDTH, 2 * WIDTH, HEADS, hidden_dropout=0.0, attention_dropout=0.0),
]


def model_of(draw: random.Random) -> torch.nn.Sequential:
    model = torch.nn.Sequential(*(draw.choice(MODULES)(draw) for _ in range(draw.randint(1, 3))), tandem.Linear(WIDTH, WIDTH))
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.2)
        parameter.requires_grad_("bias" not in name or draw.random() < 0.8)
    return model


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def steps(model: Any, x: torch.Tensor, made: Any, reduce: Callable[[Any], None]) -> list[torch.Tensor]:
    """Two steps of training: what the model gives, and all that has changed."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    outputs = []
    for _ in range(2):
        optimizer.zero_grad()
        with tandem.autocast(enabled=made is not None, recipe=made):
            y = full(model(x))
        y.square().mean().backward()
        reduce(model)
        optimizer.step()
        outputs.append(y.detach())
    return [*outputs, *(full(p.grad) for p in model.parameters() if p.grad is not None), *(full(p.detach()) for p in model.parameters())]


def average(size: int) -> Callable[[Any], None]:
    def reduce(model: torch.nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= size

    return reduce


def shard(model: torch.nn.Sequential, size: int) -> Any:
    mesh = init_device_mesh("cpu", (size,))
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def plan_of(model: torch.nn.Module) -> dict[str, Any]:
    """Columns and rows of each MLP of ops, without the units whose halves a cut would part."""
    plan: dict[str, Any] = {}
    for name, block in model.named_children():
        if not isinstance(block, ops.Sequential) or any(isinstance(op, tuple(GATED)) for op in block):
            continue
        linears = [i for i, op in enumerate(block) if isinstance(op, ops.Linear)]
        if len(linears) == 2:
            plan |= {f"{name}.{linears[0]}": ColwiseParallel(), f"{name}.{linears[1]}": RowwiseParallel()}
    return plan


def check(rank: int, size: int, first: int, count: int) -> None:
    for seed in range(first, first + count):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        model, x = model_of(draw), torch.randn(SEQUENCE, BATCH * size, WIDTH)
        way, make = draw.choice(["ddp", "fully_shard", "plan"]), draw.choice(RECIPES)
        plain, own = copy.deepcopy(model), x.chunk(size, 1)[rank].contiguous()
        if way == "plan":
            parallelize_module(model, init_device_mesh("cpu", (size,)), plan_of(model))
            want, got = steps(plain, x, None, lambda model: None), steps(model, x, None, lambda model: None)
        else:
            wrapped = DistributedDataParallel(model) if way == "ddp" else shard(model, size)
            want, got = steps(plain, own, make(), average(size)), steps(wrapped, own, make(), lambda model: None)
        assert len(want) == len(got), (seed, way, model)
        for i, (right, other) in enumerate(zip(want, got, strict=True)):
            torch.testing.assert_close(other, right, rtol=1e-5, atol=1e-5, msg=lambda text, i=i, seed=seed: f"seed {seed}, {way}, {make()}, result {i}: {text}\n{model}")


@pytest.mark.parametrize("first", [0, 20])
def test_two_ranks_give_what_no_wrapper_gives(first: int) -> None:
    on_ranks(2, check, first, 20)
