"""Checks of constructor arguments that several ops share."""

from __future__ import annotations

import operator
import sys
from typing import Any

import torch


def at_default(op: str, default: Any = None, /, **arguments: Any) -> None:
    """Refuses arguments that TransformerEngine has and this version knows at their default only."""
    for name, value in arguments.items():
        if value is not default and value != default:
            raise NotImplementedError(f"{op}: expected {name}={default!r}, got {value!r}. This version knows the default only.")


def positive(op: str, name: str, value: int) -> int:
    """`value`, which must be a positive whole number."""
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"{op}: expected {name} to be a whole number > 0, got {value!r}. Give the size of the last dimension.")
    return value


def hidden_size(op: str, normalized_shape: int | tuple[int, ...] | list[int]) -> int:
    """The size of the last dimension, over which norms go."""
    sizes = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if len(sizes) != 1:
        raise NotImplementedError(
            f"{op}: expected normalized_shape with one size, got {sizes}. Reshape the input so that it is the last dimension."
        )
    return positive(op, "normalized_shape", sizes[0])


def finite(op: str, name: str, value: Any) -> float:
    """`value` as a float: a number, or a tensor of one that is constant. Descriptions hold no infinity and no NaN."""
    is_number = hasattr(value, "__float__") and not isinstance(value, bool)
    if is_number and isinstance(value, torch.Tensor):
        is_number = value.numel() == 1 and not value.requires_grad
    if not is_number or not float("-inf") < value < float("inf") or abs(value) > sys.float_info.max:
        raise ValueError(f"{op}: expected {name} to be a finite number, got {value!r}. Pass a float.")
    return float(value)


def sizes(op: str, name: str, value: Any) -> tuple[int, ...]:
    """`value` as a tuple of whole numbers."""
    try:
        return tuple(operator.index(size) for size in value)
    except TypeError as error:
        raise ValueError(f"{op}: expected {name} to be whole numbers, got {value!r}. Pass a tuple of ints.") from error
