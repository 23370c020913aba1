"""The quantizers of a recipe for an op, as objects, for code that gets them from ops as TransformerEngine's do."""

from __future__ import annotations

from typing import Any

import torch

from tandem import _C
from tandem.quantized.formats import Float8Quantizer
from tandem.quantized.quantizer import Quantizer, quantizer_of_text

_MODES = ("forward", "backward")
_DELAYED = {"forward": "fp8_e4m3:delayed", "backward": "fp8_e5m2:delayed"}  # for a state outside of regions


def check_mode(op: str, mode: str) -> None:
    if mode not in _MODES:
        raise ValueError(f'{op}: expected mode "forward" or "backward", got {mode!r}. Name the direction in which the tensor is quantized.')


def quantizer_of(op: Any, mode: str, index: int) -> Quantizer | None:
    """The quantizer of the recipe in force for the tensor `index` of a direction; None if the recipe has none for it, or no recipe is in force."""
    recipe = _C.in_force.recipe
    if recipe == "null":
        recipe = op._last_recipe() or recipe
    state = op._holder._modules.get("recipe_state")
    role = "grad_output" if mode == "backward" else ("input", "weight")[index % 2]
    if recipe != "null":
        text = _C.recipe_quantizer(recipe, role, op._kind)
    elif state is not None:
        text = _DELAYED[mode]
    else:
        return None
    if not text:
        return None
    made = quantizer_of_text(text)
    if isinstance(made, Float8Quantizer):
        slot = op._first_slots()[_MODES.index(mode)] + index
        held = None if state is None else state._modules[mode]
        made.scale = torch.ones(1) if held is None else held.scale[slot : slot + 1]
        made.amax = torch.zeros(1) if held is None else held.amax_history[0, slot : slot + 1]
    return made
