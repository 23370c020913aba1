"""Where a run is cut: around units with hooks or a forward of their own. What a channel carried from piece to piece becomes an argument and a result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.ops import hooks
from tandem.ops.prepared import Bindings, Prepared, own_call
from tandem.ops.unit import Unit


@dataclass(frozen=True)
class Piece:
    """Consecutive units that stay one pipeline, or one that stands alone."""

    units: tuple[Unit, ...]
    is_alone: bool
    first: int  # of its basic ops
    count: int
    bindings: Bindings
    inputs: tuple[str | None, ...]  # channel of each extra argument, None: from the caller
    outputs: tuple[tuple[str | None, bool], ...]  # channel of each extra result, and whether the caller gets it


def reasons(run: Prepared, hooked: tuple[int, ...]) -> list[str]:
    """Why the units at the positions `hooked` stand alone."""
    if run.owner is None and hooks.any_of_all_modules():
        return ["hooks are registered for all modules, so every op runs by itself: nothing fuses across ops"]
    told = []
    for index in hooked:
        unit = run.units[index]
        found = [f"a {name}" for module in (unit, *unit.flat_ops()) for field, name in hooks.OF_A_MODULE.items() if getattr(module, field)]
        found.append(f"a {own_call(unit)} of its own")
        told.append(f"op {index} ({unit._get_name()}) has {found[0]}, so it runs by itself: nothing fuses across it")
    return told


def pieces(run: Prepared, hooked: tuple[int, ...]) -> list[Piece]:
    """What a run is cut into where the units at the positions `hooked` stand alone."""
    groups: list[list[int]] = []
    for index in range(len(run.units)):
        if index in hooked or not groups or groups[-1][-1] in hooked:
            groups.append([])
        groups[-1].append(index)
    readers: dict[str, list[int]] = {}
    for index, (inputs, _) in enumerate(run.bindings):
        for channel in inputs:
            if channel is not None:
                readers.setdefault(channel, []).append(index)
    found, first = [], 0
    for group in groups:
        units = [run.units[index] for index in group]
        count = sum(len(unit.flat_ops()) for unit in units)
        found.append(_piece(run, units, group[0] in hooked, first, count, readers))
        first += count
    return found


def _piece(run: Prepared, units: Sequence[Unit], is_alone: bool, first: int, count: int, readers: dict[str, list[int]]) -> Piece:
    inside = range(first, first + count)
    own = {channel for index in inside for channel, _ in run.bindings[index][1] if channel is not None}
    bindings, arguments, results = [], [], []
    for index in inside:
        inputs, outputs = run.bindings[index]
        arguments += [channel for channel in inputs if channel not in own]
        here = []
        for channel, to_caller in outputs:
            is_read_outside = any(reader not in inside for reader in readers.get(channel, ()))
            if to_caller or is_read_outside:
                results.append((channel, to_caller))
            here.append((channel, to_caller or is_read_outside))
        bindings.append((tuple(channel if channel in own else None for channel in inputs), tuple(here)))
    return Piece(tuple(units), is_alone, first, count, tuple(bindings), tuple(arguments), tuple(results))
