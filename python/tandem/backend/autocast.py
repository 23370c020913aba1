"""Where in a graph torch.autocast is in force, by which alone torch multiplies operands of different dtypes."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from tandem.backend.recompute import is_recomputed


def note_autocast(graph: GraphModule, is_on: bool) -> None:
    """Notes at each node, of parts that are computed again too, whether autocast of the CPU is on there: `meta["is_autocast"]`.

    Args:
        graph: as Dynamo gives it.
        is_on: whether it is on where the graph begins; compiled code is guarded by that.
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
