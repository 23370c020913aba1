"""python -m differential.attention [--cases N] [--first SEED] [SEED ...]

Compares random calls of `MultiheadAttention`, whole and in pieces with a cache, with torch's float64 operations: masks, memory layouts, heads, norms of
queries and keys, rotary embedding, dtypes. One integer is the seed of one case. Each wrong case is printed with its seed. Run it in the folder `tests`.
"""

from __future__ import annotations

import argparse
import collections
import math
import random
import sys
from typing import Any

import torch
import torch.nn.functional as F

import tandem
from differential.case import DTYPES, Case, text_of

NEAR = {"f64": 1e-10, "f32": 3e-5, "f16": 1.5e-2, "bf16": 1e-1}  # allowed distance relative to the norm of the expected tensor
FLOAT32 = 3e-5  # allowed distance with rotary embedding, whose angles are float32 also for float64
MODES = {"none": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}
MASKED = ("padding", "padding_causal", "arbitrary")


def generate(seed: int) -> Case:
    r = random.Random(f"attention {seed}")
    groups, norm_of_heads = r.choice((1, 1, 2, 3)), r.choice((None, None, "RMSNorm", "LayerNorm", "L2Normalization"))
    channels = r.choice((6, 8, 16) if norm_of_heads == "LayerNorm" else (2, 4, 6, 8, 16))  # a LayerNorm of two features returns only their signs
    heads = groups * r.choice((1, 1, 2, 3))
    mask_type = r.choice(("causal", "causal", "causal_bottom_right", "no_mask", *MASKED))
    own = ("bool", "float") if mask_type in MASKED else (None,) if mask_type == "no_mask" else (None, None, "bool", "float")
    length, batch = r.choice((1, 1, 2, 3, 5, 8, 13)), r.choice((1, 1, 2, 3))
    case: Case = {
        "seed": seed, "d": r.choice(("f64", "f64", "f32", "f32", "bf16", "f16")), "length": length, "batch": batch, "heads": heads, "groups": groups,
        "channels": channels, "hidden": r.choice((max(heads * channels, 6), 8, 12)), "form": r.choice(("sbhd", "bshd")), "bias": r.random() < 0.5,
        "fused": r.random() < 0.5, "interleaved": r.random() < 0.5, "norm": r.choice((None, "LayerNorm", "RMSNorm")), "zero": r.random() < 0.3,
        "qk": norm_of_heads, "before": r.random() < 0.5, "type": mask_type, "mask": r.choice(own),
        "again": r.random() < 0.3, "eval": r.random() < 0.5,
    }  # fmt: skip
    if case["mask"] is not None:
        case["smaller"] = [r.random() < 0.5, r.random() < 0.5, mask_type.startswith("padding") or r.random() < 0.3]
        case["wide"], case["learns"] = r.random() < 0.3, case["mask"] == "float" and r.random() < 0.4
    if r.random() < 0.5:
        percent = r.choice((1.0, 1.0, 0.5)) if channels % 4 == 0 else 1.0
        case["rotary"] = {"percent": percent, "pairs": r.random() < 0.5, "base": r.choice((10000.0, 50.0)), "two": r.random() < 0.3}
        if r.random() < 0.3:
            case["rotary"] |= {"factor": r.choice((2, 1.5, 4)), "trained": r.choice((1, 3, 100))}
    if r.random() < 0.5:
        ends = sorted(r.sample(range(1, length), min(r.randrange(4), length - 1))) if length > 1 else []
        case["pieces"] = [end - begin for begin, end in zip([0, *ends], [*ends, length], strict=True)]
        case["modes"] = [r.choice(("none", "none", "inference")) for _ in case["pieces"][1:]] + ["grad"]
        case["room"], case["at"] = (r.randrange(3), r.randrange(3))
        case["swap"] = [r.random() < 0.4 for _ in case["pieces"]]
    return case


def laid(t: torch.Tensor, r: random.Random) -> torch.Tensor:
    """The values of `t` in memory with dimensions in random order, gaps of NaN, and random strides for dimensions of size 1."""
    if r.random() < 0.3:
        return t.clone()
    order = r.sample(range(t.dim()), t.dim())
    steps, gaps = [r.choice((1, 1, 1, 2)) for _ in order], [r.choice((0, 0, 0, 3)) for _ in order]
    memory = torch.full([t.shape[d] * step + gap for d, step, gap in zip(order, steps, gaps, strict=True)], math.nan).to(t.dtype)
    view = memory[tuple(slice(gap, None, step) for step, gap in zip(steps, gaps, strict=True))]
    view = view.permute([order.index(d) for d in range(t.dim())])
    strides = [r.choice((0, 1, stride, 96, 10**6)) if size == 1 else stride for size, stride in zip(view.shape, view.stride(), strict=True)]
    view = view.as_strided(view.shape, strides, view.storage_offset())
    return view.copy_(t)


def _normed(t: torch.Tensor, kind: str | None, eps: float, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None) -> torch.Tensor:
    if kind is None:
        return t
    if kind == "L2Normalization":
        return t * torch.rsqrt(t.square().sum(-1, keepdim=True) + eps)
    if kind == "LayerNorm":
        t = t - t.mean(-1, keepdim=True)
    t = t * torch.rsqrt(t.square().mean(-1, keepdim=True) + eps)
    t = t if weight is None else t * weight
    return t if bias is None else t + bias


def _rotated(t: torch.Tensor, case: Case, shift: float) -> torch.Tensor:
    """Rotary embedding of t [batch, sequence, heads, features], computed pair by pair as a product of complex numbers."""
    how = case["rotary"]
    length, count = case["length"], int(case["channels"] * how["percent"])
    positions = torch.arange(length, dtype=torch.float64) + shift
    if "factor" in how:
        positions = positions / max(how["factor"], (length + shift) / how["trained"])
    angles = positions[:, None] * how["base"] ** -(torch.arange(0, count, 2, dtype=torch.float64) / count)
    turned, rest = t[..., :count], t[..., count:]
    pairs = turned.unflatten(-1, (-1, 2)) if how["pairs"] else torch.stack(turned.chunk(2, -1), -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = pairs[..., 0] * cos - pairs[..., 1] * sin, pairs[..., 0] * sin + pairs[..., 1] * cos
    both = torch.stack((first, second), -1).flatten(-2) if how["pairs"] else torch.cat((first, second), -1)
    return torch.cat((both, rest), -1)


def expected(case: Case, x: torch.Tensor, p: dict[str, torch.Tensor], mask: torch.Tensor | None, ends: list[int], constant: int) -> torch.Tensor:
    """y [batch, sequence, features] in float64. A query sees keys before the end of its piece only; keys before `constant` get no gradient."""
    heads, groups, channels = case["heads"], case["groups"], case["channels"]
    at = "layernorm_qkv." if case["norm"] else "qkv."
    if case["norm"]:
        x = _normed(x, case["norm"], 1e-5, p[f"{at}layer_norm_weight"] + case["zero"], p.get(f"{at}layer_norm_bias"))
    if case["fused"]:
        mixed = F.linear(x, p[f"{at}weight"], p.get(f"{at}bias"))
        if case["interleaved"]:
            per_group = mixed.unflatten(-1, (groups, heads // groups + 2, channels))
            q, k, v = per_group[..., :-2, :].flatten(-3), per_group[..., -2, :].flatten(-2), per_group[..., -1, :].flatten(-2)
        else:
            q, k, v = mixed.split([heads * channels, groups * channels, groups * channels], -1)
    else:
        q, k, v = (F.linear(x, p[f"{at}{name}_weight"], p.get(f"{at}{name}_bias")) for name in ("query", "key", "value"))
    q, k, v = (t.unflatten(-1, (-1, channels)) for t in (q, k, v))
    for step in ("norm", "rotary") if case["before"] else ("rotary", "norm"):
        if step == "norm":
            q, k = (_normed(t, case["qk"], 1e-6, p.get(f"{n}_norm.weight"), p.get(f"{n}_norm.bias")) for t, n in ((q, "q"), (k, "k")))
        elif "rotary" in case:
            q, k = _rotated(q, case, 0), _rotated(k, case, 2 if case["rotary"]["two"] else 0)
    k, v = (torch.cat((t[:, :constant].detach(), t[:, constant:]), 1).repeat_interleave(heads // groups, 2) for t in (k, v))
    scores = torch.einsum("bihc,bjhc->bhij", q, k) / math.sqrt(channels)
    columns = torch.arange(case["length"])
    hidden = columns >= torch.tensor(ends)[:, None]
    if "causal" in case["type"]:
        hidden = hidden | (columns > columns[:, None])
    if mask is not None and mask.dtype is torch.bool:
        hidden = hidden | mask
    elif mask is not None:
        scores = scores + mask
    hidden = hidden | (scores == -math.inf)
    weights = scores.masked_fill(hidden, -1e300).softmax(-1).masked_fill(hidden, 0)
    return F.linear(torch.einsum("bhij,bjhc->bihc", weights, v).flatten(-2), p["proj.weight"], p.get("proj.bias"))


def check(case: Case) -> str | None:
    """A text that says what is wrong with the result or a gradient of a case, or None."""
    r, generator = random.Random(f"memory {case['seed']}"), torch.Generator().manual_seed(case["seed"])
    dtype, length, batch = DTYPES[case["d"]], case["length"], case["batch"]
    draw = lambda *sizes: torch.randn(sizes, generator=generator, dtype=torch.float64)  # noqa: E731
    made = tandem.MultiheadAttention(
        case["hidden"], case["heads"], case["channels"], 0.0, layer_number=1, attn_mask_type=case["type"], num_gqa_groups=case["groups"],
        params_dtype=dtype, input_layernorm=case["norm"] is not None, normalization=case["norm"] or "LayerNorm", zero_centered_gamma=case["zero"],
        fuse_qkv_params=case["fused"], qkv_weight_interleaved=case["interleaved"], bias=case["bias"], qkv_format=case["form"],
        qk_norm_type=case["qk"], qk_norm_before_rope=case["before"], rotary_pos_interleaved=case.get("rotary", {}).get("pairs", False),
    ).train(not case["eval"])  # fmt: skip
    with torch.no_grad():
        for param in made.parameters():
            param.copy_(draw(*param.shape) / (math.sqrt(param.shape[-1]) if param.dim() > 1 else 2))
            if r.random() < 0.2:
                param.data = laid(param.detach(), r)
    x = laid(draw(batch, length, case["hidden"]).to(dtype), r).requires_grad_()
    mask, freqs = _mask(case, draw, r), None
    if "rotary" in case:
        how = case["rotary"]
        interpolation = {"seq_len_interpolation_factor": how.get("factor"), "pretrained_max_position_embeddings": how.get("trained")}
        rotary = tandem.RotaryPositionEmbedding(case["channels"], how["percent"], **interpolation, rotary_base=how["base"], interleaved=how["pairs"])
        freqs = laid(rotary(length), r)
        if how["two"]:
            freqs = freqs, laid(rotary(length, offset=2), r)
    pieces = case.get("pieces", [length])
    ends = [end for n, size in enumerate(pieces) for end in [sum(pieces[: n + 1])] * size]
    constant = length - pieces[-1]
    actual = _called(case, made, x, mask, freqs, r)
    leaves = {"x": x, **dict(made.named_parameters()), **({"mask": mask} if case.get("learns") else {})}
    copies = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    mask64 = copies.get("mask", mask if mask is None or mask.dtype is torch.bool else mask.to(dtype).double())
    right = expected(case, copies["x"], copies, mask64, ends, constant)
    near = max(NEAR[case["d"]], FLOAT32 if "rotary" in case else 0)
    if not _is_near(actual, right, near):
        return f"y is off by {_distance(actual, right):.2g}"
    grad = draw(batch, pieces[-1], case["hidden"]).to(dtype)
    own = torch.autograd.grad(actual[:, constant:], [*leaves.values()], laid(grad, r), allow_unused=True)
    theirs = torch.autograd.grad(right[:, constant:], [*copies.values()], grad.double(), allow_unused=True)
    theirs = [torch.zeros_like(t) if g is None else g for g, t in zip(theirs, copies.values(), strict=True)]
    size = max(g.square().mean().sqrt().item() for g in theirs)  # gradients that cancel, as that of an only key, are compared relative to the others
    for name, a, b in zip(leaves, own, theirs, strict=True):
        if not _is_near(torch.zeros_like(b) if a is None else a, b, 4 * near, size):
            return f"the gradient of {name} is off by {_distance(a, b, size):.2g}"
    return None


def _mask(case: Case, draw: Any, r: random.Random) -> torch.Tensor | None:
    if case["mask"] is None:
        return None
    sizes = [1 if one else size for one, size in zip(case["smaller"], (case["batch"], case["heads"], case["length"]), strict=True)]
    hidden = draw(*sizes, case["length"]) > 0.8
    while hidden.shape[0] == 1 and hidden.dim() > 1 and r.random() < 0.5:
        hidden = hidden[0]
    if case["mask"] == "bool":
        return laid(hidden, r)
    dtype = torch.float32 if case["wide"] and not case["learns"] else DTYPES[case["d"]]
    return laid(draw(*hidden.shape).masked_fill(hidden, -math.inf).to(dtype), r).requires_grad_(case["learns"])


def _called(case: Case, made: Any, x: torch.Tensor, mask: torch.Tensor | None, freqs: Any, r: random.Random) -> torch.Tensor:
    """y of the module, [batch, sequence, features], from one call or from one call for each piece."""
    turn = lambda t: t if case["form"] == "bshd" else t.transpose(0, 1)  # noqa: E731
    if "pieces" not in case:
        return turn(made(turn(x), mask, rotary_pos_emb=freqs, checkpoint_core_attention=case["again"]))
    batch, begin, outputs = case["batch"], 0, []
    cache = tandem.InferenceParams(batch + case["room"], case["length"] + case["at"])
    cache.batch_size_offset = min(case["at"], case["room"])
    rows = list(range(batch))  # rows[i]: the sequence at index i of the cache
    for size, mode, swap in zip(case["pieces"], case["modes"], case["swap"], strict=True):
        part = mask
        if mask is not None:
            part = mask[..., : begin + size]
            part = part[..., begin : begin + size, :] if part.dim() > 1 and part.shape[-2] > 1 else part
            part = part[rows] if part.dim() == 4 and part.shape[0] > 1 else part
        with MODES[mode]():
            piece = x[:, begin : begin + size] if rows == sorted(rows) else x[rows, begin : begin + size]
            y = turn(made(turn(piece), part, rotary_pos_emb=freqs, inference_params=cache, checkpoint_core_attention=case["again"]))
        outputs.append(y.clone()[[rows.index(row) for row in range(batch)]])
        begin += size
        cache.sequence_len_offset = begin
        if swap:
            order, at = r.sample(range(batch), batch), cache.batch_size_offset
            with MODES[r.choice(("none", "inference"))]():
                cache.swap_key_value_dict(torch.tensor([*range(at), *(at + o for o in order), *range(at + batch, cache.max_batch_size)]))
            rows = [rows[o] for o in order]
    return torch.cat(outputs, 1)


def _distance(a: torch.Tensor, b: torch.Tensor, size: float = 0.0) -> float:
    return ((a.double() - b).norm() / max(b.norm().item(), size * math.sqrt(b.numel()), 1e-30)).item()


def _is_near(a: torch.Tensor, b: torch.Tensor, near: float, size: float = 0.0) -> bool:
    return a.shape == b.shape and _distance(a.detach(), b.detach(), size) <= near


def campaign(first: int, count: int) -> list[str]:
    """The texts of the wrong cases among `count` seeds from `first` on."""
    found, kinds = [], collections.Counter[str]()
    for seed in range(first, first + count):
        case = generate(seed)
        try:
            wrong = check(case)
        except Exception as error:  # every case is valid, so an error is wrong
            wrong = f"{type(error).__name__}: {str(error)[:200]}"
        kinds.update([case["d"], case["type"], f"mask {case['mask']}", f"norm of heads {case['qk']}", *({"rotary", "pieces"} & case.keys())])
        if wrong:
            found.append(f"{wrong}\n  python -m differential.attention {seed}\n  {text_of(case)}")
            print(found[-1], flush=True)
    print(f"{count} cases from seed {first} on, {len(found)} wrong: " + ", ".join(f"{kind} {number}" for kind, number in kinds.most_common()))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m differential.attention", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", nargs="*", type=int)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, help="first seed; drawn where it is not given")
    chosen = parser.parse_args()
    if chosen.seed:
        return int(any([campaign(seed, 1) for seed in chosen.seed]))
    return int(bool(campaign(random.SystemRandom().randrange(10**9) if chosen.first is None else chosen.first, chosen.cases)))


if __name__ == "__main__":
    sys.exit(main())
