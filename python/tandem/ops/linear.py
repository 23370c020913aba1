"""Products with a weight: `Linear`, and the basic ops that it stands for."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch

from tandem.ops.arguments import at_default, flag, positive
from tandem.ops.checkpoint import rename
from tandem.ops.collective import AllGather, AllReduce, ReduceGradient, ReduceScatter, _Collective, checked_group
from tandem.ops.composite import CompositeOperation
from tandem.ops.op import BasicOperation
from tandem.ops.unit import drop_extra_state


class BasicLinear(BasicOperation):
    """y = x weight^T, in the dtype of autocast or of `weight` [out_features, in_features]."""

    weight: torch.nn.Parameter

    _kind = "basic_linear"
    _parameter_names = ("weight",)
    _main_grad_names: ClassVar[tuple[str, ...]] = ("weight",)

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
        rng_state_tracker_function: Any = None,
        accumulate_into_main_grad: bool = False,
        userbuffers_options: dict[str, Any] | None = None,
    ) -> None:
        """Makes a product with a weight that is drawn as `reset_parameters` says.

        Args:
            in_features: size of the last dimension of x.
            out_features: size of the last dimension of y.
            device: where the parameter is made; None: torch's default device.
            dtype: of the parameter; None: `torch.get_default_dtype()`.
            tensor_parallel_mode, tensor_parallel_group: None; `Linear` puts the collectives of tensor parallelism around a product.
            rng_state_tracker_function, userbuffers_options: None; no other value is known yet.
            sequence_parallel: False, as `tensor_parallel_mode`.
            accumulate_into_main_grad: whether the gradient of `weight` is added to `weight.main_grad`, in the product itself, instead of being
                returned; it takes its place where `weight.overwrite_main_grad` is set. Where `weight.grad_added_to_main_grad` exists it is set, and a
                gradient without meaning is returned, of zeros where `weight.zero_out_wgrad` is set.
        """
        super().__init__()
        at_default("BasicLinear", tensor_parallel_mode=tensor_parallel_mode, tensor_parallel_group=tensor_parallel_group)
        at_default("BasicLinear", rng_state_tracker_function=rng_state_tracker_function, userbuffers_options=userbuffers_options)
        at_default("BasicLinear", False, sequence_parallel=sequence_parallel)
        self.accumulate_into_main_grad = flag("BasicLinear", "accumulate_into_main_grad", accumulate_into_main_grad)
        self.in_features = positive("BasicLinear", "in_features", in_features)
        self.out_features = positive("BasicLinear", "out_features", out_features)
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws `weight` from U(-1/sqrt(in_features), 1/sqrt(in_features))."""
        torch.nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class Bias(BasicOperation):
    """y = x + bias, over the last dimension."""

    bias: torch.nn.Parameter

    _kind = "bias"
    _parameter_names = ("bias",)

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
            size: of the last dimension of x.
            device: where the parameter is made; None: torch's default device.
            dtype: of the parameter; None: `torch.get_default_dtype()`.
            tensor_parallel, tensor_parallel_group: False and None; no other value is known yet.
        """
        super().__init__()
        at_default("Bias", False, tensor_parallel=tensor_parallel)
        at_default("Bias", tensor_parallel_group=tensor_parallel_group)
        self.size = positive("Bias", "size", size)
        self.bias = torch.nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets `bias` to zero."""
        torch.nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        return f"size={self.size}"


class Linear(CompositeOperation):
    """y = x weight^T + bias: `BasicLinear`, then `Bias`.

    The parameters are `weight` and `bias` of this module, in state dicts too; state dicts of TransformerEngine are read as well.
    `basic_ops` are views of it for fusion functions: they own nothing.

    >>> import torch
    >>> from tandem import ops
    >>> linear = ops.Linear(4, 2)
    >>> linear(torch.zeros(3, 4))
    tensor([[0., 0.],
            [0., 0.],
            [0., 0.]], grad_fn=<TandemPipelineBackward>)
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    _TE_NAMES: ClassVar[dict[str, str]] = {"basic_ops.0.weight": "weight", "basic_ops.1.bias": "bias"}

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
        rng_state_tracker_function: Any = None,
        accumulate_into_main_grad: bool = False,
    ) -> None:
        """Makes a product with a weight, drawn as torch.nn.Linear draws it, and a bias of zeros.

        Args:
            in_features: size of the last dimension of x.
            out_features: size of the last dimension of y.
            bias: whether there is one; False: `bias` is None.
            device: where the parameters are made; None: torch's default device.
            dtype: of the parameters; None: `torch.get_default_dtype()`.
            tensor_parallel_mode: "column": each rank holds a part of the output features, and gives these; "row": each holds a part of the input
                features, and its bias is a term of a sum over ranks, as in TransformerEngine. None: no rank knows of another.
            tensor_parallel_group: the ranks; None: all processes.
            sequence_parallel: with a mode: the ranks share the first dimension outside: x is gathered before a column-parallel product, y
                scattered behind a row-parallel one.
            rng_state_tracker_function: None; no other value is known yet.
            accumulate_into_main_grad: as for `BasicLinear`.
        """
        at_default("Linear", rng_state_tracker_function=rng_state_tracker_function)
        before, after, size = collectives("Linear", tensor_parallel_mode, tensor_parallel_group, sequence_parallel)
        local_in, local_out = positive("Linear", "in_features", in_features), positive("Linear", "out_features", out_features)
        if size > 1 and tensor_parallel_mode == "column":
            local_out = share("Linear", "out_features", out_features, size)
        elif size > 1:
            local_in = share("Linear", "in_features", in_features, size)
        linear = BasicLinear(local_in, local_out, device=device, dtype=dtype, accumulate_into_main_grad=accumulate_into_main_grad)
        added = [Bias(local_out, device=device, dtype=dtype)] if bias else []
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.local_in_features, self.local_out_features = local_in, local_out
        self.tensor_parallel_mode = tensor_parallel_mode if size > 1 else None
        self.tensor_parallel_size = size
        self.sequence_parallel = bool(sequence_parallel) and size > 1
        self.weight = linear.weight
        if added:
            self.bias = added[0].bias
        else:
            self._lack("bias", "bias=False", "bias=True")
        self._own([(part, {name: name for name in part._parameter_names}) for part in (*before, linear, *added, *after)])

    @property
    def tensor_parallel_group(self) -> Any:
        """The ranks that share the weight; None where none do."""
        return next((part.process_group for part in self.basic_ops if isinstance(part, _Collective)), None)

    def reset_parameters(self) -> None:
        """Draws `weight` as torch.nn.Linear does and sets `bias` to zero."""
        for part in self.basic_ops:
            if isinstance(part, (BasicLinear, Bias)):
                part.reset_parameters()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        rename(state_dict, prefix, self._TE_NAMES)
        for index in range(2):
            drop_extra_state(state_dict, f"{prefix}basic_ops.{index}._extra_state")
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def extra_repr(self) -> str:
        parallel = f", tensor_parallel_mode={self.tensor_parallel_mode}" if self.tensor_parallel_mode else ""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}{parallel}"


def collectives(op: str, mode: str | None, group: Any, sequence_parallel: bool) -> tuple[list[BasicOperation], list[BasicOperation], int]:
    """What stands before and behind the product, and how many ranks share it."""
    if mode is None:
        return [], [], 1
    if mode not in ("column", "row"):
        raise ValueError(f'{op}: expected tensor_parallel_mode None, "column" or "row", got {mode!r}. Name how ranks share the weight.')
    group = checked_group(op, group)
    if group.size() == 1:
        return [], [], 1
    if mode == "column":
        return [AllGather(group) if sequence_parallel else ReduceGradient(group)], [], group.size()
    return [], [ReduceScatter(group) if sequence_parallel else AllReduce(group)], group.size()


def share(op: str, name: str, features: int, size: int) -> int:
    """The features of one rank of `size`."""
    if features % size:
        raise ValueError(f"{op}: expected {name} that {size} ranks share evenly, got {features}. Use a multiple of {size}.")
    return features // size
