"""Mixtures of experts in the backend of torch.compile: products of groups, as model libraries write them, with what lies between."""

import copy

import pytest
import torch
import torch.nn.functional as F
from experts import grouped_product
from support import assert_equal
from test_backend import LOW_RECIPES, Calls, check_equal, compiled, linear, ops_of, step
from torch import nn
from torch.testing import assert_close

import tandem
from tandem.backend import report

HIDDEN, INNER, GROUPS = 16, 24, 4
ALL = "GroupedLinear, SwiGLU, GroupedLinear; keeps "


class Experts(nn.Module):
    """A mixture whose router draws two experts for each row, as transformers and others write it: rows sorted by expert, weights stacked."""

    def __init__(self, product=grouped_product, turn=lambda weight: weight.transpose(-2, -1), idle=()):
        super().__init__()
        self.product, self.turn, self.idle = product, turn, [*idle]
        self.router = nn.Linear(HIDDEN, GROUPS, bias=False)
        self.gate_up, self.down = (nn.Parameter(turn(torch.randn(GROUPS, *shape) / 4).contiguous()) for shape in ((HIDDEN, 2 * INNER), (INNER, HIDDEN)))

    def weights(self):
        return self.gate_up, self.down

    def forward(self, x):
        flat = x.reshape(-1, HIDDEN)
        logits = self.router(flat).float()
        logits[:, self.idle] = -1e9
        scales, experts = logits.softmax(-1).topk(2)
        ordered, order = experts.view(-1).sort()
        ends = torch.histc(ordered.float(), GROUPS, 0, GROUPS - 1).cumsum(0, dtype=torch.int32)
        gate_up, down = map(self.turn, self.weights())
        gate, up = self.product(flat[order // 2].to(gate_up.dtype), gate_up, offs=ends).chunk(2, -1)
        h = self.product(F.silu(gate) * up, down, offs=ends) * scales.view(-1)[order, None]
        return torch.zeros_like(flat, dtype=h.dtype).index_add(0, order // 2, h).to(x.dtype).view(x.shape)


class Adapted(Experts):
    """With something that is added to a stacked weight."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(GROUPS, 2 * INNER, 2) / 4), nn.Parameter(torch.randn(GROUPS, 2, HIDDEN) / 4)
        self.gate_up.requires_grad_(False)

    def weights(self):
        return self.gate_up + self.a @ self.b, self.down


@pytest.fixture
def x():
    return torch.randn(3, 11, HIDDEN)


WAYS = {
    "as transformers writes them": Experts,
    "two of them without rows": lambda: Experts(idle=(0, 2)),
    "others without rows": lambda: Experts(idle=(1, 3)),
    "weights as they lie": lambda: Experts(turn=lambda w: w),
    "weights by mT": lambda: Experts(turn=lambda w: w.mT),
    "weights by dimensions from the front": lambda: Experts(turn=lambda w: w.transpose(1, 2)),
    "weights by a function": lambda: Experts(turn=lambda w: torch.transpose(w, 2, -2)),
    "an adapter": Adapted,
}


@pytest.mark.parametrize("way", WAYS)
def test_experts_become_one_pipeline(x, way):
    """`require` and `explain` count products of groups."""
    model = WAYS[way]()
    own = compiled(model, verify=True, require=1.0)
    check_equal(model, own, x)
    told = tandem.explain(own)
    assert ALL in told and "3 of 3 products in 2 pipelines" in told and "    grouped product " in told


@pytest.mark.parametrize(
    "product",
    [
        lambda x, weight, offs: F.grouped_mm(x, weight, offs=offs),
        lambda x, weight, offs: F.grouped_mm(mat_a=x, mat_b=weight, offs=offs, out_dtype=x.dtype),
        lambda x, weight, offs: torch._grouped_mm(x, weight, offs),
        lambda x, weight, offs: torch.ops.transformers.grouped_mm_fallback(x, weight, offs=offs.long()),
        lambda x, weight, offs: torch.ops.transformers.grouped_mm_fallback.default(x, weight, offs),
    ],
)
def test_spellings_in_bfloat16(x, product):
    model = Experts(product).to(torch.bfloat16)
    own = compiled(model, verify=True, require=1.0)
    x = x.bfloat16()
    assert_close(step(own, x), step(model, x), rtol=5e-2, atol=5e-2)
    assert ALL in tandem.explain(own)


@pytest.mark.parametrize("frozen", [("gate_up",), ("down",), ("gate_up", "down"), ("gate_up", "down", "router.weight")], ids=" ".join)
def test_frozen_experts(x, frozen):
    model = Experts()
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    check_equal(model, compiled(model, verify=True, require=1.0), x)


def test_numbers_of_rows_that_change():
    model = Experts()
    torch._dynamo.reset()
    own = tandem.compile(copy.deepcopy(model), dynamic=True, require=1.0)
    for rows in (5, 2, 31):
        check_equal(model, own, torch.randn(rows, 3, HIDDEN))
    with torch.no_grad():
        assert_close(own(torch.ones(4, 3, HIDDEN)), model(torch.ones(4, 3, HIDDEN)))


def test_no_rows():
    model = Calls(lambda m, x: grouped_product(x, m.weight, torch.zeros(GROUPS, dtype=torch.int32)), weight=torch.randn(GROUPS, HIDDEN, INNER))
    check_equal(model, compiled(model, require=1.0), torch.randn(0, HIDDEN))


def test_rows_behind_the_last_group_are_zero():
    model = Calls(lambda m, x: grouped_product(x, m.weight, torch.tensor([2, 2, 5, 6], dtype=torch.int32)), weight=torch.randn(GROUPS, HIDDEN, INNER))
    own = compiled(model, require=1.0)
    (y,), (grad_x,), _ = step(own, torch.randn(9, HIDDEN))
    assert y[:6].all() and grad_x[:6].all() and not y[6:].any() and not grad_x[6:].any()


def test_autocast_is_for_other_products(x):
    """Norms and products of groups compute in float32 as in torch; a product that follows rounds, and so is in a pipeline of its own."""
    def function(m, x):
        y = grouped_product(m.norm(x).flatten(0, 1), m.weight, torch.tensor([3, 10, 20, 33], dtype=torch.int32))
        return y, m.head(y)

    model = Calls(function, norm=nn.RMSNorm(HIDDEN), weight=torch.randn(GROUPS, HIDDEN, INNER) / 4, head=linear(columns=INNER))
    own = compiled(model, verify=True, require=1.0)
    with torch.autocast("cpu", torch.bfloat16):
        results, expected = own(x), model(x)
    assert ops_of(own) == [["RMSNorm"], ["GroupedLinear"], ["Linear"]]
    assert [each.dtype for each in results] == [torch.float32, torch.bfloat16]
    assert_close(results[0], expected[0], rtol=1e-5, atol=1e-5)
    assert_close(results[1], expected[1], rtol=2e-2, atol=2e-2)
    results[1].sum().backward()


@LOW_RECIPES
def test_recipes(x, low):
    """Groups of any number of rows, one of them empty, are quantized: near the result, and not at it."""
    model = Experts(idle=(2,))
    own = compiled(model, recipe=lambda name: None if name == "router" else low, require=1.0)
    result, expected = own(x), model(x)
    result.sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in own.parameters())
    assert 1e-3 < (result - expected).norm() / expected.norm() < 0.5


def test_a_bias_for_each_row(x):
    """Added in place, as transformers does: what others write to ends a pipeline."""
    def function(m, x):
        y = grouped_product(x.flatten(0, 1), m.weight, torch.tensor([3, 10, 20, 33], dtype=torch.int32))
        y.add_(m.bias[torch.arange(33) % GROUPS])
        return F.silu(y)

    model = Calls(function, weight=torch.randn(GROUPS, HIDDEN, INNER), bias=torch.randn(GROUPS, INNER))
    own = compiled(model, verify=True, require=1.0)
    check_equal(model, own, x)
    assert ops_of(own) == [["GroupedLinear"]]


def test_weights_are_not_copied(x):
    """Nothing of their size is kept but they themselves."""
    model = Experts()
    own = compiled(model)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (kept.append(tensor), tensor)[1], lambda tensor: tensor):
        own(x)
    weights = {each.data_ptr() for each in (own._orig_mod.gate_up, own._orig_mod.down)}
    assert {each.data_ptr() for each in kept if each.dim() == 3} == weights


def test_sizes_that_are_not_fixed():
    def function(x, weight):
        return grouped_product(x, weight.sin(), torch.tensor([3, 9], dtype=torch.int32))

    given = torch.randn(9, HIDDEN), torch.randn(2, HIDDEN, INNER)
    torch._dynamo.reset()
    own = torch.compile(function, backend="tandem", dynamic=True)
    assert_close(own(*given), function(*given))
    (told,) = [graph._tandem_report for graph in report._graphs if any(row == "grouped product" for row, _, _ in graph._tandem_report.left)]
    assert told.left[0][2] == "the sizes of its weight are not fixed, or one is 0"


def test_what_only_looks_like_it_stays(x):
    """torch's function multiplies other things too: matrix by matrix, and columns in groups."""
    def function(x):
        rows = x[0].bfloat16()
        return F.grouped_mm(rows, rows.mT.contiguous(), offs=torch.tensor([8, 16], dtype=torch.int32)), F.grouped_mm(rows[None], rows[None].mT.contiguous())

    x = torch.randn(1, 16, HIDDEN)
    torch._dynamo.reset()
    assert_equal(torch.compile(function, backend="tandem", options={"require": 1.0})(x), function(x))


def test_experts_that_are_modules(x):
    """Called in a loop with the rows that the router gives them, how many no graph knows: one graph serves all of them."""
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = linear(GROUPS)
            self.experts = nn.ModuleList([Calls(lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x)), gate=linear(INNER), up=linear(INNER), down=linear(columns=INNER)) for _ in range(GROUPS)])

        def forward(self, x):
            x = x.reshape(-1, HIDDEN)
            scales, chosen = self.router(x).softmax(-1).topk(2)
            y = torch.zeros_like(x)
            for at, expert in enumerate(self.experts):
                row, place = torch.where(chosen == at)
                y = y.index_add(0, row, expert(x[row]) * scales[row, place, None])
            return y

    model = Loop()
    own = compiled(model, verify=True)
    check_equal(model, own, x)
    assert ops_of(own).count(["Linear", "SwiGLU", "Linear"]) == GROUPS
