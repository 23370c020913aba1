"""The names of ops in Python in a description, by which the runtime finds the ops."""

from __future__ import annotations

import itertools
import json
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tandem.op_base.base import BasicOpBase
from tandem.user_ops.identity import check_declared, identity
from tandem.user_ops.plain import tell_plain

_Kwargs = Mapping[str, Any]


class _Key:
    """What a key refers to: ops and arguments of a call. The ops that have the key hold this object."""

    __slots__ = ("__weakref__", "code", "kwargs", "ops")

    def __init__(self, kwargs: _Kwargs, code: str | None) -> None:
        self.kwargs = kwargs
        self.code = code  # the identity that the key contains if compiled code shares it
        self.ops: tuple[weakref.ref[BasicOpBase], ...] = ()  # newest first


_MOST_KEYS = 64  # limit on the keys of one op: keys of compiled code change with its attributes, and hold the arguments of a call
_live: weakref.WeakValueDictionary[str, _Key] = weakref.WeakValueDictionary()
_NONE = _Key({}, None)
instances: weakref.WeakValueDictionary[str, BasicOpBase] = weakref.WeakValueDictionary()  # the ops that descriptions name, by `instance_id`
_naming = threading.RLock()  # held while an op gets a key; reentrant, because another op may be freed meanwhile
_objects = itertools.count(1)


def entry(op: BasicOpBase, params: int, buffers: int, kwargs: _Kwargs, *, shared: bool) -> tuple[str, str, _Key]:
    """The name and key of an op in a description, and what the key refers to: it is valid while this object is held and the op lives. With `shared`, the
    key contains the op's identity, so that equal ops have one key; otherwise the key is the op's own. The op's operands are extra inputs, parameters and
    buffers, in this order: all tensors that a compiled call needs."""
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
        keys[key] = found  # moves the key to the end
        if len(keys) > _MOST_KEYS:  # the op's own key, without arguments, stays, because eager pipelines name it
            del keys[next(name for name, held in keys.items() if held.code is not None or held.kwargs)]
    return name, key, found


def _dtypes(op: BasicOpBase) -> str:
    """The declared dtypes of results, as the end of the op's name; empty without a declaration. Raises TypeError or ValueError for a wrong one."""
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


def live_op(key: str) -> tuple[BasicOpBase | None, _Kwargs]:
    """The op and the arguments that a key refers to. If several ops have the key, it is the one described last, because that is being traced.
    An op whose identity has changed since it got the key is skipped."""
    found = _live.get(key) or _NONE
    for reference in found.ops:
        op = reference()
        if op is not None and (found.code is None or identity(op) == found.code):
            return op, found.kwargs
    return None, found.kwargs


def is_shared(key: str) -> bool:
    """Whether the key is one of compiled code."""
    return (_live.get(key) or _NONE).code is not None


def has_objects(kwargs: Mapping[int, _Kwargs] | None) -> bool:
    """Whether an argument is an object of one call, such as a tensor or a function, rather than a plain value."""
    return any(tell_plain(value) is None for given in (kwargs or {}).values() for value in given.values())


def check_plain(kwargs: Mapping[int, _Kwargs] | None) -> None:
    """Raises TypeError for a tensor or a function: compiled code is found by its arguments, and a changed object cannot be recognized."""
    for given in (kwargs or {}).values():
        for name, value in given.items():
            if isinstance(value, torch.Tensor) or callable(value):
                raise TypeError(
                    f"op_kwargs: expected plain values (numbers, texts, None, lists of them) in compiled code, got {name} of type {type(value).__name__}. "
                    "Pass tensors as extra inputs, and functions as attributes of the op."
                )


def kwargs_key(kwargs: Mapping[int, _Kwargs] | None) -> str | None:
    """The arguments of a call as a text. Each object among them gets a new number, so that no two calls share the text."""
    if not kwargs:
        return None

    def written(value: Any) -> Any:
        plain = tell_plain(value)
        return ["object", next(_objects)] if plain is None else plain

    return json.dumps({str(i): {name: written(value) for name, value in given.items()} for i, given in kwargs.items()}, sort_keys=True)


def let_go(ops: Iterable[BasicOpBase], keys: Iterable[Any]) -> None:
    """Forgets keys of a call that has returned, because the caller owns the objects in their arguments."""
    gone = [id(key) for key in keys if has_objects({0: key.kwargs})]
    for op in ops if gone else ():
        own = op.__dict__.get("_keys", {})
        with _naming:
            for name in [name for name, key in own.items() if id(key) in gone]:
                del own[name]
