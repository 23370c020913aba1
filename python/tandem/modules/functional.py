"""The modules as functions on argument structs, without a module and without autograd. All state is passed in and returned.

`forward(args)` computes y, `setup_context(args, results)` collects what backward needs, and `backward(context, gradients)` returns the gradients by the
names of the fields of `args`. The class of `args` says which module is meant; `linear_forward` and so on are other names of these functions. They run the
plan of the module's pipeline: equal steps with equal fusions, with results that are equal bit by bit.

Neither outputs nor saved tensors share memory with an argument: the setup takes the arguments from `args`. It raises ValueError if an argument that
backward reads is not the tensor that forward received, or was written since forward; backward raises it if one was written since the setup. The last
step of backward that reads a saved tensor releases it.

>>> import torch
>>> from tandem.modules import functional
>>> args = functional.LinearArgs(inp=torch.randn(3, 4), weight=torch.randn(2, 4), bias=torch.zeros(2))
>>> results = functional.forward(args)
>>> context = functional.setup_context(args, results)
>>> gradients = functional.backward(context, torch.ones(3, 2))
>>> results.y.shape, {name: tuple(gradient.shape) for name, gradient in gradients.items()}
(torch.Size([3, 2]), {'inp': (3, 4), 'weight': (2, 4), 'bias': (2,)})
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch

from tandem import _C
from tandem.modules.layer_norm_linear import LayerNormLinear
from tandem.modules.layer_norm_mlp import LayerNormMLP
from tandem.modules.linear import Linear
from tandem.op_base.base import OpBase
from tandem.op_base.places import Place, places
from tandem.ops.grouped_linear import GroupedLinear
from tandem.ops.linear import BasicLinear, Bias
from tandem.pipelines.buffers import Modes
from tandem.pipelines.run import OpRun
from tandem.recipe import Recipe
from tandem.recipe.base import check_recipe
from tandem.regions.model_init import quantized_model_init

_LISTS = ("weights", "biases")  # the fields of arguments that are lists of tensors


@dataclass(kw_only=True, slots=True)
class _Args:
    """Arguments that the functions of all modules take.

    Attributes:
        needs_grad: names of the fields whose gradients backward computes; None: all fields of floating-point tensors.
        recipe: a recipe of `tandem.recipe`; None: nothing is quantized. `DelayedScaling` needs `recipe_state`.
        recipe_state: the number of the region as an int64 tensor [1], then `scale`, `amax_history` and `pending` of forward and of backward, as
            `tandem.recipe_state` keeps them. The functions write these tensors.
        weight_workspaces: tensors that an earlier call returned, or an empty sequence at first. They hold the codes of weights, which are
            requantized if the weight changed; with another recipe the call returns other tensors. None: each call quantizes the weights.
            Backward raises ValueError if something else wrote a workspace since forward.
        main_grads: tensors by the name of a weight's field. Backward adds the gradient to the tensor, and returns None for it.
        overwrite_main_grad: whether the gradient overwrites the tensor instead.
    """

    needs_grad: Collection[str] | None = None
    recipe: Recipe | None = None
    recipe_state: Sequence[torch.Tensor] = ()
    weight_workspaces: Sequence[torch.Tensor] | None = None
    main_grads: Mapping[str, torch.Tensor] = field(default_factory=dict)
    overwrite_main_grad: bool = False

    def _module(self) -> OpBase:
        """A module of these options on the meta device, of any sizes, with all biases."""
        raise NotImplementedError

    def _extra_inputs(self) -> list[torch.Tensor]:
        """Inputs besides `inp`, for which no gradient is returned."""
        return []

    def _norm(self: Any) -> dict[str, Any]:
        """The options of a norm, as modules take them."""
        if self.normalization == "RMSNorm" and self.layer_norm_bias is not None:
            raise ValueError(f"{type(self).__name__}: expected layer_norm_bias=None with RMSNorm, which adds none, got a tensor. Leave it out, or use LayerNorm.")
        return {name: getattr(self, name) for name in ("normalization", "eps", "zero_centered_gamma", "return_layernorm_output")}

    def _parallel(self: Any) -> dict[str, Any]:
        """The options of a module whose weights ranks share."""
        return {"tp_group": self.tp_group, "sequence_parallel": self.sequence_parallel, "device": "meta", "init_method": _undrawn}


@dataclass(kw_only=True, slots=True)
class LinearArgs(_Args):
    """Arguments of y = inp weight^T + bias.

    Attributes:
        inp: x [..., in_features].
        weight: [out_features, in_features].
        bias: [out_features], or None.
        parallel_mode, tp_group, sequence_parallel: as for `tandem.Linear`; `weight` is the part of this rank.
        save_original_input: as for `tandem.Linear`. It has no effect on the output of a norm, which backward writes again in any case.
    """

    inp: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    parallel_mode: str | None = None
    tp_group: Any = None
    sequence_parallel: bool = False
    save_original_input: bool = False

    def _module(self) -> OpBase:
        return Linear(*_sizes(self.tp_group), parallel_mode=self.parallel_mode, save_original_input=self.save_original_input, **self._parallel())


@dataclass(kw_only=True, slots=True)
class LayerNormLinearArgs(LinearArgs):
    """Arguments of y = norm(inp) weight^T + bias.

    Attributes:
        layer_norm_weight, layer_norm_bias: [in_features]; the bias is None with "RMSNorm".
        normalization, eps, zero_centered_gamma: as for `tandem.LayerNormLinear`.
        return_layernorm_output: whether forward returns the output of the norm too.
    """

    layer_norm_weight: torch.Tensor
    layer_norm_bias: torch.Tensor | None = None
    normalization: str = "LayerNorm"
    eps: float = 1e-5
    zero_centered_gamma: bool = False
    return_layernorm_output: bool = False

    def _module(self) -> OpBase:
        return LayerNormLinear(*_sizes(self.tp_group), parallel_mode=self.parallel_mode, **self._norm(), **self._parallel())


@dataclass(kw_only=True, slots=True)
class LayerNormMLPArgs(_Args):
    """Arguments of y = activation(norm(inp) fc1_weight^T + fc1_bias) fc2_weight^T + fc2_bias.

    Attributes:
        inp: x [..., hidden_size].
        layer_norm_weight, layer_norm_bias: [hidden_size]; the bias is None with "RMSNorm".
        fc1_weight, fc1_bias, fc2_weight, fc2_bias: weights [rows, columns] and biases [rows] of the products; a bias may be None.
        normalization, eps, zero_centered_gamma, return_layernorm_output: as for `LayerNormLinearArgs`.
        activation, activation_params: as for `tandem.LayerNormMLP`.
        checkpoint: whether backward recomputes the norm, the first product and the activation.
        tp_group, sequence_parallel: as for `tandem.LayerNormMLP` with `set_parallel_mode`; weights are the parts of this rank.
    """

    inp: torch.Tensor
    layer_norm_weight: torch.Tensor
    layer_norm_bias: torch.Tensor | None = None
    fc1_weight: torch.Tensor
    fc1_bias: torch.Tensor | None = None
    fc2_weight: torch.Tensor
    fc2_bias: torch.Tensor | None = None
    normalization: str = "LayerNorm"
    eps: float = 1e-5
    zero_centered_gamma: bool = False
    return_layernorm_output: bool = False
    activation: str = "gelu"
    activation_params: Mapping[str, Any] | None = None
    checkpoint: bool = False
    tp_group: Any = None
    sequence_parallel: bool = False

    def _module(self) -> OpBase:
        options = {name: getattr(self, name) for name in ("activation", "activation_params", "checkpoint")} | self._norm() | self._parallel()
        return LayerNormMLP(*_sizes(self.tp_group), set_parallel_mode=self.tp_group is not None, output_layer_init_method=_undrawn, **options)


@dataclass(kw_only=True, slots=True)
class GroupedLinearArgs(_Args):
    """Arguments of y_g = inp_g weights[g]^T + biases[g].

    Attributes:
        inp: x [..., in_features], its rows ordered by group.
        m_splits: the number of rows of each group.
        weights: one tensor [out_features, in_features] for each group.
        biases: one tensor [out_features] for each group, or None.
        main_grads: under "weights", a list with one tensor for each group.
    """

    inp: torch.Tensor
    m_splits: torch.Tensor | Sequence[int]
    weights: Sequence[torch.Tensor]
    biases: Sequence[torch.Tensor] | None = None
    main_grads: Mapping[str, Any] = field(default_factory=dict)
    _splits: tuple[Sequence[int], torch.Tensor] | None = field(default=None, init=False, repr=False, compare=False)  # as forward read them

    def _module(self) -> OpBase:
        if not isinstance(self.weights, (list, tuple)) or not self.weights:
            got = "none" if isinstance(self.weights, (list, tuple)) else type(self.weights).__name__
            raise ValueError(f"GroupedLinearArgs: expected weights to be a list of one matrix for each group, got {got}. Pass them.")
        if self.biases is not None and (not isinstance(self.biases, (list, tuple)) or len(self.biases) != len(self.weights)):
            got = str(len(self.biases)) if isinstance(self.biases, (list, tuple)) else type(self.biases).__name__
            raise ValueError(f"GroupedLinearArgs: expected biases to be a list of one vector for each of {len(self.weights)} groups, or None, got {got}. Pass all.")
        return GroupedLinear(len(self.weights), 1, 1, bias=self.biases is not None, device="meta")

    def _extra_inputs(self) -> list[torch.Tensor]:
        if isinstance(self.m_splits, torch.Tensor):
            return [self.m_splits]
        try:
            rows_of_groups = [operator.index(rows) for rows in self.m_splits]
        except TypeError:
            raise TypeError(f"GroupedLinearArgs: expected m_splits to be integers, the rows of each group, got {self.m_splits!r}. Convert them.") from None
        if self._splits is None or self._splits[0] != rows_of_groups:
            self._splits = rows_of_groups, torch.tensor(rows_of_groups, dtype=torch.int64)
        return [self._splits[1]]


def _undrawn(weight: torch.Tensor) -> None:
    """Leaves a weight without memory as it is. To draw one, torch loads Dynamo, which takes seconds."""


def _sizes(group: Any) -> tuple[int, int]:
    """The least sizes of a weight that the ranks of a group can share."""
    return (1, 1) if group is None else (group.size(), group.size())


class Results(NamedTuple):
    """The results of forward, of which the setup takes all but y."""

    y: torch.Tensor
    layernorm_output: torch.Tensor | None  # None without `return_layernorm_output`
    weight_workspaces: list[torch.Tensor] | None  # None if `weight_workspaces` was
    saved: list[torch.Tensor | None]  # the values that backward reads; None for a value that is an argument
    carried: list[tuple[int, list[int]]]  # sizes that backward reads: index in `saved`, sizes
    read: list[tuple[int, int]]  # memory and version of the argument that saved[i] is, zeros if it is none; then those of the workspaces


class Context:
    """What backward needs. `setup_context` creates it."""

    def __init__(self, inner: _C.FunctionalContext, call: _Call) -> None:
        """Wraps the context of the library, and notes which field each gradient belongs to."""
        self._inner, self._fields, self._asked, self._outputs = inner, call.fields, call.requested, call.outputs

    def saved_bytes(self) -> int:
        """Bytes of the tensors that are kept for backward, without arguments; 0 once backward has run without `retain`."""
        return self._inner.saved_bytes()

    def saved(self) -> list[torch.Tensor]:
        """The tensors that are kept for backward, without arguments."""
        saved: list[torch.Tensor] = self._inner.saved()
        return saved


Gradient = torch.Tensor | None | list[torch.Tensor | None]


class _Ops(NamedTuple):
    """The ops of a module as a text, and the fields of the arguments that are their operands."""

    text: str
    params: tuple[str, ...]  # the field of each, in the order of the gradients
    main_grads: tuple[str, ...]  # for each weight whose gradient backward adds to a tensor of the caller, its field
    outputs: int


_known: dict[Any, _Ops] = {}
_MOST_KNOWN = 64  # arguments with process groups may have new options for ever


def _ops_of(args: _Args) -> _Ops:
    """The ops of a module with the options of the arguments, which is built once, without memory."""
    own = [each for each in fields(args) if each.name not in _Args.__dataclass_fields__]
    key = (type(args), *[_trait(getattr(args, each.name), "Tensor" in str(each.type)) for each in own], *sorted(args.main_grads), args.overwrite_main_grad)
    if (found := _known.get(key)) is not None:
        return found
    with quantized_model_init(enabled=False):
        module = args._module()
    parts = [part for part in module.flat_ops() if not isinstance(part, Bias) or getattr(args, part._parameters.names["bias"]) is not None]
    weights: set[str] = set()
    for part in parts:
        if isinstance(part, (BasicLinear, GroupedLinear)):
            weight = _field(next(places(part, "_parameters")))
            part.accumulate_into_main_grad = weight in args.main_grads
            weights.add(weight)
    if unknown := set(args.main_grads) - weights:
        raise ValueError(
            f"{type(args).__name__}: expected main_grads to name some of {', '.join(sorted(weights))}, got {sorted(unknown)[0]!r}. Name fields that are "
            "weights of products."
        )
    now = OpRun(parts).prepare()
    modes = Modes(tuple([(at, ("none", args.overwrite_main_grad)) for at in now.main_grad_places]))
    text, _ = now.ops_text((), None, modes, buffers=False, shared=False, name_instances=False)
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    made = _known[key] = _Ops(text, tuple(map(_field, now.places)), tuple(map(_field, now.main_grad_places.values())), now.num_outputs)
    return made


def _trait(value: Any, is_operand: bool) -> Any:
    """What ops depend on of a field's value: of an operand whether there is one, of a list of them their number."""
    if is_operand:
        return len(value) if isinstance(value, (list, tuple)) else value is not None
    if isinstance(value, torch.distributed.ProcessGroup):  # a reference would keep it after its end
        return value.group_name, value.size()
    if isinstance(value, Mapping):
        return tuple([(name, _trait(each, False)) for name, each in value.items()])
    return type(value), value if isinstance(value, (bool, int, float, str, type(None))) else object()  # the module refuses the others, each time


def _field(place: Place) -> str:
    """The field that a module's parameter is in: "weights" for "weight2" of a grouped module."""
    module, name = place
    if not isinstance(module, GroupedLinear):
        return name
    return "weights" if name.startswith("weight") else "biases"


class _Call:
    """The operands of one call, and the field that each gradient belongs to."""

    def __init__(self, args: _Args) -> None:
        name = type(args).__name__
        check_recipe(name, args.recipe)
        if not isinstance(args.main_grads, Mapping):
            raise TypeError(f"{name}: expected main_grads to be tensors by the names of fields, got {type(args.main_grads).__name__}. Pass a dict.")
        if isinstance(args.needs_grad, str):
            raise TypeError(f"{name}: expected needs_grad to be names of fields, got the text {args.needs_grad!r}. Pass a list of names.")
        ops = _ops_of(args)
        inputs = [*_tensors(args, "inp"), *args._extra_inputs()]
        params = [tensor for each in dict.fromkeys(ops.params) for tensor in _tensors(args, each)]
        self.outputs = ops.outputs
        self.fields: list[str | None] = ["inp", *[None] * (len(inputs) - 1), *ops.params]  # None: an input that has no gradient
        needs, known = args.needs_grad, {each for each in self.fields if each is not None}
        if unknown := set(needs or ()) - known:
            raise ValueError(
                f"{name}: expected needs_grad to name some of {', '.join(sorted(known))}, got {sorted(unknown)[0]!r}. Name fields that are tensors."
            )
        self.requested = [
            each is not None and tensor.is_floating_point() and (needs is None or each in needs)
            for each, tensor in zip(self.fields, (*inputs, *params), strict=True)
        ]
        self.arguments = _C.FunctionalArguments(
            ops=ops.text,
            recipe="null" if args.recipe is None else args.recipe.to_json(),
            inputs=inputs,
            params=params,
            requested=self.requested,
            workspaces=None if args.weight_workspaces is None else list(args.weight_workspaces),
            state=list(args.recipe_state),
            buffers=[tensor for weight in dict.fromkeys(ops.main_grads) for tensor in _main_grads(args, weight, ops.main_grads.count(weight))],
        )


def _main_grads(args: _Args, weight: str, count: int) -> list[torch.Tensor]:
    """The tensors to which backward adds the gradients of the `count` weights in a field."""
    given: Any = args.main_grads[weight]
    tensors = [_checked(args, each, f"main_grads of {weight}") for each in (given if isinstance(given, (list, tuple)) else [given])]
    if len(tensors) != count:
        raise ValueError(
            f"{type(args).__name__}: expected main_grads of {weight} to be one tensor for each weight, {count} in all, got {len(tensors)}. Pass a list of them."
        )
    return tensors


def _tensors(args: _Args, name: str) -> list[torch.Tensor]:
    """The tensors in a field, one or a list."""
    value = getattr(args, name)
    if name not in _LISTS:
        return [_checked(args, value, name)]
    return [_checked(args, each, f"{name}[{at}]") for at, each in enumerate(value)]


def _checked(args: _Args, value: Any, name: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{type(args).__name__}: expected {name} to be a tensor, got {type(value).__name__}. Pass one.")
    return value


def forward(args: _Args) -> Results:
    """The results of the module whose arguments these are: y, and what `setup_context` takes."""
    outputs, saved, read, carried, workspaces = _C.functional_forward(_Call(args).arguments)
    normed = outputs[1] if len(outputs) > 1 else None
    return Results(outputs[0], normed, None if args.weight_workspaces is None else workspaces, saved, carried, read)


def setup_context(args: _Args, results: Results) -> Context:
    """The context for `backward`. It raises ValueError if `results` do not belong to `args`."""
    call = _Call(args)
    outputs = [results.y] if results.layernorm_output is None else [results.y, results.layernorm_output]
    workspaces = results.weight_workspaces or []
    return Context(_C.FunctionalContext(call.arguments, outputs, results.saved, results.read, results.carried, workspaces), call)


def backward(
    context: Context, grad_y: torch.Tensor | None, grad_layernorm_output: torch.Tensor | None = None, *, retain: bool = False
) -> dict[str, Gradient]:
    """The gradients by field, a list for a field that is a list; None for a gradient that is added to a `main_grad`.

    Args:
        context: the result of the setup.
        grad_y: the gradient of y.
        grad_layernorm_output: the gradient of the norm's output, if forward returned that.
        retain: whether the context keeps its tensors for another call of backward, instead of releasing each after its last use.
    """
    if context._outputs == 1 and grad_layernorm_output is not None:
        raise ValueError("backward: expected a gradient of y alone, as no output of a norm was returned, got grad_layernorm_output. Leave it out.")
    found: dict[str, list[torch.Tensor | None]] = {}
    gradients = context._inner.backward([grad_y, grad_layernorm_output][: context._outputs], retain)
    for name, requested, gradient in zip(context._fields, context._asked, gradients, strict=True):
        if name is not None and requested:
            found.setdefault(name, []).append(gradient)
    return {name: each if name in _LISTS else each[0] for name, each in found.items()}


linear_forward = layernorm_linear_forward = layernorm_mlp_forward = grouped_linear_forward = forward
linear_setup_context = layernorm_linear_setup_context = layernorm_mlp_setup_context = grouped_linear_setup_context = setup_context
linear_backward = layernorm_linear_backward = layernorm_mlp_backward = grouped_linear_backward = backward

__all__ = [
    "Context",
    "GroupedLinearArgs",
    "LayerNormLinearArgs",
    "LayerNormMLPArgs",
    "LinearArgs",
    "Results",
    "backward",
    "forward",
    "setup_context",
    *[f"{module}_{part}" for module in ("linear", "layernorm_linear", "layernorm_mlp", "grouped_linear") for part in ("forward", "setup_context", "backward")],
]
