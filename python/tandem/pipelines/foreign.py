"""Weights of other libraries whose type defines its own product, such as quantized weights. `torch.nn.functional.linear` calls it; a pipeline cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tandem.pipelines.prepared import Prepared


def has_own_product(weight: Any) -> bool:
    """Whether the type of a weight overrides functions of torch."""
    function = getattr(type(weight), "__torch_function__", None)
    return isinstance(weight, torch.Tensor) and getattr(function, "__func__", None) not in (None, torch.Tensor.__torch_function__.__func__)  # type: ignore[attr-defined]


def own_products(run: Prepared) -> tuple[int, ...]:
    """Indices of products with such a weight. It is empty for a run whose ops have extra inputs or outputs, or write gradients elsewhere."""
    if run.has_modes or run.num_extra_inputs or run.num_outputs > 1 or any(inputs or outputs for inputs, outputs in run.bindings):
        return ()
    return tuple([at for at, op in enumerate(run.basic_ops) if op._kind == "basic_linear" and not op._joins and has_own_product(getattr(op, "weight", None))])


def reasons(run: Prepared, products: tuple[int, ...]) -> list[str]:
    """The reasons why these products run alone, for `explain`."""
    ops = [run.basic_ops[at] for at in products]
    return [f"{op._holder._get_name()} has a weight of type {type(op.weight).__name__}, which multiplies by itself" for op in ops]
