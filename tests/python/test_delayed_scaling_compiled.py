"""DelayedScaling in compiled code: steps of eager, calls before their backwards, regions of one graph."""

from __future__ import annotations

import copy

import pytest
import torch
from delayed import RECIPE, inputs, settled, states
from support import llama_mlp, randomize
from torch._functorch import config as functorch_config

import tandem
from tandem import ops


@pytest.mark.parametrize("inside", [False, True], ids=["region outside", "region inside"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_steps_are_those_of_eager(backend, inside):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = randomize(llama_mlp(16, 32))
    expected = copy.deepcopy(model)

    def within(module, x):
        with tandem.autocast(recipe=RECIPE):
            return module(x)

    compiled = torch.compile(within if inside else model, fullgraph=True, backend=backend)
    for k in range(4):
        x = torch.randn(6, 16) * 3.0**k
        ys = []
        for call in (lambda leaf: compiled(model, leaf) if inside else within(compiled, leaf), lambda leaf: within(expected, leaf)):
            leaf = x.clone().requires_grad_()
            y = call(leaf)
            y.square().sum().backward()
            ys.append((y.detach(), leaf.grad))
        for actual, wanted in zip(*ys, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=2e-2, atol=2e-2 * wanted.abs().max().item())
        for mine, theirs in zip((m for m in model.modules() if hasattr(m, "pending")), (m for m in expected.modules() if hasattr(m, "pending")), strict=True):
            for actual, wanted in zip(settled(mine), settled(theirs), strict=True):
                torch.testing.assert_close(actual, wanted, rtol=2e-2, atol=0)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("case", ["two calls, one loss", "two calls, a backward each", "a retained graph"])
@functorch_config.patch(donated_buffer=False)  # no graph is retained with it
def test_compiled_calls_before_their_backwards(case, backend):
    """Each backward writes the state that the others read: none may be held to the version that its forward saw."""
    torch._dynamo.reset()
    model = randomize(ops.Sequential(ops.Linear(16, 16), ops.GELU(), ops.Linear(16, 16)))
    expected, x = copy.deepcopy(model), torch.randn(6, 16)
    results = []
    for module, call in ((model, torch.compile(model, fullgraph=True, backend=backend)), (expected, expected)):
        for _ in range(2):
            with tandem.autocast(recipe=RECIPE):
                ys = [call(x.clone().requires_grad_()), call(2 * x.clone().requires_grad_())]
            if case == "two calls, one loss":
                (ys[0] + ys[1]).square().sum().backward()
            elif case == "two calls, a backward each":
                for y in ys:
                    y.square().sum().backward()
            else:
                for keeps in (True, False):
                    ys[0].square().sum().backward(retain_graph=keeps)
        results.append([*(parameter.grad for parameter in module.parameters()), *settled(states(module[0])[1]), *settled(states(module[2])[1])])
    for actual, wanted in zip(*results, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=2e-2, atol=2e-2 * wanted.abs().max().item())


def test_two_regions_of_one_graph_are_two_steps():
    torch._dynamo.reset()
    linear = ops.Linear(8, 8)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def two(x):
        with tandem.autocast(recipe=RECIPE):
            a = linear(x)
        with tandem.autocast(recipe=RECIPE):
            return a + linear(x * 2)

    x = inputs(1)[0]
    two(x).sum().backward()
    _, history = settled(states(linear)[0])
    torch.testing.assert_close(history[:, 0], torch.stack([torch.zeros(()), torch.zeros(()), x.abs().max(), 2 * x.abs().max()]))
