"""The backend of torch.compile: what pipelines refuse, or compute in another way than torch, is left to torch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tandem

SIZE = 8
LINEAR = nn.Linear(SIZE, SIZE)
NAN, INFINITY = float("nan"), float("inf")


@pytest.fixture
def told(monkeypatch):
    """What is said of each graph."""
    torch._dynamo.reset()
    texts = []
    monkeypatch.setattr("tandem.backend.note", lambda graph, report: texts.append(report.text()))
    return texts


def same(function, *given):
    """Results and gradients of a function, compiled, are those of torch."""
    results = []
    for call in (tandem.compile(function), function):
        x = given[0].clone().requires_grad_()
        y = call(x, *given[1:])
        results.append((y, *torch.autograd.grad(y.float().sum(), x)))
    torch.testing.assert_close(*results, rtol=2e-2 if given[0].dtype.itemsize == 2 else 1e-4, atol=1e-4, equal_nan=True)


def ignored(x, targets, index):
    return F.cross_entropy(LINEAR(x), targets, ignore_index=index)


def smoothed_norm(eps):
    return lambda x: LINEAR(F.layer_norm(x, (SIZE,), torch.ones(SIZE), None, eps))


REFUSED = {
    "a scale of infinity": (lambda x: LINEAR(x) * INFINITY, None),
    "a scale of NaN": (lambda x: LINEAR(x) * NAN, None),
    "an eps of infinity": (smoothed_norm(INFINITY), "LayerNorm: expected eps"),
    "an eps of NaN": (smoothed_norm(NAN), "LayerNorm: expected eps"),
    "an RMSNorm's eps of infinity": (lambda x: LINEAR(F.rms_norm(x, (SIZE,), eps=INFINITY)), "RMSNorm: expected eps"),
    "a row that is ignored": (lambda x: ignored(x, torch.arange(3), -(2**40)), "LinearCrossEntropy: expected ignore_index to be a whole number"),
    "no columns": (lambda x: F.linear(x[:, :0], torch.ones(SIZE, 0)) + x, "Linear: expected in_features to be a whole number > 0, got 0"),
    "no rows of a weight": (lambda x: F.linear(x, torch.ones(0, SIZE)), "Linear: expected out_features to be a whole number > 0, got 0"),
}


@pytest.mark.parametrize(
    "function",
    [
        lambda v: 0.5 * v * (1 + torch.tanh(0.797885 * (v + 0.044715 * v**3))),
        lambda v: 0.5 * v * (1 + torch.erf(0.7071068 * v)),
        lambda v: v * torch.sigmoid(1.702000001 * v),
        lambda v: v * F.relu6(v + 3) / 6.0000001,
    ],
    ids=["tanh", "erf", "quick gelu", "hard swish"],
)
def test_constants_of_few_digits_in_float64(function):
    x = torch.randn(4, SIZE, dtype=torch.float64)
    torch.testing.assert_close(tandem.compile(lambda x: function(2 * x))(x), function(2 * x), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("name", REFUSED)
def test_what_an_op_refuses(name, told):
    function, reason = REFUSED[name]
    same(function, torch.randn(3, SIZE))
    assert reason is None or f"its op refuses it: {reason}" in told[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scales_that_overflow(dtype, told):
    """A fused step would multiply an operand of the product, whose sums were NaN."""
    linear = nn.Linear(SIZE, SIZE).to(dtype)
    for factor in (1e39, -torch.finfo(dtype).max * 1.1):
        same(lambda x, factor=factor: linear(x) * factor + x, torch.ones(3, SIZE, dtype=dtype))
    assert "pipeline 0: Linear, ConstantScale" not in "".join(told)


def test_scales_that_do_not_overflow(told):
    same(lambda x: LINEAR(x) * 1e30 + x, torch.ones(3, SIZE))
    assert "pipeline 0: Linear, ConstantScale" in told[0]


PRODUCTS = {
    "a product": lambda x: LINEAR(x),
    "products of one x": lambda x: LINEAR(x) + F.linear(x, LINEAR.weight.t()).cos(),
    "a gated unit": lambda x: F.silu(LINEAR(x)) * LINEAR(x),
    "behind a norm": lambda x: LINEAR(F.rms_norm(x, (SIZE,))),
    "a loss": lambda x: F.cross_entropy(LINEAR(x).float(), torch.arange(3)),
    "of groups": lambda x: F.grouped_mm(x, LINEAR.weight[None], offs=torch.tensor([3], dtype=torch.int32)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", PRODUCTS)
def test_operands_of_other_dtypes(name, dtype, told):
    """torch refuses them where autocast is off, and float64 always."""
    x = torch.randn(3, SIZE, dtype=dtype)
    for is_on in (False, True) if dtype == torch.float64 else (False,):
        for call in (PRODUCTS[name], tandem.compile(PRODUCTS[name])):
            with torch.autocast("cpu", torch.bfloat16, enabled=is_on), pytest.raises(RuntimeError, match="dtype|to be Float32"):
                call(x)
    if name == "a product":
        assert f"its x is {dtype}, and its weight torch.float32" in told[0]


NET = nn.Sequential(nn.Linear(SIZE, SIZE), nn.SiLU(), nn.Linear(SIZE, SIZE))


def inside(x):
    with torch.autocast("cpu", torch.bfloat16):
        y = NET(x)
        with torch.autocast("cpu", enabled=False):
            z = NET(y.float())
        return NET(z) + NET(z.bfloat16())


def switched_off(x):
    with torch.autocast("cpu", torch.bfloat16):
        y = NET(x)
        with torch.autocast("cpu", enabled=False):
            return NET(y)


def in_a_part(x):
    with torch.autocast("cpu", torch.bfloat16):
        return checkpoint(NET, x, use_reentrant=False)


@pytest.mark.parametrize(("function", "outside"), [(inside, False), (NET, True), (in_a_part, False), (lambda x: checkpoint(NET, x, use_reentrant=False), True)])
def test_autocast_casts_them(function, outside, told):
    """Whoever switches it on: the caller, the graph, or the graph around a part that is computed again."""
    x = torch.randn(3, SIZE)
    with torch.autocast("cpu", torch.bfloat16, enabled=outside):
        torch.testing.assert_close(tandem.compile(function)(x), function(x), rtol=2e-2, atol=2e-2)
    assert not any("left:" in text for text in told)


def test_autocast_that_is_switched_off(told):
    for call in (switched_off, tandem.compile(switched_off)):
        with pytest.raises(RuntimeError, match="dtype"):
            call(torch.randn(3, SIZE))


def test_float64_under_a_recipe(told):
    """Recipes quantize no float64; what is left runs, and a warning tells of it."""
    wide = nn.Linear(32, 32).double()
    model, x = nn.Sequential(wide, nn.ReLU()), torch.randn(32, 32, dtype=torch.float64)
    with pytest.warns(UserWarning, match="1 of 1 that stay in high precision, .*: its operands are float64, which no recipe quantizes"):
        y = tandem.compile(model, recipe=tandem.recipe.MXFP8BlockScaling())(x)
    assert torch.equal(y, wide(x).relu())


@pytest.mark.parametrize("own", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("added", [torch.float32, torch.float64, torch.int64])
def test_sums_promote(own, added, told):
    """To the dtype that torch promotes to; integers are left."""
    product = nn.Linear(SIZE, SIZE, dtype=own)
    x, extra = torch.randn(4, SIZE), (torch.randn(4, SIZE) * 100).to(added)
    model = lambda x: product(x.to(own)).relu() + extra  # noqa: E731
    y, want = tandem.compile(model, verify=True)(x), model(x)
    assert y.dtype == want.dtype
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(*(torch.autograd.grad(each.sum(), product.weight)[0] for each in (y, want)))
    assert ("AddExtraInput" in told[0]) == (added != torch.int64)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (lambda h: (LINEAR(h), h.clamp_(-1, 1)))(x.mT.contiguous().mT * 2)[0],
        lambda x: (lambda h: (F.rms_norm(h, (SIZE,), LINEAR.bias) + LINEAR(x), h.mul_(2)))(x.detach() * 2)[0],
    ],
    ids=["a product of strided rows", "a norm of rows that want no gradient"],
)
def test_rows_that_are_written_before_backward(told, function):
    """torch keeps a copy of the former, and of the latter what the norm has computed, so that code may write to them."""
    given, gradients = torch.randn(2, 5, SIZE), []
    for call in (tandem.compile(function), function):
        x = given.clone().requires_grad_()
        LINEAR.zero_grad()
        call(x).sum().backward()
        gradients.append((x.grad, LINEAR.weight.grad, LINEAR.bias.grad))
    torch.testing.assert_close(*gradients)
    assert "some other operation writes to its x, which backward may read" in told[0]
