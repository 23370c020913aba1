"""What a container tells about its pipelines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import Self

from tandem.ops.run import OpRun


@dataclass(frozen=True)
class Verification:
    """The outcome of comparing fused with unfused. True if they agree."""

    passed: bool
    comparisons: int  # tensors compared
    text: str

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        return self.text


class ReportingMixin:
    """`explain`, `verify` and what belongs to them."""

    def _op_runs(self: Any) -> list[OpRun]:
        self._prepare()
        return [run for run in self._runs if isinstance(run, OpRun)]

    def explain(self, format: str = "text") -> str:
        """What was planned: steps of both directions, what is kept, each fusion made and each refused, with the reason.

        `format`: "text", "svg", "html" or "json" (a list with one entry per pipeline, where there are several). Call the container first:
        plans depend on tensors.
        """
        reports = [pipeline.explain(format) for run in self._op_runs() for pipeline in run.called_pipelines()]
        if not reports:
            raise ValueError("explain: expected a container that has been called, got one without calls. Call it once with an input.")
        if format == "json":
            return reports[0] if len(reports) == 1 else f"[{','.join(reports)}]"
        return "\n".join(reports)

    def _repr_html_(self) -> str:
        try:
            return self.explain("html")
        except ValueError:
            return f"<pre>{self!r}</pre>"

    def verify(self: Any, x: torch.Tensor, *extra_inputs: torch.Tensor, masks: int = 8) -> Verification:
        """Runs fused and unfused on the same tensors and compares outputs and gradients: all of them, and `masks` random subsets."""
        passed, comparisons, texts, rest = True, 0, [], extra_inputs
        self._prepare()
        for run in self._runs:
            if not isinstance(run, OpRun):
                x = run(x)
                continue
            given, rest = rest[: run.num_extra_inputs], rest[run.num_extra_inputs :]
            run.check_count(given)
            flags = tuple(op.training for op in run.training_ops)
            pipeline = run.pipeline(flags, self.training, None)
            outcome = pipeline.verify([x, *given], run.library_training(flags, self.training), masks)
            passed, comparisons = passed and outcome[0], comparisons + outcome[1]
            texts.append(outcome[2])
            outputs = run(x, given, self.training)
            x = outputs[0] if isinstance(outputs, tuple) else outputs
        return Verification(passed, comparisons, "\n".join(texts))

    def require_fusion(self: Any, names: str | Iterable[str]) -> Self:
        """Makes it an error, with the reason, if one of these fusions is not made."""
        self._required = (names,) if isinstance(names, str) else tuple(names)
        self._forget()
        return self

    def saved_bytes(self) -> int:
        """Bytes that the last call with grad keeps for backward, inputs and parameters aside."""
        return sum(pipeline.saved_bytes() for run in self._op_runs() for pipeline in run.called_pipelines()[-1:])

    def fusions_made(self) -> list[str]:
        """Names of the fusions that any plan so far has made."""
        return sorted({name for run in self._op_runs() for pipeline in run.called_pipelines() for name in pipeline.fusions_made()})
