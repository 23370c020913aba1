"""What pipelines depend on besides their own lists: registered fusions and options of ops that were changed in place."""

from __future__ import annotations

from tandem import _C


class _Structure:
    """`token` is a new object after every change of any op and of the list of fusions. Who remembers it looks at its own ops only then."""

    def __init__(self) -> None:
        self.token = object()
        self.fusions = 0  # how often the list of fusions written in Python has changed
        self.fusions_text = "0"  # the same: Dynamo guards texts by value and numbers as symbols

    def change(self) -> None:
        """Makes every pipeline look at its ops again."""
        self.token = object()

    def change_fusions(self) -> None:
        """Fusions that Python functions make have been registered or removed."""
        self.fusions += 1
        self.fusions_text = str(self.fusions)
        _C.bump_fusions_version()
        self.change()

    def native_fusions(self) -> int:
        """How often the list of fusions written in C++ has changed."""
        return _C.fusions_version() - self.fusions


structure = _Structure()
