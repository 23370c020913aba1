"""What the library knows of the quantizer of a text. Nothing else in this package reads such a text."""

from __future__ import annotations

import functools
from typing import NamedTuple

from tandem import _C
from tandem.tracing import constant_while_traced


class QuantizerTraits(NamedTuple):
    """Properties of a quantizer and of the codes that it computes."""

    text: str  # by which equal quantizers are recognized
    class_name: str  # the class of this package that has the options of the quantizer
    with_own_scale: str  # the text of the quantizer of this format that computes its scale from x; `text` unless the scale is an operand
    takes_seed: bool  # whether a seed is an operand, as numbers are rounded up or down at random
    is_rotated: bool  # whether column codes are codes of rotated columns
    is_packed: bool  # whether a byte has two codes: neighbours along the last dimension, or, for column codes, along the rows of x as a matrix
    has_amax: bool  # whether an amax, which determines a scale per tensor, belongs to the codes
    serves_both_directions: bool  # whether one set of codes serves as row codes and as column codes
    joins: bool  # whether the codes of parts that end with a block can be joined to the codes of the whole


_known = functools.cache(lambda text: QuantizerTraits(**_C.quantizer_traits(text)))  # Dynamo warns of a cached function that it traces


@constant_while_traced
def traits_of(text: str) -> QuantizerTraits:
    """The traits of the quantizer of a text. ValueError if there is none."""
    return _known(text)
