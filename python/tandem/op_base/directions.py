"""Forward and backward of an op of the library as methods. Subclasses in Python call them through `super()`, fused ops on their basic ops."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from tandem import _C
from tandem.op_base import main_grad
from tandem.op_base.context import OperationContext
from tandem.recipe_state import history_length

Tensors = tuple[torch.Tensor | None, ...]


class Call(NamedTuple):
    """The circumstances of a forward. Its context keeps them, because backward may run under another recipe and with other flags."""

    recipe: str
    training: bool
    requested: tuple[bool, ...]  # whether the gradient is required of x, of each extra input, and of each parameter


Draws = list[tuple[Any, torch.Tensor]]  # ops of the library, and tensors, such as seeds, that each has drawn from a generator
_draws: contextvars.ContextVar[Draws | None] = contextvars.ContextVar("draws", default=None)


@contextlib.contextmanager
def drawing() -> Iterator[Draws]:
    """Records what ops draw in this thread, while a forward of a user runs."""
    draws: Draws = []
    token = _draws.set(draws)
    try:
        yield draws
    finally:
        _draws.reset(token)


def description_of(entries: list[_C.OpEntry], recipe: str = "null", *, training: bool = True, fusions_version: int = 0) -> str:
    """The description of a call without budget and workspaces. `fusions_version` 0: no fusions of users."""
    terms: dict[str, Any] = {"required_fusions": [], "process": "", "memory_budget": None, "cache_weights": False}
    return _C.write_description(_C.write_ops(entries), recipe, training=training, fusions_version=fusions_version, **terms)


@functools.lru_cache(maxsize=256)
def _description(
    kind: str, options: str, params: int, joins: tuple[int, ...], recipe: str, training: bool, in_place: bool, fusions_version: int
) -> str:
    entry = _C.OpEntry(op=kind, options=json.loads(options), params=list(range(params)), joins=list(joins), in_place=in_place)
    return description_of([entry], recipe, training=training, fusions_version=fusions_version)


class DirectionsMixin:
    """Forward and backward of a single op of the library. They record nothing for autograd and fuse nothing."""

    _context_quantizers: ClassVar[tuple[str, ...]] = ()  # attributes that TransformerEngine sets to quantizers; here they are None

    def op_forward_compute(
        self: Any,
        input_: torch.Tensor,
        *,
        prev_op_grad_output_quantizer: Any = None,
        next_op_input_quantizer: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        """The output, and what `op_backward` reads: for an op of the library, the tensors that the documentation of fusions names.

        Args:
            input_: x.
            prev_op_grad_output_quantizer, next_op_input_quantizer: None, because a recipe quantizes where its products read.
            kwargs: none for an op of the library.
        """
        self._check_is_written("op_forward", kwargs)
        self._check_single("op_forward")
        (y,), saved = self._library_forward_of(input_, ())
        return y, saved

    def op_forward_save_ctx(self: Any, ctx: OperationContext, input_: torch.Tensor, tensors_to_save: Any, **kwargs: Any) -> None:
        """Saves what `op_backward` reads on `ctx`.

        Args:
            ctx: the context of the call.
            input_: x.
            tensors_to_save: what `op_forward_compute` returned; ValueError if their number differs.
            kwargs: the keyword arguments of the call.
        """
        self._check_is_written("op_forward", {})
        names = self._context
        if len(tensors_to_save) != len(names):
            raise ValueError(
                f"{self._get_name()}: expected {len(names)} tensors to save ({', '.join(names) or 'none'}), got {len(tensors_to_save)}. Pass what "
                "op_forward_compute has returned."
            )
        ctx.save_for_backward(**dict(zip(names, tensors_to_save, strict=True)))
        of_params = [getattr(self, name).requires_grad for name in self._parameter_names]
        ctx.__dict__["_call"] = Call(_C.in_force.recipe, self.training, (True, *[True] * self.num_extra_inputs, *of_params))
        ctx.__dict__.update(self._context_fields(ctx, tensors_to_save, input_))

    def op_forward(
        self: Any,
        ctx: OperationContext,
        input_: torch.Tensor,
        *,
        prev_op_grad_output_quantizer: Any = None,
        next_op_input_quantizer: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Computes the output, and saves what `op_backward` reads on `ctx`: the one-piece forward.

        Args:
            ctx: the context of the call.
            input_: x.
            prev_op_grad_output_quantizer, next_op_input_quantizer: None.
            kwargs: the caller's arguments of the op, `op_kwargs` of a container.
        """
        y, saved = DirectionsMixin.op_forward_compute(self, input_, **kwargs)
        DirectionsMixin.op_forward_save_ctx(self, ctx, input_, saved)
        return y

    def op_backward(self: Any, ctx: OperationContext, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, Iterable[torch.Tensor | None]]:
        """grad_x, and the gradients of the parameters in the order of `parameters()`. None stands for zeros.

        Args:
            ctx: the context that forward filled: `saved_tensors` and attributes.
            grad_output: the gradient of the output.
        """
        self._check_is_written("op_backward", {})
        self._check_single("op_backward")
        grad_x, grad_params, _ = self._library_backward_of(ctx, (grad_output,))
        return grad_x, grad_params

    def fuser_forward_compute(
        self: Any, input_: torch.Tensor, *, basic_op_extra_inputs: Sequence[Tensors] = ((),), basic_op_kwargs: Sequence[dict[str, Any]] = ({},), **unused: Any
    ) -> tuple[torch.Tensor, Any, Any]:
        """The output, the extra outputs, and what `fuser_backward` reads, each in a list of one entry.

        Args:
            input_: x.
            basic_op_extra_inputs: the extra inputs, in a list of one entry.
            basic_op_kwargs: none for an op of the library.
            unused: quantizers, which are None.
        """
        self._check_is_written("fuser_forward", basic_op_kwargs[0])
        (y, *extra_outputs), saved = self._library_forward_of(input_, basic_op_extra_inputs[0])
        return y, [tuple(extra_outputs)], [saved]

    def fuser_forward_save_ctx(
        self: Any, basic_op_ctxs: Sequence[OperationContext], input_: torch.Tensor, tensors_to_save: Any, **unused: Any
    ) -> None:
        """Saves what `fuser_backward` reads on the context.

        Args:
            basic_op_ctxs: the context of the call, in a list of one entry.
            input_: x.
            tensors_to_save: what `fuser_forward_compute` returned.
            unused: the keyword arguments of `fuser_forward_compute`.
        """
        DirectionsMixin.op_forward_save_ctx(self, basic_op_ctxs[0], input_, tensors_to_save[0])

    def fuser_forward(
        self: Any,
        basic_op_ctxs: Sequence[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: Sequence[Tensors] = ((),),
        prev_op_grad_output_quantizer: Any = None,
        next_op_input_quantizer: Any = None,
        basic_op_kwargs: Sequence[dict[str, Any]] = ({},),
    ) -> tuple[torch.Tensor, Iterable[Iterable[torch.Tensor]]]:
        """The output, and the extra outputs in a list of one entry. It calls `op_forward` if the op defines that method.

        Args:
            basic_op_ctxs: the context of the call, in a list of one entry.
            input_: x.
            basic_op_extra_inputs: the extra inputs, in a list of one entry.
            prev_op_grad_output_quantizer, next_op_input_quantizer: None.
            basic_op_kwargs: the caller's arguments of the op, in a list of one entry.
        """
        if self._forward_prefix == "op":
            self._check_single("op_forward")
            quantizers = {"prev_op_grad_output_quantizer": prev_op_grad_output_quantizer, "next_op_input_quantizer": next_op_input_quantizer}
            return self.op_forward(basic_op_ctxs[0], input_, **quantizers, **basic_op_kwargs[0]), [()]
        compute = DirectionsMixin.fuser_forward_compute
        y, extra_outputs, saved = compute(self, input_, basic_op_extra_inputs=basic_op_extra_inputs, basic_op_kwargs=basic_op_kwargs)
        DirectionsMixin.fuser_forward_save_ctx(self, basic_op_ctxs, input_, saved)
        return y, extra_outputs

    def fuser_backward(
        self: Any, basic_op_ctxs: Sequence[OperationContext], grad_output: torch.Tensor, *, basic_op_grad_extra_outputs: Sequence[Tensors] = ((),)
    ) -> tuple[torch.Tensor | None, list[Any], list[Any]]:
        """grad_x, the gradients of the parameters and the gradients of the extra inputs, the last two in lists of one entry. It calls
        `op_backward` if the op defines that method.

        Args:
            basic_op_ctxs: the context that forward filled, in a list of one entry.
            grad_output: the gradient of the output.
            basic_op_grad_extra_outputs: the gradients of the extra outputs, in a list of one entry.
        """
        if self._forward_prefix == "op" or type(self).op_backward is not DirectionsMixin.op_backward:
            self._check_single("op_backward")
            grad_x, grad_params = self.op_backward(basic_op_ctxs[0], grad_output)
            return grad_x, [grad_params], [()]
        self._check_is_written("fuser_backward", {})
        grad_x, grad_params, grad_inputs = self._library_backward_of(basic_op_ctxs[0], (grad_output, *basic_op_grad_extra_outputs[0]))
        return grad_x, [grad_params], [grad_inputs]

    def _check_is_written(self: Any, method: str, kwargs: Any) -> None:
        """Raises NotImplementedError for an op in Python that lacks `method`, and TypeError for arguments of an op of the library."""
        direction = "forward" if "forward" in method else "backward"
        if not self._kind:
            prefix = method.partition("_")[0]
            pair = f"{method}, or {prefix}_forward_compute and {prefix}_forward_save_ctx" if direction == "forward" else method
            instead = ", or fuser_backward" if method == "op_backward" else ""
            raise NotImplementedError(
                f"{type(self).__qualname__}: expected a {direction} written in Python, got none. Define {pair}{instead}."
            )
        if kwargs:
            raise TypeError(f"{type(self).__qualname__}: expected no arguments for an op of the library, got {', '.join(kwargs)}. Define {method} to take them.")

    def _check_single(self: Any, method: str) -> None:
        if self.num_extra_inputs or self.num_extra_outputs:
            raise RuntimeError(
                f"{self._get_name()}: expected an op without extra tensor inputs and outputs, got one with {self.num_extra_inputs} extra tensor inputs "
                f"and {self.num_extra_outputs} extra tensor outputs. It should override `{method.replace('op_', 'fuser_')}` instead of `{method}`; "
                "call that."
            )

    def _described(self: Any, params: int, call: Call) -> str:
        recipe = call.recipe if any(self._quantize_slots()) else "null"
        if history_length(recipe):
            raise NotImplementedError(
                f"{self._get_name()}: expected a recipe without a state where an op of the library is called by its parts, got one that keeps amaxes. "
                "Call the op in a pipeline, or use Float8CurrentScaling."
            )
        options = json.dumps(self._options(), sort_keys=True)  # unlike the values, texts tell -0.0 from 0.0
        in_place = getattr(self, "in_place", False)
        return _description(self._kind, options, params, self._joins, recipe, call.training, in_place, _C.fusions_version())

    def _library_forward_of(self: Any, x: torch.Tensor, extra: Sequence[torch.Tensor | None]) -> tuple[list[torch.Tensor], Tensors]:
        params = [getattr(self, name) for name in self._parameter_names]
        described = self._described(len(params), Call(_C.in_force.recipe, self.training, ()))
        outputs, saved = _C.op_forward(described, [x, *extra], params)
        draws = _draws.get()
        if draws is not None:
            draws += [(self, tensor) for name, tensor in zip(self._context, saved, strict=True) if name in self._drawn and tensor is not None]
        return outputs, tuple(saved)

    def _library_backward_of(self: Any, ctx: OperationContext, grads: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, Tensors, Tensors]:
        names = self._context
        saved = list(ctx.saved_tensors if ctx.saved_tensors is not None else ctx.to_save or ())
        if ctx.saved_names and set(ctx.saved_names) == set(names):
            saved = [saved[ctx.saved_names.index(name)] for name in names]
        if len(saved) != len(names):
            raise ValueError(
                f"{self._get_name()}: expected {len(names)} saved tensors on its context ({', '.join(names) or 'none'}), got {len(saved)}. Save what "
                "its own forward saves."
            )
        params = [getattr(self, name) for name in self._parameter_names]
        extra = self.num_extra_inputs
        call = getattr(ctx, "_call", None) or Call(_C.in_force.recipe, self.training, (True,) * (1 + extra + len(params)))
        if not getattr(ctx, "with_quantized_compute", True):
            call = call._replace(recipe="null")
        requested = [getattr(ctx, f"{name}_requires_grad", flag) for name, flag in zip(self._parameter_names, call.requested[1 + extra :], strict=True)]
        requested = self._asked_now(call, saved, grads[0], requested)
        like = next((tensor for tensor in (*saved, *grads) if tensor is not None and tensor.is_floating_point()), None)
        dtype = getattr(ctx, "dtype", None) or (like.dtype if like is not None else torch.get_default_dtype())
        gradients = _C.op_backward(
            self._described(len(params), call),
            saved,
            list(getattr(ctx, "input_shape", ())),
            dtype,
            [getattr(ctx, "input_requires_grad", call.requested[0]), *call.requested[1 : 1 + extra], *requested],
            list(grads),
            params,
        )
        return gradients[0], self._given_back(gradients[1 + extra :]), tuple(gradients[1 : 1 + extra])

    def _asked_now(self: Any, call: Call, saved: Sequence[torch.Tensor | None], grad_y: torch.Tensor | None, requested: list[bool]) -> list[bool]:
        """Which of the required gradients of parameters this backward computes."""
        return requested

    def _given_back(self: Any, gradients: Sequence[torch.Tensor | None]) -> Tensors:
        """The gradients of the parameters to return. A gradient that is added to a `main_grad` is replaced by its dummy gradient or None."""
        if not getattr(self, "accumulate_into_main_grad", False):
            return tuple(gradients)
        return tuple(
            [
                main_grad.absorb(self._get_name(), getattr(self, name), gradient) if gradient is not None and name in self._main_grad_names else gradient
                for name, gradient in zip(self._parameter_names, gradients, strict=True)
            ]
        )

    def _context_fields(self: Any, ctx: OperationContext, saved: Sequence[torch.Tensor | None], x: torch.Tensor | None) -> dict[str, Any]:
        """The attributes of a context besides tensors, under TransformerEngine's names. `x` is None if only backward is written in Python;
        `input_shape` then exists already if the op reads it."""
        like = next((tensor for tensor in (*saved, x) if tensor is not None and tensor.is_floating_point()), None)
        return {"dtype": like.dtype if like is not None else None, **dict.fromkeys(self._context_quantizers)}


class PartsMixin:
    """Forward and backward of an op that consists of ops of the library: it runs theirs, with the channels between them."""

    def fuser_forward(
        self: Any,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor | None, ...]],
        prev_op_grad_output_quantizer: Any = None,
        next_op_input_quantizer: Any = None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor | None, ...]]]:
        """Runs `fuser_forward` of the parts in order."""
        channels: dict[str, torch.Tensor | None] = {}
        results: list[Tensors] = []
        x = input_
        for part, context, given, own in zip(self.flat_ops(), basic_op_ctxs, basic_op_extra_inputs, basic_op_kwargs, strict=True):
            extra = tuple(
                [channels.get(channel, tensor) if tensor is None else tensor for channel, tensor in zip(part._extra_input_channels, given, strict=True)]
            )
            x, (outputs,) = part.fuser_forward([context], x, basic_op_extra_inputs=[extra], basic_op_kwargs=[own])
            results.append(tuple(outputs))
            channels.update({channel: output for channel, output in zip(part._extra_output_channels, results[-1], strict=True) if channel is not None})
        return x, results

    def fuser_backward(
        self: Any,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor | None, ...]],
    ) -> tuple[torch.Tensor | None, list[Any], list[Any]]:
        """Runs `fuser_backward` of the parts in reverse order."""
        channels: dict[str, torch.Tensor] = {}
        grad: torch.Tensor | None = grad_output
        grad_params: list[Any] = []
        grad_inputs: list[Any] = []
        for part, context, given in reversed(list(zip(self.flat_ops(), basic_op_ctxs, basic_op_grad_extra_outputs, strict=True))):
            extra = [channels.get(channel, tensor) if tensor is None else tensor for channel, tensor in zip(part._extra_output_channels, given, strict=True)]
            grad, (own_params,), (own_inputs,) = part.fuser_backward([context], grad, basic_op_grad_extra_outputs=[tuple(extra)])
            own_inputs = tuple(own_inputs or ())
            for channel, tensor in zip(part._extra_input_channels, own_inputs, strict=True):
                if channel is not None and tensor is not None:
                    channels[channel] = channels[channel] + tensor if channel in channels else tensor
            grad_params.insert(0, own_params)
            grad_inputs.insert(0, own_inputs)
        return grad, grad_params, grad_inputs
