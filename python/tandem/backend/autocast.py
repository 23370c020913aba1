"""The regions of torch.autocast in a graph. Only in them does torch multiply operands of different dtypes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from tandem.backend.normalise import is_recomputed


def note_autocast(graph: GraphModule, on: str, is_on: bool) -> None:
    """Sets `meta["is_autocast"]` of each node, also in checkpointed parts: whether autocast of the device type `on` is on there. `is_on`: whether it is at the
    beginning of the graph; Dynamo guards compiled code by it."""
    before: dict[Node, bool] = {}
    for node in graph.graph.nodes:
        if node.target is torch.amp._enter_autocast:
            before[node] = is_on
            device, _, enabled, *_ = node.args
            is_on = bool(enabled) if device == on else is_on
        elif node.target is torch.amp._exit_autocast:
            is_on = before[node.args[0]]
        elif is_recomputed(node):
            note_autocast(graph.get_submodule(node.args[0].target), on, is_on)
        node.meta["is_autocast"] = is_on


@contextlib.contextmanager
def ends_autocast() -> Iterator[None]:
    """Ends regions of torch.autocast that the body leaves open: in a graph a call ends them, which an error or the early end of a recompute skips."""
    first, is_cached = torch.autocast_increment_nesting(), torch.is_autocast_cache_enabled()
    torch.autocast_decrement_nesting()
    modes = [(of, torch.get_autocast_dtype(of), torch.is_autocast_enabled(of)) for of in ("cpu", "cuda")]
    try:
        yield
    finally:
        for _left in range(first, torch.autocast_increment_nesting() + 1):  # reading the count has added one more
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(is_cached)
        for of, dtype, is_on in modes:
            torch.set_autocast_dtype(of, dtype)
            torch.set_autocast_enabled(of, is_on)
