"""Fused ops that own the parameters of the basic ops that they stand for, each under a name of the owner's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from typing_extensions import Self

from tandem.ops.changes import Changes, add_watcher
from tandem.ops.op import BasicOperation, FusedOperation


class Shared(MutableMapping[str, Any]):
    """The `_parameters` of a part: those of its owner, under the names that the part has for them. Nothing is held here, so that what replaces a
    parameter of the owner, in whatever way, is what the part has."""

    def __init__(self, held: dict[str, Any], names: Mapping[str, str]) -> None:
        self.held = held  # the owner's, the very dictionary
        self.names = dict(names)  # the owner's name by the part's

    def __getitem__(self, name: str) -> Any:
        return self.held[self.names[name]]

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self.names:
            raise KeyError(f"expected one of the parameters {[*self.names]} that the part shares with its owner, got {name}. Set it on the owner.")
        self.held[self.names[name]] = value

    def __delitem__(self, name: str) -> None:
        del self.held[self.names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter([name for name, own in self.names.items() if own in self.held])

    def __len__(self) -> int:
        return len([*self])


class CompositeOperation(FusedOperation):
    """Stands for basic ops that it made itself. The parameters are its own, in state dicts too; the parts are views of it that own nothing."""

    def _own(self, parts: Sequence[tuple[BasicOperation, Mapping[str, str]]]) -> None:
        """Takes the parts, each with the owner's names of its parameters."""
        for part, names in parts:
            part.__dict__["_parameters"] = Shared(self._parameters, names)
            part.__dict__["_owner"] = self
        self.__dict__["basic_ops"] = tuple([part for part, _ in parts])

    def _lack(self, name: str, built_with: str, instead: str) -> None:
        """Registers that there is no parameter of this name, and with which arguments there would be none and one."""
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
        return self.basic_ops  # type: ignore[return-value]

    def _capture(self, changes: Changes) -> None:
        add_watcher(self, changes)
        for part in self.basic_ops:  # which stay those that they are
            part._capture(changes)


__all__ = ["CompositeOperation", "Shared"]
