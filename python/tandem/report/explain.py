"""`tandem.explain` and `tandem.verify`, for containers, ops, modules and compiled models."""

from __future__ import annotations

import sys
from typing import Any

import torch

from tandem.ops import Sequential
from tandem.pipelines.reporting import Verification, explained, verified


def explain(module: torch.nn.Module, format: str = "text", profile: Any = None) -> str:
    """A report of the plans for a container, an op, a module or a model, with the reasons for fusions and refusals.

    For a container see `tandem.ops.Sequential.explain`. For any other module the report contains all pipelines that its calls have planned, under the
    names of their modules. For a model that the backend of `torch.compile` runs, the text shows lines of source beside their pipelines, the fusions
    that were made and refused, and what was left; "html" and "json" add the plan of each pipeline.

    Args:
        module: the container, op, module or model, which has been called.
        format: "text", "svg", "html", "dot" or "json".
        profile: a torch.profiler.profile of calls, or a dict of microseconds by name of a step; None: no times.
    """
    _check("explain", module)
    if isinstance(module, Sequential):
        return module.explain(format, profile)
    backend = sys.modules.get("tandem.backend.report")
    return (backend.rendered(module, format) if backend is not None else "") or explained(module, format, profile)


def verify(module: torch.nn.Module, x: torch.Tensor, *extra_inputs: torch.Tensor, masks: int = 8) -> Verification:
    """Compares results and gradients of fused and unfused pipelines; see `tandem.ops.Sequential.verify`. Attention between pipelines is not compared.

    Args:
        module: a container, op or module of this library.
        x: the main input of the module.
        extra_inputs: the extra inputs of the module.
        masks: number of random subsets of the gradients that are compared, in addition to the set of all gradients.
    """
    _check("verify", module)
    return verified(module, x, extra_inputs, masks)


def _check(function: str, module: torch.nn.Module) -> None:
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"{function}: expected a container, an op or a module, got {type(module).__name__}. Pass what is called.")
