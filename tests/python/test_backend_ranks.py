"""Compiled models that two ranks share, wrapped before or after they are compiled: gradients are those of the same ranks without the backend."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import tandem
from tandem.backend.report import _graphs, reports_of
from tandem.recipe import DelayedScaling

SIZE = 16
BUCKET = 2000  # bytes: Dynamo cuts the graph between buckets
RECIPE = DelayedScaling(amax_history_len=4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(SIZE)
        self.q, self.k, self.v, self.o, self.gate, self.up, self.down = (nn.Linear(SIZE, SIZE, bias=False) for _ in range(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        x = x + self.o(F.scaled_dot_product_attention(self.q(h), self.k(h), self.v(h), is_causal=True))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Block(), Block(), nn.Linear(SIZE, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x)))


@contextlib.contextmanager
def small_first_bucket() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", BUCKET)
        yield


def ddp(model: Model) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=BUCKET / 2**20)


def fsdp(model: Model) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for block in (model.first, model.second):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def made(wrap: str, order: str, **options: object) -> tuple[nn.Module, nn.Module]:
    """The model, the same for all calls, and what is called."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model()
    if order == "compiled, then wrapped":
        model.compile(backend="tandem", options=options)
    called = {"ddp": ddp, "fsdp": fsdp}[wrap](model)
    if order == "wrapped, then compiled":
        called.compile(backend="tandem", options=options)
    return model, called


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@small_first_bucket()
def check_gradients(rank: int, size: int, wrap: str, order: str) -> None:
    expected, eager = made(wrap, "eager")
    model, called = made(wrap, order)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (expected, model)]
    generator = torch.Generator().manual_seed(rank)
    for rows in (2, 2):
        x = torch.randn(rows, 5, SIZE, generator=generator)
        results = []
        for each, optimizer in zip((eager, called), optimizers, strict=True):
            optimizer.zero_grad()
            y = each(x)
            y.square().mean().backward()
            results.append(y.detach())
        assert_close(*results)
        for (name, p), q in zip(expected.named_parameters(), model.parameters(), strict=True):
            assert_close(full(q.grad), full(p.grad), rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
        for optimizer in optimizers:
            optimizer.step()
    if wrap == "ddp":
        assert len({report.number for report in reports_of(model)}) > 1, "cut"
    assert "SwiGLU" in tandem.explain(model)
    reports = [graph._tandem_report for graph in list(_graphs)]
    assert sum(each.products for each in reports) == sum(each.products_inside for each in reports) > 0
    assert any("SwiGLU" in piece.ops for each in reports for piece in each.pieces)


@small_first_bucket()
def check_state(rank: int, size: int, wrap: str, order: str) -> None:
    """The next step of a run that was saved has the bits of the run that went on; keys are those of the model, whoever wraps it."""
    x = torch.randn(2, 5, SIZE)
    model, called = made(wrap, order, recipe=RECIPE)
    for factor in (1, 5):
        called(factor * x).square().mean().backward()
    state = tandem.recipe_state_dict(model)
    named = [name for key in state for name in key.removesuffix(".forward.scale").split("+") if key.endswith(".forward.scale")]
    assert {*named} == {name for name, parameter in Model().named_parameters() if parameter.dim() == 2}
    again, called_again = made(wrap, order, recipe=RECIPE)
    tandem.load_recipe_state_dict(again, state)
    assert torch.equal(called_again(x), called(x))


@pytest.mark.parametrize("order", ["compiled, then wrapped", "wrapped, then compiled"])
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_gradients_are_those_of_eager(wrap: str, order: str) -> None:
    on_ranks(2, check_gradients, wrap, order)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_state_is_saved_and_loaded(wrap: str) -> None:
    on_ranks(2, check_state, wrap, "compiled, then wrapped")


def check_tensor_parallel(rank: int, size: int) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, SIZE))
    parallelize_module(model, init_device_mesh("cpu", (size,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    compiled = tandem.compile(model, recipe=RECIPE)
    with pytest.warns(UserWarning, match="got 2 of 2 that stay in high precision, the first of 0: linear is a DTensor"):
        compiled(torch.randn(2, SIZE))
    assert "0 of 2 products" in tandem.explain(compiled)


def test_a_recipe_on_what_parallelize_module_shards_is_warned_of() -> None:
    on_ranks(2, check_tensor_parallel)
