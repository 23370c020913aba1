"""`GroupedLinear` with TransformerEngine's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tandem import ops
from tandem.arguments import Fixed, drawing, flag, whole
from tandem.modules.base import Init, ProductMixin, check_dtype, check_group, check_mode, check_one_value, draw
from tandem.ops.collective import sizes_of_rank
from tandem.quantized.weights import in_microbatch


class GroupedLinear(ProductMixin, ops.GroupedLinear):
    """y_g = x_g weight_g^T + bias_g for each group g of consecutive rows: x [..., in_features] -> y [..., out_features].

    >>> import torch, tandem
    >>> experts = tandem.GroupedLinear(3, 4, 2)
    >>> experts(torch.randn(5, 4), [2, 0, 3]).shape, [*experts.state_dict()]
    (torch.Size([5, 2]), ['weight0', 'weight1', 'weight2', 'bias0', 'bias1', 'bias2'])
    """

    num_gemms, parallel_mode = Fixed(), Fixed()

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Init | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool | None = None,
    ) -> None:
        """Draws `num_gemms` weights and sets as many biases to zeros.

        Args:
            num_gemms: number of groups.
            in_features: size of the last dimension of x, over all ranks.
            out_features: size of the last dimension of y, over all ranks.
            fuse_wgrad_accumulation: whether backward adds gradients of weights to their `main_grad`, as for `ops.GroupedLinear`.
            tp_group, tp_size: the process group of the ranks that share each weight, and its size. The module runs no collective: the caller
                exchanges x and y, as with TransformerEngine.
            init_method: draws each weight in place; None: from the normal distribution with mean 0 and deviation 0.023.
            bias: whether each group has a bias. True raises ValueError if several ranks share the weights.
            return_bias: whether a call returns the list of biases after y instead of adding them.
            params_dtype, device: dtype and device of the parameters; None: torch's defaults.
            parallel_mode: "column": each rank has a part of the output features; "row": of the input features; None: all features.
            delay_wgrad_compute, single_grouped_weight, single_grouped_bias: as for `ops.GroupedLinear`.
            save_original_input: a bool without effect: forward keeps the rows themselves, and backward requantizes them.
            sequence_parallel, ub_name, use_grouped_tensor: not used.
            name: stored as an attribute.
            get_rng_state_tracker, rng_tracker_name: as for `Linear`.
            ub_overlap_rs, ub_overlap_ag: False; other values raise NotImplementedError.
        """
        op = type(self).__name__
        check_one_value(op, locals())
        check_mode(op, parallel_mode)
        check_group(op, tp_group, tp_size)
        for known, value in {"sequence_parallel": sequence_parallel, "save_original_input": save_original_input}.items():
            flag(op, known, value)
        ranks = tp_group.size() if tp_group is not None and parallel_mode is not None else 1
        has_bias, is_returned = flag(op, "bias", bias), flag(op, "return_bias", return_bias)
        if has_bias and ranks > 1:
            raise ValueError(f"{op}: expected bias=False where {ranks} ranks share the weights, got True. Add biases behind what ranks exchange.")
        columns, rows = sizes_of_rank(op, parallel_mode, in_features, out_features, ranks)
        self.__dict__.update(_init_method=init_method or draw, get_rng_state_tracker=get_rng_state_tracker, rng_tracker_name=rng_tracker_name)
        super().__init__(
            num_gemms,
            columns,
            rows,
            bias=has_bias and not is_returned,
            device=device,
            dtype=params_dtype,
            accumulate_into_main_grad=flag(op, "fuse_wgrad_accumulation", fuse_wgrad_accumulation),
            single_grouped_weight=single_grouped_weight,
            single_grouped_bias=single_grouped_bias,
            delay_wgrad_compute=delay_wgrad_compute,
        )
        self.num_gemms, self.use_bias, self.return_bias = self.num_groups, has_bias, is_returned
        self.parallel_mode, self.tp_size, self.tp_group = parallel_mode, ranks, tp_group
        self.name = name
        self._returned: tuple[str, ...] = ()
        if has_bias and is_returned:
            sizes = (self.num_groups, rows) if self.single_grouped_bias else (rows,)
            self._returned = ("bias",) if self.single_grouped_bias else tuple(f"bias{group}" for group in range(self.num_groups))
            for own in self._returned:
                self.register_parameter(own, torch.nn.Parameter(torch.zeros(sizes, device=device, dtype=params_dtype)))
        dimension = {"column": 0, "row": 1}.get(parallel_mode or "")
        for own in self._main_grad_names if ranks > 1 else ():
            weight: Any = getattr(self, own)
            weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, dimension, 1

    @property
    def fuse_wgrad_accumulation(self) -> bool:
        """Whether backward adds the gradients of weights to their `main_grad`."""
        return self.accumulate_into_main_grad

    @fuse_wgrad_accumulation.setter
    def fuse_wgrad_accumulation(self, value: bool) -> None:
        self.accumulate_into_main_grad = flag(self._get_name(), "fuse_wgrad_accumulation", value)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Sets the attribute `tp_group`. The module runs no collective, so nothing else changes."""
        self.tp_group = tp_group

    def reset_parameters(self) -> None:
        """Draws the weights by init_method and sets the biases to zero."""
        for name, param in self.named_parameters(recurse=False):
            if name in self._main_grad_names:
                for own in param if self.single_grouped_weight else [param]:
                    with torch.no_grad(), drawing(self.get_rng_state_tracker, self.rng_tracker_name):
                        self._init_method(own)
            else:
                torch.nn.init.zeros_(param)

    def forward(  # type: ignore[override]
        self,
        inp: torch.Tensor,
        m_splits: torch.Tensor | Sequence[int],
        is_first_microbatch: bool | None = None,
        out: torch.Tensor | None = None,
        dgrad_out: torch.Tensor | None = None,
        *,
        _run: Any = None,
    ) -> Any:
        """y [..., out_features], then with `return_bias` the list of biases.

        Args:
            inp: x [..., in_features], its rows ordered by group.
            m_splits: the number of rows of each group, as a sequence or a tensor of integers.
            is_first_microbatch: as for `Linear`.
            out: tensor into which y is written; None: a new tensor.
            dgrad_out: tensor into which backward writes the gradient of x; None: a new tensor.
        """
        if getattr(inp, "dtype", None) is not self._x_dtype:
            check_dtype(self, inp)
        splits = m_splits if isinstance(m_splits, torch.Tensor) else torch.tensor(_whole_numbers(self._get_name(), m_splits), dtype=torch.int64)
        buffers = {name: value for name, value in (("output", out), ("grad_input", dgrad_out)) if value is not None}
        with in_microbatch(is_first_microbatch):
            y = super().forward(inp, splits, _run=_run, **buffers)
        if not self.return_bias:
            return y
        return y, [getattr(self, name).to(y.dtype) for name in self._returned]

    _library_forward = forward  # containers take a module with this forward into their pipelines

    def extra_repr(self) -> str:
        parallel = f", parallel_mode={self.parallel_mode}, tp_size={self.tp_size}" if self.tp_size > 1 else ""
        return f"num_gemms={self.num_gemms}, {self.in_features}, {self.out_features}, bias={self.use_bias}{parallel}"


def _whole_numbers(op: str, splits: Sequence[int]) -> list[int]:
    numbers = list(splits)
    for number in numbers:
        if type(number) is not int and whole(number) is None:
            raise TypeError(f"{op}: expected m_splits of whole numbers, got {number!r}. Pass the rows of each group.")
    return numbers
