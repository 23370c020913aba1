"""A run of ops that is one pipeline: how it reads its ops, and how it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from tandem import _C
from tandem.op_base.base import OpBase
from tandem.op_base.changes import Changes, structure
from tandem.op_base.deferred import deferred, materialize
from tandem.op_base.places import places
from tandem.pipelines import buffers, foreign, shards
from tandem.pipelines.cut import Tensors, Wiring, reasons, wirings
from tandem.pipelines.joined import JoinedMixin
from tandem.pipelines.prepared import Bindings, Kwargs, Outputs, Prepared, Terms, own_call, wrong_count
from tandem.quantized.parameters import is_shared

NO_EXTRAS: tuple[()] = ()  # the empty tuple is one object: comparing by `is` needs no truth value, which a proxy of torch.fx lacks
_NOTHING = SimpleNamespace(token=None, captured=None)  # in the place of a `Prepared` before the first `prepare`


class OpRun:
    """Runs `ops` as one pipeline. `bindings` replace those of the ops, because a piece of a divided run has others."""

    def __init__(
        self,
        ops: Sequence[OpBase],
        bindings: Bindings | None = None,
        terms: Terms = Terms(),
        owner: OpBase | None = None,
        changes: Changes | None = None,
    ) -> None:
        self.changes = Changes() if changes is None else changes  # notified about the ops and their parts
        self.ops = tuple(ops)
        self.owner = owner  # the module whose forward runs this; its hooks have run already
        self.given_bindings = bindings
        self.wiring: Wiring | None = None  # connects a run of a container with other runs by channels
        self.terms = terms
        self.now: Any = _NOTHING  # the last `Prepared`; each call reads it once

    def prepare(self) -> Prepared:
        """Reads the ops as they are now and fixes their channels. Returns the last `Prepared` if nothing changed, otherwise a new one.

        Several threads may run this at once. A change sets `token` after it is made, so a thread that has read an old state leaves an old token,
        and the next call reads the ops anew.
        """
        token, last = self.changes.token, self.now
        if last.token is token:
            return last
        for op in (*self.ops, self.owner):
            if op is not None:
                op._capture(self.changes)
        # An owner's list of ops may change, so it is read here. A container instead creates another run when its list changes.
        ops = self.ops if self.owner is None else tuple(self.owner.flat_ops())
        basic_ops = tuple(basic_op for op in ops for basic_op in op.flat_ops()) if self.owner is None else ops
        if last is _NOTHING and (self.given_bindings is None or self.wiring is not None):  # excludes pieces of a divided run
            for op in basic_ops:
                op.pre_first_fuser_forward()
        own_calls = tuple([None if op is self.owner else own_call(op) for op in ops])
        written = [[(id(at), name) for field in ("_parameters", "_buffers") for at, name in places(op, field)] for op in basic_ops if op.is_python_op]
        captured = (structure.fusions, [id(op) for op in basic_ops], [op.changes for op in basic_ops], own_calls, written)
        is_same = captured == last.captured
        now = last if is_same else Prepared(ops, basic_ops, self.owner, self.given_bindings, self.terms, own_calls, captured, self.changes)
        now.deferred = deferred([op._holder for op in basic_ops])
        now.products = foreign.own_products(now)
        now.token = object() if now.deferred else token  # a token that never matches makes the next call prepare again
        self.__dict__.update(now=now, token=now.token)  # in one step, because other threads read both
        return now

    prepared = property(_C.native_getter(prepare, "changes", "token", "now"))  # for Dynamo

    def __call__(self, x: torch.Tensor, extra: Sequence[torch.Tensor], training: bool, kwargs: Kwargs | None = None) -> Outputs:
        if is_dynamo_compiling():
            now = self.prepared
            now.check_count(extra)
            if now.notified_ops and not now.hooked():  # pieces notify their own ops
                now.notify(x, extra)
            if now.hooked() or not kwargs and now.products:
                return self.call_cut(self.prepared_cut, x, extra, training, kwargs)
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
                now.notify(x, extra)
            if now.has_own_calls:
                return self.call_cut(self.cut(now), x, extra, training, kwargs)
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
        if now.hooked() or not kwargs and foreign.own_products(now):
            try:
                return self.call_cut(self.cut(now), x, extra, training, kwargs)
            except NotImplementedError as error:
                shards.check_rules(now.basic_ops, error)
                raise
        pipeline.check_no_writes(x, list(extra))
        pipeline.note_recipe(in_training)
        return now.call_op(x, extra, training, kwargs)

    def check_parts(self) -> None:
        """Raises ValueError if a parameter that has parts explains why a call failed. Callers use it after a failed call."""
        for op in self.now.basic_ops:
            if isinstance(op._holder, JoinedMixin):
                op._holder._check_parts()

    @property
    def num_from_caller(self) -> int:
        """The number of extra inputs that do not come from channels."""
        count: int = self.now.num_extra_inputs
        return count if self.wiring is None else self.wiring.inputs.count(None)

    def take(self, extra: Tensors, channels: dict[str, torch.Tensor]) -> tuple[Tensors, Tensors]:
        """The extra inputs of this run, from the caller and from channels, and the caller's remaining ones. Raises ValueError if too few are left."""
        count = self.num_from_caller
        if self.wiring is None:
            return extra[:count], extra[count:]
        if len(extra) < count:
            readers = zip(self.now.extra_readers(), self.wiring.inputs, strict=True)
            raise ValueError(wrong_count([reader for reader, channel in readers if channel is None], len(extra)))
        return self.wiring.take(extra, channels)

    def give(self, outputs: Outputs, channels: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Tensors]:
        """The output, and the extra outputs for the caller. Stores the other extra outputs in `channels`."""
        if not isinstance(outputs, tuple):
            return outputs, ()
        return outputs[0], outputs[1:] if self.wiring is None else self.wiring.give(outputs[1:], channels)

    def called_pipelines(self) -> list[_C.EagerPipeline]:
        """The eager pipelines that have a plan."""
        return [pipeline for pipeline in list(self.now.pipelines.values()) if pipeline.has_run()]

    def plain_pipeline(self) -> _C.EagerPipeline | None:
        """The eager pipeline that a call amounts to if no training flag, extra input or extra check matters; None otherwise."""
        now = self.prepare()
        if now.training_ops or now.num_extra_inputs or not now.is_direct or now.has_modes or shards.has_parts_of_ranks(now.joined):
            return None
        return now.pipeline(())

    def cut(self, now: Prepared | None = None) -> Cut:
        """The parts into which ops with hooks or, without any, products whose weights multiply by themselves divide this run, as they are now."""
        now = self.prepare() if now is None else now
        hooked = now.hooked()
        key = (hooked, () if hooked else foreign.own_products(now))
        cut: Cut = now.cuts.get(key) or now.cuts.setdefault(key, Cut(now, *key))
        for run in cut.runs:
            run.prepare()
        return cut

    prepared_cut = property(_C.native_getter(cut))  # for Dynamo

    def call_cut(
        self,
        cut: Cut,
        x: torch.Tensor,
        extra: Sequence[torch.Tensor],
        training: bool,
        kwargs: Kwargs | None,
        before: Callable[[OpRun, torch.Tensor, Tensors], None] | None = None,
    ) -> Outputs:
        """Calls the parts in order. `before` is called before each part that is a run, with the run and its inputs."""
        channels: dict[str, torch.Tensor] = {}
        results: list[torch.Tensor] = []
        rest = tuple(extra)
        product: OpBase | None = None  # the product of whose columns x has one rank's
        for part in cut.parts:
            product = shards.check_columns(product, part.ops, x)
            given, rest = part.wiring.take(rest, channels)
            if before is not None and part.run is not None:
                before(part.run, x, given)
            outputs = part(x, given, training, kwargs)
            product = shards.cut_product(product, part.op, x, outputs[0])
            x = outputs[0]
            results.extend(part.wiring.give(outputs[1:], channels))
        return (x, *results) if results else x


@dataclass(frozen=True)
class Part:
    """A part of a divided run: consecutive ops as a run of their own, an op that is called as a module, or a product that its weight computes."""

    ops: Sequence[OpBase]
    first: int  # index of the first basic op
    wiring: Wiring
    op: Any  # the op that runs alone, if it does
    run: OpRun | None  # None for a product

    def __call__(self, x: torch.Tensor, extra: Tensors, training: bool, kwargs: Kwargs | None) -> Any:
        if self.run is None:
            return (torch.nn.functional.linear(x, self.op.weight),)
        count = len(self.wiring.bindings)
        own = {i - self.first: k for i, k in (kwargs or {}).items() if self.first <= i < self.first + count}
        if self.op is None:
            outputs = self.run(x, extra, training, own or None)
        else:
            named: dict[str, Any] = {"_run": self.run} if self.run.given_bindings is not None else {}
            if own and self.op.is_fused_op:
                named["basic_op_kwargs"] = [own.get(i, {}) for i in range(count)]
            elif own:
                named.update(own[0])
            outputs = self.op(x, *extra, **named)
        return outputs if isinstance(outputs, tuple) else (outputs,)


class Cut:
    """The parts of a run if the ops at the indices `hooked` run alone or else the products at the indices `products`, and the reasons."""

    def __init__(self, now: Prepared, hooked: tuple[int, ...], products: tuple[int, ...]) -> None:
        self.reasons = foreign.reasons(now, products) if products else reasons(now, hooked)
        ops, alone = (now.basic_ops, products) if products else (now.ops, hooked)
        groups: list[list[int]] = []
        for index in range(len(ops)):
            if index in alone or index - 1 in alone or not groups:
                groups.append([])
            groups[-1].append(index)
        counts = [len(group) if products else sum(len(ops[index].flat_ops()) for index in group) for group in groups]
        bounds = list(accumulate(counts, initial=0))
        wired = wirings([now.bindings[first:end] for first, end in pairwise(bounds)])
        self.parts: list[Part] = []
        for group, first, wiring in zip(groups, bounds, wired, strict=False):
            own = [ops[index] for index in group]
            if group[0] not in alone:
                run = OpRun(own, wiring.bindings, now.terms._replace(required=()) if products else now.terms)
                self.parts.append(Part(own, first, wiring, None, run))
            else:
                self.parts.append(Part(own, first, wiring, own[0], None if products else _run_alone(own[0], wiring, now.terms)))
        self.runs = [part.run for part in self.parts if part.run is not None]


def _run_alone(op: OpBase, wiring: Wiring, terms: Terms) -> OpRun:
    """The run of an op that is called as a module."""
    if not any(inputs or outputs for inputs, outputs in wiring.bindings):
        run: OpRun = op._run_alone()
        return run
    _check_passes_on(op)
    return OpRun(op.flat_ops(), wiring.bindings, Terms(memory_budget=terms.memory_budget), owner=op)


def _check_passes_on(op: OpBase) -> None:
    """Raises TypeError if the forward of an op that runs alone cannot take `_run`, by which it learns that channels became arguments and results."""
    parameters = inspect.signature(op.forward).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD or parameter.name == "_run" for parameter in parameters):
        raise TypeError(
            f"{op._get_name()}: expected a forward that takes keyword arguments and passes them on, as the op has extra inputs or outputs, "
            f"got forward{inspect.signature(op.forward)}. Define forward(self, input, *extra_inputs, **kwargs)."
        )
