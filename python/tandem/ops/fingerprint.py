"""What the code of an op that is written in Python depends on, as a text: equal texts may share compiled code.

Told are the classes of the op (code, defaults, closures, class attributes, bases, decorators), the globals that their functions read, and
the op's own attributes. Where a part of it is no plain value, no other op shares the code.
"""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import itertools
import json
import sys
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tandem.ops.op import BasicOperation

_LIBRARIES = frozenset(sys.stdlib_module_names) | {"torch", "tandem", "numpy", "typing_extensions"}
_SIMPLE = (type(None), bool, int, str)
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format, type(Ellipsis), type(NotImplemented))
_BUILTIN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType)
_NOT_OF_A_CLASS = frozenset(
    {"__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__annotations__", "__abstractmethods__", "_abc_impl"}
    | {"__firstlineno__", "__static_attributes__", "__slotnames__", "_styles", "_forward_prefix"}
)
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
_generations = itertools.count()


class _Opaque(Exception):
    """Something is no plain value."""


def _library(thing: Any) -> bool:
    return (getattr(thing, "__module__", None) or "builtins").partition(".")[0] in _LIBRARIES


def tell_plain(value: Any) -> _Told | None:
    """A number, a text, None, a dtype or device, a list, tuple or dict of them as JSON that tells it apart; None where it is none."""
    try:
        return _plain(value)
    except _Opaque:
        return None


def _plain(value: Any) -> _Told:
    kind = type(value)
    if kind in _SIMPLE:
        return [kind.__name__, value]
    if kind in (float, complex):
        return [kind.__name__, value.hex() if kind is float else [value.real.hex(), value.imag.hex()]]
    if isinstance(value, _NAMED):
        return [kind.__name__, str(value)]
    if kind in (bytes, bytearray):
        return [kind.__name__, value.hex()]
    if kind in (tuple, list, torch.Size):
        return [kind.__name__, [_plain(item) for item in value]]
    if kind in (set, frozenset):
        return [kind.__name__, sorted((_plain(item) for item in value), key=json.dumps)]
    if kind in (dict, types.MappingProxyType):
        return ["dict", [[_plain(name), _plain(item)] for name, item in value.items()]]
    if isinstance(value, enum.Enum):
        return ["enum", kind.__module__, kind.__qualname__, value.name]
    raise _Opaque


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
    return told(code), tuple(sorted(reads)), tuple(sorted({i.argval for i in instructions if isinstance(i.argval, str)}))


class _Read:
    """One thing that a fingerprint has read: it holds while the same object is there, and, where that may change, says the same."""

    __slots__ = ("name", "place", "told", "value")

    def __init__(self, place: Any, name: str, value: Any, told: _Told | None) -> None:
        self.place, self.name, self.value, self.told = place, name, value, told

    def now(self) -> Any:
        if isinstance(self.place, types.CellType):
            try:
                return self.place.cell_contents
            except ValueError:
                return _MISSING
        if isinstance(self.place, types.FunctionType):
            return getattr(self.place, self.name)
        return self.place.get(self.name, _MISSING)

    def holds(self) -> bool:
        return self.now() is self.value and (self.told is None or tell_plain(self.value) == self.told)

    def absorb(self) -> None:
        self.value = self.now()
        if self.told is not None:
            self.told = tell_plain(self.value)


class Fingerprint:
    """`text` changes with whatever the code of `op` depends on. `holds` tells, cheaply, whether it would be the same if taken again."""

    def __init__(self, op: BasicOperation, private: str) -> None:
        self._op_fields = vars(op)
        self._is_declared = op.fuser_options is not None
        self._reads: list[_Read] = []
        self._numbers: dict[int, int] = {}  # of functions and classes, which may refer to each other
        self._modules: set[tuple[int, tuple[str, ...]]] = set()
        self._names: set[str] = set(NOT_OPTIONS)
        self._is_opaque = False
        told = [sys.hexversion, torch.__version__, self._class(type(op)), self._options(op)]
        text = hashlib.sha256(json.dumps(told).encode()).hexdigest()
        self.text = f"{private}.{next(_generations)}" if self._is_opaque else text

    def holds(self) -> bool:
        if not self._is_declared and not self._op_fields.keys() <= self._names:
            return False
        return all(read.holds() for read in self._reads)

    def absorb(self) -> None:
        """The op's own code has run: what it changed is its state, not another op."""
        self._names.update(self._op_fields)
        for read in self._reads:
            read.absorb()

    def _read(self, place: Any, name: str, value: Any, names: tuple[str, ...] = ()) -> _Told:
        is_mutable = isinstance(value, list | dict | set | bytearray | tuple)
        read = _Read(place, name, value, None)
        self._reads.append(read)
        told = self._tell(value, names)
        if is_mutable:
            read.told = tell_plain(value)
        return [name, told]

    def _tell(self, value: Any, names: tuple[str, ...] = ()) -> _Told:
        plain = tell_plain(value)
        if plain is not None:
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
            return ["builtin", getattr(value, "__module__", None), value.__qualname__]
        if isinstance(value, tuple):
            return ["tuple", [self._tell(item) for item in value]]
        if _library(type(value)) and hasattr(value, "__dict__") and not isinstance(value, torch.Tensor | torch.nn.Module):
            return ["object", type(value).__qualname__, [self._read(vars(value), n, v) for n, v in vars(value).items()]]
        self._is_opaque = True
        return None

    def _number(self, thing: Any) -> _Told | None:
        if id(thing) in self._numbers:
            return ["seen", self._numbers[id(thing)]]
        self._numbers[id(thing)] = len(self._numbers)
        return None

    def _function(self, function: types.FunctionType) -> _Told:
        code = function.__code__
        if code.co_filename.startswith("<frozen") or (_library(function) and function.__closure__ is None):
            return ["function", function.__module__, function.__qualname__]
        seen = self._number(function)
        if seen is not None:
            return seen
        told, reads, names = _code(code)
        self._reads.append(_Read(function, "__code__", code, None))
        parts = [told]
        parts += [self._read(function, name, getattr(function, name)) for name in ("__defaults__", "__kwdefaults__")]
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                parts.append(self._read(cell, name, cell.cell_contents, names))
            except ValueError:
                parts.append([name, "empty"])
                self._reads.append(_Read(cell, name, _MISSING, None))
        for name in reads:
            value = function.__globals__.get(name, _MISSING)
            if value is _MISSING:
                self._reads.append(_Read(function.__globals__, name, _MISSING, None))
            else:
                parts.append(self._read(function.__globals__, name, value, names))
        parts += [self._read(vars(function), n, v) for n, v in vars(function).items() if n != "__wrapped__"]
        return ["function", parts]

    def _module(self, module: types.ModuleType, names: tuple[str, ...]) -> _Told:
        """A module of a library by name; of others, which change without a version, all that the code may read."""
        library = module.__name__.partition(".")[0]
        if library in _LIBRARIES:
            return ["module", module.__name__, str(getattr(sys.modules.get(library), "__version__", None))]
        if (id(module), names) in self._modules:
            return ["seen", module.__name__]
        self._modules.add((id(module), names))
        found = [name for name in names if name in vars(module)]
        return ["module", module.__name__, [self._read(vars(module), n, vars(module)[n], names) for n in found]]

    def _class(self, cls: type) -> _Told:
        if _library(cls):
            return ["class", cls.__module__, cls.__qualname__]
        seen = self._number(cls)
        if seen is not None:
            return seen
        parts: list[_Told] = [cls.__module__, cls.__qualname__, [self._class(base) for base in cls.__bases__]]
        fields = vars(cls)
        parts += [self._read(fields, name, value) for name, value in fields.items() if name not in _NOT_OF_A_CLASS]
        return ["class", parts]

    def _options(self, op: BasicOperation) -> _Told:
        if op.fuser_options is not None:
            return [[name, self._option(op, name)] for name in op.fuser_options]
        parts: list[_Told] = []
        for prefix, module in op.named_modules():
            if module is not op and not type(module).__module__.startswith("torch.nn."):
                self._is_opaque = True
            fields = vars(module)
            own = [name for name in fields if name not in NOT_OPTIONS]
            if module is op:
                self._names.update(own)
            parts.append([prefix, type(module).__qualname__, [self._read(fields, name, fields[name]) for name in own]])
            parts.append([self._read(fields, "training", module.training), sorted(module._buffers), sorted(module._parameters)])
            self._reads += [_Read(module._modules, name, child, None) for name, child in module._modules.items()]
        return parts

    def _option(self, op: BasicOperation, name: str) -> _Told:
        if name in vars(op):
            return self._read(vars(op), name, vars(op)[name])
        return self._tell(getattr(op, name))
