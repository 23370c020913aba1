"""Replaces the nodes of chains in a graph by calls of pipelines."""

from __future__ import annotations

import operator
import threading
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from tandem import _C, ops
from tandem.backend import recompute
from tandem.backend.chains import Chain
from tandem.backend.normalise import Terms, tensors_of_model, users, value_of
from tandem.backend.options import Options
from tandem.backend.rows import Op
from tandem.backend.verify import Reference
from tandem.state import compiled as compiled_state

FOLLOW_AUTOCAST = (ops.Linear, ops.LinearCrossEntropy, ops.Attention)  # torch computes other ops of a pipeline in the dtype of their operands


class Draft:
    """The construction of a chain's pipeline, and the nodes of the graph that are its operands and results."""

    def __init__(self, chain: Chain, terms: Terms, uses: Counter[tuple[Node, ...]]) -> None:
        """`uses`: number of products so far, over the graph, by the tensors of the model from which their weights are computed."""
        self.steps: list[tuple[Op, list[str | None], tuple[str, bool] | None]] = []  # an op, the channels of its extra inputs and of its extra output
        self.extras: list[Node] = []
        self.ends: list[bool] = []  # for each extra: whether it holds the ends of groups
        self.outs, self.device = [*chain.last.outs], value_of(chain.x).device
        self.heads: dict[int, Mapping[str, int]] = {}  # by index of an extra output with keys and values for other nodes: the options of its heads
        inside, channels, count = chain.nodes(), {}, 0
        for at, found in enumerate(chain.found):
            for op in found.ops:
                if op.make is ops.Attention and found.kept:
                    self.heads[count], count = op.options, count + 1
                    self.outs += found.kept
                    self.steps.append((Op(ops.MakeExtraOutput), [], (f"heads{at}", True)))
                inputs = [channels.get(extra) for extra in op.extras]
                outside = [extra for extra, channel in zip(op.extras, inputs, strict=True) if channel is None]
                self.extras += outside
                self.ends += [op.has_ends] * len(outside)
                self.steps.append((op, inputs, None))
            if found is chain.last:
                break
            (out,) = found.outs
            to_caller = any(terms.same(user) not in inside for user in users(out, terms))
            if to_caller or any(out in op.extras for each in chain.found[at + 1 :] for op in each.ops):
                channels[out] = f"value{at}"
                self.steps.append((Op(ops.MakeExtraOutput), [], (channels[out], to_caller)))
            if to_caller:
                self.outs.append(out)
                count += 1
        self.weights = [*dict.fromkeys(weight.node for op, _, _ in self.steps for _, weight in op.weights if weight.node is not None)]
        self.operands = (chain.x, *self.extras, *self.weights)
        self.read = [*self.weights]  # the weights, and the tensors of the model from which they are computed
        self.sites: dict[int, tuple[tuple[int, ...], int]] = {}  # by step of a product: indices of its tensors in `read`, and its number among their uses
        for at, (op, _, _) in enumerate(self.steps):
            if op.make is ops.Linear:
                tensors = tuple(dict.fromkeys(each for name, weight in op.weights if name.endswith("weight") for each in tensors_of_model(weight.node, terms)))
                uses[tensors] += 1
                self.read += [each for each in tensors if each not in self.read]
                self.sites[at] = (tuple(map(self.read.index, tensors)), uses[tensors])
        parameters = {at for at, each in enumerate(self.weights) if isinstance(value_of(each), torch.nn.Parameter)}
        self.keys = sorted(parameters.union(*(tensors for tensors, _ in self.sites.values())))
        self.columns = [*self.steps[-1][0].options["parameters_split"].values()] if len(chain.last.outs) > 1 else []

    def split(self, made: Any) -> Any:
        """The parts of the results of a pipeline, in the order and layout of `outs`."""
        main, *rest = made if isinstance(made, tuple) else (made,)
        # Dynamo has recorded the graph with results that are contiguous and no views, of one row too.
        results = [part.clone(memory_format=torch.contiguous_format) for part in main.split(self.columns, -1)] if self.columns else [main]
        for at, each in enumerate(rest):
            results += _keys_and_values(each, **self.heads[at]) if at in self.heads else [each]
        return tuple(results)

    def structure(self) -> tuple[Any, ...]:
        """A key by which graphs share pipelines: drafts with equal keys, as graphs for other shapes and for evaluation have, build equal ones."""
        steps = []
        for op, inputs, output in self.steps:
            weights = [(name, None if weight.node is None else self.weights.index(weight.node), weight.transposed) for name, weight in op.weights]
            steps.append((op.make, repr(op.options), *weights, *inputs, output))
        return (*steps, *self.sites.items(), *self.keys)

    def new(self) -> Made:
        listed, places, products = [], [], []
        for step, (op, inputs, output) in enumerate(self.steps):
            module = op.made()
            module.__dict__["_keeps_dtype"] = op.make not in FOLLOW_AUTOCAST
            for at, channel in enumerate(inputs):
                if channel is not None:
                    module.set_extra_input_channel(at, channel)
            if output is not None:
                module.set_extra_output_channel(0, output[0], output_to_caller=output[1])
            for name, weight in op.weights:
                if weight.node is None:
                    value = float(name == "weight" and not op.options.get("zero_centered_gamma"))
                    neutral = torch.full_like(module._parameters[name], value, device=self.device)
                    module._parameters[name] = torch.nn.Parameter(neutral, requires_grad=False)
                else:
                    places.append(Place(module._parameters, name, module._parameters[name], self.weights.index(weight.node), weight.transposed))
            if step in self.sites:
                products.append((module, *self.sites[step]))
            listed.append(module)
        return Made(ops.Sequential(*listed), places, products)


class Place(NamedTuple):
    """The parameter of an op that is set to an operand during each call."""

    of: dict[str, torch.Tensor | None]
    name: str
    absent: torch.Tensor | None  # the parameter between calls
    weight: int
    transposed: bool


class Made:
    """A pipeline, the owners and names of its parameters, and its products with their sites (see `Draft.sites`), as some recipes keep state for products."""

    def __init__(self, pipeline: ops.Sequential, places: list[Place], products: list[tuple[Any, tuple[int, ...], int]]) -> None:
        self.pipeline, self.places, self.products = pipeline, places, products
        self.recipe = ""  # the recipe for which the products have their state
        self.lock = threading.RLock()  # a caller holds it, as it sets the parameters

    def fill(self, weights: Sequence[torch.Tensor]) -> None:
        for place in self.places:
            weight = weights[place.weight]
            place.of[place.name] = weight.mT if place.transposed else weight

    def empty(self) -> None:
        for place in self.places:
            place.of[place.name] = place.absent

    def give_state(self, recipe: str, read: Sequence[torch.Tensor]) -> None:
        for op, tensors, use in self.products:
            compiled_state.give(op, [read[at] for at in tensors], use, recipe)
        self.recipe = recipe


class Known(dict[tuple[int, ...], Made]):
    """Pipelines by identities of the tensors of a model that they read. An entry is removed when one of its tensors is freed."""

    def note(self, key: tuple[int, ...], made: Made, tensors: Sequence[torch.Tensor]) -> None:
        self[key] = made
        for tensor in tensors:
            weakref.finalize(tensor, _forget, weakref.ref(self), key).atexit = False


def _forget(known: weakref.ref[Known], key: tuple[int, ...]) -> None:
    if (held := known()) is not None:
        held.pop(key, None)


_shared: weakref.WeakValueDictionary[tuple[Any, ...], Known] = weakref.WeakValueDictionary()  # by structure, as long as a graph uses it
_making = threading.RLock()


class Call(torch.nn.Module):
    """The pipelines that one node of a graph calls. Parameters are operands of the call, as one graph serves all equal layers; each layer has its own
    pipeline, which keeps the codes of its weights and which other graphs of the layer share. Between calls a pipeline holds no parameters, so that they
    are freed with their model."""

    def __init__(self, draft: Draft, recipe: Any, memory_budget: float | None, reference: Reference | None) -> None:
        super().__init__()
        self.draft, self.recipe, self.memory_budget = draft, recipe, memory_budget
        self.__dict__["reference"] = reference  # __dict__ keeps its graph from becoming a submodule
        self.given, self.keys = 1 + len(draft.extras), draft.keys
        self.has_groups = any(op.make is ops.GroupedLinear for op, _, _ in draft.steps)
        self.made = Known()  # pipelines that this node has called
        self.dtypes = [value_of(out).dtype for out in draft.outs]  # emptied when the first results have been checked
        is_alone = reference is not None or not draft.keys
        self.shared = Known() if is_alone else _shared.setdefault((*draft.structure(), memory_budget), Known())

    def __call__(self, *operands: torch.Tensor) -> Any:  # torch's own method looks for hooks
        given, read = operands[: self.given], operands[self.given :]
        key = tuple([id(read[at]) for at in self.keys])
        made = self.made.get(key) or self.add(key, given, read)
        with made.lock:
            made.fill(read)
            try:
                with nullcontext() if self.recipe is None else recompute.region(self.recipe):
                    if (recipe := _C.in_force.recipe) != made.recipe:
                        made.give_state(recipe, read)
                    results = self.results(made.pipeline, *given)
            finally:
                made.empty()
        if self.dtypes:
            self.check(results)
        return results

    def check(self, results: Any) -> None:
        """Raises RuntimeError if the first results have other dtypes than the graph, by which code that reads them may be compiled."""
        if self.dtypes != (got := [each.dtype for each in (results if isinstance(results, tuple) else (results,))]):
            raise RuntimeError(f"tandem: expected results of dtypes {self.dtypes}, as in the graph, got {got}. Exclude their modules, and report it.")
        self.dtypes = []

    def first(self) -> list[Made]:
        """The pipeline that was called first, as an example of the others; none before the first call."""
        return list(self.made.values())[:1]

    def kept(self) -> str:
        """A text: the bytes that the last call with gradients kept for backward and, with `verify`, the bytes that the graph kept."""
        bytes_kept = [made.pipeline.saved_bytes() for made in self.first()]
        before = [sum(self.reference.kept.values())] if self.reference is not None and self.reference.kept else []
        return "; keeps " + " of ".join(f"{each:,}" for each in (*bytes_kept, *before)) + " bytes for backward" if bytes_kept else ""

    def add(self, key: tuple[int, ...], given: Sequence[torch.Tensor], read: Sequence[torch.Tensor]) -> Made:
        tensors = [read[at] for at in self.draft.keys]
        with _making:
            made = self.shared.get(key)
            if made is None:
                with torch.inference_mode(False):  # backward of a later call may save the neutral parameters
                    made = self.draft.new()
                made.pipeline.memory_budget = self.memory_budget
                if self.reference is not None:
                    made.fill(read)
                    made.pipeline.eval()  # without dropout, whose random numbers differ
                    weights, beside = read[: len(self.draft.weights)], read[len(self.draft.read) :]
                    self.reference.compare(lambda *own: self.results(made.pipeline, *own), given, weights, beside)
                    made.pipeline.train()
                self.shared.note(key, made, tensors)
            self.made.note(key, made, tensors)
        return made

    def results(self, pipeline: ops.Sequential, *given: torch.Tensor) -> Any:
        """The results of a pipeline whose parameters are set, in the order and layout of `draft.outs`."""
        results = self.run(pipeline, *given) if self.has_groups else pipeline.forward(*given)
        return self.draft.split(results) if self.draft.columns or self.draft.heads else results

    def run(self, pipeline: ops.Sequential, *given: torch.Tensor) -> Any:
        """The results of a pipeline with products of groups."""
        x, *extras = given
        ends = {id(extra): extra for extra, is_end in zip(extras, self.draft.ends, strict=True) if is_end}
        sizes = {at: torch.diff(each, prepend=each.new_zeros(1)) for at, each in ends.items()}  # number of rows of each group
        given = (x, *[sizes.get(id(extra), extra) for extra in extras])
        with torch.autocast(of, enabled=False) if torch.is_autocast_enabled(of := self.draft.device.type) else nullcontext():  # in their operands' dtype, as torch
            return pipeline.forward(*given)


def _keys_and_values(x: torch.Tensor, num_heads: int, head_dim: int, num_kv_heads: int, **_: Any) -> list[torch.Tensor]:
    """Keys and values of rows of queries, keys and values side by side, in the layout of the graph: [batch, heads, sequence, head_dim]."""
    _, *parts = x.unflatten(-1, (-1, head_dim)).split([num_heads, num_kv_heads, num_kv_heads], -2)
    return [part.clone(memory_format=torch.contiguous_format).transpose(1, 2) for part in parts]


def put(graph: GraphModule, found: Sequence[Chain], terms: Terms, options: Options) -> list[Call]:
    """Replaces the nodes of each chain by a call of a pipeline, and returns the modules that are called."""
    calls, results = [], []
    uses: Counter[tuple[Node, ...]] = Counter()
    for at, chain in enumerate(found):
        draft = Draft(chain, terms, uses)
        reference = None
        if options.verify:
            depends = partial(terms.depends, on={*draft.operands, *chain.nodes()})
            reference = Reference(f"pipeline {at}, {chain.description()}", draft.operands, draft.outs, depends)
        call = Call(draft, chain.recipe, options.memory_budget, reference)
        graph.add_submodule(f"tandem_{at}", call)
        graph.__dict__[f"tandem_{at}"] = call  # found at once, where torch.nn.Module.__getattr__ would search
        with graph.graph.inserting_before(chain.last.outs[-1]):
            node = graph.graph.call_module(f"tandem_{at}", (chain.x, *draft.extras, *draft.read, *(reference.beside if reference else ())))
            items = [graph.graph.call_function(operator.getitem, (node, position)) for position in range(len(draft.outs))] if len(draft.outs) > 1 else [node]
        results += zip(draft.outs, items, strict=True)
        calls.append(call)
    for out, item in results:
        item.meta = dict(out.meta)
        out.replace_all_uses_with(item)
    replaced = {node for chain in found for node in chain.nodes()}
    for node in reversed(graph.graph.nodes):
        is_new = node not in terms.order  # a call of a pipeline, or one of its results
        if not node.users and (is_new or terms.same(node) in replaced or ((term := terms.of(node)) is not None and term.kind in ("transpose", "unsqueeze"))):
            graph.graph.erase_node(node)
    _in_order(graph)
    graph.graph.lint()
    graph.recompile()
    return calls


def is_call(node: Node, graph: GraphModule) -> bool:
    """Whether a node calls a pipeline."""
    return node.op == "call_module" and isinstance(graph.get_submodule(node.target), Call)


def is_result_of_call(node: Node, graph: GraphModule) -> bool:
    """Whether a node takes one of several results of a call of a pipeline."""
    return node.target is operator.getitem and is_call(node.args[0], graph)


def _in_order(graph: GraphModule) -> None:
    """Moves nodes so that each follows the nodes that it reads. A call stands where the last result of its chain was, after readers of earlier results."""
    placed: set[Node] = set()
    opened: set[Node] = set()
    order: list[Node] = []
    for each in graph.graph.nodes:
        ahead = [each]
        while ahead:
            if ahead[-1] in placed:
                ahead.pop()
            elif missing := [read for read in ahead[-1].all_input_nodes if read not in placed]:
                assert ahead[-1] not in opened, f"{ahead[-1].name} reads what is computed of it"
                opened.add(ahead[-1])
                ahead += missing
            else:
                node = ahead.pop()
                together = (node, *(user for user in node.users if is_result_of_call(user, graph)))
                placed.update(together)
                order += together
    last = graph.graph._root
    for node in order:
        last.append(node)
        last = node
