"""What an op's forward leaves to its backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class OperationContext:
    """One per basic op and call. Besides the fields here an op may hang whatever it needs on it."""

    saved_tensors: tuple[torch.Tensor | None, ...] | None = None
    to_save: tuple[torch.Tensor | None, ...] | None = None
    requires_grad: bool = True

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        """Saves tensors for backward, where they are `saved_tensors`. The last call counts."""
        self.to_save = tensors
