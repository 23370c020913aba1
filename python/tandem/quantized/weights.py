"""Codes of weights that are kept from call to call, and declarations of callers about writes to weights."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch

from tandem import _C
from tandem.quantized.quantizer import Quantizer
from tandem.quantized.tensor import QuantizedTensor, in_directions

_SAID = {None: 0, True: 1, False: 2}  # the library's number of each value of is_first_microbatch


class WeightWorkspace(NamedTuple):
    """The codes and scales of a weight that `quantize_weight` reuses, and a stamp that identifies the weight's value when they were computed.

    A stamp is valid in one process, so a workspace is not saved. Parts that the quantizer does not compute are None.

    Args:
        row_codes, row_scale, row_amax: row codes, which forward multiplies, their scales, and with NVFP4 the amax of the scale per tensor.
        column_codes, column_scale, column_amax: column codes, from which the gradient of x is computed, their scales and amax.
        amax: amax of the weight.
        stamp: numbers that identify the value of the weight when the codes were computed.
        made: reason why the last call computed the codes, such as "first use", or "found" if it reused them.
    """

    row_codes: torch.Tensor | None
    row_scale: torch.Tensor | None
    row_amax: torch.Tensor | None
    column_codes: torch.Tensor | None
    column_scale: torch.Tensor | None
    column_amax: torch.Tensor | None
    amax: torch.Tensor
    stamp: torch.Tensor
    made: str


def _serves(weight: QuantizedTensor, quantizer: Quantizer) -> bool:
    has_rows, has_columns = weight.rowwise_data is not None, weight.columnwise_data is not None
    same = weight.quantizer.text == quantizer.text
    return same and (has_rows or not quantizer.rowwise) and (has_columns or not quantizer.columnwise)


def quantize_weight(
    weight: torch.Tensor, quantizer: Quantizer, workspace: WeightWorkspace | None = None, *, is_first_microbatch: bool | None = None
) -> tuple[QuantizedTensor, WeightWorkspace | None]:
    """The codes of a weight, computed only if `workspace` does not contain them. Products of your own then quantize weights as pipelines do.

    >>> import torch, tandem
    >>> weight = torch.randn(64, 64)
    >>> quantizer = tandem.MXFP8Quantizer(torch.float8_e4m3fn)
    >>> codes, workspace = tandem.quantize_weight(weight, quantizer)
    >>> codes, workspace = tandem.quantize_weight(weight, quantizer, workspace)
    >>> workspace.made
    'found'

    The codes share memory with the returned workspace, and the next call with it may overwrite them. The returned workspace is the given one, unless
    that one lacks a direction, belongs to another weight, or has another shape, device or layout of codes. Each call checks whether the codes
    are valid. On the CPU they are if they were computed from equal bytes by an equal quantizer, however the weight was written or replaced. On an
    accelerator they are if tensor, version, optimizer steps, quantizer and autocast region are unchanged; outside of regions each call computes them.

    Args:
        weight: a tensor. A `QuantizedTensor` with an equal quantizer and the needed directions is returned itself; another one is dequantized first, and
            a DTensor is gathered first. No gradient is recorded: pass `weight.detach()`.
        quantizer: a quantizer whose codes depend on the weight alone. Its `rowwise` and `columnwise` choose the directions.
        workspace: the workspace that an earlier call returned; None: the codes are computed.
        is_first_microbatch: None: the call checks the codes. True: it computes them. False: the caller declares that nothing has written the weight
            since; its bytes are not compared, and its codes are valid in every region.

    Returns:
        the codes, and the workspace for the next call, or None if the weight itself is returned.
    """
    if not isinstance(quantizer, Quantizer):
        raise TypeError(f"quantize_weight: expected a Quantizer, got {type(quantizer).__name__}. Pass for example tandem.MXFP8Quantizer(...).")
    if is_first_microbatch not in _SAID:
        raise ValueError(f"quantize_weight: expected is_first_microbatch to be True, False or None, got {is_first_microbatch!r}. Pass one of them.")
    if hasattr(weight, "full_tensor"):
        weight = weight.full_tensor()
    if isinstance(weight, QuantizedTensor):
        if _serves(weight, quantizer):
            return weight, None
        weight = weight._numbers()
    mask = (quantizer.rowwise, quantizer.columnwise, True)
    given = () if workspace is None else workspace[:8]
    parts, made = _C.quantize_weight(weight, quantizer.text, mask, given, _SAID[is_first_microbatch])
    return in_directions(parts[:6], quantizer, weight.dtype, weight.shape), WeightWorkspace(*parts, made)


class _saying(contextlib.ContextDecorator):
    """A declaration about all weights that pipelines use in a `with` block of this thread."""

    def __init__(self, said: str) -> None:
        self._said = said
        self._before: list[str] = []

    def __enter__(self) -> None:
        self._before.append(_C.in_force.said_of_weights)
        _C.in_force.said_of_weights = self._said

    def __exit__(self, *_: object) -> None:
        _C.in_force.said_of_weights = self._before.pop()


class weights_unchanged(_saying):
    """Declares that nothing writes weights in a `with` block, nor has since their codes were computed: `is_first_microbatch=False` for all pipelines.

    The declaration holds for calls in this thread. Bytes of weights are not compared, and their codes are valid in every region. Changes of versions
    and steps of optimizers still count. A write through `.data`, a flat buffer or a foreign optimizer does not, unless `tandem.weights_changed()` follows.

    >>> import torch, tandem
    >>> linear = tandem.ops.Linear(16, 16)
    >>> with tandem.autocast():
    ...     y = linear(torch.randn(4, 16))
    ...     with tandem.weights_unchanged():
    ...         y = linear(torch.randn(4, 16))
    """

    def __init__(self) -> None:
        super().__init__("unchanged")


def in_microbatch(is_first: bool | None) -> contextlib.AbstractContextManager[None]:
    """The context in which weights are as `is_first_microbatch` of a module declares; None: as around it."""
    return contextlib.nullcontext() if is_first is None else _saying("first micro-batch" if is_first else "unchanged")


def weights_changed() -> None:
    """Declares that parameters were written without a change of version or a `torch.optim` step, such as through `.data` or by a collective.

    On an accelerator all kept codes are then recomputed: call it after each such write. On the CPU bytes are then compared again, which a block of
    `weights_unchanged` or a call with `is_first_microbatch=False` leaves out; elsewhere they are compared in any case."""
    _C.weights_changed()

