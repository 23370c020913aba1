"""What an op's forward leaves to its backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


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

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        """Saves tensors for backward, where they are `saved_tensors`. The last call counts."""
        self.to_save = tensors
