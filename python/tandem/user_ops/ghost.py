"""Ghosts: copies that run backward after the op itself is gone."""

from __future__ import annotations

from typing import Any

import torch

from tandem.op_base.base import BasicOpBase
from tandem.op_base.places import views_stand_in


def ghost_of(op: BasicOpBase) -> BasicOpBase:
    """A copy that shares everything with an op except its parameters. It runs backward after the op is gone.

    Modules inside the op are copied too: they may be in use elsewhere, so the ghost must not write stand-ins of parameters into them.
    """
    return _without_parameters(op, {})


def _without_parameters(module: Any, copies: dict[int, Any]) -> Any:
    if module is None or isinstance(module, torch.jit.ScriptModule):  # a scripted module cannot be copied in this way
        return module
    if id(module) in copies:
        return copies[id(module)]
    ghost = copies[id(module)] = object.__new__(type(module))
    fields = ghost.__dict__
    fields.update(module.__dict__)
    for name in ("_owner", *getattr(module, "_VOLATILE", ())):  # these refer back to the module and would keep it alive
        fields.pop(name, None)
    if views_stand_in(module):
        fields.update({name: None for name, value in fields.items() if isinstance(value, torch.Tensor)})
    fields["_parameters"] = dict.fromkeys([*module._parameters, *getattr(module._parameters, "names", ())])  # iterating over a part's yields none
    fields["_buffers"] = dict(module._buffers)
    fields["_modules"] = {name: _without_parameters(child, copies) for name, child in module._modules.items()}
    return ghost
