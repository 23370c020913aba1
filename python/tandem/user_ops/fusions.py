"""Fusions that users register as functions over lists of ops."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from typing_extensions import Self

from tandem.op_base.base import BasicOpBase, FusedOpBase, OpBase
from tandem.op_base.changes import structure
from tandem.op_base.context import OperationContext
from tandem.op_base.directions import Draws
from tandem.recipe import recipe_from_json
from tandem.user_ops import python_op
from tandem.user_ops.ghost import ghost_of

FusionFunction = Callable[..., Sequence[OpBase]]

_PASSES = {"joint": "forward_backward", "forward": "forward", "backward": "backward"}
_functions: dict[str, list[FusionHandle]] = {name: [] for name in _PASSES}
_numbers = itertools.count()


class Refused(NamedTuple):
    """A match of a fusion that its own rule refused."""

    first: int
    last: int
    name: str
    refusal: str


class FusionHandle:
    """A registered fusion. `remove()`, or the end of a `with` block, unregisters it; pipelines are then planned anew."""

    def __init__(self, pass_name: str, function: FusionFunction, name: str, refusals: Callable[[Sequence[OpBase]], list[Refused]] | None = None) -> None:
        """Makes a handle; the register functions do this.

        Args:
            pass_name: "joint", "forward" or "backward".
            function: the registered function.
            name: the name of the fusion.
            refusals: of a fusion with a rule that may refuse, a function that returns the matches in a list of ops that the rule refuses.
        """
        self._pass_name, self._function, self._name, self._refusals = pass_name, function, name, refusals
        self._number = next(_numbers)  # every registration has a new number

    def remove(self) -> None:
        """Unregisters the fusion. A second call does nothing."""
        if self in _functions[self._pass_name]:
            _functions[self._pass_name].remove(self)
            structure.change_fusions()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self.remove()


def register_forward_fusion(op_fusion_func: FusionFunction, prepend: bool = False) -> FusionHandle:
    """Registers a forward fusion.

    `op_fusion_func(ops, *, recipe)` is called once per plan. It gets the basic ops (a `Linear` is its `BasicLinear` and `Bias`). Fused ops that earlier
    functions of this pass or of the joint pass returned stand in the list in place of their `basic_ops`. It returns this list with
    `FusedOperation` objects in place of the runs of ops that they replace. It must not call the pipeline that is planned, and its result must
    depend on nothing but the ops and the recipe.

    A fused op of this pass must be interchangeable with the forward of the ops it covers, each of which keeps its own backward:

    - It computes the same output, and the extra outputs that ops outside of it or the caller read.
    - It saves on the context of each covered op what the op's own backward reads: for ops of the library the tensors listed in "A fusion in
      Python" (docs/extending.md), by name or in that order; for ops in Python the tensors that their own forward saves, with equal names
      or in equal order, and its attributes. A context that does not fit raises an error that names it.
    - `basic_op_extra_inputs` holds None for a channel from another covered op, because the fused op passes such tensors on itself.
    - If `ctx.requires_grad` is False, it saves nothing.
    - As `seed` of a `Dropout` it saves the tensor that the op's own forward drew in this call; another tensor raises an error.

    Args:
        op_fusion_func: the function.
        prepend: whether the function is called before those registered so far.
    """
    return _register("forward", op_fusion_func, prepend)


def register_backward_fusion(op_fusion_func: FusionFunction, prepend: bool = False) -> FusionHandle:
    """Registers a backward fusion. `op_fusion_func` is called as in `register_forward_fusion`.

    A fused op of this pass must be interchangeable with the backward of the ops it covers, whose own forwards ran:

    - `fuser_backward` finds on the context of each covered op what the op's own forward saved, and may read `ctx.saved_tensors` or
      `ctx.saved_tensor(name)`; an error names a context with other contents. A saved tensor that no required gradient depends on is None.
    - It returns the gradient of the input, of the parameters of each op and of its extra inputs, as far as they require one.
    - `basic_op_grad_extra_outputs` holds the gradients from readers outside of the fused op, None if there are none. For a channel between two
      covered ops, the fused op adds the gradients itself, and the gradient that it returns for such an extra input is ignored.
    - Under a recipe `x` and `weight` of products are QuantizedTensors with the codes that backward reads. A recipe that keeps amaxes refuses the fusion.
    - The ops' own backward runs instead of it if some of these gradients are not required, and the fusion could not compute the others alone.

    Args:
        op_fusion_func: the function.
        prepend: whether the function is called before those registered so far.
    """
    return _register("backward", op_fusion_func, prepend)


def register_forward_backward_fusion(op_fusion_func: FusionFunction, prepend: bool = False) -> FusionHandle:
    """Registers a joint fusion, of both directions. `op_fusion_func` is called as in `register_forward_fusion`.

    A fused op of this pass replaces both directions of the ops it covers, or neither:

    - `fuser_backward` finds on the contexts the tensors and attributes that `fuser_forward` saved. No other op reads them.
    - If no gradient is required, its forward runs alone.
    - Inputs, outputs, channels and gradients are as for forward and backward fusions.
    - Joint fusions come first: the ops that one covers take part in no other fusion. A user's forward or backward fusion comes before the
      joint fusions of the library.

    Args:
        op_fusion_func: the function.
        prepend: whether the function is called before those registered so far.
    """
    return _register("joint", op_fusion_func, prepend)


def any_fusions() -> bool:
    """Whether functions over lists of ops are registered, so that descriptions must name instances."""
    return any(_functions.values())


def _register(pass_name: str, function: FusionFunction, prepend: bool) -> FusionHandle:
    register = f"register_{_PASSES[pass_name]}_fusion"
    if not callable(function):
        raise TypeError(f"{register}: expected a function over the op list, got {type(function).__name__}. Pass op_fusion_func(ops, *, recipe).")
    name = getattr(function, "__qualname__", type(function).__qualname__).replace("<locals>.", "")
    if any(function == known._function for known in _functions[pass_name]):
        raise ValueError(f"{register}: expected a new function, got {name}, which is registered. Remove its handle first.")
    return _add(FusionHandle(pass_name, function, name), prepend)


def register_ruled(
    pass_name: str, function: FusionFunction, name: str, refusals: Callable[[Sequence[OpBase]], list[Refused]], prepend: bool
) -> FusionHandle:
    """Registers a fusion with a rule that may refuse. Raises ValueError if such a fusion with this name is registered."""
    if any(known._refusals is not None and known._name == name for handles in _functions.values() for known in handles):
        raise ValueError(f"register_fusion: expected a new name, got {name!r}, which is registered. Remove its handle first.")
    return _add(FusionHandle(pass_name, function, name, refusals), prepend)


def _add(handle: FusionHandle, prepend: bool) -> FusionHandle:
    handles = _functions[handle._pass_name]
    handles.insert(0 if prepend else len(handles), handle)
    structure.change_fusions()
    return handle


class _Returned(NamedTuple):
    """A fused op in the list that a pass returned, and the first function that returned it."""

    first: int  # index of its first basic op
    last: int
    op: FusedOpBase
    handle: FusionHandle


class Fused:
    """A fused op of a plan. The plan holds this object; as long as the plan lives, the first covered op holds the fused op. When the covered ops
    are gone, a copy of the fused op without parameters replaces it.

    The fused op covers the ops with indices `first` to `last` of the pipeline. `name` is the name of the function that returned it.
    """

    refusal = None

    def __init__(self, returned: _Returned, recipe: str | None) -> None:
        op = returned.op
        self.recipe = recipe or "null"
        self.pass_name, self.name = returned.handle._pass_name, returned.handle._name
        self.first, self.last = returned.first, returned.last
        self.key = f"{op._get_name()}@{next(_numbers)}"  # identifies the fused op in messages
        op.covered_ops()[0].__dict__.setdefault("_fused_ops", weakref.WeakKeyDictionary())[self] = op
        self._op = weakref.ref(op)
        self._ghost = copy.copy(op)
        self._ghost.__dict__["_modules"] = {**op._modules}
        ghosts = torch.nn.ModuleList()
        for index, basic in enumerate(op.covered_ops()):
            ghosts._modules[str(index)] = ghost_of(basic)
        self._ghost._modules["basic_ops"] = ghosts

    def get(self) -> tuple[FusedOpBase, Sequence[BasicOpBase]]:
        op = self._op()
        op = op if op is not None else self._ghost
        return op, op.covered_ops()


def written_context(fused: Fused, basic: BasicOpBase, context: OperationContext, draws: Draws) -> list[torch.Tensor | None]:
    """What a fused forward saved on the context of an op of the library, in the order in which the op's own backward reads it. A tensor from which
    backward draws numbers, such as a seed, must be the one that the op's own forward drew, because only that forward used the same numbers."""
    saved = context.to_save or ()
    if context.saved_names and set(context.saved_names) != set(basic._context) or len(saved) != len(basic._context):
        raise ValueError(
            f"{fused.name}: expected {len(basic._context)} saved tensors on the context of {basic._get_name()} "
            f"({', '.join(basic._context) or 'none'}), got {', '.join(context.saved_names) or len(saved)}. Save what its own forward saves."
        )
    by_name = dict(zip(context.saved_names or basic._context, saved, strict=True))
    for name in basic._drawn if basic.training else ():
        if not any(op is basic and tensor is by_name[name] for op, tensor in draws):
            raise ValueError(
                f"{fused.name}: expected as {name} of {basic._get_name()} what the op's own forward has drawn, from which its backward draws the same "
                "numbers again, got another. Call op_forward of the op in the fused forward, or register the fusion for both directions."
            )
    return [by_name[name] for name in basic._context]


def _attributes(context: OperationContext) -> tuple[str, ...]:
    """The names of the attributes that an op has set on a context."""
    return tuple(sorted(set(vars(context)) - {field.name for field in dataclasses.fields(OperationContext)}))


class _Saved(NamedTuple):
    """What a forward saves on the context of an op in Python."""

    tensors: tuple[tuple[torch.dtype, int] | None, ...]  # dtype and number of dimensions
    names: tuple[str, ...]  # names of the tensors, empty if they were saved without names
    fields: tuple[str, ...]

    @classmethod
    def on(cls, context: OperationContext) -> Self:
        tensors = tuple([None if tensor is None else (tensor.dtype, tensor.dim()) for tensor in context.to_save or ()])
        return cls(tensors, context.saved_names, _attributes(context))

    def fits(self, own: Self) -> bool:
        """Whether a backward that reads `own` finds all of it in this."""
        if not set(own.fields) <= set(self.fields) or len(self.tensors) != len(own.tensors):
            return False
        if not own.names:  # backward reads by position
            return self.tensors == own.tensors
        return sorted(zip(self.names, self.tensors, strict=False), key=str) == sorted(zip(own.names, own.tensors, strict=True), key=str)

    def __str__(self) -> str:
        names = self.names or ("",) * len(self.tensors)
        shown = [
            f"{name} {'None' if tensor is None else f'{tensor[0]} of {tensor[1]} dimensions'}".strip()
            for name, tensor in zip(names, self.tensors, strict=True)
        ]
        return f"tensors ({', '.join(shown)}) and fields ({', '.join(self.fields)})"


def note_saved(basic: BasicOpBase, context: OperationContext) -> None:
    """Records what an op's own forward saved, which its backward reads."""
    basic.__dict__["_saved"] = _Saved.on(context)


def check_saved(fused: Fused, basic: BasicOpBase, context: OperationContext) -> None:
    """Raises ValueError unless a fused forward saved for an op in Python what the op's own forward saves. If the op's own forward never ran,
    nothing is known to compare with, and its backward may fail."""
    own: _Saved | None = basic.__dict__.get("_saved")
    written = _Saved.on(context)
    if own is not None and not written.fits(own):
        raise ValueError(
            f"{fused.name}: expected on the context of {basic._get_name()} what its own forward leaves there, {own}, got {written}. Save the same."
        )


def unread(name: str, op: BasicOpBase | FusedOpBase, contexts: Sequence[OperationContext], error: Exception) -> RuntimeError:
    """The error for a backward that cannot read the contexts that another forward wrote."""
    written = "; ".join(
        f"tensors ({', '.join(context.saved_names) or len(context.saved_tensors or ())}) and fields ({', '.join(_attributes(context))})"
        for context in contexts
    )
    return RuntimeError(
        f"{name}: expected contexts with what the backward of {op._get_name()} reads, got {written}, and {type(error).__name__}: {error}. "
        "Forward and backward must agree on what is saved, or register both as one fusion of forward and backward."
    )


def groups(pass_name: str, instances: Sequence[str], recipe: str | None, joint: Sequence[Fused]) -> list[Fused | Refused]:
    """The fused ops that the functions of a pass return, and their refusals. The list that they get contains the fused ops `joint` of both directions."""
    if not _functions[pass_name]:
        return []
    ops = [python_op.instances.get(name) for name in instances]
    if any(op is None for op in ops):
        return []
    found, refused = _returned(pass_name, ops, recipe, [(fused.first, fused.last, fused.get()[0]) for fused in joint])
    return [*refused, *[Fused(returned, recipe) for returned in found]]


def fusions_made(ops: Sequence[BasicOpBase], recipe: str) -> tuple[tuple[str, int, int, int], ...]:
    """What the functions of all passes return for `ops`: pass, first op, last op, number of the function."""
    quantized = None if recipe == "null" else recipe
    found = _returned("joint", ops, quantized)[0]
    of_both = [returned[:3] for returned in found]
    for pass_name in ("forward", "backward"):
        found += _returned(pass_name, ops, quantized, of_both)[0]
    return tuple((returned.handle._pass_name, returned.first, returned.last, returned.handle._number) for returned in found)


def _returned(
    pass_name: str, ops: Sequence[BasicOpBase], recipe: str | None, joint: Sequence[tuple[int, int, FusedOpBase]] = ()
) -> tuple[list[_Returned], list[Refused]]:
    """What the functions of a pass return. Each of `joint` replaces the ops between its two indices in the list that they get."""
    current: list[Any] = list(ops)
    for first, last, op in reversed(joint):
        current[first : last + 1] = [op]
    of_both = {id(op) for _, _, op in joint}
    made_by: dict[int, FusionHandle] = {}
    refused: list[Refused] = []
    for handle in list(_functions[pass_name]):
        if handle._refusals is not None:
            refused += handle._refusals(current)
        current = _call(handle, current, ops, recipe)
        for op in current:
            if op.is_fused_op and id(op) not in of_both:
                made_by.setdefault(id(op), handle)
    found, first = [], 0
    for op in current:
        count = len(op.covered_ops())
        if id(op) in made_by:
            found.append(_Returned(first, first + count - 1, op, made_by[id(op)]))
        first += count
    return found, refused


def _call(handle: FusionHandle, current: list[Any], ops: Sequence[Any], recipe: str | None) -> list[Any]:
    name = handle._name
    try:
        returned = handle._function(list(current), recipe=None if recipe is None else recipe_from_json(recipe))
    except Exception as error:
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"{name}: expected a list of ops, got this error. It is a registered fusion.")
        raise
    if not isinstance(returned, list | tuple) or not all(isinstance(op, OpBase) for op in returned):
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
            _check_directions(op, handle._pass_name, name)
    return list(returned)


def _check_directions(op: FusedOpBase, pass_name: str, name: str) -> None:
    if pass_name in ("joint", "forward") and op._forward_prefix != "fuser":
        raise TypeError(f"{name}: expected {op._get_name()} with a forward, got none. Define fuser_forward, or fuser_forward_compute and fuser_forward_save_ctx.")
    if pass_name in ("joint", "backward") and type(op).fuser_backward is FusedOpBase.fuser_backward:
        raise TypeError(f"{name}: expected {op._get_name()} with a backward, got none. Define fuser_backward.")
