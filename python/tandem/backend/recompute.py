"""Parts of a graph that backward recomputes, with the random numbers and the recipe regions of forward.

Dynamo's operator for checkpoints leaves both to AOTAutograd, which does not run here. Run as it is, the operator would draw new random numbers, and
recipes with state would count two steps.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch.utils.checkpoint
from torch.fx import GraphModule

from tandem import _C
from tandem.backend.autocast import ends_autocast
from tandem.backend.normalise import is_recomputed
from tandem.recipe import Recipe
from tandem.regions.autocast import autocast

_OPTIONS = {"determinism_check", "debug", "preserve_rng_state"}  # options of torch's checkpoint that have an effect here


class Recomputed(torch.nn.Module):
    """A module that calls a part of a graph, which backward recomputes."""

    def __init__(self, part: GraphModule, options: dict[str, Any]) -> None:
        super().__init__()
        self.part, self.options = part, options

    def forward(self, *operands: Any) -> Any:
        regions: list[Any] = []
        again = _Again(_C.region_now(), regions)
        # Nested checkpoints get copies of their operands from torch, but pipelines identify parameters as objects: these bypass the checkpoint.
        parameters = {at: operand for at, operand in enumerate(operands) if isinstance(operand, torch.nn.Parameter)}

        def part(*others: Any) -> Any:
            rest = iter(others)
            return self.part(*[parameters[at] if at in parameters else next(rest) for at in range(len(operands))])

        others = [operand for at, operand in enumerate(operands) if at not in parameters]
        return torch.utils.checkpoint.checkpoint(part, *others, use_reentrant=False, context_fn=lambda: (_recording(regions), again), **self.options)


def put(graph: GraphModule) -> None:
    """Replaces Dynamo's calls of such parts by `Recomputed` modules. Parts with selective checkpointing stay as they are."""
    for at, node in enumerate(graph.graph.nodes):
        part = graph.get_submodule(node.args[0].target) if is_recomputed(node) else None
        if part is None or "_checkpoint_context_fn" in part.meta:
            continue
        put(part)
        graph.add_submodule(f"recomputed_{at}", Recomputed(part, {name: value for name, value in node.kwargs.items() if name in _OPTIONS}))
        node.op, node.target, node.args, node.kwargs = "call_module", f"recomputed_{at}", node.args[1:], {}
    graph.recompile()


class _Here(threading.local):
    """The recipe regions of pipelines in the checkpointed part that this thread runs."""

    made: list[Any] | None = None  # in forward: the list to which regions are added
    made_before: Iterator[Any] | None = None  # in a recompute: the regions of forward, in order


_here = _Here()


@contextlib.contextmanager
def _recording(regions: list[Any]) -> Iterator[None]:
    """The context of forward: it adds the regions of the part's pipelines to `regions`."""
    outer, _here.made = _here.made, regions
    try:
        yield
    finally:
        _here.made = outer
        if outer is not None and _here.made_before is None:  # the outer part recomputes this part too
            outer += regions


class _Again(contextlib.AbstractContextManager[None]):
    """The context of a recompute: it enters a region of forward; with `inside` the outer one, in which pipelines then enter the regions `inside`."""

    def __init__(self, region: Any, inside: list[Any] | None = None) -> None:
        self.region, self.inside = region, inside

    def __enter__(self) -> None:
        self._outer = _here.made_before
        if self.inside is not None:
            _here.made_before = iter(self.inside)
        self._autocast = ends_autocast()
        self._autocast.__enter__()
        _C.enter_recompute(self.region, self)

    def __exit__(self, *_: object) -> None:
        _C.exit_autocast(self)
        self._autocast.__exit__(None, None, None)  # torch stops a recompute early, when backward has all that it reads
        _here.made_before = self._outer


@contextlib.contextmanager
def region(recipe: Recipe) -> Iterator[None]:
    """The recipe region of one call of a pipeline: a new one, or in a recompute the region of forward."""
    with autocast(recipe=recipe) if _here.made_before is None else _Again(next(_here.made_before)):
        if _here.made is not None:
            _here.made.append(_C.region_now())
        yield
