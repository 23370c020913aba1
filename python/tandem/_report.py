"""`tandem.explain` and `tandem.verify`."""

from __future__ import annotations

from typing import Any

import torch

from tandem.ops import Sequential
from tandem.ops.reporting import Verification


def explain(pipeline: Sequential, format: str = "text", profile: Any = None) -> str:
    """What was planned for a container, and why; see `tandem.ops.Sequential.explain`.

    Args:
        pipeline: the container, after a call.
        format: "text", "svg", "html", "dot" or "json".
        profile: a torch.profiler.profile of calls, or microseconds by name of a step.
    """
    return _container("explain", pipeline).explain(format, profile)


def verify(pipeline: Sequential, x: torch.Tensor, *extra_inputs: torch.Tensor, masks: int = 8) -> Verification:
    """Compares fused with unfused; see `tandem.ops.Sequential.verify`.

    Args:
        pipeline: the container.
        x: its input.
        extra_inputs: its extra inputs.
        masks: random subsets of the gradients that are compared, besides all of them.
    """
    return _container("verify", pipeline).verify(x, *extra_inputs, masks=masks)


def _container(function: str, pipeline: Sequential) -> Sequential:
    if not isinstance(pipeline, Sequential):
        raise TypeError(f"{function}: expected a tandem.ops.Sequential, got {type(pipeline).__name__}. Put the ops into one.")
    return pipeline


__all__ = ["Verification", "explain", "verify"]
