"""Collectives over a process group as operations, along the first dimension: each is started as early and waited for as late as it can be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed

from tandem.ops.changes import Changes
from tandem.ops.op import BasicOperation


class _Collective(BasicOperation):
    """A collective over `process_group`; None: that of all processes."""

    _watched_names = ("process_group",)

    def __init__(self, process_group: Any = None) -> None:
        """Makes a collective.

        Args:
            process_group: who takes part; None: all processes.
        """
        super().__init__()
        self.process_group: Any = process_group

    @property
    def process_group_size(self) -> int:
        """How many take part."""
        size: int = self.process_group.size()
        return size

    def _checked_option(self, name: str, value: Any) -> Any:
        return checked_group(type(self).__name__, value) if name == "process_group" else super()._checked_option(name, value)

    def _options(self) -> dict[str, Any]:
        import torch.distributed._functional_collectives  # noqa: F401  shapes of what is started, for tracing

        return {"group": self.process_group.group_name, "size": self.process_group_size}

    def __getstate__(self) -> dict[str, Any]:  # a copy, in this process or another, takes part in the group of the same name
        return {**super().__getstate__(), "process_group": self.process_group.group_name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "process_group": group_named(state["process_group"])})

    def extra_repr(self) -> str:
        return f"group={self.process_group.group_name}, size={self.process_group_size}"


class AllGather(_Collective):
    """y = the rows of all ranks, [rows, ...] -> [size * rows, ...]; the gradient is the rank's rows of the sum of gradients."""

    _kind = "all_gather"


class ReduceScatter(_Collective):
    """y = the rank's rows of the sum over ranks, [rows, ...] -> [rows / size, ...]; the gradient is those of all ranks."""

    _kind = "reduce_scatter"


class AllReduce(_Collective):
    """y = the sum over ranks; the gradient is that of y, which all ranks hold."""

    _kind = "all_reduce"

    def __init__(self, process_group: Any = None, reduce_in_backward: bool = True) -> None:
        """Makes a sum over ranks.

        Args:
            process_group: who takes part; None: all processes.
            reduce_in_backward: accepted as by TransformerEngine, which does not use it either.
        """
        super().__init__(process_group)


class ReduceGradient(_Collective):
    """y is x, which all ranks hold; the gradient is the sum over ranks."""

    _kind = "reduce_gradient"


def checked_group(op: str, group: Any) -> Any:
    """The process group, that of all processes where it is None."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        raise RuntimeError(
            f"{op}: expected processes that know each other, got none. Call torch.distributed.init_process_group first."
        )
    if group is None:
        return torch.distributed.group.WORLD
    if not hasattr(group, "group_name"):
        raise TypeError(f"{op}: expected a torch.distributed process group, got {type(group).__name__}. Pass what new_group returned.")
    return group


def group_named(name: str) -> Any:
    """The process group of this name."""
    return torch.distributed.distributed_c10d._resolve_process_group(name)


def collectives(op: str, mode: str | None, group: Any, sequence_parallel: bool) -> tuple[list[BasicOperation], list[BasicOperation], int]:
    """What stands before and behind the product, and how many ranks share it."""
    if mode is None:
        return [], [], 1
    if mode not in ("column", "row"):
        raise ValueError(f'{op}: expected tensor_parallel_mode None, "column" or "row", got {mode!r}. Name how ranks share the weight.')
    group = checked_group(op, group)
    if group.size() == 1:
        return [], [], 1
    if mode == "column":
        return [AllGather(group) if sequence_parallel else ReduceGradient(group)], [], group.size()
    return [], [ReduceScatter(group) if sequence_parallel else AllReduce(group)], group.size()


def _replacement(op: str, group: Any, size: int) -> str | None:
    """The name of a group that takes the place of one of `size` ranks; None for no group in the place of none."""
    if group is None and size == 1:
        return None
    group = checked_group(op, group)
    if group.size() != size:
        raise ValueError(f"{op}: expected a tensor_parallel_group of {size} ranks, as it was built for, got one of {group.size()}. Build another one.")
    name: str = group.group_name
    return name


def share(op: str, name: str, features: int, size: int) -> int:
    """The features of one rank of `size`."""
    if features % size:
        raise ValueError(f"{op}: expected {name} that {size} ranks share evenly, got {features}. Use a multiple of {size}.")
    return features // size


class CollectivesMixin:
    """An op whose parameters the ranks of a group share, with the collectives before and behind it."""

    tensor_parallel_size: int

    @property
    def tensor_parallel_group(self) -> Any:
        """The ranks that share the weight; None where none do. Another group of as many may be assigned."""
        return next((part.process_group for part in self._collectives()), None)

    @tensor_parallel_group.setter
    def tensor_parallel_group(self, group: Any) -> None:
        _replacement(type(self).__name__, group, self.tensor_parallel_size)
        for part in self._collectives():
            part.process_group = group

    def _put_around(self, before: Sequence[BasicOperation], after: Sequence[BasicOperation]) -> None:
        self.__dict__["_around"] = (tuple(before), tuple(after))  # no children: they have no state

    def _collectives(self) -> list[_Collective]:
        return [part for parts in self.__dict__.get("_around", ()) for part in parts]

    def flat_ops(self) -> Sequence[BasicOperation]:
        before, after = self.__dict__.get("_around", ((), ()))
        return (*before, self, *after)

    def _capture(self, changes: Changes) -> None:
        super()._capture(changes)  # type: ignore[misc]  # of BasicOperation
        for part in self._collectives():
            part._capture(changes)
