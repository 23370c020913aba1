"""Divides a run of ops into pieces: at ops with hooks or a forward of their own, and at modules that are no ops. A channel between two pieces
becomes a result of one and an argument of the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tandem.op_base import hooks
from tandem.op_base.base import OpBase
from tandem.pipelines.prepared import Bindings, Prepared, own_call


@dataclass(frozen=True)
class Piece:
    """Consecutive ops that stay one pipeline, or one op that runs alone."""

    ops: tuple[OpBase, ...]
    is_alone: bool
    first: int  # index of the first basic op
    count: int  # number of basic ops
    bindings: Bindings
    inputs: tuple[str | None, ...]  # channel of each extra argument, None: from the caller
    outputs: tuple[tuple[str | None, bool], ...]  # channel of each extra result, and whether the caller gets it


@dataclass(frozen=True)
class Wiring:
    """The channels by which a run of a container is connected to its other runs."""

    bindings: Bindings  # bindings of the ops, where channels to and from other runs are unbound
    inputs: tuple[str | None, ...]  # channel of each extra argument, None: from the caller
    outputs: tuple[tuple[str | None, bool], ...]  # channel of each extra result that other runs read, and whether the caller gets it


def wirings(groups: Sequence[Sequence[OpBase]]) -> list[Wiring | None]:
    """How channels connect the runs of a container, between which other modules stand. The list holds only None if no channel leaves a run.

    An op reads a channel from the last earlier op that writes it: an op of its own run, or else of the last earlier run that writes the channel.
    """
    basic_ops = [[basic_op for op in group for basic_op in op.flat_ops()] for group in groups]
    makers: dict[str | None, int] = {}  # channel -> the last run that writes it
    given: list[set[str | None]] = [set() for _ in groups]
    taken: list[list[set[str | None]]] = []  # channels from other runs, by op
    for own in basic_ops:
        made: set[str | None] = set()
        taken.append([])
        for op in own:
            crossing = {channel for channel in op._extra_input_channels if channel not in made and channel in makers}
            for channel in crossing:
                given[makers[channel]].add(channel)
            taken[-1].append(crossing)
            made.update(op._extra_output_channels)
        makers.update(dict.fromkeys(made - {None}, len(taken) - 1))
    if not any(any(own) for own in taken):
        return [None for _ in groups]
    return [_wiring([op.channel_bindings() for op in own], crossing, leaving) for own, crossing, leaving in zip(basic_ops, taken, given, strict=True)]


def _wiring(bindings: Sequence[Any], taken: Sequence[set[str | None]], given: set[str | None]) -> Wiring:
    unbound = tuple(
        (
            tuple(None if channel in crossing else channel for channel in inputs),
            tuple((channel, to_caller or channel in given) for channel, to_caller in outputs),
        )
        for (inputs, outputs), crossing in zip(bindings, taken, strict=True)
    )
    arguments = [
        channel for (inputs, _), crossing in zip(bindings, taken, strict=True) for channel in inputs if channel is None or channel in crossing
    ]
    results = [(channel if channel in given else None, to_caller) for _, outputs in bindings for channel, to_caller in outputs]
    return Wiring(unbound, tuple(arguments), tuple((channel, to_caller) for channel, to_caller in results if channel is not None or to_caller))


def reasons(run: Prepared, hooked: tuple[int, ...]) -> list[str]:
    """The reasons why the ops at the indices `hooked` run alone, for `explain`."""
    if run.owner is None and hooks.any_of_all_modules():
        return ["hooks are registered for all modules, so every op runs by itself: nothing fuses across ops"]
    texts = []
    for index in hooked:
        op = run.ops[index]
        found = [f"a {name}" for module in (op, *op.flat_ops()) for field, name in hooks.OF_A_MODULE.items() if getattr(module, field)]
        found.append(f"a {own_call(op)} of its own")
        texts.append(f"op {index} ({op._get_name()}) has {found[0]}, so it runs by itself: nothing fuses across it")
    return texts


def pieces(run: Prepared, hooked: tuple[int, ...]) -> list[Piece]:
    """The pieces of a run if the ops at the indices `hooked` run alone."""
    groups: list[list[int]] = []
    for index in range(len(run.ops)):
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
        ops = [run.ops[index] for index in group]
        count = sum(len(op.flat_ops()) for op in ops)
        found.append(_piece(run, ops, group[0] in hooked, first, count, readers))
        first += count
    return found


def _piece(run: Prepared, ops: Sequence[OpBase], is_alone: bool, first: int, count: int, readers: dict[str, list[int]]) -> Piece:
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
    return Piece(tuple(ops), is_alone, first, count, tuple(bindings), tuple(arguments), tuple(results))
