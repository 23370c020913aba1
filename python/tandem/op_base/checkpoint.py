"""Reading state dicts that TransformerEngine wrote."""

from __future__ import annotations

import warnings
from typing import Any

_has_warned = False


def warn_about_extra_state(key: str) -> None:
    """Warns, once per process, that the state under `key` is ignored."""
    global _has_warned
    if _has_warned:
        return
    _has_warned = True
    warnings.warn(
        f"tandem: expected no quantization state in the state dict, got a non-empty {key} of TransformerEngine. It is ignored, as it is a "
        "pickle: delayed scaling begins with an empty history, other recipes need none.",
        stacklevel=3,
    )


def rename(state_dict: dict[str, Any], prefix: str, names: dict[str, str]) -> None:
    """Renames entries of the state dict from TransformerEngine's names to ours, unless our name is present too."""
    for theirs, ours in names.items():
        if prefix + theirs in state_dict and prefix + ours not in state_dict:
            state_dict[prefix + ours] = state_dict.pop(prefix + theirs)
