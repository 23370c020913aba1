"""How a container wants its pipelines planned."""

from __future__ import annotations

from typing import NamedTuple


class Terms(NamedTuple):
    """What is part of the description of each pipeline of a container."""

    required: tuple[str, ...] = ()  # fusions: an error with the reason where one is not made
    memory_budget: str = ""  # as tandem.regions.memory_budget writes it; empty: that of the region
