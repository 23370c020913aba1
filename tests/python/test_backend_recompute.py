"""Compiled models whose activations are computed again in backward: with the numbers of forward, and as one step of a recipe."""

import copy

import pytest
import torch
import torch.nn.functional as F
from support import assert_equal
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import tandem
from tandem.recipe import DelayedScaling

SIZE = 16
RECIPE = DelayedScaling(amax_history_len=4)


@pytest.fixture
def x(fresh_dynamo):
    return torch.randn(3, 5, SIZE, requires_grad=True)


class Dropped(nn.Module):
    """A dropout in a pipeline, and one of the graph."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(SIZE, SIZE, bias=False)
        nn.init.eye_(self.up.weight)

    def forward(self, x):
        return F.dropout(F.dropout(self.up(x), 0.5, True).view(-1), 0.3, True)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("rest", ["eager", "inductor"])
def test_dropout_drops_the_same_again(x, rest, use_reentrant):
    """y = x * mask: its gradient shows the mask of backward."""
    model = Dropped()
    y = tandem.compile(lambda x: checkpoint(model, x, use_reentrant=use_reentrant), rest=rest)(x)
    y.sum().backward()
    torch.testing.assert_close(y, (x * x.grad).view(-1))
    assert 0.2 < (y == 0).float().mean() < 0.95


class Block(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.up, self.down, self.side, self.wrap = *(nn.Linear(SIZE, SIZE) for _ in range(3)), wrap

    def half(self, x):
        return F.silu(self.up(x)).sin()

    def whole(self, x):
        return x + self.down(self.wrap(self.half, x)).sin() + self.side(x.cos())

    def forward(self, x):
        return self.wrap(self.whole, x)


def plain(function, x):
    return function(x)


@pytest.mark.parametrize("outside", [False, True], ids=["recipe of the backend", "region of the caller"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recipe_with_state_sees_one_step(x, use_reentrant, outside):
    """Parts inside parts too. Gradients and state have the bits of the model that keeps its activations."""
    def again(function, x):
        return checkpoint(function, x, use_reentrant=use_reentrant)

    results = []
    model = nn.Sequential(Block(plain), Block(plain))
    for wrap in (plain, again):
        own = copy.deepcopy(model)
        for block in own:
            block.wrap = wrap
        torch._dynamo.reset()
        compiled = tandem.compile(own, recipe=None if outside else RECIPE)
        for factor in (1, 10, 3, 30):
            given = (factor * x).detach().requires_grad_()
            with tandem.autocast(enabled=outside, recipe=RECIPE):
                y = compiled(given)
            y.square().sum().backward()
        results.append([y, given.grad, *(p.grad for p in own.parameters()), *tandem.recipe_state_dict(own).values()])
    assert len(results[0]) == 2 + 12 + 2 * 3 * 4
    assert_equal(*results)


class Cast(nn.Module):
    """A part with a region of torch.autocast, which holds the last value that backward reads."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def body(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.b(torch.relu(self.a(x)))

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False)


@pytest.mark.parametrize("is_inside", [False, True])
def test_regions_of_autocast_end_in_a_recompute(x, is_inside):
    """Otherwise torch never empties its cache of weights, and all code under autocast reads those of before the optimizer's step."""
    compiled, plain = tandem.compile(Cast()), nn.Linear(SIZE, SIZE)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_inside):
            compiled(x).float().sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        plain(x)
    plain.weight.data.zero_()
    plain.bias.data.zero_()
    with torch.autocast("cpu", torch.bfloat16):
        assert not plain(x).any()


seen = []


def policy(ctx, op, *args, **kwargs):
    seen.append(op)
    return CheckpointPolicy.PREFER_RECOMPUTE


def contexts():
    return create_selective_checkpoint_contexts(policy)


def test_who_chooses_what_is_kept_keeps_it(x):
    """Of a selective checkpoint torch's own call stays."""
    seen.clear()
    linear = nn.Linear(SIZE, SIZE)
    y = tandem.compile(lambda x: checkpoint(lambda x: linear(x).sin(), x, use_reentrant=False, context_fn=contexts))(x)
    y.sum().backward()
    assert seen
    grad, x.grad = x.grad, None
    linear(x).sin().sum().backward()
    torch.testing.assert_close(grad, x.grad)
