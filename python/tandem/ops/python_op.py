"""How a description names an op that is written in Python, and how the runtime finds the op again."""

from __future__ import annotations

import itertools
import json
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tandem.ops.identity import check_declared, identity
from tandem.ops.plain import tell_plain
from tandem.ops.unit import BasicUnit

_Kwargs = Mapping[str, Any]


class _Key:
    """What a key stands for. The ops that have it hold it."""

    __slots__ = ("__weakref__", "code", "kwargs", "ops")

    def __init__(self, kwargs: _Kwargs, code: str | None) -> None:
        self.kwargs = kwargs
        self.code = code  # the identity in the key, if it is one of compiled code
        self.ops: tuple[weakref.ref[BasicUnit], ...] = ()  # newest first


_MOST_KEYS = 64  # of one op: those of compiled code change with its attributes, and hold the arguments of a call
_live: weakref.WeakValueDictionary[str, _Key] = weakref.WeakValueDictionary()
_NONE = _Key({}, None)
_instances: weakref.WeakValueDictionary[str, BasicUnit] = weakref.WeakValueDictionary()
_naming = threading.RLock()  # while an op gets a key; another may die meanwhile
_fusion_functions = 0  # how many are registered
_objects = itertools.count(1)


def any_fusions() -> bool:
    """Whether descriptions must name instances, since functions over op lists are registered."""
    return _fusion_functions != 0


def count_fusions(change: int) -> None:
    global _fusion_functions
    _fusion_functions += change


def register_instance(op: BasicUnit) -> None:
    _instances[op.instance_id] = op


def instance(instance_id: str) -> BasicUnit | None:
    return _instances.get(instance_id)


def entry(op: BasicUnit, params: int, buffers: int, kwargs: _Kwargs, *, shared: bool) -> tuple[str, str]:
    """The op in a description: its name and key. Shared, the key has the op's identity, so that equal ops have one; else it is this op's own.
    Its operands are the extra inputs, then parameters, then buffers: all tensors that a compiled call must be given."""
    place = f"{type(op).__module__}:{type(op).__qualname__}"
    name = f"python:{place}:{op.num_extra_inputs}x{params}x{op.num_extra_outputs}x{buffers}{_dtypes(op)}"
    if shared:
        check_declared(op)
    code = identity(op) if shared else None
    key = f"{place}#{code}" if shared else f"{op.instance_id}#"
    if kwargs:
        key += kwargs_key({0: kwargs}) or ""
    with _naming:
        found = _live.get(key) or _live.setdefault(key, _Key(dict(kwargs), code))
        others = [reference for reference in found.ops if (known := reference()) is not None and known is not op]
        found.ops = (weakref.ref(op), *others)
        keys = op.__dict__.setdefault("_keys", {})
        keys.pop(key, None)
        keys[key] = found  # the last one
        if len(keys) > _MOST_KEYS:  # the op's own one, which has no arguments, stays: eager pipelines name it
            del keys[next(name for name, held in keys.items() if held.code is not None or held.kwargs)]
    return name, key


def _dtypes(op: BasicUnit) -> str:
    """Those of results that the op declares, as the end of its name."""
    if not isinstance(op.extra_output_dtypes, (tuple, list)):
        raise TypeError(
            f"{op._get_name()}: expected extra_output_dtypes to be a tuple or a list, got {type(op.extra_output_dtypes).__name__}. Leave it out where "
            "extra outputs have the dtype to which the op's tensors promote."
        )
    declared = [op.output_dtype, *op.extra_output_dtypes]
    for dtype in declared:
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(
                f"{op._get_name()}: expected output_dtype and extra_output_dtypes to be torch dtypes or None, got {type(dtype).__name__}. Leave them out "
                "where results have the dtype to which the op's tensors promote."
            )
    if len(declared) > 1 + op.num_extra_outputs:
        raise ValueError(
            f"{op._get_name()}: expected extra_output_dtypes with at most {op.num_extra_outputs} entries, one for each extra output, got {len(declared) - 1}. "
            "That of the output is output_dtype."
        )
    if all(dtype is None for dtype in declared):
        return ""
    return ">" + ",".join("-" if dtype is None else str(dtype).removeprefix("torch.") for dtype in declared)


def held(key: str) -> _Key | None:
    """What a key in a description stands for: it stays while this is held and the op lives."""
    return _live.get(key)


def live_op(key: str) -> tuple[BasicUnit | None, _Kwargs]:
    """The op that a key stands for, and the arguments. Of several, the one that was described last: that is the one which is being traced.
    One that is alive may have changed since it got the key."""
    found = _live.get(key) or _NONE
    for reference in found.ops:
        op = reference()
        if op is not None and (found.code is None or identity(op) == found.code):
            return op, found.kwargs
    return None, found.kwargs


def is_shared(key: str) -> bool:
    """Whether a key is one of compiled code."""
    return (_live.get(key) or _NONE).code is not None


def has_objects(kwargs: Mapping[int, _Kwargs] | None) -> bool:
    """Whether an argument is no plain value: a tensor, a function, which belong to one call."""
    return any(tell_plain(value) is None for given in (kwargs or {}).values() for value in given.values())


def check_plain(kwargs: Mapping[int, _Kwargs] | None) -> None:
    """Raises TypeError where an argument is an object: compiled code is found by its arguments, and objects cannot be told from what they were before."""
    for given in (kwargs or {}).values():
        for name, value in given.items():
            if isinstance(value, torch.Tensor) or callable(value):
                raise TypeError(
                    f"op_kwargs: expected plain values (numbers, texts, None, lists of them) in compiled code, got {name} of type {type(value).__name__}. "
                    "Pass tensors as extra inputs, and functions as attributes of the op."
                )


def kwargs_key(kwargs: Mapping[int, _Kwargs] | None) -> str | None:
    """Arguments of a call as a text; objects among them get a number, so that no other call has it."""
    if not kwargs:
        return None

    def told(value: Any) -> Any:
        plain = tell_plain(value)
        return ["object", next(_objects)] if plain is None else plain

    return json.dumps({str(i): {name: told(value) for name, value in given.items()} for i, given in kwargs.items()}, sort_keys=True)


def let_go(ops: Iterable[BasicUnit], keys: Iterable[Any]) -> None:
    """Forgets keys of a call that is over: the objects in their arguments are the caller's."""
    gone = [id(key) for key in keys if has_objects({0: key.kwargs})]
    for op in ops if gone else ():
        own = op.__dict__.get("_keys", {})
        with _naming:
            for name in [name for name, key in own.items() if id(key) in gone]:
                del own[name]
