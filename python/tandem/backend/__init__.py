"""A backend of `torch.compile` that replaces parts of a model's graph by pipelines: `torch.compile(model, backend="tandem")`.

Dynamo passes a graph of torch functions, before autograd. Four passes follow: `normalise` translates nodes into one small vocabulary, `match` finds rows of
a table (`rows`), `chains` joins them along the residual stream, and `place` replaces each chain by a pipeline. Parameters of the model are operands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from tandem.backend import recompute
from tandem.backend.autocast import ends_autocast, note_autocast
from tandem.backend.chains import chains
from tandem.backend.loss import kept_results, prepare_losses
from tandem.backend.match import find
from tandem.backend.normalise import checkpointed
from tandem.backend.options import Options
from tandem.backend.place import put
from tandem.backend.report import Report, note, noting, warn_of_high_precision
from tandem.backend.rest import runner


def backend(graph: GraphModule, inputs: list[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None) -> Callable[..., Any]:
    """The function that runs a graph with pipelines in it. `torch.compile(model, backend="tandem", options={...})` calls `backend` with each graph.

    Args:
        graph: a graph of torch functions, as Dynamo has recorded it.
        inputs: example operands of the graph.
        options: options of `tandem.compile`.
        mode: None or "default"; other values raise ValueError, as `options` configure pipelines.
    """
    if mode not in (None, "default"):
        raise ValueError(f"compile: expected no mode, or \"default\", as pipelines have options instead, got {mode!r}. Pass options.")
    chosen = Options.of(options or {})
    device = next((each.device.type for each in inputs if isinstance(each, torch.Tensor)), "cpu")
    note_autocast(graph, device, torch.is_autocast_enabled(device))
    reports = [_replace(part, caller, chosen) for caller, part in (*checkpointed(graph), (None, graph))]
    recompute.put(graph)
    warn_of_high_precision(reports, chosen, inputs, options or {})
    run, targets = runner(graph, chosen.rest), {node.target for part in graph.modules() if isinstance(part, GraphModule) for node in part.graph.nodes}
    run = ends_autocast()(run) if torch.amp._enter_autocast in targets else run
    return noting(run, graph, reports, chosen)


def _replace(graph: GraphModule, caller: Node | None, options: Options) -> Report:
    terms = prepare_losses(graph, kept_results(graph, caller, options.logits))
    found, left = find(graph, terms, options)
    made = chains(found, terms, options.recipe_of)
    report = Report(graph, terms, made, left)
    if options.require is not None and report.share < options.require:
        raise RuntimeError(
            f"compile: expected at least {options.require:g} of the products in pipelines, got {report.products_inside} of "
            f"{report.products}. Lower require, or change what was left:\n{report.text()}"
        )
    report.calls = put(graph, made, terms, options)
    note(graph, report)
    return report
