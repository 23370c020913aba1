"""The modules that hold the tensors of an op: the op itself, and modules inside an op in Python."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tandem.op_base.base import BasicOpBase

Place = tuple[torch.nn.Module, str]  # a module, and the name of one of its tensors
Names = list[list[tuple[str, str]]]  # for each tensor its names: path of the module inside the op, and name in that module


def views_stand_in(module: torch.nn.Module) -> bool:
    """Whether FSDP1 has replaced the module's parameters by views, which are plain attributes."""
    return not getattr(module, "_fsdp_use_orig_params", True)


def names(op: BasicOpBase, field: str) -> Names:
    """The names of each tensor in `field` ("_parameters" or "_buffers"), in the order in which backward returns gradients."""
    if not op.is_python_op:
        return [[("", name)] for name in op._parameter_names] if field == "_parameters" else []
    found: dict[int, list[tuple[str, str]]] = {}
    for path, module in op.named_modules() if op._modules else (("", op),):
        tensors: dict[str, Any] = vars(module)[field]
        if field == "_parameters" and views_stand_in(module):
            tensors = {**tensors, **{name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}}
        for name, tensor in tensors.items():
            if tensor is not None:
                found.setdefault(id(tensor), []).append((path, name))
    return list(found.values())


def holding(op: BasicOpBase, path: str, name: str) -> Place:
    """The module that holds a tensor of `names`, and its name there. The owner of a part may have another name for it. Raises RuntimeError if the module
    was removed since."""
    if not path:
        return (op, name) if op.is_python_op else (op._holder, getattr(op._parameters, "names", {}).get(name, name))
    try:
        return op.get_submodule(path), name
    except AttributeError as error:
        raise RuntimeError(
            f"{op._get_name()}: expected the modules that it had in forward, got an op without {path}. Remove it after backward."
        ) from error


def places(op: BasicOpBase, field: str) -> Iterator[Place]:
    """The module and name of each tensor of `names`; the first of them if a tensor has several."""
    for (path, name), *_ in names(op, field):
        yield holding(op, path, name)
