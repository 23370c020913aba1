"""Chains matches along the residual stream into regions with at most one attention, each of which becomes one pipeline."""

from __future__ import annotations

from collections.abc import Callable
from itertools import dropwhile, pairwise
from typing import Any

from torch.fx import Node

from tandem import ops
from tandem.backend.match import Found, module_of
from tandem.backend.normalise import Terms, computed_of, memory_of

WORTH_NO_PIPELINE = {"scale", "modulation", "dropout", "bias", "sum"}  # regions of these rows alone would be no faster than the graph


class Region:
    """The matches that become one pipeline, in order."""

    def __init__(self, found: list[Found], terms: Terms, recipe: Any) -> None:
        self.found, self.recipe = found, recipe
        self.stretch = terms.stretch[found[0].outs[0]]

    @property
    def x(self) -> Node:
        return self.found[0].x

    @property
    def last(self) -> Found:
        return self.found[-1]

    def made(self) -> set[Node]:
        """The results of all matches, which are available after the region has run."""
        return {out for each in self.found for out in each.outs}

    def nodes(self) -> set[Node]:
        """All nodes that the region replaces."""
        return {node for each in self.found for node in (*each.nodes, *each.outs)}

    def reads(self) -> list[Node]:
        """The nodes outside that the region reads, each once, `x` first."""
        inside = self.made()
        return [*dict.fromkeys(node for each in self.found for node in each.reads() if node not in inside)]

    def description(self) -> str:
        """A text that names the ops, and the modules that they come from."""
        modules = dict.fromkeys(module_of(out) or "the model" for each in self.found for out in each.outs)
        return f"{', '.join(op.make.__name__ for each in self.found for op in each.ops)} of {', '.join(modules)}"


def regions(found: dict[Node, list[Found]], terms: Terms, recipe_of: Callable[[str], Any]) -> list[Region]:
    """The longest possible regions. Rows of WORTH_NO_PIPELINE at the beginning of a region stay in the graph."""
    made: list[Region] = []
    owner: dict[Node, Region] = {}
    for node in sorted(found, key=terms.order.__getitem__):
        ways = found[node]
        recipe = recipe_of(ways[0].module)
        for way in sorted(ways, key=lambda way: -terms.order[way.x]):  # the residual is older than what is added to it
            region = owner.get(way.x)
            if region is None or region.last.is_written or region.last.outs != (way.x,) or region.stretch != terms.stretch[node]:
                continue
            own, others = _products(way), _products(*region.found)
            is_hooked = any(read in region.made() and memory_of(read) in terms.hooked | terms.shown for read in way.reads())
            if is_hooked or own and others and (own != others or recipe != region.recipe):  # only one of the two kinds of products follows autocast
                continue
            inside = region.made() - {weight.node for op in way.ops for _, weight in op.weights}  # a pipeline takes weights from outside only
            if not any(_needs(read, region, owner, terms) for read in way.reads() if read not in inside):
                region.found.append(way)
                region.recipe = recipe if own else region.recipe
                break
        else:
            region = Region([max(ways, key=lambda way: terms.order[way.x])], terms, recipe)
            made.append(region)
        for each in region.last.nodes | {*region.last.outs}:
            owner[each] = region
    for region in made:
        region.found = [*dropwhile(lambda each: each.row in WORTH_NO_PIPELINE, region.found)]
    return [part for region in made if region.found for part in _by_attention(region, terms)]


def _products(*found: Found) -> set[object]:
    """The classes of products among the ops of these matches."""
    return {op.make for each in found for op in each.ops} & {ops.Linear, ops.GroupedLinear}


def _by_attention(region: Region, terms: Terms) -> list[Region]:
    """Splits a region after residual sums so that each part has one attention. Backward then completes and frees a layer before it begins another."""
    begins, attentions = [0], [at for at, each in enumerate(region.found) if any(op.make is ops.Attention for op in each.ops)]
    for before, at in pairwise(attentions):
        begins += [behind for behind in range(at, before, -1) if region.found[behind - 1].row == "sum"][:1]
    return [Region(region.found[begin:end], terms, region.recipe) for begin, end in pairwise([*begins, None])]


def _needs(node: Node, region: Region, owner: dict[Node, Region], terms: Terms) -> bool:
    """Whether a node depends on the region, directly or through other regions, each of which runs as a whole."""
    begin = min(terms.order[each] for each in region.nodes())

    def reads(at: Node) -> list[Node]:
        of = owner.get(at)
        if of is None:
            return at.all_input_nodes if terms.order[at] > begin else []
        return of.reads() if terms.order[of.last.outs[-1]] > begin else []

    return any(owner.get(each) is region for each in computed_of([node], reads))
