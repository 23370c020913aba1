"""Removes other uses of logits whose cross entropy a graph computes, so that product and loss can become one op that stores no logits."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

from torch import SymInt, Tensor, contiguous_format, enable_grad
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from tandem.backend.normalise import Term, Terms, ends_in_a_break, value_of


def prepare_losses(graph: GraphModule, kept: Collection[Node]) -> Terms:
    """The terms of the graph, after row slices of logits have moved from the product's result to its x. Results of the graph that are logits whose cross
    entropy it computes become None, unless they are in `kept`."""
    terms = Terms(graph)
    losses = [term for node in graph.graph.nodes if (term := terms.of(node)) is not None and term.kind == "cross_entropy"]
    heads = {source for term in losses if (source := _source(term.inputs[0], terms)) is not None}
    (output,) = [node for node in graph.graph.nodes if node.op == "output"]
    output.args = map_arg(output.args, lambda node: node if node in kept or _source(node, terms) not in heads else None)
    moved = [_cut_before(head, terms) for head in heads]
    return Terms(graph) if any(moved) else terms


def kept_results(graph: GraphModule, caller: Node | None, returns_logits: bool) -> Collection[Node]:
    """The results of a graph that must stay, even if they are logits. `caller`: the node that calls the graph, if it is a checkpointed part of another one;
    `returns_logits`: the option `logits`."""
    (output,) = [node for node in graph.graph.nodes if node.op == "output"]
    results = output.args[0] if isinstance(output.args[0], (tuple, list)) else output.args
    if returns_logits:
        return results
    if caller is not None:
        if not all(user.target is operator.getitem for user in caller.users):
            return results
        return [results[item.args[1]] for item in caller.users if item.users]
    return results if ends_in_a_break(graph) else ()


def _source(node: Any, terms: Terms) -> Node | None:
    """The product whose result a node is after casts, a soft cap, row slices and views; None if there is no such product."""
    while isinstance(node, Node):
        node = terms.same(node)
        term = terms.of(node)
        if term is not None and term.kind == "linear":
            return node
        if term is not None and term.kind in ("cast", "flat"):
            node = term.inputs[0]
        elif term is not None and term.kind == "mul":
            node = _uncapped(term, terms)
        else:
            node = node.args[0] if _cuts_rows(node) or node.target == "contiguous" else None
    return None


def _uncapped(term: Term, terms: Terms) -> Node | None:
    """The logits in cap tanh(logits / cap), for the outer product of that formula; None for another term."""
    for kind in ("tanh", "mul"):
        inner = next((each for each in map(terms.of, term.inputs) if each is not None and each.kind == kind), None)
        if inner is None:
            return None
        term = inner
    return next((node for node in term.inputs if isinstance(node, Node)), None)


def _cuts_rows(node: Node) -> bool:
    """Whether a node is a row slice of a tensor: slices of any dimensions but the last."""
    if node.op != "call_function" or node.target is not operator.getitem or not isinstance(value_of(node.args[0]), Tensor):
        return False
    cut = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    if not all(isinstance(each, slice) or each is Ellipsis for each in cut):
        return False
    dims = value_of(node.args[0]).dim()
    if Ellipsis in cut:
        at = cut.index(Ellipsis)
        cut = (*cut[:at], *[slice(None)] * (dims - len(cut) + 1), *cut[at + 1 :])
    return len(cut) < dims or cut[-1] == slice(None)


def _cut_before(head: Node, terms: Terms) -> bool:
    """Slices the rows of x instead of the rows of its product, if nothing reads the other rows. Returns whether it did."""
    term = terms.of(head)
    if term is None or term.covers or head.op != "call_function" or len(head.users) != 1:
        return False
    (cut,) = head.users
    given = [node for node in head.all_input_nodes if terms.same(node) is term.inputs[0]]
    if not _cuts_rows(cut) or cut.args[0] is not head or len(given) != 1 or term.inputs.count(term.inputs[0]) != 1:
        return False
    at = map_arg(cut.args[1], value_of)
    ends = [end for each in (at if isinstance(at, tuple) else (at,)) if each is not Ellipsis for end in (each.start, each.stop, each.step)]
    if terms.stretch[cut] != terms.stretch[head] or not all(end is None or isinstance(end, (int, SymInt)) for end in ends):
        return False
    graph, (x,) = head.graph, given
    with enable_grad():
        of_rows, of_head = value_of(x)[at], value_of(head)[at].clone(memory_format=contiguous_format)
    with graph.inserting_before(cut):  # the product moves there too, as the bounds of the slice may be computed after it
        rows = graph.call_function(operator.getitem, (x, cut.args[1]))
    rows.meta = {**x.meta, "example_value": of_rows}
    cut.prepend(head)
    head.replace_input_with(x, rows)
    head.meta["example_value"] = of_head
    for handed_on in (*[user for user in cut.users if user.target == "contiguous"], cut):
        handed_on.replace_all_uses_with(head)
        graph.erase_node(handed_on)
    return True
