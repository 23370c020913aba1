"""Reading state dicts that TransformerEngine wrote."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any


@cache
def _warn_once() -> None:
    warnings.warn(
        "tandem: expected no quantization state in the state dict, got a non-empty _extra_state of TransformerEngine. It is ignored, as "
        "it is a pickle; current scaling needs none.",
        stacklevel=2,
    )


def warn_about_extra_state(key: str) -> None:
    """Warns, once per process, that the state under `key` is ignored."""
    del key
    _warn_once()


def rename(state_dict: dict[str, Any], prefix: str, names: dict[str, str]) -> None:
    """Moves entries under TransformerEngine's names to ours, where ours is absent."""
    for theirs, ours in names.items():
        if prefix + theirs in state_dict and prefix + ours not in state_dict:
            state_dict[prefix + ours] = state_dict.pop(prefix + theirs)
