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

Spec = tuple[tuple[int, ...], str, tuple[bool, bool, bool]]  # of a weight: places among the parameters, quantizer, wanted parts
Specs = tuple[Spec, ...]

_names: dict[Specs, str] = {}
_known: dict[str, dict[Specs, None]] = {}  # by description: what has been traced
_watching: dict[str, weakref.WeakSet[Any]] = {}  # by description: pipelines that have been asked for their workspaces


class Held:
    """Lists of tensors as attributes, by `name`, and in `_likes` of what weights they are. `_made`: each workspace by itself."""

    def __init__(self) -> None:
        self._likes: dict[str, list[Any]] = {}
        self._made: dict[str, list[tuple[Spec, list[torch.Tensor]]]] = {}

    def make(self, spec: Spec, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """A fresh one, which knows why the weight has none."""
        places, quantizer, parts = spec
        used = [other for made in self._made.values() for other, tensors in made if other[0] == places and tensors[-1][0].item()]
        alike = [other[2] for other in used if other[1] == quantizer]
        has_other_parts = bool(alike) and parts not in alike
        has_other_quantizer = bool(used) and not alike
        return _C.make_workspace([params[at] for at in places], quantizer, parts, has_other_parts, has_other_quantizer)


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
    likes = [(params[at].shape, params[at].dtype, params[at].device) for places, _, _ in specs for at in places]
    if held._likes.get(name) != likes:
        with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            made = [(spec, held.make(spec, params)) for spec in specs]
        held.__dict__[name] = [tensor for _, tensors in made for tensor in tensors]
        held._made[name] = made
        held._likes[name] = likes
    return name


def stamps(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Which of them are stamps: no other part of a workspace has their dtype."""
    return tuple([at for at, tensor in enumerate(tensors) if tensor.dtype == torch.int64])
