"""Compares a pipeline with the part of the graph that it replaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from tandem.backend.normalise import computed_of

# Allowed difference relative to the largest element: a pipeline rounds once per step, the graph once per operation.
_TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_NOISE = 16  # allowed difference in units of rounding of the largest gradient
_ADVICE = "Exclude its module, and report the model."
_DROPOUTS = (torch.nn.functional.dropout, torch.dropout)


class Reference:
    """The nodes of a graph that compute `outs` from `operands` and from other nodes `beside`, such as sizes that are symbols."""

    def __init__(self, name: str, operands: Sequence[Node], outs: Sequence[Node], depends: Callable[[Node], bool]) -> None:
        """`depends`: whether a node is an operand or a node of the chain, or is computed from one."""
        self.name = name
        self.kept: dict[int, int] = {}  # bytes of each storage that the graph kept for backward, by address
        needed = {*computed_of(outs, lambda node: _reads(node) if depends(node) and node not in operands else ())}
        between = [node for node in outs[0].graph.nodes if node in needed and node not in operands]
        self.beside = [node for node in between if not depends(node)]
        graph, copies = Graph(), {}
        for at, operand in enumerate((*operands, *self.beside)):  # a node may be several operands
            copies[operand] = graph.placeholder(f"operand_{at}")
        for node in between:
            if node.target in _DROPOUTS:
                copies[node] = graph.call_function(torch.nn.functional.dropout, tuple(copies[each] for each in _reads(node)), {"p": 0.0})
            elif node not in copies:
                copies[node] = graph.node_copy(node, lambda each: copies[each])
        graph.output(tuple(copies[out] for out in outs))
        self.graph = GraphModule(torch.nn.Module(), graph)

    def compare(self, call: Callable[..., Any], given: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], beside: Sequence[Any]) -> None:
        """Raises AssertionError if a result or a gradient of a pipeline differs by more than the rounding of its dtype. `call` runs the pipeline on
        operands like `given`, which are those without the weights; `beside` are the values of the nodes `self.beside`."""
        # Contexts of the caller, such as a checkpoint that counts saved tensors, must not see this run, nor may it change their random numbers.
        with torch.random.fork_rng(devices=[]), _disable_current_modes(), torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            copies = {id(tensor): tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in given}
            copies |= {id(tensor): tensor for tensor in weights if id(tensor) in copies}  # a weight that is an operand too has one gradient
            operands = [copies[id(tensor)] for tensor in given]
            self.tolerance = max(_TOLERANCES.get(_rounds_to(tensor), 0.0) for tensor in (*operands, *weights))
            has_gradients = torch.is_grad_enabled() and any(operand.requires_grad for operand in (*operands, *weights))
            results = call(*operands)
            results = results if isinstance(results, tuple) else (results,)
            own = (*[operand.clone() for operand in operands], *weights)  # clones are no leaves, so the graph may write to them
            with torch.autograd.graph.saved_tensors_hooks(partial(self._keep, {id(tensor) for tensor in own}), lambda tensor: tensor):
                expected = self.graph(*own, *beside)
            for at, (result, wanted) in enumerate(zip(results, expected, strict=True)):
                self._check(f"result {at}", result, wanted)
            if not has_gradients:
                return
            names = {f"operand {at}": tensor for at, tensor in enumerate(operands)} | {f"parameter {at}": tensor for at, tensor in enumerate(weights)}
            wanting = {name: tensor for name, tensor in names.items() if tensor.requires_grad}
            seeds = [torch.randn_like(result) for result in results]
            gradients = _grads(expected, seeds, wanting)
            # Gradients that are exactly zero but for rounding, such as that of a key's bias, are compared relative to the largest gradient.
            noise = max((_NOISE * torch.finfo(_rounds_to(each)).eps * _largest(each) for each in gradients if each is not None), default=0.0)
            for name, result, wanted in zip(wanting, _grads(results, seeds, wanting), gradients, strict=True):
                if wanted is not None or result is not None:
                    self._check(f"the gradient of {name}", result, wanted, noise)

    def _keep(self, given: set[int], tensor: torch.Tensor) -> torch.Tensor:
        """Notes a tensor that the graph keeps for backward, unless it is an operand."""
        base = tensor if tensor._base is None else tensor._base
        if id(base) not in given:
            self.kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def _check(self, what: str, result: torch.Tensor | None, wanted: torch.Tensor | None, noise: float = 0.0) -> None:
        if result is None or wanted is None or result.shape != wanted.shape or result.dtype != wanted.dtype:
            raise AssertionError(f"{self.name}: expected {what} as the graph computes it, {_kind(wanted)}, got {_kind(result)}. {_ADVICE}")
        difference = (result.detach().double() - wanted.detach().double()).abs().nan_to_num(0.0)
        largest = _largest(wanted)
        tolerance = max(self.tolerance, _TOLERANCES[_rounds_to(wanted)])  # the graph may cast a rounded value to a wider dtype
        if not torch.equal(result.isnan(), wanted.isnan()) or (wanted.numel() and difference.max().item() > max(tolerance * max(largest, 1e-6), noise)):
            raise AssertionError(
                f"{self.name}: expected {what} within {tolerance:g} of its largest element, {largest:.4g}, of what the graph computes, "
                f"got a difference of {difference.max().item():.4g}. {_ADVICE}"
            )


def _largest(tensor: torch.Tensor) -> float:
    return tensor.detach().double().abs().nan_to_num(0.0).max().item() if tensor.numel() else 0.0


def _kind(tensor: torch.Tensor | None) -> str:
    return "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def _rounds_to(tensor: torch.Tensor) -> torch.dtype:
    return torch.get_autocast_dtype(tensor.device.type) if torch.is_autocast_enabled(tensor.device.type) else tensor.dtype


def _grads(results: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor], wanting: Mapping[str, torch.Tensor]) -> Sequence[torch.Tensor | None]:
    pairs = [(result, seed) for result, seed in zip(results, seeds, strict=True) if result.requires_grad]
    if not pairs:
        return [None] * len(wanting)
    return torch.autograd.grad([result for result, _ in pairs], [*wanting.values()], [seed for _, seed in pairs], allow_unused=True)


def _reads(node: Node) -> list[Node]:
    """The nodes from which a node is computed; for a dropout, which drops nothing here, its x alone."""
    return [next(iter(node.args), node.kwargs.get("input"))] if node.target in _DROPOUTS else node.all_input_nodes
