"""The table of rows: formulas that models contain, and the ops of `tandem.ops` that compute them.

A row applies only if the pipeline computes what the graph computes up to the rounding of the dtype. A step of a pipeline rounds once; a formula that
rounds in between, because its author wrote a cast, is therefore refused with that reason, unless the op rounds there too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from tandem import ops
from tandem.backend.normalise import fixed, has_shape, value_of
from tandem.backend.patterns import Bound, Call, Columns, Either, Number, Pattern, Rounded, Var, Wide


class Weight(NamedTuple):
    """The node that is a parameter of an op at each call."""

    node: Node | None  # None: the formula has no such parameter, and the op gets a neutral value
    transposed: bool = False  # whether the node is the transpose of the parameter


class Op(NamedTuple):
    """An op of a pipeline: its class and options, and the nodes that are its parameters and extra inputs."""

    make: Callable[..., torch.nn.Module]
    options: dict[str, Any] = {}
    weights: tuple[tuple[str, Weight], ...] = ()
    extras: tuple[Node, ...] = ()
    has_ends: bool = False  # whether the extra input holds ends of groups, while the op takes sizes of groups

    def made(self) -> torch.nn.Module:
        """A new op. Its parameters are on the meta device, as each call passes them."""
        return self.make(**self.options, **({"device": "meta"} if self.weights else {}))

    def refusal(self) -> str | None:
        """The reason why the op cannot be created, or None."""
        try:
            self.made()
        except (NotImplementedError, TypeError, ValueError) as error:
            return f"its op refuses it: {error}"
        return None


class Row(NamedTuple):
    """A formula, and a function that returns its ops in order, or the reason why it has none."""

    name: str
    pattern: Pattern
    ops: Callable[[Bound], tuple[Op, ...] | str]
    read_inside: str | None = None  # the reason to report if other nodes read values inside the formula; None: it is not reported


x, other = Var("x"), Var("other")


def product(bound: Bound, prefixes: tuple[str, ...] = ("",)) -> tuple[Op, ...] | str:
    """One product whose weight has the rows of all weights, one after the other, or the reason why there is none."""
    weights = [bound[f"{prefix}weight"] for prefix in prefixes]
    biases = [bound.get(f"{prefix}bias") for prefix in prefixes]
    transposed = bool(bound.get("transposed"))
    rows = [value_of(weight).shape[1 if transposed else 0] for weight in weights]
    columns = value_of(weights[0]).shape[0 if transposed else 1]
    if not all(isinstance(size, int) for size in (*rows, columns)):
        return "the sizes of its weight are not fixed"
    if any(bias is not None and tuple(value_of(bias).shape) != (size,) for bias, size in zip(biases, rows, strict=True)):
        return "its bias has another size than its result"
    dtypes = {value_of(each).dtype for each in (*weights, *biases) if each is not None}
    if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.float64, torch.bfloat16, torch.float16}:
        return f"its operands have dtypes {', '.join(sorted(map(str, dtypes)))}"
    has_bias = any(bias is not None for bias in biases)  # parts without a bias get zeros
    options = {"in_features": columns, "out_features": sum(rows), "bias": has_bias, "dtype": dtypes.pop()}
    parts = [""]
    if len(weights) > 1:
        parts = [f"part{at}_" for at in range(len(weights))]
        options["parameters_split"] = {f"part{at}": size for at, size in enumerate(rows)}
    named = [(f"{part}weight", Weight(weight, transposed)) for part, weight in zip(parts, weights, strict=True)]
    named += [(f"{part}bias", Weight(bias)) for part, bias in zip(parts, biases, strict=True) if has_bias]
    return (Op(ops.Linear, options, tuple(named)),)


def _grouped_product(bound: Bound) -> tuple[Op, ...] | str:
    weight, transposed = value_of(bound["weight"]), bool(bound.get("transposed"))
    if not all(isinstance(size, int) and size > 0 for size in weight.shape):
        return "the sizes of its weight are not fixed, or one is 0"
    groups, rows, columns = (weight.mT if transposed else weight).shape
    options = {"num_groups": groups, "in_features": columns, "out_features": rows, "bias": False, "single_grouped_weight": True, "dtype": weight.dtype}
    return (Op(ops.GroupedLinear, options, (("weight", Weight(bound["weight"], transposed)),), (bound["offs"],), has_ends=True),)


def _norm(bound: Bound, make: type, **options: Any) -> tuple[Op, ...] | str:
    value, weight, bias = value_of(bound["x"]), bound.get("weight"), bound.get("bias")
    size = fixed(value.shape[-1])
    if size is None or list(bound.get("shape", [size])) != [size]:
        return "it goes over more than the last dimension, or over one of no fixed size"
    if any(each is not None and (tuple(value_of(each).shape) != (size,) or value_of(each).dtype != value.dtype) for each in (weight, bias)):
        return "its weight has another size or dtype than the rows"
    eps = bound.get("eps")
    if eps is None:  # torch's default is the epsilon of the dtype in which it computes
        eps = torch.finfo(torch.float64 if value.dtype == torch.float64 else torch.float32).eps
    if eps < 0:
        return "its eps is negative"
    given = {"normalized_shape": size, "eps": eps, "dtype": value.dtype, **options}
    if "rounded" in bound:
        if bound["rounded"] != value.dtype:
            return f"it is rounded to {bound['rounded']} before its weight, and its x is {value.dtype}"
        given["rounds_before_weight"] = True
    return (Op(make, given, (("weight", Weight(weight)), *([("bias", Weight(bias))] if "bias" in bound else []))),)


def _bias(bound: Bound) -> tuple[Op, ...] | str:
    value, bias = value_of(bound["x"]), value_of(bound["bias"])
    if value.dim() < 2 or not isinstance(bias.shape[0], int) or not statically_known_true(value.shape[-1] == bias.shape[0]) or value.dtype != bias.dtype:
        return "it has another size or dtype than the rows"
    return (Op(ops.Bias, {"size": bias.shape[0], "dtype": bias.dtype}, (("bias", Weight(bound["bias"])),)),)


def _sum(bound: Bound) -> tuple[Op, ...] | str:
    value, added = value_of(bound["x"]), value_of(bound["other"])
    if value.device != added.device or not has_shape(added, tuple(value.shape)) or not added.is_floating_point():
        return "its operands have other shapes or kinds of dtypes than each other"
    return (Op(ops.AddExtraInput, extras=(bound["other"],)),)


def _loss(bound: Bound) -> tuple[Op, ...] | str:
    """The op for a cross entropy, and for the product that computes its logits if that belongs to the formula, or the reason why there is none."""
    made = product(bound) if "weight" in bound else (Op(ops.CrossEntropy),)
    if isinstance(made, str):
        return made
    (head,) = made
    targets, class_weight = value_of(bound["target"]), bound["class_weight"]
    if targets.dtype != torch.int64:
        return f"its targets are {targets.dtype}, not numbers of classes"
    if targets.dim() > 1:  # with 3 or more dimensions, torch's classes are dimension 1 of the logits
        return "its classes are not the last dimension of its logits"
    if bound["size_average"] is not None or bound["reduce"] is not None:
        return "it says by size_average or reduce, which torch has deprecated, how it is reduced"
    cap = bound.get("cap", 0.0)
    if cap and not (cap > 0 and math.isclose(cap * bound["over_cap"], 1, rel_tol=bound["tolerance"])):
        return "its logits are not capped as cap tanh(logits / cap)"
    options = {name: bound[name] for name in ("ignore_index", "label_smoothing", "reduction")} | {"soft_cap": cap}
    if head.make is ops.Linear:
        options |= {name: head.options[name] for name in ("in_features", "bias", "dtype")} | {"num_classes": head.options["out_features"]}
    weights = (*head.weights, *([] if class_weight is None else [("class_weight", Weight(class_weight))]))
    if class_weight is not None:
        options["class_weight"] = torch.empty(value_of(class_weight).shape, device="meta")
    return (Op(ops.LinearCrossEntropy if head.make is ops.Linear else ops.CrossEntropy, options, weights, (bound["target"],)),)


def _modulation(bound: Bound, zero_centered: bool) -> tuple[Op, ...] | str:
    value, extras = value_of(bound["x"]), tuple(bound[name] for name in ("scale", "shift") if name in bound)
    for vector in map(value_of, extras):
        sizes = (*[1] * (value.dim() - vector.dim()), *vector.shape)
        same = [statically_known_true(size == of) for size, of in zip(sizes, value.shape, strict=False)]
        ones = [statically_known_true(size == 1) for size in sizes[:-1]]
        is_shared = vector.dim() and len(sizes) == value.dim() and True in ones and all(same[: ones.index(True)] + ones[ones.index(True) :] + same[-1:])
        if not is_shared or vector.dtype != value.dtype or vector.device != value.device:
            return "its factor or shift is no vector that rows next to each other share, or of another dtype or device"
    return (Op(ops.Modulate, {"zero_centered": zero_centered, "shift": len(extras) == 2}, extras=extras),)


def _scale(bound: Bound) -> tuple[Op, ...] | str:
    dtype = value_of(bound["x"]).dtype
    if abs(bound["scale"]) > torch.finfo(dtype).max:  # a fused step multiplies before it sums: infinities of both signs would be NaN
        return f"its scale is larger than any number of {dtype}"
    return (Op(ops.ConstantScale, {"scale": bound["scale"]}),)


def _gated_products(bound: Bound, op: type) -> tuple[Op, ...] | str:
    if value_of(bound["gate_weight"]).shape != value_of(bound["up_weight"]).shape:
        return "its gate has another width than what it multiplies"
    both = product(bound, ("gate_", "up_"))
    return both if isinstance(both, str) else (*both, Op(op))


def _gated_halves(bound: Bound, op: type) -> tuple[Op, ...] | str:
    value, first, second = value_of(bound["x"]), bound["first"], bound["second"]
    if first != (0, second[0]) or second != (first[1], value.shape[-1]) or first[1] * 2 != second[1]:
        return "its gate is not the first half of the columns"
    return (Op(op),)


class Activation(NamedTuple):
    name: str
    of: Callable[[Pattern], Pattern]
    op: type | None
    gated: type | None


def _half(v: Pattern, inner: Pattern) -> Pattern:
    return Either((0.5 * v) * inner, 0.5 * (v * inner), v * (0.5 * inner))


def _tanh_gelu(v: Pattern) -> Pattern:
    cube = Either(Call("pow", v, 3), v * Call("square", v))
    return Either(Call("gelu", v, approximate="tanh"), _half(v, 1 + Call("tanh", 0.7978845608028654 * (v + 0.044715 * cube))))


def _erf_gelu(v: Pattern) -> Pattern:
    return Either(Call("gelu", v, approximate="none"), _half(v, 1 + Call("erf", 0.7071067811865476 * v)))


def _softplus(v: Pattern) -> Pattern:
    return Call("softplus", v, beta=1, threshold=20)


def _hard_swish(v: Pattern) -> Pattern:
    gate = Call("relu6", v + 3)
    return Either(Call("hardswish", v), (v * gate) * (1 / 6), v * (gate * (1 / 6)))


ACTIVATIONS = (
    Activation("silu", lambda v: Either(Call("silu", v), v * Call("sigmoid", v)), ops.SiLU, ops.SwiGLU),
    Activation("gelu (tanh)", _tanh_gelu, ops.GELU, ops.GEGLU),
    Activation("gelu (erf)", _erf_gelu, ops.ErfGELU, ops.ErfGEGLU),
    Activation("quick gelu", lambda v: v * Call("sigmoid", 1.702 * v), ops.QGELU, ops.QGEGLU),
    Activation("relu squared", lambda v: Call("square", Call("relu", v)), ops.SReLU, ops.SReGLU),
    Activation("relu", lambda v: Call("relu", v), ops.ReLU, ops.ReGLU),
    Activation("leaky relu", lambda v: Call("leaky_relu", v, negative_slope=0.01), ops.LeakyReLU, None),
    Activation("mish", lambda v: Either(Call("mish", v), v * Call("tanh", _softplus(v))), ops.Mish, None),
    Activation("softplus", _softplus, ops.Softplus, None),
    Activation("hard swish", _hard_swish, ops.HardSwish, None),
    Activation("sigmoid", lambda v: Call("sigmoid", v), None, ops.GLU),
)


def of_unit_size(v: Pattern) -> Pattern:
    """v / sqrt(mean(v^2) + eps), in a wider dtype or in its own."""
    mean_square = Call("mean", Call("square", Wide(v))) + Number("eps", may_be_symbol=True)
    return Either(Wide(v) * Call("rsqrt", mean_square), Call("over_root", Wide(v), mean_square))


_weight = Wide(Var("weight", 1))
_gate = Call("linear", x, Var("gate_weight", 2), Var("gate_bias", 1, optional=True), transposed=None)
_up = Call("linear", x, Var("up_weight", 2), Var("up_bias", 1, optional=True), transposed=None)

_head = Call("linear", x, Var("weight", 2), Var("bias", 1, optional=True))
_made_logits = Either(Call("tanh", Wide(_head) * Number("over_cap")) * Number("cap"), _head)
_logits = Wide(Either(Call("flat", Wide(_made_logits)), _made_logits))
LOSS = "cross_entropy of a product"  # where its logits must stay, the next row computes the loss from them

ROWS: tuple[Row, ...] = (
    Row(
        LOSS,
        Call("cross_entropy", _logits, Var("target"), Var("class_weight", 1, optional=True)),
        _loss,
        "others read its logits, which then take memory and time; where they are results of the model, options={'logits': False} leaves them out",
    ),
    Row("cross_entropy", Call("cross_entropy", Wide(Either(Call("flat", Wide(x)), x)), Var("target"), Var("class_weight", 1, optional=True)), _loss),
    *(Row(each.name, each.of(x), lambda _, op=each.op: (Op(op),)) for each in ACTIVATIONS if each.op),
    *(Row(f"{each.name} gate of two products", each.of(_gate) * _up, partial(_gated_products, op=each.gated)) for each in ACTIVATIONS if each.gated),
    *(
        Row(f"{each.name} gate of halves", each.of(Columns("first", x)) * Columns("second", x), partial(_gated_halves, op=each.gated))
        for each in ACTIVATIONS
        if each.gated
    ),
    Row("rms_norm", Call("rms_norm", x, Var("weight", 1, optional=True)), partial(_norm, make=ops.RMSNorm)),
    Row(
        "rms_norm written out, 1 + weight",
        Rounded(Rounded(of_unit_size(x), "the norm and its weight") * (1 + _weight)),
        partial(_norm, make=ops.RMSNorm, zero_centered_gamma=True),
    ),
    Row("rms_norm written out", Rounded(Rounded(of_unit_size(x), name="rounded") * _weight), partial(_norm, make=ops.RMSNorm)),
    Row("rms_norm written out, no weight", Rounded(of_unit_size(x)), partial(_norm, make=ops.RMSNorm)),
    Row("layer_norm", Call("layer_norm", x, Var("weight", 1, optional=True), Var("bias", 1, optional=True)), partial(_norm, make=ops.LayerNorm)),
    Row("product", _head, product),
    Row("grouped product", Call("grouped", x, Var("weight", 3), Var("offs", 1)), _grouped_product),
    *(
        Row("modulation", x * each + Var("shift") if has_shift else x * each, partial(_modulation, zero_centered=zero_centered))
        for has_shift in (True, False)
        for zero_centered, each in ((True, 1 + Var("scale")), (False, Var("scale")))
    ),
    Row("dropout", Call("dropout", x, training=True, inplace=False), lambda bound: (Op(ops.Dropout, {"p": bound["p"]}),)),
    Row("scale", x * Number("scale"), _scale),
    Row("bias", x + Var("bias", 1), _bias),
    Row("sum", x + other, _sum),
)
