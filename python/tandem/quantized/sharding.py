"""The hooks of a quantized parameter for torch.distributed.fsdp.fully_shard, which gather codes instead of dequantized values.

With uneven shards FSDP requires that all ranks gather tensors of the largest shard's shape. The bytes of all parts are then packed into as many tensors of
that shape as they fill. On a mesh of one rank FSDP reads one gathered tensor only, into which the bytes of all parts are packed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tandem.quantized.parts import PARTS, has_rows_of_x, padded, places_of_rows, rows_of_blocks, sizes_of_parts


class _Shared(NamedTuple):
    """What `post_all_gather` needs to assemble the whole parameter from gathered parts."""

    quantizer: Any
    names: Sequence[str]  # names of the gathered parts
    shape: tuple[int, ...]  # shape of the whole parameter
    dtypes: Sequence[torch.dtype]
    sizes: Sequence[Sequence[int]]  # size of each part in the largest shard
    rows: Sequence[int]  # size of the first dimension on each rank
    is_even: bool


def pre_all_gather(
    self: Any, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
) -> tuple[tuple[torch.Tensor, ...], _Shared]:
    """The parts of this rank's shard, and the metadata for `post_all_gather`. If one scale serves the whole tensor, later writes share their amax over the
    ranks."""
    ranks = mesh.size()
    names = [name for name in self.__tensor_flatten__()[0] if name in PARTS]
    text, inner = self.quantizer.text, math.prod(self.shape[1:-1])
    greatest = -(-outer_size[0] // ranks)
    unit = rows_of_blocks(text, names)
    if ranks > 1 and greatest * inner % unit:
        raise ValueError(
            f"fully_shard: expected {ranks} ranks to share the first dimension of a quantized parameter in whole blocks, each a multiple of {unit} rows but "
            f"the last, got {greatest} of {outer_size[0]}. Keep this parameter in plain numbers, or in a format with smaller blocks."
        )
    alone = self.quantizer._of_its_own()
    if ranks > 1:
        self.quantizer = self.quantizer._of_all(mesh.get_group())
    rows = [min(max(outer_size[0] - rank * greatest, 0), greatest) for rank in range(ranks)]
    parts = [getattr(self, name) for name in names]
    sizes = sizes_of_parts(text, greatest * inner, self.shape[-1])
    greatest_sizes = [(greatest, *part.shape[1:]) if has_rows_of_x(text, name) else sizes[name] for name, part in zip(names, parts, strict=True)]
    is_even = ranks > 1 and len(set(rows)) == 1
    shared = _Shared(alone, names, tuple(outer_size), [part.dtype for part in parts], greatest_sizes, rows, is_even)
    if is_even:
        return tuple(part.contiguous() for part in parts), shared
    spread = [padded(part, size).contiguous().view(-1).view(torch.uint8) for part, size in zip(parts, greatest_sizes, strict=True)]
    if ranks == 1:
        return (torch.cat(spread),), shared
    data, shape = torch.cat(spread), (greatest, *self.shape[1:])
    count = -(-data.numel() // math.prod(shape))  # the last tensor is padded with zeros
    return padded(data, (count * math.prod(shape),)).view(count, *shape).unbind(0), shared


def post_all_gather(
    self: Any, all_gather_outputs: tuple[torch.Tensor, ...], metadata: _Shared, param_dtype: torch.dtype, *, out: torch.Tensor | None = None
) -> Any:
    """The whole parameter, assembled from the parts of all ranks, and those of its parts that are copies; with `out`, writes into `out` and returns None."""
    whole = getattr(out, "_local_tensor", out)
    of_ranks = _of_ranks(all_gather_outputs, metadata)
    sizes = sizes_of_parts(metadata.quantizer.text, math.prod(metadata.shape[:-1]), metadata.shape[-1])
    parts: dict[str, torch.Tensor] = {}
    made: list[torch.Tensor] = []
    for index, name in enumerate(metadata.names):
        if metadata.is_even and has_rows_of_x(metadata.quantizer.text, name):
            parts[name] = all_gather_outputs[index]
            continue
        part = _joined(name, [each[index] for each in of_ranks], metadata, sizes[name])
        if whole is None:
            parts[name] = part.clone()
            made.append(parts[name])
        else:
            target = getattr(whole, name)
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(target):
                target.copy_(part)
    if whole is not None:
        return None
    gathered = self._of(parts, metadata.shape, param_dtype)
    gathered.quantizer = metadata.quantizer
    return gathered, tuple(made)


def _of_ranks(gathered: Sequence[torch.Tensor], shared: _Shared) -> list[list[torch.Tensor]]:
    """The parts of each rank, unpacked from the gathered tensors."""
    ranks = len(shared.rows)
    by_rank = [each.unflatten(0, (ranks, -1)).unbind(0) for each in gathered]
    if shared.is_even:
        return [[each.view(size) for each, size in zip(parts, shared.sizes, strict=True)] for parts in zip(*by_rank, strict=True)]
    lengths = [math.prod(size) * dtype.itemsize for size, dtype in zip(shared.sizes, shared.dtypes, strict=True)]
    found = []
    for pieces in zip(*by_rank, strict=True):
        data = torch.cat([piece.reshape(-1) for piece in pieces])[: sum(lengths)].split(lengths)
        found.append([each.clone().view(dtype).view(size) for each, dtype, size in zip(data, shared.dtypes, shared.sizes, strict=True)])
    return found


def _joined(name: str, of_ranks: Sequence[torch.Tensor], shared: _Shared, sizes: Sequence[int]) -> torch.Tensor:
    """A part of the whole parameter, joined from that part of each rank that has rows."""
    with_rows = [(part, rows) for part, rows in zip(of_ranks, shared.rows, strict=True) if rows]
    if has_rows_of_x(shared.quantizer.text, name):
        return torch.cat([part[:rows] for part, rows in with_rows])
    place = places_of_rows(shared.quantizer.text)[name]
    if place is None:
        first = with_rows[0][0]
        if any(not torch.equal(part, first) for part, _ in with_rows):
            raise ValueError(
                f"fully_shard: expected one {name} on all ranks, as one serves the whole tensor, got several. Write shards behind the first call, from which on "
                "ranks share their amax, quantize them with with_amax_reduction=True, or use a format whose scales are of blocks, such as MXFP8, also as the "
                "recipe of quantized_model_init."
            )
        return first
    inner = math.prod(shared.shape[1:-1])
    return padded(torch.cat([part.narrow(place.dim, 0, -(-rows * inner // place.rows)) for part, rows in with_rows], place.dim), sizes)
