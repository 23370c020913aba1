"""Measures the host time of dispatched calls, which pass the description as text: kernels cannot read their tensors directly."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import tandem
from benchmarks.timing import interleaved, table, verdict
from tandem import ops


class Wrapped(torch.Tensor):
    """A wrapper of a tensor, whose subclass intercepts each operation."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor, requires_grad: bool = False) -> Wrapped:
        tensor: Wrapped = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, requires_grad=requires_grad)  # type: ignore[attr-defined]
        tensor.held = held
        return tensor

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return Wrapped(args[0].held)
        plain = torch.utils._pytree.tree_map(lambda value: value.held if isinstance(value, Wrapped) else value, (args, kwargs or {}))
        return function(*plain[0], **plain[1])


def linear(weight: Any = None) -> ops.Linear:
    made = ops.Linear(8, 8)
    if weight is not None:
        made.weight = nn.Parameter(weight(made.weight.detach()))
    return made


def run() -> str:
    torch.set_num_threads(1)
    x = torch.randn(4, 8)
    parametrized = linear()
    nn.utils.parametrize.register_parametrization(parametrized, "weight", nn.Identity())
    quantizer = tandem.Float8CurrentScalingQuantizer(torch.float8_e4m3fn)
    models = {
        "plain": linear(),
        "weight in FP8 codes": linear(lambda weight: tandem.quantize(weight, quantizer)),
        "weight of a subclass": linear(Wrapped),
        "parametrized weight": parametrized,
    }
    times = interleaved({name: lambda model=model: model(x) for name, model in models.items()})
    rows = [[name, f"{seconds * 1e6:.2f}"] for name, seconds in times.items()]
    text = table("host time of a forward, us per call", ["Linear 8 x 8, 4 rows", "tandem"], rows)
    # The cost of the description in a call: the front's cached text, and the program that the dispatcher op finds by the text.
    now = models["parametrized weight"]._run_alone().now
    eager = now.pipeline(())
    for name, describe in {
        "in Python, of a parametrized weight": lambda: now.text(None, (), True, "null", None, None),
        "in C++, of a subclass": lambda: eager.find_described(True),
    }.items():
        seconds = interleaved({"describe": describe})["describe"]
        text += f"\ndescription {name}: {seconds * 1e6:.3f} us (bar 1: {verdict(seconds <= 1e-6)})"
    return text
