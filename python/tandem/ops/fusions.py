"""Fusions that users register as functions over lists of ops."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch
from typing_extensions import Self

from tandem.ops import python_op
from tandem.ops.changes import structure
from tandem.ops.context import OperationContext
from tandem.ops.ghost import ghost_of
from tandem.ops.unit import BasicUnit, FusedUnit, Unit
from tandem.recipe import recipe_from_json

FusionFunction = Callable[..., Sequence[Unit]]

_PASSES = {"joint": "forward_backward", "forward": "forward", "backward": "backward"}
_functions: dict[str, list[FusionFunction]] = {name: [] for name in _PASSES}
_registered: dict[int, int] = {}  # number of each registered function: a new one at each registration
_numbers = itertools.count()


class FusionHandle:
    """A registered fusion. `remove()`, or the end of a `with` block, takes it out; what was planned is planned again."""

    def __init__(self, pass_name: str, function: FusionFunction) -> None:
        """Made by the register functions.

        Args:
            pass_name: "joint", "forward" or "backward".
            function: what is registered.
        """
        self._pass_name, self._function, self._is_registered = pass_name, function, True

    def remove(self) -> None:
        """Takes the fusion out. Does nothing the second time."""
        if not self._is_registered:
            return
        self._is_registered = False
        _functions[self._pass_name].remove(self._function)
        if not any(self._function in functions for functions in _functions.values()):
            _registered.pop(id(self._function), None)
        _changed(-1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


def register_forward_fusion(func: FusionFunction, prepend: bool = False) -> FusionHandle:
    """Registers a fusion of forward.

    `func(ops, *, recipe)` is called once per plan. It gets the basic ops (a `Linear` is its `BasicLinear` and `Bias`) and returns the same
    list with `FusedOperation` objects in place of the runs that they replace.

    Args:
        func: the function.
        prepend: whether it is asked before those registered so far.
    """
    return _register("forward", func, prepend)


def register_backward_fusion(func: FusionFunction, prepend: bool = False) -> FusionHandle:
    """Registers a fusion of backward. As `register_forward_fusion`.

    Args:
        func: the function.
        prepend: whether it is asked before those registered so far.
    """
    return _register("backward", func, prepend)


def register_forward_backward_fusion(func: FusionFunction, prepend: bool = False) -> FusionHandle:
    """Registers a fusion of both directions, which may save what it likes in between. As `register_forward_fusion`.

    Args:
        func: the function.
        prepend: whether it is asked before those registered so far.
    """
    return _register("joint", func, prepend)


def name_of(function: FusionFunction) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__).replace("<locals>.", "")


def _register(pass_name: str, function: FusionFunction, prepend: bool) -> FusionHandle:
    register = f"register_{_PASSES[pass_name]}_fusion"
    if not callable(function):
        raise TypeError(f"{register}: expected a function over the op list, got {type(function).__name__}. Pass func(ops, *, recipe).")
    if function in _functions[pass_name]:
        raise ValueError(f"{register}: expected a new function, got {name_of(function)}, which is registered. Remove its handle first.")
    _functions[pass_name].insert(0 if prepend else len(_functions[pass_name]), function)
    _registered[id(function)] = next(_numbers)
    _changed(1)
    return FusionHandle(pass_name, function)


def _changed(count: int) -> None:
    python_op.count_fusions(count)
    structure.change_fusions()


class _Returned(NamedTuple):
    """A fused op in a list that the functions of a pass returned, and the first of them that returned it."""

    first: int  # of the basic ops that it stands for
    last: int
    op: FusedUnit
    function: FusionFunction


class Fused:
    """A fused op of a plan, which holds this. The basic ops hold the op as long; where they are gone, a copy without parameters stands in.

    It stands for the ops `first` to `last` of the pipeline; `name` is that of the function which returned it.
    """

    def __init__(self, returned: _Returned, pass_name: str) -> None:
        op = returned.op
        self.pass_name, self.name = pass_name, name_of(returned.function)
        self.first, self.last = returned.first, returned.last
        self.key = f"{op._get_name()}@{next(_numbers)}"  # which tells it in messages
        op.flat_ops()[0].__dict__.setdefault("_fused_ops", weakref.WeakKeyDictionary())[self] = op
        self._op = weakref.ref(op)
        self._ghost = copy.copy(op)
        self._ghost.__dict__["_modules"] = {**op._modules}
        ghosts = torch.nn.ModuleList()
        for index, basic in enumerate(op.flat_ops()):
            ghosts._modules[str(index)] = ghost_of(basic)
        self._ghost._modules["basic_ops"] = ghosts

    def get(self) -> tuple[FusedUnit, Sequence[BasicUnit]]:
        op = self._op()
        op = op if op is not None else self._ghost
        return op, op.flat_ops()


def written_context(fused: Fused, basic: BasicUnit, context: OperationContext) -> list[torch.Tensor | None]:
    """What a fused forward saved on the context of an op of the library, in the order in which the op's own backward reads it."""
    saved = context.to_save or ()
    if context.saved_names and set(context.saved_names) != set(basic._context) or len(saved) != len(basic._context):
        raise ValueError(
            f"{fused.name}: expected {len(basic._context)} saved tensors on the context of {basic._get_name()} "
            f"({', '.join(basic._context) or 'none'}), got {', '.join(context.saved_names) or len(saved)}. Save what its own forward saves."
        )
    by_name = dict(zip(context.saved_names or basic._context, saved, strict=True))
    return [by_name[name] for name in basic._context]


def groups(pass_name: str, instances: Sequence[str], recipe: str | None) -> list[Fused]:
    """Asks the functions of a pass for fused ops."""
    if not _functions[pass_name]:
        return []
    ops = [python_op.instance(name) for name in instances]
    if any(op is None for op in ops):
        return []
    return [Fused(returned, pass_name) for returned in _returned(pass_name, ops, recipe)]


def fusions_made(ops: Sequence[BasicUnit], recipe: str) -> tuple[tuple[str, int, int, int], ...]:
    """What the functions of all passes make of `ops`: pass, first op, last op, number of the function."""
    quantized = None if recipe == "null" else recipe
    return tuple(
        (pass_name, returned.first, returned.last, _registered[id(returned.function)])
        for pass_name in _PASSES
        for returned in _returned(pass_name, ops, quantized)
    )


def _returned(pass_name: str, ops: Sequence[BasicUnit], recipe: str | None) -> list[_Returned]:
    current: list[Any] = list(ops)
    made_by: dict[int, FusionFunction] = {}
    for function in _functions[pass_name]:
        current = _call(function, pass_name, current, ops, recipe)
        for op in current:
            if op.is_fused_op:
                made_by.setdefault(id(op), function)
    found, first = [], 0
    for op in current:
        count = len(op.flat_ops())
        if op.is_fused_op:
            found.append(_Returned(first, first + count - 1, op, made_by[id(op)]))
        first += count
    return found


def _call(function: FusionFunction, pass_name: str, current: list[Any], ops: Sequence[Any], recipe: str | None) -> list[Any]:
    name = name_of(function)
    try:
        returned = function(list(current), recipe=None if recipe is None else recipe_from_json(recipe))
    except Exception as error:
        raise RuntimeError(f"{name}: expected a list of ops, got {type(error).__name__}: {error}. It is a registered fusion.") from error
    if not isinstance(returned, list | tuple) or not all(isinstance(op, Unit) for op in returned):
        kinds = [type(op).__name__ for op in returned] if isinstance(returned, list | tuple) else type(returned).__name__
        raise TypeError(f"{name}: expected a list of fusible operations, got {kinds}. Return ops and FusedOperation objects.")
    covered = [basic for op in returned for basic in op.flat_ops()]
    if [id(op) for op in covered] != [id(op) for op in ops]:
        raise RuntimeError(
            f"{name}: expected no mismatch after fusing operations, but ops that cover {[op._get_name() for op in ops]} once and in order, got "
            f"{[op._get_name() for op in covered]}. Return every op of the list, alone or in one fused op."
        )
    for op in returned:
        if op.is_fused_op:
            _check_directions(op, pass_name, name)
    return list(returned)


def _check_directions(op: FusedUnit, pass_name: str, name: str) -> None:
    if pass_name in ("joint", "forward") and op._forward_prefix != "fuser":
        raise TypeError(f"{name}: expected {op._get_name()} with a forward, got none. Define fuser_forward, or fuser_forward_compute and fuser_forward_save_ctx.")
    if pass_name in ("joint", "backward") and type(op).fuser_backward is Unit.fuser_backward:
        raise TypeError(f"{name}: expected {op._get_name()} with a backward, got none. Define fuser_backward.")
    for basic in op.flat_ops():
        if pass_name != "joint" and basic.is_python_op:
            raise TypeError(
                f"{name}: expected ops of the library in {op._get_name()}, got {basic._get_name()}, written in Python, whose saved state only "
                "it knows. Use register_forward_backward_fusion."
            )


__all__ = [
    "FusionHandle",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
]
