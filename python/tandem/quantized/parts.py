"""Of what a tensor in codes consists: the sizes of its parts, and where they go with its rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

PARTS = (  # in the order of the library's groups
    "rowwise_data",
    "rowwise_scale_inv",
    "amax_rowwise",
    "columnwise_data",
    "columnwise_scale_inv",
    "amax_columnwise",
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of numbers that have codes

_SOME_ROWS = 1024  # whole blocks of every format


class Place(NamedTuple):
    """Where a part has something for each so many rows: along which dimension."""

    dim: int
    rows: int


@functools.cache
def sizes_of_parts(text: str, rows: int, columns: int) -> Mapping[str, tuple[int, ...]]:
    """Those of a matrix that a quantizer of this text has quantized, by PARTS."""
    parts = _parts_of_nothing(text, rows, columns)
    if serves_both(text):
        parts[3:5] = parts[:2]
    return {name: tuple(part.shape) for name, part in zip(PARTS, parts, strict=True)}


@functools.cache
def serves_both(text: str) -> bool:
    """Whether the codes of rows are those of columns."""
    parts = _parts_of_nothing(text, _SOME_ROWS, _SOME_ROWS)
    return parts[3].numel() == 0 and parts[5].numel() == 0


def _parts_of_nothing(text: str, rows: int, columns: int) -> list[torch.Tensor]:
    x = torch.empty(rows, columns, device="meta")
    given = torch.empty((), device="meta", dtype=torch.int64 if ":sr=1" in text else torch.float32) if ":sr=1" in text or ":delayed" in text else None
    *parts, _ = torch.ops.tandem.quantize(x, given, text, [True, True, True])
    return parts


@functools.cache
def places_of_rows(text: str, columns: int) -> Mapping[str, Place | None]:
    """For each part; None where it has one value for all rows."""
    some, more = (sizes_of_parts(text, rows, columns) for rows in (_SOME_ROWS, 2 * _SOME_ROWS))
    places: dict[str, Place | None] = {}
    for name in PARTS:
        growth = [(dim, many - few) for dim, (few, many) in enumerate(zip(some[name], more[name], strict=True)) if many != few]
        places[name] = Place(growth[0][0], _SOME_ROWS // growth[0][1]) if growth else None
    return places


def rows_of_blocks(text: str, columns: int, names: Sequence[str]) -> int:
    """Of how many rows the highest block of these parts is."""
    places = places_of_rows(text, columns)
    return max((place.rows for name in names if (place := places[name]) is not None), default=1)


def padded(part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The part at the beginning of a tensor of these sizes, whose rest nobody reads; itself where it has them."""
    if tuple(part.shape) == tuple(sizes):
        return part
    whole = part.new_zeros(sizes)
    whole[tuple(slice(0, size) for size in part.shape)] = part
    return whole


def matrix_rows(x: Any) -> int:
    """The rows of a tensor as a matrix over its last dimension."""
    return math.prod(x.shape[:-1])
