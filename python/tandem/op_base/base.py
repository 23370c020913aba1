"""What pipelines know of ops: everything but how an op is called by itself, which needs a pipeline."""

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
from tandem.arguments import flag
from tandem.op_base.changes import Changes, add_watcher, capture, tell, watch
from tandem.op_base.channels import ChannelsMixin
from tandem.op_base.checkpoint import drop_extra_state
from tandem.op_base.directions import DirectionsMixin
from tandem.op_base.quantizers import check_mode, quantizer_of
from tandem.op_base.signature import signature_of
from tandem.quantized.quantizer import Quantizer
from tandem.quantized.state_dict import load_parts, save_parts
from tandem.recipe_state import RecipeState, prepare_to_load
from tandem.regions.model_init import loading

_EXTRA_STATE = "_extra_state"
_RESULT_DTYPES = ("output_dtype", "extra_output_dtypes")
_instances = itertools.count(1)
_slots_of = cache(_C.quantize_slots)


class OpBase(torch.nn.Module):
    """A member of the list from which a pipeline is planned. The classes of ops derive from it through `tandem.ops.op`."""

    recipe_state: RecipeState  # exists after a call under a recipe that keeps state

    _styles: ClassVar[Mapping[str, str]] = {}
    _forward_prefix: ClassVar[str | None] = None  # prefix of the forward in Python, None if the library has the forward
    _library_forward: ClassVar[Any] = None  # the method `forward` of the library, with which that of a subclass is compared
    _VOLATILE: ClassVar[tuple[str, ...]] = ("_alone", "_alone_changes", "_alone_plain", "_alone_token", "_changes", "_fused_ops", "_identity", "_instance", "_keys", "_pipelines_of", "_saved", "_watchers")

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "forward":  # containers call the patched method
            self._tell()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        if name == "forward":
            self._tell()

    @property
    def is_fused_op(self) -> bool:
        """Whether this covers several basic ops."""
        raise NotImplementedError

    def flat_ops(self) -> Sequence[BasicOpBase]:
        """The basic ops of which this consists in a pipeline, in order."""
        raise NotImplementedError

    def covered_ops(self) -> Sequence[BasicOpBase]:
        """The basic ops that fusion functions see as members of this: `flat_ops` without collectives around an op."""
        raise NotImplementedError

    def _capture(self, changes: Changes) -> None:
        """Registers the observer of a pipeline, which is notified of changes of this from now on."""
        add_watcher(self, changes)

    def _check_in_container(self) -> None:
        """Raises if a container cannot pass on what this returns."""

    def _tell(self) -> None:
        """Notifies the pipelines of this op, which then read it anew."""
        tell(self.__dict__.get("_watchers", ()))

    def _quantize_slots(self) -> tuple[int, int]:
        """The numbers of tensors that a recipe quantizes, in forward and backward, for all parts that share this module's state."""
        return 0, 0

    @property
    def _holder(self) -> torch.nn.Module:
        """The module that owns the parameters."""
        return self.__dict__.get("_owner", self)

    def _run_alone(self) -> Any:
        """The run that consists of this alone, created once."""
        raise NotImplementedError

    def pre_first_fuser_forward(self) -> None:
        """Called once on each basic op of a pipeline, before it is planned. Subclasses may override it."""

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        """Called on each basic op of a pipeline before each call of it. Subclasses may override it.

        Args:
            requires_grad: whether a gradient is required for the op, or for an earlier op of the pipeline.
        """

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in self._VOLATILE}

    def __deepcopy__(self, memo: dict[int, Any]) -> OpBase:
        # Without a __deepcopy__ here, that of parametrized modules would copy volatile attributes too. Their __getstate__ raises.
        cls = type(self)
        state = (cls.__bases__[0] if is_parametrized(self) else cls).__getstate__(self)
        copied = memo[id(self)] = cls.__new__(cls)
        copied.__setstate__(copy.deepcopy(state, memo))
        return copied

    def _replicate_for_data_parallel(self) -> OpBase:
        replica: OpBase = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        for name in self._VOLATILE:
            replica.__dict__.pop(name, None)
        return replica

    def _transformer_engine_names(self) -> Mapping[str, str]:
        """Maps TransformerEngine's name of a parameter to ours, for names that differ."""
        return {}

    def _transformer_engine_states(self) -> Sequence[str]:
        """The prefixes, each with its dot, before TransformerEngine's `_extra_state` in a state dict of this module."""
        return () if self.is_fused_op else ("",)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        with self._listing_parameters():
            super()._save_to_state_dict(destination, prefix, keep_vars)
            save_parts(self._parameters, destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        if type(self).set_extra_state is torch.nn.Module.set_extra_state:  # otherwise the extra state belongs to the user's class
            drop_extra_state(state_dict, prefix + _EXTRA_STATE)
        prepare_to_load(self, self._quantize_slots(), state_dict, prefix)
        with self._listing_parameters(), loading(self, state_dict, prefix, arguments[0]):
            missing = load_parts(self._parameters, state_dict, prefix)
            if missing and arguments[1]:  # strict
                arguments[2].extend(missing)
            super()._load_from_state_dict(state_dict, prefix, *arguments)

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The parameters of the module. A part of a composite owns none (`recurse=False`); with `recurse` it yields the owner's that it uses."""
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
        """Gives a part a real dict of its parameters for a while, because iterating over its shared ones yields none."""
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


class BasicOpBase(DirectionsMixin, ChannelsMixin, OpBase):
    """One basic op, which is an entry of a description."""

    num_extra_inputs: int = 0
    num_extra_outputs: int = 0
    fuser_options: ClassVar[Sequence[str] | None] = None  # declared by the class itself: attributes that decide whether ops are equal in compiled code
    output_dtype: torch.dtype | None = None  # for an op in Python, the dtype of its output; None: the dtype to which its tensors promote
    extra_output_dtypes: Sequence[torch.dtype | None] = ()  # for an op in Python, the dtypes of its extra outputs; None as above

    _kind: ClassVar[str] = ""  # the library's name of the op, empty for an op in Python
    _context: ClassVar[tuple[str, ...]] = ()  # the names of the tensors in `saved_tensors`
    _drawn: ClassVar[tuple[str, ...]] = ()  # those of them that come from a generator
    _option_names: ClassVar[tuple[str, ...]] = ()
    _names_in_library: ClassVar[Mapping[str, str]] = {}  # the library's names of options that differ from ours
    _parameter_names: ClassVar[tuple[str, ...]] = ()
    _joins: tuple[int, ...] = ()  # for each operand the number of parameters that form it; empty: one each
    _recompute: bool = False  # whether backward recomputes the op's results instead of keeping them
    _depends_on_training: ClassVar[bool] = False
    _keeps_dtype = False  # whether a norm or an activation computes in the dtype of x, whatever torch.autocast says
    _call_buffers: ClassVar[Mapping[str, str]] = {}  # keyword arguments that are tensors to write, and the option that declares each
    _watched_names: ClassVar[tuple[str, ...]] = ("in_place",)  # attributes besides options on which plans depend; flags unless the class checks them itself
    _shown_names: ClassVar[tuple[str, ...] | None] = None  # attributes in the op's text; None: its options

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
        if not fields.get("_extra_tensor_channels_locked"):  # checked last: a pipeline in another thread first locks, then reads
            return
        if is_option or is_dtype:
            if type(value) is not type(before) or value != before:
                fields["_changes"] = self.changes + 1
                self._tell()
        elif self._holds(name) != had and self.is_python_op:  # the op has gained or lost an operand
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
        """Whether a parameter, and whether a buffer, of this name exists."""
        fields = self.__dict__
        return fields.get("_parameters", {}).get(name) is not None, fields.get("_buffers", {}).get(name) is not None

    @property
    def changes(self) -> int:
        """How often an option has changed since a pipeline captured the op."""
        return self.__dict__.get("_changes", 0)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__["_extra_tensor_channels_locked"] = False  # no pipeline has captured the copy

    @property
    def is_fused_op(self) -> bool:
        return False

    @property
    def is_python_op(self) -> bool:
        """Whether the op is written in Python: it has a forward of its own."""
        return self._forward_prefix is not None

    def _set_recompute(self, value: bool) -> None:
        """Sets whether backward recomputes the op's results instead of keeping them, from the next call on."""
        self.__dict__["_recompute"] = value
        if self.__dict__.get("_extra_tensor_channels_locked"):
            self.__dict__["_changes"] = self.changes + 1
            self._tell()

    def flat_ops(self) -> Sequence[BasicOpBase]:
        return (self,)

    def covered_ops(self) -> Sequence[BasicOpBase]:
        return (self,)

    def _capture(self, changes: Changes) -> None:
        super()._capture(changes)
        if self.is_python_op:  # modules inside it may own its parameters
            for module in self.modules():
                capture(module, changes)

    def _checked_option(self, name: str, value: Any) -> Any:
        """An option's value as the op stores it. Raises if the op cannot have it, because a later error would not point at the assignment."""
        if not self._kind:
            return value
        op = type(self).__name__
        if name in self._watched_names:
            return flag(op, name, value)
        in_library = self._names_in_library.get(name, name)
        (option,) = (option for option in signature_of(self._kind).options if option.name == in_library)
        return option.checked(op, name, value)

    def _options(self) -> dict[str, Any]:
        """The options by the library's names. None stands for the library's default."""
        return {self._names_in_library.get(name, name): value for name in self._option_names if (value := getattr(self, name)) is not None}

    def _quantize_slots(self) -> tuple[int, int]:
        return _slots_of(self._kind) if self._kind and not self.is_python_op else (0, 0)

    def num_quantizers(self, mode: str) -> int:
        """The number of tensors that a recipe quantizes for the op in a direction.

        Args:
            mode: "forward" or "backward".
        """
        check_mode(type(self).__name__, mode)
        return self._quantize_slots()[mode == "backward"]

    def get_quantizer(self, mode: str, index: int) -> Quantizer | None:
        """A quantizer of the op under the recipe in force or, outside of regions, under the recipe of its last call; None if there is none. For
        `DelayedScaling` it has the scale and the amax of the op's state.

        Args:
            mode: "forward" for x and the weight, in this order; "backward" for grad_y. A grouped product has those of its first group, then
                those of the second, and so on.
            index: index of the quantizer, from 0; IndexError if it is out of range.
        """
        count = self.num_quantizers(mode)
        if not 0 <= index < count:
            raise IndexError(f"{type(self).__name__}: expected the index of one of its {count} {mode} quantizers, got {index}, which is out of range.")
        return quantizer_of(self, mode, index)

    def _last_recipe(self) -> str:
        """The recipe of the last eager call as JSON; empty if there was none."""
        for prepared in self.__dict__.get("_pipelines_of", ()):
            for pipeline in list(prepared.pipelines.values()):
                if recipe := pipeline.last_recipe():
                    return recipe
        return ""

    def get_input_quantizer(self) -> Quantizer | None:
        """The quantizer of x; None if x is not quantized."""
        return self.get_quantizer("forward", 0) if self.num_quantizers("forward") else None

    def get_grad_output_quantizer(self) -> Quantizer | None:
        """The quantizer of grad_y; None if grad_y is not quantized."""
        return self.get_quantizer("backward", 0) if self.num_quantizers("backward") else None

    def _first_slots(self) -> tuple[int, int]:
        """The first slots of this op, in forward and backward, in the state of the module that owns it."""
        before = itertools.takewhile(lambda part: part is not self, self._holder.flat_ops())  # type: ignore[operator]
        slots = [part._quantize_slots() for part in before]
        return sum(forward for forward, _ in slots), sum(backward for _, backward in slots)

    def extra_repr(self) -> str:
        names = self._option_names if self._shown_names is None else self._shown_names
        return ", ".join(f"{name}={value}" for name in names if (value := getattr(self, name)) is not None) or super().extra_repr()

    @property
    def instance_id(self) -> str:
        """A text that identifies the op in this process."""
        known = self.__dict__.get("_instance")
        return known or self.__dict__.setdefault("_instance", f"{type(self).__qualname__}@{next(_instances)}")


class FusedOpBase(OpBase):
    """An op that covers several basic ops."""

    def fuser_forward(self, *unused: Any, **named: Any) -> Any:
        """The output, and the extra outputs of each covered op. Subclasses define it, or its two halves."""
        raise NotImplementedError(
            f"{type(self).__qualname__}: expected a forward written in Python, got none. Define fuser_forward, or fuser_forward_compute and "
            "fuser_forward_save_ctx."
        )

    def fuser_backward(self, *unused: Any, **named: Any) -> Any:
        """grad_x, the gradients of the parameters of each covered op, and those of its extra inputs. Subclasses define it."""
        raise NotImplementedError(f"{type(self).__qualname__}: expected a backward written in Python, got none. Define fuser_backward.")

    def get_input_quantizer(self) -> Quantizer | None:
        """The input quantizer of the first basic op."""
        return self.flat_ops()[0].get_input_quantizer()

    def get_grad_output_quantizer(self) -> Quantizer | None:
        """The grad_output quantizer of the last basic op."""
        return self.flat_ops()[-1].get_grad_output_quantizer()

    def __init__(self, basic_ops: Iterable[OpBase]) -> None:
        """Makes an op that covers others.

        Args:
            basic_ops: the covered ops in order; ValueError if there are none.
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

    def flat_ops(self) -> Sequence[BasicOpBase]:
        return tuple(basic for op in self.basic_ops for basic in op.flat_ops())

    def covered_ops(self) -> Sequence[BasicOpBase]:
        return tuple(basic for op in self.basic_ops for basic in op.covered_ops())

    def _capture(self, changes: Changes) -> None:
        super()._capture(changes)
        capture(self, changes)
        capture(self.basic_ops, changes)
        for op in self.basic_ops:
            op._check_in_container()
            op._capture(changes)
