"""Fusions that users register as functions over lists of ops."""

from __future__ import annotations

import copy
import dataclasses
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
from tandem.ops.directions import Draws
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


def register_forward_fusion(op_fusion_func: FusionFunction, prepend: bool = False) -> FusionHandle:
    """Registers a fusion of forward.

    `op_fusion_func(ops, *, recipe)` is called once per plan. It gets the basic ops (a `Linear` is its `BasicLinear` and `Bias`), with what functions
    before it have fused, for both directions or for this one, in place of the ops that this covers, which are its `basic_ops`. It returns the same
    list with `FusedOperation` objects in place of the runs that they replace. It may not call the pipeline that is planned, and what it
    returns depends on nothing but the ops and the recipe.

    The contract of a fused op here: interchangeable with the forward of the ops it covers, each of which keeps its own backward.

    - It computes the same output, and the extra outputs that anything outside of it wants.
    - It saves on the context of each covered op what the op's own backward reads: for ops of the library the tensors listed in "A fusion in
      Python" (docs/extending.md), by name or in that order; for ops written in Python what their own forward saves, tensors by the same names
      or in the same order, and fields. What does not fit is an error that says which.
    - `basic_op_extra_inputs` holds None where a channel comes from another covered op: what flows inside is the fused op's own business.
    - Where no gradient is wanted (`ctx.requires_grad` is False) it saves nothing.
    - The `seed` of a `Dropout` is what the op's own forward has drawn in the call; another is an error.

    Args:
        op_fusion_func: the function.
        prepend: whether it is asked before those registered so far.
    """
    return _register("forward", op_fusion_func, prepend)


def register_backward_fusion(op_fusion_func: FusionFunction, prepend: bool = False) -> FusionHandle:
    """Registers a fusion of backward. `op_fusion_func` is called as that of `register_forward_fusion` is.

    The contract of a fused op here: interchangeable with the backward of the ops it covers, whose forwards ran by themselves.

    - `fuser_backward` finds on the context of each covered op what the op's own forward saved, and may read `ctx.saved_tensors` or
      `ctx.saved_tensor(name)`; an error says which context has something else. What no gradient that is asked for is computed from is None.
    - It returns the gradient of the input, those of the parameters of each op, and those of its extra inputs, all that require grad.
    - `basic_op_grad_extra_outputs` holds what readers outside of it contribute, None where there are none. What a covered op contributes to the
      extra output of another is the fused op's own business, and what it returns for such an extra input is not used.
    - Under a recipe `x` and `weight` of products are QuantizedTensors, with the codes that backward reads; a recipe that keeps amaxes refuses it.
    - It does not run, and the ops' own backward does, where some of these gradients are not asked for and others cannot be had without.

    Args:
        op_fusion_func: the function.
        prepend: whether it is asked before those registered so far.
    """
    return _register("backward", op_fusion_func, prepend)


def register_forward_backward_fusion(op_fusion_func: FusionFunction, prepend: bool = False) -> FusionHandle:
    """Registers a fusion of both directions. `op_fusion_func` is called as that of `register_forward_fusion` is.

    The contract of a fused op here: it replaces both directions of the ops it covers, or neither.

    - What `fuser_forward` saves on the contexts, tensors and fields, is what `fuser_backward` finds there. No op of its own reads it.
    - Where no gradient is asked for, its forward runs alone.
    - Inputs, outputs, channels and gradients are as for fusions of one direction.
    - It comes first: ops that it covers are left to no other fusion. A fusion of one direction comes before those of the library for both.

    Args:
        op_fusion_func: the function.
        prepend: whether it is asked before those registered so far.
    """
    return _register("joint", op_fusion_func, prepend)


def name_of(function: FusionFunction) -> str:
    if isinstance(function, RuledFusion):
        return function.name
    return getattr(function, "__qualname__", type(function).__qualname__).replace("<locals>.", "")


def _register(pass_name: str, function: FusionFunction, prepend: bool) -> FusionHandle:
    register = f"register_{_PASSES[pass_name]}_fusion"
    if not callable(function):
        raise TypeError(f"{register}: expected a function over the op list, got {type(function).__name__}. Pass op_fusion_func(ops, *, recipe).")
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


class Refused(NamedTuple):
    """What a fusion's own rule has refused."""

    first: int
    last: int
    name: str
    refusal: str


class RuledFusion:
    """A fusion function with a name and a rule that may refuse."""

    name: str

    def __call__(self, ops: Sequence[Unit], *, recipe: Any = None) -> list[Unit]:
        raise NotImplementedError

    def refusals(self, ops: Sequence[Unit]) -> list[Refused]:
        """What the rule refuses in this list."""
        raise NotImplementedError


def register_ruled(pass_name: str, fusion: RuledFusion, prepend: bool) -> FusionHandle:
    """Registers it. Raises ValueError where one of its name is registered."""
    if any(isinstance(known, RuledFusion) and known.name == fusion.name for functions in _functions.values() for known in functions):
        raise ValueError(f"register_fusion: expected a new name, got {fusion.name!r}, which is registered. Remove its handle first.")
    return _register(pass_name, fusion, prepend)


class Fused:
    """A fused op of a plan, which holds this. The basic ops hold the op as long; where they are gone, a copy without parameters stands in.

    It stands for the ops `first` to `last` of the pipeline; `name` is that of the function which returned it.
    """

    refusal = None

    def __init__(self, returned: _Returned, pass_name: str, recipe: str | None) -> None:
        op = returned.op
        self.recipe = recipe or "null"
        self.pass_name, self.name = pass_name, name_of(returned.function)
        self.first, self.last = returned.first, returned.last
        self.key = f"{op._get_name()}@{next(_numbers)}"  # which tells it in messages
        op.covered_ops()[0].__dict__.setdefault("_fused_ops", weakref.WeakKeyDictionary())[self] = op
        self._op = weakref.ref(op)
        self._ghost = copy.copy(op)
        self._ghost.__dict__["_modules"] = {**op._modules}
        ghosts = torch.nn.ModuleList()
        for index, basic in enumerate(op.covered_ops()):
            ghosts._modules[str(index)] = ghost_of(basic)
        self._ghost._modules["basic_ops"] = ghosts

    def get(self) -> tuple[FusedUnit, Sequence[BasicUnit]]:
        op = self._op()
        op = op if op is not None else self._ghost
        return op, op.covered_ops()


def written_context(fused: Fused, basic: BasicUnit, context: OperationContext, draws: Draws) -> list[torch.Tensor | None]:
    """What a fused forward saved on the context of an op of the library, in the order in which the op's own backward reads it. Of what that draws
    numbers from again it must be what the op's own forward has drawn: nobody else computes with the same numbers."""
    saved = context.to_save or ()
    if context.saved_names and set(context.saved_names) != set(basic._context) or len(saved) != len(basic._context):
        raise ValueError(
            f"{fused.name}: expected {len(basic._context)} saved tensors on the context of {basic._get_name()} "
            f"({', '.join(basic._context) or 'none'}), got {', '.join(context.saved_names) or len(saved)}. Save what its own forward saves."
        )
    by_name = dict(zip(context.saved_names or basic._context, saved, strict=True))
    for name in basic._drawn if basic.training else ():
        if not draws.made(basic, by_name[name]):
            raise ValueError(
                f"{fused.name}: expected as {name} of {basic._get_name()} what the op's own forward has drawn, from which its backward draws the same "
                "numbers again, got another. Call op_forward of the op in the fused forward, or register the fusion for both directions."
            )
    return [by_name[name] for name in basic._context]


class _Saved(NamedTuple):
    """What a forward leaves on the context of an op that is written in Python."""

    tensors: tuple[tuple[torch.dtype, int] | None, ...]  # dtype and number of dimensions
    names: tuple[str, ...]  # of tensors, where they were saved by name
    fields: tuple[str, ...]

    @classmethod
    def on(cls, context: OperationContext) -> Self:
        tensors = tuple([None if tensor is None else (tensor.dtype, tensor.dim()) for tensor in context.to_save or ()])
        fields = tuple(sorted(set(vars(context)) - {field.name for field in dataclasses.fields(OperationContext)}))
        return cls(tensors, context.saved_names, fields)

    def fits(self, own: Self) -> bool:
        """Whether a backward that reads `own` finds it here."""
        if not set(own.fields) <= set(self.fields) or len(self.tensors) != len(own.tensors):
            return False
        if not own.names:  # read by position
            return self.tensors == own.tensors
        return sorted(zip(self.names, self.tensors, strict=False), key=str) == sorted(zip(own.names, own.tensors, strict=True), key=str)

    def __str__(self) -> str:
        names = self.names or ("",) * len(self.tensors)
        shown = [
            f"{name} {'None' if tensor is None else f'{tensor[0]} of {tensor[1]} dimensions'}".strip()
            for name, tensor in zip(names, self.tensors, strict=True)
        ]
        return f"tensors ({', '.join(shown)}) and fields ({', '.join(self.fields)})"


def note_saved(basic: BasicUnit, context: OperationContext) -> None:
    """What an op's own forward has saved is what its backward reads."""
    basic.__dict__["_saved"] = _Saved.on(context)


def check_saved(fused: Fused, basic: BasicUnit, context: OperationContext) -> None:
    """What a fused forward has saved for an op that is written in Python must be what the op's own forward saves. Where that has not run,
    its backward finds out."""
    own: _Saved | None = basic.__dict__.get("_saved")
    written = _Saved.on(context)
    if own is not None and not written.fits(own):
        raise ValueError(
            f"{fused.name}: expected on the context of {basic._get_name()} what its own forward leaves there, {own}, got {written}. Save the same."
        )


def unread(name: str, op: BasicUnit | FusedUnit, contexts: Sequence[OperationContext], error: Exception) -> RuntimeError:
    """The error of a backward that reads contexts which another forward has written."""
    written = "; ".join(
        f"tensors ({', '.join(context.saved_names) or len(context.saved_tensors or ())}) and fields "
        f"({', '.join(sorted(set(vars(context)) - {field.name for field in dataclasses.fields(OperationContext)}))})"
        for context in contexts
    )
    return RuntimeError(
        f"{name}: expected contexts with what the backward of {op._get_name()} reads, got {written}, and {type(error).__name__}: {error}. "
        "Forward and backward must agree on what is saved, or register both as one fusion of forward and backward."
    )


def groups(pass_name: str, instances: Sequence[str], recipe: str | None, joint: Sequence[Fused]) -> list[Fused | Refused]:
    """Asks the functions of a pass for fused ops. `joint`: those of both directions, which the list that these functions get contains."""
    if not _functions[pass_name]:
        return []
    ops = [python_op.instance(name) for name in instances]
    if any(op is None for op in ops):
        return []
    found, refused = _returned(pass_name, ops, recipe, [(fused.first, fused.last, fused.get()[0]) for fused in joint])
    return [*refused, *[Fused(returned, pass_name, recipe) for returned in found]]


def fusions_made(ops: Sequence[BasicUnit], recipe: str) -> tuple[tuple[str, int, int, int], ...]:
    """What the functions of all passes make of `ops`: pass, first op, last op, number of the function."""
    quantized = None if recipe == "null" else recipe
    joint = _returned("joint", ops, quantized)[0]
    of_both = [returned[:3] for returned in joint]
    one_way = [(name, returned) for name in ("forward", "backward") for returned in _returned(name, ops, quantized, of_both)[0]]
    return tuple(
        (name, returned.first, returned.last, _registered[id(returned.function)])
        for name, returned in [*[("joint", returned) for returned in joint], *one_way]
    )


def _returned(
    pass_name: str, ops: Sequence[BasicUnit], recipe: str | None, joint: Sequence[tuple[int, int, FusedUnit]] = ()
) -> tuple[list[_Returned], list[Refused]]:
    """What the functions of a pass make of the ops, in which those of `joint`, each from its first basic op to its last, stand for theirs."""
    current: list[Any] = list(ops)
    for first, last, op in reversed(joint):
        current[first : last + 1] = [op]
    of_both = {id(op) for _, _, op in joint}
    made_by: dict[int, FusionFunction] = {}
    refused: list[Refused] = []
    for function in _functions[pass_name]:
        if isinstance(function, RuledFusion):
            refused += function.refusals(current)
        current = _call(function, pass_name, current, ops, recipe)
        for op in current:
            if op.is_fused_op and id(op) not in of_both:
                made_by.setdefault(id(op), function)
    found, first = [], 0
    for op in current:
        count = len(op.covered_ops())
        if id(op) in made_by:
            found.append(_Returned(first, first + count - 1, op, made_by[id(op)]))
        first += count
    return found, refused


def _call(function: FusionFunction, pass_name: str, current: list[Any], ops: Sequence[Any], recipe: str | None) -> list[Any]:
    name = name_of(function)
    try:
        returned = function(list(current), recipe=None if recipe is None else recipe_from_json(recipe))
    except Exception as error:
        _tell_of(error, f"{name}: expected a list of ops, got this error. It is a registered fusion.")
        raise
    if not isinstance(returned, list | tuple) or not all(isinstance(op, Unit) for op in returned):
        kinds = [type(op).__name__ for op in returned] if isinstance(returned, list | tuple) else type(returned).__name__
        raise TypeError(f"{name}: expected a list of fusible operations, got {kinds}. Return ops and FusedOperation objects.")
    covered = [basic for op in returned for basic in op.covered_ops()]
    if [id(op) for op in covered] != [id(op) for op in ops]:
        raise RuntimeError(
            f"{name}: expected no mismatch after fusing operations, but ops that cover {[op._get_name() for op in ops]} once and in order, got "
            f"{[op._get_name() for op in covered]}. Return every op of the list, alone or in one fused op."
        )
    for op in returned:
        if op.is_fused_op:
            _check_directions(op, pass_name, name)
    return list(returned)


def _tell_of(error: Exception, text: str) -> None:
    """Beside the error, which is the user's own."""
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(text)


def _check_directions(op: FusedUnit, pass_name: str, name: str) -> None:
    if pass_name in ("joint", "forward") and op._forward_prefix != "fuser":
        raise TypeError(f"{name}: expected {op._get_name()} with a forward, got none. Define fuser_forward, or fuser_forward_compute and fuser_forward_save_ctx.")
    if pass_name in ("joint", "backward") and type(op).fuser_backward is Unit.fuser_backward:
        raise TypeError(f"{name}: expected {op._get_name()} with a backward, got none. Define fuser_backward.")
