"""What tests of experts share: references in float64, a row of each group after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tandem import ops

# Largest distance from the float64 result of a product with few terms, as rtol; atol is four times that.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def by_group(tensors: dict[str, torch.Tensor], name: str, groups: int) -> Sequence[torch.Tensor] | None:
    """Weights or biases of groups, packed or not; None where there are none."""
    if name in tensors:
        return tensors[name].unbind(0)
    return [tensors[f"{name}{g}"] for g in range(groups)] if f"{name}0" in tensors else None


def gradients_by_group(module: torch.nn.Module, name: str, groups: int) -> Sequence[torch.Tensor] | None:
    """The gradients of what `by_group` gives."""
    return by_group({each: param.grad for each, param in module.named_parameters()}, name, groups)


def linears_of(module: ops.GroupedLinear) -> list[ops.Linear]:
    """A Linear for each group, with the parameters of the module."""
    params = dict(module.named_parameters())
    weights, biases = (by_group(params, name, module.num_groups) for name in ("weight", "bias"))
    linears = []
    for group, weight in enumerate(weights):
        linear = ops.Linear(module.in_features, module.out_features, bias=biases is not None, dtype=weight.dtype)
        linear.weight = torch.nn.Parameter(weight.detach().clone())
        if biases is not None:
            linear.bias = torch.nn.Parameter(biases[group].detach().clone())
        linears.append(linear)
    return linears


def product(
    rows: torch.Tensor, splits: Sequence[int], params: dict[str, torch.Tensor], scales: torch.Tensor | None = None, groups: int | None = None
) -> torch.Tensor:
    """What a GroupedLinear with these parameters computes of the rows."""
    groups = len(splits) if groups is None else groups
    weights, biases = by_group(params, "weight", groups), by_group(params, "bias", groups)
    parts, first = [], 0
    for g, count in enumerate(splits):
        part = rows[first : first + count] @ weights[g].t()
        if biases is not None:
            part = part + (biases[g] if scales is None else scales[first : first + count, None] * biases[g])
        parts.append(part)
        first += count
    parts.append(rows.new_zeros(rows.shape[0] - first, weights[0].shape[0]))
    return torch.cat(parts)


def wide(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters as float64 leaves, by name."""
    return {name: param.detach().double().requires_grad_() for name, param in module.named_parameters()}


def drawn(module: Any) -> Any:
    """The module with parameters that are all drawn."""
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn_like(param) / 2)
    return module


def grad_of(tensor: torch.Tensor) -> torch.Tensor:
    """The gradient, zeros where there is none."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def made(groups: int = 4, in_features: int = 6, out_features: int = 5, **arguments: Any) -> ops.GroupedLinear:
    return drawn(ops.GroupedLinear(groups, in_features, out_features, **arguments))


def _of_groups(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    ends = offs.tolist()
    with torch.autocast("cpu", enabled=False):  # which such operators do not know
        return product(x, [end - begin for begin, end in zip([0, *ends], ends, strict=False)], {"weight": weight.mT})


# The operator of transformers where Dynamo traces other dtypes than bfloat16, the only one that torch's own product of groups takes there.
_operator = torch.library.custom_op("transformers::grouped_mm_fallback", _of_groups, mutates_args=())
_operator.register_fake(lambda x, weight, offs: x.new_empty(len(x), weight.shape[2]))


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    *operands, ctx.offs = inputs
    ctx.save_for_backward(*operands)


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    operands = [each.detach().requires_grad_() for each in ctx.saved_tensors]
    with torch.enable_grad():
        y = _of_groups(*operands, ctx.offs)
    return *torch.autograd.grad(y, operands, grad), None


_operator.register_autograd(_gradients, setup_context=_keep)


def grouped_product(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """x_g weight_g for the rows x_g of each group, which ends at `offs`: a call of that operator."""
    return torch.ops.transformers.grouped_mm_fallback(x, weight, offs=offs)
