"""The context by which an op's forward passes tensors to its backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import Self


@dataclass
class OperationContext:
    """The context of one basic op in one call. Ops may set further attributes on it.

    Args:
        saved_tensors: in backward, a tuple of what forward saved: tensors, and None where forward saved None. Before backward it is None.
        to_save: what forward has saved so far.
        requires_grad: whether a backward may follow; otherwise forward need not save anything.
    """

    saved_tensors: Any = None
    to_save: tuple[torch.Tensor | None, ...] | None = None
    requires_grad: bool = True
    saved_names: tuple[str, ...] = field(default=(), init=False)  # names of the saved tensors, empty if they were saved without names

    if TYPE_CHECKING:  # ops set any attribute

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def save_for_backward(self, *tensors: torch.Tensor | None, **named: torch.Tensor | None) -> None:
        """Saves tensors for backward, which reads them as `saved_tensors`, or by name from `saved_tensor(name)`. Each call replaces the last one.

        Args:
            tensors: tensors that backward reads by position. Raises TypeError together with `named`.
            named: tensors that backward reads by name. The documentation of fusions lists the names that ops of the library read.
        """
        if tensors and named:
            raise TypeError(f"save_for_backward: expected all tensors with names or all without, got both ({', '.join(named)}). Name all of them.")
        self.to_save, self.saved_names = tensors or tuple(named.values()), tuple(named)

    def saved_tensor(self, name: str) -> Any:
        """The tensor that forward saved under `name`. Contexts of ops of the library have a name for each tensor. Raises ValueError for other names."""
        if name not in self.saved_names:
            raise ValueError(f"saved_tensor: expected one of {[*self.saved_names]}, got {name!r}. Save it by that name.")
        return self.saved_tensors[self.saved_names.index(name)]

    @classmethod
    def of(cls, names: Sequence[str], tensors: Sequence[torch.Tensor | None]) -> Self:
        """The context of a backward, with tensors that the library has kept, and their names."""
        context = cls(saved_tensors=tuple(tensors))
        context.saved_names = tuple(names)
        return context
