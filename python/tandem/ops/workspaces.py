"""Workspaces for the codes of weights that compiled code is given, as tensors of its graph which it writes.

Eager pipelines keep theirs in the library. Dynamo reads these as attributes of an object, whose names say which weights are quantized how: equal
pipelines have equal names, and what one of them has traced, all of them have before their first call.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tandem import _C

Specs = tuple[tuple[int, str, tuple[bool, bool, bool]], ...]  # by weight: place among the parameters, quantizer, wanted parts

_names: dict[Specs, str] = {}
_known: dict[str, dict[Specs, None]] = {}  # by description: what has been traced
_watching: dict[str, weakref.WeakSet[Any]] = {}  # by description: pipelines that have been asked for their workspaces


class Held:
    """Lists of tensors as attributes, by `name`, and in `_likes` of what weights they are."""

    def __init__(self) -> None:
        self._likes: dict[str, list[Any]] = {}


def plain(params: Sequence[torch.Tensor | None]) -> list[torch.Tensor] | None:
    """The parameters where each lies in memory as it is."""
    found = [param for param in params if type(param) in (torch.nn.Parameter, torch.Tensor) and not param.is_meta]
    return found if len(found) == len(params) else None


def watch(described: str, pipeline: Any) -> None:
    """Asks the pipeline again for its workspaces once others are known."""
    _watching.setdefault(described, weakref.WeakSet()).add(pipeline)


def known(described: str) -> tuple[Specs, ...]:
    """What has been traced of pipelines of this description."""
    return tuple(_known.get(described, ()))


def note(described: str, specs: Specs) -> None:
    """Remembers what has been traced."""
    traced = _known.setdefault(described, {})
    if specs not in traced:
        traced[specs] = None
        for pipeline in list(_watching.get(described, ())):
            pipeline.__dict__["workspaces_token"] = None


def fit(held: Held, specs: Specs, params: Sequence[torch.Tensor]) -> str:
    """The name of workspaces that fit the weights; made where there are none yet."""
    name = _names.setdefault(specs, f"of_{len(_names)}")
    likes = [(params[at].shape, params[at].dtype, params[at].device) for at, _, _ in specs]
    if held._likes.get(name) != likes:
        with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            tensors = [tensor for at, quantizer, parts in specs for tensor in _C.make_workspace(params[at], quantizer, parts)]
        held.__dict__[name] = tensors
        held._likes[name] = likes
    return name


def stamps(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Which of them are stamps: no other part of a workspace has their dtype."""
    return tuple([at for at, tensor in enumerate(tensors) if tensor.dtype == torch.int64])


__all__ = ["Held", "Specs", "fit", "known", "note", "plain", "stamps", "watch"]
