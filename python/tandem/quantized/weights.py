"""Codes of weights that are kept from call to call, and what callers may say of weights."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch

from tandem import _C
from tandem.quantized.quantizer import Quantizer
from tandem.quantized.tensor import QuantizedTensor, in_directions

_SAID = {None: 0, True: 1, False: 2}  # by is_first_microbatch


class WeightWorkspace(NamedTuple):
    """What `quantize_weight` keeps of a weight: its codes as plain tensors, None where a direction is not wanted, and a stamp that says of what
    they were made. A stamp is of one process: a workspace is not saved.

    Args:
        row_codes, row_scale, row_amax: the codes that forward multiplies, their scales, and, of NVFP4, the amax that belongs to these.
        column_codes, column_scale, column_amax: those that the gradient of x is computed from.
        amax: that of the weight.
        stamp: of what the codes were made.
        made: why the last call has made them, or "found".
    """

    row_codes: torch.Tensor | None
    row_scale: torch.Tensor | None
    row_amax: torch.Tensor | None
    column_codes: torch.Tensor | None
    column_scale: torch.Tensor | None
    column_amax: torch.Tensor | None
    amax: torch.Tensor
    stamp: torch.Tensor
    made: str  # why the last call has made the codes, such as "first use", or "found"


def _serves(weight: QuantizedTensor, quantizer: Quantizer) -> bool:
    has_rows, has_columns = weight.rowwise_data is not None, weight.columnwise_data is not None
    same = weight.quantizer.text == quantizer.text
    return same and (has_rows or not quantizer.rowwise) and (has_columns or not quantizer.columnwise)


def quantize_weight(
    weight: torch.Tensor, quantizer: Quantizer, workspace: WeightWorkspace | None = None, *, is_first_microbatch: bool | None = None
) -> tuple[QuantizedTensor, WeightWorkspace | None]:
    """The codes of a weight, made only where they are not in `workspace` already: what pipelines do with their weights, for products of one's own.

    >>> import torch, tandem
    >>> weight = torch.randn(64, 64)
    >>> quantizer = tandem.MXFP8Quantizer(torch.float8_e4m3fn)
    >>> codes, workspace = tandem.quantize_weight(weight, quantizer)
    >>> codes, workspace = tandem.quantize_weight(weight, quantizer, workspace)
    >>> workspace.made
    'found'

    The codes lie in the workspace that is returned: the next call with it may write them again. It is the given one, unless that cannot hold these
    codes (another shape or device, a format of another layout, a direction that is missing), or holds nothing of this weight. Whether codes
    that are there serve is asked of the weight at every call. On the CPU they do if they were made of the same bytes by the same quantizer, however
    the weight was written or replaced. On an accelerator they do if tensor, version, optimizer steps, quantizer and autocast region are the same;
    outside of regions they are made in each call.

    Args:
        weight: a tensor; one that is quantized by an equal quantizer, in the wanted directions, is its own codes; of another one, or of the shard of a
            DTensor, the whole is made first. A gradient is not recorded: pass `weight.detach()`.
        quantizer: whose codes depend on the weight alone; its `rowwise` and `columnwise` say which are wanted.
        workspace: what an earlier call has returned.
        is_first_microbatch: None: nothing is known. True: the codes are made. False: nobody has written the weight since they were, which is
            taken on trust: its bytes are not compared, and its codes serve in every region.

    Returns:
        the codes, and the workspace for the next call; None for a weight that is its own codes.
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
    """Says something of all weights that pipelines use in a `with` block of this thread."""

    def __init__(self, said: str) -> None:
        self._said = said
        self._before: list[str] = []

    def __enter__(self) -> None:
        self._before.append(_C.in_force.said_of_weights)
        _C.in_force.said_of_weights = self._said

    def __exit__(self, *_: object) -> None:
        _C.in_force.said_of_weights = self._before.pop()


class weights_unchanged(_saying):
    """Says that nobody writes weights inside a `with` block, nor has since their codes were last made: `is_first_microbatch=False` of all pipelines
    that are called in it, in this thread.

    Their bytes are not compared, and codes serve in every region. What versions and optimizer steps tell is seen all the same; a write through
    `.data`, a flat buffer or a foreign optimizer is not, unless `tandem.weights_changed()` tells.

    >>> import torch, tandem
    >>> linear = tandem.ops.Linear(16, 16)
    >>> with tandem.autocast():
    ...     y = linear(torch.randn(4, 16))
    ...     with tandem.weights_unchanged():
    ...         y = linear(torch.randn(4, 16))
    """

    def __init__(self) -> None:
        super().__init__("unchanged")


def in_microbatch(is_first: bool) -> _saying:
    """What `is_first_microbatch` of a module says."""
    return _saying("first micro-batch" if is_first else "unchanged")


def weights_changed() -> None:
    """Says that parameters were written in a way that leaves no sign, not by a `torch.optim` optimizer, but through `.data`, a collective or the like:
    codes made of them are stale. On an accelerator this must be told; on the CPU the bytes of weights are compared, and it must only where they were
    said to be unchanged."""
    _C.weights_changed()

