"""Tensors of the caller that steps of a pipeline write: what a call gives of them, besides the main_grad of parameters."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch

from tandem.compilers.tracing import constant_while_traced
from tandem.ops import main_grad


class Modes(NamedTuple):
    """What is written of the caller's in a call."""

    main_grads: tuple[main_grad.Mode, ...] = ()  # by place of a parameter whose gradient goes into its main_grad
    delayed: tuple[int, ...] = ()  # ops that leave gradients of weights to be computed later
    given: tuple[tuple[int, tuple[str, ...]], ...] = ()  # ops that write tensors that come with the call, and the options that say so
    is_first: bool = False  # whether gradients that are computed later take the place of what main_grad holds


class Entry(list[torch.Tensor]):
    """What gradients of an op's weights are computed from: grad_y, x and what else a step leaves, last a text."""

    is_first = False  # of the first micro-batch


class Delayed:
    """What gradients of weights that are computed later are computed from: entries of grad_y, x and what else a step leaves, last a text."""

    graphs: ClassVar[set[str]] = set()  # descriptions of compiled pipelines: equal ones share the code, and are not traced again

    def __init__(self, delay_wgrad_compute: bool = False, tensors: int = 4) -> None:
        """Makes a store without entries.

        Args:
            delay_wgrad_compute: whether its op delays gradients.
            tensors: how many an entry has.
        """
        self.enabled, self.tensors = delay_wgrad_compute, tensors
        self.context: deque[Entry] = deque()
        self.pipelines: weakref.WeakSet[Any] = weakref.WeakSet()  # `Prepared`s that its op is in
        self.has_graphs = False  # of calls through torch's dispatcher, compiled ones aside
        self._making = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {"enabled": self.enabled, "tensors": self.tensors}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["enabled"], state["tensors"])  # type: ignore[misc]

    def delay_wgrad_compute(self) -> bool:
        """Whether the op delays gradients."""
        return self.enabled

    def pop(self) -> Entry:
        """Takes out the oldest entry. RuntimeError where there is none."""
        while self.context:
            entry = self.context.popleft()
            if entry[-1].numel():  # else backward failed before it wrote the entry
                return entry
        raise RuntimeError("backward_dw: expected a backward before it whose gradients of weights are delayed, got none. Call backward() first.")

    def may_be_computed(self) -> bool:
        """Whether a backward may have computed the gradients itself: that of a call through torch's dispatcher, or of compiled code of a pipeline
        that is described as one of its op's is."""
        return self.has_graphs or any([pipeline.described in Delayed.graphs for pipeline in [*self.pipelines]])

    def makers(self, is_first: bool = False) -> list[Any]:
        """What returns the tensors of an entry, one after the other, when backward is about to fill them."""
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
    """To be called where a pipeline of this description is traced: backward computes what it would leave to be computed later."""
    if described is not None:
        Delayed.graphs.add(described)


def check_takes(op: Any, names: Iterable[str]) -> None:
    """Raises TypeError, as Python does, where an op of the library is given arguments that no call of it has."""
    unknown = [name for name in names if name not in op._call_buffers] if not op.is_python_op else []
    if unknown:
        known = f"{' or '.join(op._call_buffers)} as arguments" if op._call_buffers else "no arguments"
        raise TypeError(f"{op._get_name()}: expected {known} of a call, got an unexpected keyword argument {unknown[0]!r}. Leave it out.")


def given(ops: Sequence[Any], kwargs: Mapping[int, Mapping[str, Any]]) -> tuple[dict[int, Mapping[str, Any]], Modes, list[torch.Tensor]]:
    """The arguments of a call: those of ops that are written in Python, and the tensors that ops of the library are to write."""
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
