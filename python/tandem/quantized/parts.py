"""The parts of a quantized tensor: their sizes, and which slice of each part belongs to which rows."""

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
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of dequantized values

_SOME_ROWS = 1024  # a multiple of the block size of every format


class Place(NamedTuple):
    """How a part grows with the rows of the tensor: by one along `dim` for each `rows` rows."""

    dim: int
    rows: int


@functools.cache
def sizes_of_parts(text: str, rows: int, columns: int) -> Mapping[str, tuple[int, ...]]:
    """The size of each part of a matrix [rows, columns] under the quantizer of a text, by the names in PARTS."""
    parts = _parts_of_nothing(text, rows, columns)
    if serves_both(text):
        parts[3:5] = parts[:2]
    return {name: tuple(part.shape) for name, part in zip(PARTS, parts, strict=True)}


@functools.cache
def serves_both(text: str) -> bool:
    """Whether one set of codes serves as row codes and as column codes."""
    parts = _parts_of_nothing(text, _SOME_ROWS, _SOME_ROWS)
    return parts[3].numel() == 0 and parts[5].numel() == 0


def _parts_of_nothing(text: str, rows: int, columns: int) -> list[torch.Tensor]:
    x = torch.empty(rows, columns, device="meta")
    given = torch.empty((), device="meta", dtype=torch.int64 if ":sr=1" in text else torch.float32) if ":sr=1" in text or ":delayed" in text else None
    *parts, _ = torch.ops.tandem.quantize(x, given, text, [True, True, True])
    return parts


@functools.cache
def places_of_rows(text: str, columns: int) -> Mapping[str, Place | None]:
    """The `Place` of each part; None: the part has one value for all rows."""
    some, more = (sizes_of_parts(text, rows, columns) for rows in (_SOME_ROWS, 2 * _SOME_ROWS))
    places: dict[str, Place | None] = {}
    for name in PARTS:
        growth = [(dim, many - few) for dim, (few, many) in enumerate(zip(some[name], more[name], strict=True)) if many != few]
        places[name] = Place(growth[0][0], _SOME_ROWS // growth[0][1]) if growth else None
    return places


def rows_of_blocks(text: str, columns: int, names: Sequence[str]) -> int:
    """The number of rows of the largest block of these parts."""
    places = places_of_rows(text, columns)
    return max((place.rows for name in names if (place := places[name]) is not None), default=1)


def padded(part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The part at the beginning of a tensor of zeros of these sizes; the part itself if it has these sizes."""
    if tuple(part.shape) == tuple(sizes):
        return part
    whole = part.new_zeros(sizes)
    whole[tuple(slice(0, size) for size in part.shape)] = part
    return whole


def matrix_rows(x: Any) -> int:
    """The number of rows of a tensor: the product of all its dimensions but the last."""
    return math.prod(x.shape[:-1])
