"""What makes tensors in codes."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch

from tandem import _C
from tandem._quantized_tensor import QuantizedTensor, assembled


class Quantizer:
    """Base of quantizers: `text` is what kernel ops know it by.

    Args:
        text: a format, a kind of scale and options.
        rowwise, columnwise: which codes are wanted.
    """

    _heads: ClassVar[tuple[str, ...]] = ()  # what the texts of a kind begin with
    _kinds: ClassVar[dict[str, type[Quantizer]]] = {}  # by these
    _amax_group: Any = None  # the processes that share the amax of what each quantizes a part of; None: this one quantizes the whole

    def __init_subclass__(cls) -> None:
        Quantizer._kinds.update(dict.fromkeys(vars(cls).get("_heads", ()), cls))

    def __init__(self, text: str, rowwise: bool, columnwise: bool) -> None:
        if not rowwise and not columnwise:
            raise ValueError(f"{type(self).__name__}: expected rowwise or columnwise codes to be wanted, got neither. Leave one of them True.")
        self.text = _C.canonical_quantizer(text)
        self.rowwise, self.columnwise = rowwise, columnwise

    def quantize(self, x: torch.Tensor) -> QuantizedTensor:
        """Codes of x, which must need no gradient: rounding has none."""
        return self._codes(x, None)[0]

    def _codes(self, x: torch.Tensor, given: torch.Tensor | None) -> tuple[QuantizedTensor, torch.Tensor]:
        mask = [self.rowwise, self.columnwise, True]
        *parts, amax = torch.ops.tandem.quantize(x, given, self.text, mask)
        row, row_scale, row_amax, column, column_scale, column_amax = parts
        if column.shape != x.shape and column_amax.numel() == 0:  # one value serves both directions
            column, column_scale = row, row_scale
        has_amax = row_amax.numel() != 0 or column_amax.numel() != 0
        rows = (row, row_scale) if self.rowwise else (None, None)
        columns = (column, column_scale) if self.columnwise else (None, None)
        codes = QuantizedTensor(
            *rows,
            *columns,
            self,
            x.dtype,
            amax_rowwise=row_amax if has_amax and self.rowwise else None,
            amax_columnwise=column_amax if has_amax and self.columnwise else None,
            shape=x.shape,
        )
        return codes, amax

    def _of_all(self, group: Any) -> Quantizer:
        """The same for a part of a tensor whose other parts the processes of a group quantize at the same time; itself where scales are of blocks alone."""
        if self._amax_group is not None or not self._has_scale_of_all():
            return self
        made = copy.copy(self)
        made._amax_group = group
        return made

    def _of_its_own(self) -> Quantizer:
        """The same for a whole tensor."""
        if self._amax_group is None:
            return self
        made = copy.copy(self)
        made._amax_group = None
        return made

    def _has_scale_of_all(self) -> bool:
        """Whether a scale serves the whole tensor, which parts of it can come to share."""
        return False

    def _fields(self) -> tuple[Any, ...]:
        """What `quantizer_of_text` makes it of."""
        return self.text, self.rowwise, self.columnwise

    def _take(self) -> None:
        """Takes what it is given besides."""

    def _values(self) -> tuple[object, ...]:
        return type(self), self.text, self.rowwise, self.columnwise, id(self._amax_group)

    def __reduce__(self) -> tuple[Any, ...]:
        return quantizer_of_text, self._fields()

    def __deepcopy__(self, memo: dict[int, Any]) -> Quantizer:
        return self  # a value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Quantizer) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.text!r}, rowwise={self.rowwise}, columnwise={self.columnwise})"


def quantizer_of_text(text: str, rowwise: bool = True, columnwise: bool = True, *given: Any) -> Quantizer:
    """The quantizer that kernel ops know by this text; `given` is what it holds besides."""
    kind = next((kind for head, kind in Quantizer._kinds.items() if text.startswith(head)), Quantizer)
    made: Quantizer = kind.__new__(kind)
    made.text, made.rowwise, made.columnwise = text, rowwise, columnwise
    made._take(*given)
    return made


torch.serialization.add_safe_globals([quantizer_of_text])

__all__ = ["Quantizer", "quantizer_of_text"]
