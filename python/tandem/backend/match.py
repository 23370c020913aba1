"""Finds the rows of the table in a graph, and joins products of one x."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tandem import ops
from tandem.backend.attention import ATTENTION
from tandem.backend.normalise import PRODUCTS, Terms, memory_of, users, value_of
from tandem.backend.options import Options
from tandem.backend.patterns import Bound, tolerance_of
from tandem.backend.rows import LOSS, ROWS, Op, Row, product
from tandem.recipe import Recipe

TABLE = (*ATTENTION, *ROWS)  # the first row that matches at a node counts
_ROOT = re.compile(r"^L\[[^]]*\](\[\d+\])*\.?")  # Dynamo's name of the model: L['self'], L['args'][0]
_ITEM = re.compile(r"\.?_modules\['?([^'\]]+)'?\]|\['?([^'\]]+)'?\]")  # Dynamo's name of a module in a list or dict


class Found(NamedTuple):
    """A match of a row: nodes of a graph, and the ops that may replace them."""

    row: str
    x: Node
    outs: tuple[Node, ...]  # the results; a joined product has one for each part
    ops: tuple[Op, ...]
    nodes: frozenset[Node]  # the nodes that the ops replace, `outs` among them
    is_written: bool = False  # whether other nodes write to the result, which must then be the last one of its pipeline
    module: str = ""  # path of the module of the first product, else of the result
    kept: tuple[Node, ...] = ()  # keys and values of attention that other nodes read

    def reads(self) -> Iterator[Node]:
        """All nodes that the ops read, `x` first."""
        yield self.x
        for op in self.ops:
            yield from op.extras
            yield from (weight.node for _, weight in op.weights if weight.node is not None)


class Left(NamedTuple):
    """A match that stays in the graph, and the reason."""

    row: str
    node: Node
    reason: str


def find(graph: GraphModule, terms: Terms, options: Options) -> tuple[dict[Node, list[Found]], list[Left]]:
    """The matches by their last nodes, and the matches that stay in the graph. A sum has two, one for each operand as x. No node belongs to two rows.
    `options` exclude modules; products of one x are joined if they have one recipe."""
    found: dict[Node, list[Found]] = {}
    left: list[Left] = []
    taken: set[Node] = set()
    for node in reversed(graph.graph.nodes):
        if node in taken or terms.of(node) is None or terms.same(node) is not node or not isinstance(value_of(node), torch.Tensor):
            continue
        for row in TABLE:
            ways, reasons = _ways(row, node, terms, taken, options)
            if any(options.excludes(module_of(each)) for way in ways for each in way.nodes):
                ways, reasons = [], ["its module is excluded"]
            if ways:
                found[node] = ways
                taken |= ways[0].nodes
                break
            left += [Left(row.name, node, reason) for reason in reasons[:1]]
    return _joined(found, terms, options), [each for each in left if each.node not in taken or each.row == LOSS]


def _ways(row: Row, node: Node, terms: Terms, taken: set[Node], options: Options) -> tuple[list[Found], list[str]]:
    ways, reasons = [], []
    for bound in row.pattern.match(node, terms, {"nodes": (), "roundings": (), "tolerance": tolerance_of(value_of(node).dtype)}):
        nodes = frozenset((node, *bound["nodes"]))
        if nodes & taken or any(terms.stretch[each] != terms.stretch[node] for each in nodes):
            continue
        kept = tuple(bound[name] for name in ("keys", "values") if name in bound)
        outside = {inner for inner in nodes - {node} if any(terms.same(user) not in nodes for user in users(inner, terms))}
        if any(memory_of(inner) in terms.hooked or inner not in kept and (terms.kind(inner) != "laid" or terms.of(inner).inputs[0] not in kept) for inner in outside):
            reasons += [row.read_inside] if row.read_inside else []
            continue
        modules = [module_of(each) for each in sorted(nodes, key=terms.order.__getitem__) if terms.kind(each) in PRODUCTS] or [module_of(node)]
        recipe = options.recipe_of(modules[0])
        if any(options.recipe_of(each) != recipe for each in modules):
            reasons.append("its products are under several recipes")
            continue
        made = _refused(node, nodes, bound, terms) or row.ops(bound)
        if not isinstance(made, str):
            made = _refused_ops(node, made, bound, terms, recipe) or made
        if outside and not isinstance(made, str) and any(terms.depends(extra, kept) for op in made for extra in op.extras):
            made = "it reads what is computed of its own keys or values"
        if outside and any(value_of(each).dtype != value_of(node).dtype for each in kept):  # as torch.autocast leaves turned keys
            made = "others read its keys or values in another dtype than that of its result"
        if isinstance(made, str):
            reasons.append(made)
        else:
            ways.append(Found(row.name, bound["x"], (node,), made, nodes, memory_of(node) in terms.written_for_others, modules[0], kept if outside else ()))
    return ways, reasons


def _refused(node: Node, nodes: frozenset[Node], bound: Bound, terms: Terms) -> str | None:
    """A reason to leave matched nodes in the graph that holds for every row, or None."""
    value = value_of(bound["x"])
    operands = [each for name, each in bound.items() if isinstance(each, Node) and name != "x"]
    if isinstance(value, torch.nn.Parameter):
        return "its x is a parameter"
    for each in (node, bound["x"], *operands):
        if is_traceable_wrapper_subclass(value_of(each)):
            return f"{each.name} is a {type(value_of(each)).__name__}"
        if torch._C._functorch.is_functorch_wrapped_tensor(value_of(each)):
            return f"{each.name} is of a transformation of torch.func"
    if not value.is_floating_point() or value.dim() == 0:
        return f"its x is {'a scalar' if value.is_floating_point() else value.dtype}"
    if not value_of(node).is_contiguous():
        return "its result is not contiguous, as results of pipelines are"
    if any(memory_of(inner) in terms.written_for_others for inner in nodes - {node}):
        return "some other operation writes to a value inside it"
    if bound["roundings"]:
        return f"it rounds to {str(value.dtype).removeprefix('torch.')} between {bound['roundings'][0]}, where a pipeline does not"
    return None


def _refused_ops(node: Node, made: tuple[Op, ...], bound: Bound, terms: Terms, recipe: Recipe | None) -> str | None:
    """A reason why the ops of a row would not compute what the graph computes, or None."""
    for op in made:
        if reason := op.refusal():
            return reason
    x, dtype, device = bound["x"], value_of(bound["x"]).dtype, value_of(bound["x"]).device.type
    if device != "cpu" and (recipe is None or device == "meta"):
        return f"its x is on {device}, where pipelines run operations of torch, and no recipe quantizes it"
    if made[0].make in (ops.Linear, ops.GroupedLinear, ops.LinearCrossEntropy):
        dtypes = {dtype, made[0].options["dtype"]}
        is_cast = node.meta["is_autocast"] and made[0].make is not ops.GroupedLinear and torch.float64 not in dtypes
        if len(dtypes) > 1 and not is_cast:  # the graph then raises torch's own error
            return f"its x is {dtype}, and its weight {made[0].options['dtype']}"
    if made[0].make in (ops.CrossEntropy, ops.LinearCrossEntropy):
        dtype = torch.float64 if made[0].options.get("dtype", dtype) == torch.float64 else torch.float32
    elif made[0].make is ops.AddExtraInput:
        dtype = torch.promote_types(dtype, value_of(made[0].extras[0]).dtype)
    if made[0].make is not ops.Linear and value_of(node).dtype != dtype:  # a product's result has the dtype of autocast
        return f"its result is {value_of(node).dtype}, that of the op {dtype}"
    # torch's products keep a contiguous x for backward, and raise an error after a write; a strided x they copy, and norms may keep results instead.
    is_kept = made[0].make in (ops.Linear, ops.GroupedLinear, ops.LinearCrossEntropy) and value_of(x).is_contiguous()
    if memory_of(x) in terms.written_for_others and not is_kept and (not made[0].weights or value_of(node).requires_grad):
        return "some other operation writes to its x, which backward may read"
    if any(memory_of(extra) in terms.written_for_others for op in made if op.make is ops.Modulate for extra in op.extras):
        return "some other operation writes to its factor or shift, which backward may read"
    if recipe is not None and any(op.make in (ops.Linear, ops.GroupedLinear) and op.options["dtype"] == torch.float64 for op in made):
        return "its operands are float64, which no recipe quantizes"
    return None


def module_of(node: Node) -> str:
    """The path in the model of the module that a node comes from; empty for the model itself, or if Dynamo has not recorded a module."""
    stack = [*(node.meta.get("nn_module_stack") or {}).values()]
    if not stack:
        return ""
    name = _ITEM.sub(lambda item: "." + (item[1] or item[2]), _ROOT.sub("", stack[-1][0].partition("@")[0]))
    return name.removeprefix("_orig_mod").removeprefix(".")


def _joined(found: dict[Node, list[Found]], terms: Terms, options: Options) -> dict[Node, list[Found]]:
    """Joins products of one x to one product with several results."""
    groups: dict[tuple[object, ...], list[Node]] = {}
    for node, (first, *_) in found.items():
        if first.row == "product" and not first.is_written and not any(weight.transposed for _, weight in first.ops[0].weights):
            name, gradient = first.module, (value_of(node).requires_grad, node in terms.with_gradient)
            groups.setdefault((first.x, terms.stretch[node], name.rpartition(".")[0], options.recipe_of(name), gradient), []).append(node)
    for nodes in groups.values():
        if len(nodes) < 2 or any(terms.depends(read, nodes) for node in nodes for read in found[node][0].reads()):
            continue
        nodes.sort(key=terms.order.__getitem__)
        parts = [found[node][0] for node in nodes]
        weights = {f"{at}_{name}": weight.node for at, part in enumerate(parts) for name, weight in part.ops[0].weights}
        both = product(weights, tuple(f"{at}_" for at in range(len(parts))))
        if isinstance(both, str) or both[0].refusal():
            continue
        covered = frozenset().union(*(part.nodes for part in parts))
        for node in nodes:
            del found[node]
        found[nodes[-1]] = [Found("products of one x", parts[0].x, tuple(nodes), both, covered, module=parts[0].module)]
    return found
