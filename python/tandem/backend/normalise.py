"""Translates nodes of a graph from Dynamo into terms of one small vocabulary, in which different spellings of an operation are equal.

The graph itself is not changed: nodes that no pipeline replaces run as the model's author wrote them.
"""

from __future__ import annotations

import ast
import functools
import inspect
import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F


class Term(NamedTuple):
    """An operation of the vocabulary on nodes and numbers."""

    kind: str
    inputs: tuple[Any, ...]
    options: dict[str, Any] = {}  # arguments that are no operands, such as a dtype or a probability
    covers: tuple[Node, ...] = ()  # other nodes that the term includes


PRODUCTS = ("linear", "grouped")  # terms that multiply by a weight

# The operation, its parameters in order, and its spellings: functions, methods by name, operators of libraries. `=` begins a default.
_SPELLINGS: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("linear", "x weight bias=None", (F.linear,)),
    ("addmm", "bias x weight beta=1 alpha=1", (torch.addmm, "addmm")),
    ("grouped", "x weight offs=None bias=None out_dtype=None", (F.grouped_mm, torch._grouped_mm, "transformers::grouped_mm_fallback")),
    ("matmul", "x weight", (torch.matmul, torch.mm, operator.matmul, "matmul", "mm", "__matmul__")),
    ("add", "a b alpha=1", (torch.add, operator.add, operator.iadd, "add", "add_", "__add__", "__radd__")),
    ("sub", "a b alpha=1", (torch.sub, operator.sub, "sub", "__sub__")),
    ("mul", "a b", (torch.mul, operator.mul, operator.imul, "mul", "mul_", "__mul__", "__rmul__", torch.multiply)),
    ("div", "a b rounding_mode=None", (torch.div, operator.truediv, "div", "__truediv__", torch.true_divide)),
    ("pow", "a exponent", (torch.pow, operator.pow, "pow", "__pow__")),
    ("square", "a", (torch.square, "square")),
    ("sqrt", "a", (torch.sqrt, "sqrt")),
    ("rsqrt", "a", (torch.rsqrt, "rsqrt")),
    ("mean", "a dim=None keepdim=False dtype=None", (torch.mean, "mean")),
    ("tanh", "a", (torch.tanh, "tanh", F.tanh)),
    ("sigmoid", "a", (torch.sigmoid, "sigmoid", F.sigmoid, torch.special.expit)),
    ("silu", "a inplace=False", (F.silu,)),
    ("relu", "a inplace=False", (F.relu, torch.relu, "relu")),
    ("gelu", "a approximate='none'", (F.gelu,)),
    ("erf", "a", (torch.erf, "erf", torch.special.erf)),
    ("softplus", "a beta=1.0 threshold=20.0", (F.softplus,)),
    ("mish", "a inplace=False", (F.mish,)),
    ("relu6", "a inplace=False", (F.relu6,)),
    ("hardswish", "a inplace=False", (F.hardswish,)),
    ("leaky_relu", "a negative_slope=0.01 inplace=False", (F.leaky_relu,)),
    ("dropout", "a p=0.5 training=True inplace=False", (F.dropout, torch.dropout)),
    ("layer_norm", "a shape weight=None bias=None eps=1e-05", (F.layer_norm,)),
    ("rms_norm", "a shape weight=None eps=None", (F.rms_norm, torch.rms_norm)),
    ("cross_entropy", "a target class_weight=None size_average=None ignore_index=-100 reduce=None reduction='mean' label_smoothing=0.0", (F.cross_entropy,)),
    ("chunk", "a count dim=0", (torch.chunk, "chunk")),
    ("split", "a sizes dim=0", (torch.split, "split")),
    ("cast", "a dtype=None", ("to", "type", "type_as", "float", "half", "bfloat16", "double")),
    ("view", "a", ("view", "reshape", torch.reshape, "flatten", torch.flatten, "unflatten", torch.unflatten, "contiguous")),
    ("expand", "a", ("expand", torch.Tensor.expand)),
    ("unsqueeze", "a dim=0", ("unsqueeze", torch.unsqueeze)),
    ("neg", "a", (torch.neg, operator.neg, "neg", "__neg__")),
    ("cat", "tensors dim=0", (torch.cat, torch.concat)),
    ("attention", "query key value mask=None dropout_p=0.0 is_causal=False scale=None enable_gqa=False", (F.scaled_dot_product_attention,)),
    ("transpose", "a first=0 second=1", ("t", torch.t, "transpose", torch.transpose)),
)
_OPERANDS = {"x", "a", "b", "weight", "offs", "bias", "exponent", "target", "class_weight", "tensors", "query", "key", "value", "mask"}
_RENAMED = {  # from torch's names of parameters to those of the vocabulary
    "other": "b", "mat_a": "x", "mat_b": "weight", "mat2": "weight", "normalized_shape": "shape",
    "split_size_or_sections": "sizes", "chunks": "count", "train": "training", "attn_mask": "mask",
}
_KINDS: dict[Any, tuple[str, tuple[tuple[str, Any], ...]]] = {}
for _kind, _parameters, _spelled in _SPELLINGS:
    _named = tuple((name, ast.literal_eval(default) if default else ...) for name, _, default in (word.partition("=") for word in _parameters.split()))
    for _target in _spelled:
        _KINDS[_target] = (_kind, _named)

_AUGMENTED = {"add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift"}
_OF_STATE = ("_enter", "_exit", "_set_", "set_", "manual_seed")  # beginnings of the names of functions that change the effect of later nodes
_IN_PLACE_OPERATORS = {operator.iconcat, *(getattr(operator, f"i{name}") for name in _AUGMENTED)}


def value_of(node: Any) -> Any:
    """The example value that Dynamo has recorded for a node: a fake tensor or a number. Other arguments are returned themselves."""
    return node.meta.get("example_value") if isinstance(node, Node) else node


def has_shape(value: Any, shape: tuple[Any, ...]) -> bool:
    """Whether a tensor is known to have these sizes, without a new guard on symbols."""
    return len(value.shape) == len(shape) and all(statically_known_true(a == b) for a, b in zip(value.shape, shape, strict=True))


def fixed(size: Any) -> int | None:
    """A size as a number; None for a symbol that may have several values."""
    known: int | None = size if isinstance(size, int) else size.node.maybe_as_int()
    return known


def writes(node: Node) -> bool:
    """Whether a node writes to an operand."""
    target: Any = node.target
    if node.op == "call_method":
        return (target.endswith("_") and not target.endswith("__")) or target == "__setitem__" or (target.startswith("__i") and target[3:-2] in _AUGMENTED)
    if node.op != "call_function":
        return False
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    name = getattr(target, "__name__", "")
    return target is operator.setitem or target in _IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__")) or _is_asked_to_write(node)


def written_by(node: Node) -> list[Node]:
    """The operands that a node may write to, if it writes at all."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return node.all_input_nodes
    operand = node.kwargs.get("out") or next(iter(node.args), node.kwargs.get("input"))
    return [each for each in (operand if isinstance(operand, (tuple, list)) else (operand,)) if isinstance(each, Node)]


def _is_asked_to_write(node: Node) -> bool:
    """Whether a node passes `out`, or `inplace=True` by name or by position."""
    if node.kwargs.get("inplace") is True or node.kwargs.get("out") is not None:
        return True
    at = _position_of_inplace(node.target)
    return at is not None and len(node.args) > at and node.args[at] is True


@functools.cache
def _position_of_inplace(target: Any) -> int | None:
    try:
        return [*inspect.signature(target).parameters].index("inplace")
    except (TypeError, ValueError):  # the function has no such parameter, or no signature
        return None


def changes_state(node: Node) -> bool:
    """Whether a node writes to a tensor that other nodes may read, or changes the effect of later nodes: no node may move past it."""
    if node.op != "call_function":
        return writes(node) or node.op == "call_module"
    target: Any = node.target
    name, module = getattr(target, "__name__", ""), getattr(target, "__module__", "") or ""
    is_call_of_state = name.startswith(_OF_STATE) or "_functorch" in module or isinstance(target, torch._ops.HigherOrderOperator)
    return writes(node) or is_call_of_state or (value_of(node) is None and name != "_log_api_usage_once")


def ends_in_a_break(graph: GraphModule) -> bool:
    """Whether code that Dynamo does not trace reads the results of a graph."""
    return getattr(getattr(graph, "compile_subgraph_reason", None), "graph_break", False)  # an attribute that Dynamo sets


def memory_of(node: Any) -> int | None:
    """A number that identifies the storage of a node's result, which views share; None if there is no storage."""
    value = value_of(node)
    try:
        return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None
    except (NotImplementedError, RuntimeError):  # types without a storage raise one of these
        return None


def computed_of(nodes: Iterable[Node], reads: Callable[[Node], Iterable[Node]] = lambda node: node.all_input_nodes) -> Iterator[Node]:
    """These nodes and all nodes from which they are computed, each once.

    Args:
        nodes: the nodes where the walk begins.
        reads: the operands of a node to which the walk goes on.
    """
    seen: set[Node] = set()
    ahead = [*nodes]
    while ahead:
        node = ahead.pop()
        if node not in seen:
            seen.add(node)
            yield node
            ahead += reads(node)


def is_recomputed(node: Node) -> bool:
    """Whether a node is Dynamo's call of a part that backward recomputes."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") in ("tag_activation_checkpoint", "wrap_activation_checkpoint")


def checkpointed(graph: GraphModule) -> Iterator[tuple[Node, GraphModule]]:
    """The parts of a graph that backward recomputes, inner ones first: the node that calls each part, and the part's own graph."""
    for node in graph.graph.nodes:
        if is_recomputed(node):
            part = graph.get_submodule(node.args[0].target)
            yield from checkpointed(part)
            yield node, part


class Terms:
    """The terms of a graph."""

    def __init__(self, graph: GraphModule) -> None:
        self.order = {node: at for at, node in enumerate(graph.graph.nodes)}
        self._terms: dict[Node, Term | None] = {}
        self._same: dict[Node, Node] = {}
        holders: dict[int | None, list[Node]] = {}
        for node in graph.graph.nodes:
            holders.setdefault(memory_of(node), []).append(node)
        written = {node: written_by(node) for node in graph.graph.nodes if writes(node)}
        # If no other node uses the memory of the operand, a write to it is equivalent to a new result.
        unseen = {node for node, operands in written.items() if len(operands) == 1 and (operand := operands[0]).op != "placeholder" and holders[memory_of(operand)] == [operand, node] and len(operand.users) == 1}
        self.written_for_others = {memory_of(operand) for node, operands in written.items() if node not in unseen for operand in operands} - {None}
        # Hooks see gradients of all readers, also of those ahead of them in the graph: all must read the tensor from outside of their pipelines. Code behind a
        # graph break may register hooks on results.
        self.hooked = {memory_of(node.args[0]) for node in graph.graph.nodes if getattr(node.target, "__name__", node.target) in ("register_hook", "retain_grad")} - {None}
        self.shown = {memory_of(node) for node in graph.graph.find_nodes(op="output")[0].all_input_nodes if ends_in_a_break(graph)} - {None}
        self.with_gradient = _with_gradient(graph)
        stretch, self.stretch = 0, {}  # nodes with the same number have none between them that changes state
        for node in graph.graph.nodes:  # in order, so that inputs are known
            stretch += (changes := changes_state(node) and node not in unseen)
            self.stretch[node] = stretch
            stretch += changes
            term = None if changes else _term(node)
            same = self._unchanged(node, term)
            self._same[node] = node if same is None else self._same[same]
            self._terms[node] = term if term is None else self._in_vocabulary(node, term)

    def of(self, node: Any) -> Term | None:
        """The term of a node; None if the vocabulary has no word for its operation."""
        return self._terms.get(self.same(node)) if isinstance(node, Node) else None

    def kind(self, node: Any) -> str | None:
        """The kind of a node's term, or None."""
        term = self.of(node)
        return None if term is None else term.kind

    def same(self, node: Any) -> Any:
        """The first node of equal values, dtype and shape, which this one only passes on. Numbers are returned themselves."""
        return self._same[node] if isinstance(node, Node) else node

    def depends(self, node: Node, on: Collection[Node]) -> bool:
        """Whether a node is one of the nodes `on`, or is computed from one."""
        begin = min(map(self.order.__getitem__, on))
        return any(each in on for each in computed_of([node], lambda each: each.all_input_nodes if self.order[each] > begin else ()))

    def _unchanged(self, node: Node, term: Term | None) -> Node | None:
        """The input that a node returns unchanged, or None."""
        if term is None or not term.inputs or not isinstance(term.inputs[0], Node):
            return None
        given, made = value_of(term.inputs[0]), value_of(node)
        if not (isinstance(given, torch.Tensor) and isinstance(made, torch.Tensor)) or given.dtype != made.dtype or given.device != made.device:
            return None
        if term.kind in ("cast", "view") and memory_of(node) == memory_of(term.inputs[0]) and has_shape(made, tuple(given.shape)):
            return term.inputs[0] if given.stride() == made.stride() and given.storage_offset() == made.storage_offset() else None
        if term.kind == "dropout" and (term.options["training"] is False or term.options["p"] == 0):
            return term.inputs[0]
        return None

    def _in_vocabulary(self, node: Node, term: Term) -> Term | None:
        """The term in the reduced vocabulary, in which powers, quotients, views of rows and pieces have one form; None if it has none."""
        kind, inputs, options = term.kind, tuple(map(self.same, term.inputs)), term.options
        if kind in ("add", "sub") and options.get("alpha", 1) != 1:
            return None
        if kind == "sub" and isinstance(inputs[1], (int, float)):
            return Term("add", (inputs[0], -inputs[1]))
        if kind == "mul" and inputs[0] is inputs[1]:
            return Term("square", inputs[:1])
        if kind == "pow":
            return {2: Term("square", inputs[:1]), -0.5: Term("rsqrt", inputs[:1]), 0.5: Term("sqrt", inputs[:1])}.get(inputs[1], term._replace(inputs=inputs)) if isinstance(inputs[1], (int, float)) else None
        if kind == "div":
            if options.get("rounding_mode") is not None:
                return None
            if isinstance(inputs[1], (int, float)) and 1e-30 < abs(inputs[1]) < 1e30:
                return Term("mul", (inputs[0], 1 / inputs[1]))
            root = self.of(inputs[1])
            if root is not None and root.kind == "sqrt":
                covers = (inputs[1],)
                return Term("rsqrt", root.inputs, covers=covers) if inputs[0] == 1 else Term("over_root", (inputs[0], root.inputs[0]), covers=covers)
        if kind == "mean":
            last = options["dim"] in (-1, [-1], (-1,)) and options["keepdim"] and options["dtype"] is None
            return Term("mean", inputs[:1]) if last else None
        if kind in ("addmm", "matmul"):
            return self._product(term, inputs)
        if kind == "grouped":
            return self._grouped_product(term, inputs)
        if kind == "view" and value_of(node).dtype != value_of(inputs[0]).dtype:  # view(dtype) reinterprets bytes
            return None
        if kind == "view":
            return self._rows_again(node, inputs[0]) or self._repeated(node, inputs[0]) or _laid_out(node, inputs[0])
        if kind == "transpose" and {options["first"], options["second"]} == {1, 2} and value_of(inputs[0]).dim() == 4:
            return Term("swap", inputs)
        if kind == "transpose" and not _turns_matrices(value_of(inputs[0]), options["first"], options["second"]):
            return None
        if kind == "cat":
            (tensors,) = inputs
            if not isinstance(tensors, (tuple, list)):
                return None
            empty = {each for each in tensors if statically_known_true(value_of(each).numel() == 0)}
            tensors = tuple(self.same(each) for each in tensors if each not in empty)
            if len(tensors) == 1 and value_of(tensors[0]).dtype == value_of(node).dtype:
                return Term("laid", tensors, covers=tuple(each for each in empty if self.kind(each) == "piece"))
            return Term("cat", tensors) if options["dim"] in (-1, value_of(node).dim() - 1) else None
        return Term(kind, inputs, options)

    def _product(self, term: Term, inputs: tuple[Any, ...]) -> Term | None:
        """x weight^T + bias for a product that is written as `addmm` or `matmul`, or None."""
        bias, x, weight = inputs if term.kind == "addmm" else (None, *inputs)
        if term.options.get("beta", 1) != 1 or term.options.get("alpha", 1) != 1 or not isinstance(weight, Node):
            return None
        values = value_of(x), value_of(weight)
        if not all(isinstance(value, torch.Tensor) for value in values) or values[1].dim() != 2 or values[0].dim() < 2:
            return None
        return self._by_weight("linear", x, weight, bias)

    def _grouped_product(self, term: Term, inputs: tuple[Any, ...]) -> Term | None:
        """x_g weight_g^T for the rows x_g of each group, which end at `offs`, or None."""
        x, weight, offs, bias = inputs
        if bias is not None or term.options["out_dtype"] not in (None, value_of(x).dtype):
            return None
        return self._by_weight("grouped", x, weight, offs)

    def _by_weight(self, kind: str, x: Node, weight: Any, other: Any) -> Term:
        """The term of x times `weight`: by the tensor of which `weight` is the transpose, or with the option "transposed"."""
        turned = self.of(weight)
        if turned is not None and turned.kind == "transpose":
            return Term(kind, (x, turned.inputs[0], other))
        return Term(kind, (x, weight, other), {"transposed": True})

    def _rows_again(self, node: Node, given: Any) -> Term | None:
        """The product of x with all its dimensions, for a product of flattened rows whose result gets the dimensions back; else None."""
        term = self.of(given)
        if term is None or term.kind != "linear" or len(given.users) != 1:
            return None
        flat = term.inputs[0]
        laid = _term(flat) if isinstance(flat, Node) else None
        if laid is None or laid.kind != "view":
            return None
        x = self.same(laid.inputs[0])
        shape = tuple(value_of(x).shape)
        if statically_known_true(shape[-1] == value_of(flat).shape[-1]) and has_shape(value_of(node), (*shape[:-1], value_of(given).shape[-1])):
            return Term("linear", (x, *term.inputs[1:]), term.options, (given, flat))
        return None

    def _repeated(self, node: Node, given: Any) -> Term | None:
        """Heads [batch, heads, sequence, features] of which each is repeated, by `expand` in a new dimension that is then flattened; else None."""
        copies = self.of(given)
        alone = self.of(copies.inputs[0]) if copies is not None and copies.kind == "expand" else None
        if alone is None or alone.kind != "unsqueeze" or alone.options["dim"] != 2:
            return None
        base, made, shape = alone.inputs[0], value_of(node), value_of(given).shape
        if len(shape) != 5 or not has_shape(value_of(base), (*shape[:2], *shape[3:])) or not has_shape(made, (shape[0], shape[1] * shape[2], *shape[3:])):
            return None
        return Term("repeated", (base,), {"times": shape[2]}, (given, copies.inputs[0]))


def _laid_out(node: Node, given: Any) -> Term | None:
    """The term of a view: flattened rows, features split into heads, heads joined to features, or equal values in new memory; else None."""
    shape, made = tuple(value_of(given).shape), value_of(node)
    if made.dim() == 2 and len(shape) > 1 and statically_known_true(shape[-1] == made.shape[-1]):
        return Term("flat", (given,))
    if has_shape(made, shape):
        return Term("laid", (given,))
    if made.dim() == len(shape) + 1 > 2 and has_shape(made, (*shape[:-1], *made.shape[-2:])) and statically_known_true(made.shape[-2] * made.shape[-1] == shape[-1]):
        return Term("heads", (given,), {"head_dim": made.shape[-1]})
    if made.dim() == len(shape) - 1 == 3 and has_shape(made, (*shape[:-2], shape[-2] * shape[-1])):
        return Term("features", (given,))
    return None


def _turns_matrices(value: Any, first: int, second: int) -> bool:
    """Whether a transpose swaps the last two dimensions of a matrix or of a batch of matrices."""
    dims = value.dim() if isinstance(value, torch.Tensor) else 0
    return dims in (2, 3) and {first % dims, second % dims} == {dims - 2, dims - 1}


def _with_gradient(graph: GraphModule) -> set[Node]:
    """The output node of a graph, and all nodes through which gradients of its results may flow."""
    output = graph.graph.output_node()
    return {*computed_of([output], lambda node: (each for each in node.all_input_nodes if getattr(value_of(each), "requires_grad", True)))}


def _term(node: Node) -> Term | None:
    """The term of a node before reduction, with its arguments unchanged; None if no spelling matches."""
    if node.target is operator.getitem:
        return _piece(node)
    if node.target is getattr and node.args[1] in ("T", "mT"):
        return Term("transpose", node.args[:1], {"first": -2, "second": -1} if node.args[1] == "mT" else {"first": 0, "second": 1})
    called = getattr(node.target, "overloadpacket", node.target)
    target = getattr(called, "_qualified_op_name", called)
    if node.op not in ("call_function", "call_method") or target not in _KINDS:
        return None
    kind, parameters = _KINDS[target]
    if kind in ("cast", "view", "expand"):  # the example value shows dtype and shape of the result
        operand = node.args[0] if node.args else node.kwargs.get("input")
        return Term(kind, (operand,)) if isinstance(operand, Node) else None
    if len(node.args) > len(parameters):
        return None
    renamed = _RENAMED | {"input": parameters[0][0]} | ({"weight": "class_weight"} if kind == "cross_entropy" else {})
    given = dict(zip((name for name, _ in parameters), node.args, strict=False)) | {renamed.get(name, name): arg for name, arg in node.kwargs.items()}
    values = {name: given.pop(name, default) for name, default in parameters}
    if given or ... in values.values():
        return None
    operands = [value for name, value in values.items() if name in _OPERANDS]
    return Term(kind, tuple(operands), {name: number_of(value) for name, value in values.items() if name not in _OPERANDS})


def number_of(value: Any) -> Any:
    """The number of a float symbol, such as an eps under dynamic shapes, by which Dynamo then guards the code; any other value itself."""
    symbol = value_of(value)
    return float(symbol) if isinstance(symbol, torch.SymFloat) else value


def _piece(node: Node) -> Term | None:
    """Columns begin to end of the last dimension, from `chunk`, `split` or a slice, or an indexing that is a view or an `unsqueeze`; else None."""
    source, at = node.args
    if not isinstance(source, Node):
        return None
    made = value_of(node)
    if isinstance(at, tuple) and all(isinstance(each, slice) and each.step in (None, 1) for each in at):
        is_whole = isinstance(made, torch.Tensor) and has_shape(made, tuple(value_of(source).shape))
        return Term("view", (source,)) if is_whole else None
    if isinstance(at, tuple) and at.count(None) == 1 and all(each == slice(None) for each in at if each is not None):
        return Term("unsqueeze", (source,), {"dim": at.index(None)})
    if isinstance(at, tuple) and at and at[0] is Ellipsis and len(at) == 2 and isinstance(at[1], slice):
        whole, last = source, at[1]
        if last.step not in (None, 1):
            return None
        begin = last.start or 0
    else:
        term = _term(source)
        if term is None or term.kind not in ("chunk", "split") or not isinstance(at, int):
            return None
        whole = term.inputs[0]
        if term.options["dim"] not in (-1, value_of(whole).dim() - 1):
            return None
        begin = sum(value.shape[-1] for value in value_of(source)[:at])
    if not isinstance(made, torch.Tensor) or not all(isinstance(size, int) and size >= 0 for size in (begin, made.shape[-1])):
        return None
    return Term("piece", (whole,), {"begin": begin, "end": begin + made.shape[-1]})


def tensors_of_model(node: Node | None, terms: Terms) -> list[Node]:
    """The parameters of the model from which a node is computed, in order; without parameters its buffers."""
    read = computed_of([] if node is None else [node])
    held = sorted((each for each in read if not each.all_input_nodes), key=terms.order.__getitem__)
    parameters = [each for each in held if isinstance(value_of(each), torch.nn.Parameter)]
    return parameters or [each for each in held if is_of_model(each)]


def is_of_model(node: Node) -> bool:
    """Whether a node is a parameter or a buffer of the model."""
    return isinstance(value_of(node), torch.nn.Parameter) or "_dynamo_static_input_type" in (node.meta.get("tensor_dict") or ())


def users(node: Node, terms: Terms) -> Iterator[Node]:
    """The nodes that read a node, directly or through nodes that return it unchanged."""
    for user in node.users:
        if terms.same(user) is terms.same(node):
            yield from users(user, terms)
        else:
            yield user
