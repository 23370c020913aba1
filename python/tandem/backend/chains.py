"""Joins matches along the residual stream into chains with at most one attention, each of which becomes one pipeline."""

from __future__ import annotations

from collections.abc import Callable
from itertools import dropwhile, pairwise
from typing import Any

from torch.fx import Node

from tandem import ops
from tandem.backend.match import Found, module_of
from tandem.backend.normalise import Terms, computed_of, memory_of

WORTH_NO_PIPELINE = {"scale", "modulation", "dropout", "bias", "sum"}  # chains of these rows alone would be no faster than the graph


class Chain:
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
        """The results of all matches, which are available after the chain has run."""
        return {out for each in self.found for out in each.outs}

    def nodes(self) -> set[Node]:
        """All nodes that the chain replaces."""
        return {node for each in self.found for node in (*each.nodes, *each.outs)}

    def reads(self) -> list[Node]:
        """The nodes outside that the chain reads, each once, `x` first."""
        inside = self.made()
        return [*dict.fromkeys(node for each in self.found for node in each.reads() if node not in inside)]

    def description(self) -> str:
        """A text that names the ops, and the modules that they come from."""
        modules = dict.fromkeys(module_of(out) or "the model" for each in self.found for out in each.outs)
        return f"{', '.join(op.make.__name__ for each in self.found for op in each.ops)} of {', '.join(modules)}"


def chains(found: dict[Node, list[Found]], terms: Terms, recipe_of: Callable[[str], Any]) -> list[Chain]:
    """The longest possible chains. Rows of WORTH_NO_PIPELINE at the beginning of a chain stay in the graph."""
    made: list[Chain] = []
    owner: dict[Node, Chain] = {}
    for node in sorted(found, key=terms.order.__getitem__):
        ways = found[node]
        recipe = recipe_of(ways[0].module)
        for way in sorted(ways, key=lambda way: -terms.order[way.x]):  # the residual is older than what is added to it
            chain = owner.get(way.x)
            if chain is None or chain.last.is_written or chain.last.outs != (way.x,) or chain.stretch != terms.stretch[node]:
                continue
            own, others = _products(way), _products(*chain.found)
            is_hooked = any(read in chain.made() and memory_of(read) in terms.hooked | terms.shown for read in way.reads())
            if is_hooked or own and others and (own != others or recipe != chain.recipe):  # only one of the two kinds of products follows autocast
                continue
            inside = chain.made() - {weight.node for op in way.ops for _, weight in op.weights}  # a pipeline takes weights from outside only
            if not any(_needs(read, chain, owner, terms) for read in way.reads() if read not in inside):
                chain.found.append(way)
                chain.recipe = recipe if own else chain.recipe
                break
        else:
            chain = Chain([max(ways, key=lambda way: terms.order[way.x])], terms, recipe)
            made.append(chain)
        for each in chain.last.nodes | {*chain.last.outs}:
            owner[each] = chain
    for chain in made:
        chain.found = [*dropwhile(lambda each: each.row in WORTH_NO_PIPELINE, chain.found)]
    return [part for chain in made if chain.found for part in _by_attention(chain, terms)]


def _products(*found: Found) -> set[object]:
    """The classes of products among the ops of these matches."""
    return {op.make for each in found for op in each.ops} & {ops.Linear, ops.GroupedLinear}


def _by_attention(chain: Chain, terms: Terms) -> list[Chain]:
    """Splits a chain after residual sums so that each part has one attention. Backward then completes and frees a layer before it begins another."""
    begins, attentions = [0], [at for at, each in enumerate(chain.found) if any(op.make is ops.Attention for op in each.ops)]
    for before, at in pairwise(attentions):
        begins += [behind for behind in range(at, before, -1) if chain.found[behind - 1].row == "sum"][:1]
    return [Chain(chain.found[begin:end], terms, chain.recipe) for begin, end in pairwise([*begins, None])]


def _needs(node: Node, chain: Chain, owner: dict[Node, Chain], terms: Terms) -> bool:
    """Whether a node depends on the chain, directly or through other chains, each of which runs as a whole."""
    begin = min(terms.order[each] for each in chain.nodes())

    def reads(at: Node) -> list[Node]:
        of = owner.get(at)
        if of is None:
            return at.all_input_nodes if terms.order[at] > begin else []
        return of.reads() if terms.order[of.last.outs[-1]] > begin else []

    return any(owner.get(each) is chain for each in computed_of([node], reads))
