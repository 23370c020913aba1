"""Weights of other libraries whose type defines its own product, such as quantized weights. `torch.nn.functional.linear` calls it; a pipeline cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from tandem.op_base.base import BasicOpBase
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


class Piece(NamedTuple):
    """Either consecutive ops as a run of their own, or one product."""

    run: Any  # None for a product
    product: Any


class Pieces:
    """The pieces into which such weights divide a run, and the reasons for `explain`."""

    def __init__(self, pieces: Sequence[Piece], products: Sequence[BasicOpBase]) -> None:
        self.pieces = pieces
        self.parts = [piece for piece in pieces if piece.run is not None]
        self.reasons = [f"{op._holder._get_name()} has a weight of type {type(op.weight).__name__}, which multiplies by itself" for op in products]

    def __call__(self, x: Any, training: bool) -> Any:
        for run, product in self.pieces:
            x = torch.nn.functional.linear(x, product.weight) if run is None else run(x, (), training)
        return x


def pieces(now: Prepared, products: tuple[int, ...], run_of: Callable[..., Any]) -> Pieces:
    """The pieces of a run, computed once for each set of products. `run_of` makes a run from ops, their bindings and terms."""
    key: Any = ("products", *products)
    known: Pieces | None = now.cuts.get(key)
    if known is not None:
        return known
    made: list[Piece] = []
    begin = 0
    for at in (*products, len(now.basic_ops)):
        if at > begin:
            made.append(Piece(run_of(now.basic_ops[begin:at], now.bindings[begin:at], now.terms._replace(required=())), None))
        if at < len(now.basic_ops):
            made.append(Piece(None, now.basic_ops[at]))
        begin = at + 1
    found: Pieces = now.cuts.setdefault(key, Pieces(made, [now.basic_ops[at] for at in products]))
    return found
