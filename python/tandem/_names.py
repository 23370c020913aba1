"""TransformerEngine's older name of `autocast`, and its questions about the machine."""

from __future__ import annotations

import torch

from tandem._autocast import autocast
from tandem.recipe import Recipe


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: torch.distributed.ProcessGroup | None = None,
    _graph: bool = False,
) -> autocast:
    """`autocast` under its older name.

    Args:
        enabled, calibrating: as of `autocast`.
        fp8_recipe, fp8_group: its `recipe` and `amax_reduction_group`.
        _graph: of no meaning.
    """
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)


def _always(return_reason: bool) -> bool | tuple[bool, str]:
    return (True, "") if return_reason else True


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether recipes of FP8 work on this machine: they do on every one, exactly as specified, emulated where its instructions lack them.

    Args:
        return_reason: whether to return a pair, the answer and why it is no.
    """
    return _always(return_reason)


def is_fp8_block_scaling_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """The same of `Float8BlockScaling`.

    Args:
        return_reason: as of `is_fp8_available`.
    """
    return _always(return_reason)


def is_mxfp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """The same of `MXFP8BlockScaling`.

    Args:
        return_reason: as of `is_fp8_available`.
    """
    return _always(return_reason)


def is_nvfp4_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """The same of `NVFP4BlockScaling`.

    Args:
        return_reason: as of `is_fp8_available`.
    """
    return _always(return_reason)
