"""Base classes of ops that a pipeline may fuse, and how one is called by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from tandem import _C
from tandem.op_base.base import BasicOpBase, FusedOpBase, OpBase
from tandem.op_base.changes import Changes
from tandem.op_base.context import OperationContext
from tandem.op_base.signature import signature_of
from tandem.pipelines.buffers import check_takes
from tandem.pipelines.prepared import Outputs
from tandem.pipelines.run import NO_EXTRAS, OpRun
from tandem.tracing import extras_of_fx_root
from tandem.user_ops.styles import PREFIXES, call_accepting, style_of


class FusibleOperation(OpBase):
    """An operation that a `Sequential` may run in one pipeline with its neighbours."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__ == __name__:
            return  # the base classes define all methods of both styles
        styles = {prefix: style for prefix in PREFIXES if (style := style_of(cls, prefix)) is not None}
        written = {prefix for prefix in PREFIXES if f"{prefix}_backward" in vars(cls)}
        if written and not styles and cls._forward_prefix is None and getattr(cls, "_kind", ""):
            styles = {"fuser" if "fuser" in written else "op": "one-piece"}  # an op of the library keeps its forward
        cls._styles = {**cls._styles, **styles}
        if styles:
            cls._forward_prefix = "fuser" if "fuser" in styles else "op"
        for prefix, style in styles.items():
            if style == "split":  # the composed one-piece forward overrides one that a base class defines
                setattr(cls, f"{prefix}_forward", getattr(_Composed, f"{prefix}_forward"))

    def _run_alone(self) -> OpRun:
        """The pipeline that consists of this op alone, created once."""
        run = self.__dict__.get("_alone") or OpRun(self.flat_ops(), owner=self)
        run.prepare()
        run = self.__dict__.setdefault("_alone", run)
        changes, token = run.changes, run.now.token
        plain = (changes, token, run.plain_pipeline(), run)
        self.__dict__.update(_alone_changes=changes, _alone_token=token, _alone_plain=plain)  # in one step, because other threads read them too
        return run

    def _call_alone(self, input: Any, extra_inputs: tuple[Any, ...], kwargs: Mapping[int, dict[str, Any]] | None) -> Outputs:
        """The outputs of the pipeline that consists of this op alone. If nothing has changed, the eager pipeline is called without further checks."""
        changes, token, pipeline, run = self._alone_plain
        if token is not changes.token:
            run = self._run_alone()
        elif pipeline is not None and extra_inputs is NO_EXTRAS and not kwargs:
            try:
                outputs: Outputs | None = pipeline(input, self.training)
            except ValueError:
                run.check_parts()
                raise
            if outputs is not None:
                return outputs
        return run(input, extra_inputs, self.training, kwargs)

    _alone_plain: tuple[Any, Any, Any, Any] = (Changes(), None, None, None)  # before the first call
    _prepared_run = property(_C.native_getter(_run_alone, "_alone_changes", "_alone_token", "_alone"))  # for Dynamo

    def _run_as_fx_root(self, input: Any, extra_inputs: Any, *unused: Any) -> Outputs:
        run = self._run_alone()
        return run(input, extras_of_fx_root(extra_inputs, run.now.num_extra_inputs, *unused), self.training)


_KINDS = {kind.replace("_", ""): kind for kind in _C.op_names()}  # the library's names of ops by those of classes in lower case
own_classes: dict[str, type[BasicOperation]] = {}  # the classes of this package by the names of their ops


class BasicOperation(BasicOpBase, FusibleOperation):
    """One operation. A subclass in Python defines a forward in one of two styles (see `tandem.user_ops.styles`) and `op_backward`.

    Compiled code knows an op in Python by its object: each op is compiled by itself, and compiled anew when one of its attributes has another value.
    Ops of a class that declares `fuser_options`, the names of attributes with plain values (numbers, texts, None, lists of them), share compiled code if
    these values are equal; a subclass declares its own. Changes of globals, closures, class attributes and methods, and changes inside an object, are
    not seen: call `torch.compiler.reset()` after such a change.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """A class of this package is that of the op with its name ("rms_norm" for `RMSNorm`), and takes what it does not declare from the op's definition."""
        is_ours = cls.__module__.startswith(f"{__package__}.")
        kind = vars(cls).get("_kind") if is_ours else None  # a class that is made from a definition has it
        if is_ours and kind is None and (kind := _KINDS.get(cls.__name__.lower())):
            own_classes[kind] = cls
        if kind is not None:
            signature = signature_of(kind)
            cls._kind, cls._context, cls._drawn = kind, signature.context, signature.drawn
            names = {in_library: name for name, in_library in cls._names_in_library.items()}
            defined = {
                "num_extra_inputs": len(signature.extra_inputs),
                "num_extra_outputs": len(signature.extra_outputs),
                "_option_names": tuple([names.get(option.name, option.name) for option in signature.options]),
                "_parameter_names": tuple([parameter.name for parameter in signature.parameters]),
                "_depends_on_training": signature.depends_on_training,
            }
            declared = {name for base in cls.__mro__[: cls.__mro__.index(BasicOperation)] for name in vars(base)}
            for name in defined.keys() - declared:
                setattr(cls, name, defined[name])
        super().__init_subclass__(**kwargs)

    def forward(self, input: torch.Tensor, *extra_inputs: torch.Tensor, _run: OpRun | None = None, **kwargs: Any) -> Outputs:
        """Runs the op alone. `kwargs` are passed to a forward in Python, or name tensors that an op of the library writes."""
        if type(extra_inputs) is not tuple:
            return self._run_as_fx_root(input, extra_inputs, _run, kwargs)
        if kwargs:
            check_takes(self, kwargs)
        given = {0: kwargs} if kwargs else None
        if _run is None and not is_dynamo_compiling():
            return self._call_alone(input, extra_inputs, given)
        return (_run or self._prepared_run)(input, extra_inputs, self.training, given)


class FusedOperation(FusedOpBase, FusibleOperation):
    """A fused op, which replaces several basic ops and owns no state. Fusion functions return such ops.

    A subclass for a forward fusion defines a forward (`fuser_forward`, or `fuser_forward_compute` and `fuser_forward_save_ctx`), one for a backward
    fusion `fuser_backward`, and one for a joint fusion both.
    """

    def forward(
        self,
        input: torch.Tensor,
        *extra_inputs: torch.Tensor,
        basic_op_kwargs: list[dict[str, Any]] | None = None,
        _run: OpRun | None = None,
    ) -> Outputs:
        """Runs the basic ops in a pipeline of their own, where they may fuse."""
        if type(extra_inputs) is not tuple:
            return self._run_as_fx_root(input, extra_inputs, basic_op_kwargs, _run)
        given = {index: each for index, each in enumerate(basic_op_kwargs) if each} or None if basic_op_kwargs else None
        for index, each in (given or {}).items():
            check_takes(self.flat_ops()[index], each)
        if _run is None and not is_dynamo_compiling():
            return self._call_alone(input, extra_inputs, given)
        return (_run or self._prepared_run)(input, extra_inputs, self.training, given)


BasicOperation._library_forward = BasicOperation.forward
FusedOperation._library_forward = FusedOperation.forward


class _Composed:
    """One-piece forwards for classes in the split style."""

    def op_forward(
        self: Any,
        ctx: OperationContext,
        input_: torch.Tensor,
        *,
        prev_op_grad_output_quantizer: None = None,
        next_op_input_quantizer: None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Runs `op_forward_compute`, then `op_forward_save_ctx`."""
        quantizers = {
            "prev_op_grad_output_quantizer": prev_op_grad_output_quantizer,
            "next_op_input_quantizer": next_op_input_quantizer,
        }
        output, tensors = call_accepting(self.op_forward_compute, input_, optional=quantizers, **kwargs)
        call_accepting(self.op_forward_save_ctx, ctx, input_, tensors, optional={**quantizers, **kwargs})
        return output

    def fuser_forward(self: Any, basic_op_ctxs: list[OperationContext], input_: torch.Tensor, **kwargs: Any) -> Any:
        """Runs `fuser_forward_compute`, then `fuser_forward_save_ctx`."""
        output, extra_outputs, tensors = call_accepting(self.fuser_forward_compute, input_, optional=kwargs)
        call_accepting(self.fuser_forward_save_ctx, basic_op_ctxs, input_, tensors, optional=kwargs)
        return output, extra_outputs
