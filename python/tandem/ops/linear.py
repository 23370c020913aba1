"""Products with a weight: `Linear`, and its basic ops `BasicLinear` and `Bias`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from tandem import _C
from tandem.arguments import Fixed, at_default, drawing, flag, parameter_dtype, positive
from tandem.op_base.checkpoint import drop_extra_state, rename
from tandem.op_base.context import OperationContext
from tandem.op_base.deferred import DeferredMixin
from tandem.op_base.directions import Call
from tandem.ops.collective import CollectivesMixin, SharedByRanks, _Collective, _replacement, checked_group, collectives, group_named, share, sizes_of_rank
from tandem.ops.composite import CompositeOperation
from tandem.ops.delayed import ProductOperation, add_gradient, product_into_main_grad
from tandem.ops.op import BasicOperation
from tandem.pipelines.buffers import Entry
from tandem.pipelines.joined import JoinedMixin, Split, split_sizes


class BasicLinear(CollectivesMixin, JoinedMixin, ProductOperation):
    """y = x weight^T: x [..., in_features], weight [out_features, in_features] -> y [..., out_features], in the dtype of autocast or of `weight`."""

    weight: torch.nn.Parameter

    _option_names = ("save_original_input",)
    _shown_names = ("in_features", "out_features")
    _main_grad_names: ClassVar[tuple[str, ...]] = ("weight",)
    _deferred_tensors = 7
    _context_quantizers = ("input_quantizer", "weight_quantizer", "grad_output_quantizer", "grad_input_quantizer")
    tensor_parallel_mode, tensor_parallel_size = Fixed(), Fixed()

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        userbuffers_options: dict[str, Any] | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
    ) -> None:
        """Makes a product with a weight, which `reset_parameters` draws.

        Args:
            in_features, out_features, device, dtype, rng_state_tracker_function: as for `Linear`.
            tensor_parallel_mode, tensor_parallel_group, sequence_parallel: as for `Linear`. The collectives are ops of the pipeline before and
                after this one.
            userbuffers_options: None or empty; another value raises NotImplementedError.
            accumulate_into_main_grad: whether the product adds the gradient of `weight` to `weight.main_grad` instead of returning it. If
                `weight.overwrite_main_grad` is true, the gradient overwrites `main_grad`. If `weight.grad_added_to_main_grad` exists, it is set to
                True and a dummy gradient is returned: of zeros if `weight.zero_out_wgrad` is true, otherwise uninitialized.
            delay_wgrad_compute: whether backward leaves the gradient of `weight` to `backward_dw`.
            save_original_input: whether forward keeps x instead of its codes under a recipe; backward quantizes x a second time, to the same bits.
                This saves memory if x is kept anyway, by its producer or for other readers, and costs a pass over x.
        """
        super().__init__()
        at_default("BasicLinear", userbuffers_options=userbuffers_options or None)
        self._rng_state_tracker_function = rng_state_tracker_function
        before, after, size = collectives("BasicLinear", tensor_parallel_mode, tensor_parallel_group, sequence_parallel)
        self._put_around(before, after)
        self.tensor_parallel_mode = tensor_parallel_mode if size > 1 else None
        self.tensor_parallel_size = size
        self._sequence_parallel = flag("BasicLinear", "sequence_parallel", sequence_parallel) and size > 1
        self.accumulate_into_main_grad = accumulate_into_main_grad
        self.delay_wgrad_compute = delay_wgrad_compute
        self.save_original_input = save_original_input
        self.local_in_features, self.local_out_features = sizes_of_rank("BasicLinear", tensor_parallel_mode, in_features, out_features, size)
        self.in_features, self.out_features = int(in_features), int(out_features)
        sizes = (self.local_out_features, self.local_in_features)
        self.weight = torch.nn.Parameter(torch.empty(sizes, device=device, dtype=parameter_dtype("BasicLinear", dtype)))
        self._give_first_values()

    def reset_parameters(self) -> None:
        """Draws `weight` from U(-1/sqrt(local_in_features), 1/sqrt(local_in_features))."""
        with drawing(self._rng_state_tracker_function):
            for weight in self._parts_of("weight"):
                torch.nn.init.kaiming_uniform_(weight, a=math.sqrt(5))

    def _compute_left(self, left: Entry, weights: Sequence[torch.nn.Parameter]) -> None:
        if self.accumulate_into_main_grad:
            return product_into_main_grad(weights[0], left)
        gradient = _C.left_grad_weight(list(left))
        for weight, part in zip(weights, gradient.split([weight.shape[0] for weight in weights]), strict=True):
            add_gradient(weight, part)
        return None

    def _asked_now(self, call: Call, saved: Sequence[torch.Tensor | None], grad_y: torch.Tensor | None, requested: list[bool]) -> list[bool]:
        if self.delay_wgrad_compute and grad_y is not None and any(requested):
            raise NotImplementedError(
                f"{self._get_name()}: expected delay_wgrad_compute=False where op_backward is called by Python, got True. Leave op_forward and "
                "op_backward to the library, or delay no gradient."
            )
        return requested

    def _context_fields(self, ctx: OperationContext, saved: Sequence[torch.Tensor | None], x: torch.Tensor | None) -> dict[str, Any]:
        call: Call = ctx._call
        override = "none" if call.recipe == "null" else json.loads(call.recipe).get("backward_override", "none")
        return {
            **super()._context_fields(ctx, saved, x),
            "with_quantized_compute": call.recipe != "null",
            "backward_override": None if override == "none" else override,
            "input_requires_grad": ctx.requires_grad and call.requested[0],
            "weight_requires_grad": ctx.requires_grad and any(call.requested[1:]),
        }


class Bias(JoinedMixin, DeferredMixin, BasicOperation):
    """y = x + bias: x [..., size], bias [size] -> y like x, in the dtype to which x and bias promote; under autocast, in the dtype of x."""

    bias: torch.nn.Parameter

    _shown_names = ("size",)
    _context_quantizers = ("grad_input_quantizer",)
    tensor_parallel, tensor_parallel_size = Fixed(), Fixed()

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel: bool = False,
        tensor_parallel_group: Any = None,
    ) -> None:
        """Makes a bias of zeros.

        Args:
            size: size of the last dimension of x, over all ranks.
            device: device of the parameter; None: torch's default device.
            dtype: dtype of the parameter; None: `torch.get_default_dtype()`.
            tensor_parallel: whether ranks share the last dimension, so that each has a part of x and of the bias.
            tensor_parallel_group: the group of these ranks; None: all processes.
        """
        super().__init__()
        group = checked_group("Bias", tensor_parallel_group) if flag("Bias", "tensor_parallel", tensor_parallel) else None
        ranks = 1 if group is None else group.size()
        self.tensor_parallel, self.tensor_parallel_size = ranks > 1, ranks
        self.size = positive("Bias", "size", size)
        self.local_size = share("Bias", "size", self.size, ranks)
        self.bias = torch.nn.Parameter(torch.empty(self.local_size, device=device, dtype=parameter_dtype("Bias", dtype)))
        self._group_name = None if group is None else group.group_name  # copies find the group by its name
        self._give_first_values()

    @property
    def tensor_parallel_group(self) -> Any:
        """The group whose ranks share the last dimension; None if no ranks do. It only sets the size of the bias: the ranks exchange nothing."""
        return None if self._group_name is None else group_named(self._group_name)

    @tensor_parallel_group.setter
    def tensor_parallel_group(self, group: Any) -> None:
        self._group_name = _replacement("Bias", group, self.tensor_parallel_size)


class Linear(SharedByRanks, JoinedMixin, CompositeOperation, torch.nn.Linear):  # type: ignore[misc]
    """y = x weight^T + bias: x [..., in_features] -> y [..., out_features], by `BasicLinear`, then `Bias`.

    This module owns the parameters `weight` and `bias`; it reads state dicts of TransformerEngine too. Its `basic_ops`, which fusion functions get, are
    views that own nothing. It is an instance of `torch.nn.Linear`, because other libraries look for that class. With `parameters_split`
    the parameters are `<name>_weight` and `<name>_bias` of each part, and `weight` and `bias` read these as one tensor.

    >>> import torch
    >>> from tandem import ops
    >>> linear = ops.Linear(4, 2)
    >>> linear(torch.zeros(3, 4))
    tensor([[0., 0.],
            [0., 0.],
            [0., 0.]], grad_fn=<TandemPipelineBackward>)
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None  # type: ignore[assignment]
    tensor_parallel_mode, tensor_parallel_size = Fixed(), Fixed()

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        parameters_split: Split | None = None,
    ) -> None:
        """Makes a product with a weight, drawn as torch.nn.Linear draws it, and a bias of zeros.

        Args:
            in_features: size of the last dimension of x.
            out_features: size of the last dimension of y.
            bias: whether there is a bias; False: `bias` is None.
            device: device of the parameters; None: torch's default device.
            dtype: dtype of the parameters; None: `torch.get_default_dtype()`.
            tensor_parallel_mode: "column": each rank holds a part of the output features and returns them. "row": each rank holds a part of the
                input features, and y is the sum over ranks, to which every rank adds its bias, as in TransformerEngine. None: one rank computes y.
            tensor_parallel_group: the group of these ranks; None: all processes.
            sequence_parallel: with a mode, whether the ranks share the first dimension of x or y outside of the product: x is gathered before a
                column-parallel product, y is scattered after a row-parallel one.
            rng_state_tracker_function: a function that returns an object whose `fork()` is a context in which the weight is drawn; None: the
                global generator draws.
            accumulate_into_main_grad: as for `BasicLinear`; with `parameters_split`, True raises ValueError.
            parameters_split: parts of the output features, in order: sizes by name, or names of parts of equal size. Each part has parameters
                of its own, adjacent in one memory, so that one product runs without copying them. None: no parts.
        """
        before, after, size = collectives("Linear", tensor_parallel_mode, tensor_parallel_group, sequence_parallel)
        local_in, local_out = sizes_of_rank("Linear", tensor_parallel_mode, in_features, out_features, size)
        parts = None
        if parameters_split is not None:
            ranks = size if tensor_parallel_mode == "column" else 1
            parts = split_sizes("Linear", "out_features", parameters_split, int(out_features), ranks)
            if accumulate_into_main_grad:
                raise ValueError(
                    "Linear: expected accumulate_into_main_grad=False with parameters_split, as a product adds to one main_grad, got True. "
                    "Build one Linear for each part."
                )
        linear = BasicLinear(
            local_in,
            local_out,
            device="meta",
            dtype=dtype,
            rng_state_tracker_function=rng_state_tracker_function,
            accumulate_into_main_grad=accumulate_into_main_grad,
        )
        added = [Bias(local_out, device="meta", dtype=dtype)] if bias else []
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = int(in_features), int(out_features)
        self.local_in_features, self.local_out_features = local_in, local_out
        self.tensor_parallel_mode = tensor_parallel_mode if size > 1 else None
        self.tensor_parallel_size = size
        self._sequence_parallel = flag("Linear", "sequence_parallel", sequence_parallel) and size > 1
        if parts is not None:
            self.__dict__["parameters_split"] = parts
        for part in (linear, *added):
            self._take(part, parts, {own: own for own in part._parameter_names}, device)
        if not added:
            self._lack("bias", "bias=False", "bias=True")
        self._own_parts([*before, linear, *added, *after])
        if type(self).reset_parameters is not Linear.reset_parameters and not any(param.is_meta for param in self.parameters()):
            Linear.reset_parameters(self)  # that of a subclass need not give each parameter a value
        self._give_first_values()

    def _weights_in_codes(self) -> tuple[Sequence[str], str]:
        return [name for name in self._parameters if name.endswith("weight")], BasicLinear._kind

    def _own_parts(self, parts: Sequence[BasicOperation]) -> None:
        self._own([(part, {name: name for name in part._parameter_names}) for part in parts])

    def _put_around(self, before: Sequence[BasicOperation], after: Sequence[BasicOperation]) -> None:
        self._own_parts([*before, *[part for part in self.basic_ops if not isinstance(part, _Collective)], *after])

    def reset_parameters(self) -> None:
        """Draws `weight` as torch.nn.Linear does, and sets `bias` to zero."""
        for part in self.basic_ops:
            if isinstance(part, (BasicLinear, Bias)):
                part.reset_parameters()
        self._bring_together()  # parts that were on the meta device have memory now

    def _transformer_engine_names(self) -> dict[str, str]:
        if self.__dict__.get("_joined"):  # TransformerEngine's Linear has no parts
            return {}
        return {"basic_ops.0.weight": "weight", "basic_ops.1.bias": "bias"}

    def _transformer_engine_states(self) -> list[str]:
        is_reduced = self.tensor_parallel_mode == "row"  # the reduction is an op of its own
        return [f"basic_ops.{index}." for index in range(1 + (self.bias is not None) + is_reduced)]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        rename(state_dict, prefix, self._transformer_engine_names())
        for owner in self._transformer_engine_states():
            drop_extra_state(state_dict, f"{prefix}{owner}_extra_state")
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        self._bring_together()  # load_state_dict(assign=True) may have replaced parts

    def extra_repr(self) -> str:
        parallel = f", tensor_parallel_mode={self.tensor_parallel_mode}" if self.tensor_parallel_mode else ""
        parts = f", parameters_split={self.__dict__['parameters_split']}" if self.__dict__.get("_joined") else ""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}{parallel}{parts}"
