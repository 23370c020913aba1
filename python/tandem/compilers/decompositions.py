"""Decompositions of kernel ops into torch's operations, for exporters and for DTensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch._C import DispatchKey
from torch._decomp import decomposition_table, meta_table
from torch._ops import OperatorBase, OpOverload
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._pytree import tree_map_only

from tandem import _C
from tandem.compilers.imports import when_imported


def _reference(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    # The kernel of this key calls an implementation for tensors with memory, and the composite reference for tensors without, as all are while an op is
    # decomposed. A mode of torch functions would intercept the op instead.
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
    """A table for `run_decompositions` of an exported program and for `make_fx`: for each kernel op a function that calls torch's operations.

    `torch.onnx.export` and DTensor find the table by themselves. Ops whose steps depend on values of tensors are not in it and stay in a
    program: products of groups of rows, the scales of `DelayedScaling`, and codes of weights that are kept from call to call.

    >>> import torch, tandem
    >>> program = torch.export.export(tandem.ops.Sequential(tandem.ops.RMSNorm(4), tandem.ops.SiLU()), (torch.randn(2, 4),))
    >>> {node.target.namespace for node in program.run_decompositions(tandem.decompositions()).graph.nodes if node.op == "call_function"}
    {'aten'}
    """
    return dict(_table())


def _register_fallbacks(inductor: Any) -> None:
    """Has Inductor call the kernel ops. It would do so for any unknown op, but with the variable CI set it refuses an op that has a decomposition."""
    for op in _table():
        constraint = inductor.tag_to_layout_constraint(inductor.get_layout_constraint_tag(op, with_default=True))
        inductor.make_fallback(op, layout_constraint=constraint, warn=False)


def _register_shardings(_: Any) -> None:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental import register_sharding

    infos: Any = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    for op in (torch.ops.tandem.norm_backward.default, torch.ops.tandem.l2_norm_backward.default):
        register_sharding(op)(partial(_norm_backward_shardings, op))  # type: ignore[no-untyped-call]
        # DTensor caches the sharding of a call by its arguments. It finds static arguments by their types, and lists such as `output_mask` are not found.
        infos[op].static_argnum = min(infos[op].static_argnum, len(op._schema.arguments) - 1)
    register_sharding(torch.ops.tandem.modulate_scale_backward.default)(_modulate_shardings)  # type: ignore[no-untyped-call]


def _modulate_shardings(grad_y: Any, x: Any, scale: Any) -> Iterator[tuple[list[Any], list[Any]]]:
    """The ways in which ranks may shard the gradient of a scale: along a dimension of x that the scale has too, it is sharded alike; along one to which
    the scale was broadcast, each rank has a part of the sum. Only the sizes of the scale count, so its decomposition would let DTensor shard it alone."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    yield [Replicate()], [Replicate()] * 3
    for dim in range(x.ndim):
        own = dim - (x.ndim - scale.ndim)
        is_shared = own >= 0 and scale.shape[own] == x.shape[dim]
        yield [Shard(own) if is_shared else Partial()], [Shard(dim), Shard(dim), Shard(own) if is_shared else Replicate()]


def _norm_backward_shardings(op: OpOverload, *args: Any) -> Iterator[tuple[list[Any], list[Any]]]:
    """The placements of operands and results under which a norm's backward may run: those in which forward has sharded the rows.

    DTensor would derive from the decomposition that it may reshard rows along the first dimension. It would then cut the statistics, which have one
    dimension, evenly; they match a rank's rows only if the first dimension of x is cut evenly too.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    given = dict(zip([argument.name for argument in op._schema.arguments], args, strict=False))
    x, weight, statistic = given["x"], given.get("weight"), given["inv_norm"]

    def sharding(of_rows: Any, of_statistics: Any, of_sums: Any) -> tuple[list[Any], list[Any]]:
        by_name = dict.fromkeys(("grad_y", "x", "grad_residual", "grad_x", "y"), of_rows) | dict.fromkeys(("mean", "inv_norm"), of_statistics)
        by_name |= dict.fromkeys(("grad_weight", "sums", "grad_bias"), of_sums)
        made = zip(op._schema.returns, given["output_mask"], strict=True)
        outputs = [by_name[result.name] if is_made else Replicate() for result, is_made in made]
        return outputs, [by_name.get(name, Replicate()) if hasattr(arg, "placements") else None for name, arg in given.items()]

    yield sharding(Replicate(), Replicate(), Replicate())
    dims = x.ndim - (1 if weight is None else weight.ndim)
    for dim in range(dims):
        blocks = math.prod(x.shape[:dim])  # blocks of consecutive rows; a rank has some rows of each
        as_forward = [each for each in statistic.placements if getattr(each, "dim", None) == 0 and getattr(each, "split_factor", 1) == blocks]
        if not as_forward and dim == 0 and (dims == 1 or x.shape[0] % x.mesh.size() == 0):
            as_forward = [Shard(0)]
        for each in as_forward:
            yield sharding(Shard(dim), each, Partial())


def _fake(place: int, mode: FakeTensorMode, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    like = args[place] if place < len(args) else kwargs[op._schema.arguments[place].name]
    with in_kernel_invocation_manager(mode):
        results = op(*args, **kwargs)
    return tree_map_only(torch.Tensor, lambda result: FakeTensor(mode, result, like.device), results)


def _register_fakes() -> None:
    """Registers, for ops that read tensors on a GPU and numbers on the CPU, the operand on whose device the results lie. FakeTensor itself requires all
    operands on one device."""
    for op, like in ((torch.ops.tandem.take_scale_.default, "scale"), (torch.ops.tandem.weight_codes.default, "gradient")):
        place = [argument.name for argument in op._schema.arguments].index(like)
        register_op_impl(op)(partial(_fake, place))


def register_decompositions() -> None:
    """Registers the table with torch's exporter to ONNX and with DTensor. It also registers the ops themselves with Inductor, and rules for devices and
    shardings with FakeTensor and DTensor."""
    _register_fakes()
    for op, function in _table().items():
        decomposition_table[op] = function
        meta_table[op] = op  # fake tensors with symbolic sizes would else run the decomposition for shapes, which the op itself computes
    when_imported("torch._inductor.lowering", _register_fallbacks)
    when_imported("torch.distributed.tensor", _register_shardings)
