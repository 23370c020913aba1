"""A pipeline as an object that shows its plans, for code that is written against transformer_engine's OperationFuser."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from tandem.op_base.base import BasicOpBase, OpBase
from tandem.ops import fused
from tandem.ops.op import FusibleOperation
from tandem.pipelines.prepared import Outputs
from tandem.pipelines.run import OpRun
from tandem.user_ops.fusions import register_backward_fusion, register_forward_backward_fusion, register_forward_fusion

Slot = tuple[int, int]  # index of a basic op, and index of its extra input or output
Planned = list[tuple[OpBase, list[int]]]  # ops, fused or not, each with the indices of its basic ops in order of forward


class OperationFuser:
    """One pipeline of ops, with its channels checked and fixed.

    >>> import torch
    >>> from tandem import ops
    >>> from tandem.ops.fuser import OperationFuser
    >>> fuser = OperationFuser([ops.Linear(8, 8), ops.GELU()])
    >>> fuser(torch.randn(2, 8)).shape
    torch.Size([2, 8])
    >>> [(type(op).__name__, covered) for op, covered in fuser._forward_ops]
    [('ForwardLinearBiasActivation', [0, 1, 2])]
    """

    def __init__(self, ops: Iterable[FusibleOperation]) -> None:
        """Prepares the pipeline; the first call plans it. Raises ValueError if a channel has no earlier producer, or two.

        Args:
            ops: the ops of the pipeline in order; a fused op counts as its basic ops. Other modules raise TypeError.
        """
        listed = list(ops)
        for op in listed:
            if not isinstance(op, FusibleOperation):
                raise TypeError(f"OperationFuser: expected fusible operations, got {type(op).__name__}. Put other modules into a Sequential.")
            op._check_in_container()
        self._run = OpRun(listed)
        self._run.prepare()

    @classmethod
    def _of(cls, run: OpRun) -> OperationFuser:
        """The fuser of a run of a container."""
        fuser = cls.__new__(cls)
        fuser._run = run
        return fuser

    def __call__(
        self, input: torch.Tensor, *extra_inputs: torch.Tensor, basic_op_kwargs: Sequence[Mapping[str, Any]] | None = None
    ) -> Outputs:
        """The output, followed by the extra outputs of which the caller is a reader, if any.

        Args:
            input: x of the first op.
            extra_inputs: one for each extra input of the ops that is not bound to a channel, in order.
            basic_op_kwargs: keyword arguments for the forward of each basic op.
        """
        kwargs = {index: given for index, given in enumerate(basic_op_kwargs or ()) if given}
        return self._run(input, extra_inputs, True, kwargs or None)

    # The ops of the pipeline.

    @property
    def _basic_ops(self) -> list[BasicOpBase]:
        return list(self._run.prepare().basic_ops)

    @property
    def _num_basic_ops(self) -> int:
        return len(self._run.prepare().basic_ops)

    @property
    def _basic_op_params(self) -> list[list[torch.nn.Parameter]]:
        return [list(op.parameters()) for op in self._basic_ops]

    @property
    def _basic_op_num_params(self) -> list[int]:
        return [len(params) for params in self._basic_op_params]

    @property
    def _flat_basic_op_params(self) -> list[torch.nn.Parameter]:
        return [param for params in self._basic_op_params for param in params]

    # The connections of extra inputs and outputs.

    @property
    def num_extra_inputs(self) -> int:
        """The number of extra inputs that a call takes: those that are not bound to channels."""
        count: int = self._run.prepare().num_extra_inputs
        return count

    @property
    def _inputs(self) -> list[tuple[str | None, ...]]:
        return [inputs for inputs, _ in self._run.prepare().bindings]

    @property
    def _outputs(self) -> list[tuple[tuple[str | None, bool], ...]]:
        return [outputs for _, outputs in self._run.prepare().bindings]

    @property
    def _basic_op_extra_input_sources(self) -> list[list[Slot | None]]:
        made = {channel: (op, slot) for op, outputs in enumerate(self._outputs) for slot, (channel, _) in enumerate(outputs) if channel is not None}
        return [[None if channel is None else made[channel] for channel in inputs] for inputs in self._inputs]

    @property
    def _basic_op_extra_output_channels(self) -> list[list[str | None]]:
        return [[channel for channel, _ in outputs] for outputs in self._outputs]

    @property
    def _basic_op_extra_output_to_caller(self) -> list[list[bool]]:
        return [[to_caller for _, to_caller in outputs] for outputs in self._outputs]

    @property
    def _basic_op_extra_output_consumers(self) -> list[list[list[Slot]]]:
        readers = [(source, (op, slot)) for op, sources in enumerate(self._basic_op_extra_input_sources) for slot, source in enumerate(sources)]
        return [
            [[reader for source, reader in readers if source == (op, slot)] for slot in range(len(outputs))]
            for op, outputs in enumerate(self._outputs)
        ]

    @property
    def _external_extra_input_slots(self) -> list[Slot]:
        return [(op, slot) for op, inputs in enumerate(self._inputs) for slot, channel in enumerate(inputs) if channel is None]

    @property
    def _public_extra_output_slots(self) -> list[Slot]:
        return [(op, slot) for op, outputs in enumerate(self._outputs) for slot, (_, to_caller) in enumerate(outputs) if to_caller]

    # The plan.

    @property
    def _forward_ops(self) -> Planned:
        return self._planned("forward")

    @property
    def _backward_ops(self) -> Planned:
        return self._planned("backward")

    def _planned(self, direction: str) -> Planned:
        """The ops of one direction as the last plan runs them. Raises AttributeError before the first call."""
        called = self._run.called_pipelines()
        if not called:
            raise AttributeError(f"OperationFuser: expected a pipeline that has been called, got one without a plan. Call it before _{direction}_ops is read.")
        basic_ops = self._run.now.basic_ops
        plan = json.loads(called[-1].explain("json"))["plans"][-1]
        fused_steps: dict[int, tuple[OpBase, list[int]]] = {}
        for step in plan.get(direction, ()):
            covered = sorted({int(label.partition(".")[0]) for label in step["covers"]}) if step["fused"] else []
            # A MakeExtraOutput has no step in backward, because a fused step adds its two gradients: that step covers it too.
            if step["kind"].endswith("_backward_add") and covered and basic_ops[max(covered[0] - 1, 0)]._kind == "make_extra_output":
                covered.insert(0, covered[0] - 1)
            if covered:
                shown, covered = self._shown(step["kind"], covered, direction)
                fused_steps[covered[0]] = (shown, covered)
        planned: Planned = []
        taken: set[int] = set()
        for index, op in enumerate(basic_ops):
            if index not in taken:
                planned.append(fused_steps.get(index, (op, [index])))
                taken.update(planned[-1][1])
        return planned

    def _shown(self, name: str, covered: list[int], direction: str) -> tuple[OpBase, list[int]]:
        """The user's or the library's fused op for a step, and the basic ops that it covers. A user's may also cover ops without steps."""
        basic_ops = self._run.now.basic_ops
        for first in range(covered[0] + 1):
            for made, op in list(basic_ops[first].__dict__.get("_fused_ops", {}).items()):
                if made.name == name and made.first == first and made.last >= covered[-1]:
                    return op, [*range(first, made.last + 1)]
        return fused.shown(name, [basic_ops[index] for index in covered], is_backward=direction == "backward"), covered


__all__ = ["OperationFuser", "register_backward_fusion", "register_forward_backward_fusion", "register_forward_fusion"]
