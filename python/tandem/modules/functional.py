"""The modules as functions on argument structs, without a module and without autograd. All state is passed in and returned.

Each module has three functions: `*_forward(args)` computes y, `*_setup_context(args, results)` collects what backward needs, and
`*_backward(context, gradients)` returns the gradients by the names of the fields of `args`. The functions run the plan of the module's pipeline:
they run equal steps with equal fusions, and results are equal bit by bit.

Neither outputs nor saved tensors share memory with an argument: the setup takes the arguments from `args`. It raises ValueError if an argument that
backward reads is not the tensor that forward received, or was written since forward; backward raises it if one was written since the setup. The last
step of backward that reads a saved tensor releases it.

>>> import torch
>>> from tandem.modules import functional
>>> args = functional.LinearArgs(inp=torch.randn(3, 4), weight=torch.randn(2, 4), bias=torch.zeros(2))
>>> results = functional.linear_forward(args)
>>> context = functional.linear_setup_context(args, results)
>>> gradients = functional.linear_backward(context, torch.ones(3, 2))
>>> results.y.shape, {name: tuple(gradient.shape) for name, gradient in gradients.items()}
(torch.Size([3, 2]), {'inp': (3, 4), 'weight': (2, 4), 'bias': (2,)})
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from tandem import _C
from tandem.ops.arguments import flag
from tandem.ops.collective import collectives
from tandem.ops.library import class_of
from tandem.recipe import Recipe
from tandem.recipe.base import check_recipe

_NORMS = {"LayerNorm": "layer_norm", "RMSNorm": "rms_norm"}
Field = tuple[str, int]  # a tensor in the arguments: name of the field, and index in it if the field is a list, else -1


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


class Results(NamedTuple):
    """The results of forward, of which the setup takes all but y."""

    y: torch.Tensor
    layernorm_output: torch.Tensor | None  # None without `return_layernorm_output`
    weight_workspaces: list[torch.Tensor] | None  # None if `weight_workspaces` was
    saved: list[torch.Tensor | None]  # the values that backward reads; None for a value that is an argument
    carried: list[tuple[int, list[int]]]  # sizes that backward reads: index in `saved`, sizes
    read: list[tuple[int, int]]  # memory and version of the argument that saved[i] is, zeros if it is none; then those of the workspaces


class Context:
    """What backward needs. The functions `*_setup_context` of `tandem.modules.functional` create it."""

    def __init__(self, inner: _C.PlainContext, call: _Call) -> None:
        """Wraps the context of the library, and notes which field each gradient belongs to."""
        self._inner, self._fields, self._asked, self._outputs = inner, call.fields, call.asked, call.outputs

    def saved_bytes(self) -> int:
        """Bytes of the tensors that are kept for backward, without arguments; 0 once backward has run without `retain`."""
        return self._inner.saved_bytes()

    def saved(self) -> list[torch.Tensor]:
        """The tensors that are kept for backward, without arguments."""
        saved: list[torch.Tensor] = self._inner.saved()
        return saved


Gradient = torch.Tensor | None | list[torch.Tensor | None]


class _Call:
    """The ops of a module's pipeline, their operands, and the field of the arguments that each operand is."""

    def __init__(self, args: _Args) -> None:
        self.args = args
        self.entries: list[Any] = []
        self.params: list[torch.Tensor] = []
        self.inputs: list[torch.Tensor] = []
        self.input_fields: list[Field | None] = []
        self.param_fields: list[Field] = []
        self.buffers: list[torch.Tensor] = []
        self.outputs = 1
        self.slots = [0, 0]
        self.products: list[str] = []  # fields that are weights of products
        check_recipe(type(args).__name__, args.recipe)

    def check_tensor(self, value: object, name: str) -> None:
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{type(self.args).__name__}: expected {name} to be a tensor, got {type(value).__name__}. Pass one.")

    def give(self, tensor: torch.Tensor, name: str | None) -> None:
        """Adds an input, which is the field `name`; None: no gradient is returned for it."""
        self.check_tensor(tensor, name or "m_splits")
        self.inputs.append(tensor)
        self.input_fields.append(None if name is None else (name, -1))

    def add(self, op: str, options: Mapping[str, Any], operands: Sequence[tuple[Field, torch.Tensor]] = (), **more: Any) -> None:
        """Adds an op with its parameters."""
        for (name, element), tensor in operands:
            self.check_tensor(tensor, name if element < 0 else f"{name}[{element}]")
        if op in ("basic_linear", "grouped_linear"):
            self.products.append(operands[0][0][0])
        places = [*range(len(self.params), len(self.params) + len(operands))]
        self.params += [tensor for _, tensor in operands]
        self.param_fields += [name for name, _ in operands]
        options, absorbed = dict(options), []
        if operands and (main_grad := self.args.main_grads.get(operands[0][0][0])) is not None:
            options |= {"accumulate_into_main_grad": True, "overwrite_main_grad": self.args.overwrite_main_grad}
            tensors = list(main_grad) if isinstance(main_grad, (list, tuple)) else [main_grad]
            weight = operands[0][0][0]
            for tensor in tensors:
                self.check_tensor(tensor, f"main_grads of {weight}")
            absorbed = [place for place, ((name, _), _) in zip(places, operands, strict=True) if name == weight]
            if len(tensors) != len(absorbed):
                raise ValueError(
                    f"{type(self.args).__name__}: expected main_grads of {weight} to be one tensor for each weight, {len(absorbed)} in all, got {len(tensors)}. "
                    "Pass a list of them."
                )
            self.buffers += tensors
        forward, backward = _C.quantize_slots(op, json.dumps(options))
        state = (0, *self.slots) if forward + backward else None
        self.slots = [self.slots[0] + forward, self.slots[1] + backward]
        self.entries.append(_C.OpEntry(op=op, options=json.dumps(options), params=places, main_grads=absorbed, state=state, **more))

    def add_parts(self, parts: Sequence[Any]) -> None:
        """Adds ops without parameters, such as collectives."""
        for part in parts:
            self.add(part._kind, part._options())

    def add_norm(self, args: Any, recompute: bool = False) -> None:
        if args.normalization not in _NORMS:
            raise ValueError(f'{type(args).__name__}: expected normalization "LayerNorm" or "RMSNorm", got {args.normalization!r}. Name one of them.')
        operands = [(("layer_norm_weight", -1), args.layer_norm_weight)]
        if args.normalization == "LayerNorm":
            if args.layer_norm_bias is None:
                raise ValueError(f"{type(args).__name__}: expected layer_norm_bias of a LayerNorm, got None. Pass it, or use RMSNorm.")
            operands.append((("layer_norm_bias", -1), args.layer_norm_bias))
        elif args.layer_norm_bias is not None:
            raise ValueError(f"{type(args).__name__}: expected layer_norm_bias=None with RMSNorm, which adds none, got a tensor. Leave it out, or use LayerNorm.")
        self.add(_NORMS[args.normalization], {"eps": args.eps, "zero_centered_gamma": args.zero_centered_gamma}, operands, recompute=recompute)
        if args.return_layernorm_output:
            self.outputs += 1
            self.add("make_extra_output", {}, extra_outputs=[(None, True)])

    def add_product(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        prefix: str = "",
        after: Sequence[Any] = (),
        recompute: bool = False,
        saves_original: bool = False,
    ) -> None:
        self.add("basic_linear", {"save_original_input": saves_original}, [((f"{prefix}weight", -1), weight)], recompute=recompute)
        self.add_parts(after)
        if bias is not None:
            self.add("bias", {}, [((f"{prefix}bias", -1), bias)], recompute=recompute)

    @property
    def fields(self) -> list[Field | None]:
        """The field of each input and then of each parameter, in the order of the gradients."""
        return [*self.input_fields, *self.param_fields]

    @functools.cached_property
    def asked(self) -> list[bool]:
        needs = self.args.needs_grad
        tensors = [*self.inputs, *self.params]
        known = {name for name, _ in filter(None, self.fields)}
        if unknown := set(needs or ()) - known:
            raise ValueError(
                f"{type(self.args).__name__}: expected needs_grad to name some of {', '.join(sorted(known))}, got {sorted(unknown)[0]!r}. Name "
                "fields that are tensors."
            )
        return [
            place is not None and tensor.is_floating_point() and (needs is None or place[0] in needs)
            for place, tensor in zip(self.fields, tensors, strict=True)
        ]

    def arguments(self) -> _C.PlainArguments:
        args = self.args
        if unknown := set(args.main_grads) - set(self.products):
            raise ValueError(
                f"{type(args).__name__}: expected main_grads to name some of {', '.join(self.products)}, got {sorted(unknown)[0]!r}. Name fields that are "
                "weights of products."
            )
        workspaces = args.weight_workspaces
        return _C.PlainArguments(
            ops=_C.write_ops(self.entries),
            recipe="null" if args.recipe is None else args.recipe.to_json(),
            inputs=self.inputs,
            params=self.params,
            asked=self.asked,
            workspaces=None if workspaces is None else list(workspaces),
            state=list(args.recipe_state),
            buffers=self.buffers,
        )


def _linear(args: LinearArgs) -> _Call:
    call = _Call(args)
    before, after, _ = collectives(type(args).__name__, args.parallel_mode, args.tp_group, args.sequence_parallel)
    call.give(args.inp, "inp")
    if isinstance(args, LayerNormLinearArgs):
        call.add_norm(args)
    call.add_parts(before)
    call.add_product(args.weight, args.bias, after=after, saves_original=flag(type(args).__name__, "save_original_input", args.save_original_input))
    return call


def _layernorm_mlp(args: LayerNormMLPArgs) -> _Call:
    call = _Call(args)
    mode = None if args.tp_group is None else "column"
    before, _, _ = collectives(type(args).__name__, mode, args.tp_group, args.sequence_parallel)
    _, after, _ = collectives(type(args).__name__, mode and "row", args.tp_group, args.sequence_parallel)
    call.give(args.inp, "inp")
    call.add_norm(args, args.checkpoint)
    call.add_parts(before)
    call.add_product(args.fc1_weight, args.fc1_bias, "fc1_", recompute=args.checkpoint)
    activation = class_of(args.activation)(**(args.activation_params or {}))
    call.add(activation._kind, activation._options(), recompute=args.checkpoint)
    call.add_product(args.fc2_weight, args.fc2_bias, "fc2_", after)
    return call


def _grouped_linear(args: GroupedLinearArgs) -> _Call:
    call = _Call(args)
    call.give(args.inp, "inp")
    splits = args.m_splits
    if not isinstance(splits, torch.Tensor):
        try:
            rows_of_groups = [operator.index(rows) for rows in splits]
        except TypeError:
            raise TypeError(f"GroupedLinearArgs: expected m_splits to be integers, the rows of each group, got {splits!r}. Convert them.") from None
        if args._splits is None or args._splits[0] != rows_of_groups:
            args._splits = rows_of_groups, torch.tensor(rows_of_groups, dtype=torch.int64)
        splits = args._splits[1]
    if not args.weights:
        raise ValueError("GroupedLinearArgs: expected weights to be one matrix for each group, got none. Pass them.")
    call.give(splits, None)
    options = {"num_groups": len(args.weights), "bias": args.biases is not None}
    operands = [(("weights", group), weight) for group, weight in enumerate(args.weights)]
    operands += [(("biases", group), bias) for group, bias in enumerate(args.biases or ())]
    call.add("grouped_linear", options, operands, extra_inputs=[None])
    return call


def _forward(make: Callable[[Any], _Call], args: _Args) -> Results:
    call = make(args)
    outputs, saved, read, carried, workspaces = _C.plain_forward(call.arguments())
    normed = outputs[1] if len(outputs) > 1 else None
    return Results(outputs[0], normed, None if args.weight_workspaces is None else workspaces, saved, carried, read)


def _setup_context(make: Callable[[Any], _Call], args: _Args, results: Results) -> Context:
    call = make(args)
    outputs = [results.y] if results.layernorm_output is None else [results.y, results.layernorm_output]
    workspaces = results.weight_workspaces or []
    return Context(_C.PlainContext(call.arguments(), outputs, results.saved, results.read, results.carried, workspaces), call)


def _backward(
    context: Context, grad_y: torch.Tensor | None, grad_layernorm_output: torch.Tensor | None = None, *, retain: bool = False
) -> dict[str, Gradient]:
    given = [grad_y, grad_layernorm_output][: context._outputs]
    found: dict[str, Gradient] = {}
    for place, asked, gradient in zip(context._fields, context._asked, context._inner.backward(given, retain), strict=True):
        if place is None or not asked:
            continue
        name, element = place
        if element < 0:
            found[name] = gradient
        else:
            found.setdefault(name, []).append(gradient)  # type: ignore[union-attr]
    return found


def linear_forward(args: LinearArgs) -> Results:
    """y = inp weight^T + bias."""
    return _forward(_linear, args)


def linear_setup_context(args: LinearArgs, results: Results) -> Context:
    """The context for `linear_backward`. It raises ValueError if `results` do not belong to `args`."""
    return _setup_context(_linear, args, results)


def linear_backward(context: Context, grad_y: torch.Tensor | None, *, retain: bool = False) -> dict[str, Gradient]:
    """The gradients by field; None for a gradient that is added to a `main_grad`.

    Args:
        context: the result of the setup.
        grad_y: the gradient of y.
        retain: whether the context keeps its tensors for another call of backward, instead of releasing each after its last use.
    """
    return _backward(context, grad_y, retain=retain)


def layernorm_linear_forward(args: LayerNormLinearArgs) -> Results:
    """y = norm(inp) weight^T + bias."""
    return _forward(_linear, args)


def layernorm_linear_setup_context(args: LayerNormLinearArgs, results: Results) -> Context:
    """As `linear_setup_context`."""
    return _setup_context(_linear, args, results)


def layernorm_linear_backward(
    context: Context, grad_y: torch.Tensor | None, grad_layernorm_output: torch.Tensor | None = None, *, retain: bool = False
) -> dict[str, Gradient]:
    """As `linear_backward`; `grad_layernorm_output` is the gradient of the norm's output, if forward returned that."""
    return _backward(context, grad_y, grad_layernorm_output, retain=retain)


def layernorm_mlp_forward(args: LayerNormMLPArgs) -> Results:
    """y = activation(norm(inp) fc1_weight^T + fc1_bias) fc2_weight^T + fc2_bias."""
    return _forward(_layernorm_mlp, args)


def layernorm_mlp_setup_context(args: LayerNormMLPArgs, results: Results) -> Context:
    """As `linear_setup_context`."""
    return _setup_context(_layernorm_mlp, args, results)


def layernorm_mlp_backward(
    context: Context, grad_y: torch.Tensor | None, grad_layernorm_output: torch.Tensor | None = None, *, retain: bool = False
) -> dict[str, Gradient]:
    """As `layernorm_linear_backward`."""
    return _backward(context, grad_y, grad_layernorm_output, retain=retain)


def grouped_linear_forward(args: GroupedLinearArgs) -> Results:
    """y_g = inp_g weights[g]^T + biases[g]."""
    return _forward(_grouped_linear, args)


def grouped_linear_setup_context(args: GroupedLinearArgs, results: Results) -> Context:
    """As `linear_setup_context`."""
    return _setup_context(_grouped_linear, args, results)


def grouped_linear_backward(context: Context, grad_y: torch.Tensor | None, *, retain: bool = False) -> dict[str, Gradient]:
    """As `linear_backward`; "weights" and "biases" are lists."""
    return _backward(context, grad_y, retain=retain)


__all__ = [
    "Context",
    "GroupedLinearArgs",
    "LayerNormLinearArgs",
    "LayerNormMLPArgs",
    "LinearArgs",
    "Results",
    "grouped_linear_backward",
    "grouped_linear_forward",
    "grouped_linear_setup_context",
    "layernorm_linear_backward",
    "layernorm_linear_forward",
    "layernorm_linear_setup_context",
    "layernorm_mlp_backward",
    "layernorm_mlp_forward",
    "layernorm_mlp_setup_context",
    "linear_backward",
    "linear_forward",
    "linear_setup_context",
]
