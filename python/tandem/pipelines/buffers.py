"""Tensors of the caller that steps of a pipeline write, besides the `main_grad` of parameters."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch

from tandem.op_base import main_grad
from tandem.tracing import constant_while_traced


class Modes(NamedTuple):
    """The tensors of the caller that one call of a pipeline writes."""

    main_grads: tuple[tuple[int, main_grad.Mode], ...] = ()  # positions of the parameters whose gradient goes into their main_grad, each with its mode
    delayed: tuple[int, ...] = ()  # indices of ops that leave gradients of weights to be computed later
    given: tuple[tuple[int, tuple[str, ...]], ...] = ()  # indices of ops that write arguments of the call, with the options that declare it
    is_first: bool = False  # whether gradients that are computed later overwrite main_grad


class Entry(list[torch.Tensor]):
    """The operands from which one delayed gradient of an op's weights is computed: grad_y, x, further tensors of the step, and a text in the last."""

    is_first = False  # whether backward belongs to the first micro-batch


class Delayed:
    """The entries from which an op computes delayed gradients of its weights, oldest first."""

    graphs: ClassVar[set[str]] = set()  # descriptions of traced pipelines; equal descriptions share compiled code, and are traced only once

    def __init__(self, delay_wgrad_compute: bool = False, tensors: int = 4) -> None:
        """Makes a store without entries.

        Args:
            delay_wgrad_compute: whether the op delays gradients.
            tensors: number of tensors of an entry.
        """
        self.enabled, self.tensors = delay_wgrad_compute, tensors
        self.context: deque[Entry] = deque()
        self.pipelines: weakref.WeakSet[Any] = weakref.WeakSet()  # each `Prepared` that contains the op
        self.has_graphs = False  # whether a dispatched call in eager code has run the op
        self._making = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {"enabled": self.enabled, "tensors": self.tensors}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["enabled"], state["tensors"])  # type: ignore[misc]

    def delay_wgrad_compute(self) -> bool:
        """Whether the op delays gradients."""
        return self.enabled

    def pop(self) -> Entry:
        """Removes and returns the oldest entry. Raises RuntimeError if there is none."""
        while self.context:
            entry = self.context.popleft()
            if entry[-1].numel():  # the entry is empty if backward failed before it wrote the entry
                return entry
        raise RuntimeError("backward_dw: expected a backward before it whose gradients of weights are delayed, got none. Call backward() first.")

    def may_be_computed(self) -> bool:
        """Whether a backward may have computed the gradients itself: after a dispatched call, or in compiled code of a pipeline with the
        description of one that contains the op."""
        return self.has_graphs or any([pipeline.described in Delayed.graphs for pipeline in [*self.pipelines]])

    def makers(self, is_first: bool = False) -> list[Any]:
        """One function for each tensor of an entry. Backward calls them in order when it is about to fill the entry."""
        return [partial(self._tensor, place, is_first) for place in range(self.tensors)]

    def _tensor(self, place: int, is_first: bool) -> torch.Tensor:
        if place == 0:
            self._making.entry = Entry()
            self._making.entry.is_first = is_first
            self.context.append(self._making.entry)
        made = torch.empty(0, device="cpu")
        self._making.entry.append(made)
        return made


@constant_while_traced
def note_graph(described: str | None) -> None:
    """Records that a pipeline with this description was traced: its backward computes gradients at once instead of delaying them."""
    if described is not None:
        Delayed.graphs.add(described)


def check_takes(op: Any, names: Iterable[str]) -> None:
    """Raises TypeError, as Python does, if an op of the library is passed keyword arguments that its calls do not have."""
    unknown = [name for name in names if name not in op._call_buffers] if not op.is_python_op else []
    if unknown:
        known = f"{' or '.join(op._call_buffers)} as arguments" if op._call_buffers else "no arguments"
        raise TypeError(f"{op._get_name()}: expected {known} of a call, got an unexpected keyword argument {unknown[0]!r}. Leave it out.")


def given(ops: Sequence[Any], kwargs: Mapping[int, Mapping[str, Any]]) -> tuple[dict[int, Mapping[str, Any]], Modes, list[torch.Tensor]]:
    """Splits keyword arguments by op into arguments of ops in Python, and tensors of the caller that ops of the library write."""
    others: dict[int, Mapping[str, Any]] = {}
    modes: list[tuple[int, tuple[str, ...]]] = []
    tensors: list[torch.Tensor] = []
    for index, own in sorted(kwargs.items()):
        op = ops[index]
        if op.is_python_op or not op._call_buffers:
            others[index] = own
            continue
        for name, value in own.items():
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"{op._get_name()}: expected a tensor as {name}, got {type(value).__name__}. Allocate it with torch.empty.")
        written = [(option, own[name]) for name, option in op._call_buffers.items() if name in own]
        if written:
            modes.append((index, tuple([option for option, _ in written])))
            tensors += [tensor for _, tensor in written]
    return others, Modes(given=tuple(modes)), tensors
