"""Codes of the weights of compiled models: made once for all graphs of a model, and never those of other numbers."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from weights import RECIPES, made_in

import tandem
from tandem.backend import report

SIZE = 32


class Model(nn.Module):
    """A product as it is written most, one of a weight as it lies, one of a weight that is computed."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(SIZE, SIZE)
        self.flat, self.base, self.change = (nn.Parameter(torch.randn(SIZE, SIZE) * 0.2) for _ in range(3))

    def forward(self, x):
        return F.linear(F.silu(self.up(x)) @ self.flat, self.base + self.change)


@pytest.fixture(params=RECIPES.values(), ids=RECIPES)
def low(request):
    torch._dynamo.reset()
    torch.manual_seed(0)
    return request.param


def train(compiled, x, optimizer=None):
    compiled(x).square().sum().backward()
    if optimizer is not None:
        optimizer.step()


def evaluate(compiled, *rows):
    with torch.no_grad():
        for each in rows:
            compiled(torch.randn(each, SIZE))


def test_codes_are_made_once_for_all_graphs(low):
    """Micro-batches find them in forward and backward; evaluation and generation, whose shapes have graphs of their own, make at most what training has not."""
    model, x = Model(), torch.randn(64, SIZE, requires_grad=True)
    compiled = tandem.compile(model, recipe=low)
    assert made_in(lambda: train(compiled, x)) == (3, 3)
    assert made_in(lambda: [train(compiled, x) for _ in range(3)]) == (0, 18)
    assert made_in(lambda: evaluate(compiled, 64))[0] <= 3  # codes of rows alone, where a format has columns too
    assert made_in(lambda: evaluate(compiled, 7, 1, 1, 9, 1)) == (0, 15)
    assert made_in(lambda: train(compiled, x, torch.optim.SGD(model.parameters(), lr=1e-4))) == (0, 6)
    assert made_in(lambda: train(compiled, x)) == (3, 3)
    assert len([*report.pipelines_of(model)]) == 1 < len([*report.reports_of(model)])


@torch.no_grad()
def swap(model):
    model.up.weight = nn.Parameter(model.up.weight * 2)


WRITES = {
    "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=1e-4).step(),
    "fused optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step(),
    "data": lambda model: [parameter.data.mul_(2) for parameter in model.parameters()],
    "data that is replaced": lambda model: [setattr(parameter, "data", parameter.data * 2) for parameter in model.parameters()],
    "load_state_dict": lambda model: model.load_state_dict({name: tensor * 2 for name, tensor in model.state_dict().items()}),
    "load_state_dict, assigned": lambda model: model.load_state_dict({name: tensor * 2 for name, tensor in model.state_dict().items()}, assign=True),
    "storage": lambda model: [torch.from_numpy(parameter.detach().numpy()).mul_(2) for parameter in model.parameters()],
    "another parameter": swap,
}


def test_codes_are_of_the_weights_as_they_are(low):
    """In training and in evaluation, whichever graph has made codes before the write and after it."""
    model, x = Model(), torch.randn(64, SIZE, requires_grad=True)
    compiled = tandem.compile(model, recipe=low)
    for write in WRITES:
        for first in (train, lambda compiled, x: evaluate(compiled, 64, 1)):
            model.load_state_dict(Model().state_dict())
            model.zero_grad()
            train(compiled, x)
            first(compiled, x)
            WRITES[write](model)
            results = []
            for each in (compiled, tandem.compile(copy.deepcopy(model), recipe=low)):
                with torch.no_grad():
                    few = each(x[:1])
                given = x.detach().requires_grad_()
                y = each(given)
                y.square().sum().backward()
                results.append([few, y, given.grad])
            assert all(map(torch.equal, *results)) and results[0][1].isfinite().all(), write


def test_models_that_are_alike_share_nothing(low):
    first, second = Model(), Model()
    x = torch.randn(64, SIZE)
    one, other = (tandem.compile(model, recipe=low) for model in (first, second))
    evaluate(one, 64)
    assert made_in(lambda: evaluate(other, 64)) == (3, 0)
    assert not torch.equal(one(x), other(x))
    assert {*report.pipelines_of(first)}.isdisjoint(report.pipelines_of(second))
