"""Runs code of users when the library executes a step in Python."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.utils.parametrize import is_parametrized

from tandem import _C
from tandem.op_base.base import BasicOpBase
from tandem.op_base.context import OperationContext
from tandem.op_base.directions import Call, drawing
from tandem.op_base.places import Names, holding, names, views_stand_in
from tandem.quantized.formats import Float8Quantizer
from tandem.quantized.quantizer import quantizer_of_text
from tandem.quantized.tensor import QuantizedTensor, assembled, in_directions
from tandem.recipe_state import history_length
from tandem.user_ops import fusions, python_op
from tandem.user_ops.ghost import ghost_of
from tandem.user_ops.identity import own_code

Tensors = Sequence[torch.Tensor | None]
Asked = tuple[bool, list[list[bool]], list[list[bool]]]  # whether a gradient is required of x, of the parameters of each op, of its extra inputs
_QUANTIZERS = {"prev_op_grad_output_quantizer": None, "next_op_input_quantizer": None}


class Forward(NamedTuple):
    """What a forward returns to the library."""

    y: torch.Tensor
    extra_outputs: list[Tensors]  # for each covered op
    saved: Sequence[Any]  # tensors; for a forward fusion, a tuple of tensors for each covered op
    # What backward gets besides: a _Fields for each covered op. The ops of a forward fusion have backwards of their own: for each op a list of these, or None.
    fields: Any


_Like = tuple[Sequence[int], torch.dtype, torch.device]  # what torch.zeros needs


def _like(tensor: Any) -> _Like | None:
    return (tensor.shape, tensor.dtype, tensor.device) if isinstance(tensor, torch.Tensor) else None  # the library refuses other values later


def _zeros(like: _Like | None) -> torch.Tensor | None:
    if like is None:
        return None
    shape, dtype, device = like
    return torch.zeros(shape, dtype=dtype, device=device)


class Gradients(NamedTuple):
    """What a backward returns to the library. None stands for zeros, which the library gets from `zeros` where it needs a tensor."""

    x: torch.Tensor | None
    params: list[Tensors]  # for each covered op
    extra_inputs: list[Tensors]  # for each covered op
    likes: dict[str, list[list[_Like | None]]]  # shapes, dtypes and devices by field of this class

    def zeros(self, field: str, op: int, place: int) -> torch.Tensor | None:
        """The zeros that a None stands for; None if their sizes are unknown."""
        return _zeros(self.likes[field][op][place])


@dataclass
class _Fields:
    """What one call of an op passes to its backward besides tensors. It lives in the autograd node, so it holds no module but a ghost without parameters."""

    context: OperationContext
    count: int  # number of tensors of the context
    ghost: Any  # None inside a fusion of both directions, which has ghosts of its own
    y_like: _Like | None  # None inside a fusion, but for its last op
    x_like: _Like | None  # None inside a fusion, but for its first op
    extra_likes: list[_Like | None]
    buffers: Tensors  # the tensors that replaced the op's buffers in a trace
    written_by: str  # name of the fusion whose forward ran instead of the op's own, or empty
    names: Names  # names of the parameters and buffers in forward: the op may have others now, and a ghost has none

    def context_with(self, tensors: Iterable[torch.Tensor | None]) -> OperationContext:
        """The context that backward gets."""
        context = OperationContext()
        context.__dict__.update(self.context.__dict__)
        context.saved_tensors = tuple(tensors)
        return context


def _names_of(ops: Sequence[BasicOpBase], params: Sequence[Tensors]) -> list[Names]:
    """The names of the tensors that a pipeline passes to its ops. It passes buffers only in a trace."""
    found = []
    for op, own in zip(ops, params, strict=True):
        named = names(op, "_parameters")
        expected = len(named)
        if len(own) > expected:
            named += names(op, "_buffers")
        if len(own) != len(named):
            op._tell()
            raise RuntimeError(
                f"{op._get_name()}: expected the {len(own)} parameters with which its pipeline was planned, got an op with {expected}. It is "
                "planned again at the next call; assign parameters to attributes of the op itself, and not in forward."
            )
        found.append(named)
    return found


@contextlib.contextmanager
def _standing_in(ops: Sequence[BasicOpBase], params: Sequence[Tensors], named: Sequence[Names]) -> Iterator[None]:
    """Replaces the modules' own parameters by the tensors of this call if they differ: in a trace, or when ghosts run backward."""
    replaced = []
    for op, own, own_names in zip(ops, params, named, strict=True):
        for same, tensor in zip(own_names, own, strict=True):
            for path, known in same:
                module, name = holding(op, path, known)
                tensors = next((held for held in (module._parameters, module._buffers) if name in held), vars(module))
                if tensors.get(name) is not tensor:
                    replaced.append((tensors, name, tensors.get(name), tensor))
                    tensors[name] = tensor
    try:
        yield
        for tensors, name, _, tensor in replaced:
            if tensors.get(name) is not tensor:
                raise RuntimeError(
                    f"{type(op).__qualname__}: expected {name} to be written in place in compiled code, got another tensor assigned to it. "
                    f"Use self.{name}.copy_(...)."
                )
    finally:
        for tensors, name, own_tensor, _ in reversed(replaced):
            tensors[name] = own_tensor


def _check_parameters(op: BasicOpBase) -> None:
    """Raises RuntimeError if a parameter is computed from others: a backward in Python would return its gradient as the gradient of those."""
    if not op.is_python_op or views_stand_in(op):
        return
    computed = [*op.parametrizations] if is_parametrized(op) else []
    attributes = [(name, value) for name, value in vars(op).items() if name not in op._parameters]  # FSDP1 stores views as plain attributes
    computed += [name for name, value in attributes if isinstance(value, torch.Tensor) and value.grad_fn is not None]
    if computed:
        raise RuntimeError(
            f"{op._get_name()}: expected parameters of its own where gradients are needed, got {computed[0]}, which is computed from others (a "
            "parametrization, pruning, a norm): op_backward would give them its gradient as theirs. Compute it in the op's forward and "
            "op_backward, or make it permanent."
        )


@contextlib.contextmanager
def _telling_of_constants(op: Any) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if "convert all Tensors to FakeTensors" not in str(error):
            raise
        raise RuntimeError(
            f"{op._get_name()}: expected parameters and buffers in compiled code, got a tensor that is a plain attribute or a global. Register "
            "it with register_buffer."
        ) from error


def _live(key: Any, given: list[Any]) -> tuple[Any, tuple[BasicOpBase], list[Any]]:
    """The op that a key refers to, a tuple of it as covered op, and the arguments of its forward. Raises RuntimeError if the op is gone."""
    op, kwargs = python_op.live_op(key)
    if op is None:
        raise RuntimeError(
            f"{key.partition('#')[0]}: expected an op that is alive and as it was when it was described, got none. Keep the module that holds it."
        )
    return op, (op,), [given[0] or kwargs]


def _own(target: str | fusions.Fused, basics: Sequence[Any]) -> Sequence[Any]:
    """The ops whose identity `own_code` keeps: all ops of a fusion, and an op whose compiled code other ops may share."""
    return basics if isinstance(target, fusions.Fused) or python_op.is_shared(target) else ()


def _context_of(op: BasicOpBase, saved: Tensors, recipe: str, requested: tuple[bool, ...], shape: Sequence[int] | None) -> OperationContext:
    """The context of an op of the library after its own forward. `shape` is the shape of x if the op's backward reads it."""
    context = OperationContext.of(op._context, saved)
    keeps_amaxes = history_length(recipe) != 0  # then no covered op quantizes, because backward fusions of such ops are refused
    context.__dict__["_call"] = Call("null" if keeps_amaxes else recipe, op.training, requested)
    if shape is not None:
        context.__dict__["input_shape"] = torch.Size(shape)
    context.__dict__.update(op._context_fields(context, saved, None))
    return context


def _asked_of(ops: Sequence[BasicOpBase], requested: Asked) -> list[tuple[bool, ...]]:
    """For each op of a fused backward, which gradients are required: also those of x and of extra inputs that earlier ops of the fusion need."""
    is_requested, params, extra_inputs = requested
    made: set[str | None] = set()
    found = []
    for op, own_params, own_inputs in zip(ops, params, extra_inputs, strict=True):
        of_inputs = [
            flag or (is_requested and channel is not None and channel in made) for flag, channel in zip(own_inputs, op._extra_input_channels, strict=True)
        ]
        found.append((is_requested, *of_inputs, *own_params))
        is_requested = is_requested or any(own_params) or any(own_inputs)
        made.update(op._extra_output_channels)
    return found


def _run_forward(op: Any, contexts: list[OperationContext], x: torch.Tensor, extras: list[Tensors], kwargs: list[dict[str, Any]]) -> Any:
    """Calls the forward of an op in Python by its prefix, `fuser_` or `op_`."""
    if op._forward_prefix == "op":
        styled = _QUANTIZERS if op._styles["op"] == "one-piece" else {}
        return op.op_forward(contexts[0], x, **styled, **kwargs[0]), [()]
    arguments = {"basic_op_extra_inputs": [tuple(e) for e in extras], **_QUANTIZERS, "basic_op_kwargs": kwargs}
    return op.fuser_forward(contexts, x, **arguments)


def _run_backward(op: Any, contexts: list[OperationContext], grad_y: torch.Tensor, grad_extras: Sequence[Tensors]) -> Any:
    if op._forward_prefix == "op" and not op.is_fused_op:
        grad_x, grad_params = op.op_backward(contexts[0], grad_y)
        return grad_x, [_as_list(grad_params)], [()]
    return op.fuser_backward(contexts, grad_y, basic_op_grad_extra_outputs=[tuple(g) for g in grad_extras])


def _as_list(grads: Any) -> list[torch.Tensor | None]:
    if grads is None:
        return []
    return [grads] if isinstance(grads, torch.Tensor) else list(grads)


class Runtime:
    """The object that the library calls. src/bindings/python_ops.cpp defines the arguments."""

    def forward(
        self,
        target: str | fusions.Fused,
        x: torch.Tensor,
        extras: list[Tensors],
        params: list[Tensors],
        save: bool,
        given: list[dict[str, Any] | None],
    ) -> Forward:
        fused: Any = target if isinstance(target, fusions.Fused) else None
        op, basics, given = (*fused.get(), given) if fused is not None else _live(target, given)
        for basic in basics if save else ():
            _check_parameters(basic)
        contexts = [OperationContext(requires_grad=save) for _ in basics]
        named = _names_of(basics, params)
        noted = drawing() if fused is not None else contextlib.nullcontext([])  # nobody compares the draws of an op's own forward
        with _telling_of_constants(op), _standing_in(basics, params, named), own_code(_own(target, basics)), noted as draws:
            y, extra_outputs = _run_forward(op, contexts, x, extras, [dict(arguments or {}) for arguments in given])
        outputs: list[Tensors] = [tuple(group) for group in extra_outputs]
        if not save:
            return Forward(y, outputs, [], None)
        if fused is None and fusions.any_fusions():
            fusions.note_saved(op, contexts[0])
        is_one_way = fused is not None and fused.pass_name == "forward"
        saved: list[Tensors] = []
        fields: list[_Fields | None] = []
        for index, (basic, context, own_params, own_names, own_extras) in enumerate(zip(basics, contexts, params, named, extras, strict=True)):
            if is_one_way and not basic.is_python_op:
                saved.append(fusions.written_context(fused, basic, context, draws))
                fields.append(None)
                continue
            if is_one_way:
                fusions.check_saved(fused, basic, context)
            saved.append(tuple(context.to_save or ()))
            context.to_save = None
            ghost = ghost_of(basic) if fused is None or is_one_way else None
            y_like, x_like = _like(y) if index == len(basics) - 1 else None, _like(x) if index == 0 else None
            buffers = own_params[len(names(basic, "_parameters")) :]
            likes = [_like(tensor) for tensor in own_extras]
            fields.append(_Fields(context, len(saved[-1]), ghost, y_like, x_like, likes, buffers, fused.name if is_one_way else "", own_names))
        if is_one_way:
            return Forward(y, outputs, saved, [None if own is None else (own,) for own in fields])
        return Forward(y, outputs, [tensor for tensors in saved for tensor in tensors], tuple(fields))

    def backward(
        self,
        target: str | fusions.Fused,
        saved: Any,
        fields: Any,
        grad_y: torch.Tensor | None,
        grad_extras: list[Tensors],
        params: list[Tensors],
        requested: Asked,
        shapes: list[Sequence[int] | None],
    ) -> Gradients:
        fused: Any = target if isinstance(target, fusions.Fused) else None
        if fused is not None:
            op, basics = fused.get()
        else:
            op, _ = python_op.live_op(target)  # type: ignore[arg-type]
            op = op if op is not None else fields[0].ghost
            basics = (op,)
        reader = fused.name if fused is not None and fused.pass_name == "backward" else ""
        if isinstance(fields, tuple):  # one forward wrote the contexts of all ops
            rest, shapes = iter(saved), [None] * len(basics)
            saved = [[next(rest) for _ in range(own.count)] for own in fields]
            if grad_y is None:
                grad_y = _zeros(fields[-1].y_like)
            reader = fields[0].written_by
        else:
            fields = [None if own is None else own[0] for own in fields]
        contexts, of_params, named, extra_likes = [], [], [], []
        recipe = "null" if fused is None else fused.recipe
        given = zip(basics, saved, fields, params, _asked_of(basics, requested), shapes, strict=True)
        for basic, tensors, own, own_params, own_asked, shape in given:
            contexts.append(_context_of(basic, tensors, recipe, own_asked, shape) if own is None else own.context_with(tensors))
            of_params.append([*own_params, *(() if own is None else own.buffers)])
            named += _names_of((basic,), of_params[-1:]) if own is None else [own.names]
            extra_likes.append([None] * basic.num_extra_inputs if own is None else own.extra_likes)
        first = fields[0].x_like if fields[0] is not None else _like(dict(zip(basics[0]._context, saved[0], strict=True)).get("x"))
        if grad_y is None:
            raise RuntimeError(f"{op._get_name()}: expected a gradient of the output, got none. Use all outputs of the pipeline.")
        with _standing_in(basics, of_params, named), own_code(_own(target, basics)):
            try:
                grad_x, grad_params, grad_inputs = _run_backward(op, contexts, grad_y, grad_extras)
            except (ValueError, AttributeError, TypeError, IndexError) as error:
                if not reader or not any(basic.is_python_op for basic in basics):
                    raise
                raise fusions.unread(reader, op, contexts, error) from error
        likes = {"x": [[first]], "params": [[_like(tensor) for tensor in own] for own in of_params], "extra_inputs": extra_likes}
        return Gradients(grad_x, [_as_list(group) for group in grad_params], [_as_list(group) for group in grad_inputs], likes)

    def in_codes(
        self, parts: list[torch.Tensor], text: str, is_of_columns: bool, serves_both: bool, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> QuantizedTensor:
        """A quantized kept value in the form in which the context of a fused op has it."""
        codes = [*parts, None][:3]
        quantizer = quantizer_of_text(text, serves_both or not is_of_columns, serves_both or is_of_columns)
        return in_directions([*codes, *codes], quantizer, dtype, shape)

    def written_in_backward(self, state: torch.Tensor) -> None:
        """Tells AOTAutograd, in a trace, that backward reads the current value of a tensor, which another backward may have written since forward."""
        proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
        for proxy in proxies._get_proxies(state) if hasattr(proxies, "_get_proxies") else ():  # torch 2.11 lacks this function
            proxy.node.meta["saved_tensor_with_no_vc_check"] = True

    groups = staticmethod(fusions.groups)


def quantized(parts: list[torch.Tensor | None], text: str, serves_both: bool, dtype: torch.dtype, shape: list[int]) -> QuantizedTensor:
    """An output as a QuantizedTensor. If its scale was given in advance, its quantizer has that scale and an amax of its own."""
    both = [*parts[:3], *parts[:3]] if serves_both else parts
    quantizer = quantizer_of_text(text, both[0] is not None, both[3] is not None)
    if isinstance(quantizer, Float8Quantizer):
        scale = both[1]
        assert scale is not None
        quantizer = quantizer._holding([scale.reciprocal(), torch.zeros_like(scale)])
    return assembled(both, quantizer, dtype, shape)


def install() -> None:
    """Makes the library call this module. The package does so once, when it is imported."""
    _C.set_runtime(Runtime())
