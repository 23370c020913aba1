"""Runs a graph with pipelines: the nodes between them eagerly, or compiled by Inductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.split_module import split_module

from tandem.backend.normalise import changes_state, value_of
from tandem.backend.place import is_call, is_result_of_call

_FEW = 2  # a piece of at most so many operations is not worth compiling


def runner(graph: GraphModule, compiler: str) -> Callable[..., Any]:
    """A function that runs a graph that calls pipelines. `compiler` "eager": nodes between pipelines run as they are; "inductor": Inductor compiles the pieces
    between them."""
    if compiler == "eager":
        return graph.forward
    split = split_module(graph, None, _pieces(graph).__getitem__, keep_original_order=True)
    for name, piece in list(split.named_children()):
        if isinstance(piece, GraphModule) and _is_worth_compiling(piece):
            setattr(split, name, _Compiled(piece))
    return split.forward


def _pieces(graph: GraphModule) -> dict[Node, int]:
    """The number of each node's piece. A call of a pipeline, and a node that changes state or that Inductor cannot compile, is a piece by itself."""
    numbers: dict[Node, int] = {}
    number, is_alone = 0, False
    for node in graph.graph.nodes:
        if not is_result_of_call(node, graph):  # a result belongs to the piece of its call
            alone = is_call(node, graph) or changes_state(node) or _has_symbol(node)
            number += alone or is_alone
            is_alone = alone
        numbers[node] = number
    return numbers


def _has_symbol(node: Node) -> bool:
    """Whether a node returns or reads a float symbol. Dynamo passes it in a tensor, and Inductor cannot compile it outside of Dynamo."""
    return any(isinstance(value_of(each), torch.SymFloat) for each in (node, *node.all_input_nodes))


def _is_worth_compiling(piece: GraphModule) -> bool:
    called = [node for node in piece.graph.nodes if node.op in ("call_function", "call_method", "call_module")]
    return len(called) > _FEW and not any(node.op == "call_module" or changes_state(node) for node in called)


class _Compiled(torch.nn.Module):
    """A piece of a graph, compiled by Inductor."""

    def __init__(self, piece: GraphModule) -> None:
        super().__init__()
        from torch._inductor.compile_fx import compile_fx

        self.__dict__["forward"] = compile_fx(piece, [value_of(node) for node in piece.graph.find_nodes(op="placeholder")])
