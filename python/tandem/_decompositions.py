"""Kernel ops as compositions of torch's operations, for what knows no others."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
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


class _WithInductor(MetaPathFinder):
    """Registers the kernel ops with Inductor when Inductor is imported, which takes seconds and is for who compiles to say.

    Inductor calls an op that it does not know as it is, but where the variable CI is set it refuses one that has a decomposition too.
    """

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "torch._inductor.lowering":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            _register_fallbacks(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _register_fallbacks(inductor: Any) -> None:
    for op in _table():
        constraint = inductor.tag_to_layout_constraint(inductor.get_layout_constraint_tag(op, with_default=True))
        inductor.make_fallback(op, layout_constraint=constraint, warn=False)


def register_decompositions() -> None:
    """Puts the table where torch's exporter to ONNX and DTensor look, and tells Inductor to call the ops all the same."""
    for op, function in _table().items():
        decomposition_table[op] = function
        meta_table[op] = op  # fake tensors with symbolic sizes would else run the decomposition to learn shapes that the op itself tells
    if inductor := sys.modules.get("torch._inductor.lowering"):
        _register_fallbacks(inductor)
    else:
        sys.meta_path.insert(0, _WithInductor())


__all__ = ["decompositions"]
