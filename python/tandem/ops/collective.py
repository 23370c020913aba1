"""Collectives over a process group as ops, along the first dimension. A plan starts each as early, and waits for it as late, as it can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed

from tandem.arguments import flag, positive
from tandem.op_base.changes import Changes
from tandem.ops.op import BasicOperation


class _Collective(BasicOperation):
    """A collective over `process_group`; None: the group of all processes."""

    _watched_names = ("process_group",)
    _option_names = ()  # the options of the library follow from the group

    def __init__(self, process_group: Any = None) -> None:
        """Makes a collective.

        Args:
            process_group: the group whose ranks take part; None: all processes.
        """
        super().__init__()
        self.process_group: Any = process_group

    @property
    def process_group_size(self) -> int:
        """The number of ranks that take part."""
        size: int = self.process_group.size()
        return size

    def _checked_option(self, name: str, value: Any) -> Any:
        return checked_group(type(self).__name__, value) if name == "process_group" else super()._checked_option(name, value)

    def _options(self) -> dict[str, Any]:
        import torch.distributed._functional_collectives  # noqa: F401  registers meta kernels of collectives, for tracing

        return {"group": self.process_group.group_name, "size": self.process_group_size}

    def __getstate__(self) -> dict[str, Any]:  # a copy, in this or another process, uses the group of that name
        return {**super().__getstate__(), "process_group": self.process_group.group_name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "process_group": group_named(state["process_group"])})

    def extra_repr(self) -> str:
        return f"group={self.process_group.group_name}, size={self.process_group_size}"


class AllGather(_Collective):
    """y = the rows of all ranks, [rows, ...] -> [size * rows, ...]. grad_x is this rank's rows of the sum over ranks of grad_y."""


class ReduceScatter(_Collective):
    """y = this rank's rows of the sum over ranks of x, [rows, ...] -> [rows / size, ...]. grad_x is the rows of grad_y of all ranks."""


class AllReduce(_Collective):
    """y = the sum over ranks of x, [...] -> [...]. grad_x is grad_y, which is equal on all ranks."""

    def __init__(self, process_group: Any = None, reduce_in_backward: bool = True) -> None:
        """Makes a sum over ranks.

        Args:
            process_group: the group whose ranks take part; None: all processes.
            reduce_in_backward: accepted for TransformerEngine, without effect, as in TransformerEngine.
        """
        super().__init__(process_group)


class ReduceGradient(_Collective):
    """y = x, which is equal on all ranks. grad_x is the sum over ranks of grad_y."""


def checked_group(op: str, group: Any) -> Any:
    """Returns the process group, or for None that of all processes. Raises RuntimeError before torch.distributed is initialized."""
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
    """The process group with this name."""
    return torch.distributed.distributed_c10d._resolve_process_group(name)


def collectives(op: str, mode: str | None, group: Any, sequence_parallel: bool) -> tuple[list[BasicOperation], list[BasicOperation], int]:
    """The collectives before the product, those after it, and the number of ranks that share the weight. Raises ValueError for an unknown mode."""
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
    """The name of `group`, which may replace a group of `size` ranks; None if no ranks share the weight and `group` is None."""
    if group is None and size == 1:
        return None
    group = checked_group(op, group)
    if group.size() != size:
        raise ValueError(f"{op}: expected a tensor_parallel_group of {size} ranks, as it was built for, got one of {group.size()}. Build another one.")
    name: str = group.group_name
    return name


def share(op: str, name: str, features: int, size: int) -> int:
    """The features of each of `size` ranks. Raises ValueError if `size` does not divide `features`."""
    if features % size:
        raise ValueError(f"{op}: expected {name} that {size} ranks share evenly, got {features}. Use a multiple of {size}.")
    return features // size


def sizes_of_rank(op: str, mode: str | None, in_features: int, out_features: int, ranks: int) -> tuple[int, int]:
    """The number of columns and of rows that a rank has of a weight [out_features, in_features]."""
    columns, rows = positive(op, "in_features", in_features), positive(op, "out_features", out_features)
    if mode == "column":
        rows = share(op, "out_features", rows, ranks)
    elif mode == "row":
        columns = share(op, "in_features", columns, ranks)
    return columns, rows


class SharedByRanks:
    """An op or module with collectives among its `flat_ops`, because the ranks of a group share its parameters."""

    tensor_parallel_mode: Any
    tensor_parallel_size: Any
    _sequence_parallel: bool

    def _collectives(self: Any) -> list[_Collective]:
        return [part for part in self.flat_ops() if isinstance(part, _Collective)]

    @property
    def tensor_parallel_group(self) -> Any:
        """The group whose ranks share the weight; None if one rank has all of it. Another group of equal size may be assigned."""
        return next((part.process_group for part in self._collectives()), None)

    @tensor_parallel_group.setter
    def tensor_parallel_group(self: Any, group: Any) -> None:
        _replacement(self._get_name(), group, self.tensor_parallel_size)
        for part in self._collectives():
            part.process_group = group

    @property
    def sequence_parallel(self) -> bool:
        """Whether the ranks share the first dimension of x or y outside of the product. False if one rank has the whole weight."""
        return self._sequence_parallel

    @sequence_parallel.setter
    def sequence_parallel(self: Any, value: bool) -> None:
        op = self._get_name()
        self._sequence_parallel = flag(op, "sequence_parallel", value) and self.tensor_parallel_size > 1
        before, after, _ = collectives(op, self.tensor_parallel_mode, self.tensor_parallel_group, self._sequence_parallel)
        self._put_around(before, after)
        self._tell()


class CollectivesMixin(SharedByRanks):
    """An op with collectives before and after it."""

    def _put_around(self, before: Sequence[BasicOperation], after: Sequence[BasicOperation]) -> None:
        self.__dict__["_around"] = (tuple(before), tuple(after))  # not submodules, as they have no state

    def flat_ops(self) -> Sequence[BasicOperation]:
        before, after = self.__dict__.get("_around", ((), ()))
        return (*before, self, *after)

    def _capture(self, changes: Changes) -> None:
        super()._capture(changes)  # type: ignore[misc]  # of BasicOperation
        for part in self._collectives():
            part._capture(changes)
