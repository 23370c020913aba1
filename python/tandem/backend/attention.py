"""Rows of attention. Queries, keys and values are columns of one tensor or products of one x; the heads of the result lie side by side."""

from __future__ import annotations

import math
from typing import Any

from tandem import ops
from tandem.backend.normalise import fixed, has_shape, value_of
from tandem.backend.patterns import Bound, Call, Columns, Either, Named, Number, Pattern, Rounded, Unsqueezed, Var, Wide
from tandem.backend.rows import Op, Row, Weight, of_unit_size, product, x

_NAMES = ("query", "key", "value")


def _turned(name: str, heads: Pattern) -> Pattern:
    """heads * cosines + [-second half, first half] * sines, over all features of a head or the first ones: rotary embedding."""
    heads = Named(f"{name}_before", heads)  # one node in all terms of the sum

    def of(own: Pattern) -> Pattern:
        partner = Call("cat", Call("neg", Columns("second", own)), Columns("first", own))
        return Wide(own) * Unsqueezed("cosines") + partner * Unsqueezed("sines")

    first = Rounded(of(Wide(Columns("turned", heads))))
    return Either(Rounded(of(Wide(heads))), Call("laid", first), Call("cat", first, Columns("passed", heads)))


def _normed(name: str, heads: Pattern) -> Pattern:
    """Each head divided by its root mean square, times a weight or 1 + weight."""
    weight, unit = Wide(Var(f"{name}_norm", 1)), of_unit_size(heads)
    return Either(
        Rounded(Rounded(unit, name=f"{name}_rounded") * weight),
        Rounded(Rounded(unit, "the norm and its weight") * (1 + Named(f"{name}_centered", weight))),
        Call("rms_norm", heads, Var(f"{name}_norm", 1)),
    )


def _heads(name: str, rows: Pattern) -> Pattern:
    heads, swapped = Call("heads", rows), Call("swap", Call("heads", rows))
    return Either(swapped, Call("swap", _normed(name, heads)), _normed(name, swapped))


def _attended(query: Pattern, key: Pattern, value: Pattern) -> Pattern:
    """The result of attention between the heads of these rows, as rows. Queries may be scaled before they are split into heads."""
    query = Either(query * Number("factor"), query)
    query, key, value = _heads("query", query), _heads("key", key), Call("swap", Call("heads", value))
    query, key = (Either(Named(f"turned_{name}", _turned(name, each)), each) for name, each in (("query", query), ("key", key)))
    kept = (Named("keys", key), Named("values", value))  # a cache that was empty may keep these nodes
    kept = (Either(Call("laid", each), each) for each in kept)
    shared = (Either(Call("repeated", each), each) for each in kept)
    attended = Call("swap", Call("attention", query, *shared, Var("mask", optional=True), dropout_p=0.0))
    return Call("features", Either(Call("laid", attended), attended))


def _steps(bound: Bound, columns: list[Any]) -> tuple[Op, ...] | str:
    """The ops for norms of heads, rotary embedding and attention; `columns` are the numbers of columns of queries, keys and values. Or the refusal."""
    head_dim, scale, factor = fixed(bound["head_dim"]), bound["scale"], bound.get("factor", 1.0)
    if head_dim is None or any(not isinstance(each, int) or each % head_dim for each in columns):
        return "the sizes of its heads are not fixed"
    query, key, value = (each // head_dim for each in columns)
    if key != value or query != key * bound.get("times", query // key if bound["enable_gqa"] else 1):
        return "its heads of keys and values are not shared evenly"
    rows, heads_of_keys = value_of(bound["x"]).shape, value_of(bound["keys"])
    if not has_shape(heads_of_keys, (rows[0], key, rows[1], head_dim)):
        return "its angles have other batches than its x"
    if scale is not None and not isinstance(scale, (int, float)) or factor * (1 if scale is None else scale) <= 0:
        return "its scale is no positive number"
    if value_of(bound["keys"]).dtype.itemsize == 2 and math.frexp(factor)[0] != 0.5:
        return "its queries are scaled by no power of two, and rounded"
    if factor != 1:
        scale = factor * (head_dim**-0.5 if scale is None else scale)
    heads = {"num_heads": query, "head_dim": head_dim, "num_kv_heads": key}
    mask = bound["mask"]
    options = {**heads, "causal": bound["is_causal"], "scale": scale or 0.0, "mask": mask is not None}
    attention = Op(ops.Attention, options, extras=() if mask is None else (mask,))
    norm = _norm_of_heads(bound, heads)
    if isinstance(norm, str):
        return norm
    if norm and "factor" in bound:
        return "its queries are scaled before their norm, which divides by the scale again"
    if ("turned_query" in bound) != ("turned_key" in bound):
        return "its queries or its keys alone are turned"
    if "cosines" not in bound:
        return (*norm, attention)
    begin, end = bound.get("turned", (0, head_dim))
    if begin != 0 or bound.get("passed", (end, head_dim)) != (end, head_dim) or (bound["first"], bound["second"]) != ((0, end // 2), (end // 2, end)):
        return "its pairs of features are not half of what is turned apart"
    tables = (bound["cosines"], bound["sines"])
    if any(value_of(each).requires_grad for each in tables):
        return "its angles want a gradient"
    shapes = [value_of(each).shape for each in tables]
    if not has_shape(value_of(tables[1]), tuple(shapes[0])) or shapes[0][-1] != end or not all(value_of(each).is_floating_point() for each in tables):
        return "its cosines and sines are no numbers for each feature, of one shape"
    return (*norm, Op(ops.Rotary, {**heads, "rotated_features": end, "tables": True}, extras=tables), attention)


def _norm_of_heads(bound: Bound, heads: dict[str, int]) -> tuple[Op, ...] | str:
    norms = [bound[name] for name in ("query_norm", "key_norm") if name in bound]
    if not norms:
        return ()
    dtype, roundings = value_of(bound["keys"]).dtype, {bound.get(f"{name}_rounded") for name in ("query", "key")}
    if len(norms) != 2 or len({f"{name}_centered" in bound for name in ("query", "key")}) != 1 or bound["eps"] is None:
        return "its queries and keys are not normed alike"
    if any(tuple(value_of(each).shape) != (heads["head_dim"],) or value_of(each).dtype != dtype for each in norms) or roundings - {None, dtype} or len(roundings) != 1:
        return "the weights of its norms have another size or dtype than heads, or round otherwise"
    options = {**heads, "eps": bound["eps"], "zero_centered_gamma": "key_centered" in bound, "rounds_before_weight": roundings == {dtype}, "dtype": dtype}
    return (Op(ops.QKNorm, options, tuple((f"{name}_weight", Weight(norm)) for name, norm in zip(_NAMES, norms, strict=False))),)


def _of_products(bound: Bound) -> tuple[Op, ...] | str:
    made = product(bound, tuple(f"{name}_" for name in _NAMES))
    if isinstance(made, str):
        return made
    steps = _steps(bound, [*made[0].options["parameters_split"].values()])
    return steps if isinstance(steps, str) else (*made, *steps)


def _of_one(bound: Bound) -> tuple[Op, ...] | str:
    ends = [0, *(bound[name][1] for name in _NAMES)]
    if any(bound[name][0] != begin for name, begin in zip(_NAMES, ends, strict=False)) or ends[-1] != fixed(value_of(bound["x"]).shape[-1]):
        return "its queries, keys and values do not stand one behind the other"
    return _steps(bound, [end - begin for begin, end in zip(ends, ends[1:], strict=False)])


_READ_INSIDE = "others read what lies inside, and not keys or values alone"
ATTENTION: tuple[Row, ...] = (
    Row(
        "attention of products of one x",
        _attended(*(Call("linear", x, Var(f"{name}_weight", 2), Var(f"{name}_bias", 1, optional=True), transposed=None) for name in _NAMES)),
        _of_products,
        _READ_INSIDE,
    ),
    Row("attention", _attended(*(Columns(name, x) for name in _NAMES)), _of_one, _READ_INSIDE),
)
