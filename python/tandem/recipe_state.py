"""The state that modules keep for delayed scaling: scales and histories of amaxes, as buffers."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tandem import _C
from tandem.tracing import constant_while_traced

NAME = "recipe_state"  # name of the submodule that holds the state
_LOADED_WITHOUT = "_loaded_without_recipe_state"  # attribute of a module that loaded parameters from a state dict without this state
_DIRECTIONS = ("forward", "backward")
_SAVED = ("scale", "amax_history")


traced_regions: list[torch.Tensor] = []  # numbers of the outermost regions that the code being traced has entered


def traced_region() -> torch.Tensor:
    """In a trace, the number of the outermost region of a call, as a tensor of the graph."""
    return traced_regions[-1] if traced_regions else torch.ops.tandem.region_number(torch.empty(0))


@constant_while_traced
def history_length(recipe: str) -> int:
    """Rows of the history of amaxes for a recipe, given as JSON; 0 if the recipe has no state."""
    return _C.recipe_history_length(recipe)


class DelayedScalingState(torch.nn.Module):
    """The state of one direction of a module, with a slot for each tensor that is quantized for its products.

    The buffers `scale` [slots] and `amax_history` [length, slots] are float32 for every dtype of the module. Row 0 is the amax since the last
    update; rows length-1, ..., 1 are those of earlier steps, the newest first. `pending`, which is not saved, tells the library to which
    region row 0 belongs.
    """

    scale: torch.Tensor
    amax_history: torch.Tensor
    pending: torch.Tensor

    def __init__(self, slots: int, length: int, device: torch.device | str | None = None) -> None:
        """Makes the state before the first step: scales of 1 and a history of zeros.

        Args:
            slots: number of quantized tensors.
            length: rows of the history.
            device: device of the buffers; None: torch's default device.
        """
        super().__init__()
        self.register_buffer("scale", torch.ones(slots, dtype=torch.float32, device=device))
        self.register_buffer("amax_history", torch.zeros(length, slots, dtype=torch.float32, device=device))
        self.register_buffer("pending", torch.zeros(1, dtype=torch.int64, device=device), persistent=False)

    def resize(self, length: int) -> None:
        """Keeps the newest `length` rows, or adds rows of zeros as the oldest."""
        if self.amax_history.shape[0] != length:
            self.amax_history.data = _C.resized_history(self.amax_history, length)  # graphs hold this tensor object

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> DelayedScalingState:
        held = {name: tensor for name, tensor in self._buffers.items() if tensor is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, tensor in held.items():  # .half() and the like change the module's own dtype, not that of the state
            now = self._buffers[name]
            if now is not None and now.dtype != tensor.dtype:
                self._buffers[name] = now.new_empty(now.shape, dtype=tensor.dtype) if now.is_meta else tensor.to(now.device)
        pending = self.pending  # no state dict contains it, so its value must be kept here
        self._buffers["pending"] = torch.zeros_like(pending) if held["pending"].is_meta else held["pending"].to(pending.device)
        return self

    def __getstate__(self) -> dict[str, Any]:
        pending = self.pending
        if not pending.is_meta and pending.item():  # it numbers a region of this process, which has ended for every other process
            pending = torch.full_like(pending, -1)
        return {**self.__dict__, "_buffers": {**self._buffers, "pending": pending}}

    def __deepcopy__(self, memo: dict[int, Any]) -> DelayedScalingState:
        copied = memo[id(self)] = DelayedScalingState(self.scale.shape[0], self.amax_history.shape[0], self.scale.device)
        for name, tensor in self._buffers.items():
            copied._buffers[name] = None if tensor is None else tensor.clone()
        return copied

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        length, slots = self.amax_history.shape
        scale, history = (state_dict.get(prefix + name) for name in _SAVED)
        if not isinstance(scale, torch.Tensor) or not isinstance(history, torch.Tensor):
            _warn_of_lost_scales()
            scale, history = torch.ones(slots), torch.zeros(length, slots)
        elif scale.numel() != slots or history.dim() != 2 or history.shape[1] != slots:
            raise RuntimeError(
                f"{prefix[:-1]}: expected scaling state with {slots} slots, got scale of shape {tuple(scale.shape)} and "
                f"amax_history of shape {tuple(history.shape)}. Load the state of the same module."
            )
        state_dict[prefix + "scale"] = scale.float()
        state_dict[prefix + "amax_history"] = _C.resized_history(history.float(), length)
        self._buffers["pending"] = torch.zeros(1, dtype=torch.int64, device=scale.device)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def extra_repr(self) -> str:
        return f"slots={self.scale.shape[0]}, length={self.amax_history.shape[0]}"


class RecipeState(torch.nn.Module):
    """The state that a module keeps for a recipe: `forward` and `backward`, a `DelayedScalingState` each."""

    def __init__(self, slots: tuple[int, int], length: int, device: torch.device | str | None = None) -> None:
        """Makes the state before the first step: scales of 1 and histories of zeros.

        Args:
            slots: numbers of quantized tensors in forward and in backward.
            length: rows of the history.
            device: device of the buffers; None: torch's default device.
        """
        super().__init__()
        for direction, count in zip(_DIRECTIONS, slots, strict=True):
            self._modules[direction] = DelayedScalingState(count, length, device)

    # A module also has a method of this name, but the path "recipe_state.forward.scale" must lead to the submodule.
    @property  # type: ignore[misc]
    def forward(self) -> DelayedScalingState:  # type: ignore[override]
        """The state of tensors that are quantized in forward."""
        return self._modules["forward"]  # type: ignore[return-value]

    backward: DelayedScalingState


def of(fields: dict[str, Any], slots: tuple[int, int], length: int) -> RecipeState:
    """The state of the module with this `__dict__`, for a history of `length` rows. It is created if the module has none."""
    state: RecipeState | None = fields["_modules"].get(NAME)
    if state is not None and state._modules["forward"].amax_history.shape[0] == length:  # type: ignore[union-attr, index]
        return state
    # The state outlives the modes and regions of this call.
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        if state is None:
            if fields.pop(_LOADED_WITHOUT, False):
                _warn_of_lost_scales()
            like = next((param for param in fields["_parameters"].values() if param is not None), None)
            state = RecipeState(slots, length, "cpu" if like is None else like.device)
            state = fields["_modules"].setdefault(NAME, state)  # another thread may have created one meanwhile
        for direction in _DIRECTIONS:
            state._modules[direction].resize(length)  # type: ignore[union-attr, operator]
    return state


def tensors_of(state: RecipeState) -> list[torch.Tensor]:
    """The tensors of a state that a call of the library takes."""
    return [getattr(state._modules[direction], name) for direction in _DIRECTIONS for name in _C.SCALING_STATE]


def tensors(fields: dict[str, Any], forward_slots: int, backward_slots: int, length: int) -> list[torch.Tensor]:
    """The tensors of the state of the module with this `__dict__`, which is created if the module has none."""
    return tensors_of(of(fields, (forward_slots, backward_slots), length))


@contextlib.contextmanager
def unchanged(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Restores the state of these modules at the end of the block."""
    held = [(module, module._modules.get(NAME), copy.deepcopy(module._modules.get(NAME))) for module in modules]
    try:
        yield
    finally:
        for module, state, before in held:
            if state is None or before is None:
                module._modules.pop(NAME, None)
                continue
            for buffer, value in zip(state.buffers(), before.buffers(), strict=True):
                buffer.copy_(value)


def prepare_to_load(module: torch.nn.Module, slots: tuple[int, int], state_dict: dict[str, Any], prefix: str) -> None:
    """Creates the state if the state dict has one for the module, before torch looks for unexpected keys."""
    history = state_dict.get(f"{prefix}{NAME}.forward.amax_history")
    if not any(slots) or NAME in module._modules:
        return
    vars(module).pop(_LOADED_WITHOUT, None)
    if isinstance(history, torch.Tensor) and history.dim() == 2:
        of(vars(module), slots, history.shape[0])
    else:
        vars(module)[_LOADED_WITHOUT] = True


def _warn_of_lost_scales() -> None:
    # All modules share one text and one place, so that Python shows the warning once.
    warnings.warn(
        "tandem: expected recipe_state of every module in the state dict that was loaded, got none of one, or a part. Its scales start afresh. "
        "Where the checkpoint has them, call tandem.make_recipe_state(model, recipe) before it is read.",
        stacklevel=1,
    )


__all__ = ["DelayedScalingState", "RecipeState"]
