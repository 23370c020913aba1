"""Patterns over terms, written as the formula that they match: `Var("x") * Call("sigmoid", Var("x"))`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.fx import Node

from tandem.backend.normalise import Terms, number_of, value_of

Bound = Mapping[str, Any]  # nodes and numbers by the names of variables, `nodes` that the pattern covers, `roundings` that it contains, `tolerance` of constants


def tolerance_of(dtype: torch.dtype) -> float:
    """How far a constant of a formula may be from the exact one, relatively: as models write it for results of this dtype."""
    return 1e-15 if dtype == torch.float64 else 1e-6


class Pattern:
    """A pattern for a node or a number."""

    def match(self, node: Any, terms: Terms, bound: Bound) -> Iterator[Bound]:
        """The bindings of each match of `node`, added to `bound`. Names in `bound` match equal values only."""
        raise NotImplementedError

    def __add__(self, other: Any) -> Pattern:
        return Call("add", self, other)

    def __mul__(self, other: Any) -> Pattern:
        return Call("mul", self, other)

    __radd__, __rmul__ = __add__, __mul__


class Number(Pattern):
    """A given number, or any number under a name. Symbols match only with `may_be_symbol`; Dynamo then guards the code by the symbol's number."""

    def __init__(self, expected: float | str, may_be_symbol: bool = False) -> None:
        self.expected, self.may_be_symbol = expected, may_be_symbol

    def match(self, node: Any, terms: Terms, bound: Bound) -> Iterator[Bound]:
        node = number_of(node) if self.may_be_symbol else node
        if isinstance(node, (int, float)) and not isinstance(node, bool):
            if isinstance(self.expected, str):
                if bound.get(self.expected, node) == node or math.isnan(node):
                    yield {**bound, self.expected: float(node)}
            elif math.isclose(node, self.expected, rel_tol=0 if self.expected == 1 else bound["tolerance"]):
                yield bound


class Var(Pattern):
    """A tensor under a name, or None if it is `optional`. All variables of one name match one node."""

    def __init__(self, name: str, dims: int | None = None, optional: bool = False) -> None:
        self.name, self.dims, self.optional = name, dims, optional

    def match(self, node: Any, terms: Terms, bound: Bound) -> Iterator[Bound]:
        node = terms.same(node)
        value = value_of(node)
        is_tensor = isinstance(node, Node) and isinstance(value, torch.Tensor) and self.dims in (None, value.dim())
        if (is_tensor or (node is None and self.optional)) and bound.get(self.name, node) is node:
            yield {**bound, self.name: node}


class Named(Pattern):
    """A pattern whose node gets a name. All patterns of one name match one node."""

    def __init__(self, name: str, pattern: Pattern) -> None:
        self.name, self.pattern = name, pattern

    def match(self, node: Any, terms: Terms, bound: Bound) -> Iterator[Bound]:
        node = terms.same(node)
        if bound.get(self.name, node) is node:
            for each in self.pattern.match(node, terms, bound):
                yield {**each, self.name: node}


class Call(Pattern):
    """An operation of the vocabulary with patterns or numbers as inputs. Sums and products match in either order."""

    def __init__(self, kind: str, *inputs: Any, **options: Any) -> None:
        self.kind, self.options = kind, options
        self.inputs = [each if isinstance(each, Pattern) else Number(each) for each in inputs]

    def match(self, node: Any, terms: Terms, bound: Bound) -> Iterator[Bound]:
        term = terms.of(node)
        if term is None or term.kind != self.kind or len(term.inputs) != len(self.inputs):
            return
        if any(term.options.get(name) != value for name, value in self.options.items()):
            return
        free = {name: value for name, value in term.options.items() if name not in self.options}
        if any(name in bound and bound[name] != value for name, value in free.items()):
            return
        bound = {**bound, "nodes": (*bound["nodes"], terms.same(node), *term.covers), **free}
        orders = [term.inputs, term.inputs[::-1]] if self.kind in ("add", "mul") else [term.inputs]
        for order in orders:
            yield from _all(list(zip(self.inputs, order, strict=True)), terms, bound)


class Columns(Pattern):
    """Columns of a value. The name gets the pair of the first column's number and the last one's plus 1."""

    def __init__(self, name: str, of: Pattern) -> None:
        self.name, self.of = name, of

    def match(self, node: Any, terms: Terms, bound: Bound) -> Iterator[Bound]:
        term = terms.of(node)
        if term is None or term.kind != "piece":
            return
        source, columns = node.args[0], (term.options["begin"], term.options["end"])  # the `chunk` or `split` node, or the value itself
        if bound.get(self.name, columns) == columns:
            nodes = (terms.same(node), source) if terms.same(source) is not terms.same(term.inputs[0]) else (terms.same(node),)
            yield from self.of.match(term.inputs[0], terms, {**bound, "nodes": (*bound["nodes"], *nodes), self.name: columns})


class Unsqueezed(Var):
    """A tensor under a name that `unsqueeze` gives a dimension for heads. The `unsqueeze` is no node of the match, so other nodes may read it."""

    def match(self, node: Any, terms: Terms, bound: Bound) -> Iterator[Bound]:
        term = terms.of(node)
        if term is not None and term.kind == "unsqueeze" and term.options["dim"] == 1 and value_of(node).dim() == 4:
            yield from super().match(term.inputs[0], terms, bound)


class Wide(Pattern):
    """A value, or a cast of it to a wider dtype, which rounds nothing."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern

    def match(self, node: Any, terms: Terms, bound: Bound) -> Iterator[Bound]:
        term = terms.of(node)
        if term is not None and term.kind == "cast" and torch.promote_types(value_of(term.inputs[0]).dtype, value_of(node).dtype) == value_of(node).dtype:
            yield from self.pattern.match(term.inputs[0], terms, {**bound, "nodes": (*bound["nodes"], terms.same(node))})
        else:
            yield from self.pattern.match(node, terms, bound)


class Rounded(Pattern):
    """A value, or a cast of it to a narrower dtype. `where` describes the rounding for the refusal, or `name` gets the dtype."""

    def __init__(self, pattern: Pattern, where: str | None = None, name: str | None = None) -> None:
        self.pattern, self.where, self.name = pattern, where, name

    def match(self, node: Any, terms: Terms, bound: Bound) -> Iterator[Bound]:
        term = terms.of(node)
        if term is None or term.kind != "cast":
            yield from self.pattern.match(node, terms, bound)
            return
        roundings = (*bound["roundings"], self.where) if self.where else bound["roundings"]
        named = {self.name: value_of(node).dtype} if self.name else {}
        yield from self.pattern.match(term.inputs[0], terms, {**bound, "nodes": (*bound["nodes"], terms.same(node)), "roundings": roundings, **named})


class Either(Pattern):
    """One of several patterns."""

    def __init__(self, *patterns: Pattern) -> None:
        self.patterns = patterns

    def match(self, node: Any, terms: Terms, bound: Bound) -> Iterator[Bound]:
        for pattern in self.patterns:
            yield from pattern.match(node, terms, bound)


def _all(pairs: list[tuple[Pattern, Any]], terms: Terms, bound: Bound) -> Iterator[Bound]:
    if not pairs:
        yield bound
        return
    (pattern, node), *rest = pairs
    for each in pattern.match(node, terms, bound):
        yield from _all(rest, terms, each)
