"""`tandem.explain` and `tandem.verify`."""

from __future__ import annotations

import sys
from typing import Any

import torch

from tandem.ops import Sequential
from tandem.ops.reporting import Verification, explained, verified


def explain(module: torch.nn.Module, format: str = "text", profile: Any = None) -> str:
    """What was planned for a container, an op, a module or a whole model, and why; see `tandem.ops.Sequential.explain`. Of what is no container all
    pipelines are told that its calls have made, under the names of the modules that they are of. Of a model that the backend of `torch.compile` runs, lines
    of its source beside the pipelines that they became, and what was left, with the reason.

    Args:
        module: what it is, after a call.
        format: "text", "svg", "html", "dot" or "json".
        profile: a torch.profiler.profile of calls, or microseconds by name of a step.
    """
    _check("explain", module)
    if isinstance(module, Sequential):
        return module.explain(format, profile)
    backend = sys.modules.get("tandem.backend.report")
    return (backend.told(module, format) if backend is not None else "") or explained(module, format, profile)


def verify(module: torch.nn.Module, x: torch.Tensor, *extra_inputs: torch.Tensor, masks: int = 8) -> Verification:
    """Compares fused with unfused; see `tandem.ops.Sequential.verify`. Of `MultiheadAttention` and `TransformerLayer` the pipelines before and behind
    the attention.

    Args:
        module: the container, op or module of this library.
        x: its input.
        extra_inputs: its extra inputs.
        masks: random subsets of the gradients that are compared, besides all of them.
    """
    _check("verify", module)
    return verified(module, x, extra_inputs, masks)


def _check(function: str, module: torch.nn.Module) -> None:
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"{function}: expected a container, an op or a module, got {type(module).__name__}. Pass what is called.")
