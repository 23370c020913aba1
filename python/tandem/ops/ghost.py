"""What stands in for an op that is gone when its backward runs."""

from __future__ import annotations

from typing import Any

import torch

from tandem.ops.places import views_stand_in
from tandem.ops.unit import BasicUnit


def ghost_of(op: BasicUnit) -> BasicUnit:
    """A copy that shares everything with an op but its parameters: what runs backward where the op itself is gone.

    Modules inside the op are copied too: those of the op may live on elsewhere, and what stands in for a parameter must not show there.
    """
    return _without_parameters(op, {})


def _without_parameters(module: Any, copies: dict[int, Any]) -> Any:
    if module is None or isinstance(module, torch.jit.ScriptModule):  # of which no copy can be made this way
        return module
    if id(module) in copies:
        return copies[id(module)]
    ghost = copies[id(module)] = object.__new__(type(module))
    fields = ghost.__dict__
    fields.update(module.__dict__)
    for name in ("_owner", *getattr(module, "_VOLATILE", ())):  # which lead back to the module
        fields.pop(name, None)
    if views_stand_in(module):
        fields.update({name: None for name, value in fields.items() if isinstance(value, torch.Tensor)})
    fields["_parameters"] = dict.fromkeys([*module._parameters, *getattr(module._parameters, "names", ())])  # a part lists none
    fields["_buffers"] = dict(module._buffers)
    fields["_modules"] = {name: _without_parameters(child, copies) for name, child in module._modules.items()}
    return ghost
