"""Builds the tensors and the modules of a case."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

import tandem.ops as ops
from differential import case as cases
from differential import python_ops
from differential.case import DTYPES, Case
from layouts import laid


class Tie(torch.nn.Module):
    """A module that is no op, so that it separates pipelines."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) if self.kind == "nn_tanh" else torch.neg(x)


@dataclass
class Built:
    """A built case: the module, its arguments, and the leaves whose gradients are compared."""

    resolved: list[Case]
    module: ops.Sequential
    x: torch.Tensor
    extras: list[torch.Tensor]
    leaves: list[torch.Tensor]  # x, extras and parameters, each tensor once
    names: list[str]
    modules: list[Any] = field(default_factory=list)  # by position in `resolved`
    values: list[torch.Tensor] = field(default_factory=list)  # copies of the leaves from before the first call


def tensor(shape: tuple[int, ...], dtype: torch.dtype, layout: str, generator: torch.Generator) -> torch.Tensor:
    """Random values of magnitude near 1 in memory of the given layout; `layouts.laid` describes "wild"."""

    def fresh(sizes: tuple[int, ...]) -> torch.Tensor:
        if not dtype.is_floating_point:
            return torch.randint(0, 5, sizes, generator=generator).to(dtype)
        return torch.randn(sizes, generator=generator, dtype=torch.float64).to(dtype)

    if not shape or layout == "plain":
        return fresh(shape)
    if layout == "wild":
        return laid(fresh(shape), generator)
    if layout == "t" and len(shape) >= 2:
        return fresh((*shape[:-2], shape[-1], shape[-2])).transpose(-1, -2)
    if layout == "perm":
        return fresh(tuple(reversed(shape))).permute(*reversed(range(len(shape))))
    if layout == "step":
        return fresh((*shape[:-1], 2 * shape[-1]))[..., ::2]
    if layout == "expand" and shape[0] > 0:
        return fresh((1, *shape[1:])).expand(shape)
    if layout == "rows" and len(shape) >= 2:
        return fresh((*shape[:-1], 3 * shape[-1] + 5))[..., 2 : 2 + shape[-1]]
    return fresh((shape[0] + 3, *shape[1:]))[2 : 2 + shape[0]]  # "slice"


def _norm_like(module: torch.nn.Module, zero_centered: bool, generator: torch.Generator) -> None:
    with torch.no_grad():
        for name, param in module.named_parameters():
            values = 0.5 * torch.randn(param.shape, generator=generator, dtype=torch.float64)
            is_factor = name.endswith("weight") and not zero_centered
            param.copy_(values + 1 if is_factor else values)


def _module(op: Case, generator: torch.Generator) -> Any:
    kind, dtype = op["k"], DTYPES[op.get("d", "f32")]
    if kind in ("linear", "basic"):
        if kind == "linear":
            module = ops.Linear(op["in"], op["out"], bias=bool(op.get("bias", 1)), dtype=dtype)
        else:
            module = ops.BasicLinear(op["in"], op["out"], dtype=dtype)
        with torch.no_grad():
            for param in module.parameters():
                scale = op["in"] ** -0.5 if param.dim() == 2 else 0.5
                param.copy_(scale * torch.randn(param.shape, generator=generator, dtype=torch.float64))
        return module
    if kind == "grouped":
        packed, groups = bool(op.get("packed", 0)), len(op["splits"])
        experts = ops.GroupedLinear(
            groups, op["in"], op["out"], bias=bool(op.get("bias", 1)), dtype=dtype, single_grouped_weight=packed, single_grouped_bias=packed
        )
        with torch.no_grad():
            for name, param in experts.named_parameters():
                scale = op["in"] ** -0.5 if name.startswith("weight") else 0.5
                param.copy_(scale * torch.randn(param.shape, generator=generator, dtype=torch.float64))
        return experts
    if kind in ("rms", "ln"):
        zero_centered = bool(op.get("zc", 0))
        options = {"rounds_before_weight": True} if op.get("rw", 0) else {}
        norm = (ops.RMSNorm if kind == "rms" else ops.LayerNorm)(
            op["in"], eps=op.get("eps", 1e-5), dtype=dtype, zero_centered_gamma=zero_centered, **options
        )
        _norm_like(norm, zero_centered, generator)
        return norm
    if kind == "bias":
        bias = ops.Bias(op["in"], dtype=dtype)
        _norm_like(bias, True, generator)
        return bias
    if kind in ("py_weighted", "py_child", "py_buffer"):
        module = python_ops.CLASSES[kind](op["in"], dtype)
        _norm_like(module, False, generator)
        return module
    if kind in python_ops.CLASSES:
        return python_ops.CLASSES[kind]()
    if kind in ("nn_tanh", "nn_neg"):
        return Tie(kind)
    if kind == "nested":
        return ops.Sequential(*[_module(inner, generator) for inner in op["resolved"]])
    turns = {"glu_interleave_size": op.get("il")}
    names = ("beta1", "beta2") if kind in ("situ", "s_situ") else ("limit", "alpha", "glu_linear_offset")
    numbers = dict(zip(names, op.get("n", ()), strict=False))
    make = {
        "gelu": ops.GELU,
        "silu": ops.SiLU,
        "relu": ops.ReLU,
        "qgelu": ops.QGELU,
        "srelu": ops.SReLU,
        "swiglu": lambda: ops.SwiGLU(**turns),
        "geglu": lambda: ops.GEGLU(**turns),
        "glu": lambda: ops.GLU(**turns),
        "qgeglu": lambda: ops.QGEGLU(**turns),
        "reglu": lambda: ops.ReGLU(**turns),
        "sreglu": lambda: ops.SReGLU(**turns),
        "situ": lambda: ops.SiTUGLU(**turns, **numbers),
        "clamped": lambda: ops.ClampedSwiGLU(**turns, **numbers),
        "s_swiglu": lambda: ops.ScaledSwiGLU(**turns),
        "s_situ": lambda: ops.ScaledSiTUGLU(**turns, **numbers),
        "s_clamped": lambda: ops.ScaledClampedQGeGLU(**turns, **numbers),
        "s_srelu": ops.ScaledSReLU,
        "l2": lambda: ops.L2Normalization(eps=op.get("eps", 1e-6)),
        "identity": ops.Identity,
        "quantize": lambda: ops.Quantize(bool(op.get("fwd", 1)), bool(op.get("bwd", 0))),
        "scale": lambda: ops.ConstantScale(op.get("f", 2.0)),
        "dropout": lambda: ops.Dropout(op.get("p", 0.5)),
        "reshape": lambda: ops.Reshape(op["shape"]),
        "add": lambda: ops.AddExtraInput(in_place=bool(op.get("ip", 0))),
        "modulate": lambda: ops.Modulate(zero_centered=bool(op.get("zc", 0)), shift=False),
        "make": lambda: ops.MakeExtraOutput(in_place=bool(op.get("ip", 0))),
    }
    return make[kind]()


def build(case: Case) -> Built:
    resolved = cases.resolve(case)
    generator = torch.Generator().manual_seed(case.get("seed", 0))
    modules: list[Any] = []
    listed: list[Any] = []
    for op in resolved:
        module = modules[op["same"]] if "same" in op else _module(op, generator)
        modules.append(module)
        _bind(op, module)
        if "tie" in op:
            _tie(op, resolved, modules)
        for name in op.get("frozen", ()):
            whole = {"w": "weight", "b": "bias"}[name]
            for param in (getattr(module, whole, None), getattr(module, f"{whole}0", None)):  # a GroupedLinear freezes its first group
                if param is not None:
                    param.requires_grad_(False)
        if op.get("eval"):
            module.eval()
        if op.get("hook"):
            module.register_forward_hook(lambda *_: None)
        listed.append(module)
        if op["k"] == "dropout" and "probe" in op["outputs"]:
            listed.append(ops.MakeExtraOutput())
    box = ops.Sequential(*listed, memory_budget=case.get("mode", {}).get("budget"))
    params = list(box.parameters())
    if case.get("params") == "wild":
        for param in params:
            param.data = laid(param.data, generator, may_negate=False)  # a negated parameter takes another path, which gives other bits
    x = _given(case["x"], params, None, generator)
    extras = [_given(extra, params, x, generator) for op in resolved for extra in op["extras"]]
    leaves, names = [], []
    named = [("x", x)] + [(f"extra {n}", e) for n, e in enumerate(extras)] + list(box.named_parameters())
    for name, leaf in named:
        if not any(leaf is known for known in leaves):
            leaves.append(leaf)
            names.append(name)
    return Built(resolved, box, x, extras, leaves, names, modules, [leaf.detach().clone() for leaf in leaves])


def _bind(op: Case, module: Any) -> None:
    if "read" in op:
        module.set_extra_input_channel(0, op["read"])
    if "write" in op:
        module.set_extra_output_channel(0, op["write"], output_to_caller=op["to_caller"])


def _tie(op: Case, resolved: list[Case], modules: list[Any]) -> None:
    other = op["tie"]
    if other >= len(modules) - 1 or not hasattr(modules[other], "weight") or not hasattr(modules[-1], "weight"):
        raise cases.Invalid
    if modules[other].weight.shape != modules[-1].weight.shape or modules[other].weight.dtype != modules[-1].weight.dtype:
        raise cases.Invalid
    modules[-1].weight = modules[other].weight


def _given(spec: Case, params: list[torch.Tensor], x: torch.Tensor | None, generator: torch.Generator) -> torch.Tensor:
    """An argument of a call: a new leaf, or x or a parameter of the same case."""
    if "v" in spec:
        return torch.tensor(spec["v"], dtype=DTYPES[spec["d"]])
    source = spec.get("from")
    if source == "x" and x is not None:
        if tuple(x.shape) != tuple(spec["s"]):
            raise cases.Invalid
        return x
    if isinstance(source, int):
        if source >= len(params) or tuple(params[source].shape) != tuple(spec["s"]):
            raise cases.Invalid
        return params[source]
    made = tensor(tuple(spec["s"]), DTYPES[spec.get("d", "f32")], spec.get("l", "plain"), generator)
    return made.requires_grad_(bool(spec.get("g", 1)) and made.is_floating_point())


@contextlib.contextmanager
def user_fusions(names: Any) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name in names or ():
            register, function = python_ops.FUSIONS[name]
            stack.enter_context(register(function))
        yield
