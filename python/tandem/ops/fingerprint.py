"""What the code of an op that is written in Python depends on, as a text: equal texts may share compiled code, within one process.

Told are the classes of the op (code, defaults, closures, class attributes, bases, decorators), the globals and modules that their functions
read, the op's own attributes, the modules inside it with their hooks, which operands it has under which names, and what containers and
objects among all these hold: of the op and of objects that a class written in Python made, the attributes whose names occur in code. What
can change is watched. What is neither plain nor made of such parts (a tensor, a lock, an object of C code) is known by which object it is,
so a change inside it shows only in a tensor and in what exports its memory (arrays of up to 64 KiB). Files, the environment and clocks are
not seen; that is why no text is valid in another process.
"""

from __future__ import annotations

import argparse
import collections
import contextvars
import dis
import enum
import functools
import hashlib
import importlib.util
import itertools
import json
import logging
import operator
import os
import sys
import types
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from tandem.ops.hooks import OF_A_MODULE
from tandem.ops.plain import Told, is_fixed, tell_plain
from tandem.ops.unit import BasicUnit
from tandem.ops.watches import MISSING, Place, Retold, Same

_LIBRARIES = frozenset(sys.stdlib_module_names) | {"torch", "tandem", "numpy", "typing_extensions"}
_LIBRARIES |= {"pytest", "_pytest"}  # which writes calls of its own into functions that assert
_BUILTIN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.ClassMethodDescriptorType, types.WrapperDescriptorType) + (
    types.MethodWrapperType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
_NOT_OF_A_CLASS = frozenset(
    {"__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__annotations__", "__abstractmethods__", "_abc_impl"}
    | {"__firstlineno__", "__static_attributes__", "__slotnames__", "_styles", "_forward_prefix"}
)
_CONTAINERS = (list, tuple, set, frozenset, dict, collections.deque, types.MappingProxyType)
_OF_C = (object, types.SimpleNamespace, collections.OrderedDict, collections.defaultdict, *_CONTAINERS[:-1])  # all state is items and attributes
_HEAP_TYPE = 1 << 9
_READS_ALL = frozenset({"__dict__", "vars", "getattr", "dir", "asdict", "astuple", "replace", "copy", "deepcopy", "attrgetter"})
_NOT_READ = frozenset({"__init__", "__new__", "__init_subclass__", "__post_init__", "__setattr__", "__delattr__"}) | {
    "__dataclass_fields__",
    "__dataclass_params__",
}
_WITHOUT_CODE = (*_OF_C, argparse.Namespace, collections.Counter)  # none of their own code reads an attribute
_REDUCED = (operator.attrgetter, operator.itemgetter, operator.methodcaller, type(vars(collections.namedtuple("_Pair", "x"))["x"]))
_BASES, _CODE, _FIELDS = map(operator.attrgetter, ("__bases__", "__code__", "__dict__"))
_DEFAULTS, _KEYWORD_DEFAULTS = map(operator.attrgetter, ("__defaults__", "__kwdefaults__"))
_MOST_BYTES = 1 << 16  # of an array that is compared
NOT_OPTIONS = frozenset(vars(torch.nn.Module())) | {
    "_extra_input_channels",
    "_extra_output_channels",
    "_extra_output_to_caller",
    "_extra_tensor_channels_locked",
    "_alone",
    "_alone_changes",
    "_alone_plain",
    "_alone_token",
    "_changes",
    "_compiled_call_impl",
    "_deferred",
    "_quantized_init",
    "_device",
    "_fingerprint",
    "_fused_ops",
    "_instance",
    "_keys",
    "_made",
    "_pipelines_of",
    "_runs",
    "_token",
    "_watchers",
}
_OWN_BASES = ("torch.nn.modules.module", "tandem.ops.op", "tandem.ops.unit", "tandem.ops.channels", "tandem.ops.directions")  # whose code reads no option of an op


def _renew() -> None:
    global process
    process = uuid.uuid4().hex


process = ""  # in what must not be found in a cache of another process
_renew()
os.register_at_fork(after_in_child=_renew)


class _Known:
    """An object that is told by which one it is: by a number that no other object ever had. Fingerprints hold these."""

    __slots__ = ("__weakref__", "number", "value")
    _numbers = itertools.count()

    def __init__(self, value: Any) -> None:
        self.value, self.number = value, next(self._numbers)


_known: weakref.WeakValueDictionary[int, _Known] = weakref.WeakValueDictionary()  # by id of the object


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


def _memory(value: Any) -> tuple[str, tuple[int, ...], bytes] | None:
    """What an array holds, None for what is none, or too large."""
    try:
        view = memoryview(value)
        return None if view.nbytes > _MOST_BYTES or "O" in view.format else (view.format, view.shape, view.tobytes())
    except (TypeError, ValueError, BufferError):
        return None


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _constant(constant: Any) -> Told:
    plain = tell_plain(constant)
    return repr(constant) if plain is None else plain


def _instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _instructions(constant)


def _imports(code: types.CodeType) -> Iterator[tuple[int, str]]:
    """What a code object imports itself: level and name."""
    instructions = list(dis.get_instructions(code))
    for level, _, instruction in zip(instructions, instructions[1:], instructions[2:]):
        if instruction.opname == "IMPORT_NAME":
            yield level.argval if isinstance(level.argval, int) else 0, instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _imports(constant)


@functools.cache
def _code(code: types.CodeType) -> tuple[Told, tuple[str, ...], tuple[str, ...], tuple[tuple[int, str], ...]]:
    """A code object told, the globals that it reads, all names that it uses, what it imports."""

    def told(part: types.CodeType) -> Told:
        constants = [told(c) if isinstance(c, types.CodeType) else _constant(c) for c in part.co_consts]
        fields = (part.co_argcount, part.co_posonlyargcount, part.co_kwonlyargcount, part.co_flags)
        names = [part.co_names, part.co_varnames, part.co_freevars, part.co_cellvars]
        return [part.co_code.hex(), constants, fields, names, getattr(part, "co_exceptiontable", b"").hex()]

    instructions = list(_instructions(code))
    reads = {i.argval for i in instructions if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    names = {name for i in instructions for name in (i.argval if isinstance(i.argval, tuple) else [i.argval]) if isinstance(name, str)}
    return told(code), tuple(sorted(reads)), tuple(sorted(names)), tuple(_imports(code))


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

    def __init__(self, fields: Mapping[str, Any], number: int, *, is_class: bool, without: frozenset[str]) -> None:
        self.fields, self.number, self.is_class, self.without = fields, number, is_class, without
        self.told: set[str] = set()
        self.parts: list[Told] = []

    def further(self, used: set[str], reads_all: bool) -> list[str]:
        found = set(self.fields) if reads_all and not self.is_class else used & self.fields.keys()
        if self.is_class:
            found |= {name for name in self.fields if name.startswith("__") and name.endswith("__")}
            found -= _NOT_OF_A_CLASS | _NOT_READ
        return sorted(found - self.told - self.without)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def _slot(value: Any, name: str) -> Any:
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return MISSING


def _parts(
    objects: list[Any], classes: list[type], functions: list[types.FunctionType], cells: list[types.CellType]
) -> list[Any]:
    """What may change of objects, classes and functions besides what dicts hold; in one list, as there are many."""
    codes, defaults = map(_CODE, functions), map(_DEFAULTS, functions)
    counts = map(len, map(_FIELDS, functions))
    contents = [_content(cell) for cell in cells]
    return [*map(type, objects), *map(_BASES, classes), *codes, *defaults, *map(_KEYWORD_DEFAULTS, functions), *counts, *contents]


def _items(container: Any) -> list[Any]:
    return [*container, *container.values()] if isinstance(container, dict | types.MappingProxyType) else [*container]


def _operands(op: BasicUnit) -> list[list[tuple[str, int | None]]]:
    """The names of the tensors of each module inside an op, in order, and which operand each is: by the first place where it is met."""
    numbers: dict[int, int] = {}
    return [
        [(name, None if tensor is None else numbers.setdefault(id(tensor), len(numbers))) for name, tensor in held.items()]
        for module in op.modules()
        for held in (module._parameters, module._buffers)
    ]


class Fingerprint:
    """`text` changes with whatever the code of `op` depends on. `holds` tells, cheaply, whether it would be the same if taken again."""

    def __init__(self, op: BasicUnit) -> None:
        self._watches: list[Place | Same | Retold] = []
        self._numbers: dict[int, tuple[int, Any]] = {}  # of what may be met again, as functions and classes refer to each other
        self._opaques: list[_Known] = []  # of what cannot be told
        self._named: dict[int, _Named] = {}
        self._used: set[str] = set()  # names in all code
        self._objects: list[Any] = []
        self._classes: list[type] = []
        self._functions: list[types.FunctionType] = []
        self._cells: list[types.CellType] = []
        self._globals: dict[int, tuple[dict[str, Any], set[str]]] = {}  # which all functions of a module share
        self._modules: set[tuple[int, tuple[str, ...]]] = set()
        self._inside = {id(module): number for number, module in enumerate(op.modules())}
        self._operands: dict[int, int] = {}
        for tensor in itertools.chain(op.parameters(), op.buffers()):
            self._operands.setdefault(id(tensor), len(self._operands))
        self._op = weakref.ref(op)
        operands = Retold(self._operands_now)
        told = [self._tell(type(op)), self._options(op), operands.told]
        self._settle()
        self._watches += [Place(fields, names) for fields, names in self._globals.values()]
        self._watches.append(Same(functools.partial(_parts, self._objects, self._classes, self._functions, self._cells)))
        self._watches.append(operands)
        self._text = hashlib.sha256(json.dumps(told).encode()).hexdigest()
        self._of_others: str | None = None  # the text while the op was as others are
        del self._numbers, self._named, self._used, self._globals, self._modules, self._inside, self._operands

    @property
    def text(self) -> str:
        return f"{process}.{self._text}"

    def is_called(self, text: str) -> bool:
        """Whether `text` is this, or was before the op's own code changed the op."""
        return text in (self.text, f"{process}.{self._of_others}")

    def _operands_now(self) -> Any:
        return _operands(op) if (op := self._op()) is not None else None

    def holds(self) -> bool:
        try:
            return all([watch.holds() for watch in self._watches])
        except Exception:  # of users' objects, whatever they raise
            return False

    def absorb(self, own: str) -> None:
        """The op's own code has run while it was traced. What it changed is its state and not another op; but from now on it has code of its
        own, as other ops do not have that state."""
        if self.holds():
            return
        if self._of_others is None:
            self._text, self._of_others = f"{own}.{self._text}", self._text
        for watch in self._watches:
            watch.absorb()

    def _fields(self, fields: Mapping[str, Any], names: Iterable[str], **bounds: Iterable[str]) -> list[Told]:
        """What is in a dict under names, and from now on watched there."""
        place = Place(fields, names, **bounds)
        self._watches.append(place)
        return [[name, self._tell(value)] for name, value in zip(place.names, place.values, strict=True) if value is not MISSING]

    def _tell(self, value: Any, names: tuple[str, ...] = ()) -> Told:
        try:
            return self._told(value, names)
        except Exception:  # of a user's object: a lazy one, a mock, one that is nested too deeply
            return self._opaque(value)

    def _told(self, value: Any, names: tuple[str, ...]) -> Told:
        plain = tell_plain(value)
        if plain is not None:
            if not is_fixed(value):
                self._watches.append(Retold(functools.partial(tell_plain, value)))
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
        if isinstance(value, weakref.ReferenceType):
            self._watches.append(Same(lambda: [value()]))
            return ["weak", self._tell(value())]
        if isinstance(value, contextvars.ContextVar):
            self._watches.append(Same(lambda: [value.get(None)]))
            return ["context", value.name, self._tell(value.get(None))]
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
                return ["operand", self._operands[id(value)]]
            self._watches.append(Retold(functools.partial(_version, value)))
            return [self._opaque(value), _version(value)]
        if isinstance(value, enum.Enum):
            fields = vars(value)
            return ["enum", self._class(type(value)), self._fields(fields, list(fields), known=())]
        memory = _memory(value)
        if memory is None:
            return self._object(value)
        self._watches.append(Retold(functools.partial(_memory, value)))
        held = [memory[0], memory[1], memory[2].hex()]
        if hasattr(value, "__dict__"):  # such as a masked array
            return ["memory", held, self._object(value)]
        return ["memory", type(value).__qualname__, held]

    def _opaque(self, value: Any) -> Told:
        """Which object it is."""
        known = _known.get(id(value)) or _known.setdefault(id(value), _Known(value))
        self._opaques.append(known)
        return ["opaque", known.number]

    def _object(self, value: Any) -> Told:
        """The items and attributes of anything."""
        cls = type(value)
        self._objects.append(value)
        parts: list[Told] = [cls.__module__, cls.__qualname__]
        if cls is object or not _made_in_python(cls):  # which one it is matters
            parts.append(self._opaque(value))
        if isinstance(value, _CONTAINERS):
            self._watches.append(Same(functools.partial(_items, value)))
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

    def _slots(self, value: Any, names: list[str]) -> Told:
        watch = Same(lambda: [_slot(value, name) for name in names])
        self._watches.append(watch)
        return [[name, self._tell(slot)] for name, slot in zip(names, watch.values, strict=True) if slot is not MISSING]

    def _name(self, fields: Mapping[str, Any], owner: Any, without: frozenset[str] = frozenset()) -> Told:
        """What `_settle` will tell of an object or class."""
        if id(owner) in self._named:
            return ["named", self._named[id(owner)].number]
        named = self._named[id(owner)] = _Named(fields, len(self._named), is_class=isinstance(owner, type), without=without)
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
            bounds: dict[str, Iterable[str]] = {"known": named.without} if everything else {"absent": self._used - named.told - named.without}
            self._watches.append(Place(named.fields, sorted(named.told), **bounds))

    def _number(self, thing: Any) -> Told | None:
        if id(thing) in self._numbers:
            return ["seen", self._numbers[id(thing)][0]]
        self._numbers[id(thing)] = (len(self._numbers), thing)
        return None

    def _function(self, function: types.FunctionType) -> Told:
        code = function.__code__
        if code.co_filename.startswith("<frozen") or _library(function):
            return ["function", function.__module__, function.__qualname__]
        seen = self._number(function)
        if seen is not None:
            return seen
        told, reads, names, imports = _code(code)
        self._used.update(names)
        self._functions.append(function)
        self._cells += function.__closure__ or ()
        parts = [told, self._tell(function.__defaults__), self._tell(function.__kwdefaults__)]
        contents = map(_content, function.__closure__ or ())
        parts += [[name, None if v is MISSING else self._tell(v, names)] for name, v in zip(code.co_freevars, contents, strict=True)]
        read = self._globals.setdefault(id(function.__globals__), (function.__globals__, set()))[1]
        read.update(reads)
        parts += [[name, self._tell(function.__globals__[name], names)] for name in reads if name in function.__globals__]
        parts += [self._imported(level, name, function, names) for level, name in imports]
        if function.__dict__:
            parts += self._fields(vars(function), [name for name in vars(function) if name != "__wrapped__"])
        return ["function", parts]

    def _imported(self, level: int, name: str, function: types.FunctionType, names: tuple[str, ...]) -> Told:
        """The module that a function imports, as far as that has been done."""
        if level:
            name = importlib.util.resolve_name("." * level + name, str(function.__globals__.get("__package__")))
        root = name.partition(".")[0]
        if root in _LIBRARIES:
            return None
        place = Place(sys.modules, (name, root))
        self._watches.append(place)
        return [self._tell(module, names) for module in place.values if module is not MISSING]

    def _module(self, module: types.ModuleType, names: tuple[str, ...]) -> Told:
        """A module of a library by name; of others, which change without a version, all that the code may read."""
        library = module.__name__.partition(".")[0]
        if library in _LIBRARIES:
            return ["module", module.__name__, str(getattr(sys.modules.get(library), "__version__", None))]
        if (id(module), names) in self._modules:
            return ["seen", module.__name__]
        self._modules.add((id(module), names))
        place = Place(vars(module), [name for name in names if name in vars(module)], absent=names)
        self._watches.append(place)
        return ["module", module.__name__, [[n, self._tell(v, names)] for n, v in zip(place.names, place.values, strict=True)]]

    def _class(self, cls: type) -> Told:
        if _library(cls) or not cls.__flags__ & _HEAP_TYPE:
            return ["class", cls.__module__, cls.__qualname__]
        seen = self._number(cls)
        if seen is not None:
            return seen
        self._classes.append(cls)
        names = [name for name in vars(cls) if name not in _NOT_OF_A_CLASS]
        bases = [self._class(base) for base in cls.__bases__]
        meta = self._class(type(cls))
        return ["class", [cls.__module__, cls.__qualname__, meta, bases, *self._fields(vars(cls), names, known=_NOT_OF_A_CLASS)]]

    def _options(self, op: BasicUnit) -> Told:
        if op.fuser_options is None:
            return [self._inner(module, op) for module in op.modules()]
        declared = [[name, self._option(op, name)] for name in op.fuser_options]
        return [declared, [self._inner(module, op) for module in op.modules() if module is not op]]

    def _inner(self, module: torch.nn.Module, op: BasicUnit | None) -> Told:
        """A module with the names of what is in it, and the hooks that its parent runs."""
        fields = vars(module)
        own = [name for name in fields if name not in NOT_OPTIONS]
        is_named = module is op and all(base.__module__ in _OWN_BASES or not _library(base) for base in type(op).__mro__[:-1])
        told = [None if module is op else self._class(type(module))]
        told.append(self._fields(fields, ["training"]) if is_named else self._fields(fields, [*own, "training"], known=NOT_OPTIONS))
        told.append(self._name(fields, module, NOT_OPTIONS) if is_named else None)
        hooks = [] if module is op else [fields[name] for name in OF_A_MODULE]
        self._watches.append(Same(lambda: [*_items(fields["_modules"]), *(hook for some in hooks for hook in (some, *some.values()))]))
        told.append([[name, self._inside.get(id(child))] for name, child in module._modules.items()])
        return [*told, [[self._tell(hook) for hook in some.values()] for some in hooks]]

    def _hidden_module(self, root: torch.nn.Module) -> Told:
        """A module that the op holds without having it as a child."""
        found = [module for module in root.modules() if id(module) not in self._inside]
        self._inside.update((id(module), len(self._inside) + number) for number, module in enumerate(found))
        return ["hidden", self._opaque(root), [self._inner(module, None) for module in found]]

    def _option(self, op: BasicUnit, name: str) -> Told:
        """A declared attribute, which a property may compute."""

        def now() -> Told | _This:
            value = getattr(self._op(), name)
            told = tell_plain(value)
            return _This(value) if told is None else told

        watch = Retold(now)
        self._watches.append(watch)
        return self._tell(watch.told.value) if isinstance(watch.told, _This) else watch.told
