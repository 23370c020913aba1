"""Weights in codes that are trained by an optimizer of their master copies in plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tandem


def train_with_masters(layer: torch.nn.Module, target: torch.nn.Module, recipe: Any, optimize: Callable[..., Any], steps: int = 80) -> tuple[int, list[float]]:
    """Steps of `layer` towards `target`: how many weights have a master copy, and the mean square error of each step.

    Args:
        layer: 32 features to those of `target`, made inside `quantized_model_init(preserve_high_precision_init_val=True)`.
        target: what it is to compute.
        recipe: that of the autocast region.
        optimize: makes the optimizer of a list of parameters.
        steps: how many.
    """
    masters = {}
    for param in layer.parameters():
        if isinstance(param, tandem.QuantizedTensor):
            masters[param] = param.get_high_precision_init_val().clone().requires_grad_()
            param.clear_high_precision_init_val()
    optimizer = optimize([masters.get(param, param) for param in layer.parameters()])
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 32)
        with tandem.autocast(recipe=recipe):
            loss = (layer(x) - target(x)).square().mean()
        loss.backward()
        for param, master in masters.items():
            master.grad, param.grad = param.grad, None
        optimizer.step()
        optimizer.zero_grad()
        for param, master in masters.items():
            param.quantize_(master)
        losses.append(loss.item())
    return len(masters), losses
