"""A run of ops that is one pipeline: its descriptions, its calls, and how it is cut around ops that have hooks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_compiling

from tandem import _C
from tandem._autocast import active
from tandem.ops import python_op
from tandem.ops.changes import structure

if TYPE_CHECKING:
    from tandem.ops.op import BasicOperation, FusibleOperation

Outputs = torch.Tensor | tuple[torch.Tensor, ...]
Bindings = tuple  # per basic op: (channel of each extra input, (channel, to caller) of each extra output)
Kwargs = Mapping[int, Mapping[str, Any]]  # by basic op


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether calling the module does more than its forward."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def unit_has_hooks(unit: FusibleOperation) -> bool:
    if has_hooks(unit):
        return True
    if unit.is_fused_op:
        for op in unit.flat_ops():
            if has_hooks(op):
                return True
    return False


class OpRun:
    """`units` as one pipeline. `bindings` replace those of the ops: a part of a run that is cut has others."""

    def __init__(
        self,
        units: Sequence[FusibleOperation],
        bindings: Bindings | None = None,
        required: Sequence[str] = (),
        owner: FusibleOperation | None = None,
    ) -> None:
        self.units = tuple(units)
        self.owner = owner  # whose forward this is: its hooks have run already
        self.basic_ops: tuple[BasicOperation, ...] = tuple(op for unit in units for op in unit.flat_ops())
        self.given_bindings = bindings
        self.required = list(required)
        self.training_ops = tuple(op for op in self.basic_ops if op._depends_on_training)
        self.python_ops = tuple(op for op in self.basic_ops if op.is_python_op)
        self.token = ""
        self.pipelines: dict[Any, _C.EagerPipeline] = {}
        self.texts: dict[Any, str] = {}
        self.cuts: dict[Any, Any] = {}
        self.places: tuple[tuple[torch.nn.Module, str], ...] = ()
        self.bindings: Bindings = ()
        self.num_extra_inputs = 0

    def prepare(self) -> None:
        """Captures the ops as they are: locks their channels, drops what was made of them before. Does nothing if nothing changed."""
        if self.token == structure.token:
            return
        for op in self.basic_ops:
            op.lock_channels()
        self.bindings = self.given_bindings or tuple(op.channel_bindings() for op in self.basic_ops)
        self.num_extra_inputs = sum(inputs.count(None) for inputs, _ in self.bindings)
        self.pipelines, self.texts, self.cuts = {}, {}, {}
        places: dict[tuple[int, str], tuple[torch.nn.Module, str]] = {}
        self._params: list[list[int]] = []
        for op in self.basic_ops:
            at = []
            for module, name in op.parameter_places():
                places.setdefault((id(module), name), (module, name))
                at.append(list(places).index((id(module), name)))
            self._params.append(at)
        self.places = tuple(places.values())
        self.pipeline((), True, None)  # errors come before the first tensor
        self.token = structure.token

    def __call__(self, x: torch.Tensor, extra: Sequence[torch.Tensor], training: bool, kwargs: Kwargs | None = None) -> Outputs:
        if is_compiling():
            self.check_count(extra)
            hooked = self.hooked()
            if hooked:
                return self.call_cut(hooked, x, extra, training, kwargs)
            return self.call_op(x, extra, training, kwargs)
        if self.token != structure.token:
            self.prepare()
        self.check_count(extra)
        flags = tuple([op.training for op in self.training_ops])
        pipeline = self.pipelines.get((flags, None)) if kwargs is None else None
        if pipeline is None:
            pipeline = self.pipeline(flags, training, kwargs)
        in_training = self.library_training(flags, training) if flags else training
        outputs = pipeline.call_with_extra(x, list(extra), in_training) if extra else pipeline(x, in_training)
        if outputs is not None:
            return outputs
        hooked = self.hooked()
        return self.call_cut(hooked, x, extra, training, kwargs) if hooked else self.call_op(x, extra, training, kwargs)

    @staticmethod
    def library_training(flags: tuple[bool, ...], training: bool) -> bool:
        """The training flag of the whole pipeline: that of the ops that have one where they agree, else True (see `entries`)."""
        return training if not flags else flags[0] or True in flags

    def called_pipelines(self) -> list[_C.EagerPipeline]:
        """The eager pipelines that have a plan."""
        called = []
        for pipeline in self.pipelines.values():
            try:
                pipeline.explain("json")
            except ValueError:
                continue
            called.append(pipeline)
        return called

    def check_count(self, extra: Sequence[torch.Tensor]) -> None:
        if len(extra) != self.num_extra_inputs:
            raise ValueError(
                f"pipeline: expected {self.num_extra_inputs} extra inputs, one per unbound extra input of its ops, got {len(extra)}. Pass them "
                "after the input, in order."
            )

    def hooked(self) -> tuple[int, ...]:
        """Positions of units that must be called as modules."""
        return tuple([index for index, unit in enumerate(self.units) if unit is not self.owner and unit_has_hooks(unit)])

    def plain_pipeline(self) -> _C.EagerPipeline | None:
        """What a call amounts to where no flag of an op, extra input or output matters."""
        self.prepare()
        return None if self.training_ops or self.num_extra_inputs else self.pipeline((), True, None)

    def pipeline(self, flags: tuple[bool, ...], training: bool, kwargs: Kwargs | None) -> _C.EagerPipeline:
        """The eager pipeline for these training flags of `training_ops` and arguments of Python ops."""
        key = (flags, python_op.kwargs_key(kwargs))
        if key not in self.pipelines:
            modules = {id(module): module for unit in self.units for module in (unit, *unit.flat_ops(), unit._holder)}
            self.pipelines[key] = _C.EagerPipeline(
                json.dumps(self.entries(flags, kwargs, traced=False)),
                [(module._parameters, name) for module, name in self.places],
                [module.__dict__ for module in modules.values()],
                self.required,
            )
        return self.pipelines[key]

    def entries(self, flags: tuple[bool, ...], kwargs: Kwargs | None, *, traced: bool) -> list[dict[str, Any]]:
        """The "ops" of a description. Ops whose training flag differs from that of the others stand as what they are in evaluation."""
        by_op = dict(zip(map(id, self.training_ops), flags, strict=False))
        mixed = len(set(flags)) == 2
        entries = []
        for index, op in enumerate(self.basic_ops):
            inputs, outputs = self.bindings[index]
            if op.is_python_op:
                entry = python_op.entry(op, len(self._params[index]), (kwargs or {}).get(index, {}), traced=traced)
            elif mixed and by_op.get(id(op)) is False:
                entry = {"op": "identity"}
            else:
                entry = {"op": op._kind, "options": op._options()}
            if python_op.any_fusions():
                entry["instance"] = op.instance_id
                python_op.register_instance(op)
            entry["params"] = self._params[index]
            if any(channel is not None for channel in inputs):
                entry["extra_inputs"] = [None if channel is None else {"channel": channel} for channel in inputs]
            if any(channel is not None for channel, _ in outputs):
                entry["extra_outputs"] = [
                    None if channel is None else {"channel": channel, "to_caller": to_caller} for channel, to_caller in outputs
                ]
            is_bound = any(channel is not None for channel in op._extra_input_channels)  # and so written nowhere, cut or not
            if getattr(op, "in_place", False) and not op.is_python_op and not is_bound:
                entry["in_place"] = True
            entries.append(entry)
        return entries

    # Through the dispatcher: under torch.compile, and for parametrized weights.

    def call_op(self, x: torch.Tensor, extra: Sequence[torch.Tensor], training: bool, kwargs: Kwargs | None) -> Outputs:
        if not is_compiling() and self.token != structure.token:
            self.prepare()
        flags = tuple([op.training for op in self.training_ops])
        python_flags = tuple([op.training for op in self.python_ops])
        text = self.text(flags, python_flags, training, active.recipe, structure.token, kwargs)
        params = [getattr(module, name) for module, name in self.places]
        outputs = torch.ops.tandem.pipeline(x, list(extra), params, [], [], [], text)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    @torch._dynamo.assume_constant_result
    def text(
        self,
        flags: tuple[bool, ...],
        python_flags: tuple[bool, ...],
        training: bool,
        recipe: str,
        token: str,
        kwargs: Kwargs | None,
    ) -> str:
        """The description of a call. Depends on nothing but its arguments and what `structure.token` stands for."""
        self.prepare()
        key = (flags, python_flags, training, recipe, token, python_op.kwargs_key(kwargs))
        if key not in self.texts:
            description = {
                "build": _C.build_id(),
                "fusions_version": _C.fusions_version(),
                "ops": self.entries(flags, kwargs, traced=True),
                "python_training": python_flags,
                "recipe": json.loads(recipe),
                "training": self.library_training(flags, training),
            }
            if self.required:
                description["required_fusions"] = self.required
            if python_op.any_fusions():
                description["process"] = python_op.PROCESS
            self.texts[key] = json.dumps(description, sort_keys=True)
        return self.texts[key]

    # Cut around units with hooks.

    @torch._dynamo.assume_constant_result
    def prepare_cut(self, hooked: tuple[int, ...]) -> bool:
        from tandem.ops.cut import parts_of

        self.prepare()
        if hooked not in self.cuts:
            self.cuts[hooked] = parts_of(self, hooked)
        for part in self.cuts[hooked]:
            if part.run is not None:
                part.run.prepare()
        return True

    def call_cut(
        self, hooked: tuple[int, ...], x: torch.Tensor, extra: Sequence[torch.Tensor], training: bool, kwargs: Kwargs | None
    ) -> Outputs:
        self.prepare_cut(hooked)
        channels: dict[str, torch.Tensor] = {}
        results: list[torch.Tensor] = []
        rest = list(extra)
        for part in self.cuts[hooked]:
            given = [rest.pop(0) if channel is None else channels[channel] for channel in part.inputs]
            outputs = part(x, given, training, kwargs)
            x = outputs[0]
            for (channel, to_caller), output in zip(part.outputs, outputs[1:], strict=True):
                if channel is not None:
                    channels[channel] = output
                if to_caller:
                    results.append(output)
        return (x, *results) if results else x
