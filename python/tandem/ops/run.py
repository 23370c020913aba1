"""A run of ops that is one pipeline: how it looks at its ops, and its calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from tandem import _C
from tandem.ops import buffers, foreign, shards
from tandem.ops.changes import Changes, structure
from tandem.ops.cut import Piece, Wiring, pieces, reasons
from tandem.ops.deferred import deferred, materialize
from tandem.ops.joined import JoinedMixin
from tandem.ops.places import places
from tandem.ops.prepared import Bindings, Kwargs, Outputs, Prepared, own_call, wrong_count
from tandem.ops.terms import Terms
from tandem.ops.unit import Unit
from tandem.quantized.parameters import is_shared

Tensors = tuple[torch.Tensor, ...]
NO_EXTRAS: tuple[()] = ()  # the one that there is: asking for it needs no truth value, which a proxy of torch.fx has not
_NOTHING = SimpleNamespace(token=None, captured=None)  # what a run has seen that has never looked


class OpRun:
    """`units` as one pipeline. `bindings` replace those of the ops: a part of a run that is cut has others."""

    def __init__(
        self,
        units: Sequence[Unit],
        bindings: Bindings | None = None,
        terms: Terms = Terms(),
        owner: Unit | None = None,
        changes: Changes | None = None,
        wiring: Wiring | None = None,
    ) -> None:
        self.changes = Changes() if changes is None else changes  # of the units and what they consist of
        self.units = tuple(units)
        self.owner = owner  # whose forward this is: its hooks have run already
        self.given_bindings = bindings if wiring is None else wiring.bindings
        self.wiring = wiring  # of a run of a container which shares channels with others
        self.terms = terms
        self.now: Any = _NOTHING  # the last `Prepared`. Calls take it once

    def prepare(self) -> Prepared:
        """The ops as they are: locks their channels, drops what was made of them before. What it made last if nothing changed.

        Threads may be in here at the same time: what is read changes `token` once it has changed, so what a late one leaves is looked at again.
        """
        token, last = self.changes.token, self.now
        if last.token is token:
            return last
        for unit in (*self.units, self.owner):
            if unit is not None:
                unit._capture(self.changes)
        # Those of an owner are read again: its list may have changed, which a container's run follows by another run.
        units = self.units if self.owner is None else tuple(self.owner.flat_ops())
        ops = tuple(op for unit in units for op in unit.flat_ops()) if self.owner is None else units
        if last is _NOTHING and (self.given_bindings is None or self.wiring is not None):  # and no part of a run that is cut
            for op in ops:
                op.pre_first_fuser_forward()
        own_calls = tuple([None if unit is self.owner else own_call(unit) for unit in units])
        written = [[(id(at), name) for field in ("_parameters", "_buffers") for at, name in places(op, field)] for op in ops if op.is_python_op]
        captured = (structure.fusions, [id(op) for op in ops], [op.changes for op in ops], own_calls, written)
        is_same = captured == last.captured
        now = last if is_same else Prepared(units, ops, self.owner, self.given_bindings, self.terms, own_calls, captured, self.changes)
        now.deferred = deferred([op._holder for op in ops])
        now.token = object() if now.deferred else token  # then the next call looks again
        self.__dict__.update(now=now, token=now.token, products=foreign.own_products(now))  # at once: other threads read them too
        return now

    prepared = property(_C.native_getter(prepare, "changes", "token", "now"))  # as Dynamo sees it

    def __call__(self, x: torch.Tensor, extra: Sequence[torch.Tensor], training: bool, kwargs: Kwargs | None = None) -> Outputs:
        if is_dynamo_compiling():
            now = self.prepared
            now.check_count(extra)
            if now.told_before and not now.hooked():  # parts of a cut tell their own
                now.tell_before(x, extra)
            if now.hooked():
                return self.call_cut(self.prepared_cut.parts, x, extra, training, kwargs)
            if not kwargs and self.prepared_products:
                return self.prepared_pieces(x, training)
            return now.call_op(x, extra, training, kwargs)
        now = self.now
        if now.token is not self.changes.token:
            now = self.prepare()
            if now.deferred and isinstance(x, torch.Tensor) and not x.is_meta:
                materialize(now.deferred, x.device)
                now = self.prepare()
        now.check_count(extra)
        if not now.is_direct:
            if not now.hooked():
                now.tell_before(x, extra)
            if now.has_own_calls:
                return self.call_cut(self.cut(now).parts, x, extra, training, kwargs)
        if now.joined and is_shared(x):
            shards.check_parts(now.joined)
        flags = tuple([op.training for op in now.training_ops])
        written: list[torch.Tensor] = []
        arguments: Any = kwargs
        if kwargs is not None:
            arguments, modes, written = buffers.given(now.basic_ops, kwargs)
            pipeline = now.pipeline(flags, now.modes()._replace(given=modes.given))
        elif now.has_modes:
            pipeline = now.pipeline(flags, now.modes())
        else:
            pipeline = now.pipelines.get(flags)
            if pipeline is None:
                pipeline = now.pipeline(flags)
        in_training = now.library_training(flags, training) if flags else training
        try:
            if kwargs is not None:
                outputs = pipeline.call_with_arguments(x, list(extra), in_training, dict(arguments), written)
            else:
                outputs = pipeline.call_with_extra(x, list(extra), in_training) if extra else pipeline(x, in_training)
        except ValueError:
            self.check_parts()
            raise
        except NotImplementedError as error:
            shards.check_rules(now.basic_ops, error)
            raise
        if outputs is not None:
            return outputs
        for tensor in (x, *extra):
            if not isinstance(tensor, torch.Tensor) and not hasattr(type(tensor), "__torch_function__"):
                raise TypeError(f"pipeline: expected tensors, got {type(tensor).__name__}. Pass its inputs as torch.Tensor.")
        if now.hooked():
            try:
                return self.call_cut(self.cut(now).parts, x, extra, training, kwargs)
            except NotImplementedError as error:
                shards.check_rules(now.basic_ops, error)
                raise
        if not kwargs and foreign.own_products(now):
            return self.own_pieces()(x, training)
        pipeline.check_no_writes(x, list(extra))
        pipeline.note_recipe(in_training)
        return now.call_op(x, extra, training, kwargs)

    def check_parts(self) -> None:
        """To be called where a call has failed: raises ValueError where a parameter that has parts is the reason."""
        for op in self.now.basic_ops:
            if isinstance(op._holder, JoinedMixin):
                op._holder._check_parts()

    @property
    def num_from_caller(self) -> int:
        """How many extra inputs are not those of channels."""
        count: int = self.now.num_extra_inputs
        return count if self.wiring is None else self.wiring.inputs.count(None)

    def take(self, extra: Tensors, channels: dict[str, torch.Tensor]) -> tuple[Tensors, Tensors]:
        """The extra inputs of this run of a container, and what is left of those of the caller."""
        count = self.num_from_caller
        given, rest = extra[:count], extra[count:]
        if self.wiring is None:
            return given, rest
        if len(given) != count:
            readers = zip(self.now.extra_readers(), self.wiring.inputs, strict=True)
            raise ValueError(wrong_count([reader for reader, channel in readers if channel is None], len(given)))
        own = iter(given)
        return tuple([next(own) if channel is None else channels[channel] for channel in self.wiring.inputs]), rest

    def give(self, outputs: Outputs, channels: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Tensors]:
        """The output, and the extra outputs for the caller; the others go to their channels."""
        if not isinstance(outputs, tuple):
            return outputs, ()
        if self.wiring is None:
            return outputs[0], outputs[1:]
        for (channel, _), output in zip(self.wiring.outputs, outputs[1:], strict=True):
            if channel is not None:
                channels[channel] = output
        return outputs[0], tuple([output for (_, to_caller), output in zip(self.wiring.outputs, outputs[1:], strict=True) if to_caller])

    def called_pipelines(self) -> list[_C.EagerPipeline]:
        """The eager pipelines that have a plan."""
        return [pipeline for pipeline in list(self.now.pipelines.values()) if pipeline.has_run()]

    def plain_pipeline(self) -> _C.EagerPipeline | None:
        """What a call amounts to where no flag of an op, extra input or output matters."""
        now = self.prepare()
        if now.training_ops or now.num_extra_inputs or not now.is_direct or now.has_modes or shards.has_parts_of_ranks(now.joined):
            return None
        return now.pipeline(())

    def cut(self, now: Prepared | None = None) -> Cut:
        """What the units with hooks, as they are now, cut this into."""
        now = self.prepare() if now is None else now
        hooked = now.hooked()
        cut: Cut = now.cuts.get(hooked) or now.cuts.setdefault(hooked, Cut(now, hooked))
        for part in cut.parts:
            part.run.prepare()
        return cut

    prepared_cut = property(_C.native_getter(cut))  # as Dynamo sees it

    def own_products(self) -> tuple[int, ...]:
        """Where weights of other libraries multiply by themselves."""
        self.prepare()
        return self.products

    prepared_products = property(_C.native_getter(own_products, "changes", "token", "products"))  # as Dynamo sees it

    def own_pieces(self) -> foreign.Pieces:
        """What products with weights of other libraries cut this into."""
        now = self.prepare()
        found = foreign.pieces(now, foreign.own_products(now), OpRun)
        for part in found.parts:
            part.run.prepare()
        return found

    prepared_pieces = property(_C.native_getter(own_pieces))  # as Dynamo sees it

    def call_cut(
        self,
        parts: list[Part],
        x: torch.Tensor,
        extra: Sequence[torch.Tensor],
        training: bool,
        kwargs: Kwargs | None,
        before: Callable[[Part, torch.Tensor, list[torch.Tensor]], None] | None = None,
    ) -> Outputs:
        """Calls the parts in order, and `before` with each and its inputs."""
        channels: dict[str, torch.Tensor] = {}
        results: list[torch.Tensor] = []
        rest = list(extra)
        product: Unit | None = None  # of whose columns x has those of one rank
        for part in parts:
            product = shards.check_columns(product, part.piece.units, x)
            given = [rest.pop(0) if channel is None else channels[channel] for channel in part.inputs]
            if before is not None:
                before(part, x, given)
            outputs = part(x, given, training, kwargs)
            product = shards.cut_product(product, part.unit, x, outputs[0])
            x = outputs[0]
            for (channel, to_caller), output in zip(part.outputs, outputs[1:], strict=True):
                if channel is not None:
                    channels[channel] = output
                if to_caller:
                    results.append(output)
        return (x, *results) if results else x


class Part:
    """A piece of a run that is cut, as a run of its own."""

    def __init__(self, piece: Piece, terms: Terms) -> None:
        self.piece = piece
        self.inputs, self.outputs = piece.inputs, piece.outputs
        self.unit = piece.units[0] if piece.is_alone else None  # called as a module
        if self.unit is None:
            self.run = OpRun(piece.units, piece.bindings, terms)
        elif any(inputs or outputs for inputs, outputs in piece.bindings):
            _check_passes_on(self.unit)
            self.run = OpRun(self.unit.flat_ops(), piece.bindings, Terms(memory_budget=terms.memory_budget), owner=self.unit)
        else:
            self.run = self.unit._run_alone()

    def __call__(self, x: torch.Tensor, extra: Sequence[torch.Tensor], training: bool, kwargs: Kwargs | None) -> Any:
        first, count = self.piece.first, self.piece.count
        own = {i - first: k for i, k in (kwargs or {}).items() if first <= i < first + count}
        if self.unit is None:
            outputs = self.run(x, extra, training, own or None)
        else:
            named: dict[str, Any] = {"_run": self.run} if self.run.given_bindings is not None else {}
            if own and self.unit.is_fused_op:
                named["basic_op_kwargs"] = [own.get(i, {}) for i in range(count)]
            elif own:
                named.update(own[0])
            outputs = self.unit(x, *extra, **named)
        return outputs if isinstance(outputs, tuple) else (outputs,)


class Cut:
    """The parts of a run whose units at the positions `hooked` stand alone, and why they do."""

    def __init__(self, now: Prepared, hooked: tuple[int, ...]) -> None:
        self.reasons = reasons(now, hooked)
        self.parts = [Part(piece, now.terms) for piece in pieces(now, hooked)]


def _check_passes_on(unit: Unit) -> None:
    """Channels of a pipeline become arguments and results of a unit that stands alone: its forward is told in an argument."""
    parameters = inspect.signature(unit.forward).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD or parameter.name == "_run" for parameter in parameters):
        raise TypeError(
            f"{unit._get_name()}: expected a forward that takes keyword arguments and passes them on, as the op has extra inputs or outputs, "
            f"got forward{inspect.signature(unit.forward)}. Define forward(self, input, *extra_inputs, **kwargs)."
        )
