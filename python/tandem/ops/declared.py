"""Declared fusions, which consist of a pattern, a rule that may refuse, and an implementation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tandem.op_base.base import BasicOpBase, OpBase
from tandem.op_base.context import OperationContext
from tandem.ops.op import FusedOperation
from tandem.user_ops.fusions import FusionHandle, Refused, register_ruled
from tandem.user_ops.styles import call_accepting

Kinds = type[BasicOpBase] | tuple[type[BasicOpBase], ...]
ByOp = Mapping[BasicOpBase, Any]


class DeclaredFusion:
    """A fusion function over lists of ops, which `register_fusion` creates from its arguments."""

    def __init__(
        self,
        name: str,
        pattern: Sequence[Kinds],
        forward: Callable[..., Any] | None,
        backward: Callable[..., Any] | None,
        refuse: Callable[..., str | None] | None,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise TypeError(f"register_fusion: expected a name, got {name!r}. Pass the text that explain shall show.")
        self.name = name
        self.pattern = [kinds if isinstance(kinds, tuple) else (kinds,) for kinds in pattern]
        for kinds in self.pattern:
            for kind in kinds:
                if not isinstance(kind, type) or not issubclass(kind, BasicOpBase):
                    shown = kind.__name__ if isinstance(kind, type) else repr(kind)
                    raise TypeError(
                        f"register_fusion: expected classes of basic ops in the pattern of {name!r}, got {shown}. A Linear is its BasicLinear and Bias."
                    )
        if not self.pattern or (forward is None and backward is None):
            missing = "no pattern" if not self.pattern else "neither forward nor backward"
            raise ValueError(f"register_fusion: expected a pattern and an implementation of {name!r}, got {missing}. Name the ops, and pass a function.")
        for what, function in (("forward", forward), ("backward", backward), ("refuse", refuse)):
            if function is not None and not callable(function):
                raise TypeError(f"register_fusion: expected {what} of {name!r} to be a function, got {type(function).__name__}. Pass a function of the ops.")
        self.forward: Any = forward
        self.backward: Any = backward
        self.refuse = refuse
        self.pass_name = "joint" if forward and backward else "forward" if forward else "backward"
        self.fused_class = type(name, (DeclaredOperation,), {"fusion": self})

    def __call__(self, ops: Sequence[OpBase], *, recipe: Any = None) -> list[OpBase]:
        found = list(ops)
        for index, window, reason in reversed(list(self._matches(ops))):
            if reason is None:
                found[index : index + len(window)] = [self.fused_class(window)]
        return found

    def refusals(self, ops: Sequence[OpBase]) -> list[Refused]:
        """The refusals of the rule for matches in this list."""
        found: list[Refused] = []
        for index, window, reason in self._matches(ops):
            if reason is not None:
                first = sum(len(op.covered_ops()) for op in ops[:index])
                found.append(Refused(first, first + len(window) - 1, self.name, reason))
        return found

    def _matches(self, ops: Sequence[OpBase]) -> Iterator[tuple[int, list[Any], str | None]]:
        """Each match: the index of its first op, its ops, and the reason if the rule refuses it. An op belongs to one match that is not refused."""
        index = 0
        while index + len(self.pattern) <= len(ops):
            window: list[Any] = [*ops[index : index + len(self.pattern)]]
            is_made = False
            if all(isinstance(op, kinds) for op, kinds in zip(window, self.pattern, strict=True)):
                reason = self._reason(window)
                is_made = reason is None
                yield index, window, reason
            index += len(window) if is_made else 1

    def _reason(self, window: Sequence[BasicOpBase]) -> str | None:
        try:
            reason = self.refuse(*window) if self.refuse is not None else None
        except Exception as error:
            raise RuntimeError(
                f"{self.name}: expected a reason or None from refuse, got {type(error).__name__}: {error}. It is a registered fusion."
            ) from error
        if reason is not None and not isinstance(reason, str):
            raise TypeError(f"{self.name}: expected a reason or None from refuse, got {type(reason).__name__}. Return a text.")
        return reason or None


def _parts(returned: Any, count: int) -> list[Any]:
    """The `count` values that an implementation may return, with None for those that it left out."""
    parts = list(returned) if isinstance(returned, tuple) else [returned]
    return [*parts, *[None] * (count - len(parts))]


def _by_op(what: Any, ops: Sequence[BasicOpBase], name: str, of: str) -> list[Any]:
    """The entries of a mapping in the order of `ops`, None for an op without an entry. Raises TypeError for other keys."""
    given: ByOp = what or {}
    if not isinstance(given, Mapping) or any(not any(op is known for op in ops) for known in given):
        raise TypeError(f"{name}: expected {of} by op of the pattern, got {type(what).__name__}. Return a dictionary whose keys are the ops that it was given.")
    return [next((entry for op, entry in given.items() if op is known), None) for known in ops]


class DeclaredOperation(FusedOperation):
    """A fused op that runs the implementations of a declared fusion."""

    fusion: DeclaredFusion

    def fuser_forward(
        self, basic_op_ctxs: list[OperationContext], input_: torch.Tensor, *, basic_op_extra_inputs: Any, **_: Any
    ) -> tuple[torch.Tensor, list[Any]]:
        """Runs `forward` of the fusion, and saves what it returns for that."""
        ops, name = self.covered_ops(), self.fusion.name
        y, saved, extra_outputs = _parts(call_accepting(self.fusion.forward, input_, *ops, optional={"extra_inputs": basic_op_extra_inputs}), 3)
        if self.fusion.pass_name == "joint":
            basic_op_ctxs[0].save_for_backward(*([saved] if isinstance(saved, torch.Tensor) else saved or ()))
        else:
            _save(basic_op_ctxs, ops, _by_op(saved, ops, name, "saved tensors"), input_)
        outputs = _by_op(extra_outputs, ops, name, "extra outputs")
        return y, [() if own is None else tuple(own) for own in outputs]

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: torch.Tensor, *, basic_op_grad_extra_outputs: Any
    ) -> tuple[Any, list[Any], list[Any]]:
        """Runs `backward` of the fusion."""
        ops, name = self.covered_ops(), self.fusion.name
        saved: Any = basic_op_ctxs[0].saved_tensors
        if self.fusion.pass_name == "backward":
            saved = {op: _named(context) for op, context in zip(ops, basic_op_ctxs, strict=True)}
        optional = {"saved": saved, "grad_extra_outputs": basic_op_grad_extra_outputs}
        grad_x, of_params, of_extras = _parts(call_accepting(self.fusion.backward, grad_output, *ops, optional=optional), 3)
        by_name = _by_op(of_params, ops, name, "gradients of parameters")
        params = [[(own or {}).get(param) for param, _ in op.named_parameters()] for op, own in zip(ops, by_name, strict=True)]
        extras = [
            (None,) * op.num_extra_inputs if own is None else tuple(own)
            for op, own in zip(ops, _by_op(of_extras, ops, name, "gradients of extra inputs"), strict=True)
        ]
        return grad_x, params, extras


def _save(contexts: Sequence[OperationContext], ops: Sequence[BasicOpBase], saved: Sequence[Any], x: torch.Tensor) -> None:
    """Saves tensors for the backward of each op by name. A name without a tensor becomes None, which fails if the op's backward reads it."""
    for context, op, own in zip(contexts, ops, saved, strict=True):
        given = dict(own or {})
        if not op.is_python_op:
            given = {**dict.fromkeys(op._context), **given}
            if op is ops[0] and "x" in given and given["x"] is None:
                given["x"] = x  # the pattern's input is known, so the implementation need not return it
        context.save_for_backward(**given)


def _named(context: OperationContext) -> dict[str, torch.Tensor | None]:
    names = context.saved_names or tuple([str(place) for place in range(len(context.saved_tensors))])
    return dict(zip(names, context.saved_tensors, strict=True))


def register_fusion(
    name: str,
    pattern: Sequence[Kinds],
    *,
    forward: Callable[..., Any] | None = None,
    backward: Callable[..., Any] | None = None,
    refuse: Callable[..., str | None] | None = None,
    prepend: bool = False,
) -> FusionHandle:
    """Registers a declared fusion: a pattern, an implementation, and a rule that may refuse.

    Where consecutive basic ops of a pipeline have the classes of the pattern and `refuse` returns no reason, the implementation replaces them.
    With `forward` alone it is a forward fusion, with `backward` alone a backward fusion, with both a joint fusion. The contracts of these are
    those of `register_forward_fusion`, `register_backward_fusion` and `register_forward_backward_fusion`.

    >>> import torch
    >>> from tandem import ops
    >>> def relu_scale(x, relu, scale):
    ...     return torch.relu(x) * scale.scale, {relu: {"x": x}}
    >>> handle = ops.register_fusion(
    ...     "relu_scale", [ops.ReLU, ops.ConstantScale], forward=relu_scale,
    ...     refuse=lambda relu, scale: "the factor is negative" if scale.scale < 0 else None,
    ... )
    >>> with handle:
    ...     box = ops.Sequential(ops.ReLU(), ops.ConstantScale(2.0))
    ...     y = box(torch.ones(2, 2))
    ...     box.fusions_made()
    ['relu_scale']

    Args:
        name: the name in `explain`, `require_fusion` and errors. A name that is registered already raises ValueError.
        pattern: for each op in order its class, or a tuple of classes.
        forward: `forward(x, *ops)` returns y, or y and what is saved. A forward fusion saves `{op: {name: tensor}}`, with the names under which
            the op's own forward saves each tensor, for every op that saves any; a joint fusion saves any tensors, which its backward gets.
            It may take `extra_inputs`, a tuple for each op, and then returns y, what is saved, and the extra outputs of each op that has any
            (`{op: (tensor, ...)}`).
        backward: `backward(grad_y, *ops, saved=...)` returns grad_x, or grad_x, the gradients of parameters (`{op: {name: gradient}}`) and the
            gradients of extra inputs (`{op: (gradient, ...)}`). `saved` is what forward saved: for a backward fusion `{op: {name: tensor}}`.
        refuse: `refuse(*ops)` returns the reason why these ops are not fused, which `explain` shows, or None to fuse them.
        prepend: whether the fusion is tried before the fusions registered so far.
    """
    declared = DeclaredFusion(name, pattern, forward, backward, refuse)
    return register_ruled(declared.pass_name, declared, name, declared.refusals, prepend)
