"""Plans of torch.distributed.tensor.parallel over two ranks, against one process."""

from __future__ import annotations

import copy
import itertools
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleOutput, RowwiseParallel, SequenceParallel, parallelize_module
from torch.testing import assert_close

import tandem
from tandem import ops, recipe

ROWS, HIDDEN, WIDE = 6, 8, 16


def full(tensor: torch.Tensor | None) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def mlp(*first: torch.nn.Module, unit: Any = ops.GELU, columns: int = WIDE, **kwargs: Any) -> ops.Sequential:
    model = ops.Sequential(*first, ops.Linear(HIDDEN, WIDE, **kwargs), unit(), ops.Linear(columns, HIDDEN))
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.5)
    return model


def check_plan(
    rank: int, size: int, model: torch.nn.Module, plan: dict[str, Any], sequence_dim: int | None = None, shape: tuple[int, ...] = (ROWS, HIDDEN)
) -> None:
    """x is whole, or this rank's share of a dimension; so is y."""

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if sequence_dim is None else tensor.chunk(size, sequence_dim)[rank]

    whole = copy.deepcopy(model)
    parallelize_module(model, init_device_mesh("cpu", (size,)), plan)
    x, grad = torch.randn(shape, requires_grad=True), torch.randn(shape)
    x_own = own(x.detach()).clone().requires_grad_()
    expected, y = whole(x), model(x_own)
    y = y.to_local() if isinstance(y, DTensor) and sequence_dim is not None else full(y)
    expected.backward(grad)
    y.backward(own(grad))
    assert_close(y, own(expected))
    assert x.grad is not None
    assert_close(x_own.grad, own(x.grad))
    for param, of_whole in zip(model.parameters(), whole.parameters(), strict=True):
        assert_close(full(param.grad), of_whole.grad)


def check_plans(rank: int, size: int) -> None:
    columns, rows = ColwiseParallel(), RowwiseParallel()
    check_plan(rank, size, mlp(), {"0": columns, "2": rows})
    layers = torch.nn.Sequential(tandem.Linear(HIDDEN, WIDE), torch.nn.GELU(), tandem.Linear(WIDE, HIDDEN))
    check_plan(rank, size, layers, {"0": columns, "2": rows})
    check_plan(rank, size, mlp(), {"0": ColwiseParallel(use_local_output=False), "2": rows})  # GELU of a DTensor
    check_plan(rank, size, mlp(unit=ops.SwiGLU, columns=WIDE // 2), {"0": ColwiseParallel(use_local_output=False), "2": rows})
    gathering = PrepareModuleOutput(output_layouts=Shard(-1), desired_output_layouts=Replicate())
    model = ops.Sequential(ops.Linear(HIDDEN, WIDE), ops.GELU(), ops.SwiGLU(), ops.Linear(WIDE // 2, HIDDEN))
    check_plan(rank, size, model, {"0": columns, "1": gathering, "3": RowwiseParallel(input_layouts=Replicate())})
    check_plan(rank, size, mlp(unit=ops.L2Normalization), {"0": ColwiseParallel(use_local_output=False), "2": rows})
    for norm in (ops.RMSNorm, ops.LayerNorm):
        between = {"1": ColwiseParallel(input_layouts=Shard(0)), "3": RowwiseParallel(output_layouts=Shard(0))}
        check_plan(rank, size, mlp(norm(HIDDEN)), {"0": SequenceParallel(sequence_dim=0), **between}, sequence_dim=0)


def check_sequences(rank: int, size: int) -> None:
    """The statistics of norms go with the rows, evenly shared or not."""
    for batch, norm in itertools.product((1, 2, 3), (ops.RMSNorm, ops.LayerNorm, lambda _: ops.L2Normalization())):
        between = {"1": ColwiseParallel(input_layouts=Shard(1)), "3": RowwiseParallel(output_layouts=Shard(1))}
        check_plan(rank, size, mlp(norm(HIDDEN)), {"0": SequenceParallel(), **between}, sequence_dim=1, shape=(batch, 4, HIDDEN))
    mesh = init_device_mesh("cpu", (size,))
    for of_x, of_grad in itertools.product((Shard(0), Shard(1), Shard(2), Replicate()), repeat=2):  # uneven shares
        norm = ops.LayerNorm(HIDDEN)
        whole = copy.deepcopy(norm)
        for frozen in (False, True):  # other results of the same backward
            for module in (whole, distribute_module(norm, mesh) if not frozen else norm):
                module.weight.requires_grad_(not frozen)
                module.zero_grad()
            x, grad = torch.randn(3, 5, HIDDEN, requires_grad=True), torch.randn(3, 5, HIDDEN)
            shared = distribute_tensor(x.detach(), mesh, [of_x]).requires_grad_()
            norm(shared).backward(distribute_tensor(grad, mesh, [of_grad]))
            whole(x).backward(grad)
            assert_close(full(shared.grad), x.grad)
            for param, of_whole in zip(norm.parameters(), whole.parameters(), strict=True):
                assert_close(full(param.grad), of_whole.grad)


def check_modulation(rank: int, size: int) -> None:
    """Every placement of x and of vectors, and every subset of gradients; with as many sequences as ranks, so that no size tells them apart."""
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(0)
    x, *vectors, grad = torch.randn(size, 4, 6), *torch.randn(2, size, 1, 6), torch.randn(size, 4, 6)
    for of_x, of_vectors in itertools.product([Replicate(), Shard(0), Shard(1), Shard(2)], [Replicate(), Shard(0), Shard(2)]):
        for requested in itertools.product([True, False], repeat=3):
            if not any(requested):
                continue
            whole = [tensor.clone().requires_grad_(wants) for tensor, wants in zip((x, *vectors), requested, strict=True)]
            shared = [distribute_tensor(tensor.detach(), mesh, [placement]).requires_grad_(wants) for tensor, placement, wants in zip(whole, (of_x, of_vectors, of_vectors), requested, strict=True)]
            ops.Modulate()(*shared).backward(distribute_tensor(grad, mesh, [of_x]))
            (whole[0] * (1 + whole[1]) + whole[2]).backward(grad)
            for one, other in zip(shared, whole, strict=True):
                if other.grad is not None:
                    assert_close(full(one.grad), other.grad, msg=f"{of_x}, {of_vectors}, {requested}")


def check_rows_of_parts(rank: int, size: int) -> None:
    """RowwiseParallel reads `weight`, which is no leaf: the parts are distributed one by one."""
    mesh = init_device_mesh("cpu", (size,))
    model = ops.Linear(HIDDEN, WIDE, parameters_split=("gate", "up"))
    whole = copy.deepcopy(model)
    for name, param in [*model.named_parameters()]:
        placement = Shard(1) if param.dim() == 2 else Replicate()
        model.register_parameter(name, torch.nn.Parameter(distribute_tensor(param, mesh, [placement])))
    x = torch.randn(ROWS, HIDDEN)
    y, expected = full(model(distribute_tensor(x, mesh, [Shard(1)]))), whole(x)
    y.sum().backward()
    expected.sum().backward()
    assert_close(y, expected)
    for param, of_whole in zip(model.parameters(), whole.parameters(), strict=True):
        assert_close(full(param.grad), of_whole.grad)


def test_rules_are_there_whichever_is_imported_first() -> None:
    rules = "DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs"
    for first, second in itertools.permutations(("import tandem, torch", "from torch.distributed.tensor import DTensor")):
        code = f"{first}\n{second}\nassert torch.ops.tandem.norm_backward.default in {rules}"
        subprocess.run([sys.executable, "-c", code], check=True)


def check_refusals(rank: int, size: int) -> None:
    """What would cut halves."""
    mesh, x = init_device_mesh("cpu", (size,)), torch.randn(ROWS, HIDDEN)
    split = parallelize_module(mlp(unit=ops.SwiGLU, columns=WIDE // 2, parameters_split=("gate", "up")), mesh, {"0": ColwiseParallel()})
    text = (
        "Linear: expected gate_weight, a part of a product (parameters_split), on every rank whole or cut along its columns (by distribute_tensor, "
        'Shard(1)), got placements (Shard(dim=0),): a rank\'s share of y would be columns of one part. Build it with tensor_parallel_mode="column", or one Linear for each part.'
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        split(x)
    text = (
        "SwiGLU: expected all columns of the Linear before it, whose halves it multiplies, got those of one rank. Parallelize with "
        'ColwiseParallel(use_local_output=False), build the Linear with tensor_parallel_mode="column", or one Linear for each half.'
    )
    between = (ops.Identity(), ops.ConstantScale(1.0), ops.Dropout(0.0), ops.Reshape((-1, WIDE // size)), ops.Quantize(), ops.GELU())
    for kept in ((), *[(op,) for op in between], between):
        packed = ops.Sequential(ops.Linear(HIDDEN, WIDE), *kept, ops.SwiGLU(), ops.Linear(WIDE // 2, HIDDEN))
        parallelize_module(packed, mesh, {"0": ColwiseParallel(), str(len(packed) - 1): RowwiseParallel()})
        with pytest.raises(ValueError, match=re.escape(text)):
            packed(x)
    text = (
        "L2Normalization: expected all columns of the Linear before it, whose norm it divides by, got those of one rank. Parallelize with "
        "ColwiseParallel(use_local_output=False)."
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        parallelize_module(mlp(unit=ops.L2Normalization), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})(x)
    dist.barrier()


def check_missing_rules(rank: int, size: int) -> None:
    """What DTensor has no rule for."""
    mesh = init_device_mesh("cpu", (size,))
    x = distribute_tensor(torch.randn(ROWS, HIDDEN), mesh, [Shard(0)])
    text = (
        "Linear: expected a torch.Tensor under a recipe, as quantizers have no sharding rule, got a DTensor. Build the Linear with tensor_parallel_mode, or "
        "call it without a recipe."
    )
    planned = parallelize_module(mlp(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for model, given in ((planned, full(x)), (distribute_module(mlp(), mesh), x)):
        with tandem.autocast(recipe=recipe.Float8CurrentScaling()), pytest.raises(NotImplementedError, match=re.escape(text)):
            model(given)
    text = (
        "Dropout: expected a torch.Tensor in training, as it has no sharding rule, got a DTensor. Use torch.nn.Dropout, or give it what a rank holds "
        "(use_local_output=True)."
    )
    dropout = ops.Dropout(0.5)
    with pytest.raises(NotImplementedError, match=re.escape(text)):
        dropout(x)
    assert_close(full(dropout.eval()(x)), full(x))


@pytest.mark.parametrize(
    "check", [check_plans, check_sequences, check_modulation, check_rows_of_parts, check_refusals, check_missing_rules], ids=lambda check: check.__name__
)
def test_on_two_ranks(check: Any) -> None:
    on_ranks(2, check)
