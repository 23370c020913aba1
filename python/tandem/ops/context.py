"""What an op's forward leaves to its backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import Self


@dataclass
class OperationContext:
    """One per basic op and call. Besides the fields here an op may hang whatever it needs on it.

    Args:
        saved_tensors: what forward saved, a tuple in backward, None before. Each is a tensor, or None where None was saved: only the op knows which.
        to_save: what forward has saved so far.
        requires_grad: whether a backward may follow; if not, nothing needs to be saved.
    """

    saved_tensors: Any = None
    to_save: tuple[torch.Tensor | None, ...] | None = None
    requires_grad: bool = True
    saved_names: tuple[str, ...] = field(default=(), init=False)  # of what was saved by name

    if TYPE_CHECKING:  # what ops hang on it

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def save_for_backward(self, *tensors: torch.Tensor | None, **named: torch.Tensor | None) -> None:
        """Saves tensors for backward, where they are `saved_tensors`, and with names `saved_tensor(name)`. The last call counts.

        Args:
            tensors: what backward reads.
            named: the same with names, instead. Those that ops of the library read are in the documentation of fusions.
        """
        if tensors and named:
            raise TypeError(f"save_for_backward: expected all tensors with names or all without, got both ({', '.join(named)}). Name all of them.")
        self.to_save, self.saved_names = tensors or tuple(named.values()), tuple(named)

    def saved_tensor(self, name: str) -> Any:
        """What was saved under a name; the contexts of ops of the library have one for each tensor."""
        if name not in self.saved_names:
            raise ValueError(f"saved_tensor: expected one of {[*self.saved_names]}, got {name!r}. Save it by that name.")
        return self.saved_tensors[self.saved_names.index(name)]

    @classmethod
    def of(cls, names: Sequence[str], tensors: Sequence[torch.Tensor | None]) -> Self:
        """As backward gets it, with what the library has kept under these names."""
        context = cls(saved_tensors=tuple(tensors))
        context.saved_names = tuple(names)
        return context
