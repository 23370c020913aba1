"""How a description names an op that is written in Python, and how the runtime finds the op again."""

from __future__ import annotations

import hashlib
import inspect
import json
import uuid
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from tandem import _C

if TYPE_CHECKING:
    from tandem.ops.op import BasicOperation

PROCESS = uuid.uuid4().hex  # in what must not be found in a cache of another process

_Kwargs = Mapping[str, Any]
_live: dict[str, tuple[list[weakref.ref[BasicOperation]], _Kwargs]] = {}
_instances: weakref.WeakValueDictionary[str, BasicOperation] = weakref.WeakValueDictionary()
_fusion_functions = 0  # how many are registered


def any_fusions() -> bool:
    """Whether descriptions must name instances, since functions over op lists are registered."""
    return _fusion_functions != 0


def count_fusions(change: int) -> None:
    global _fusion_functions
    _fusion_functions += change


def register_instance(op: BasicOperation) -> None:
    _instances[op.instance_id] = op


def instance(instance_id: str) -> BasicOperation | None:
    return _instances.get(instance_id)


def entry(op: BasicOperation, params: int, kwargs: _Kwargs, *, traced: bool) -> dict[str, Any]:
    """The op in a description. Traced, ops with equal source and options have one key, so that compiled code is found again."""
    place = f"{type(op).__module__}:{type(op).__qualname__}"
    name = f"python:{place}:{op.num_extra_inputs}x{params}x{op.num_extra_outputs}"
    _C.register_python_op(name, op.num_extra_inputs, params, op.num_extra_outputs)
    key = f"{place}#{fingerprint(op)}" if traced else op.instance_id
    if kwargs:
        key += kwargs_key({0: kwargs}) or ""
    references = _live.setdefault(key, ([], dict(kwargs)))[0]
    if not any(reference() is op for reference in references):
        references[:] = [reference for reference in references if reference() is not None]
        references.append(weakref.ref(op))
    options = {"key": key, "extra_inputs": op.num_extra_inputs, "params": params, "extra_outputs": op.num_extra_outputs}
    return {"op": name, "label": type(op).__name__, "options": options}


def live_op(key: str) -> tuple[BasicOperation | None, _Kwargs]:
    """The first op that is alive under a key, and the arguments that the key stands for."""
    references, kwargs = _live.get(key, ([], {}))
    for reference in references:
        op = reference()
        if op is not None:
            return op, kwargs
    return None, kwargs


def kwargs_key(kwargs: Mapping[int, _Kwargs] | None) -> str | None:
    """Arguments of a call as a text. Raises TypeError where one is no plain value."""
    if not kwargs:
        return None
    for op_kwargs in kwargs.values():
        for name, value in op_kwargs.items():
            if _plain(value) is None:
                raise TypeError(
                    f"op_kwargs: expected plain values (numbers, texts, None, lists of them), got {name} of type {type(value).__name__}. "
                    "Pass tensors as extra inputs."
                )
    return json.dumps({str(i): {n: _plain(v) for n, v in given.items()} for i, given in kwargs.items()}, sort_keys=True)


def fingerprint(op: BasicOperation) -> str:
    """Changes with the source of the op's classes and with its options; unique where either cannot be told."""
    options, source = _declared_options(op), _source(type(op))
    if options is None or source is None:
        return f"{PROCESS}.{op.instance_id}"
    return hashlib.sha256((source + json.dumps(options, sort_keys=True)).encode()).hexdigest()


def _source(cls: type) -> str | None:
    texts = []
    for base in cls.__mro__:
        if base is object or base.__module__.split(".")[0] in ("torch", "tandem"):
            continue
        try:
            texts.append(inspect.getsource(base))
        except (OSError, TypeError):
            return None
    return "\n".join(texts)


_MODULE_FIELDS = frozenset(vars(torch.nn.Module())) | {
    "_extra_input_channels",
    "_extra_output_channels",
    "_extra_output_to_caller",
    "_extra_tensor_channels_locked",
    "_alone",
    "_fused_ops",
    "_instance",
}


def _declared_options(op: BasicOperation) -> list[Any] | None:
    if op.fuser_options is not None:
        values = {name: getattr(op, name) for name in op.fuser_options}
    elif any(not type(child).__module__.startswith("torch.nn.") for child in op.children()):
        return None
    else:
        values = {name: value for name, value in vars(op).items() if name not in _MODULE_FIELDS}
    plain = {name: _plain(value) for name, value in values.items()}
    if any(value is None for value in plain.values()):
        return None
    children = [[name, repr(child)] for name, child in op.named_children()]
    return [plain, children, sorted(name for name, _ in op.named_buffers()), op.training]


def _plain(value: Any) -> list[Any] | None:
    """A value as JSON that tells it apart from others, or None where it is no plain value."""
    if value is None or isinstance(value, bool | int | str):
        return [type(value).__name__, value]
    if isinstance(value, float):
        return ["float", value.hex()]
    if isinstance(value, torch.dtype | torch.device):
        return [type(value).__name__, str(value)]
    if isinstance(value, tuple | list):
        items = [_plain(item) for item in value]
        return None if None in items else [type(value).__name__, items]
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        items = [[name, _plain(item)] for name, item in sorted(value.items())]
        return None if any(item is None for _, item in items) else ["dict", items]
    return None
