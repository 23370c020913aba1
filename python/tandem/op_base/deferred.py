"""Parameters on the meta device: the first call with an input on another device allocates them and sets their first values."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tandem.op_base.signature import signature_of
from tandem.regions.model_init import finish_at_a_call, give_memory, is_pending, note_init, quantize_weights, resetting

_making = threading.Lock()


class DeferredMixin:
    """For modules with parameters and `reset_parameters`, which subclasses of users may override."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if (reset := cls.__dict__.get("reset_parameters")) is not None:
            cls.reset_parameters = resetting(reset)  # type: ignore[method-assign]

    @resetting
    def reset_parameters(self: Any) -> None:
        """Sets the first values that the op's definition declares: factors of a norm are 1, biases are 0, and weights are drawn as torch.nn.Linear does."""
        for parameter in signature_of(self._kind).parameters:
            for tensor in self._parts_of(parameter.name):
                if parameter.init == "zeros" or (parameter.zeros_if and getattr(self, parameter.zeros_if)):
                    torch.nn.init.zeros_(tensor)
                elif parameter.init == "ones":
                    torch.nn.init.ones_(tensor)
                else:
                    torch.nn.init.kaiming_uniform_(tensor, a=math.sqrt(5))

    def _parts_of(self: Any, operand: str) -> list[torch.nn.Parameter | None]:
        """The parameters of which an operand consists."""
        return [getattr(self, name) for name in self.__dict__.get("_joined", {}).get(operand, (operand,))]

    def _give_first_values(self: Any) -> None:
        """Resets the parameters at the end of a constructor. If they are on the meta device, the first call resets them."""
        if any([param is not None and param.is_meta for param in self._parameters.values()]):
            self.__dict__["_deferred"] = True
        else:
            self.reset_parameters()
        note_init(self)
        quantize_weights(self)

    def _weights_in_codes(self: Any) -> tuple[Sequence[str], str]:
        """The names of weights that `quantized_model_init` replaces by codes, and the kind of the op that multiplies by them."""
        return getattr(self, "_main_grad_names", ()), getattr(self, "_kind", "")

    @property
    def device(self: Any) -> torch.device:
        """The device of the parameters. While they are on the meta device, it is the device assigned here on which they will be allocated.
        Assigning it moves parameters that have memory."""
        param = next(self.parameters(), None)
        if param is None:
            raise AttributeError("device")  # torch.nn.Module replaces this text
        wanted: torch.device | None = self._holder.__dict__.get("_device")
        return wanted if wanted is not None and param.is_meta else param.device

    @device.setter
    def device(self: Any, value: torch.device | str) -> None:
        device = torch.device(value)
        if any(param.is_meta for param in self.parameters()):
            self._holder.__dict__["_device"] = device
        else:
            self._holder.to(device)


def deferred(modules: Iterable[torch.nn.Module]) -> tuple[torch.nn.Module, ...]:
    """The modules whose parameters the first call has to allocate or to quantize. A module that got its parameters otherwise is left out for good."""
    found = {}
    for module in modules:
        if module.__dict__.get("_deferred"):
            if is_pending(module) or any(param is not None and param.is_meta for param in module._parameters.values()):
                found[id(module)] = module
            else:
                module.__dict__["_deferred"] = False
    return tuple(found.values())


def materialize(modules: Iterable[Any], device: torch.device) -> None:
    """Allocates parameters that are on the meta device, on the device that was assigned or else on `device`. Optimizers may hold the parameters,
    so they stay the same objects, unless a weak reference or a graph prevents torch's swap of tensors. Parameters with values keep them."""
    # The parameters outlive the modes of this call. A second thread that waits for the lock finds nothing left to do.
    with _making, _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        for module in deferred(modules):
            finish_at_a_call(module)  # quantizes weights whose values were assigned without reset_parameters
            if not any(param is not None and param.is_meta for param in module._parameters.values()):
                module.__dict__["_deferred"] = False
                continue
            kept = []
            for name, param in list(module._parameters.items()):
                if param is None:
                    continue
                if not param.is_meta:
                    kept.append((param, param.detach().clone()))
                    continue
                give_memory(module, name, module.__dict__.get("_device") or device)
            module.reset_parameters()
            for param, value in kept:
                param.copy_(value)
            quantize_weights(module)
            module.__dict__["_deferred"] = False
