"""Gradients that go into `weight.main_grad`: what training frameworks with gradient buffers of their own agree on with this library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from tandem import _C

Mode = tuple[str, bool] | None  # the gradient that is returned instead, and whether main_grad is overwritten; None: no gradient is needed


def modes(places: Sequence[tuple[torch.nn.Module, str]]) -> tuple[Mode, ...]:
    """How the gradients of these parameters are given back in a call: in the first micro-batch each takes the place of what `main_grad` holds.
    Raises RuntimeError where a parameter has no `main_grad`."""
    if not torch.is_grad_enabled():
        return (None,) * len(places)
    is_first = in_first_microbatch()
    found: list[Mode] = []
    overwriting: list[Any] = []
    for module, name in places:
        param, op = getattr(module, name), type(module).__name__
        if not param.requires_grad:
            found.append(None)
            continue
        buffer(param, op)
        dummy = "none"
        if hasattr(param, "grad_added_to_main_grad"):  # whose owner waits for a gradient to know that main_grad is there
            dummy = "zeros" if getattr(param, "zero_out_wgrad", False) else "empty"
        overwrites = is_first or bool(getattr(param, "overwrite_main_grad", False))
        if overwrites:
            if any([param is other for other in overwriting]):
                raise RuntimeError(
                    f"{op}: expected a weight with overwrite_main_grad at one place of a pipeline, got one at two: the gradient of one place would "
                    "take that of the other away. Set main_grad to zero instead."
                )
            overwriting.append(param)
        found.append((dummy, overwrites))
    return tuple(found)


def in_first_microbatch() -> bool:
    """Whether a module's `is_first_microbatch` says so of the call."""
    return _C.in_force.said_of_weights == "first micro-batch"


def buffer(param: Any, op: str = "Linear") -> torch.Tensor:
    """The parameter's `main_grad` as it is now."""
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
    """Tells the parameter's owner, if it wants to know, that the gradient is, or will be, in main_grad."""
    if hasattr(param, "grad_added_to_main_grad"):
        param.grad_added_to_main_grad = True


def take(param: Any) -> torch.Tensor:
    """What the library calls when backward is about to write the gradient of `param`."""
    announce(param)
    return buffer(param)


def absorb(op: str, param: Any, gradient: torch.Tensor, is_first: bool = False) -> torch.Tensor | None:
    """Adds a gradient to the parameter's `main_grad`, or puts it in the place of what that holds, in the first micro-batch too. Returns its stand-in."""
    announce(param)
    target = buffer(param, op)
    if is_first or getattr(param, "overwrite_main_grad", False):
        target.copy_(gradient)
    else:
        target.add_(gradient)
    return stand_in(param)


def stand_in(param: Any) -> torch.Tensor | None:
    """What is given back in the place of a gradient that is in main_grad: nothing, or a gradient without meaning where the parameter's owner waits for one."""
    if not hasattr(param, "grad_added_to_main_grad"):
        return None
    make = torch.zeros if getattr(param, "zero_out_wgrad", False) else torch.empty
    return make(param.shape, dtype=param.dtype, device=param.device)


def buffers(places: Sequence[tuple[torch.nn.Module, str]]) -> list[torch.Tensor]:
    """For a call through the dispatcher, which is given them with the other tensors."""
    params = [getattr(module, name) for module, name in places]
    if not is_dynamo_compiling():
        for param in params:
            announce(param)
    return [buffer(param) for param in params]
