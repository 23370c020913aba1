"""Reports for users on what the backend replaced in a model's graphs."""

from __future__ import annotations

import contextlib
import html
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node
from torch.utils.weak import WeakTensorKeyDictionary

from tandem import ops
from tandem.backend.chains import WORTH_NO_PIPELINE, Chain
from tandem.backend.match import Left, module_of
from tandem.backend.normalise import PRODUCTS, Terms, computed_of, is_of_model, value_of
from tandem.backend.options import Options
from tandem.backend.place import Call
from tandem.backend.rows import LOSS
from tandem.pipelines.reporting import SKIPPED, is_skipped, runs_inside

_NO_ROW = "it belongs to no row"
_numbers = itertools.count()
_warned: Any = WeakTensorKeyDictionary()  # by a parameter of each model with a warning: identity of its options
_graphs: weakref.WeakSet[GraphModule] = weakref.WeakSet()


class Origin(NamedTuple):
    """The module that a node comes from, and the line of the model's source."""

    module: str
    line: str

    def __str__(self) -> str:
        return f"{self.module}: {self.line}"


class Piece(NamedTuple):
    """One pipeline in a report: its ops, and the origins of the results of each row."""

    ops: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Origin, ...]], ...]


class Report:
    """The report on one graph."""

    def __init__(self, graph: GraphModule, terms: Terms, chains: Sequence[Chain], left: Sequence[Left]) -> None:
        inside = {node for chain in chains for node in chain.nodes()}
        products = products_of(graph, terms)
        reasons = {each.node: each for each in reversed(left) if each.row not in WORTH_NO_PIPELINE}
        self.number = next(_numbers)
        self.products, self.products_inside = len(products), sum(node in inside for node in products)
        self.pieces = [_piece(chain) for chain in chains]
        self.left = [(each.row, _origin(each.node), each.reason) for each in reversed([*reasons.values()]) if each.node not in inside or each.row == LOSS]
        self.left += [("product", _origin(node), _NO_ROW) for node in products if node not in inside and node not in reasons]
        self.products_left = [(module_of(node), reasons[node].reason if node in reasons else _NO_ROW) for node in products if node not in inside]
        self.calls: list[Call] = []
        self.modules = {*map(module_of, graph.graph.nodes)}
        self.options = Options()
        self.together = [self]  # the reports on one graph and its checkpointed parts
        self.called_with: Any = WeakTensorKeyDictionary()  # tensors of models with which the graph was called

    @property
    def share(self) -> float:
        """The share of the graph's products that are in pipelines; 1 without products."""
        return self.products_inside / self.products if self.products else 1.0

    def title(self) -> str:
        return f"graph {self.number}: {self.products_inside} of {self.products} products in {len(self.pieces)} pipelines"

    def text(self) -> str:
        lines = [self.title()]
        for at, (piece, call) in enumerate(itertools.zip_longest(self.pieces, self.calls)):  # there are no calls yet if `require` is not met
            lines.append(f"  pipeline {at}: {', '.join(piece.ops)}{'' if call is None else call.kept()}")
            lines += [f"    {row:<34} {' | '.join(map(str, origins))}" for row, origins in piece.rows]
            lines += [f"    {line}" for line in (() if call is None else _fusions(call))]
        lines += [f"  left: {row} of {origin}: {reason}" for row, origin, reason in self.left]
        return "\n".join(lines)

    def html(self) -> str:
        """The report as HTML: lines of the model's source beside their pipelines, and the plan of each pipeline."""
        parts = [f"<h3>{html.escape(self.title())}</h3>"]
        for at, (piece, call) in enumerate(zip(self.pieces, self.calls, strict=True)):
            boxes = " &rarr; ".join(f"<b>{html.escape(op)}</b>" for op in piece.ops)
            rows = "".join(
                f"<tr><td>{html.escape(row)}</td><td>{html.escape(origin.module)}</td><td><code>{html.escape(origin.line)}</code></td></tr>"
                for row, origins in piece.rows
                for origin in origins
            )
            plans = [made.pipeline.explain("html") for made in call.first()]
            plan = f"<details><summary>plan</summary>{''.join(plans)}</details>" if plans else ""
            parts.append(f"<section><h4>pipeline {at}: {boxes}{call.kept()}</h4><table>{rows}</table>{plan}</section>")
        left = "".join(f"<li>{html.escape(f'{row} of {origin}: {reason}')}</li>" for row, origin, reason in self.left)
        return "".join(parts) + (f"<p>left as it is:</p><ul>{left}</ul>" if left else "")


def products_of(graph: GraphModule, terms: Terms) -> list[Node]:
    """The nodes that multiply by a weight, without those that compute a weight, such as the product of the factors of an adapter."""
    made = {node: inside for node in graph.graph.nodes if (inside := _inside_weight(node, terms)) is not None}
    parts = set().union(*made.values())
    return [node for node in made if node not in parts]


def _inside_weight(node: Node, terms: Terms) -> set[Node] | None:
    """The nodes that compute the weight of a product; None if the node is no product, or its weight depends on arguments of the model."""
    if node.op not in ("call_function", "call_method") or terms.same(node) is not node:
        return None
    term = terms.of(node)
    if term is None or term.kind not in PRODUCTS or term.covers:  # the node of the flattened product counts instead
        return None
    weight = term.inputs[1]
    if not isinstance(weight, Node) or weight.op in ("placeholder", "get_attr"):
        return set() if isinstance(weight, Node) else None
    inside = {*computed_of([weight])}
    is_given = any(each.op == "placeholder" and isinstance(value_of(each), torch.Tensor) and not is_of_model(each) for each in inside)
    return inside if not is_given and any(map(is_of_model, inside)) else None


def _fusions(call: Call) -> Iterator[str]:
    """The fusions that a pipeline of a call has made, and those that were refused, each with its reason."""
    for pipeline in (made.pipeline for made in call.first()):
        with contextlib.suppress(ValueError):  # its only call has failed
            lines = [line.strip() for line in pipeline.explain().splitlines()]
            yield f"fused: {', '.join(pipeline.fusions_made()) or 'nothing'}"
            yield from dict.fromkeys(line for line in lines if line.startswith("refused "))


def _piece(chain: Chain) -> Piece:
    made = tuple(op.make.__name__ for found in chain.found for op in found.ops)
    return Piece(made, tuple((found.row, tuple(map(_origin, found.outs))) for found in chain.found))


def _origin(node: Node) -> Origin:
    trace = [line.strip() for line in (node.meta.get("stack_trace") or "").strip().splitlines()]
    lines = [code for where, code in zip(trace, trace[1:], strict=False) if where.startswith("File ")]
    return Origin(module_of(node) or "the model", lines[-1] if lines else node.name)


def rendered(model: torch.nn.Module, format: str) -> str:
    """The report of `tandem.explain` on a compiled model; empty if the backend has seen no graph of it."""
    reports = [*reports_of(model)]
    if not any(report.products or report.pieces for report in reports) and any(True for _ in runs_inside(model)):
        return ""  # the model has only pipelines of modules of this library, which `explain` reports itself
    if not reports or format == "text":
        skipped = [f"left: what {model._get_name()} calls itself: {SKIPPED}"] if reports and is_skipped(model) else []
        return "\n".join([*(report.text() for report in reports), *skipped, *_names_of_no_module(model, reports)])
    if format == "html":
        return f"<div>{''.join(report.html() for report in reports)}</div>"
    plans = [pipeline.explain(format) for pipeline in pipelines_of(model)]
    if not plans and format != "json":
        raise ValueError(f"explain: expected a model with pipelines for format {format!r}, got {model._get_name()}, of which nothing became one. Ask for text, which says why.")
    return f"[{','.join(plans)}]" if format == "json" else "\n".join(plans)


def _names_of_no_module(model: torch.nn.Module, reports: Sequence[Report]) -> list[str]:
    """Messages for names in `exclude` that match no module of the model or of its graphs. Graphs count too, as a wrapper has other paths."""
    parts = [name.split(".") for report in reports for name in report.modules]
    seen = {".".join(each[:end]) for each in parts for end in range(1, len(each) + 1)} | {name for name, _ in model.named_modules()}
    return [*dict.fromkeys(text for report in reports for text in report.options.names_of_no_module(seen))]


def note(graph: GraphModule, report: Report) -> None:
    """Attaches a report to its graph, so that it lives as long as the compiled graph."""
    graph.__dict__["_tandem_report"] = report
    _graphs.add(graph)


def warn_of_high_precision(reports: Sequence[Report], options: Options, inputs: Sequence[Any], given: Mapping[str, Any]) -> None:
    """Warns once for each compiled model of products outside of pipelines that the recipe should quantize. Excluded products do not count. `reports` are
    those on a graph and its checkpointed parts, `inputs` its example operands; `options` were read from `given`, one object for all graphs of a model."""
    left = [each for report in reports for each in report.products_left if not options.excludes(each[0]) and options.recipe_of(each[0]) is not None]
    if not left or id(given) in [*_warned.values()]:
        return
    tensors = sorted((each for each in inputs if isinstance(each, torch.Tensor)), key=lambda each: not isinstance(each, torch.nn.Parameter))
    _warned.update({tensor: id(given) for tensor in tensors[:1]})
    module, reason = left[0]
    warnings.warn(
        f"compile: expected to quantize all products by the recipe, got {len(left)} of {sum(report.products for report in reports)} that stay in high precision, the "
        f"first of {module or 'the model'}: {reason}. See tandem.explain, and leave them out by exclude or by a function as the recipe.",
        stacklevel=2,
    )


def noting(run: Callable[..., Any], graph: GraphModule, reports: list[Report], options: Options) -> Callable[..., Any]:
    """A function that calls `run` and notes the model's tensors among its operands; `run` itself if pipelines note their parameters already. The last one of
    `reports` is that on the graph, the others are those on its checkpointed parts."""
    called_with = reports[-1].called_with
    for report in reports:
        report.together, report.called_with, report.options = reports, called_with, options
    if any(call.draft.keys for report in reports for call in report.calls):
        return run
    own = [at for at, node in enumerate(graph.graph.find_nodes(op="placeholder")) if is_of_model(node)]

    def noted(*operands: Any) -> Any:
        for at in own:
            called_with[operands[at]] = graph
        return run(*operands)

    return noted


def reports_of(model: torch.nn.Module) -> Iterator[Report]:
    """The reports on graphs that were called with tensors of a model, in the order in which they were compiled."""
    own = _tensors(model)
    reports = [graph.__dict__["_tandem_report"] for graph in list(_graphs)]
    for report in sorted(reports, key=lambda report: report.number):
        calls = [call for each in report.together for call in each.calls]
        if any(own.keys() & {*key} for call in calls for key in list(call.made)) or any(tensor in report.called_with for tensor in own.values()):
            yield report


def pipelines_of(model: torch.nn.Module) -> Iterator[ops.Sequential]:
    """The pipelines that calls of a model have created, each once."""
    own = _tensors(model).keys()
    found = {id(made): made.pipeline for report in reports_of(model) for call in report.calls for key, made in list(call.made.items()) if own & {*key}}
    yield from found.values()


def _tensors(model: torch.nn.Module) -> dict[int, torch.Tensor]:
    """The parameters and buffers of a model by identity. With `fully_shard` the unsharded parameters, with which its graphs are called, are included."""
    found = [*model.parameters(), *model.buffers()]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        from torch.distributed.fsdp import FSDPModule

        groups = [group for module in model.modules() if isinstance(module, FSDPModule) for group in module._get_fsdp_state()._fsdp_param_groups]
        found += [whole for group in groups for each in group.fsdp_params if (whole := getattr(each, "_unsharded_param", None)) is not None]
    return {id(tensor): tensor for tensor in found}
