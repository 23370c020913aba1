"""What cached pipelines depend on besides their own lists: registered fusions and options of ops that were changed in place."""

from __future__ import annotations

import itertools


class _Structure:
    """`token` is a new text after every such change. A text, as Dynamo guards texts by value and numbers as symbols."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self.token = "0"

    def change(self) -> None:
        """Makes every pipeline look at its ops again."""
        self.token = str(next(self._numbers))


structure = _Structure()
