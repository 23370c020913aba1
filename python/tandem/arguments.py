"""Checks of constructor arguments and options that several ops share."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch


class Fixed:
    """An attribute that fixes how a module was built. Assigning a value other than the first raises ValueError."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        if module is None:
            return self
        try:
            return module.__dict__[self.name]
        except KeyError:
            raise AttributeError(self.name) from None  # torch.nn.Module replaces this text

    def __set__(self, module: Any, value: Any) -> None:
        built = module.__dict__.setdefault(self.name, value)
        if built is not value and built != value:
            raise ValueError(
                f"{type(module).__name__}: expected {self.name}={built!r}, with which it was built, got {value!r}. Build another one: the shapes "
                "of parameters, or the list of ops, follow from it."
            )


class Of:
    """An attribute of a module that reads and sets the attribute `name`, by default its own name, of the module's part `part`."""

    def __init__(self, part: str, doc: str, name: str = "") -> None:
        self.part, self.__doc__, self.name = part, doc, name

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = self.name or name

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        return self if module is None else getattr(getattr(module, self.part), self.name)

    def __set__(self, module: Any, value: Any) -> None:
        setattr(getattr(module, self.part), self.name, value)


def at_default(op: str, default: Any = None, /, **arguments: Any) -> None:
    """Raises NotImplementedError for an argument of TransformerEngine that has another value than the only one that Tandem implements."""
    for name, value in arguments.items():
        if value is not default and value != default:
            raise NotImplementedError(f"{op}: expected {name}={default!r}, got {value!r}. This version knows the default only.")


def drawing(tracker: Callable[[], Any] | None, name: str | None = None) -> AbstractContextManager[Any]:
    """The context in which weights are drawn: `tracker().fork(name)`; without a tracker one that does nothing, so the global generator draws."""
    return contextlib.nullcontext() if tracker is None else tracker().fork(*([name] if name else ()))


def whole(value: Any) -> int | None:
    """`value` as an int if it is a whole number, such as an int or an integer of numpy; None otherwise, and for a bool."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


_PARAMETER_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)


def parameter_dtype(op: str, dtype: torch.dtype | None) -> torch.dtype | None:
    """Returns `dtype` if parameters may have it; raises ValueError otherwise. Products and norms compute in these dtypes. None: torch's default."""
    if dtype is not None and dtype not in _PARAMETER_DTYPES:
        raise ValueError(
            f"{op}: expected dtype to be torch.float32, torch.float64, torch.bfloat16 or torch.float16, got {dtype!r}. Parameters have one of these; "
            "recipes quantize them."
        )
    return dtype


def positive(op: str, name: str, value: int, cure: str = "Give the size of the last dimension.") -> int:
    """Returns `value` as an int; raises ValueError unless it is a whole number > 0."""
    number = whole(value)
    if number is None or number <= 0:
        raise ValueError(f"{op}: expected {name} to be a whole number > 0, got {value!r}. {cure}")
    return number


def normalized_sizes(op: str, normalized_shape: int | Iterable[int]) -> tuple[int, ...]:
    """The sizes of the last dimensions, which a norm reduces. Raises ValueError for no size or a size that is not positive."""
    sizes = tuple(normalized_shape) if isinstance(normalized_shape, Iterable) and whole(normalized_shape) is None else (normalized_shape,)
    if not sizes:
        raise ValueError(f"{op}: expected normalized_shape with one size at least, got none. Give those of the last dimensions of x.")
    return tuple(positive(op, "normalized_shape", size) for size in sizes)


def check_margin(op: str, value: Any) -> None:
    """Raises ValueError unless `value` is a number of multiprocessors, or a dict of such numbers by kind of pass."""
    margins = value.values() if isinstance(value, Mapping) else [value]
    if any(number is None or number < 0 for number in map(whole, margins)):
        raise ValueError(f"{op}: expected sm_margin to be a whole number >= 0, or a dict of such, got {value!r}. Leave it out.")


def finite(op: str, name: str, value: Any) -> float:
    """`value`, a number or a tensor with one constant element, as a float. Raises ValueError for infinity and NaN, which JSON cannot hold."""
    is_number = hasattr(value, "__float__") and not isinstance(value, bool)
    if is_number and isinstance(value, torch.Tensor):
        is_number = value.numel() == 1 and not value.requires_grad
    try:
        number = float(value) if is_number else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{op}: expected {name} to be a finite number, got {value!r}. Pass a float.")
    return number


def flag(op: str, name: str, value: Any, cure: str = "Pass a bool.") -> bool:
    """`value` as a bool. Accepts what equals True or False, including a tensor with one element; raises ValueError otherwise."""
    try:
        is_flag = value in (True, False)
    except (RuntimeError, ValueError):  # a tensor or an array with several elements has no truth value
        is_flag = False
    if not is_flag:
        raise ValueError(f"{op}: expected {name} to be True or False, got {value!r}. {cure}")
    return bool(value)


def check_amax_group(op: str, group: Any) -> None:
    """Raises TypeError unless `group` is a process group, whose ranks share amaxes, or None, which means all ranks."""
    if group is not None and not hasattr(group, "group_name"):
        raise TypeError(
            f"{op}: expected amax_reduction_group to be a process group of torch.distributed or None, got {type(group).__name__}. Pass what "
            "torch.distributed.new_group returns."
        )


def sizes(op: str, name: str, value: Any) -> tuple[int, ...]:
    """`value` as a tuple of sizes, one of which may be -1. Raises ValueError for other values."""
    try:
        found = tuple(operator.index(size) for size in value)
    except TypeError as error:
        raise ValueError(f"{op}: expected {name} to be whole numbers, got {value!r}. Pass a tuple of ints.") from error
    if len(found) > 64:
        raise ValueError(f"{op}: expected at most 64 sizes, got {len(found)}. No tensor has as many dimensions.")
    if any(size < -1 for size in found) or found.count(-1) > 1:
        raise ValueError(f"{op}: expected sizes >= 0 and at most one -1, got {found}. One size can be inferred.")
    if math.prod(size for size in found if size > 0) >= 1 << 63:
        raise ValueError(f"{op}: expected sizes whose product is below 2^63, got {found}. No tensor has as many elements.")
    return found
