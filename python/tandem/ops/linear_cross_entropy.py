"""The cross entropy of a model with many classes, as a function."""

from __future__ import annotations

import functools
from typing import Any, Literal, overload

import torch

from tandem import _C
from tandem.op_base.directions import description_of
from tandem.op_base.signature import signature_of
from tandem.ops.collective import collectives
from tandem.ops.loss import shared_classes
from tandem.tracing import constant_while_traced, number_while_traced

_OPERANDS = {
    "input": "what the classes are predicted of, [..., in_features]",
    "linear_weight": "the weight of the head, [num_classes, in_features]",
    "target": "the number of a class for each row, int64",
    "linear_bias": "the bias of the head, [num_classes], or None",
    "weight": "a factor for each class, [num_classes], or None",
}


@constant_while_traced
def _description(kind: str, parameters: int, group: Any, **options: bool | int | float | str) -> str:
    before, _, size = collectives("linear_cross_entropy", None if group is None else "column", group, sequence_parallel=False)
    parts = () if size == 1 else tuple([(part._kind, tuple(part._options().items())) for part in before])
    return _written(kind, parameters, parts, **options, **({} if size == 1 else shared_classes(group)))


@functools.cache
def _written(kind: str, parameters: int, before: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...], **options: bool | int | float | str) -> str:
    named = {option.name: option for option in signature_of(kind).options}
    checked = {name: named[name].checked("linear_cross_entropy", name, value) for name, value in options.items()}
    loss = _C.OpEntry(op=kind, params=[*range(parameters)], options=checked)
    return description_of([*[_C.OpEntry(op=name, options=dict(own)) for name, own in before], loss])


@overload
def linear_cross_entropy(
    input: torch.Tensor, linear_weight: torch.Tensor, target: torch.Tensor, *, linear_bias: torch.Tensor | None = ..., weight: torch.Tensor | None = ...,
    reduction: str = ..., ignore_index: int | None = ..., label_smoothing: float = ..., options: None = ..., soft_cap: float = ..., z_loss: float = ...,
    process_group: Any = ..., return_predictions: Literal[False] = ...,
) -> torch.Tensor: ...


@overload
def linear_cross_entropy(
    input: torch.Tensor, linear_weight: torch.Tensor, target: torch.Tensor, *, linear_bias: torch.Tensor | None = ..., weight: torch.Tensor | None = ...,
    reduction: str = ..., ignore_index: int | None = ..., label_smoothing: float = ..., options: None = ..., soft_cap: float = ..., z_loss: float = ...,
    process_group: Any = ..., return_predictions: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def linear_cross_entropy(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    *,
    linear_bias: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: None = None,
    soft_cap: float = 0.0,
    z_loss: float = 0.0,
    process_group: Any = None,
    return_predictions: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of the logits input linear_weight^T + linear_bias and the targets, without all logits in memory at once.
    It is `torch.nn.functional.linear_cross_entropy` with further arguments, from `soft_cap` on. Compiled code treats numbers as constants:
    another `z_loss`, for example, is compiled anew.

    Args:
        input: [..., in_features].
        linear_weight: [num_classes, in_features].
        target: [...], int64: the class of each row, or `ignore_index`. Probabilities of classes, which torch accepts too, raise TypeError.
        linear_bias: [num_classes], or None.
        weight: [num_classes]: factors of the losses of each class, or None. It gets no gradient.
        reduction: "mean" weighted by the factors of the rows, "sum", or "none" for one loss per row.
        ignore_index: rows with this target have loss 0 and no gradient; None: -100, as in torch.
        label_smoothing: from 0 to 1; the share of a target that is spread over all classes.
        options: None. In torch it bounds the number of logits in memory; other values raise TypeError.
        soft_cap: at least 0; logits become soft_cap tanh(logits / soft_cap); 0: logits stay unchanged.
        z_loss: at least 0; the factor of logsumexp(logits)^2 in the loss of a row; `weight` does not multiply this term.
        process_group: the group whose ranks share the classes: each passes `linear_weight`, `linear_bias` and `weight` of its own classes, in the
            order of ranks. All ranks pass the same `input` and `target`, which counts all classes, and get the same loss and gradient of `input`.
            None: this process has all classes.
        return_predictions: whether the class of the largest logit of each row, int64, is returned after the loss.

    Returns:
        The loss in float32, or in float64 if `linear_weight` is float64: [], or [...] with `reduction` "none".

    Raises:
        ValueError: if shapes do not fit, or an option has a value that is not allowed.
        TypeError: if an operand is not a tensor, or the targets are not int64.
        IndexError: for the first target that is no class.

    >>> import torch, tandem
    >>> x, head = torch.randn(5, 16, requires_grad=True), torch.nn.Linear(16, 1000, bias=False)
    >>> tandem.linear_cross_entropy(x, head.weight, torch.tensor([3, 1, -100, 4, 1])).backward()
    """
    for name, operand in (("input", input), ("linear_weight", linear_weight), ("target", target), ("linear_bias", linear_bias), ("weight", weight)):
        is_tensor = hasattr(type(operand), "__torch_function__")  # proxies of torch.fx have it too
        if not is_tensor and (operand is not None or name in ("input", "linear_weight", "target")):
            raise TypeError(f"linear_cross_entropy: expected {name} to be a tensor, got {type(operand).__name__}. Pass {_OPERANDS[name]}.")
    if options is not None:
        raise TypeError(f"linear_cross_entropy: expected options None, as there are never all logits at once, got {type(options).__name__}. Leave it out.")
    params = [linear_weight, *[each for each in (linear_bias, weight) if each is not None]]
    description = _description(
        "linear_cross_entropy_with_predictions" if return_predictions else "linear_cross_entropy",
        len(params),
        process_group,
        bias=linear_bias is not None,
        class_weight=weight is not None,
        reduction=reduction,
        ignore_index=-100 if ignore_index is None else number_while_traced(ignore_index),
        label_smoothing=number_while_traced(label_smoothing),
        soft_cap=number_while_traced(soft_cap),
        z_loss=number_while_traced(z_loss),
    )
    outputs = torch.ops.tandem.pipeline(input, [target], params, [], [], [], description)
    return (outputs[0], outputs[1]) if return_predictions else outputs[0]
