"""Limits of torch.distributed.tensor.parallel: columns that an op needs together must not be divided between ranks, and some ops have no sharding
rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tandem import _C
from tandem.op_base.base import BasicOpBase, OpBase
from tandem.quantized.parameters import is_shared

_PRODUCTS = ("basic_linear", "grouped_linear")


def _is_cut_by_rows(weight: Any) -> bool:
    """Whether each rank holds some rows of the weight, and so computes some columns of the product."""
    return is_shared(weight) and any(
        placement.is_shard(0) and ranks > 1 for placement, ranks in zip(weight.placements, weight.device_mesh.shape, strict=True)
    )


def _parts(op: BasicOpBase) -> dict[str, Any]:
    return {name: getattr(op, name) for names in op.__dict__["_joined"].values() for name in names}


def has_parts_of_ranks(ops: Sequence[BasicOpBase]) -> bool:
    """Whether ranks share parts of joined weights, which calls then have to check."""
    return any(is_shared(part) for op in ops for part in _parts(op).values())


def check_parts(ops: Sequence[BasicOpBase]) -> None:
    """Raises ValueError if a part of a joined weight is divided by rows, because a rank's columns of y would all be of one part."""
    for op in ops:
        for name, part in _parts(op).items():
            if _is_cut_by_rows(part):
                raise ValueError(
                    f"{op._holder._get_name()}: expected {name}, a part of a product (parameters_split), on every rank whole or cut along its "
                    f"columns (by distribute_tensor, Shard(1)), got placements {part.placements}: a rank's share of y would be columns of one part. Build it "
                    'with tensor_parallel_mode="column", or one Linear for each part.'
                )


def cut_product(product: OpBase | None, op: OpBase | None, x: Any, y: Any) -> OpBase | None:
    """The product of whose columns y = op(x) has one rank's. It is the op if y has fewer columns than its weight has rows, otherwise `product`, unless
    a hook has gathered the columns. A weight that FSDP shards was whole in the call that computed y."""
    weight: Any = op._parameters.get("weight") if isinstance(op, torch.nn.Linear) else None
    if is_shared(weight) and not is_shared(y) and y.size(-1) < weight.size(0):
        return op
    return product if product is not None and y.numel() == x.numel() else None


def check_columns(product: OpBase | None, ops: Sequence[OpBase], x: Any) -> OpBase | None:
    """Raises ValueError if one of these ops would take one rank's columns of `product` for all columns. The first op gets x. Returns the product if
    the output of the ops still has one rank's columns, otherwise None."""
    if product is None or is_shared(x):
        return None
    for op in (basic_op for each in ops for basic_op in each.flat_ops()):
        is_gated = "glu_interleave_size" in op._option_names
        if is_gated or op._kind == "l2_normalization":
            instead = ', build the Linear with tensor_parallel_mode="column", or one Linear for each half' if is_gated else ""
            use = "whose halves it multiplies" if is_gated else "whose norm it divides by"
            raise ValueError(
                f"{op._get_name()}: expected all columns of the {product._get_name()} before it, {use}, got those of one rank. Parallelize with "
                f"ColwiseParallel(use_local_output=False){instead}."
            )
        if op._kind in _PRODUCTS or op.is_python_op:  # such an op may gather the columns
            return None
    return product


def check_rules(ops: Sequence[BasicOpBase], error: NotImplementedError) -> None:
    """Raises NotImplementedError in place of torch's error for a missing sharding rule, which names only a kernel op."""
    if "sharding strategy" not in str(error):
        return
    if "tandem.dropout" in str(error):
        raise NotImplementedError(
            "Dropout: expected a torch.Tensor in training, as it has no sharding rule, got a DTensor. Use torch.nn.Dropout, or give it what a rank holds "
            "(use_local_output=True)."
        )
    for op in ops if _C.in_force.recipe != "null" else ():
        if any(op._quantize_slots()):
            raise NotImplementedError(
                f"{op._holder._get_name()}: expected a torch.Tensor under a recipe, as quantizers have no sharding rule, got a DTensor. Build the Linear "
                "with tensor_parallel_mode, or call it without a recipe."
            )
