"""Composite ops, which own the parameters of their basic ops. The owner may have other names for these parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NoReturn

import torch
from typing_extensions import Self

from tandem.op_base.changes import Changes, add_watcher
from tandem.op_base.deferred import DeferredMixin
from tandem.op_base.directions import PartsMixin
from tandem.ops.op import BasicOperation, FusedOperation
from tandem.regions.model_init import forget_init


class Shared(MutableMapping[str, Any]):
    """The `_parameters` of a part. Each name leads to a parameter of the owner, so that a part always reads what the owner holds now, however
    it was replaced. Iteration lists no names, so that code which visits all modules meets each parameter once, at the owner."""

    def __init__(self, held: dict[str, Any], names: Mapping[str, str]) -> None:
        self.held = held  # the owner's `_parameters` itself, not a copy
        self.names = dict(names)  # the part's name -> the owner's name

    def __getitem__(self, name: str) -> Any:
        return self.held[self.names[name]]

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self.names:
            raise KeyError(f"expected one of the parameters {[*self.names]} that the part shares with its owner, got {name}. Set it on the owner.")
        self.held[self.names[name]] = value

    def __delitem__(self, name: str) -> None:
        raise KeyError(f"expected parameters of its owner to stay, got del of {name} on a part. Parametrize, prune or delete it on the owner.")

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


class Parts(torch.nn.ModuleList):
    """The `basic_ops` of a composite. The list cannot be changed, because the parts are views of their owner."""

    def __init__(self, parts: Sequence[BasicOperation]) -> None:
        super().__init__()
        self._modules.update({str(index): part for index, part in enumerate(parts)})

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError("basic_ops: expected the parts that the module made, got a change of their list. Build ops.FusedOperation of other ops.")

    __setitem__ = __delitem__ = __iadd__ = append = extend = insert = pop = _refuse  # type: ignore[assignment]


class CompositeOperation(PartsMixin, DeferredMixin, FusedOperation):
    """An op that consists of basic ops that it has created. It owns the parameters, also in state dicts; its parts are views and own nothing.

    `apply` and `train` reach the parts. `modules()` does not, and neither does code that moves, saves, shards or replaces tensors.
    """

    def _own(self, parts: Sequence[tuple[BasicOperation, Mapping[str, str]]]) -> None:
        """Stores the parts. Each comes with a dict from its own names of parameters to the owner's."""
        for part, names in parts:
            part.__dict__["_parameters"] = Shared(self._parameters, names)
            part.__dict__["_owner"] = self
            forget_init(part)
        self.__dict__["basic_ops"] = Parts([part for part, _ in parts])  # not a submodule: the class docstring says why

    def apply(self, fn: Callable[[torch.nn.Module], None]) -> Self:
        """Calls `fn` with each part, each submodule and this module."""
        for part in self.basic_ops:
            part.apply(fn)
        return super().apply(fn)

    def train(self, mode: bool = True) -> Self:
        """Sets the training flag of this module and of its parts."""
        self.basic_ops.train(mode)
        return super().train(mode)

    def _lack(self, name: str, built_with: str, instead: str) -> None:
        """Registers that the module has no parameter `name`, with the arguments that omit it and that would create it."""
        self.register_parameter(name, None)
        self.__dict__["_lacking"] = {**self.__dict__.get("_lacking", {}), name: (built_with, instead)}

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        lacking = self.__dict__.get("_lacking", {})
        if name in lacking and param is not None:
            built_with, instead = lacking[name]
            raise ValueError(
                f"{self._get_name()}: expected no {name}, as it was built with {built_with}, got a parameter. Build it with {instead}."
            )
        super().register_parameter(name, param)

    def _replicate_for_data_parallel(self) -> Self:
        replica: Self = super()._replicate_for_data_parallel()  # type: ignore[assignment]
        replica._own([(part._replicate_for_data_parallel(), part._parameters.names) for part in self.basic_ops])
        return replica

    def _quantize_slots(self) -> tuple[int, int]:
        slots = [part._quantize_slots() for part in self.basic_ops]
        return sum(forward for forward, _ in slots), sum(backward for _, backward in slots)

    def flat_ops(self) -> Sequence[BasicOperation]:
        return tuple(self.basic_ops)  # type: ignore[arg-type]

    def _capture(self, changes: Changes) -> None:
        add_watcher(self, changes)
        for part in self.basic_ops:  # the list needs no observer, because it never changes
            part._capture(changes)
