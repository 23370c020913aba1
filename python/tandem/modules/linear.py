"""`Linear`: a product with TransformerEngine's arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec

import torch

from tandem.arguments import Fixed, at_default, flag, positive
from tandem.modules.base import Init, Module, NormedModule, Parts, check_mode
from tandem.ops.collective import collectives, sizes_of_rank
from tandem.ops.linear import BasicLinear, Bias
from tandem.pipelines.joined import Split, split_sizes

_P = ParamSpec("_P")


class OneProduct(Module):
    """A module with one product."""

    parallel_mode, parameters_split = Fixed(), Fixed()
    _result_bias = "bias"

    def _parts_of_products(self, given: Mapping[str, Any]) -> Parts:
        op, mode, group, split = self._get_name(), given["parallel_mode"], given["tp_group"], given["parameters_split"]
        check_mode(op, mode)
        sequence_parallel = flag(op, "sequence_parallel", given["sequence_parallel"])
        before, after, ranks = collectives(op, mode if group is not None else None, group, sequence_parallel)
        if split is not None:
            rows = positive(op, "out_features", given["out_features"])
            split = split_sizes(op, "out_features", split, rows, ranks if mode == "column" else 1)
        # These are the sizes of this rank's weight, as in TransformerEngine.
        self.in_features, self.out_features = sizes_of_rank(op, mode, given["in_features"], given["out_features"], ranks)
        self.parallel_mode, self.tp_size, self.sequence_parallel = mode, ranks, sequence_parallel and ranks > 1
        self.parameters_split = split
        self._inits = dict.fromkeys(self.weight_names, given["init_method"])
        made: dict[str, Any] = {"device": "meta", "dtype": given["params_dtype"]}
        keeps_x = flag(op, "save_original_input", given.get("save_original_input", False))
        product = BasicLinear(self.in_features, self.out_features, save_original_input=keeps_x, **made)
        bias: Parts = [(Bias(self.out_features, **made), {"bias": "bias"})] if self.use_bias else []
        return [*[(part, {}) for part in before], (product, {"weight": "weight"}), *[(part, {}) for part in after], *bias]

    @property
    def weight_names(self) -> tuple[str, ...]:
        """The names of the weight's parameters: "weight", or one for each part."""
        return ("weight",) if self.parameters_split is None else tuple([f"{part}_weight" for part in self.parameters_split])

    @property
    def bias_names(self) -> tuple[str, ...]:
        """The names of the bias's parameters: "bias", or one for each part."""
        return tuple([f"{name.removesuffix('weight')}bias" for name in self.weight_names])

    def _sharded_dimensions(self) -> dict[str, int]:
        if self.tp_size == 1:
            return {}
        if self.parallel_mode == "column":
            return dict.fromkeys((*self.weight_names, *self.bias_names), 0)
        return dict.fromkeys(self.weight_names, 1)

    def forward(  # type: ignore[override]
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
        *,
        _run: Any = None,
    ) -> Any:
        """y [..., out_features], then with `return_bias` the bias, then with `return_layernorm_output` the output of the norm.

        Args:
            inp: x [..., in_features], of the dtype of the parameters outside of `torch.autocast`. Another dtype raises TypeError.
            is_first_microbatch: declares whether weights changed since the last call. None: the module finds out. True: they changed, and are
                quantized. False: they did not, and bytes are not compared unless a version or an optimizer step differs. With `fuse_wgrad_accumulation` True also makes
                gradients overwrite main_grad.
            fp8_output, fp8_grad: False; other values raise NotImplementedError.
        """
        if fp8_output is not False or fp8_grad is not False:
            at_default(self._get_name(), False, fp8_output=fp8_output, fp8_grad=fp8_grad)
        return self._outputs(inp, _run, is_first_microbatch)

    _library_forward = forward  # containers take the parts of a module with this forward into their pipelines

    def extra_repr(self) -> str:
        norm = f", normalization={self.normalization}" if isinstance(self, NormedModule) else ""
        parallel = f", parallel_mode={self.parallel_mode}, tp_size={self.tp_size}" if self.tp_size > 1 else ""
        split = f", parameters_split={dict(self.parameters_split)}" if self.parameters_split else ""
        return f"{self.in_features}, {self.out_features}, bias={self.use_bias}{norm}{parallel}{split}"


def _telling_bias(init: Callable[_P, None]) -> Callable[_P, None]:
    @functools.wraps(init)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> None:
        if len(args) > 3 and isinstance(args[3], bool):  # args[0] is the module
            raise TypeError(
                f"Linear: expected in_features and out_features before the names of other arguments, got {args[3]} in the third place, which is that of "
                "sequence_parallel in TransformerEngine and of bias in torch.nn.Linear. Write sequence_parallel= or bias=."
            )
        init(*args, **kwargs)

    return checked


class Linear(OneProduct, torch.nn.Linear):
    """y = x weight^T + bias, as one pipeline: x [..., in_features] -> y [..., out_features].

    The parameters are `weight` and `bias`, or, with `parameters_split`, `<name>_weight` and `<name>_bias` for each part. State dicts of
    TransformerEngine load unchanged. `ops.Linear` computes the same function and takes the arguments of `transformer_engine.pytorch.ops`. Both classes
    derive from `torch.nn.Linear`, so libraries that look for linear layers find them.

    >>> import torch, tandem
    >>> qkv = tandem.Linear(8, 12, parameters_split={"query": 8, "key": 2, "value": 2}, bias=False)
    >>> qkv(torch.randn(2, 8)).shape, [*qkv.state_dict()]
    (torch.Size([2, 12]), ['query_weight', 'key_weight', 'value_weight'])
    """

    weight: torch.Tensor
    bias: torch.Tensor | None  # type: ignore[assignment]

    @_telling_bias
    def __init__(
        self,
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
        parameters_split: Split | None = None,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        """Draws the weight and sets the bias to zeros.

        Args:
            in_features: size of the last dimension of x, over all ranks.
            out_features: size of the last dimension of y, over all ranks.
            sequence_parallel: with a `parallel_mode`: whether each rank has a part of the first dimension of x ("column") or of y ("row").
            fuse_wgrad_accumulation: whether backward adds the gradient of `weight` to `weight.main_grad`, as for `ops.BasicLinear`. Not with
                `parameters_split`.
            tp_group: process group of the ranks that share the weight; None: this rank computes alone.
            tp_size: 1, or any number with `tp_group`, whose own size counts.
            init_method: draws the weight in place, each part by itself; None: from the normal distribution with mean 0 and deviation 0.023.
            bias: whether the module has a bias; False: `bias` is None.
            return_bias: whether a call returns the bias after y instead of adding it.
            params_dtype: dtype of the parameters; None: `torch.get_default_dtype()`.
            parallel_mode: "column": each rank has a part of the output features, and computes that part of y; "row": each has a part of the input
                features, and the bias is added after the sum over ranks.
            parameters_split: parts of the output features, in order: a dict of their sizes over all ranks by name, or names of parts of equal size.
                Each part has parameters of its own. They lie one after the other in memory, and run as one product without a copy.
            device: device of the parameters; None: torch's default device.
            save_original_input: under a recipe: whether forward keeps x instead of its codes, and backward requantizes it to the same bits. This
                saves memory if another op keeps x anyway, and costs a pass over x.
            rng_tracker_name: argument of `fork` of the tracker; None: `fork()` gets no argument.
            name: stored as an attribute.
            ub_name: not used.
            delay_wgrad_compute: whether backward leaves the gradient of the weight to `backward_dw`.
            get_rng_state_tracker: function that returns an object whose `fork()` is a context in which weights are drawn; None: the global generator draws.
            symmetric_ar_type: None; other values raise NotImplementedError.
            ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_wgrad, ub_bulk_dgrad: False; other values raise NotImplementedError.
        """
        self._construct(locals())
