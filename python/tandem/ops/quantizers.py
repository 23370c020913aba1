"""The quantizers that a recipe has for an op, as objects, for code that asks ops for them as TransformerEngine's do."""

from __future__ import annotations

from typing import Any

import torch

from tandem import _C
from tandem._quantize import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)

_MODES = ("forward", "backward")
# By how the name of a format begins.
_KINDS: tuple[tuple[str, type[Quantizer]], ...] = (
    ("fp8_1x128", Float8BlockQuantizer),
    ("fp8_128x128", Float8BlockQuantizer),
    ("mxfp8", MXFP8Quantizer),
    ("nvfp4", NVFP4Quantizer),
    ("fp8", Float8CurrentScalingQuantizer),
    ("", Quantizer),
)
_DELAYED = {"forward": "fp8_e4m3:delayed", "backward": "fp8_e5m2:delayed"}  # of a state outside of the regions of its recipe


def check_mode(op: str, mode: str) -> None:
    if mode not in _MODES:
        raise ValueError(f'{op}: expected mode "forward" or "backward", got {mode!r}. Name the direction in which the tensor is quantized.')


def quantizer_of(op: Any, mode: str, index: int) -> Quantizer | None:
    """That of the recipe in force for the tensor `index` of a direction, None without one."""
    recipe = _C.in_force.recipe
    state = op._holder._modules.get("recipe_state")
    role = "grad_output" if mode == "backward" else ("input", "weight")[index % 2]
    if recipe != "null":
        text = _C.recipe_quantizer(recipe, role)
    elif state is not None:
        text = _DELAYED[mode]
    else:
        return None
    kind = Float8Quantizer if ":delayed" in text else next(kind for begin, kind in _KINDS if text.startswith(begin))
    made: Quantizer = kind.__new__(kind)
    made.text, made.rowwise, made.columnwise = text, True, True
    if isinstance(made, Float8Quantizer):
        slot = op._first_slots()[_MODES.index(mode)] + index
        held = None if state is None else state._modules[mode]
        made.scale = torch.ones(1) if held is None else held.scale[slot : slot + 1]
        made.amax = torch.zeros(1) if held is None else held.amax_history[0, slot : slot + 1]
    return made


__all__ = ["check_mode", "quantizer_of"]
