"""Kernel ops as compositions of torch's operations, for what knows no others."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch._C import DispatchKey
from torch._decomp import decomposition_table, meta_table
from torch._ops import OperatorBase, OpOverload

from tandem import _C


def _reference(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    # The kernel of this key calls an implementation where a tensor has memory, and the reference where it stands for one, as it does whenever
    # something is decomposed. A mode of torch functions would call the op instead.
    with torch._C.DisableTorchFunction():
        return op._op_dk(DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


@cache
def _table() -> dict[OperatorBase, Callable[..., Any]]:
    table: dict[OperatorBase, Callable[..., Any]] = {}
    for name in _C.decomposable_ops():
        packet = getattr(torch.ops.tandem, name)
        for overload in packet.overloads():
            op = getattr(packet, overload)
            table[op] = partial(_reference, op)
    return table


def decompositions() -> dict[OperatorBase, Callable[..., Any]]:
    """Each kernel op of this library as a function of torch's operations: a table for `run_decompositions` of an exported program, and for
    `make_fx`.

    `torch.onnx.export` and DTensor find it by themselves. Ops whose steps depend on what is in their tensors are not in it, and stay
    in a program: products of groups of rows, the scales of `DelayedScaling`, and codes of weights that are kept from call to call.

    >>> import torch, tandem
    >>> program = torch.export.export(tandem.ops.Sequential(tandem.ops.RMSNorm(4), tandem.ops.SiLU()), (torch.randn(2, 4),))
    >>> {node.target.namespace for node in program.run_decompositions(tandem.decompositions()).graph.nodes if node.op == "call_function"}
    {'aten'}
    """
    return dict(_table())


def register_decompositions() -> None:
    """Puts the table where torch's exporter to ONNX and DTensor look."""
    for op, function in _table().items():
        decomposition_table[op] = function
        meta_table[op] = op  # fake tensors with symbolic sizes would else run the decomposition to learn shapes that the op itself tells


__all__ = ["decompositions"]
