"""Reports of a container about its pipelines."""

from __future__ import annotations

import contextlib
import functools
import html
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import Self

from tandem import _C, recipe_state
from tandem.op_base.base import OpBase
from tandem.pipelines.joined import are_adjacent
from tandem.pipelines.picture import rendered, step_times
from tandem.pipelines.prepared import Outputs
from tandem.pipelines.run import Cut, OpRun
from tandem.quantized.tensor import QuantizedTensor


@dataclass(frozen=True)
class Verification:
    """The outcome of comparing fused with unfused steps. It is true if they agree.

    Args:
        passed: whether they agree.
        comparisons: number of tensors that were compared.
        text: what was compared, and the first difference.
    """

    passed: bool
    comparisons: int
    text: str

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        return self.text


_FORMATS = ("text", "svg", "html", "dot", "json")


class ReportingMixin:
    """`explain`, `verify` and other reports of a container."""

    def _op_runs(self: Any) -> list[OpRun]:
        return [run for run in self._prepare() if isinstance(run, OpRun)]

    def explain(self, format: str = "text", profile: Any = None) -> str:
        """The plans: steps of both directions, kept values, each fusion made, and each fusion refused with the reason.

        Raises ValueError before the first call, because plans depend on tensors. If ops with hooks divide a pipeline, the report says so and has an entry
        for each piece. It includes plans of compiled code.

        Args:
            format: "text", "svg", "html", "dot" (a graph for Graphviz) or "json" (a list with one entry per pipeline if there are several).
                If Graphviz' program `dot` is installed, it lays out pictures.
            profile: a torch.profiler.profile of calls, or a dict from names of steps to microseconds, which pictures show.
        """

        def runs() -> Iterator[tuple[str, OpRun]]:  # the container is prepared when this is iterated, behind the checks of arguments
            yield from [("", run) for run in self._op_runs()]

        found = _explained(runs(), format, profile)
        if not found:
            raise ValueError("explain: expected a container that has been called, got one without calls. Call it once with an input.")
        return found

    def _repr_html_(self) -> str:
        try:
            return self.explain("html")
        except ValueError:
            return f"<pre>{self!r}</pre>"

    def verify(self: Any, x: torch.Tensor, *extra_inputs: torch.Tensor, masks: int = 8) -> Verification:
        """Runs fused and unfused steps on these tensors and compares outputs and gradients: of all inputs, and of `masks` random subsets.
        For each subset it also compares fused steps on inputs and gradients with other memory layouts: permuted, and with gaps.

        If ops with hooks divide a pipeline, the report says so, and its pieces are compared.
        """
        outcomes: list[_C.VerifyReport | Verification] = []

        def call(run: OpRun, x: torch.Tensor, given: Sequence[torch.Tensor], training: bool, _: Any) -> Outputs:
            return _verified(run, x, given, training, masks, outcomes)

        self._walk(self._prepare(), x, extra_inputs, None, call)
        return _together(outcomes)

    def require_fusion(self: Any, names: str | Iterable[str]) -> Self:
        """Makes every call raise an error with the reason if one of these fusions is not made."""
        self._terms = self._terms._replace(required=(names,) if isinstance(names, str) else tuple(names))
        self._forget()
        return self

    def saved_bytes(self) -> int:
        """Bytes that the last call with grad keeps for backward, without inputs and parameters. Raises ValueError if all calls were compiled,
        because their compiler chooses what is kept."""
        runs = [part for run in self._op_runs() for part in (run.cut().runs if run.now.hooked() else [run])]
        called = [pipeline for run in runs for pipeline in run.called_pipelines()[-1:]]
        if not called and any(run.now.descriptions for run in runs):
            raise ValueError(
                "saved_bytes: expected a container that has been called, got one with compiled calls only, whose compiler chooses what is "
                "kept. Call it once without torch.compile."
            )
        return sum(pipeline.saved_bytes() for pipeline in called)

    def fusions_made(self) -> list[str]:
        """Names of the fusions that any plan so far has made, including plans of pieces and of compiled code."""
        return sorted({name for run in self._op_runs() for name in _fusions(run)})


def runs_inside(module: torch.nn.Module, name: str = "") -> Iterator[tuple[str, OpRun]]:
    """The pipelines that calls of a module have created, each with the module path of its owner."""
    if isinstance(module, OpBase):
        if run := module.__dict__.get("_alone"):
            yield name, run
        return
    if isinstance(module, ReportingMixin):
        runs: Any = module._made[3] or ()  # type: ignore[attr-defined]
        yield from ((name, run) for run in runs if isinstance(run, OpRun))
    for own, child in module.named_children():
        if not (isinstance(module, ReportingMixin) and isinstance(child, OpBase)):
            yield from runs_inside(child, f"{name}.{own}" if name else own)
    for own, container in getattr(module, "_hidden_containers", dict)().items():
        yield from runs_inside(container, f"{name}.{own}" if name else own)


def explained(module: torch.nn.Module, format: str, profile: Any) -> str:
    """The plans of a module that is no container, and of the modules inside it."""
    found = _explained(runs_inside(module), format, profile)
    if not found:
        raise ValueError(f"explain: expected a module with pipelines that have been called, got {module._get_name()} without. {_what_to_do(module)}")
    return found


def _explained(runs: Iterable[tuple[str, OpRun]], format: str, profile: Any) -> str:
    """The plans of runs, each with the module path of its owner; empty before their first call."""
    if format not in _FORMATS:
        raise ValueError(f'explain: expected format "text", "svg", "html", "dot" or "json", got "{format}". Name one of them.')
    times = step_times(profile)
    entries: list[str] = []
    for name, run in runs:
        reports = _reports(run, format, times)
        if reports and name and format in ("text", "html"):
            entries.append(f"{name}:" if format == "text" else f"<h4>{html.escape(name)}</h4>")
        entries += reports
    if format == "json" and len(entries) > 1:
        return f"[{','.join(entries)}]"
    return "\n".join(entries)


def _what_to_do(module: torch.nn.Module) -> str:
    if is_skipped(module):
        return f"No graph of it has reached the backend: {SKIPPED}"
    if not any(True for _ in (*module.parameters(), *module.buffers())):
        return "Compiled graphs are known by the parameters and buffers that they read, and it has none."
    if any(each._compiled_call_impl is not None or hasattr(each, "_orig_mod") for each in module.modules()):
        return (
            "Call it once with an input. If it was called, either its graphs read other tensors than its parameters, as under FSDP1 and "
            "torch.func.functional_call, or Dynamo has handed no graph of it to the backend, and TORCH_LOGS=graph_breaks tells why."
        )
    return "Call it once with an input."


SKIPPED = "Dynamo skips the forward of torch.nn's own classes where model.compile compiles them in place. Call what tandem.compile(model) returns."


def is_skipped(module: torch.nn.Module) -> bool:
    """Whether a module is compiled in place and has a forward of torch.nn, which Dynamo before torch 2.14 skips for every backend."""
    return module._compiled_call_impl is not None and type(module).forward.__module__.startswith("torch.nn.") and torch.__version__ < "2.14"


def verified(module: torch.nn.Module, x: torch.Tensor, extra: Sequence[torch.Tensor], masks: int) -> Verification:
    """Compares fused with unfused steps of a container, an op, or a module with `_calls_of_parts`. Raises TypeError for other modules."""
    if isinstance(module, OpBase):
        outcomes: list[_C.VerifyReport | Verification] = []
        _verified(module._run_alone(), x, extra, module.training, masks, outcomes)
        return _together(outcomes)
    if isinstance(module, ReportingMixin):
        return module.verify(x, *extra, masks=masks)
    if not hasattr(module, "_calls_of_parts"):
        raise TypeError(f"verify: expected a container, an op or a module of this library, got {module._get_name()}. Put the ops into a Sequential.")
    parts = [(part, given) for part, *given in module._calls_of_parts(x, *extra) if isinstance(part, (OpBase, ReportingMixin))]
    return _together([verified(part, given[0], given[1:], masks) for part, given in parts])


def _together(outcomes: Sequence[Any]) -> Verification:
    passed = all(outcome.passed for outcome in outcomes)
    return Verification(passed, sum(outcome.comparisons for outcome in outcomes), "\n".join(outcome.text for outcome in outcomes))


def _reports(run: OpRun, format: str, times: dict[str, float]) -> list[str]:
    reports = [rendered(pipeline.explain, format, times) for pipeline in run.called_pipelines()]
    for description, _ in list(run.now.descriptions.values()):
        with contextlib.suppress(ValueError):  # raised if no call has used the description
            given = list(vars(run.now.held_workspaces).values())
            explain = functools.partial(_C.explain_description, description, workspaces=[tensors for tensors in given if isinstance(tensors, list)])
            reports.append(rendered(explain, format, times))
    if reports:
        reports += _lines(_apart(run), format)
    for cut in list(run.now.cuts.values()):
        parts = [report for part in cut.runs for report in _reports(part, format, times)]
        if parts:
            reports += [*_cut_report(cut, format), *parts]
    return reports


def _apart(run: OpRun) -> list[str]:
    """Messages about operands that each call copies because their parts are not adjacent in memory."""
    texts = []
    for op in run.now.joined:
        for operand, names in op.__dict__["_joined"].items():
            parts = op._parts_of(operand)
            is_apart = _C.are_multiplied_apart(parts)  # in 16 bits only the products of forward read each part where it lies
            if any(isinstance(part, QuantizedTensor) or part.is_meta for part in parts) or are_adjacent(parts) or (is_apart and parts[0].itemsize > 2):
                continue
            texts.append(
                f"each {'backward' if is_apart else 'call'} copies {', '.join(names)} into one {operand}, as they lie apart in memory. Move their module "
                "with .to(device), if only to where it is: that lays them together."
            )
    return texts


def _cut_report(cut: Cut, format: str) -> list[str]:
    if format == "json":
        return [json.dumps({"cut": cut.reasons, "plans": []})]
    return _lines([f"cut into {len(cut.runs)} pipeline{'s' * (len(cut.runs) != 1)}: {reason}" for reason in cut.reasons], format)


def _lines(lines: list[str], format: str) -> list[str]:
    if format == "html":
        return [f"<p>{html.escape(line)}</p>" for line in lines]
    return lines if format == "text" else []


def _fusions(run: OpRun) -> set[str]:
    names = {name for pipeline in run.called_pipelines() for name in pipeline.fusions_made()}
    names.update(name for description, _ in list(run.now.descriptions.values()) for name in _C.fusions_of_description(description))
    return names.union(*(_fusions(part) for cut in list(run.now.cuts.values()) for part in cut.runs))


def _verified(
    run: OpRun, x: torch.Tensor, extra: Sequence[torch.Tensor], training: bool, masks: int, outcomes: list[_C.VerifyReport | Verification]
) -> Outputs:
    """The outputs of a run, whose pipelines are verified on the way."""

    def check(part: OpRun, x: torch.Tensor, given: Sequence[torch.Tensor]) -> None:
        now = part.prepare()
        flags = tuple(op.training for op in now.training_ops)
        pipeline = now.pipeline(flags)
        outcomes.append(pipeline.verify([x, *given], now.library_training(flags, training), masks))

    run.now.check_count(extra)
    with recipe_state.unchanged([owner for owner, _, _ in run.now.state_owners]):
        if not run.now.hooked():
            check(run, x, extra)
            return run(x, extra, training)
        cut = run.cut()
        outcomes.append(Verification(True, 0, "\n".join(_cut_report(cut, "text"))))
        return run.call_cut(cut, x, extra, training, None, check)
