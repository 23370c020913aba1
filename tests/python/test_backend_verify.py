"""The option `verify` of the backend: what it can compare, and that it changes nothing of the call around it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import tandem
from tandem.backend import place

SIZE = 8
LINEAR, OTHER = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)


@pytest.fixture
def x(fresh_dynamo):
    return torch.randn(3, SIZE, requires_grad=True)


def keep_products(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) else CheckpointPolicy.PREFER_RECOMPUTE


def contexts():
    return create_selective_checkpoint_contexts(keep_products)


def some(function, x):
    return checkpoint(function, x, use_reentrant=False, context_fn=contexts)


def compare(function, x):
    """Verified, compiled results and gradients are those of torch."""
    results = []
    for call in (tandem.compile(function, verify=True), function):
        for linear in (LINEAR, OTHER):
            linear.zero_grad()
        tensors = [x.detach().requires_grad_(), *LINEAR.parameters(), *OTHER.parameters()]
        y = call(tensors[0])
        y.square().sum().backward()
        results.append([y, *(each.grad for each in tensors)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("again", [lambda f, x: checkpoint(f, x, use_reentrant=False), lambda f, x: checkpoint(f, x, use_reentrant=True), some])
def test_what_is_computed_again(x, again):
    """A checkpoint counts what is saved between, or keeps results by their number."""
    compare(lambda x: x + again(lambda x: F.silu(LINEAR(x)).sin() @ OTHER.weight, x), x)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_no_numbers_are_drawn(x, use_reentrant):
    """y = x * mask, whose gradient shows the mask of what is computed again."""
    eye = nn.Parameter(torch.eye(SIZE))
    results = []
    for verify in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        y = tandem.compile(lambda x: checkpoint(lambda x: F.dropout(F.linear(x, eye), 0.5), x, use_reentrant=use_reentrant), verify=verify)(x)
        (grad_x,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(y, x * grad_x)
        results.append(y)
    assert torch.equal(*results)


SYMBOLS = {
    "a probability": lambda x: OTHER(F.dropout(input=LINEAR(x), p=PROBABILITY.p, training=True)),
    "sizes": lambda x: OTHER(LINEAR(x.reshape(-1, SIZE)).view(*x.shape[:-1], SIZE)),
    "an eps": lambda x: LINEAR(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + PROBABILITY.p)),
}
PROBABILITY = nn.Dropout(0.25)


@pytest.mark.parametrize("name", SYMBOLS)
def test_numbers_that_are_symbols(x, name):
    own = tandem.compile(SYMBOLS[name], verify=True, dynamic=True)
    for rows in (3, 5):
        given = torch.randn(2, rows, SIZE, requires_grad=True)
        result = own(given)
        result.sum().backward()
        if name != "a probability":
            torch.testing.assert_close(result, SYMBOLS[name](given), rtol=1e-4, atol=1e-5)


def test_results_in_a_wider_dtype():
    """The graph rounds a product and the sum with its bias to 16 bits before it widens it, and a pipeline rounds once."""
    for seed in (3, 8, 9):
        torch._dynamo.reset()
        torch.manual_seed(seed)
        head, given, targets = nn.Linear(4, 5).bfloat16(), torch.randn(10, 4, dtype=torch.bfloat16), torch.randint(5, (10,))
        loss = tandem.compile(lambda x, targets, head=head: F.cross_entropy(head(x).float(), targets), verify=True)(given, targets)
        torch.testing.assert_close(loss, F.cross_entropy(head(given).float(), targets), rtol=1e-2, atol=1e-2)


def test_what_is_no_operand(x):
    """A dtype of a tensor that the pipeline does not read."""
    like = torch.ones(1)

    def norm(x):
        return LINEAR((x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)).type_as(like))

    compare(norm, x)


def test_a_region_that_begins_with_a_write(x):
    compare(lambda x: LINEAR(F.relu(x * 2, inplace=True)), x)
    compare(lambda x: LINEAR((x * 2).add_(x)), x)


def test_a_gradient_that_is_missing(monkeypatch, x):
    monkeypatch.setattr(place.Made, "fill", lambda made, weights: [each.of.update({each.name: weights[each.weight].detach()}) for each in made.places])
    own = tandem.compile(nn.LayerNorm(SIZE), verify=True)
    with pytest.raises(AssertionError, match="pipeline 0, LayerNorm of the model: expected the gradient of parameter 0 as the graph computes it, torch.float32 .8., got nothing. Exclude its module"):
        own(x.detach())
