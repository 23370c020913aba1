"""The base of the modules: it owns the parameters of the basic ops that compute, and may return a bias instead of adding it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.compiler import is_dynamo_compiling
from typing_extensions import Self

from tandem.arguments import Fixed, Of, at_default, drawing, flag
from tandem.ops.collective import _Collective, _replacement
from tandem.ops.composite import CompositeOperation
from tandem.ops.linear import BasicLinear
from tandem.ops.norm import LayerNorm, RMSNorm
from tandem.ops.op import BasicOperation
from tandem.ops.structure import MakeExtraOutput
from tandem.pipelines.joined import JoinedMixin
from tandem.pipelines.run import NO_EXTRAS
from tandem.quantized.weights import in_microbatch
from tandem.regions.model_init import note_init, quantize_weights

Init = Callable[[torch.Tensor], Any]
Parts = list[tuple[BasicOperation, Mapping[str, str]]]  # an op, and for each of its parameters the module's name

# Arguments of TransformerEngine's constructors of which this version supports one value only.
_ONE_VALUE: dict[str, Any] = {
    **dict.fromkeys(("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad", "ub_tp_comm_overlap"), False),
    **dict.fromkeys(("parallel_attention_mlp", "apply_residual_connection_post_layernorm"), False),
    **{"symmetric_ar_type": None, "attention_type": "self", "softmax_type": "vanilla", "layer_type": "encoder", "drop_path_rate": 0.0},
}

_NORMS: dict[str, type[LayerNorm] | type[RMSNorm]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


def draw(weight: torch.Tensor) -> None:
    """Draws a weight as TransformerEngine does by default: from the normal distribution with mean 0 and deviation 0.023."""
    torch.nn.init.normal_(weight, mean=0.0, std=0.023)


class ProductMixin:
    """What all modules with products share, those of one op and those of several ops."""

    use_bias, return_bias, tp_size = Fixed(), Fixed(), Fixed()
    name: str | None
    _x_dtype: torch.dtype | None = None  # the dtype of the last x that `check_dtype` accepted

    @property
    def params_dtype(self: Any) -> torch.dtype:
        """The dtype of the first parameter."""
        dtype: torch.dtype = next(self.parameters()).dtype
        return dtype

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        self.__dict__.pop("_x_dtype", None)
        return super()._apply(fn, recurse)  # type: ignore[misc, no-any-return]

    def _check_in_container(self: Any) -> None:
        if self.return_bias:
            raise ValueError(
                f"{self._get_name()}: expected a module whose output is what the next op takes, got one with return_bias=True. Call it outside "
                "of the container, or build it with return_bias=False."
            )


class Module(ProductMixin, JoinedMixin, CompositeOperation):
    """A module of products, with or without a norm before them."""

    sequence_parallel = Fixed()
    _result_bias: ClassVar[str]  # the name of the last product's bias
    rng_tracker_name: str | None = None

    def _construct(self, given: Mapping[str, Any]) -> None:
        """Builds the module from the arguments of its constructor, by name."""
        name = self._get_name()
        check_one_value(name, given)
        check_group(name, given["tp_group"], given["tp_size"])
        torch.nn.Module.__init__(self)
        self.get_rng_state_tracker, self.rng_tracker_name = given["get_rng_state_tracker"], given.get("rng_tracker_name")
        self.name = given["name"]
        self.use_bias, self.return_bias = flag(name, "bias", given["bias"]), flag(name, "return_bias", given["return_bias"])
        into_main_grad = flag(name, "fuse_wgrad_accumulation", given["fuse_wgrad_accumulation"])
        is_delaying = flag(name, "delay_wgrad_compute", given["delay_wgrad_compute"])
        parts = self._parts(given)
        self._check_main_grad(into_main_grad, given.get("parameters_split") is not None)
        split = getattr(self, "parameters_split", None)
        taken = [(part, self._take(part, split, names, given["device"])) for part, names in parts]
        for bias in () if self.use_bias else (*[weight.removesuffix("weight") + "bias" for weight in self._inits], self._result_bias):
            self._lack(bias, "bias=False", "bias=True")
        if self.use_bias and self.return_bias:  # no op adds this bias
            taken.pop()
        self._own(taken)
        for part in self._products:
            part.accumulate_into_main_grad = into_main_grad
            self._delay(part, is_delaying)
        self.reset_parameters()
        self.__dict__["_deferred"] = any(param.is_meta for param in self._parameters.values() if param is not None)
        note_init(self)
        quantize_weights(self)

    def _parts(self, given: Mapping[str, Any]) -> Parts:
        """The ops that a call runs, in order, on the meta device. The last one adds the bias of the last product, if there is one."""
        return self._parts_of_products(given)

    def _parts_of_products(self, given: Mapping[str, Any]) -> Parts:
        """`_parts` without a norm. It also sets the attributes that say how ranks share weights, and `_inits`: the function that draws each weight, or
        each part of a weight, by its name; None: `draw`."""
        raise NotImplementedError

    def _weights_in_codes(self) -> tuple[Sequence[str], str]:
        return [*self._inits], BasicLinear._kind

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        self._bring_together()  # an assigned state dict has put the parts in memory of their own

    @property
    def fuse_wgrad_accumulation(self) -> bool:
        """Whether backward adds the gradients of weights to their `main_grad`."""
        return any(part.accumulate_into_main_grad for part in self._products)

    @fuse_wgrad_accumulation.setter
    def fuse_wgrad_accumulation(self, value: bool) -> None:
        value = flag(self._get_name(), "fuse_wgrad_accumulation", value)
        self._check_main_grad(value, bool(self.__dict__.get("_joined")))  # empty in pickles of older versions
        for part in self._products:
            part.accumulate_into_main_grad = value

    def _check_main_grad(self, into_main_grad: bool, is_split: bool) -> None:
        if into_main_grad and is_split:
            raise ValueError(
                f"{self._get_name()}: expected fuse_wgrad_accumulation=False with parameters_split, as a product adds to one main_grad, got True. Build "
                "one module for each part."
            )

    @property
    def delay_wgrad_compute(self) -> bool:
        """Whether backward leaves the gradients of weights to `backward_dw`."""
        return any(part.delay_wgrad_compute for part in self._products)

    @delay_wgrad_compute.setter
    def delay_wgrad_compute(self, value: bool) -> None:
        value = flag(self._get_name(), "delay_wgrad_compute", value)
        for part in self._products:
            self._delay(part, value)

    @staticmethod
    def _delay(part: BasicLinear, value: bool) -> None:
        part.delay_wgrad_compute = value
        for weight in part._weights() if value else ():  # reducers of gradients wait for `backward_dw` where a weight has this mark
            weight.skip_backward_post_hook = True  # type: ignore[attr-defined]

    @property
    def _products(self) -> list[BasicLinear]:
        return [part for part in self.basic_ops if isinstance(part, BasicLinear)]

    def need_backward_dw(self) -> bool:
        """Whether backward leaves the gradients of the weights to `backward_dw`."""
        return self.delay_wgrad_compute

    def backward_dw(self) -> None:
        """Computes the gradients of the weights that the oldest backward has left, the last weight's first, and adds them to `grad` or `main_grad`.

        Backward itself has computed the gradients of biases. Without `delay_wgrad_compute` the method does nothing. If no backward has left
        gradients, and no compiled code may have, it raises RuntimeError.
        """
        if not self.need_backward_dw():
            return
        for part in reversed(self._products):
            part.backward_dw()
        for hook in self.__dict__.get("_wgrad_accumulation_and_reduce_hooks", ()):
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, wgrad_accumulation_and_reduce_hook: Callable[[], Any]) -> None:
        """Registers a function without arguments that `backward_dw` calls at its end."""
        self.__dict__.setdefault("_wgrad_accumulation_and_reduce_hooks", []).append(wgrad_accumulation_and_reduce_hook)

    @property
    def tp_group(self) -> Any:
        """The process group of the ranks that share the weights; None: one rank has them whole."""
        return next((part.process_group for part in self.basic_ops if isinstance(part, _Collective)), None)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Replaces the process group of the ranks that share the weights by another one of equal size. With `tp_size=1` nothing changes.

        Args:
            tp_group: a group of `tp_size` ranks. Another size raises ValueError.
        """
        _replacement(self._get_name(), tp_group, self.tp_size)
        for part in self.basic_ops:
            if isinstance(part, _Collective):
                part.process_group = tp_group

    @property
    def apply_bias(self) -> bool:
        """Whether the module has a bias and adds it instead of returning it."""
        return self.use_bias and not self.return_bias

    def reset_parameters(self) -> None:
        """Draws the weights by their init_method, sets biases to zero, and resets a norm so that it neither scales nor shifts.

        It marks parameters as TransformerEngine does, for reducers of gradients: `tensor_model_parallel`, `partition_dim` and `partition_stride` on
        those of which a rank has a part, `sequence_parallel` on the others.
        """
        for part in self.basic_ops:
            if isinstance(part, (LayerNorm, RMSNorm)):
                part.reset_parameters()
        for name, param in self.named_parameters(recurse=False):
            if name in self._inits:
                with drawing(self.get_rng_state_tracker, self.rng_tracker_name):
                    (self._inits[name] or draw)(param)
            elif not name.startswith("layer_norm"):
                torch.nn.init.zeros_(param)
        for name, param in self.named_parameters(recurse=False):
            dimension = self._sharded_dimensions().get(name)
            if dimension is not None:
                param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, dimension, 1  # type: ignore[attr-defined]
            else:
                param.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        self._bring_together()  # parameters that came from the meta device have memory of their own

    def _transformer_engine_states(self) -> Sequence[str]:
        return ("",)

    def _sharded_dimensions(self) -> dict[str, int]:
        """The sharded dimension of each parameter of which a rank has a part only, by name."""
        raise NotImplementedError

    def _outputs(self, inp: torch.Tensor, run: Any, is_first_microbatch: bool | None) -> Any:
        """The result of a call: y, then with `return_bias` the bias, then with `return_layernorm_output` the output of the norm."""
        if getattr(inp, "dtype", None) is not self._x_dtype:
            check_dtype(self, inp)
        if is_first_microbatch is None:
            is_plain = run is None and not is_dynamo_compiling()
            outputs = self._call_alone(inp, NO_EXTRAS, None) if is_plain else super().forward(inp, _run=run)
        else:
            with in_microbatch(is_first_microbatch):
                outputs = super().forward(inp, _run=run)
        if not self.__dict__["return_bias"]:  # `__dict__` is read as the descriptor of the attribute is slower
            return outputs
        y, *normed = outputs if isinstance(outputs, tuple) else (outputs,)
        bias = getattr(self, self._result_bias)
        return (y, None if bias is None else bias.to(y.dtype), *normed)


class NormedModule(Module):
    """A module of a norm and the products after it."""

    layer_norm_weight: torch.nn.Parameter
    layer_norm_bias: torch.nn.Parameter | None
    normalization, return_layernorm_output, return_layernorm_output_gathered = Fixed(), Fixed(), Fixed()

    def _parts(self, given: Mapping[str, Any]) -> Parts:
        name, kind = self._get_name(), given["normalization"]
        if kind not in _NORMS:
            raise ValueError(f'{name}: expected normalization "LayerNorm" or "RMSNorm", got {kind!r}. Name one of them.')
        self.normalization = kind
        for option in ("return_layernorm_output", "return_layernorm_output_gathered"):
            setattr(self, option, flag(name, option, given[option]))
        parts = super()._parts(given)
        at, first = next((at, part) for at, (part, _) in enumerate(parts) if isinstance(part, BasicLinear))
        traits = {each: given[each] for each in ("eps", "zero_centered_gamma")}
        norm = _NORMS[kind](first.in_features, device="meta", dtype=given["params_dtype"], **traits)
        if kind == "RMSNorm":
            self._lack("layer_norm_bias", 'normalization="RMSNorm"', 'normalization="LayerNorm"')
        if self.return_layernorm_output:
            is_gathered = self.return_layernorm_output_gathered and self.sequence_parallel
            parts.insert(at if is_gathered else 0, (MakeExtraOutput(), {}))
        return [(norm, {own: f"layer_norm_{own}" for own in norm._parameter_names}), *parts]

    def reset_layer_norm_parameters(self) -> None:
        """Resets the norm so that it neither scales nor shifts."""
        self._norm.reset_parameters()

    eps = Of("_norm", "The norm's `eps`, which it adds to the variance or the mean square.")
    zero_centered_gamma = Of("_norm", "Whether the norm multiplies by 1 + weight rather than by weight.")

    @property
    def _norm(self) -> Any:
        return self.basic_ops[0]


class GroupsInside:
    """For modules that consist of other modules of this library."""

    def set_tensor_parallel_group(self: Any, tp_group: Any) -> None:
        """Replaces the process group of all modules inside, as `Linear.set_tensor_parallel_group` does."""
        for part in self.modules():
            if part is not self and isinstance(part, (Module, GroupsInside)):
                part.set_tensor_parallel_group(tp_group)


def check_dtype(module: Any, x: Any) -> None:
    """Raises TypeError, as TransformerEngine does, if x and a parameter differ in dtype outside of `torch.autocast`."""
    if not isinstance(x, torch.Tensor) or x.is_meta or torch.is_autocast_enabled(x.device.type):
        return
    for name, param in module._parameters.items():
        if param is not None and param.dtype != x.dtype:
            raise TypeError(
                f"{module._get_name()}: expected x of dtype {param.dtype}, that of {name}, outside of torch.autocast, got {x.dtype}. Cast one of them."
            )
    if not is_dynamo_compiling():
        module.__dict__["_x_dtype"] = x.dtype


def check_one_value(op: str, given: Mapping[str, Any]) -> None:
    """Raises if an argument of a constructor that supports one value only has another value. Other names in `given` are ignored."""
    for name, value in _ONE_VALUE.items():
        if name in given:
            at_default(op, value, **{name: given[name]})


def check_mode(op: str, parallel_mode: str | None) -> None:
    """Raises ValueError unless `parallel_mode` is "column" (ranks share a weight's rows), "row" (its columns) or None."""
    if parallel_mode not in (None, "column", "row"):
        raise ValueError(f'{op}: expected parallel_mode None, "column" or "row", got {parallel_mode!r}. Name how ranks share the weight.')


def check_group(op: str, group: Any, size: int) -> None:
    """Raises ValueError if `size` is not 1 and no group names the ranks."""
    if group is None and size != 1:
        raise ValueError(f"{op}: expected the ranks as tp_group, as tp_size is {size}, got None. Pass the process group, or tp_size=1.")
