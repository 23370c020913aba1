"""How a description names an op that is written in Python, and how the runtime finds the op again."""

from __future__ import annotations

import contextlib
import json
import uuid
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tandem import _C
from tandem.ops.fingerprint import Fingerprint, tell_plain

if TYPE_CHECKING:
    from tandem.ops.op import BasicOperation

PROCESS = uuid.uuid4().hex  # in what must not be found in a cache of another process

_Kwargs = Mapping[str, Any]
_live: dict[str, tuple[list[weakref.ref[BasicOperation]], _Kwargs, str | None]] = {}  # with the fingerprint in the key, None where there is none
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


def entry(op: BasicOperation, params: int, buffers: int, kwargs: _Kwargs, *, traced: bool) -> dict[str, Any]:
    """The op in a description. Traced, ops with equal code and options have one key, so that compiled code is found again. Its operands
    are the extra inputs, then parameters, then buffers: all tensors that a compiled call must be given."""
    place = f"{type(op).__module__}:{type(op).__qualname__}"
    name = f"python:{place}:{op.num_extra_inputs}x{params}x{op.num_extra_outputs}x{buffers}"
    _C.register_python_op(name, op.num_extra_inputs, params, op.num_extra_outputs, buffers)
    code = fingerprint(op) if traced else None
    key = f"{place}#{code}" if traced else op.instance_id
    if kwargs:
        key += kwargs_key({0: kwargs}) or ""
    references = _live.setdefault(key, ([], dict(kwargs), code))[0]
    if not any(reference() is op for reference in references):
        references[:] = [reference for reference in references if reference() is not None]
        references.append(weakref.ref(op))
    return {"op": name, "label": type(op).__name__, "options": {"key": key}}


def live_op(key: str) -> tuple[BasicOperation | None, _Kwargs]:
    """An op that is what a key says, and the arguments that the key stands for. One that is alive may have changed since it got the key."""
    references, kwargs, code = _live.get(key, ([], {}, None))
    for reference in references:
        op = reference()
        if op is not None and (code is None or code == fingerprint(op)):
            return op, kwargs
    return None, kwargs


def kwargs_key(kwargs: Mapping[int, _Kwargs] | None) -> str | None:
    """Arguments of a call as a text. Raises TypeError where one is no plain value."""
    if not kwargs:
        return None
    for op_kwargs in kwargs.values():
        for name, value in op_kwargs.items():
            if tell_plain(value) is None:
                raise TypeError(
                    f"op_kwargs: expected plain values (numbers, texts, None, lists of them), got {name} of type {type(value).__name__}. "
                    "Pass tensors as extra inputs."
                )
    return json.dumps({str(i): {n: tell_plain(v) for n, v in given.items()} for i, given in kwargs.items()}, sort_keys=True)


def fingerprint(op: BasicOperation) -> str:
    """Changes with whatever the op's code depends on; no other op has it where that cannot be told. See `tandem.ops.fingerprint`."""
    taken = op.__dict__.get("_fingerprint")
    if taken is None or not taken.holds():
        taken = op.__dict__["_fingerprint"] = Fingerprint(op, f"{PROCESS}.{op.instance_id}", taken)
    return taken.text


@contextlib.contextmanager
def own_code(ops: Iterable[BasicOperation]) -> Iterator[None]:
    """While the ops' own code runs: what it changes is no change of the ops."""
    taken = [fingerprint for op in ops if (fingerprint := op.__dict__.get("_fingerprint")) is not None and fingerprint.holds()]
    try:
        yield
    finally:
        for fingerprint in taken:
            fingerprint.absorb()
