"""A linear layer with one weight for each group of rows, such as the experts of a mixture."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch._guards import detect_fake_mode

from tandem import _C
from tandem.arguments import Fixed, drawing, flag, parameter_dtype, positive
from tandem.op_base.directions import Call
from tandem.ops.delayed import ProductOperation, add_gradient, add_to_main_grad
from tandem.pipelines.buffers import Entry
from tandem.quantized.quantizer import seed_for

OUTPUT_BUFFER_KEY = "output"
GRAD_INPUT_BUFFER_KEY = "grad_input"


class GroupedLinear(ProductOperation):
    """y_g = x_g weight_g^T + bias_g for the consecutive rows x_g of each group g. Rows of y behind the last group are zeros.

    x is [..., in_features], y [..., out_features]. The extra input `splits` holds the number of rows of each group: integers [num_groups], whose
    sum is at most the rows of x. With `bias` and `scale_bias` a second extra input `scales` holds the factor of the bias for each row. A call may
    pass tensors to write: `experts(x, splits, output=y, grad_input=grad_x)`, in a `Sequential` `op_kwargs={experts: {"output": y}}`.

    >>> import torch
    >>> from tandem import ops
    >>> experts = ops.GroupedLinear(2, 4, 3)
    >>> experts(torch.zeros(5, 4), torch.tensor([3, 2])).shape
    torch.Size([5, 3])
    """

    num_groups, single_grouped_weight, single_grouped_bias, scale_bias = Fixed(), Fixed(), Fixed(), Fixed()
    _deferred_tensors = 6

    _option_names = ()  # `_options` names attributes that are fixed
    _call_buffers: ClassVar[dict[str, str]] = {OUTPUT_BUFFER_KEY: "writes_output", GRAD_INPUT_BUFFER_KEY: "writes_grad_input"}

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        delay_wgrad_compute: bool = False,
        scale_bias: bool = False,
    ) -> None:
        """Makes `num_groups` products, each with a weight drawn as torch.nn.Linear draws it and a bias of zeros.

        Args:
            num_groups: number of weights: `weight0`, `weight1`, ...
            in_features: size of the last dimension of x.
            out_features: size of the last dimension of y.
            bias: whether there are biases `bias0`, `bias1`, ...
            device: device of the parameters; None: torch's default device.
            dtype: dtype of the parameters; None: `torch.get_default_dtype()`.
            rng_state_tracker_function: a function that returns an object whose `fork()` is a context in which the weights are drawn; None: the
                global generator draws.
            accumulate_into_main_grad: as for `BasicLinear`, for all weights, whose attributes about `main_grad` must agree.
            single_grouped_weight: whether there is one parameter `weight` [num_groups, out_features, in_features] instead.
            single_grouped_bias: whether there is one parameter `bias` [num_groups, out_features] instead.
            delay_wgrad_compute: whether backward leaves the gradients of the weights to `backward_dw`; in compiled code backward computes them.
            scale_bias: whether the bias of each row is multiplied by the row's element of a second extra input.
        """
        self.has_bias = flag("GroupedLinear", "bias", bias)
        self.scale_bias = flag("GroupedLinear", "scale_bias", scale_bias)
        self.__dict__["num_extra_inputs"] = 2 if self.has_bias and self.scale_bias else 1
        super().__init__()
        self._rng_state_tracker_function = rng_state_tracker_function
        self.accumulate_into_main_grad = accumulate_into_main_grad
        self.delay_wgrad_compute = delay_wgrad_compute
        self.num_groups = positive("GroupedLinear", "num_groups", num_groups, "Give the number of weights.")
        self.in_features = positive("GroupedLinear", "in_features", in_features)
        self.out_features = positive("GroupedLinear", "out_features", out_features)
        self.single_grouped_weight = flag("GroupedLinear", "single_grouped_weight", single_grouped_weight)
        self.single_grouped_bias = flag("GroupedLinear", "single_grouped_bias", single_grouped_bias)
        names: list[str] = []
        dtype = parameter_dtype("GroupedLinear", dtype)

        def make(name: str, is_single: bool, *shape: int) -> None:
            for own in [name] if is_single else [f"{name}{group}" for group in range(self.num_groups)]:
                sizes = (self.num_groups, *shape) if is_single else shape
                self.register_parameter(own, torch.nn.Parameter(torch.empty(sizes, device=device, dtype=dtype)))
                names.append(own)

        make("weight", self.single_grouped_weight, self.out_features, self.in_features)
        self._main_grad_names = tuple(names)
        if self.has_bias:
            make("bias", self.single_grouped_bias, self.out_features)
        self._parameter_names = tuple(names)
        if self.delay_wgrad_compute:  # Megatron's gradient hooks wait for `backward_dw` if this attribute is set
            for name in self._main_grad_names:
                getattr(self, name).skip_backward_post_hook = True
        self._give_first_values()

    def reset_parameters(self) -> None:
        """Draws the weights from U(-1/sqrt(in_features), 1/sqrt(in_features)) in the order of the groups, and sets biases to zero."""
        bound = 1 / math.sqrt(self.in_features)
        with drawing(self._rng_state_tracker_function):
            for name in self._main_grad_names:
                torch.nn.init.uniform_(getattr(self, name), -bound, bound)
        for name in self._parameter_names[len(self._main_grad_names) :]:
            torch.nn.init.zeros_(getattr(self, name))

    def _options(self) -> dict[str, Any]:
        return {
            "num_groups": self.num_groups,
            "bias": self.has_bias,
            "packed_weight": self.single_grouped_weight,
            "packed_bias": self.single_grouped_bias,
            "scale_bias": self.scale_bias,
        }

    def _quantize_slots(self) -> tuple[int, int]:
        forward, backward = super()._quantize_slots()  # the slots of one group
        return self.num_groups * forward, self.num_groups * backward

    # Delayed gradients of weights.

    def _weights(self) -> list[torch.nn.Parameter]:
        return [getattr(self, name) for name in self._main_grad_names]

    def _asked_now(self, call: Call, saved: Sequence[torch.Tensor | None], grad_y: torch.Tensor | None, requested: list[bool]) -> list[bool]:
        count = len(self._main_grad_names)
        if not self.delay_wgrad_compute or grad_y is None or not any(requested[:count]):
            return requested
        x, splits, _ = saved
        if x is None or splits is None:
            raise ValueError(f"{self._get_name()}: expected x and splits on its context, got {x} and {splits}. Save what its own forward saves.")
        if detect_fake_mode([x, grad_y]) is not None:
            raise NotImplementedError(
                f"{self._get_name()}: expected delay_wgrad_compute=False where the call goes through torch's dispatcher, got True. Build the op without "
                "for compiled code."
            )
        override = "high_precision" if call.recipe == "null" else json.loads(call.recipe).get("backward_override", "none")
        coded = {"none": ("grad_output", "input"), "dequantized": ("input",), "high_precision": ()}[override]
        texts = [_C.recipe_quantizer(call.recipe, role, self._kind) if role in coded else "" for role in ("grad_output", "input")]
        seeds = [seed_for(text, grad_y.device) if text else None for text in texts]
        given = [torch.empty(0) if seed is None else seed for seed in seeds]
        versions = " ".join([str(0 if tensor.is_inference() else tensor._version) for tensor in (x, splits)])
        lines = torch.tensor([*"\n".join([versions, *texts]).encode()], dtype=torch.uint8)
        self.wgrad_store.context.append(Entry([grad_y.reshape(-1, grad_y.shape[-1]).clone(), x.reshape(-1, x.shape[-1]), splits, *given, lines]))
        return [*[False] * count, *requested[count:]]

    def _compute_left(self, left: Entry, weights: Sequence[torch.nn.Parameter]) -> None:
        gradients = _C.left_grad_weights(list(left))
        parts = [gradients] if self.single_grouped_weight else gradients.unbind(0)
        for weight, part in zip(weights, parts, strict=True):
            if self.accumulate_into_main_grad:
                add_to_main_grad(weight, part, left.is_first)
            else:
                add_gradient(weight, part)

    # State dicts.

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        self._pack("weight", self.single_grouped_weight, state_dict, prefix)
        if self.has_bias:
            self._pack("bias", self.single_grouped_bias, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _pack(self, name: str, is_single: bool, state_dict: dict[str, Any], prefix: str) -> None:
        """Converts a state dict to the layout of this module: one tensor for all groups, or one for each group."""
        whole, parts = prefix + name, [f"{prefix}{name}{group}" for group in range(self.num_groups)]
        if is_single and whole not in state_dict and all(part in state_dict for part in parts):
            state_dict[whole] = torch.stack([state_dict.pop(part) for part in parts])
        elif not is_single and whole in state_dict and len(state_dict[whole]) == self.num_groups:
            state_dict.update(zip(parts, state_dict.pop(whole).unbind(0), strict=True))

    def extra_repr(self) -> str:
        return f"num_groups={self.num_groups}, in_features={self.in_features}, out_features={self.out_features}, bias={self.has_bias}"
