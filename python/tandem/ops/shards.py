"""What plans of torch.distributed.tensor.parallel may not cut: columns that belong together, of which a rank would hold some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tandem._quantized_params import is_shared
from tandem.ops.unit import BasicUnit, Unit


def _is_cut_by_rows(weight: Any) -> bool:
    """Whether ranks hold some rows each, and with them columns of the product."""
    return is_shared(weight) and any(
        placement.is_shard(0) and ranks > 1 for placement, ranks in zip(weight.placements, weight.device_mesh.shape, strict=True)
    )


def _parts(op: BasicUnit) -> dict[str, Any]:
    return {name: getattr(op, name) for names in op.__dict__["_joined"].values() for name in names}


def has_parts_of_ranks(ops: Sequence[BasicUnit]) -> bool:
    """Whether ranks share parts of joined weights, so that calls have something to check."""
    return any(is_shared(part) for op in ops for part in _parts(op).values())


def check_parts(ops: Sequence[BasicUnit]) -> None:
    """Raises ValueError where the parts of a joined weight are cut by rows: a rank would hold other columns of the product than it seems to."""
    for op in ops:
        for name, part in _parts(op).items():
            if _is_cut_by_rows(part):
                raise ValueError(
                    f"{op._holder._get_name()}: expected {name}, a part of a product (parameters_split), on every rank whole or cut along its "
                    f"columns, got placements {part.placements}: a rank's share of y would be columns of one part. Build it with "
                    'tensor_parallel_mode="column", or one Linear for each part.'
                )


def check_halves(before: Unit | None, op: BasicUnit, x: Any) -> None:
    """Raises ValueError where a gated unit would take the halves of those columns that a rank holds: x has fewer than the weight before it has rows.
    A weight that FSDP shares is whole in the call that made x."""
    if before is None or "glu_interleave_size" not in op._option_names or is_shared(x):
        return
    weight: Any = before._parameters.get("weight") if isinstance(before, torch.nn.Linear) else None
    if is_shared(weight) and x.size(-1) < weight.size(0):
        raise ValueError(
            f"{op._get_name()}: expected all columns of the {before._get_name()} before it, whose halves it multiplies, got those of one rank. "
            'Parallelize with ColwiseParallel(use_local_output=False), build the Linear with tensor_parallel_mode="column", or one Linear for '
            "each half."
        )


__all__ = ["check_halves", "check_parts", "has_parts_of_ranks"]
