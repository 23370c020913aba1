"""Workspaces for codes of weights in compiled code: tensors of its graph, which it writes.

The library owns the workspaces of eager pipelines. Dynamo reads these as attributes of an object, and an attribute's name stands for the weights and their
quantizers. Pipelines with equal descriptions have equal names, so each has, before its first call, the workspaces that a trace of another needs.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tandem import _C

Spec = tuple[tuple[int, ...], str, tuple[bool, bool, bool]]  # for a weight: positions among the parameters, quantizer, wanted parts
Specs = tuple[Spec, ...]

_names: dict[Specs, str] = {}
_known: dict[str, dict[Specs, None]] = {}  # description -> what was traced
_watching: dict[str, weakref.WeakSet[Any]] = {}  # description -> pipelines that have read their workspaces


class Held:
    """Lists of tensors as attributes. `_likes` holds shapes, dtypes and devices of their weights by name, `_made` each workspace by itself."""

    def __init__(self) -> None:
        self._likes: dict[str, list[Any]] = {}
        self._made: dict[str, list[tuple[Spec, list[torch.Tensor]]]] = {}

    def make(self, spec: Spec, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """A new workspace, which records why the weight has no fitting one."""
        places, quantizer, parts = spec
        used = [other for made in self._made.values() for other, tensors in made if other[0] == places and tensors[-1][0].item()]
        alike = [other[2] for other in used if other[1] == quantizer]
        has_other_parts = bool(alike) and parts not in alike
        has_other_quantizer = bool(used) and not alike
        return _C.make_workspace([params[at] for at in places], quantizer, parts, has_other_parts, has_other_quantizer)


def plain(params: Sequence[torch.Tensor | None]) -> list[torch.Tensor] | None:
    """The parameters, if all are dense tensors without a subclass; None otherwise."""
    found = [param for param in params if type(param) in (torch.nn.Parameter, torch.Tensor) and not param.is_meta]
    return found if len(found) == len(params) else None


def watch(described: str, pipeline: Any) -> None:
    """Makes the pipeline look for workspaces anew when another need becomes known for its description."""
    _watching.setdefault(described, weakref.WeakSet()).add(pipeline)


def known(described: str) -> tuple[Specs, ...]:
    """The workspaces that traces of pipelines with this description have needed."""
    return tuple(_known.get(described, ()))


def note(described: str, specs: Specs) -> None:
    """Records the workspaces that a trace needs."""
    traced = _known.setdefault(described, {})
    if specs not in traced:
        traced[specs] = None
        for pipeline in list(_watching.get(described, ())):
            pipeline.__dict__["workspaces_token"] = None


def fit(held: Held, specs: Specs, params: Sequence[torch.Tensor]) -> str:
    """The name of workspaces that fit the weights. It creates them if they are missing or belong to other weights."""
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
    """The positions of stamps, which alone have dtype int64."""
    return tuple([at for at, tensor in enumerate(tensors) if tensor.dtype == torch.int64])
