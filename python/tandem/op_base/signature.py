"""Signatures: the names, options and parameters of an op, as its definition in the library declares them."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

from tandem import _C
from tandem.arguments import finite, flag, sizes, whole


@dataclass(frozen=True)
class Size:
    """A size that occurs in shapes of parameters."""

    name: str
    doc: str


@dataclass(frozen=True)
class Option:
    """An option. Its `type` is "flag", "number", "whole", "text" or "shape"."""

    name: str
    type: str
    default: Any
    expected: str  # the allowed values, in words
    least: float | None
    greatest: float | None
    words: tuple[str, ...]
    is_required: bool
    doc: str

    def checked(self, op: str, name: str, value: Any) -> Any:
        """`value` as the op stores it. Raises an error of `op`, in which the option is called `name`, if the value is not allowed."""
        if self.type == "flag":
            return flag(op, name, value)
        if self.type == "shape":
            return sizes(op, name, value)
        if self.type == "number":
            value = finite(op, name, value)
        if self.type == "whole" and (number := whole(value)) is not None:
            value = number
        is_right = {"number": float, "whole": int, "text": str}[self.type] is type(value)
        if is_right and self.type == "text":
            is_right = not self.words or value in self.words
        elif is_right:
            is_right = (self.least is None or value >= self.least) and (self.greatest is None or value <= self.greatest)
        if not is_right:
            raise ValueError(f"{op}: expected {name} to be {self.expected}, got {value!r}. {name}: {self.doc}.")
        return value


@dataclass(frozen=True)
class Parameter:
    """A parameter: names of its sizes, first values ("zeros", "ones" or "kaiming_uniform"), and the option that makes it start at zero."""

    name: str
    shape: tuple[str, ...]
    init: str
    zeros_if: str


@dataclass(frozen=True)
class Signature:
    """The definition of an op as users see it."""

    name: str
    formula: str
    family: str
    sizes: tuple[Size, ...]
    options: tuple[Option, ...]
    parameters: tuple[Parameter, ...]
    extra_inputs: tuple[str, ...]
    extra_outputs: tuple[str, ...]
    context: tuple[str, ...]
    drawn: tuple[str, ...]  # names of `context` that come from a generator
    dtype_rule: str  # "weight", "input", "promote" or "promote_number"
    depends_on_training: bool


@functools.cache
def signature_of(kind: str) -> Signature:
    """The signature of the op that the library calls `kind`. Raises the library's error for an unknown op."""

    def tuples(fields: dict[str, Any]) -> dict[str, Any]:
        return {name: tuple(value) if isinstance(value, list) and name != "default" else value for name, value in fields.items()}

    fields = tuples(json.loads(_C.op_signature(kind)))
    fields["sizes"] = tuple(Size(**size) for size in fields["sizes"])
    fields["options"] = tuple(Option(**tuples(option)) for option in fields["options"])
    fields["parameters"] = tuple(Parameter(**tuples(parameter)) for parameter in fields["parameters"])
    return Signature(**fields)
