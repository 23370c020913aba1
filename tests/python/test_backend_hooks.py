"""Hooks of gradients on values inside compiled models."""

import copy
import random

import pytest
import torch
from test_backend import HIDDEN, Decoder
from torch import nn
from torch.testing import assert_close

import tandem


@pytest.mark.parametrize("seed", range(4))
def test_hooks_see_the_gradient_of_all_readers(seed, fresh_dynamo):
    """Forward hooks of modules register them on inputs and outputs, that is, behind readers of the value in the graph."""
    torch.manual_seed(seed)
    model, x, draw = Decoder(2).double(), torch.randn(2, 5, HIDDEN, dtype=torch.float64), random.Random(seed)
    hooked = [(name, draw.choice(("input", "output")), draw.choice(("halve", "keep"))) for name, _ in model.named_modules() if name and draw.random() < 0.25]
    results = []
    for backend in ("eager", "tandem"):
        torch._dynamo.reset()
        own, given, kept = copy.deepcopy(model), x.clone().requires_grad_(), []
        for name, which, kind in hooked:

            def hook(module, inputs, output, which=which, kind=kind):
                value = inputs[0] if which == "input" else output
                if kind == "keep":
                    value.retain_grad()
                    module.kept = value
                else:
                    value.register_hook(lambda gradient: gradient / 2)

            own.get_submodule(name).register_forward_hook(hook)
        y = torch.compile(own, backend=backend)(given)
        y.pow(2).sum().backward()
        kept = [module.kept.grad for module in own.modules() if hasattr(module, "kept")]
        results.append([y, given.grad, *[parameter.grad for parameter in own.parameters()], *kept])
    assert_close(*results, rtol=1e-4, atol=1e-6)  # the norms of the model compute in float32


def test_a_hook_of_a_value_without_other_readers(fresh_dynamo):
    class Hooked(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            h = self.a(x)
            y = self.b(torch.relu(h))
            h.register_hook(lambda gradient: gradient * 2)
            return y

    model, x = Hooked(), torch.randn(4, 8)
    gradients = [torch.autograd.grad(call(x).sum(), model.a.weight)[0] for call in (model, tandem.compile(model))]
    assert_close(*gradients)
    assert "2 of 2 products in 2 pipelines" in tandem.explain(model)


def test_values_that_code_behind_a_graph_break_hooks(fresh_dynamo):
    """Dynamo breaks the graph at `retain_grad` and at hooks with effects: the value is a result of the graph before, which also reads it."""

    class Kept(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.a, self.b, self.seen = nn.RMSNorm(8), nn.Linear(8, 8), nn.Linear(8, 8), []

        def forward(self, x):
            r = x + self.a(self.norm(x))
            y = r + self.b(self.norm(r))
            r.retain_grad()
            r.register_hook(lambda gradient: self.seen.append(gradient.abs().sum().item()))
            self.r = r
            return y

    model, x = Kept(), torch.randn(4, 8)
    for call in (model, tandem.compile(model)):
        call(x).sum().backward()
        assert_close(model.r.grad.abs().sum().item(), model.seen[-1])
    assert len(model.seen) == 2
    assert_close(*model.seen)
