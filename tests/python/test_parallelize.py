"""Plans of torch.distributed.tensor.parallel over two ranks, against one process."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.testing import assert_close

import tandem
from tandem import ops

ROWS, HIDDEN, WIDE = 6, 8, 16


def full(tensor: torch.Tensor | None) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def mlp(*first: torch.nn.Module, unit: Any = ops.GELU, columns: int = WIDE, **kwargs: Any) -> ops.Sequential:
    model = ops.Sequential(*first, ops.Linear(HIDDEN, WIDE, **kwargs), unit(), ops.Linear(columns, HIDDEN))
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.5)
    return model


def check_plan(rank: int, size: int, model: torch.nn.Module, plan: dict[str, Any], is_sequence: bool = False) -> None:
    """x is whole, or, where `is_sequence`, this rank's rows; so is y."""
    whole = copy.deepcopy(model)
    parallelize_module(model, init_device_mesh("cpu", (size,)), plan)
    x, grad = torch.randn(ROWS, HIDDEN, requires_grad=True), torch.randn(ROWS, HIDDEN)
    own = slice(rank * ROWS // size, (rank + 1) * ROWS // size) if is_sequence else slice(None)
    x_own = x.detach()[own].clone().requires_grad_()
    expected, y = whole(x), full(model(x_own))
    expected.backward(grad)
    y.backward(grad[own])
    assert_close(y, expected[own])
    assert x.grad is not None
    assert_close(x_own.grad, x.grad[own])
    for param, of_whole in zip(model.parameters(), whole.parameters(), strict=True):
        assert_close(full(param.grad), of_whole.grad)


def check_plans(rank: int, size: int) -> None:
    columns, rows = ColwiseParallel(), RowwiseParallel()
    check_plan(rank, size, mlp(), {"0": columns, "2": rows})
    layers = torch.nn.Sequential(tandem.Linear(HIDDEN, WIDE), torch.nn.GELU(), tandem.Linear(WIDE, HIDDEN))
    check_plan(rank, size, layers, {"0": columns, "2": rows})
    check_plan(rank, size, mlp(), {"0": ColwiseParallel(use_local_output=False), "2": rows})  # GELU of a DTensor
    check_plan(rank, size, mlp(unit=ops.SwiGLU, columns=WIDE // 2), {"0": ColwiseParallel(use_local_output=False), "2": rows})
    for norm in (ops.RMSNorm, ops.LayerNorm):
        between = {"1": ColwiseParallel(input_layouts=Shard(0)), "3": RowwiseParallel(output_layouts=Shard(0))}
        check_plan(rank, size, mlp(norm(HIDDEN)), {"0": SequenceParallel(sequence_dim=0), **between}, is_sequence=True)


def test_plans() -> None:
    on_ranks(2, check_plans)


def check_refusals(rank: int, size: int) -> None:
    mesh, x = init_device_mesh("cpu", (size,)), torch.randn(ROWS, HIDDEN)
    split = parallelize_module(mlp(unit=ops.SwiGLU, columns=WIDE // 2, parameters_split=("gate", "up")), mesh, {"0": ColwiseParallel()})
    text = (
        "Linear: expected gate_weight, a part of a product (parameters_split), on every rank whole or cut along its columns, got placements "
        '(Shard(dim=0),): a rank\'s share of y would be columns of one part. Build it with tensor_parallel_mode="column", or one Linear for each part.'
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        split(x)
    packed = parallelize_module(mlp(unit=ops.SwiGLU, columns=WIDE // 2), mesh, {"0": ColwiseParallel()})
    text = (
        "SwiGLU: expected all columns of the Linear before it, whose halves it multiplies, got those of one rank. Parallelize with "
        'ColwiseParallel(use_local_output=False), build the Linear with tensor_parallel_mode="column", or one Linear for each half.'
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        packed(x)
    dist.barrier()


def test_what_would_cut_halves_is_refused() -> None:
    on_ranks(2, check_refusals)
