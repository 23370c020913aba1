"""Reading state dicts that TransformerEngine wrote."""

from __future__ import annotations

import warnings
from typing import Any

import torch

_has_warned = False


def drop_extra_state(state_dict: dict[str, Any], key: str) -> None:
    """Removes TransformerEngine's quantization state from a state dict, with a warning once per process. It is never read, because it would have to
    be unpickled."""
    global _has_warned
    state = state_dict.pop(key, None)
    is_empty = state is None or isinstance(state, torch.Tensor) and state.numel() == 0
    if is_empty or _has_warned:
        return
    _has_warned = True
    warnings.warn(
        f"tandem: expected no quantization state in the state dict, got a non-empty {key} of TransformerEngine. It is ignored, as it is a "
        "pickle: delayed scaling begins with an empty history, other recipes need none.",
        stacklevel=2,
    )


def rename(state_dict: dict[str, Any], prefix: str, names: dict[str, str]) -> None:
    """Renames entries of the state dict from TransformerEngine's names to ours, unless our name is present too."""
    for theirs, ours in names.items():
        if prefix + theirs in state_dict and prefix + ours not in state_dict:
            state_dict[prefix + ours] = state_dict.pop(prefix + theirs)
