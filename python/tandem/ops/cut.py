"""Parts of a run that is cut around units with hooks or a forward of their own. What a channel carried from part to part becomes an argument and a result."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tandem.ops.prepared import Kwargs, Prepared, any_global_hooks, own_call
from tandem.ops.run import OpRun

if TYPE_CHECKING:
    from tandem.ops.op import FusibleOperation


@dataclass
class Part:
    """Consecutive units: a pipeline of their own, or one unit that is called as a module."""

    run: OpRun  # of `unit`: what its forward runs
    unit: FusibleOperation | None
    first: int  # of its basic ops
    count: int
    inputs: tuple[str | None, ...]  # channel of each extra argument, None: from the caller
    outputs: tuple[tuple[str | None, bool], ...]  # channel of each extra result, and whether the caller gets it

    def __call__(self, x: torch.Tensor, extra: Sequence[torch.Tensor], training: bool, kwargs: Kwargs | None) -> Any:
        own = {i - self.first: k for i, k in (kwargs or {}).items() if self.first <= i < self.first + self.count}
        if self.unit is None:
            outputs = self.run(x, extra, training, own or None)
        else:
            named: dict[str, Any] = {"_run": self.run} if self.run.given_bindings is not None else {}
            if own and self.unit.is_fused_op:
                named["basic_op_kwargs"] = [own.get(i, {}) for i in range(self.count)]
            elif own:
                named.update(own[0])
            outputs = self.unit(x, *extra, **named)
        return outputs if isinstance(outputs, tuple) else (outputs,)


_HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}


class Cut:
    """The parts of `run`, whose units at the positions `hooked` stand alone, and why they do."""

    def __init__(self, run: Prepared, hooked: tuple[int, ...]) -> None:
        self.reasons = _reasons(run, hooked)
        self.parts = _parts(run, hooked)


def _reasons(run: Prepared, hooked: tuple[int, ...]) -> list[str]:
    if run.owner is None and any_global_hooks():
        return ["hooks are registered for all modules, so every op runs by itself: nothing fuses across ops"]
    reasons = []
    for index in hooked:
        unit = run.units[index]
        found = [f"a {name}" for module in (unit, *unit.flat_ops()) for field, name in _HOOKS.items() if getattr(module, field)]
        found.append(f"a {own_call(unit)} of its own")
        reasons.append(f"op {index} ({unit._get_name()}) has {found[0]}, so it runs by itself: nothing fuses across it")
    return reasons


def _parts(run: Prepared, hooked: tuple[int, ...]) -> list[Part]:
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
    parts, first = [], 0
    for group in groups:
        units = [run.units[index] for index in group]
        count = sum(len(unit.flat_ops()) for unit in units)
        parts.append(_part(run, units, group[0] in hooked, first, count, readers))
        first += count
    return parts


def _part(
    run: Prepared, units: Sequence[FusibleOperation], alone: bool, first: int, count: int, readers: dict[str, list[int]]
) -> Part:
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
    has_extras = any(inputs or outputs for inputs, outputs in bindings)
    if alone and has_extras:
        _check_passes_on(units[0])
    if alone:
        part_run = OpRun(units[0].flat_ops(), tuple(bindings), owner=units[0]) if has_extras else units[0]._run_alone()
    else:
        part_run = OpRun(units, tuple(bindings), run.required)
    return Part(part_run, units[0] if alone else None, first, count, tuple(arguments), tuple(results))


def _check_passes_on(unit: FusibleOperation) -> None:
    """Channels of a pipeline become arguments and results of a unit that stands alone: its forward is told in an argument."""
    parameters = inspect.signature(unit.forward).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD or parameter.name == "_run" for parameter in parameters):
        raise TypeError(
            f"{unit._get_name()}: expected a forward that takes keyword arguments and passes them on, as the op has extra inputs or outputs, "
            f"got forward{inspect.signature(unit.forward)}. Define forward(self, input, *extra_inputs, **kwargs)."
        )
