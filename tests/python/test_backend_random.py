"""Random models of what the backend looks for and of what only looks like it, against the model as it is."""

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from experts import grouped_product
from torch import nn
from torch.testing import assert_close

import tandem

SIZE = 8


def rms(r, x, other):
    mean = r.choice([x.pow(2).mean(-1, True), (x * x).mean(-1, keepdim=True), x.square().mean(-2, keepdim=True), other.pow(2).mean(-1, True)])
    return r.choice([lambda: x * torch.rsqrt(mean + 1e-3), lambda: x / torch.sqrt(mean + 1e-3), lambda: x / (mean.sqrt() + 1e-3)])()


def halves(r, m, x):
    h = m.two(x)
    a, b = r.choice([lambda: h.chunk(2, -1), lambda: h.split(SIZE, -1), lambda: (h[..., :SIZE], h[..., SIZE:]), lambda: (h[..., SIZE:], h[..., :SIZE])])()
    return r.choice([lambda: F.silu(a) * b, lambda: b * F.gelu(a, approximate="tanh"), lambda: torch.sigmoid(a) * b, lambda: F.relu(a) * a])()


ACTIVATIONS = [F.silu, F.relu, F.gelu, torch.sigmoid, torch.tanh, lambda x: x * torch.sigmoid(x), lambda x: F.relu(x) ** 2, lambda x: F.gelu(x, approximate="tanh"), lambda x: x * torch.sigmoid(1.702 * x)]


def written(r, m, x, other):
    """A value in whose memory somebody writes, before and after others have read it."""
    y = r.choice([m.a, m.norm, F.relu, lambda x: x * 1.5])(x)
    if r.number(3) == 0:
        y = m.b(x)
    read = m.c(y).cos() if r.number(2) else 0
    r.choice([lambda: y.add_(other), lambda: F.relu(y, True), lambda: y[..., :4].mul_(2), lambda: y.__setitem__(..., 0.5), lambda: y.clamp_(-1, 1)])()
    return y + read


STEPS = [
    lambda r, m, x, other: r.choice([m.a, m.b, m.c])(x),
    lambda r, m, x, other: r.choice([m.a, m.b, m.c])(x),
    lambda r, m, x, other: r.choice([lambda: x @ m.weight, lambda: x @ m.weight.t(), lambda: F.linear(x, m.weight + m.c.weight), lambda: F.linear(x, m.weight, m.vector)])(),
    lambda r, m, x, other: r.choice(ACTIVATIONS)(x),
    lambda r, m, x, other: grouped_product(x.reshape(-1, SIZE), r.choice([m.stack, m.stack.mT, m.stack * 0.5]), r.choice([m.ends, m.ends // 2])).view(x.shape),
    lambda r, m, x, other: r.choice([m.norm, m.layer_norm])(x),
    lambda r, m, x, other: rms(r, x, other) * r.choice([1.0, m.vector, 1 + m.vector, m.vector * 2]),
    lambda r, m, x, other: halves(r, m, x),
    lambda r, m, x, other: r.choice(ACTIVATIONS)(m.a(x)) * m.b(r.choice([x, x, other])),
    lambda r, m, x, other: r.choice([x + other, x - other, x + m.vector, x * other, x + x.mean(-1, True), x * 0.5, x / 3, x + 1, x.detach()]),
    lambda r, m, x, other: r.choice([lambda: x.softmax(-1), lambda: x.flip(-1), lambda: x.transpose(0, 1).contiguous().transpose(0, 1), lambda: x.view(-1, SIZE).view(x.shape)])(),
    written,
]


class Draws:
    """Choices that are made again in each call, by Dynamo too."""

    def __init__(self, numbers):
        self.numbers, self.at = numbers, 0

    def number(self, end):
        self.at += 1
        return self.numbers[self.at - 1] % end

    def choice(self, options):
        return options[self.number(len(options))]


class Model(nn.Module):
    def __init__(self, seed):
        super().__init__()
        r = random.Random(seed)
        self.numbers = [r.randrange(1 << 20) for _ in range(200)]
        self.a, self.b, self.c, self.two = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE, bias=False), nn.Linear(SIZE, 2 * SIZE)
        self.norm, self.layer_norm = nn.RMSNorm(SIZE), nn.LayerNorm(SIZE)
        self.weight, self.vector = nn.Parameter(torch.randn(SIZE, SIZE)), nn.Parameter(torch.randn(SIZE))
        self.stack, self.ends = nn.Parameter(torch.randn(3, SIZE, SIZE)), torch.tensor([1, 1, 4])

    def forward(self, x):
        r = Draws(self.numbers)
        values = [x, x * 0.5]
        for _ in range(3 + r.number(8)):
            value = r.choice(STEPS)(r, self, r.choice(values[-4:]), r.choice(values))
            values.append(value / (1 + value.detach().abs().amax()))
        return r.choice(values[2:]), r.choice(values[2:]), values[-1]


class Chains(Model):
    """Has chains of operations whose values others may read."""

    def forward(self, x):
        r = Draws(self.numbers)
        values = [x, x * 0.5]
        for _ in range(1 + r.number(3)):
            value = r.choice(values[-4:])
            for _ in range(2 + r.number(2)):
                value = r.choice(STEPS[:-1])(r, self, value, r.choice(values))
                values.append(value)
            values.append(value / (1 + value.detach().abs().amax()))
        return r.choice(values[2:]), r.choice(values[2:]), values[-1]


def outcome(model, x, has_gradient):
    x = x.detach().clone().requires_grad_(has_gradient)
    with torch.set_grad_enabled(has_gradient):
        results = model(x)
    for parameter in model.parameters():
        parameter.grad = None
    if has_gradient and any(each.requires_grad for each in results):
        sum((each * torch.linspace(-1, 1, each.numel(), dtype=each.dtype).view(each.shape)).sum() for each in results if each.requires_grad).backward()
    return [each.requires_grad for each in results], [each.detach() for each in results], [x.grad, *(parameter.grad for parameter in model.parameters())]


def check(seed):
    torch._dynamo.reset()
    torch.manual_seed(seed)
    r = random.Random(seed)
    model = Model(seed)
    for parameter in model.parameters():
        parameter.requires_grad_(r.random() < 0.85)
    model.to(r.choice([torch.float32, torch.float64]))
    x, has_gradient = torch.randn(r.choice([(4, SIZE), (2, 3, SIZE), (SIZE, SIZE)]), dtype=model.weight.dtype), r.random() < 0.7
    try:
        expected = outcome(copy.deepcopy(model), x, has_gradient)
    except RuntimeError:  # torch itself refuses what is written to, or a view
        return False
    found = outcome(torch.compile(model, backend="tandem", fullgraph=True), x, has_gradient)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, rtol=1e-3, atol=2e-4, equal_nan=True, msg=lambda text: f"seed {seed}: {text}")
    return True


def test_random_models():
    assert sum(check(seed) for seed in range(60)) > 40


def check_under_autocast(seed):
    """Dtypes are those of the model, and errors are of the size of its own."""
    torch._dynamo.reset()
    torch.manual_seed(seed)
    r = random.Random(seed)
    model, x, has_gradient = Chains(seed), torch.randn(r.choice([(4, SIZE), (2, 3, SIZE), (SIZE, SIZE)])), r.random() < 0.7
    exact, exact_x = copy.deepcopy(model).double(), x.double()
    try:
        with torch.autocast("cpu", torch.bfloat16):
            expected = outcome(copy.deepcopy(model), x, has_gradient)
        exact = outcome(exact, exact_x, has_gradient)
    except RuntimeError:  # torch refuses products of weights that autocast has not cast, and what `check` says
        return False
    with torch.autocast("cpu", torch.bfloat16):
        found = outcome(torch.compile(model, backend="tandem", fullgraph=True), x, has_gradient)
    assert found[0] == expected[0]
    for one, other, right in zip(*([*each[1], *each[2]] for each in (found, expected, exact)), strict=True):
        assert (one is None) == (other is None), seed
        if one is not None:
            assert one.dtype == other.dtype, seed
            known = right.isfinite() & other.isfinite()  # a random model may overflow
            error, own, scale = ((each.double() - right)[known].square().sum().sqrt().item() for each in (one, other, torch.zeros_like(right)))
            assert error <= 3 * own + 0.02 * scale + 1e-3 * known.sum().sqrt().item(), seed
    return True


def test_random_models_under_autocast():
    assert sum(check_under_autocast(seed) for seed in range(40)) > 20


@pytest.mark.long
def test_more_random_models_under_autocast():
    for seed in range(1000, 1500):
        check_under_autocast(seed)


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 3000, 500))
def test_more_random_models(first):
    for seed in range(first, first + 500):
        check(seed)
