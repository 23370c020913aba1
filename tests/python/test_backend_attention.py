"""The backend of torch.compile: rotary embedding and attention, in the ways in which model libraries write them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tandem
from tandem import recipe
from tandem.backend import backend, report

HEADS, DIM, LENGTH = 4, 8, 6
HIDDEN = HEADS * DIM


def heads_of(rows, norm=None):
    heads = rows.view(*rows.shape[:-1], -1, DIM)
    if norm and norm.is_before:
        return norm(heads).transpose(1, 2)
    return norm(heads.transpose(1, 2)) if norm else heads.transpose(1, 2)


def rotate_half(t):
    return torch.cat((-t[..., t.shape[-1] // 2 :], t[..., : t.shape[-1] // 2]), dim=-1)


def turned(t, cosines, sines):
    return t * cosines.unsqueeze(1) + rotate_half(t) * sines.unsqueeze(1)


def turned_in_float32(t, cosines, sines):
    return turned(t.float(), cosines, sines).to(t.dtype)


def turned_at_first(t, cosines, sines):
    """Some of the features."""
    own = cosines.shape[-1]
    return torch.cat((turned(t[..., :own], cosines, sines), t[..., own:]), dim=-1)


def repeated(t, times):
    """Keys or values, each for so many queries."""
    batch, heads, length, dim = t.shape
    return t[:, :, None, :, :].expand(batch, heads, times, length, dim).reshape(batch, heads * times, length, dim)


def tables(features=DIM, batch=1):
    angles = torch.arange(LENGTH).float()[:, None] / 100 ** (torch.arange(0, features, 2) / features) + torch.arange(batch)[:, None, None]
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


class LlamaNorm(nn.Module):
    """Rounds before its weight."""

    is_before = True  # heads become a dimension of their own

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, x):
        wide = x.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-3)).to(x.dtype)


class GemmaNorm(LlamaNorm):
    is_before = False

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-3) * (1.0 + self.weight.float())).type_as(x)


class TorchNorm(nn.RMSNorm):
    is_before = False

    def __init__(self, size):
        super().__init__(size, eps=1e-3)


class Attention(nn.Module):
    """Self-attention, its products apart or in one, with a step for queries and keys and one for keys and values."""

    def __init__(self, kv=HEADS, fused=False, bias=False, turn=None, repeats=False, laid=True, norm=None, **options):
        super().__init__()
        self.norms = nn.ModuleList(norm(DIM) for _ in range(2)) if norm else [None, None]
        self.kv, self.turn, self.repeats, self.laid, self.options = kv, turn, repeats, laid, options
        sizes = [HIDDEN, kv * DIM, kv * DIM]
        self.sizes = sizes
        self.qkv = nn.ModuleList(nn.Linear(HIDDEN, size, bias=bias) for size in ([sum(sizes)] if fused else sizes))
        self.o = nn.Linear(HIDDEN, HIDDEN, bias=bias)

    def heads(self, x, *turning):
        rows = self.qkv[0](x).split(self.sizes, -1) if len(self.qkv) == 1 else [each(x) for each in self.qkv]
        q, k, v = map(heads_of, rows, [*self.norms, None])
        return (self.turn(q, *turning), self.turn(k, *turning), v) if self.turn else (q, k, v)

    def forward(self, x, *turning, mask=None):
        q, k, v = self.heads(x, *turning)
        if self.repeats:
            k, v = (repeated(t, HEADS // self.kv) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.options).transpose(1, 2)
        return self.o((y.contiguous() if self.laid else y).reshape(*y.shape[:2], -1))


class ScaledQueries(Attention):
    """Queries are scaled as rows, as in OPT."""

    def __init__(self, factor, **options):
        super().__init__(**options)
        self.factor = factor

    def heads(self, x, *turning):
        q, k, v = (each(x) for each in self.qkv)
        return heads_of(q * self.factor), heads_of(k), heads_of(v)


class Caching(Attention):
    """Keys and values go into a cache, in which there are none yet, and are results."""

    def forward(self, x, *turning):
        q, k, v = self.heads(x, *turning)
        k, v = (torch.cat([torch.tensor([], dtype=each.dtype), each], dim=-2) for each in (k, v))
        keys, values = (repeated(each, HEADS // self.kv) for each in (k, v)) if self.repeats else (k, v)
        y = F.scaled_dot_product_attention(q, keys, values, **self.options).transpose(1, 2).reshape(x.shape)
        return self.o(y), k, v


class Reading(Attention):
    """Its keys are read beside attention."""

    def forward(self, x, *turning):
        q, k, v = self.heads(x, *turning)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)), k * 2


class ReadingQueries(Attention):
    def forward(self, x, *turning):
        q, k, v = self.heads(x, *turning)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)) + q.sum()


class MaskedByKeys(Attention):
    def forward(self, x, *turning):
        q, k, v = self.heads(x, *turning)
        return self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=k.sum((1, 2, 3), keepdim=True)).transpose(1, 2).reshape(x.shape))


def compared(model, x, *more, tolerance=1e-5, options=None, **named):
    """The ops that a model becomes; its results and gradients are those of eager."""
    torch._dynamo.reset()
    own = copy.deepcopy(model)
    call = torch.compile(own, backend=backend, options={"verify": True, **(options or {})})
    one, other = (x.clone().requires_grad_() for _ in range(2))
    ys, wants = call(one, *more, **named), model(other, *more, **named)
    ys, wants = (each if isinstance(each, tuple) else (each,) for each in (ys, wants))
    for results in (ys, wants):
        sum(result.float().square().sum() for result in results).backward()
    for got, right in (*zip(ys, wants, strict=True), (one.grad, other.grad), *zip((p.grad for p in own.parameters()), (p.grad for p in model.parameters()), strict=True)):
        torch.testing.assert_close(got, right, rtol=tolerance, atol=tolerance * max(right.abs().max().item(), 1))
    return [op for each in report.reports_of(own) for piece in each.pieces for op in piece.ops], tandem.explain(own)


PLAIN, ROTATED = ["Linear", "Attention", "Linear"], ["Linear", "Rotary", "Attention", "Linear"]
NORMED = ["Linear", "QKNorm", "Rotary", "Attention", "Linear"]
CASES = {
    "plain": (Attention(laid=False), [], {}, PLAIN),
    "with biases, of which keys' have no gradient": (Attention(bias=True), [], {}, PLAIN),
    "causal, with biases": (Attention(bias=True, is_causal=True), [], {}, PLAIN),
    "scaled": (Attention(scale=0.3), [], {}, PLAIN),
    "scaled queries": (ScaledQueries(0.5, bias=True, scale=1.0, is_causal=True), [], {}, PLAIN),
    "scaled queries, and heads": (ScaledQueries(0.25), [], {}, PLAIN),
    "rotary": (Attention(turn=turned, is_causal=True), tables(), {}, ROTATED),
    "rotary, each row its own": (Attention(turn=turned), tables(batch=2), {}, ROTATED),
    "rotary in float32": (Attention(turn=turned_in_float32), tables(), {}, ROTATED),
    "rotary of some features": (Attention(turn=turned_at_first), tables(4), {}, ROTATED),
    "rotary of the first features, which are all": (Attention(fused=True, turn=turned_at_first), tables(), {}, ROTATED),
    "shared keys": (Attention(kv=2, turn=turned, enable_gqa=True, is_causal=True), tables(), {}, ROTATED),
    "repeated keys": (Attention(kv=2, turn=turned, repeats=True), tables(), {}, ROTATED),
    "one key": (Attention(kv=1, repeats=True), [], {}, PLAIN),
    "a mask": (Attention(turn=turned), tables(), {"mask": torch.ones(2, 1, LENGTH, LENGTH).tril().bool()}, ROTATED),
    "a mask that is added": (Attention(), [], {"mask": torch.randn(2, 1, LENGTH, LENGTH)}, PLAIN),
    "one product": (Attention(fused=True, bias=True), [], {}, PLAIN),
    "norms of heads": (Attention(norm=LlamaNorm, turn=turned, is_causal=True), tables(), {}, NORMED),
    "norms of heads, 1 + weight, shared keys": (Attention(kv=2, norm=GemmaNorm, turn=turned, repeats=True), tables(), {}, NORMED),
    "norms of heads of torch, a cache": (Caching(norm=TorchNorm, fused=True, turn=turned), tables(), {}, NORMED),
    "norms of heads alone": (Attention(norm=LlamaNorm), [], {}, [each for each in NORMED if each != "Rotary"]),
    "a cache": (Caching(turn=turned, is_causal=True), tables(), {}, ROTATED),
    "a cache of repeated keys": (Caching(kv=2, turn=turned, repeats=True), tables(), {}, ROTATED),
    "keys that others read": (Reading(), [], {}, PLAIN),
    "one product, rotary, shared keys": (Attention(kv=2, fused=True, turn=turned_at_first, repeats=True, is_causal=True), tables(4), {}, ROTATED),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_ways_of_writing(case, dtype):
    model, given, named, expected = CASES[case]
    torch.manual_seed(0)
    model = copy.deepcopy(model)
    for each in model.modules():  # of this seed, whatever drew before
        if isinstance(each, nn.Linear):
            each.reset_parameters()
        elif isinstance(each, LlamaNorm):
            nn.init.uniform_(each.weight, 0.5, 1.5)
    x = torch.randn(2, LENGTH, HIDDEN).to(dtype)
    in_float32 = model.turn is turned_in_float32
    given = [each if in_float32 else each.to(dtype) for each in given]
    named = {name: each if each.dtype == torch.bool else each.to(dtype) for name, each in named.items()}
    found, _ = compared(model.to(dtype), x, *given, tolerance=1e-5 if dtype == torch.float32 else 4e-2, **named)
    assert found == expected


class CachingWide(Attention):
    """Its cache promotes."""

    def forward(self, x, *turning):
        q, k, v = self.heads(x, *turning)
        k, v = (torch.cat([torch.tensor([], dtype=torch.float64), each], dim=-2) for each in (k, v))
        return self.o(F.scaled_dot_product_attention(q.double(), k, v).float().transpose(1, 2).reshape(x.shape))


class OneNorm(Attention):
    def heads(self, x, *turning):
        q, k, v = super().heads(x)
        return F.rms_norm(q, (DIM,), torch.ones(DIM)), k, v


class OneTurned(Attention):
    def heads(self, x, *turning):
        q, k, v = super().heads(x)
        return turned(q, *turning), k, v


class Untransposed(Attention):
    """Two of its products have weights as they lie."""

    def heads(self, x, *turning):
        q, k, v = (x @ self.qkv[0].weight, self.qkv[1](x), x @ self.qkv[2].weight)
        return heads_of(q), heads_of(k), heads_of(v)


class Copied(Attention):
    """Copies of keys and values along the batch too."""

    def heads(self, x, *turning):
        q, k, v = super().heads(x)
        return q, *(t[:, :, None].expand(3, HEADS // 2, 2, LENGTH, DIM).reshape(3, HEADS, LENGTH, DIM) for t in (k, v))

    def forward(self, x):
        q, k, v = self.heads(x)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(3, LENGTH, HIDDEN))


class Uneven(Attention):
    def heads(self, x, *turning):
        a, b, c = map(heads_of, self.qkv[0](x).chunk(3, -1))
        return c, b, a  # values, keys, queries


class OtherPairs(Attention):
    def heads(self, x, *turning):
        q, k, v = super().heads(x)
        third = lambda t: t * turning[0].unsqueeze(1) + torch.cat((-t[..., 2:], t[..., :2]), -1) * turning[1].unsqueeze(1)  # noqa: E731
        return third(q), third(k), v


class ScaledBeforeNorm(Attention):
    """The norm divides by the scale of its queries again."""

    def heads(self, x, *turning):
        q, k, v = (each(x) for each in self.qkv)
        return heads_of(0.5 * q, self.norms[0]), heads_of(k, self.norms[1]), heads_of(v)


class PartnersBefore(Attention):
    """The sines multiply queries and keys as they were before a step, the cosines what the step returns."""

    def heads(self, x, cosines, sines):
        q, k, v = (each(x) for each in self.qkv)
        befores = heads_of(q), heads_of(k)
        q, k = map(heads_of, (q, k), self.norms) if self.norms[0] else (heads_of(0.5 * q), heads_of(k))
        q, k = (own * cosines.unsqueeze(1) + rotate_half(before) * sines.unsqueeze(1) for own, before in zip((q, k), befores, strict=True))
        return q, k, heads_of(v)


LEFT = {
    "queries that others read": (ReadingQueries(turn=turned), tables(), "others read what lies inside, and not keys or values alone"),
    "a mask that is made of keys": (MaskedByKeys(), [], "it reads what is computed of its own keys or values"),
    "angles of more rows": (Attention(turn=turned), tables(batch=4), "its angles have other batches than its x"),
    "an empty cache of another dtype": (CachingWide(), [], "products of one x"),
    "queries alone are turned": (OneTurned(), tables(), "its queries or its keys alone are turned"),
    "weights as they lie": (Untransposed(), [], "product "),
    "copies of other dimensions": (Copied(kv=2), [], "products of one x"),
    "a number for all features": (Attention(turn=turned), [each[..., :1] for each in tables()], "its cosines and sines are no numbers for each feature"),
    "cosines and sines of two shapes": (Attention(turn=turned), [tables()[0], tables(batch=2)[1]], "its cosines and sines are no numbers for each feature"),
    "a norm of queries alone": (OneNorm(), [], "its queries and keys are not normed alike"),
    "values before queries": (Uneven(fused=True), [], "its queries, keys and values do not stand one behind the other"),
    "other pairs": (OtherPairs(), tables(), "its pairs of features are not half of what is turned apart"),
    "angles that are learnt": (Attention(turn=turned), [each.requires_grad_() for each in tables()], "its angles want a gradient"),
    "a negative scale": (Attention(scale=-0.5), [], "its scale is no positive number"),
    "queries that are scaled before their norm": (ScaledBeforeNorm(norm=TorchNorm), [], "its queries are scaled before their norm, which divides by the scale again"),
    "sines of what is not normed": (PartnersBefore(norm=TorchNorm), tables(), "products of one x"),
    "sines of what is not scaled": (PartnersBefore(), tables(), "products of one x"),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_is_left(case):
    model, given, reason = LEFT[case]
    rows = 1 if case in ("angles of more rows", "copies of other dimensions") else 2
    found, text = compared(model, torch.randn(rows, LENGTH, HIDDEN), *given)
    assert "Attention" not in found
    assert reason in text


@pytest.mark.parametrize("has_cache", [True, False])
def test_keys_that_a_cache_keeps_under_autocast_have_the_dtype_of_the_graph(has_cache):
    """Turned keys are float32 there: products in 16 bits times cosines in float32."""
    model, x = (Caching if has_cache else Attention)(turn=turned, is_causal=True), torch.randn(2, LENGTH, HIDDEN)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, text = compared(model, x, *tables(), tolerance=4e-2)
        call = torch.compile(model, backend=backend)
        results, wants = call(x, *tables()), model(x, *tables())
    assert ("Attention" in found) != has_cache
    assert ("others read its keys or values in another dtype than that of its result" in text) == has_cache
    assert [each.dtype for each in results] == [each.dtype for each in wants]


def test_dropout_inside_of_attention_is_left():
    torch._dynamo.reset()
    model = Attention(dropout_p=0.5)
    own = torch.compile(model, backend=backend)
    x = torch.randn(2, LENGTH, HIDDEN)
    torch.manual_seed(0)
    y = own(x)
    torch.manual_seed(0)
    torch.testing.assert_close(y, model(x))


def test_queries_that_are_rounded_when_they_are_scaled_are_left():
    model, x = ScaledQueries(0.3).to(torch.bfloat16), torch.randn(2, LENGTH, HIDDEN, dtype=torch.bfloat16)
    found, text = compared(model, x, tolerance=4e-2)
    assert "Attention" not in found
    assert "its queries are scaled by no power of two, and rounded" in text


class Layers(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.attentions = nn.ModuleList(Attention(turn=turned, is_causal=True) for _ in range(count))
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(count))

    def forward(self, x, *turning):
        for norm, attention in zip(self.norms, self.attentions, strict=True):
            x = x + attention(norm(x), *turning)
        return x


def test_each_attention_is_in_a_pipeline_of_its_own():
    """So that gradients of a layer are there before those of the one before it."""
    _, text = compared(Layers(3), torch.randn(2, LENGTH, HIDDEN), *tables())
    assert text.count("RMSNorm, Linear, Rotary, Attention, Linear, AddExtraInput; keeps") == 3
    assert "12 of 12 products in 3 pipelines" in text


def test_any_length_by_one_graph():
    torch._dynamo.reset()
    model, graphs = Layers(1), []
    call = torch.compile(model, backend=lambda *given, **named: graphs.append(1) or backend(*given, **named), dynamic=True)
    for batch, length in ((2, 6), (3, 5), (4, 3)):
        x, turning = torch.randn(batch, length, HIDDEN), [each[0, :length].clone()[None] for each in tables()]
        torch.testing.assert_close(call(x, *turning), model(x, *turning))
    assert len(graphs) == 1


@pytest.mark.parametrize("names", ["attentions.*.qkv.*", "attentions.0.qkv.0"])
def test_a_recipe_of_names_asks_for_those_of_products(names):
    """Not of the module that attends to what they make; products under several recipes stay apart."""
    import fnmatch

    chosen = lambda name: recipe.MXFP8BlockScaling() if fnmatch.fnmatchcase(name, names) else None  # noqa: E731
    torch._dynamo.reset()
    model = Layers(1)
    call = torch.compile(copy.deepcopy(model), backend=backend, options={"recipe": chosen})
    x = torch.randn(32 // LENGTH + 1, LENGTH, HIDDEN)
    y, want = call(x, *tables()), model(x, *tables())
    assert 1e-4 < (y - want).abs().max() < 0.3
    assert ("Linear, Rotary, Attention" in tandem.explain(call)) == (names == "attentions.*.qkv.*")
    if "Rotary" not in tandem.explain(call):
        assert "its products are under several recipes" in tandem.explain(call)
