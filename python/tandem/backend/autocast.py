"""Marks the nodes of a graph that run under torch.autocast. Only under it does torch multiply operands of different dtypes."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from tandem.backend.recompute import is_recomputed


def note_autocast(graph: GraphModule, is_on: bool) -> None:
    """Sets `meta["is_autocast"]` of each node, also in checkpointed parts: whether CPU autocast is on there.

    Args:
        graph: a graph from Dynamo.
        is_on: whether CPU autocast is on at the beginning of the graph. Dynamo guards compiled code by it.
    """
    before: dict[Node, bool] = {}
    for node in graph.graph.nodes:
        if node.target is torch.amp._enter_autocast:
            before[node] = is_on
            device, _, enabled, *_ = node.args
            is_on = bool(enabled) if device == "cpu" else is_on
        elif node.target is torch.amp._exit_autocast:
            is_on = before[node.args[0]]
        elif is_recomputed(node):
            note_autocast(graph.get_submodule(node.args[0].target), is_on)
        node.meta["is_autocast"] = is_on
