"""What the code of an op that is written in Python depends on, as a text: equal texts may share compiled code.

Told are the classes of the op (code, defaults, closures, class attributes, bases, decorators), the globals that their functions read, the
op's own attributes, the modules inside it with their hooks, and what containers and objects among all these hold: of an object that a
class written in Python made, the attributes whose names occur in code. What can change is watched. Where a part of it is neither plain nor
made of such parts (a tensor, a lock, an object of C code), no other op shares the code; it is known by which object it is, so a change
inside it shows only in a tensor and in what exports its memory (arrays of up to 64 KiB).
"""

from __future__ import annotations

import argparse
import collections
import dis
import enum
import functools
import hashlib
import itertools
import json
import logging
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tandem.ops.op import BasicOperation

_LIBRARIES = frozenset(sys.stdlib_module_names) | {"torch", "tandem", "numpy", "typing_extensions"}
_LIBRARIES |= {"pytest", "_pytest"}  # which writes calls of its own into functions that assert
_SIMPLE = (type(None), bool, int, str)
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format, type(Ellipsis), type(NotImplemented))
_BUILTIN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.ClassMethodDescriptorType, types.WrapperDescriptorType) + (
    types.MethodWrapperType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
_NOT_OF_A_CLASS = frozenset(
    {"__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__annotations__", "__abstractmethods__", "_abc_impl"}
    | {"__firstlineno__", "__static_attributes__", "__slotnames__", "_styles", "_forward_prefix"}
)
_CONTAINERS = (list, tuple, set, frozenset, dict, collections.deque)
_OF_C = (object, types.SimpleNamespace, collections.OrderedDict, collections.defaultdict, *_CONTAINERS)  # all state is items and attributes
_HEAP_TYPE = 1 << 9
_READS_ALL = frozenset({"__dict__", "vars", "getattr", "dir", "asdict", "astuple", "replace", "copy", "deepcopy", "attrgetter"})
_NOT_READ = frozenset({"__init__", "__new__", "__init_subclass__", "__post_init__", "__setattr__", "__delattr__"}) | {
    "__dataclass_fields__",
    "__dataclass_params__",
}
_WITHOUT_CODE = (*_OF_C, argparse.Namespace, collections.Counter)  # none of their own code reads an attribute
_REDUCED = (operator.attrgetter, operator.itemgetter, operator.methodcaller, type(vars(collections.namedtuple("_Pair", "x"))["x"]))
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_BASES, _CODE, _FIELDS = map(operator.attrgetter, ("__bases__", "__code__", "__dict__"))
_DEFAULTS, _KEYWORD_DEFAULTS = map(operator.attrgetter, ("__defaults__", "__kwdefaults__"))
_MOST_BYTES = 1 << 16  # of an array that is compared
_DEEPEST = 32  # in a plain value
NOT_OPTIONS = frozenset(vars(torch.nn.Module())) | {
    "_extra_input_channels",
    "_extra_output_channels",
    "_extra_output_to_caller",
    "_extra_tensor_channels_locked",
    "_alone",
    "_alone_token",
    "_changes",
    "_compiled_call_impl",
    "_fingerprint",
    "_fused_ops",
    "_instance",
}
_MISSING = types.SimpleNamespace()
_Told = Any  # of what JSON holds
_serials = itertools.count()


class _Opaque(Exception):
    """Something is no plain value."""


def _library(thing: Any) -> bool:
    """Whether the name of a function or class leads to it, in a library that changes with its version only."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module.partition(".")[0] not in _LIBRARIES:
        return False
    found = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    if isinstance(found, property):
        return any(thing is method for method in (found.fget, found.fset, found.fdel))
    return found is thing or (isinstance(found, staticmethod | classmethod) and found.__func__ is thing)


def _made_in_python(cls: type) -> bool:
    if cls in _OF_C:
        return True
    own = vars(cls)
    has_fields = "__dict__" in own or "__slots__" in own or any(base.__dictoffset__ for base in cls.__bases__)
    return bool(cls.__flags__ & _HEAP_TYPE) and has_fields and all(map(_made_in_python, cls.__bases__))


def tell_plain(value: Any) -> _Told | None:
    """A number, a text, None, a dtype or device, a list, tuple or dict of them as JSON that tells it apart; None where it is none."""
    try:
        return _plain(value)
    except _Opaque:
        return None


def _plain(value: Any, depth: int = 0) -> _Told:
    kind = type(value)
    if kind in _SIMPLE:
        return [kind.__name__, value]
    if kind in (float, complex):
        return [kind.__name__, value.hex() if kind is float else [value.real.hex(), value.imag.hex()]]
    if isinstance(value, _NAMED):
        return [kind.__name__, str(value)]
    if kind in (bytes, bytearray):
        return [kind.__name__, value.hex()]
    if depth == _DEEPEST:
        raise _Opaque
    if kind in (tuple, list, torch.Size):
        return [kind.__name__, [_plain(item, depth + 1) for item in value]]
    if kind in (set, frozenset):
        return [kind.__name__, sorted((_plain(item, depth + 1) for item in value), key=json.dumps)]
    if kind in (dict, types.MappingProxyType):
        return ["dict", [[_plain(name, depth + 1), _plain(item, depth + 1)] for name, item in value.items()]]
    if isinstance(value, enum.Enum):
        return ["enum", kind.__module__, kind.__qualname__, value.name]
    raise _Opaque


def _is_fixed(plain: Any) -> bool:
    try:
        hash(plain)
    except TypeError:
        return False
    return True


def _memory(value: Any) -> _Told | None:
    """What an array holds, None for what is none, or too large."""
    try:
        view = memoryview(value)
        return None if view.nbytes > _MOST_BYTES or "O" in view.format else [view.format, view.shape, view.tobytes().hex()]
    except (TypeError, ValueError, BufferError):
        return None


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _constant(constant: Any) -> _Told:
    plain = tell_plain(constant)
    return repr(constant) if plain is None else plain


def _instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _instructions(constant)


@functools.cache
def _code(code: types.CodeType) -> tuple[_Told, tuple[str, ...], tuple[str, ...]]:
    """A code object told, the globals that it reads, all names that it uses."""

    def told(part: types.CodeType) -> _Told:
        constants = [told(c) if isinstance(c, types.CodeType) else _constant(c) for c in part.co_consts]
        fields = (part.co_argcount, part.co_posonlyargcount, part.co_kwonlyargcount, part.co_flags)
        names = [part.co_names, part.co_varnames, part.co_freevars, part.co_cellvars]
        return [part.co_code.hex(), constants, fields, names, getattr(part, "co_exceptiontable", b"").hex()]

    instructions = list(_instructions(code))
    reads = {i.argval for i in instructions if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    names = {name for i in instructions for name in (i.argval if isinstance(i.argval, tuple) else [i.argval]) if isinstance(name, str)}
    return told(code), tuple(sorted(reads)), tuple(sorted(names))


class _Place:
    """Names that were looked up in a dict: it holds while they lead to the same objects, and neither `absent` names nor any but `known`
    ones are there."""

    __slots__ = ("absent", "fields", "known", "names", "values")

    def __init__(
        self, fields: Mapping[str, Any], names: Iterable[str], *, known: Iterable[str] | None = None, absent: Iterable[str] = ()
    ) -> None:
        self.fields, self.names = fields, tuple(names)
        self.known = None if known is None else {*known, *self.names}
        self.absent = {name for name in absent if name not in fields}
        self.values = self._now()

    def _now(self) -> list[Any]:
        return list(map(self.fields.get, self.names, itertools.repeat(_MISSING)))

    def holds(self) -> bool:
        fields = self.fields
        if not all(map(operator.is_, map(fields.get, self.names, itertools.repeat(_MISSING)), self.values)):
            return False
        if self.known is not None:
            return fields.keys() <= self.known
        return not self.absent or fields.keys().isdisjoint(self.absent)

    def absorb(self) -> None:
        if self.known is not None:
            self.known |= self.fields.keys()
        appeared = self.absent & self.fields.keys()
        self.absent -= appeared
        self.names += tuple(sorted(appeared))
        self.values = self._now()


class _Same:
    """Holds while the same objects are there."""

    __slots__ = ("now", "values")

    def __init__(self, now: Callable[[], list[Any]]) -> None:
        self.now, self.values = now, now()

    def holds(self) -> bool:
        now = self.now()
        return len(now) == len(self.values) and all(map(operator.is_, now, self.values))

    def absorb(self) -> None:
        self.values = self.now()


class _Retold:
    """Holds while something says the same."""

    __slots__ = ("now", "told")

    def __init__(self, now: Callable[[], Any]) -> None:
        self.now, self.told = now, now()

    def holds(self) -> bool:
        return bool(self.now() == self.told)

    def absorb(self) -> None:
        self.told = self.now()


class _This:
    """An object, equal to itself alone."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _This) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class _Named:
    """A dict of which is told what code names, while more and more code is told."""

    def __init__(self, fields: Mapping[str, Any], number: int, *, is_class: bool) -> None:
        self.fields, self.number, self.is_class = fields, number, is_class
        self.told: set[str] = set()
        self.parts: list[_Told] = []

    def further(self, used: set[str], reads_all: bool) -> list[str]:
        found = set(self.fields) if reads_all and not self.is_class else used & self.fields.keys()
        if self.is_class:
            found |= {name for name in self.fields if name.startswith("__") and name.endswith("__")}
            found -= _NOT_OF_A_CLASS | _NOT_READ
        return sorted(found - self.told)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def _slot(value: Any, name: str) -> Any:
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return _MISSING


def _parts(
    objects: list[Any], classes: list[type], functions: list[types.FunctionType], cells: list[types.CellType]
) -> list[Any]:
    """What may change of objects, classes and functions besides what dicts hold; in one list, as there are many."""
    codes, defaults = map(_CODE, functions), map(_DEFAULTS, functions)
    counts = map(len, map(_FIELDS, functions))
    contents = [_content(cell) for cell in cells]
    return [*map(type, objects), *map(_BASES, classes), *codes, *defaults, *map(_KEYWORD_DEFAULTS, functions), *counts, *contents]


def _items(container: Any) -> list[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else [*container]


class Fingerprint:
    """`text` changes with whatever the code of `op` depends on. `holds` tells, cheaply, whether it would be the same if taken again."""

    def __init__(self, op: BasicOperation, private: str, previous: Fingerprint | None = None) -> None:
        self._watches: list[_Place | _Same | _Retold] = []
        self._numbers: dict[int, tuple[int, Any]] = {}  # of what may be met again, as functions and classes refer to each other
        self._serials: dict[int, tuple[int, Any]] = {}  # of what cannot be told
        self._named: dict[int, _Named] = {}
        self._used: set[str] = set()  # names in all code
        self._objects: list[Any] = []
        self._classes: list[type] = []
        self._functions: list[types.FunctionType] = []
        self._cells: list[types.CellType] = []
        self._globals: dict[int, tuple[dict[str, Any], set[str]]] = {}  # which all functions of a module share
        self._modules: set[tuple[int, tuple[str, ...]]] = set()
        self._known_serials = {} if previous is None else previous._serials
        self._inside = {id(module): number for number, module in enumerate(op.modules())}
        self._operands = {id(tensor) for tensor in itertools.chain(op.parameters(), op.buffers())}
        told = [sys.hexversion, torch.__version__, self._class(type(op)), self._options(op)]
        self._settle()
        self._watches += [_Place(fields, names) for fields, names in self._globals.values()]
        self._watches.append(_Same(functools.partial(_parts, self._objects, self._classes, self._functions, self._cells)))
        text = hashlib.sha256(json.dumps(told).encode()).hexdigest()
        self.text = f"{private}.{text}" if self._serials else text
        del self._numbers, self._named, self._used, self._globals, self._modules, self._known_serials, self._inside, self._operands

    def holds(self) -> bool:
        return all([watch.holds() for watch in self._watches])

    def absorb(self) -> None:
        """The op's own code has run: what it changed is its state, not another op."""
        for watch in self._watches:
            watch.absorb()

    def _fields(self, fields: Mapping[str, Any], names: Iterable[str], **bounds: Iterable[str]) -> list[_Told]:
        """What is in a dict under names, and from now on watched there."""
        place = _Place(fields, names, **bounds)
        self._watches.append(place)
        return [[name, self._tell(value)] for name, value in zip(place.names, place.values, strict=True) if value is not _MISSING]

    def _tell(self, value: Any, names: tuple[str, ...] = ()) -> _Told:
        plain = tell_plain(value)
        if plain is not None:
            if not _is_fixed(value):
                self._watches.append(_Retold(functools.partial(tell_plain, value)))
            return plain
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.ModuleType):
            return self._module(value, names)
        if isinstance(value, staticmethod | classmethod):
            return [type(value).__name__, self._tell(value.__func__)]
        if isinstance(value, property):
            return ["property", [self._tell(f) for f in (value.fget, value.fset, value.fdel)]]
        if isinstance(value, types.MethodType):
            return ["method", self._tell(value.__func__), self._tell(value.__self__)]
        if isinstance(value, functools.partial):
            return ["partial", self._tell(value.func), self._tell(value.args), self._tell(value.keywords)]
        if isinstance(value, _BUILTIN):
            owner = getattr(value, "__self__", None)
            of = None if isinstance(owner, type | types.ModuleType) or type(owner).__name__ == "PyCapsule" else self._tell(owner)
            return ["builtin", getattr(value, "__module__", None), value.__qualname__, of]
        if isinstance(value, logging.Logger):
            return ["logger", value.name]
        if isinstance(value, _REDUCED):
            arguments: Any = value.__reduce__()[1]
            self._used.update(name for argument in arguments if isinstance(argument, str) for name in argument.split("."))
            return [type(value).__qualname__, self._tell(arguments)]
        if id(value) in self._inside:
            return ["inside", self._inside[id(value)]]
        seen = self._number(value)
        if seen is not None:
            return seen
        if isinstance(value, torch.nn.Module):
            return self._hidden_module(value)
        if isinstance(value, torch.Tensor):
            if id(value) in self._operands:
                return self._opaque(value)
            self._watches.append(_Retold(functools.partial(_version, value)))
            return [self._opaque(value), _version(value)]
        memory = _memory(value)
        if memory is not None:
            self._watches.append(_Retold(functools.partial(_memory, value)))
            return ["memory", type(value).__qualname__, memory]
        return self._object(value)

    def _opaque(self, value: Any) -> _Told:
        """A number that no other object ever had."""
        known = self._known_serials.get(id(value)) or self._serials.get(id(value)) or (next(_serials), value)
        self._serials[id(value)] = known
        return ["opaque", known[0]]

    def _object(self, value: Any) -> _Told:
        """The items and attributes of anything."""
        cls = type(value)
        self._objects.append(value)
        parts: list[_Told] = [cls.__module__, cls.__qualname__]
        if cls is object or not _made_in_python(cls):  # which one it is matters
            parts.append(self._opaque(value))
        if isinstance(value, _CONTAINERS):
            self._watches.append(_Same(functools.partial(_items, value)))
            items = [self._tell(item) for item in _items(value)]
            parts.append(sorted(items, key=json.dumps) if isinstance(value, set | frozenset) else items)
            parts.append(self._tell(value.default_factory) if isinstance(value, collections.defaultdict) else None)
            parts.append(value.maxlen if isinstance(value, collections.deque) else None)
        fields = getattr(value, "__dict__", None)
        is_of_library = cls not in _WITHOUT_CODE and _library(cls)
        if isinstance(fields, dict) and is_of_library:  # whose code does not say what it reads
            parts.append(self._fields(fields, list(fields), known=()))
        elif isinstance(fields, dict):
            parts.append(self._name(fields, value))
        for base in cls.__mro__:
            if base.__flags__ & _HEAP_TYPE:
                slots = [name for name, slot in vars(base).items() if isinstance(slot, types.MemberDescriptorType)]
                parts.append(self._slots(value, slots) if slots else None)
                parts.append(None if _library(base) else self._name(vars(base), base))
        return ["object", *parts]

    def _slots(self, value: Any, names: list[str]) -> _Told:
        watch = _Same(lambda: [_slot(value, name) for name in names])
        self._watches.append(watch)
        return [[name, self._tell(slot)] for name, slot in zip(names, watch.values, strict=True) if slot is not _MISSING]

    def _name(self, fields: Mapping[str, Any], owner: Any) -> _Told:
        """What `_settle` will tell of an object or class."""
        if id(owner) in self._named:
            return ["named", self._named[id(owner)].number]
        named = self._named[id(owner)] = _Named(fields, len(self._named), is_class=isinstance(owner, type))
        return named.parts

    def _settle(self) -> None:
        """Tells of objects what code names, until that adds no more code."""
        while True:
            reads_all = not self._used.isdisjoint(_READS_ALL)
            further = [(named, names) for named in self._named.values() if (names := named.further(self._used, reads_all))]
            if not further:
                break
            for named, names in further:
                for name in names:
                    named.told.add(name)
                    named.parts.append([name, self._tell(named.fields[name])])
        for named in self._named.values():
            everything = reads_all and not named.is_class
            bounds: dict[str, Iterable[str]] = {"known": ()} if everything else {"absent": self._used - named.told}
            self._watches.append(_Place(named.fields, sorted(named.told), **bounds))

    def _number(self, thing: Any) -> _Told | None:
        if id(thing) in self._numbers:
            return ["seen", self._numbers[id(thing)][0]]
        self._numbers[id(thing)] = (len(self._numbers), thing)
        return None

    def _function(self, function: types.FunctionType) -> _Told:
        code = function.__code__
        if code.co_filename.startswith("<frozen") or _library(function):
            return ["function", function.__module__, function.__qualname__]
        seen = self._number(function)
        if seen is not None:
            return seen
        told, reads, names = _code(code)
        self._used.update(names)
        self._functions.append(function)
        self._cells += function.__closure__ or ()
        parts = [told, self._tell(function.__defaults__), self._tell(function.__kwdefaults__)]
        contents = map(_content, function.__closure__ or ())
        parts += [[name, None if v is _MISSING else self._tell(v, names)] for name, v in zip(code.co_freevars, contents, strict=True)]
        read = self._globals.setdefault(id(function.__globals__), (function.__globals__, set()))[1]
        read.update(reads)
        parts += [[name, self._tell(function.__globals__[name], names)] for name in reads if name in function.__globals__]
        if function.__dict__:
            parts += self._fields(vars(function), [name for name in vars(function) if name != "__wrapped__"])
        return ["function", parts]

    def _module(self, module: types.ModuleType, names: tuple[str, ...]) -> _Told:
        """A module of a library by name; of others, which change without a version, all that the code may read."""
        library = module.__name__.partition(".")[0]
        if library in _LIBRARIES:
            return ["module", module.__name__, str(getattr(sys.modules.get(library), "__version__", None))]
        if (id(module), names) in self._modules:
            return ["seen", module.__name__]
        self._modules.add((id(module), names))
        place = _Place(vars(module), [name for name in names if name in vars(module)], absent=names)
        self._watches.append(place)
        return ["module", module.__name__, [[n, self._tell(v, names)] for n, v in zip(place.names, place.values, strict=True)]]

    def _class(self, cls: type) -> _Told:
        if _library(cls) or not cls.__flags__ & _HEAP_TYPE:
            return ["class", cls.__module__, cls.__qualname__]
        seen = self._number(cls)
        if seen is not None:
            return seen
        self._classes.append(cls)
        names = [name for name in vars(cls) if name not in _NOT_OF_A_CLASS]
        bases = [self._class(base) for base in cls.__bases__]
        return ["class", [cls.__module__, cls.__qualname__, bases, *self._fields(vars(cls), names, known=_NOT_OF_A_CLASS)]]

    def _options(self, op: BasicOperation) -> _Told:
        if op.fuser_options is None:
            return [self._inner(module, op) for module in op.modules()]
        declared = [[name, self._option(op, name)] for name in op.fuser_options]
        return [declared, [self._inner(module, op) for module in op.modules() if module is not op]]

    def _inner(self, module: torch.nn.Module, op: BasicOperation | None) -> _Told:
        """A module with the names of what is in it, and the hooks that its parent runs."""
        fields = vars(module)
        own = [name for name in fields if name not in NOT_OPTIONS]
        told = [None if module is op else self._class(type(module)), self._fields(fields, [*own, "training"], known=NOT_OPTIONS)]
        hooks = [] if module is op else [fields[name] for name in _HOOKS]
        self._watches.append(_Same(lambda: [*_items(fields["_modules"]), *(hook for some in hooks for hook in (some, *some.values()))]))
        told += [sorted(module._buffers), sorted(module._parameters)]
        told.append([[name, self._inside.get(id(child))] for name, child in module._modules.items()])
        return [*told, [[self._tell(hook) for hook in some.values()] for some in hooks]]

    def _hidden_module(self, root: torch.nn.Module) -> _Told:
        """A module that the op holds without having it as a child."""
        found = [module for module in root.modules() if id(module) not in self._inside]
        self._inside.update((id(module), len(self._inside) + number) for number, module in enumerate(found))
        return ["hidden", self._opaque(root), [self._inner(module, None) for module in found]]

    def _option(self, op: BasicOperation, name: str) -> _Told:
        """A declared attribute, which a property may compute."""
        reference = weakref.ref(op)

        def now() -> _Told | _This:
            value = getattr(reference(), name)
            told = tell_plain(value)
            return _This(value) if told is None else told

        watch = _Retold(now)
        self._watches.append(watch)
        return self._tell(watch.told.value) if isinstance(watch.told, _This) else watch.told
