"""What a container demands of the plans of its pipelines."""

from __future__ import annotations

from typing import NamedTuple


class Terms(NamedTuple):
    """Demands that are part of the description of each pipeline of a container."""

    required: tuple[str, ...] = ()  # names of fusions; a call raises an error with the reason if one is not made
    memory_budget: str = ""  # a number as tandem.regions.memory_budget writes it; empty: the budget of the region
