"""The backend of torch.compile: what it finds in models written with torch alone, and that results and gradients are those of the model."""

import copy
import gc
import math
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from experts import grouped_product
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import tandem
from tandem import ops, recipe
from tandem.backend import Options, backend, match, report

HIDDEN = 16


class Calls(nn.Module):
    """A function of x and of the module's parameters and children."""

    def __init__(self, function, **given):
        super().__init__()
        self.function = function
        for name, each in given.items():
            setattr(self, name, nn.Parameter(each) if isinstance(each, torch.Tensor) else each)

    def forward(self, x):
        return self.function(self, x)


def scale(*sizes):
    return torch.rand(*sizes or (HIDDEN,)) + 0.5


def linear(out=HIDDEN, bias=False, columns=HIDDEN):
    return nn.Linear(columns, out, bias=bias)


def rms(x, eps=1e-6):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def llama_norm(m, x):
    dtype, x = x.dtype, x.to(torch.float32)
    return m.weight * rms(x).to(dtype)


def gemma_norm(m, x):
    return (rms(x.float()) * (1.0 + m.weight.float())).type_as(x)


def halves(function, flip=False):
    def unit(m, x):
        first, second = m.up(x).chunk(2, dim=-1)
        return second * function(first) if flip else function(first) * second

    return unit


def written_gelu(x):
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))


def two_products(function):
    return lambda m, x: m.down(function(m.gate(x)) * m.up(x))


def attended(*parts):
    """What queries attend to, of rows of queries, keys and values, in two heads."""
    q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in parts)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


ACTIVATIONS = {
    "silu": (F.silu, "SiLU", "SwiGLU"),
    "gelu (tanh)": (written_gelu, "GELU", "GEGLU"),
    "gelu (erf)": (lambda x: 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0))), "ErfGELU", "ErfGEGLU"),
    "leaky relu": (F.leaky_relu, "LeakyReLU", None),
    "mish": (lambda x: x * torch.tanh(F.softplus(x)), "Mish", None),
    "softplus": (F.softplus, "Softplus", None),
    "hard swish": (lambda x: x * F.relu6(x + 3.0) / 6.0, "HardSwish", None),
    "quick gelu": (lambda x: x * torch.sigmoid(1.702 * x), "QGELU", "QGEGLU"),
    "relu squared": (lambda x: F.relu(x) ** 2, "SReLU", "SReGLU"),
    "relu": (torch.relu, "ReLU", "ReGLU"),
    "sigmoid": (torch.sigmoid, None, "GLU"),
}


def of_activations():
    for name, (function, plain, gated) in ACTIVATIONS.items():
        if plain:
            yield name, Calls(lambda m, x, function=function: function(m.up(x)), up=linear(bias=True)), ["Linear", plain]
        if gated:
            yield f"{name} gate of halves", Calls(halves(function), up=linear(2 * HIDDEN)), ["Linear", gated]
            yield f"{name} gate of two products", Calls(two_products(function), gate=linear(), up=linear(), down=linear()), ["Linear", gated, "Linear"]


# The row, a model that has it, and the ops that it becomes. Several ways of writing one row are several cases.
CASES = [
    *of_activations(),
    ("silu", Calls(lambda m, x: (lambda h: h * h.sigmoid())(m.up(x)), up=linear()), ["Linear", "SiLU"]),
    ("gelu (tanh)", Calls(lambda m, x: F.gelu(m.up(x), approximate="tanh"), up=linear()), ["Linear", "GELU"]),
    ("gelu (erf)", nn.Sequential(linear(), nn.GELU()), ["Linear", "ErfGELU"]),
    ("gelu (erf)", Calls(lambda m, x: (lambda h: h * (torch.erf(h * 0.7071067811865476) + 1) / 2)(m.up(x)), up=linear()), ["Linear", "ErfGELU"]),
    ("leaky relu", nn.Sequential(linear(), nn.LeakyReLU()), ["Linear", "LeakyReLU"]),
    ("mish", nn.Sequential(linear(), nn.Mish()), ["Linear", "Mish"]),
    ("softplus", nn.Sequential(linear(), nn.Softplus()), ["Linear", "Softplus"]),
    ("hard swish", nn.Sequential(linear(), nn.Hardswish()), ["Linear", "HardSwish"]),
    ("cross_entropy of a product", Calls(lambda m, x: F.cross_entropy(m.up(x).flatten(0, 1), torch.arange(6)), up=linear()), ["LinearCrossEntropy"]),
    ("cross_entropy", Calls(lambda m, x: F.cross_entropy(x.flatten(0, 1), torch.arange(6))), ["CrossEntropy"]),
    ("silu gate of halves", Calls(halves(F.silu, flip=True), up=linear(2 * HIDDEN)), ["Linear", "SwiGLU"]),
    ("silu gate of halves", Calls(lambda m, x: (lambda h: F.silu(h[..., :HIDDEN]) * h[..., HIDDEN:])(m.up(x)), up=linear(2 * HIDDEN)), ["Linear", "SwiGLU"]),
    ("silu gate of halves", Calls(lambda m, x: (lambda g, u: F.silu(g) * u)(*m.up(x).split(HIDDEN, -1)), up=linear(2 * HIDDEN)), ["Linear", "SwiGLU"]),
    ("silu gate of two products", Calls(two_products(F.silu), gate=linear(24, True), up=linear(24, True), down=linear(columns=24)), ["Linear", "SwiGLU", "Linear"]),
    ("rms_norm", nn.RMSNorm(HIDDEN, eps=1e-6), ["RMSNorm"]),
    ("rms_norm", nn.RMSNorm(HIDDEN, elementwise_affine=False), ["RMSNorm"]),
    ("rms_norm written out", Calls(llama_norm, weight=scale()), ["RMSNorm"]),
    ("rms_norm written out", Calls(lambda m, x: m.weight * (x / torch.sqrt(torch.mean(x * x, -1, True) + 1e-6)), weight=scale()), ["RMSNorm"]),
    ("rms_norm written out", Calls(lambda m, x: x * (1 / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6)) * m.weight, weight=scale()), ["RMSNorm"]),
    ("rms_norm written out, 1 + weight", Calls(gemma_norm, weight=scale()), ["RMSNorm"]),
    ("rms_norm written out, no weight", Calls(lambda m, x: rms(m.up(x)), up=linear()), ["Linear", "RMSNorm"]),
    ("layer_norm", nn.LayerNorm(HIDDEN), ["LayerNorm"]),
    ("layer_norm", nn.LayerNorm(HIDDEN, bias=False), ["LayerNorm"]),
    ("layer_norm", nn.LayerNorm(HIDDEN, elementwise_affine=False), ["LayerNorm"]),
    ("product", linear(bias=True), ["Linear"]),
    ("product", Calls(lambda m, x: x @ m.weight.t(), weight=scale(8, HIDDEN)), ["Linear"]),
    ("product", Calls(lambda m, x: x @ m.weight.T, weight=scale(8, HIDDEN)), ["Linear"]),
    ("product", Calls(lambda m, x: x @ m.weight, weight=scale(HIDDEN, 8)), ["Linear"]),
    ("product", Calls(lambda m, x: torch.addmm(m.bias, x.view(-1, HIDDEN), m.weight).view(*x.shape[:-1], 8), weight=scale(HIDDEN, 8), bias=scale(8)), ["Linear"]),
    ("grouped product", Calls(lambda m, x: grouped_product(x.flatten(0, 1), m.weight, torch.tensor([2, 6], dtype=torch.int32)), weight=scale(2, HIDDEN, 8)), ["GroupedLinear"]),
    ("products of one x", Calls(lambda m, x: m.q(x) * 2 + m.k(x).exp() + m.v(x)[..., :1], q=linear(), k=linear(), v=linear(4)), ["Linear"]),
    ("attention of products of one x", Calls(lambda m, x: m.o(attended(m.q(x), m.k(x), m.v(x))), q=linear(bias=True), k=linear(), v=linear(bias=True), o=linear()), ["Linear", "Attention", "Linear"]),
    ("attention of products of one x", Calls(lambda m, x: m.o(attended(m.q(x), m.k(x), m.v(x))), q=linear(), k=linear(), v=linear(), o=linear()), ["Linear", "Attention", "Linear"]),
    ("attention", Calls(lambda m, x: attended(*m.qkv(x).chunk(3, -1)), qkv=linear(3 * HIDDEN, True)), ["Linear", "Attention"]),
    ("bias", Calls(lambda m, x: m.up(x) + m.bias, up=linear(), bias=scale()), ["Linear", "Bias"]),
    ("modulation", Calls(lambda m, x: m.up(x) * m.gamma, up=linear(), gamma=scale()), ["Linear", "Modulate"]),
    ("scale", Calls(lambda m, x: m.up(x) / 4, up=linear()), ["Linear", "ConstantScale"]),
    ("dropout", Calls(lambda m, x: F.dropout(m.up(x), 1e-9, True), up=linear()), ["Linear", "Dropout"]),
    ("sum", Calls(lambda m, x: x + m.up(x), up=linear()), ["Linear", "AddExtraInput"]),
]


def compiled(model, **options):
    torch._dynamo.reset()
    return torch.compile(copy.deepcopy(model), backend=backend, options=options)


def step(model, *xs):
    given = [x.detach().clone().requires_grad_() for x in xs]
    y = model(*given)
    results = y if isinstance(y, tuple) else (y,)
    generator = torch.Generator().manual_seed(1)
    sum((result * torch.randn(result.shape, generator=generator)).sum() for result in results).backward()
    grads = {name.removeprefix("_orig_mod."): p.grad for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = None
    return [*results], [x.grad for x in given], grads


def check_equal(model, own, *xs, tolerance=1e-5):
    assert_close(step(own, *xs), step(model, *xs), rtol=tolerance, atol=tolerance, equal_nan=True)


def ops_of(model):
    return [[type(op).__name__ for op in pipeline if not isinstance(op, ops.MakeExtraOutput)] for pipeline in report.pipelines_of(model)]


@pytest.mark.parametrize(("row", "model", "expected"), CASES, ids=[f"{at}-{row}" for at, (row, _, _) in enumerate(CASES)])
def test_rows(row, model, expected):
    """Each is found, and computes what the model computes."""
    own = compiled(model, verify=True)
    x = torch.randn(2, 3, HIDDEN)
    check_equal(model, own, x)
    if not [*model.parameters()]:  # nothing tells whose pipeline it is
        return
    assert ops_of(own)[0] == expected
    assert f"\n    {row} " in tandem.explain(own)


def test_each_row_has_a_case():
    assert {row.name for row in match.TABLE} <= {row for row, _, _ in CASES}


class Block(nn.Module):
    """A decoder layer as model libraries write it."""

    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = Calls(llama_norm, weight=scale()), Calls(llama_norm, weight=scale())
        self.q, self.k, self.v, self.o = (linear() for _ in range(4))
        self.mlp = Calls(two_products(F.silu), gate=linear(40), up=linear(40), down=linear(columns=40))

    def forward(self, x):
        h = self.norm(x)
        x = x + self.o(attended(self.q(h), self.k(h), self.v(h)))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(layers)])
        self.norm, self.head = Calls(llama_norm, weight=scale()), linear(32)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@pytest.fixture
def x(fresh_dynamo):
    return torch.randn(2, 5, HIDDEN)


LAYER = ["RMSNorm", "Linear", "Attention", "Linear", "AddExtraInput", "RMSNorm", "Linear", "SwiGLU", "Linear", "AddExtraInput"]


@pytest.mark.parametrize("options", [{"verify": True, "require": 1.0}, {"rest": "inductor"}], ids=["verified", "the rest compiled by Inductor"])
def test_regions_are_layers(x, options):
    model = Decoder()
    own = compiled(model, **options)
    check_equal(model, own, x)
    assert ops_of(own) == [LAYER, [*LAYER, "RMSNorm", "Linear"]]


def test_the_model_is_not_changed(x):
    model = Decoder()
    before = {name: (parameter, parameter.detach().clone()) for name, parameter in model.named_parameters()}
    model.compile(backend=backend)
    model(x).sum().backward()
    assert [*model.state_dict()] == [*before]
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])
        assert parameter.grad is not None


def test_one_graph_serves_layers_that_look_alike(x):
    """Each layer has a pipeline with its own parameters."""
    model = Decoder(4)
    own = copy.deepcopy(model)
    for layer in own.layers:
        layer.compile(backend=backend)
    check_equal(model, own, x)
    assert len({report_.number for report_ in report.reports_of(own)}) == 1


LOW_RECIPES = pytest.mark.parametrize(
    "low",
    [recipe.Float8CurrentScaling(), recipe.MXFP8BlockScaling(), recipe.NVFP4BlockScaling(), recipe.DelayedScaling(), recipe.Float8BlockScaling()],
    ids=lambda low: type(low).__name__,
)


@LOW_RECIPES
def test_recipes(x, low):
    """Products of the unchanged model are quantized: near its result, and not at it."""
    model = Decoder()
    own = compiled(model, recipe=low)
    result, expected = own(x), model(x)
    result.sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in own.parameters())
    assert 1e-4 < (result - expected).norm() / expected.norm() < 0.5


def test_a_recipe_by_name(x):
    """The head stays in high precision, and its pipeline ends before it."""
    model, names = Decoder(), []

    def choose(name):
        names.append(name)
        return None if name == "head" else recipe.MXFP8BlockScaling()

    own = compiled(model, recipe=choose)
    own(x)
    assert {"layers.0.q", "layers.1.mlp.down", "head"} <= {*names}
    assert ops_of(own) == [LAYER, [*LAYER, "RMSNorm"], ["Linear"]]


def test_what_is_excluded_stays(x):
    model = Decoder()
    own = compiled(model, exclude=("layers.0", "he*"))
    check_equal(model, own, x)
    assert ops_of(own) == [[*LAYER, "RMSNorm"]]
    assert "left: product of head: return self.head(self.norm(x)): its module is excluded" in tandem.explain(own)


def test_shapes_modes_and_gradients_that_change(x):
    model = Decoder()
    own = torch.compile(copy.deepcopy(model), backend=backend, dynamic=True)
    for rows in (3, 7, 2):
        check_equal(model, own, torch.randn(rows, rows + 1, HIDDEN))
    with torch.no_grad():
        assert_close(own(x), model(x))
    assert not own(x.requires_grad_()).isnan().any()
    for each in (model, own._orig_mod):
        each.layers[0].q.weight.requires_grad_(False)
    one, other = step(own, x)[2], step(model, x)[2]
    assert one["layers.0.q.weight"] is None
    assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_numbers_that_are_symbols():
    """Dynamo takes an eps for a symbol where shapes are dynamic."""
    model = Calls(lambda m, x: F.layer_norm(F.dropout(x, m.p), (HIDDEN,), m.weight, None, m.eps), weight=scale(), p=0.0, eps=1e-3)
    own = tandem.compile(copy.deepcopy(model), dynamic=True)
    for eps in (1e-3, 0.5):
        model.eps = own.eps = eps
        check_equal(model, own, torch.randn(3, HIDDEN))


@pytest.mark.parametrize("rest", ["eager", "inductor"])
def test_a_written_out_eps_that_is_a_symbol(rest):
    """It is the number that it is; what else is a symbol stays one, in pieces that Inductor leaves."""
    model = Calls(lambda m, x: m.up(m.weight * rms(x, m.eps)).cos() * m.factor + 1, weight=scale(), up=linear(), eps=1e-3, factor=0.5)
    own = tandem.compile(copy.deepcopy(model), dynamic=True, rest=rest, fullgraph=True)
    for eps, factor in ((1e-3, 0.5), (0.5, 0.5), (0.5, 0.25)):
        model.eps, own.eps, model.factor, own.factor = eps, eps, factor, factor
        check_equal(model, own, torch.randn(3, HIDDEN))
    assert ops_of(own)[0] == ["RMSNorm", "Linear"]


def test_autocast(x):
    """Products round to the dtype of the region, norms do not; `verify` allows for that."""
    model = Decoder()
    own = compiled(model, verify=True)
    with torch.autocast("cpu", torch.bfloat16):
        result, expected = own(x), model(x)
    assert result.dtype == expected.dtype == torch.bfloat16
    assert_close(result, expected, rtol=5e-2, atol=5e-2)
    result.sum().backward()
    assert ops_of(own) == [LAYER, [*LAYER, "RMSNorm", "Linear"]], "sums promote, as residuals are float32"


@pytest.mark.parametrize("low", [None, recipe.DelayedScaling(), recipe.MXFP8BlockScaling()], ids=["no recipe", "DelayedScaling", "MXFP8BlockScaling"])
def test_training_after_inference(low):
    """What a first call under inference mode makes, later calls save for backward."""
    model = nn.Sequential(nn.LayerNorm(32, bias=False), nn.Linear(32, 32))
    own, x = compiled(model, recipe=low), torch.randn(32, 32)
    with torch.inference_mode():
        own(x)
    own(x).sum().backward()
    assert all(parameter.grad is not None for parameter in own.parameters())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(x, use_reentrant):
    class Recomputed(Decoder):
        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=use_reentrant)
            return self.head(self.norm(x))

    model = Recomputed()
    own = compiled(model)
    check_equal(model, own, x)
    assert any("SwiGLU" in each for each in ops_of(own))


def test_weights_that_are_results(x):
    """An adapter that is added to the weight, and a weight that is shared with the head."""
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.a, self.b = linear(), nn.Parameter(scale(HIDDEN, 2)), nn.Parameter(scale(2, HIDDEN))

        def forward(self, x):
            h = F.linear(x, self.up.weight + self.a @ self.b)
            return F.linear(F.silu(h), self.up.weight)

    model = Adapted()
    own = compiled(model)
    check_equal(model, own, x)
    assert ops_of(own) == [["Linear", "SiLU", "Linear"]]


def test_nothing_moves_past_what_changes_state(x):
    """The norm reads x before it is written to, the product after."""
    def function(m, x):
        x = x * 1
        h = m.norm(x)
        x.add_(1)
        return m.up(h) + x, m.up(x)

    model = Calls(function, norm=nn.LayerNorm(HIDDEN), up=linear())
    own = compiled(model)
    with torch.no_grad():  # autograd refuses such a model
        assert_close(own(x), model(x))
    assert ops_of(own) == [["LayerNorm"], ["Linear", "AddExtraInput"], ["Linear"]]


def test_results_that_are_written_to(x):
    """A result in whose memory somebody writes is the last one of its pipeline, as backward may read others."""
    def function(m, x):
        q, k, v = m.q(x), m.k(x), m.v(x)
        q[..., :4] = 0
        k += v
        h = F.dropout(m.norm(x), 0.0, True, True) * 2  # the last True: in place
        return q.sin() + k.cos() + F.relu(m.up(h), True)

    model = Calls(function, q=linear(), k=linear(), v=linear(), norm=nn.LayerNorm(HIDDEN), up=linear())
    own = compiled(model)
    check_equal(model, own, x)
    assert ops_of(own) == [["Linear"], ["Linear"], ["LayerNorm", "ConstantScale", "Linear", "ReLU", "AddExtraInput"]]


def rms32(x):
    return x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)


# What looks like a row and is none, or has something beside it that must stay as it is.
ODD = {
    "default eps in 16 bits": (Calls(lambda m, x: m.norm(x.bfloat16() * 1e-3), norm=nn.RMSNorm(HIDDEN).bfloat16()), 1e-2),
    "a norm that widens": (Calls(lambda m, x: rms32(x.bfloat16()), up=linear()), 1e-5),
    "a norm that widens by its weight": (Calls(lambda m, x: rms32(x.bfloat16()) * m.weight, weight=scale().bfloat16()), 1e-5),
    "a norm that narrows": (Calls(lambda m, x: rms32(x).bfloat16(), up=linear()), 1e-2),
    "a norm that truncates": (Calls(lambda m, x: rms32(x).to(torch.int32) + m.up(x), up=linear()), 1e-5),
    "a copy before a write": (Calls(lambda m, x: (lambda y: (y.to(y.dtype, copy=True), y.add_(1)))(x * 2)[0] + m.up(x), up=linear()), 1e-5),
    "no transposition": (Calls(lambda m, x: x @ m.weight.transpose(0, 0) + x @ m.weight.transpose(-1, 0), weight=scale(HIDDEN, HIDDEN)), 1e-5),
    "a tiny divisor": (Calls(lambda m, x: m.up(x * 1e-30) / 1e-40, up=linear()), 1e-4),
    "a result that nobody reads": (Calls(lambda m, x: (m.a(x), F.silu(m.b(x)))[1], a=linear(), b=linear()), 1e-5),
    "x is the weight": (Calls(lambda m, x: (lambda h: (h @ h.t()).softmax(-1) @ h)(m.norm(m.up(x[0]))), up=linear(), norm=nn.LayerNorm(HIDDEN)), 1e-5),
    "a weight made of a product of the same x": (Calls(lambda m, x: (lambda q: q + F.linear(x, m.weight + q.mean()))(m.up(x)), up=linear(), weight=scale(HIDDEN, HIDDEN)), 1e-4),
    "views of products of one x": (Calls(lambda m, x: m.q(x).view(-1).cos().sum() + m.k(x).sin(), q=linear(), k=linear()), 1e-4),
    "a write to one row of products of one x": (Calls(lambda m, x: (lambda row: m.q(row).mul_(2) + m.k(row).relu_())(x[0, :1]), q=linear(), k=linear()), 1e-5),
    "a transposed activation": (Calls(lambda m, x: F.silu(m.up(x).transpose(1, 2)).transpose(1, 2).view(2, -1), up=linear()), 1e-5),
    "a gate of one column": (Calls(lambda m, x: torch.sigmoid(m.one(x)) * m.up(x), one=linear(1), up=linear()), 1e-5),
    "a bias of one number": (Calls(lambda m, x: F.linear(x, m.weight, m.bias), weight=scale(HIDDEN, HIDDEN), bias=scale(1)), 1e-5),
    "a write after an activation": (Calls(lambda m, x: (lambda h: (F.relu(h), h.add_(1)))(m.up(x))[0] + x, up=linear()), 1e-5),
    "a write to a list": (Calls(lambda m, x: (lambda h, n: (torch._foreach_add_([h], [x]), m.b(h) + n))(m.a(x), m.b(x))[1], a=linear(), b=linear()), 1e-5),
    "vmap inside": (Calls(lambda m, x: torch.func.vmap(lambda row: F.silu(m.up(row)))(x), up=linear()), 1e-5),
    "a view by name": (Calls(lambda m, x: m.up(torch.reshape(input=x, shape=(-1, HIDDEN))), up=linear()), 1e-5),
    "a scalar": (Calls(lambda m, x: rms(x.mean().reshape(1)) + m.up(x), up=linear()), 1e-5),
    "a negative eps": (Calls(lambda m, x: m.up(rms(x, -1e-6)), up=linear()), 1e-5),
    "other numbers of an activation": (Calls(lambda m, x: F.softplus(m.up(x), beta=2) + F.softplus(m.up(x), threshold=0.1) * F.leaky_relu(m.up(x), 0.2), up=linear()), 1e-5),
    "one row": (Calls(lambda m, x: F.silu(m.up(x[0, 0])), up=linear()), 1e-5),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_models(name, x):
    model, tolerance = ODD[name]
    check_equal(model, compiled(model), x, tolerance=tolerance)


def test_who_has_a_gradient(x):
    """Of products of one x, those whose result is detached have none, and results that need none say so."""
    model = Calls(lambda m, x: (m.a(x) + m.b(x).detach(), m.c(x)), a=linear(), b=linear(), c=linear())
    model.c.weight.requires_grad_(False)
    own = compiled(model)
    results = own(x)
    assert [each.requires_grad for each in results] == [True, False]
    results[0].sum().backward()
    assert {name.removeprefix("_orig_mod."): p.grad is None for name, p in own.named_parameters()} == {"a.weight": False, "b.weight": True, "c.weight": True}


def test_a_residual_stream_that_is_written_to(x):
    """What nobody else reads may as well be a result."""
    def function(m, x):
        h = m.down(F.relu(m.up(m.norm(x)), inplace=True))
        h += x
        return h

    model = Calls(function, norm=nn.LayerNorm(HIDDEN), up=linear(bias=True), down=linear())
    own = compiled(model, verify=True)
    check_equal(model, own, x)
    assert ops_of(own) == [["LayerNorm", "Linear", "ReLU", "Linear", "AddExtraInput"]]


def test_values_that_others_read(x):
    """Every value inside a pipeline is read by somebody outside too; two chains read each other's values."""
    def function(m, x):
        a1, b1 = m.a(x), m.b(x.sin())
        a2, b2 = F.silu(a1) + b1.cos(), F.silu(b1) + a1.cos()
        return m.a(a2 + a1), m.b(b2 + b1), a1.tanh(), b1

    model = Calls(function, a=linear(bias=True), b=linear(bias=True))
    check_equal(model, compiled(model), x)


def test_parameters_end_with_their_model(x):
    model = Decoder()
    own = compiled(model)
    weights = [weakref.ref(p) for p in own.parameters()]
    own(x).sum().backward()
    old = weakref.ref(own._orig_mod.head.weight)
    own._orig_mod.head.weight = nn.Parameter(own._orig_mod.head.weight.detach() * 2)
    own(x)
    gc.collect()
    assert old() is None
    del own, model
    gc.collect()
    assert not [each for each in weights if each() is not None]


def test_threads_that_share_a_graph(x):
    """Weights that are results go into one pipeline; each call reads its own."""
    model = Calls(lambda m, x: F.silu(x @ (m.weight * x.mean())), weight=scale(HIDDEN, HIDDEN))
    own = compiled(model)
    own(x)
    inputs = [torch.randn(2, 5, HIDDEN) for _ in range(40)]
    with ThreadPoolExecutor(2) as pool:
        assert_close([*pool.map(own, inputs)], [model(given) for given in inputs])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_rounding_before_the_weight_of_a_norm(dtype):
    """Llama's norm rounds there: so does the pipeline, to the bit, but for numbers halfway between two, which the last bit of the float32 root decides. Gradients
    are those of float64, which pass the cast, within one rounding."""
    model, x, grad_y = Calls(llama_norm, weight=scale()).to(dtype), *torch.randn(2, 7, 5, HIDDEN).to(dtype)
    own = compiled(model, verify=True)
    y = own(x.requires_grad_())
    expected, rounded_once = model(x), (model.weight.double() * rms(x.double())).to(dtype)
    assert (y != expected).float().mean() < 0.01 < (rounded_once != expected).float().mean()
    assert ops_of(own) == [["RMSNorm"]]
    wide, weight = x.detach().double().requires_grad_(), model.weight.detach().double().requires_grad_()
    x_hat = rms(wide)
    (weight * (x_hat + (x_hat.to(dtype) - x_hat).detach())).backward(grad_y.double())
    y.backward(grad_y)
    for gradient, expected in ((x.grad, wide.grad), (own.weight.grad, weight.grad)):
        assert_close(gradient.double(), expected, rtol=torch.finfo(dtype).eps / 2, atol=1e-5)


def test_a_decoder_in_16_bits(x):
    """Its norms are in the pipelines."""
    model = Decoder().to(torch.bfloat16)
    own = compiled(model, verify=True, require=1.0)
    assert_close(own(x.bfloat16()), model(x.bfloat16()), rtol=5e-2, atol=5e-2)
    assert ops_of(own) == [LAYER, [*LAYER, "RMSNorm", "Linear"]]
    assert "left:" not in tandem.explain(own)


ROUNDED = [
    (lambda m, x: m.up((rms(x.float()).to(x.dtype) * (1.0 + m.weight.float())).to(x.dtype)), "it rounds to bfloat16 between the norm and its weight, where a pipeline does not"),
    (lambda m, x: m.up((rms(x.float()).half() * m.weight.float()).to(x.dtype)), "it is rounded to torch.float16 before its weight, and its x is torch.bfloat16"),
]


@pytest.mark.parametrize(("function", "reason"), ROUNDED)
def test_a_rounding_that_a_pipeline_has_not_is_told(x, function, reason):
    model, x = Calls(function, weight=scale(), up=linear()).to(torch.bfloat16), x.bfloat16()
    own = compiled(model)
    assert_close(own(x), model(x))
    assert f": {reason}" in tandem.explain(own)


def test_verify_names_what_differs(x, monkeypatch):
    wrong = [row._replace(ops=lambda bound, row=row: tuple(op._replace(make=ops.GEGLU) if op.make is ops.SwiGLU else op for op in row.ops(bound))) for row in match.TABLE]
    monkeypatch.setattr(match, "TABLE", wrong)
    own = compiled(Decoder(), verify=True)
    with pytest.raises(AssertionError, match=r"pipeline 0, RMSNorm, Linear, Attention, Linear, AddExtraInput, RMSNorm, Linear, GEGLU, .* of layers.0.norm, .*: expected result 0 within 0.0002 of its largest element, .*, of what the graph computes, got a difference of .*. Exclude its module, and report the model."):
        own(x)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"recipes": 1}, TypeError, "compile: expected options among recipe, memory_budget, exclude, rest, logits, verify, require, got 'recipes'. Did you mean recipe"),
        ({"zzz": 1}, TypeError, "compile: expected options among .*, got 'zzz'. Leave it out"),
        ({"recipe": 3}, TypeError, "compile: expected recipe to be a recipe, a function of a module's name or None, got 3. Pass tandem.recipe.MXFP8BlockScaling"),
        ({"recipe": recipe.MXFP8BlockScaling}, TypeError, "compile: expected recipe to be a recipe, .*, got <class"),
        ({"recipe": lambda: None}, TypeError, "compile: expected recipe to be a function of a module's name, got one that is called otherwise: too many positional arguments. Let it take"),
        ({"exclude": [1]}, TypeError, "compile: expected exclude to be names of modules, got .1.. Pass names such as 'lm_head' or 'model.layers.0"),
        ({"rest": "fast"}, ValueError, "compile: expected rest to be .eager. or .inductor., got 'fast'. Name one of them"),
        ({"verify": 1}, TypeError, "compile: expected verify to be True or False, got 1. Pass a bool"),
        ({"require": 2}, ValueError, "compile: expected require to be a share from 0 to 1 or None, got 2. Pass 0.9 for nine tenths of the products"),
    ],
)
def test_options_are_checked(options, kind, text):
    with pytest.raises(kind, match=text):
        Options.of(options)


def test_errors_of_calls(x):
    with pytest.raises(Exception, match="compile: expected at least 0.95 of the products in pipelines, got 14 of 15. Lower require, or change what was left:\ngraph .*: 14 of 15 products in"):
        compiled(Decoder(), require=0.95, exclude="layers.0.mlp.gate")(x)
    with pytest.raises(Exception, match="compile: expected a recipe or None of the function recipe for 'head', got 'fp8'. Return tandem.recipe.MXFP8BlockScaling"):
        compiled(Decoder(), recipe=lambda name: "fp8")(x)
    torch._dynamo.reset()
    with pytest.raises(Exception, match='compile: expected no mode, or "default", as pipelines have options instead, got .max-autotune.. Pass options'):
        torch.compile(Decoder(), backend=backend, mode="max-autotune")(x)


def test_installing_the_package_is_enough(x):
    """`torch.compile` finds the backend by its name; `tandem.compile` is the same with options that are checked at once."""
    assert "tandem" in torch._dynamo.list_backends()
    model = Decoder()
    check_equal(model, torch.compile(copy.deepcopy(model), backend="tandem", options={"require": 1.0}), x)
    check_equal(model, tandem.compile(copy.deepcopy(model), require=1.0), x)
    with pytest.raises(TypeError, match="compile: expected options among .*, got 'recipes'"):
        tandem.compile(model, recipes=None)
    with pytest.raises(TypeError, match="compile: expected a module or a function, got int. Pass the model."):
        tandem.compile(3)
