"""Random models in random wrappings over two ranks: data parallel, fully sharded, DTensors, plans of tensor parallelism. Each against plain copies."""

from __future__ import annotations

import contextlib
import copy
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from support import ACTIVATIONS, GATED, fork, join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import tandem
from tandem import ops, recipe

ROWS, HIDDEN, STEPS = 6, 8, 2  # rows of a rank
RECIPES = {"float8": recipe.Float8CurrentScaling, "mxfp8": recipe.MXFP8BlockScaling, "nvfp4": lambda: recipe.NVFP4BlockScaling(disable_stochastic_rounding=True), "block": recipe.Float8BlockScaling}
PLAIN = (*ACTIVATIONS, ops.L2Normalization, ops.Identity, lambda: ops.ConstantScale(-1.5))
NORMS = (ops.RMSNorm, ops.LayerNorm)
SCALED = (ops.ScaledSwiGLU, ops.ScaledSiTUGLU, ops.ScaledClampedQGeGLU)


def sequential(r: random.Random, is_local: bool) -> tuple[torch.nn.Module, list[str]]:
    """A pipeline of ops of the table that keeps the width, and the extra inputs that it takes; groups and dropout want local tensors."""
    listed: list[torch.nn.Module] = []
    extras: list[str] = []
    for _ in range(r.randint(1, 5)):
        kind = r.choice(("plain", "params", "linear", "gated", "scaled", "add", *["grouped"] * is_local))
        if kind == "plain":
            listed.append(r.choice((*PLAIN, *[lambda: ops.Dropout(0.0)] * is_local))())
        elif kind == "params":
            listed.append(r.choice((ops.Bias, *NORMS))(HIDDEN))
        elif kind == "linear":
            listed.append(r.choice((ops.Linear(HIDDEN, HIDDEN), ops.Linear(HIDDEN, HIDDEN, bias=False), ops.BasicLinear(HIDDEN, HIDDEN))))
        elif kind == "grouped":
            listed.append(ops.GroupedLinear(2, HIDDEN, HIDDEN, bias=r.random() < 0.5))
            extras.append("splits")
        elif kind == "add":
            listed.append(ops.AddExtraInput())
            extras.append("like x")
        else:
            listed += [ops.Linear(HIDDEN, 2 * HIDDEN), r.choice([*GATED] if kind == "gated" else SCALED)()]
            extras += ["scales"] * (kind == "scaled")
    if not any([*op.parameters()] for op in listed):
        listed.append(ops.Bias(HIDDEN))
    return ops.Sequential(*listed), extras


def mlp(r: random.Random) -> ops.Sequential:
    """Two products, which a plan cuts, with a norm, a scale and a residual or without."""
    bias, (unit, columns) = r.random() < 0.5, r.choice([*((unit, 2) for unit in ACTIVATIONS), *((unit, 4) for unit in GATED)])
    body = [ops.Linear(HIDDEN, columns * HIDDEN, bias=bias), unit(), ops.Linear(2 * HIDDEN, HIDDEN, bias=bias)]
    if r.random() < 0.7:
        body.insert(0, r.choice(NORMS)(HIDDEN))
    if r.random() < 0.3:
        body.append(ops.ConstantScale(0.5))
    if r.random() < 0.5:
        body = [fork(), *body, join()]
    return ops.Sequential(*body)


def blocks(r: random.Random) -> torch.nn.Sequential:
    """MLPs and modules one behind the other."""
    return torch.nn.Sequential(*(mlp(r) if r.random() < 0.5 else module(r)[0] for _ in range(r.randint(1, 3))), tandem.Linear(HIDDEN, HIDDEN))


def module(r: random.Random, *more: str) -> tuple[torch.nn.Module, list[str]]:
    kind = r.choice(("linear", "norm linear", "norm mlp", "attention", "layer", *more))
    norm = r.choice(("LayerNorm", "RMSNorm"))
    if kind == "linear":
        return tandem.Linear(HIDDEN, HIDDEN, bias=r.random() < 0.5), []
    if kind == "norm linear":
        return tandem.LayerNormLinear(HIDDEN, HIDDEN, normalization=norm), []
    if kind == "norm mlp":
        return tandem.LayerNormMLP(HIDDEN, 2 * HIDDEN, normalization=norm, activation=r.choice(("gelu", "swiglu", "relu"))), []
    if kind == "grouped":
        return tandem.GroupedLinear(2, HIDDEN, HIDDEN), ["splits"]
    if kind == "attention":
        return tandem.MultiheadAttention(HIDDEN, 2, attention_dropout=0.0, fuse_qkv_params=r.random() < 0.5), []
    return tandem.TransformerLayer(HIDDEN, 2 * HIDDEN, 2, hidden_dropout=0.0, attention_dropout=0.0, normalization=norm), []


def wrapped(r: random.Random, model: torch.nn.Module, mesh: DeviceMesh) -> tuple[torch.nn.Module, str]:
    """The model over two ranks, and how it is told in an error."""
    way = r.choice(("ddp", "fsdp"))
    if way == "ddp":
        options = {"gradient_as_bucket_view": r.random() < 0.5, "static_graph": r.random() < 0.3, "bucket_cap_mb": r.choice((1e-4, 3e-4, 25))}
        return DistributedDataParallel(model, **options), f"ddp {options}"
    options = {"reshard_after_forward": r.random() < 0.5}
    if each := r.random() < 0.5:
        for child in model.children():
            if [*child.parameters()]:
                fully_shard(child, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options), f"fsdp {options}, {'each child' if each else 'whole'}"


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def given(names: list[str], shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """x, the gradient of y, and the extra inputs."""
    made = {"splits": lambda: torch.tensor([shape[0] - 2, 2]), "scales": lambda: torch.rand(shape[:-1], dtype=dtype), "like x": lambda: torch.randn(shape, dtype=dtype)}
    return [torch.randn(shape, dtype=dtype).requires_grad_(), torch.randn(shape, dtype=dtype), *(made[name]() for name in names)]


def check_close(name: str, one: torch.Tensor, other: torch.Tensor, told: str) -> None:
    tolerance = 8e-2 if other.dtype == torch.bfloat16 else 1e-5  # gradients of a whole layer, summed over ranks in bfloat16, are off by 4 %
    assert_close(one, other, rtol=tolerance, atol=tolerance * max(1.0, other.abs().max().item()), equal_nan=True, msg=lambda text: f"{name}: {text}\n{told}")


def region(name: str | None) -> Any:
    return tandem.autocast(recipe=RECIPES[name]()) if name else contextlib.nullcontext()


def initialize(r: random.Random, model: torch.nn.Module, std: float = 0.5) -> None:
    """Draws values, and freezes some parameters."""
    for param in model.parameters():
        torch.nn.init.normal_(param, std=std)
    frozen = [param for param in model.parameters() if r.random() < 0.15]
    for param in frozen[: sum(1 for _ in model.parameters()) - 1]:
        param.requires_grad_(False)


def check_case(rank: int, size: int, mesh: DeviceMesh, r: random.Random) -> None:
    kind = r.choice(("module", "blocks", "sequential"))
    model, extras = module(r, "grouped") if kind == "module" else (blocks(r), []) if kind == "blocks" else sequential(r, is_local=True)
    initialize(r, model, std=0.2 if kind == "blocks" else 0.5)
    dtype = r.choice((torch.float32, torch.float32, torch.bfloat16)) if kind != "blocks" else torch.float32
    low = r.choice((None, None, *RECIPES)) if dtype == torch.float32 else None
    model.to(dtype)
    plain = copy.deepcopy(model)
    parallel, way = wrapped(r, model, mesh)
    told = f"{plain}, {way}, {dtype}, recipe {low}"
    shape = (ROWS, 1, HIDDEN) if "Attention" in told or "Transformer" in told else (ROWS, HIDDEN)
    optimizers = [torch.optim.SGD([p for p in of.parameters() if p.requires_grad], lr=0.01) for of in (plain, parallel)]
    for _ in range(STEPS):
        of_ranks = [given(extras, shape, dtype) for _ in range(size)]
        x, grad, *others = of_ranks[rank]
        with region(low):
            y = parallel(x, *others)
        y.backward(grad)
        own_x = x.grad
        for number, (x, grad, *others) in enumerate(of_ranks):
            x = x.detach().requires_grad_()
            with region(low):
                expected = plain(x, *others)
            expected.backward(grad)
            if number == rank:
                check_close("y", y, expected, told)
                check_close("gradient of x", own_x, x.grad, told)
        for (name, param), of_plain in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (param.grad is None) == (of_plain.grad is None), f"{name}: {told}"
            if of_plain.grad is not None:
                of_plain.grad /= size
                check_close(f"gradient of {name}", full(param.grad), of_plain.grad, told)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, param), of_plain in zip(model.named_parameters(), plain.parameters(), strict=True):
            check_close(f"{name} after a step", full(param).detach(), of_plain.detach(), told)


def plan_of(model: torch.nn.Module) -> dict[str, Any]:
    """Columns and rows of each MLP of ops, without the units whose halves a cut would part."""
    plan: dict[str, Any] = {}
    for name, block in model.named_children():
        linears = [i for i, op in enumerate(block) if isinstance(op, ops.Linear)] if isinstance(block, ops.Sequential) else []
        if linears and not any(isinstance(op, tuple(GATED)) for op in block):
            plan |= {f"{name}.{linears[0]}": ColwiseParallel(), f"{name}.{linears[1]}": RowwiseParallel()}
    return plan


def check_dtensors(rank: int, size: int, mesh: DeviceMesh, r: random.Random) -> None:
    """Parameters that all ranks hold whole, and rows that each holds some of; or whole rows, and parameters that a plan cuts."""
    has_plan = r.random() < 0.5
    model, extras = (blocks(r), []) if has_plan else sequential(r, is_local=False)
    initialize(r, model, std=0.2 if has_plan else 0.5)
    plain = copy.deepcopy(model)
    parallel = parallelize_module(model, mesh, plan_of(model)) if has_plan else distribute_module(model, mesh)
    placement = [r.choice((Shard(0), Replicate()))]
    told = f"{plain} of DTensors, {'plan' if has_plan else placement}"
    optimizers = [torch.optim.SGD([p for p in of.parameters() if p.requires_grad], lr=0.01) for of in (plain, parallel)]
    for _ in range(STEPS):
        whole = given(extras, (ROWS, 1, HIDDEN) if has_plan else (ROWS * size, HIDDEN), torch.float32)
        x, grad, *others = whole
        cut, cut_grad, *cut_others = (tensor.detach() if has_plan else distribute_tensor(tensor.detach(), mesh, placement) for tensor in whole)
        y = parallel(cut.requires_grad_(), *cut_others)
        y.backward(cut_grad)
        expected = plain(x, *others)
        expected.backward(grad)
        gradients = [(name, p.grad, q.grad) for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True) if q.grad is not None]
        for name, one, other in [("y", y, expected), ("x", cut.grad, x.grad), *gradients]:
            check_close(name, full(one), other, told)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, param), of_plain in zip(model.named_parameters(), plain.parameters(), strict=True):
            check_close(f"{name} after a step", full(param).detach(), of_plain.detach(), told)


def check_gated_units(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,))
    for unit in GATED:
        model = ops.Sequential(ops.Linear(HIDDEN, 2 * HIDDEN), unit(), ops.Linear(HIDDEN, HIDDEN))
        x = torch.randn(ROWS, HIDDEN)
        expected = model(x)
        for child in (model[0], model[2]):
            fully_shard(child, mesh=mesh)
        check_close("y", model(x), expected, f"{model}")


def check_cases(rank: int, size: int, seeds: range) -> None:
    mesh = init_device_mesh("cpu", (size,))
    for seed in seeds:
        torch.manual_seed(seed)
        r = random.Random(seed)
        try:
            (check_dtensors if r.random() < 0.25 else check_case)(rank, size, mesh, r)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
    dist.barrier()


def test_gated_units_behind_products_that_fsdp_shares() -> None:
    """The weight holds some rows on each rank, and is whole where it is multiplied."""
    on_ranks(2, check_gated_units)


def test_random_models_in_random_wrappings() -> None:
    on_ranks(2, check_cases, range(100))


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 4000, 500))
def test_more_models_in_wrappings(first: int) -> None:
    on_ranks(2, check_cases, range(first, first + 500))
