"""The container: a list of modules in which each run of fusible ops is a pipeline."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, overload

import torch
from torch.compiler import is_dynamo_compiling
from typing_extensions import Self

from tandem import _C
from tandem.arguments import whole
from tandem.op_base.changes import Changes, capture, watch
from tandem.ops.fuser import OperationFuser
from tandem.ops.op import FusibleOperation
from tandem.pipelines.buffers import check_takes
from tandem.pipelines.cut import wirings
from tandem.pipelines.prepared import Outputs, Terms
from tandem.pipelines.reporting import ReportingMixin
from tandem.pipelines.run import NO_EXTRAS, OpRun
from tandem.regions.memory_budget import budget_text
from tandem.tracing import extras_of_fx_root

Runs = list[OpRun | torch.nn.Module]
_NOTHING = Changes()
_NOTHING_MADE = {"_made": (_NOTHING, None, None, None, ()), "_changes": None, "_token": None, "_runs": None}  # calls read the first, Dynamo the others


class Sequential(ReportingMixin, torch.nn.Module):
    """Runs modules one after another. Consecutive fusible operations are planned as one pipeline; other modules run between pipelines.

    A call takes the extra inputs after the input, in the order of the ops that read them, and returns the extra outputs after the output, in the
    order of the ops that write them. A channel connects ops across modules that are no ops.

    >>> import torch
    >>> from tandem import ops
    >>> mlp = ops.Sequential(ops.RMSNorm(8), ops.Linear(8, 32), ops.SwiGLU(), ops.Linear(16, 8))
    >>> mlp(torch.randn(2, 8)).shape
    torch.Size([2, 8])
    >>> mlp[1], len(mlp[1:])
    (Linear(in_features=8, out_features=32, bias=True), 3)
    """

    _made: Any = _NOTHING_MADE["_made"]  # for copies, whose state lacks it

    def __init__(self, *args: torch.nn.Module | Mapping[str, torch.nn.Module], memory_budget: float | None = None) -> None:
        """Makes a container.

        Args:
            args: modules in order, or one mapping of names to modules.
            memory_budget: bytes that each of its pipelines may keep for backward per row of its main input; None: as `tandem.memory_budget` says.
        """
        super().__init__()
        watch(self)
        self._terms = Terms(memory_budget=budget_text(memory_budget))
        self._forget()
        if len(args) == 1 and isinstance(args[0], Mapping):
            for name, module in args[0].items():
                self.add_module(name, module)
        else:
            self.extend(args)

    @property
    def memory_budget(self) -> float | None:
        """Bytes that each pipeline of this container may keep for backward per row of its main input; None: as `tandem.memory_budget` says."""
        return float(self._terms.memory_budget) if self._terms.memory_budget else None

    @memory_budget.setter
    def memory_budget(self, bytes_per_row: float | None) -> None:
        self._terms = self._terms._replace(memory_budget=budget_text(bytes_per_row))
        self._forget()

    # The list.

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_modules":  # torch.nn.DataParallel assigns it on a replica
            self._forget()
        super().__setattr__(name, value)

    @overload
    def __getitem__(self, index: int) -> torch.nn.Module: ...
    @overload
    def __getitem__(self, index: slice) -> Sequential: ...
    def __getitem__(self, index: int | slice) -> torch.nn.Module:
        """The module at an index. A slice returns a new container that shares the modules, with the names 0, 1, 2, ..."""
        if isinstance(index, slice):
            return type(self)(*list(self)[index])
        return self._modules[self._name_at(index)]

    def __setitem__(self, index: int | slice, module: torch.nn.Module | Iterable[torch.nn.Module]) -> None:
        if not isinstance(index, slice):
            setattr(self, self._name_at(index), _checked(module))
            return
        modules = [_checked(item) for item in module]
        names = list(self._modules)[index]
        if len(names) == len(modules):
            for name, item in zip(names, modules, strict=True):
                setattr(self, name, item)
            return
        replaced = list(self._modules.values())
        replaced[index] = modules  # raises the error of a list if an extended slice does not fit
        self._modules.clear()
        self._modules.update({str(position): item for position, item in enumerate(replaced)})

    def __delitem__(self, index: int | slice) -> None:
        names = list(self._modules)[index] if isinstance(index, slice) else [self._name_at(index)]
        for name in names:
            delattr(self, name)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[torch.nn.Module]:
        return iter(self._modules.values())

    def __add__(self, other: Iterable[torch.nn.Module]) -> Sequential:
        if not isinstance(other, Iterable):
            return NotImplemented
        return type(self)(*self, *other)

    def __iadd__(self, other: Iterable[torch.nn.Module]) -> Self:
        return self.extend(other)

    def append(self, module: torch.nn.Module) -> Self:
        """Adds a module at the end."""
        numbers = [int(name) for name in self._modules if name.isdigit()]
        self.add_module(str(max(numbers, default=-1) + 1), _checked(module))
        return self

    def extend(self, modules: Iterable[torch.nn.Module]) -> Self:
        """Adds modules at the end."""
        for module in list(modules):
            self.append(module)
        return self

    def insert(self, index: int, module: torch.nn.Module) -> Self:
        """Adds a module before an index. Names keep their positions, and the last module gets a new name."""
        modules = list(self)
        modules.insert(index, _checked(module))
        self.append(modules[-1])
        for name, item in zip(list(self._modules), modules, strict=True):
            self._modules[name] = item
        return self

    def pop(self, index: int | slice = -1) -> torch.nn.Module:
        """Removes and returns the module at an index, or the modules of a slice."""
        module = self[index]
        del self[index]
        return module

    def _name_at(self, index: int) -> str:
        position = operator.index(index)
        if not -len(self) <= position < len(self):
            raise IndexError(f"Sequential: expected an index in [{-len(self)}, {len(self)}), got {position}. It has {len(self)} modules.")
        return list(self._modules)[position]

    # The call.

    def forward(
        self,
        input: torch.Tensor,
        *extra_inputs: torch.Tensor,
        op_kwargs: Mapping[FusibleOperation | int, Mapping[str, Any]] | None = None,
    ) -> Outputs:
        """The output, followed by the extra outputs if there are any.

        Args:
            input: x of the first module.
            extra_inputs: one for each extra input of the ops that is not bound to a channel, in order; ValueError if there are more or fewer.
            op_kwargs: by op, or by index in this container: keyword arguments for the forward of an op in Python, or tensors that a `GroupedLinear`
                writes ("output", "grad_input").
        """
        if is_dynamo_compiling():
            runs = self._prepared_runs
        else:
            changes, token, pipeline, runs, _ = self._made
            if token is not changes.token:
                runs = self._prepare()
            elif pipeline is not None and extra_inputs is NO_EXTRAS and op_kwargs is None:
                try:
                    outputs = pipeline(input, self.training)
                except ValueError:
                    runs[0].check_parts()
                    raise
                if outputs is not None:
                    return outputs
            if type(extra_inputs) is not tuple:
                count = sum(run.num_from_caller for run in runs if isinstance(run, OpRun))
                extra_inputs, op_kwargs = extras_of_fx_root(extra_inputs, count, op_kwargs), None
        if len(runs) == 1 and op_kwargs is None:
            run = runs[0]
            if isinstance(run, OpRun):
                return run(input, extra_inputs, self.training)
        return self._walk(runs, input, extra_inputs, op_kwargs)

    def _walk(
        self,
        runs: Runs,
        x: torch.Tensor,
        extra: tuple[torch.Tensor, ...],
        op_kwargs: Mapping[Any, Any] | None,
        call: Callable[..., Outputs] = OpRun.__call__,
    ) -> Outputs:
        """Calls the modules in order, pipelines by `call`."""
        kwargs = self._kwargs_by_run(runs, op_kwargs) if op_kwargs else {}
        results: list[torch.Tensor] = []
        channels: dict[str, torch.Tensor] = {}  # from run to run
        for position, run in enumerate(runs):
            if not isinstance(run, OpRun):
                x = run(x)
                continue
            given, extra = run.take(extra, channels)
            x, own = run.give(call(run, x, given, self.training, kwargs.get(position)), channels)
            results.extend(own)
        if extra:
            expected = sum(run.num_from_caller for run in self._prepare() if isinstance(run, OpRun))
            raise ValueError(
                f"Sequential: expected {expected} extra inputs, one per unbound extra input of its ops, got {expected + len(extra)}. Leave out "
                "the last."
            )
        return (x, *results) if results else x

    def _kwargs_by_run(self, runs: Runs, op_kwargs: Mapping[Any, Any]) -> dict[int, dict[int, Mapping[str, Any]]]:
        modules = list(self)
        wanted = {}
        for key, kwargs in op_kwargs.items():
            position = whole(key)
            op = key if position is None else self[position]
            if not any(op is module for module in modules):
                raise ValueError(f"op_kwargs: expected ops of this Sequential or their positions, got {_shown(key)}. Use one of its ops as key.")
            if not isinstance(op, FusibleOperation) or op.is_fused_op:
                raise ValueError(f"op_kwargs: expected basic ops, got {_shown(op)}. Name the op among its basic_ops, in a Sequential that lists these.")
            check_takes(op, kwargs)
            if kwargs:
                wanted[id(op)] = kwargs
        found: dict[int, dict[int, Mapping[str, Any]]] = {}
        for position, run in enumerate(runs):
            if isinstance(run, OpRun):
                own = {index: wanted[id(op)] for index, op in enumerate(run.now.basic_ops) if id(op) in wanted}
                if own:
                    found[position] = own
        return found

    # The runs of the list.

    def _forget(self) -> None:
        self.__dict__.update(_NOTHING_MADE)

    def _prepare(self) -> Runs:
        """The runs of the list as it is now, created anew if it changed."""
        changes, known, _, runs, captured = self._made
        if changes is _NOTHING:
            changes = Changes()
        token = changes.token
        if known is token:
            return runs
        capture(self, changes)
        modules = tuple(self._modules.values())
        is_wired = any(isinstance(run, OpRun) and run.wiring is not None for run in runs or ())  # depends on parts of fused ops, which may change
        if runs is None or is_wired or len(modules) != len(captured) or not all(map(operator.is_, modules, captured)):
            runs = self._make_runs(modules, changes)
        for run in runs:
            if isinstance(run, OpRun):
                run.prepare()
        if any(run.now.deferred for run in runs if isinstance(run, OpRun)):
            token = object()  # a token that never matches makes the next call prepare again
        is_simple = len(runs) == 1 and isinstance(runs[0], OpRun)
        made = (changes, token, runs[0].plain_pipeline() if is_simple else None, runs, modules)
        self.__dict__.update(_made=made, _changes=changes, _token=token, _runs=runs)  # in one step, because other threads read them too
        return runs

    _prepared_runs = property(_C.native_getter(_prepare, "_changes", "_token", "_runs"))  # for Dynamo: equal containers share code before their first call

    def _make_runs(self, modules: tuple[torch.nn.Module, ...], changes: Changes) -> Runs:
        runs: Runs = []
        for is_op, group in itertools.groupby(modules, lambda module: isinstance(module, FusibleOperation)):
            if not is_op:
                runs += group
                continue
            ops: list[Any] = list(group)
            for op in ops:
                op._check_in_container()
            runs.append(OpRun(ops, terms=self._terms, changes=changes))
        of_ops = [run for run in runs if isinstance(run, OpRun)]
        wired = wirings([tuple([basic_op.channel_bindings() for op in run.ops for basic_op in op.flat_ops()]) for run in of_ops])
        if any(any(wiring.inputs) for wiring in wired):  # a channel leaves a run
            for run, wiring in zip(of_ops, wired, strict=True):
                run.wiring, run.given_bindings = wiring, wiring.bindings
        return runs

    @property
    def _module_groups(self) -> list[OperationFuser | torch.nn.Module] | None:
        """The pipelines and the modules between them, for code that is written against TransformerEngine; None before the first call."""
        runs = self._made[3]
        return None if runs is None else [OperationFuser._of(run) if isinstance(run, OpRun) else run for run in runs]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _NOTHING_MADE}


def _checked(module: Any) -> torch.nn.Module:
    if isinstance(module, type):
        raise TypeError(f"Sequential: expected modules, got the class {module.__name__}. Write {module.__name__}(), with its arguments.")
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"Sequential: expected modules, got {type(module).__name__}. Pass operations or other torch.nn.Module objects.")
    return module


def _shown(key: Any) -> str:
    return type(key).__name__ if isinstance(key, torch.nn.Module) else repr(key)
