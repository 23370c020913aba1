"""Gradients that are added to `weight.main_grad`: the protocol of training frameworks that have gradient buffers of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from tandem import _C

Mode = tuple[str, bool]  # kind of dummy gradient, and whether main_grad is overwritten


def modes(places: Mapping[int, tuple[torch.nn.Module, str]]) -> dict[int, Mode]:
    """How a call returns the gradients of those of these parameters that require one. In the first micro-batch each gradient overwrites `main_grad`.
    Raises RuntimeError if a parameter has no `main_grad`."""
    found: dict[int, Mode] = {}
    for at, (module, name) in places.items() if torch.is_grad_enabled() else ():
        param, op = getattr(module, name), type(module).__name__
        if not param.requires_grad:
            continue
        buffer(param, op)
        dummy = "none"
        if hasattr(param, "grad_added_to_main_grad"):  # the framework's hook runs only if backward returns a gradient
            dummy = "zeros" if getattr(param, "zero_out_wgrad", False) else "empty"
        found[at] = (dummy, is_overwritten(param))
    return found


def is_overwritten(param: Any) -> bool:
    """Whether the next gradient overwrites the parameter's `main_grad`."""
    return in_first_microbatch() or bool(getattr(param, "overwrite_main_grad", False))


def check_overwritten_once(weights: Sequence[tuple[str, Any]]) -> None:
    """Raises RuntimeError if a weight is given twice. `weights`: the class of an op, and a weight whose `main_grad` it overwrites."""
    for at, (op, weight) in enumerate(weights):
        if any([weight is other for _, other in weights[:at]]):
            raise RuntimeError(
                f"{op}: expected a weight with overwrite_main_grad at one place of a pipeline, got one at two: the gradient of one place would "
                "take that of the other away. Set main_grad to zero instead."
            )


def in_first_microbatch() -> bool:
    """Whether the module that is running was called with `is_first_microbatch=True`."""
    return _C.in_force.said_of_weights == "first micro-batch"


def buffer(param: Any, op: str = "Linear") -> torch.Tensor:
    """The current `main_grad` of a parameter. Raises RuntimeError if it is not a tensor."""
    if hasattr(param, "__fsdp_param__"):
        param.main_grad = param.get_main_grad()
    main_grad = getattr(param, "main_grad", None)
    if not isinstance(main_grad, torch.Tensor):
        raise RuntimeError(
            f"{op}: expected a tensor as main_grad of the weight, as accumulate_into_main_grad=True asks, got {type(main_grad).__name__}. Assign "
            "weight.main_grad = torch.zeros_like(weight) before the call, or build the op without."
        )
    return main_grad


def announce(param: Any) -> None:
    """Sets the attribute by which a framework learns that the gradient is, or will be, in main_grad."""
    if hasattr(param, "grad_added_to_main_grad"):
        param.grad_added_to_main_grad = True


def take(param: Any) -> torch.Tensor:
    """The `main_grad` into which backward is about to write; the library calls this."""
    announce(param)
    return buffer(param)


def absorb(op: str, param: Any, gradient: torch.Tensor, is_first: bool = False) -> torch.Tensor | None:
    """Adds a gradient to the parameter's `main_grad`, or overwrites it in the first micro-batch or on request. Returns the dummy gradient or None."""
    announce(param)
    target = buffer(param, op)
    if is_first or getattr(param, "overwrite_main_grad", False):
        target.copy_(gradient)
    else:
        target.add_(gradient)
    return stand_in(param)


def stand_in(param: Any) -> torch.Tensor | None:
    """The dummy gradient to return for a gradient that is in main_grad; None unless the framework waits for a gradient."""
    if not hasattr(param, "grad_added_to_main_grad"):
        return None
    make = torch.zeros if getattr(param, "zero_out_wgrad", False) else torch.empty
    return make(param.shape, dtype=param.dtype, device=param.device)


def buffers(places: Sequence[tuple[torch.nn.Module, str]]) -> list[torch.Tensor]:
    """The main_grads of these parameters, which a dispatched call takes as arguments."""
    params = [getattr(module, name) for module, name in places]
    if not is_dynamo_compiling():
        for param in params:
            announce(param)
    return [buffer(param) for param in params]
