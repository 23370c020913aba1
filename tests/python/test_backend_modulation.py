"""The backend of torch.compile: adaptive norms, gates and scales of layers."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import tandem

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

HIDDEN = 16


def modulated(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class Block(nn.Module):
    """A block of DiT: what conditions it shifts, scales and gates the rows of its sequence."""

    def __init__(self):
        super().__init__()
        self.norm, self.behind = (nn.LayerNorm(HIDDEN, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN)
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(HIDDEN, 6 * HIDDEN))

    def forward(self, x, c):
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.condition(c).chunk(6, dim=1)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(modulated(self.norm(x), shift, scale)).chunk(3, -1))
        x = x + gate.unsqueeze(1) * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        return x + gate_mlp.unsqueeze(1) * self.down(F.gelu(self.up(modulated(self.behind(x), shift_mlp, scale_mlp)), approximate="tanh"))


class Scaled(nn.Module):
    """A residual branch with a scale of its layer."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN)
        self.gamma = nn.Parameter(torch.rand(HIDDEN))

    def forward(self, x):
        return x + self.gamma * self.down(F.gelu(self.up(self.norm(x))))


def check(model, *inputs, **options):
    """Results and gradients, also of the inputs; how the pipelines are told."""
    own = copy.deepcopy(model)
    compiled = tandem.compile(own, fullgraph=True, verify=True, **options)
    got, want = compiled(*inputs), model(*inputs)
    grad = torch.randn_like(want)
    sources = [each for each in inputs if each.requires_grad]
    found = torch.autograd.grad(got, [*sources, *own.parameters()], grad)
    right = torch.autograd.grad(want, [*sources, *model.parameters()], grad)
    tolerance = {} if want.dtype != torch.bfloat16 else {"rtol": 0.1, "atol": 0.1}
    assert_close(got, want, **tolerance)
    assert_close(found, right, **tolerance)
    return tandem.explain(compiled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_block_of_dit(dtype):
    x, c = torch.randn(2, 5, HIDDEN, dtype=dtype, requires_grad=True), torch.randn(2, HIDDEN, dtype=dtype, requires_grad=True)
    text = check(Block().to(dtype), x, c)
    assert "LayerNorm, Modulate, Linear, Attention, Linear, Modulate, AddExtraInput, LayerNorm, Modulate, Linear, GELU, Linear, Modulate, AddExtraInput" in text


@pytest.mark.parametrize("shape", [(2, 5, HIDDEN), (1, 1, HIDDEN), (3, HIDDEN)])
def test_a_scale_of_a_layer(shape):
    found = "LayerNorm, Linear, ErfGELU, Linear, Modulate" + ", AddExtraInput" * (shape != (1, 1, HIDDEN))  # what is added to one row is its shift
    assert found in check(Scaled(), torch.randn(shape, requires_grad=True))


def test_lengths_that_change():
    model = Block()
    compiled = torch.compile(model, backend="tandem", fullgraph=True, dynamic=True)
    for batch, length in ((2, 5), (3, 7), (2, 9)):
        x, c = torch.randn(batch, length, HIDDEN), torch.randn(batch, HIDDEN)
        assert_close(compiled(x, c), model(x, c))


class Product(nn.Module):
    def __init__(self, of):
        super().__init__()
        self.linear, self.of = nn.Linear(HIDDEN, HIDDEN), of

    def forward(self, x, other):
        return self.linear(self.of(self.linear(x), other))


@pytest.mark.parametrize(
    "other",
    [torch.randn(2, 5, HIDDEN), torch.randn(2, 5, 1), torch.randn(()), torch.randn(5, HIDDEN), torch.randn(2, 1, HIDDEN, dtype=torch.float64)],
    ids=lambda each: f"{[*each.shape]} {each.dtype}",
)
def test_products_that_are_none(other):
    model = Product(lambda x, each: (x * each).float())
    assert "Modulate" not in check(model, torch.randn(2, 5, HIDDEN, requires_grad=True), other)


class Tied(nn.Module):
    """One parameter is a weight, a factor and a shift."""

    def __init__(self):
        super().__init__()
        self.linear, self.gamma = nn.Linear(HIDDEN, HIDDEN), nn.Parameter(torch.rand(HIDDEN))

    def forward(self, x):
        return F.layer_norm(self.linear(x) * self.linear.bias, (HIDDEN,), self.gamma) * self.gamma + self.gamma


def test_a_weight_that_is_a_factor_too():
    assert "Modulate" in check(Tied(), torch.randn(2, 5, HIDDEN, requires_grad=True))


class Moving(nn.Module):
    """A model that writes its shift behind the place where it reads it."""

    def __init__(self, form):
        super().__init__()
        self.linear, self.form = nn.Linear(HIDDEN, HIDDEN), form
        self.register_buffer("mean", torch.ones(HIDDEN))

    def forward(self, x):
        y = self.linear(self.form(self.linear(x), self.mean))
        with torch.no_grad():
            self.mean.lerp_(x.mean((0, 1)), 0.1)
        return y


@pytest.mark.parametrize("form", [lambda x, mean: x * 2.5 + mean, lambda x, mean: x * (1 + x.detach()[:, :1]) + mean], ids=["sum", "shift"])
def test_a_shift_may_be_written_later(form):
    model, own = Moving(form), Moving(form)
    own.load_state_dict(model.state_dict())
    x = torch.randn(2, 5, HIDDEN)
    compiled = tandem.compile(own)
    for _ in range(2):
        got, want = compiled(x), model(x)
        assert_close(got, want)
        assert_close(torch.autograd.grad(got.sum(), [*own.parameters()]), torch.autograd.grad(want.sum(), [*model.parameters()]))


def test_a_factor_near_one_is_not_taken_for_one():
    model = Product(lambda x, other: x * (1.0000005 + other)).double()
    check(model, torch.randn(2, 5, HIDDEN, dtype=torch.float64, requires_grad=True), torch.randn(HIDDEN, dtype=torch.float64))
