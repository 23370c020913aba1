"""A linear layer per group of rows: the experts of a mixture."""

from __future__ import annotations

import math
from typing import Any

import torch

from tandem.ops.arguments import at_default, flag, positive
from tandem.ops.deferred import DeferredMixin
from tandem.ops.op import BasicOperation


class GroupedLinear(DeferredMixin, BasicOperation):
    """y_g = x_g weight_g^T + bias_g for the rows x_g of group g, which follow each other; zeros for rows behind the last group.

    The extra input holds the number of rows of each group: integers [num_groups], whose sum is at most the rows of x.

    >>> import torch
    >>> from tandem import ops
    >>> experts = ops.GroupedLinear(2, 4, 3)
    >>> experts(torch.zeros(5, 4), torch.tensor([3, 2])).shape
    torch.Size([5, 3])
    """

    num_extra_inputs = 1

    _kind = "grouped_linear"

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        rng_state_tracker_function: Any = None,
        accumulate_into_main_grad: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        delay_wgrad_compute: bool = False,
        scale_bias: bool = False,
    ) -> None:
        """Makes `num_groups` products, each with a weight drawn as torch.nn.Linear draws it and a bias of zeros.

        Args:
            num_groups: how many weights there are: `weight0`, `weight1`, ...
            in_features: size of the last dimension of x.
            out_features: size of the last dimension of y.
            bias: whether there are biases `bias0`, `bias1`, ...
            device: where the parameters are made; None: torch's default device.
            dtype: of the parameters; None: `torch.get_default_dtype()`.
            single_grouped_weight: whether there is one parameter `weight` [num_groups, out_features, in_features] instead.
            single_grouped_bias: whether there is one parameter `bias` [num_groups, out_features] instead.
            rng_state_tracker_function: None; no other value is known yet.
            accumulate_into_main_grad, delay_wgrad_compute, scale_bias: False; no other value is known yet.
        """
        super().__init__()
        at_default("GroupedLinear", rng_state_tracker_function=rng_state_tracker_function)
        at_default("GroupedLinear", False, accumulate_into_main_grad=accumulate_into_main_grad, scale_bias=scale_bias)
        at_default("GroupedLinear", False, delay_wgrad_compute=delay_wgrad_compute)
        self.num_groups = positive("GroupedLinear", "num_groups", num_groups)
        self.in_features = positive("GroupedLinear", "in_features", in_features)
        self.out_features = positive("GroupedLinear", "out_features", out_features)
        self.has_bias = flag("GroupedLinear", "bias", bias)
        self.single_grouped_weight = flag("GroupedLinear", "single_grouped_weight", single_grouped_weight)
        self.single_grouped_bias = flag("GroupedLinear", "single_grouped_bias", single_grouped_bias)
        names: list[str] = []

        def make(name: str, is_single: bool, *shape: int) -> None:
            for own in [name] if is_single else [f"{name}{group}" for group in range(num_groups)]:
                sizes = (num_groups, *shape) if is_single else shape
                self.register_parameter(own, torch.nn.Parameter(torch.empty(sizes, device=device, dtype=dtype)))
                names.append(own)

        make("weight", self.single_grouped_weight, out_features, in_features)
        if self.has_bias:
            make("bias", self.single_grouped_bias, out_features)
        self._parameter_names = tuple(names)
        self._give_first_values()

    def reset_parameters(self) -> None:
        """Draws the weights from U(-1/sqrt(in_features), 1/sqrt(in_features)), those of the first group first, and sets biases to zero."""
        bound = 1 / math.sqrt(self.in_features)
        for name in self._parameter_names:
            param = getattr(self, name)
            if name.startswith("weight"):
                torch.nn.init.uniform_(param, -bound, bound)
            else:
                torch.nn.init.zeros_(param)

    def _options(self) -> dict[str, Any]:
        return {
            "num_groups": self.num_groups,
            "bias": self.has_bias,
            "packed_weight": self.single_grouped_weight,
            "packed_bias": self.single_grouped_bias,
        }

    def extra_repr(self) -> str:
        return f"num_groups={self.num_groups}, in_features={self.in_features}, out_features={self.out_features}, bias={self.has_bias}"


__all__ = ["GroupedLinear"]
