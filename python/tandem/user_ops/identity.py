"""Identities, by which compiled code knows an op in Python: its object, or what its class declares."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from tandem.op_base.base import BasicOpBase
from tandem.op_base.hooks import OF_A_MODULE
from tandem.op_base.places import names, views_stand_in
from tandem.user_ops.plain import DEEPEST, State, tell, tell_plain

_NO_ATTRIBUTES = frozenset(vars(torch.nn.Module())) | frozenset(BasicOpBase._VOLATILE) | {  # names that are not a user's attributes
    "_compiled_call_impl",
    "_deferred",
    "_device",
    "_extra_input_channels",
    "_extra_output_channels",
    "_extra_output_to_caller",
    "_extra_tensor_channels_locked",
    "_is_torch_compile",
    "_made",
    "_quantized_init",
    "_runs",
    "_token",
}
_CONTAINERS: dict[type, Callable[[Any], Any]] = {
    collections.deque: lambda held: [held.maxlen, *held],
    collections.OrderedDict: dict,
    collections.defaultdict: lambda held: [held.default_factory, dict(held)],
    collections.Counter: dict,
}


class _Object:
    """A value that is compared by identity. Its number belongs to no other object, ever, because identities keep these alive."""

    __slots__ = ("__weakref__", "number", "value")

    def __init__(self, value: Any) -> None:
        self.value, self.number = value, next(_numbers)


_numbers = itertools.count(1)
_objects: weakref.WeakValueDictionary[int, _Object] = weakref.WeakValueDictionary()  # id -> object
_classes: weakref.WeakKeyDictionary[type, int] = weakref.WeakKeyDictionary()  # class -> number, which outlives the ops of the class


class _Identity(NamedTuple):
    state: State  # the op's state as JSON when `text` was computed
    text: str
    objects: list[_Object]


def identity(op: BasicOpBase) -> str:
    """The text by which compiled code knows an op in this process. If the op's class declares `fuser_options`, it depends on the class and the values
    of these attributes, otherwise on the op's object and all its attributes. In both cases it also depends on the names of the operands,
    `training`, and the modules inside the op with their attributes and hooks."""
    state, objects = _tell(op)
    last: _Identity | None = op.__dict__.get("_identity")
    if last is None or last.state != state:
        last = op.__dict__["_identity"] = _Identity(state, hashlib.sha256(json.dumps(state).encode()).hexdigest(), objects)
    return last.text


@contextlib.contextmanager
def own_code(ops: Iterable[BasicOpBase]) -> Iterator[None]:
    """Keeps identities while the ops' own code is traced. Without this, an attribute that this code changes would cause a new trace at each call."""
    known: list[tuple[BasicOpBase, _Identity]] = [(op, op.__dict__["_identity"]) for op in ops if "_identity" in op.__dict__]
    known = [(op, before) for op, before in known if _tell(op)[0] == before.state]
    try:
        yield
    finally:
        for op, before in known:
            state, objects = _tell(op)
            op.__dict__["_identity"] = _Identity(state, before.text, objects)


def check_declared(op: BasicOpBase) -> None:
    """Raises TypeError or ValueError if `fuser_options` of the op's class does not suffice to tell whether two ops are equal."""
    declared = vars(type(op)).get("fuser_options") or ()
    if not isinstance(declared, (tuple, list)):
        raise TypeError(f"{op._get_name()}: expected fuser_options to be a tuple of names, got {declared!r}. Write ({declared!r},) for one attribute.")
    for name in declared:
        if not hasattr(op, name):
            raise ValueError(f"{op._get_name()}: expected an attribute for each name in fuser_options, got none for {name!r}. Set it in __init__.")
        if tell_plain(value := getattr(op, name)) is None:
            raise TypeError(
                f"{op._get_name()}: expected plain values (numbers, texts, None, lists of them) in the attributes that fuser_options names, got {name} "
                f"of type {type(value).__name__}. Name the values that it is made of, or declare no fuser_options, so that each op is compiled by itself."
            )


def _tell(op: BasicOpBase) -> tuple[State, list[_Object]]:
    """The state of an op as JSON, and the objects that an identity must keep alive."""
    objects: list[_Object] = []

    def other(value: Any, depth: int) -> State:
        kind = type(value)
        if depth < DEEPEST and kind in _CONTAINERS:
            return [kind.__name__, tell(_CONTAINERS[kind](value), other, depth + 1)]
        if depth < DEEPEST and dataclasses.is_dataclass(kind):
            held = dict.fromkeys((*[field.name for field in dataclasses.fields(kind)], *getattr(value, "__dict__", ())))  # a subclass may hold more
            return [_number_of(kind), [[name, tell(getattr(value, name, None), other, depth + 1)] for name in held]]
        known = _objects.get(id(value)) or _objects.setdefault(id(value), _Object(value))
        objects.append(known)
        return known.number

    def attributes(module: torch.nn.Module) -> State:
        operands: Any = torch.Tensor if views_stand_in(module) else ()
        # The items are copied first, because other threads may call the module meanwhile.
        return [[name, tell(value, other)] for name, value in [*vars(module).items()] if name not in _NO_ATTRIBUTES and not isinstance(value, operands)]

    def inner(module: torch.nn.Module) -> State:
        children = [[name, inside.get(id(child))] for name, child in module._modules.items()]
        hooks = [[tell(hook, other) for hook in vars(module)[field].values()] for field in OF_A_MODULE]
        return [_number_of(type(module)), module.training, children, hooks, attributes(module)]

    declared = _declared(op)
    state = [op.instance_id, attributes(op)] if declared is None else [_number_of(type(op)), [[name, tell(getattr(op, name, None), other)] for name in declared]]
    state += [op.training, names(op, "_parameters"), names(op, "_buffers")]
    if op._modules:
        inside = {id(module): place for place, module in enumerate(op.modules())}
        state += [[name, inside.get(id(child))] for name, child in op._modules.items()]
        state += [inner(module) for module in op.modules() if module is not op]
    return state, objects


def _declared(op: BasicOpBase) -> list[str] | None:
    """The attributes that the op's own class declares, and those that are options of the library; None if the class declares none. A declaration
    of a base class does not count, because a subclass may have code that reads further attributes."""
    own = vars(type(op))
    declared = own.get("fuser_options", () if own.get("_kind") else None)
    return None if declared is None else [*declared, *op._option_names, *op._watched_names]


def _number_of(cls: type) -> int:
    return _classes.get(cls) or _classes.setdefault(cls, next(_numbers))
