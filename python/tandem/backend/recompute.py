"""Parts of a graph that are computed again in backward, under what was in force in forward: the generator's numbers, and the regions of recipes.

What Dynamo puts there is made for AOTAutograd, which sees to both by itself: run as it is, it draws other numbers, and recipes with state see two steps.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch.utils.checkpoint
from torch.fx import GraphModule, Node

from tandem import _C
from tandem.recipe import Recipe
from tandem.regions.autocast import autocast

_NAMES = ("tag_activation_checkpoint", "wrap_activation_checkpoint")
_OPTIONS = {"determinism_check", "debug", "preserve_rng_state"}  # of torch's function, that count here


def is_recomputed(node: Node) -> bool:
    """Whether a node stands for a part that is computed again, as Dynamo writes it."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") in _NAMES


class Recomputed(torch.nn.Module):
    """Calls a part of a graph, and in backward again."""

    def __init__(self, part: GraphModule, options: dict[str, Any]) -> None:
        super().__init__()
        self.part, self.options = part, options

    def forward(self, *operands: Any) -> Any:
        first = _First()
        again = _Again(first.around, first.regions)
        # Of a part of a part torch gives back copies of what it is called with; pipelines know parameters by themselves.
        parameters = {at: operand for at, operand in enumerate(operands) if isinstance(operand, torch.nn.Parameter)}

        def part(*others: Any) -> Any:
            rest = iter(others)
            return self.part(*[parameters[at] if at in parameters else next(rest) for at in range(len(operands))])

        others = [operand for at, operand in enumerate(operands) if at not in parameters]
        return torch.utils.checkpoint.checkpoint(part, *others, use_reentrant=False, context_fn=lambda: (first, again), **self.options)


def put(graph: GraphModule) -> None:
    """Has such parts computed again by torch's checkpoint; those that choose what to keep stay as they are."""
    for at, node in enumerate(graph.graph.nodes):
        part = graph.get_submodule(node.args[0].target) if is_recomputed(node) else None
        if part is None or "_checkpoint_context_fn" in part.meta:
            continue
        put(part)
        graph.add_submodule(f"recomputed_{at}", Recomputed(part, {name: value for name, value in node.kwargs.items() if name in _OPTIONS}))
        node.op, node.target, node.args, node.kwargs = "call_module", f"recomputed_{at}", node.args[1:], {}
    graph.recompile()


class _Here(threading.local):
    """What regions of this thread belong to."""

    made: list[Any] | None = None  # where those of a first computation are noted
    made_before: Iterator[Any] | None = None  # those that are entered again


_here = _Here()


class _First(AbstractContextManager[None]):
    """The first computation: what is in force, and the regions of its pipelines."""

    def __init__(self) -> None:
        self.around = _C.region_now()
        self.regions: list[Any] = []

    def __enter__(self) -> None:
        self._outer, _here.made = _here.made, self.regions

    def __exit__(self, *_: object) -> None:
        _here.made = self._outer
        if self._outer is not None and _here.made_before is None:  # a part of a part
            self._outer += self.regions


class _Again(AbstractContextManager[None]):
    """A region of the first computation once more, or all that the first computation was in, with the regions that were entered there."""

    def __init__(self, region: Any, inside: list[Any] | None = None) -> None:
        self.region, self.inside = region, inside

    def __enter__(self) -> None:
        self._outer = _here.made_before
        if self.inside is not None:
            _here.made_before = iter(self.inside)
        _C.enter_recompute(self.region, self)

    def __exit__(self, *_: object) -> None:
        _C.exit_autocast(self)
        _here.made_before = self._outer


@contextlib.contextmanager
def region(recipe: Recipe) -> Iterator[None]:
    """The region of a call of a pipeline."""
    with autocast(recipe=recipe) if _here.made_before is None else _Again(next(_here.made_before)):
        if _here.made is not None:
            _here.made.append(_C.region_now())
        yield
