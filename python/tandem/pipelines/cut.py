"""Divides ops into pieces that run one after another. A channel between two pieces becomes a result of one and an argument of the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from tandem.op_base import hooks
from tandem.pipelines.prepared import Bindings, Prepared, own_call

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Wiring:
    """The channels by which a piece is connected to other pieces."""

    bindings: Bindings  # bindings of the ops, where channels to and from other pieces are unbound
    inputs: tuple[str | None, ...]  # channel of each extra argument, None: from the caller
    outputs: tuple[tuple[str | None, bool], ...]  # channel of each extra result that other pieces read, and whether the caller gets it

    def take(self, extra: Tensors, channels: dict[str, torch.Tensor]) -> tuple[Tensors, Tensors]:
        """The extra arguments of the piece, from the caller and from channels, and the caller's remaining ones."""
        count = self.inputs.count(None)
        own = iter(extra[:count])
        return tuple([next(own) if channel is None else channels[channel] for channel in self.inputs]), extra[count:]

    def give(self, results: Tensors, channels: dict[str, torch.Tensor]) -> Tensors:
        """The extra results of the piece for the caller. Stores those for other pieces in `channels`."""
        own = []
        for (channel, to_caller), result in zip(self.outputs, results, strict=True):
            if channel is not None:
                channels[channel] = result
            if to_caller:
                own.append(result)
        return tuple(own)


def wirings(pieces: Iterable[Bindings]) -> list[Wiring]:
    """How channels connect pieces, given by the bindings of their ops.

    An op reads a channel from the last earlier op that writes it: an op of its own piece, or else of the last earlier piece that writes the channel.
    """
    pieces = list(pieces)
    makers: dict[str | None, int] = {}  # channel -> the last piece that writes it
    given: list[set[str | None]] = [set() for _ in pieces]
    taken: list[list[set[str | None]]] = []  # channels from other pieces, by op
    for bindings in pieces:
        made: set[str | None] = set()
        taken.append([])
        for inputs, outputs in bindings:
            crossing = {channel for channel in inputs if channel not in made and channel in makers}
            for channel in crossing:
                given[makers[channel]].add(channel)
            taken[-1].append(crossing)
            made.update(channel for channel, _ in outputs)
        makers.update(dict.fromkeys(made - {None}, len(taken) - 1))
    return [_wiring(bindings, crossing, leaving) for bindings, crossing, leaving in zip(pieces, taken, given, strict=True)]


def _wiring(bindings: Bindings, taken: Sequence[set[str | None]], given: set[str | None]) -> Wiring:
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
