"""What pipelines know of operations: everything but how one is called, which needs a pipeline."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import torch
from torch.nn.utils.parametrize import is_parametrized
from typing_extensions import Self

from tandem import _C
from tandem.ops.arguments import flag
from tandem.ops.changes import Changes, add_watcher, capture, tell, watch
from tandem.ops.channels import ChannelsMixin
from tandem.ops.checkpoint import warn_about_extra_state
from tandem.ops.context import OperationContext
from tandem.ops.directions import DirectionsMixin
from tandem.ops.quantizers import check_mode, quantizer_of
from tandem.ops.signature import signature_of
from tandem.quantized.init import loading
from tandem.quantized.quantizer import Quantizer
from tandem.quantized.state_dict import load_parts, save_parts
from tandem.recipe_state import RecipeState, prepare_to_load

_EXTRA_STATE = "_extra_state"
_RESULT_DTYPES = ("output_dtype", "extra_output_dtypes")
_instances = itertools.count(1)
_slots_of = cache(_C.quantize_slots)


class Unit(torch.nn.Module):
    """A member of the list that a pipeline is made of. Operations derive from this through `tandem.ops.op`."""

    recipe_state: RecipeState  # once a recipe has been in force that keeps state

    _styles: ClassVar[Mapping[str, str]] = {}
    _forward_prefix: ClassVar[str | None] = None  # prefix of the forward that counts, None where the library has it
    _library_forward: ClassVar[Any] = None  # what `forward` is where a subclass leaves it alone
    _VOLATILE: ClassVar[tuple[str, ...]] = ("_alone", "_alone_changes", "_alone_plain", "_alone_token", "_changes", "_fused_ops", "_identity", "_instance", "_keys", "_pipelines_of", "_saved", "_watchers")

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "forward":  # a patch, which containers honour
            self._tell()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        if name == "forward":
            self._tell()

    @property
    def is_fused_op(self) -> bool:
        """Whether this stands for several basic ops."""
        raise NotImplementedError

    def flat_ops(self) -> Sequence[BasicUnit]:
        """The basic ops that this stands for, in order."""
        raise NotImplementedError

    def covered_ops(self) -> Sequence[BasicUnit]:
        """Those of them that are members of this, as fusion functions put them together: without the ops that stand around one in a pipeline."""
        raise NotImplementedError

    def _capture(self, changes: Changes) -> None:
        """A pipeline is made of this: what becomes of it from now on is told."""
        add_watcher(self, changes)

    def _check_in_container(self) -> None:
        """Raises where a container cannot pass on what this returns."""

    def _tell(self) -> None:
        """Makes the pipelines of this look at it again."""
        tell(self.__dict__.get("_watchers", ()))

    def _quantize_slots(self) -> tuple[int, int]:
        """How many tensors a recipe quantizes for the parts that share this module's state, in forward and in backward."""
        return 0, 0

    @property
    def _holder(self) -> torch.nn.Module:
        """The module that owns the parameters."""
        return self.__dict__.get("_owner", self)

    def _run_alone(self) -> Any:
        """The run of this alone, made once."""
        raise NotImplementedError

    def pre_first_fuser_forward(self) -> None:
        """Called on each basic op of a pipeline, once, before it is planned. For subclasses."""

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        """Called on each basic op of a pipeline before each call of it. For subclasses.

        Args:
            requires_grad: whether a gradient is asked of the op, or of one before it.
        """

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor | None, ...]],
        prev_op_grad_output_quantizer: None = None,
        next_op_input_quantizer: None = None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[torch.Tensor, Iterable[Iterable[torch.Tensor]]]:
        """Runs the covered ops: the output, and the extra outputs of each. All lists have one entry per covered op."""
        raise NotImplementedError(
            f"{type(self).__qualname__}: expected a forward written in Python, got none. Define fuser_forward, or fuser_forward_compute and "
            "fuser_forward_save_ctx."
        )

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor | None, ...]],
    ) -> tuple[torch.Tensor | None, Iterable[Iterable[torch.Tensor | None]], Iterable[Iterable[torch.Tensor | None]]]:
        """The gradient of the input, those of the parameters of each covered op, those of its extra inputs."""
        raise NotImplementedError(
            f"{type(self).__qualname__}: expected a backward written in Python, got none. Define fuser_backward."
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in self._VOLATILE}

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        # Parametrized modules have a __getstate__ that raises, and a __deepcopy__, unless there is one, that copies what is volatile too.
        cls = type(self)
        state = (cls.__bases__[0] if is_parametrized(self) else cls).__getstate__(self)
        copied = memo[id(self)] = cls.__new__(cls)
        copied.__setstate__(copy.deepcopy(state, memo))
        return copied

    def _replicate_for_data_parallel(self) -> Unit:
        replica: Unit = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        for name in self._VOLATILE:
            replica.__dict__.pop(name, None)
        return replica

    def _transformer_engine_names(self) -> Mapping[str, str]:
        """Our name of each parameter that TransformerEngine calls otherwise, by its name."""
        return {}

    def _transformer_engine_states(self) -> Sequence[str]:
        """Before which names it has `_extra_state` in a state dict, each with its dot."""
        return () if self.is_fused_op else ("",)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        with self._listing_parameters():
            super()._save_to_state_dict(destination, prefix, keep_vars)
            save_parts(self._parameters, destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        if type(self).set_extra_state is torch.nn.Module.set_extra_state:  # else it is the class's own
            drop_extra_state(state_dict, prefix + _EXTRA_STATE)
        prepare_to_load(self, self._quantize_slots(), state_dict, prefix)
        with self._listing_parameters(), loading(self, state_dict, prefix, arguments[0]):
            missing = load_parts(self._parameters, state_dict, prefix)
            if missing and arguments[1]:  # strict
                arguments[2].extend(missing)
            super()._load_from_state_dict(state_dict, prefix, *arguments)

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Those of the module. A part of another holds none itself (`recurse=False`), and reaches those that it computes with."""
        shared: Any = self._parameters
        if isinstance(shared, dict) or not recurse:
            yield from super().named_parameters(prefix, recurse, remove_duplicate)
            return
        for name in shared.names:
            if (param := shared.get(name)) is not None:
                yield (f"{prefix}.{name}" if prefix else name), param

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        with self._listing_parameters():
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]

    @contextlib.contextmanager
    def _listing_parameters(self) -> Iterator[None]:
        """The module with a list of parameters, which a part has not."""
        shared: Any = self._parameters
        if isinstance(shared, dict):
            yield
            return
        listed = self.__dict__["_parameters"] = {name: shared[name] for name in shared.names if name in shared}
        try:
            yield
        finally:
            self.__dict__["_parameters"] = shared
            for name, param in listed.items():
                shared[name] = param


class BasicUnit(DirectionsMixin, ChannelsMixin, Unit):
    """One operation: an entry of a description."""

    num_extra_inputs: int = 0
    num_extra_outputs: int = 0
    fuser_options: ClassVar[Sequence[str] | None] = None  # of the class itself: the attributes by which its ops are equal in compiled code
    output_dtype: torch.dtype | None = None  # of an op written in Python, where its output has not the dtype to which its tensors promote
    extra_output_dtypes: Sequence[torch.dtype | None] = ()  # the same of its extra outputs

    _kind: ClassVar[str] = ""  # name in the library
    _option_names: ClassVar[tuple[str, ...]] = ()
    _names_in_library: ClassVar[Mapping[str, str]] = {}  # of options that the library calls otherwise
    _parameter_names: ClassVar[tuple[str, ...]] = ()
    _joins: tuple[int, ...] = ()  # how many of these each operand is; empty: one each
    _recompute: bool = False  # whether backward makes its results again rather than keep them
    _depends_on_training: ClassVar[bool] = False
    _call_buffers: ClassVar[Mapping[str, str]] = {}  # tensors of the caller that a call may name, and the option that says that one is written
    _watched_names: ClassVar[tuple[str, ...]] = ("in_place",)  # other attributes that plans depend on

    def __init__(self) -> None:
        """Makes an op whose extra inputs and outputs are arguments and results of its pipeline."""
        if not self._kind and not self._styles:
            raise TypeError(
                f"{type(self).__name__}: expected a forward, op_forward_compute and op_forward_save_ctx, or op_forward(ctx, ...), got a class "
                "without one. Define it, and op_backward."
            )
        super().__init__()
        self._init_channels(self.num_extra_inputs, self.num_extra_outputs)

    def __setattr__(self, name: str, value: Any) -> None:
        is_option = name in self._option_names or name in self._watched_names
        is_dtype = name in _RESULT_DTYPES and self.is_python_op
        if is_option:
            value = self._checked_option(name, value)
        fields = self.__dict__
        before, had = fields.get(name), self._holds(name)
        super().__setattr__(name, value)
        if not fields.get("_extra_tensor_channels_locked"):  # asked last: a pipeline in another thread locks first and reads then
            return
        if is_option or is_dtype:
            if type(value) is not type(before) or value != before:
                fields["_changes"] = self.changes + 1
                self._tell()
        elif self._holds(name) != had and self.is_python_op:  # its operands are others now
            self._tell()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        if self.is_python_op:
            if name in _RESULT_DTYPES:
                self.__dict__["_changes"] = self.changes + 1
            self._tell()

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        if self.is_python_op:
            self._tell()

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        super().register_buffer(name, tensor, persistent)
        if self.is_python_op:
            self._tell()

    def _holds(self, name: str) -> tuple[bool, bool]:
        """Whether a parameter and a buffer of this name are there."""
        fields = self.__dict__
        return fields.get("_parameters", {}).get(name) is not None, fields.get("_buffers", {}).get(name) is not None

    @property
    def _context(self) -> tuple[str, ...]:
        """What `saved_tensors` holds."""
        return signature_of(self._kind).context if self._kind else ()

    @property
    def _drawn(self) -> tuple[str, ...]:
        """Of these, what a generator gives."""
        return signature_of(self._kind).drawn if self._kind else ()

    @property
    def changes(self) -> int:
        """How often an option was changed after a pipeline had captured the op."""
        return self.__dict__.get("_changes", 0)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__["_extra_tensor_channels_locked"] = False  # a copy is not captured yet

    @property
    def is_fused_op(self) -> bool:
        return False

    @property
    def is_python_op(self) -> bool:
        """Whether the forward is written in Python."""
        return self._forward_prefix is not None

    def _set_recompute(self, value: bool) -> None:
        """Says from the next call on whether backward makes its results again rather than keep them."""
        self.__dict__["_recompute"] = value
        if self.__dict__.get("_extra_tensor_channels_locked"):
            self.__dict__["_changes"] = self.changes + 1
            self._tell()

    def flat_ops(self) -> Sequence[BasicUnit]:
        return (self,)

    def covered_ops(self) -> Sequence[BasicUnit]:
        return (self,)

    def _capture(self, changes: Changes) -> None:
        super()._capture(changes)
        if self.is_python_op:  # whose parameters may be those of modules inside it
            for module in self.modules():
                capture(module, changes)

    def _checked_option(self, name: str, value: Any) -> Any:
        """An option as it is kept. Raises where the op cannot have it: later, the error would not name the assignment."""
        if not self._kind:
            return value
        op = type(self).__name__
        if name == "in_place":
            return flag(op, name, value)
        in_library = self._names_in_library.get(name, name)
        (option,) = (option for option in signature_of(self._kind).options if option.name == in_library)
        return option.checked(op, name, value)

    def _options(self) -> dict[str, Any]:
        return {self._names_in_library.get(name, name): getattr(self, name) for name in self._option_names}

    def _quantize_slots(self) -> tuple[int, int]:
        return _slots_of(self._kind) if self._kind and not self.is_python_op else (0, 0)

    def num_quantizers(self, mode: str) -> int:
        """How many tensors a recipe quantizes for the op.

        Args:
            mode: "forward" or "backward".
        """
        check_mode(type(self).__name__, mode)
        return self._quantize_slots()[mode == "backward"]

    def get_quantizer(self, mode: str, index: int) -> Quantizer | None:
        """The quantizer of one of them under the recipe in force, outside of a region under that of the op's last call; None without one. Of
        `DelayedScaling` it has the scale and the amax of the op's state.

        Args:
            mode: "forward": of x, then of the weight; "backward": of the gradient of y. Of products in groups those of the first group, then
                those of the second, and so on.
            index: which, from 0.
        """
        count = self.num_quantizers(mode)
        if not 0 <= index < count:
            raise IndexError(f"{type(self).__name__}: expected the index of one of its {count} {mode} quantizers, got {index}, which is out of range.")
        return quantizer_of(self, mode, index)

    def _last_recipe(self) -> str:
        """That of the last eager call, as JSON; empty: none."""
        for prepared in self.__dict__.get("_pipelines_of", ()):
            for pipeline in list(prepared.pipelines.values()):
                if recipe := pipeline.last_recipe():
                    return recipe
        return ""

    def get_input_quantizer(self) -> Quantizer | None:
        """That of x, None where x is not quantized."""
        return self.get_quantizer("forward", 0) if self.num_quantizers("forward") else None

    def get_grad_output_quantizer(self) -> Quantizer | None:
        """That of the gradient of y, None where it is not quantized."""
        return self.get_quantizer("backward", 0) if self.num_quantizers("backward") else None

    def _first_slots(self) -> tuple[int, int]:
        """Where this op's slots begin in the state of the module that it is a part of."""
        before = itertools.takewhile(lambda part: part is not self, self._holder.flat_ops())  # type: ignore[operator]
        slots = [part._quantize_slots() for part in before]
        return sum(forward for forward, _ in slots), sum(backward for _, backward in slots)

    @property
    def instance_id(self) -> str:
        """A text that no other op of this process has."""
        known = self.__dict__.get("_instance")
        return known or self.__dict__.setdefault("_instance", f"{type(self).__qualname__}@{next(_instances)}")


class FusedUnit(Unit):
    """Several basic ops."""

    def get_input_quantizer(self) -> Quantizer | None:
        """That of the first op."""
        return self.flat_ops()[0].get_input_quantizer()

    def get_grad_output_quantizer(self) -> Quantizer | None:
        """That of the last op."""
        return self.flat_ops()[-1].get_grad_output_quantizer()

    def __init__(self, basic_ops: Iterable[Unit]) -> None:
        """Makes an op that stands for others.

        Args:
            basic_ops: those that it stands for, in order; at least one.
        """
        super().__init__()
        watch(self)
        self.basic_ops = torch.nn.ModuleList(basic_ops)
        watch(self.basic_ops)
        if len(self.basic_ops) == 0:
            raise ValueError(
                f"{type(self).__qualname__}: expected at least one basic op, got none. Pass the ops that it stands for."
            )

    @property
    def is_fused_op(self) -> bool:
        return True

    def flat_ops(self) -> Sequence[BasicUnit]:
        return tuple(basic for op in self.basic_ops for basic in op.flat_ops())

    def covered_ops(self) -> Sequence[BasicUnit]:
        return tuple(basic for op in self.basic_ops for basic in op.covered_ops())

    def _capture(self, changes: Changes) -> None:
        super()._capture(changes)
        capture(self, changes)
        capture(self.basic_ops, changes)
        for op in self.basic_ops:
            op._check_in_container()
            op._capture(changes)

def drop_extra_state(state_dict: dict[str, Any], key: str) -> None:
    """Takes TransformerEngine's quantization state out of a state dict; it is never read, as it would have to be unpickled."""
    state = state_dict.pop(key, None)
    if isinstance(state, torch.Tensor) and state.numel() != 0 or state is not None and not isinstance(state, torch.Tensor):
        warn_about_extra_state(key)
