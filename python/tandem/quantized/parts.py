"""The parts of a quantized tensor: their names and sizes, and which slice of each part belongs to which rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tandem import _C
from tandem.quantized.traits import traits_of

PARTS = (  # in the order of the library's groups
    "rowwise_data",
    "rowwise_scale_inv",
    "amax_rowwise",
    "columnwise_data",
    "columnwise_scale_inv",
    "amax_columnwise",
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of dequantized values


class Place(NamedTuple):
    """How a part grows with the rows of the tensor: by one along `dim` for each `rows` rows."""

    dim: int
    rows: int


def sizes_of_parts(text: str, rows: int, columns: int) -> Mapping[str, Sequence[int]]:
    """The size of each part of a matrix [rows, columns] under the quantizer of a text, by the names in PARTS."""
    return dict(zip(PARTS, _C.sizes_of_parts(text, rows, columns), strict=True))


@functools.cache
def places_of_rows(text: str) -> Mapping[str, Place | None]:
    """The `Place` of each part; None: the part has one value for all rows."""
    return {name: Place(dim, rows) if rows else None for name, (dim, rows) in zip(PARTS, _C.rows_of_parts(text), strict=True)}


def rows_of_blocks(text: str, names: Sequence[str] = PARTS) -> int:
    """The number of rows of the largest block of these parts."""
    places = places_of_rows(text)
    return max((place.rows for name in names if (place := places[name]) is not None), default=1)


def has_rows_of_x(text: str, name: str) -> bool:
    """Whether a part has all dimensions of x but the last, as codes do unless they are packed along the rows."""
    return name == "rowwise_data" or name == "columnwise_data" and not traits_of(text).is_packed


def distinct(x: Any) -> dict[str, torch.Tensor]:
    """The parts of a quantized tensor by name, each tensor once: one that serves both directions has the name of the row part."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name in PARTS:
        if (part := getattr(x, name)) is not None:
            found.setdefault(id(part), (name, part))
    return dict(found.values())


def in_order(parts: Mapping[str, torch.Tensor], has_columns: bool) -> list[torch.Tensor | None]:
    """The parts that `distinct` names, in the order of PARTS. With `has_columns` row codes are column codes too, unless there are separate ones."""
    found = [parts.get(name) for name in PARTS]
    if has_columns and found[3] is None:
        found[3:5] = found[:2]
    return found


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
