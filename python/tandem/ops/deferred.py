"""Parameters of modules that are made on the meta device: the first call with a real input gives them memory and first values."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tandem.quantized.init import finish_at_a_call, give_memory, is_pending, note_init, quantize_weights, resetting

_making = threading.Lock()


class DeferredMixin:
    """For modules with parameters and `reset_parameters`, which classes of users may define again."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if (reset := cls.__dict__.get("reset_parameters")) is not None:
            cls.reset_parameters = resetting(reset)  # type: ignore[attr-defined]

    def _give_first_values(self: Any) -> None:
        """To be called by constructors: resets the parameters, or, where they are on the meta device, leaves that to the first call."""
        if any(param.is_meta for param in self.parameters()):
            self.__dict__["_deferred"] = True
        else:
            self.reset_parameters()
        note_init(self)
        quantize_weights(self)

    def _weights_in_codes(self: Any) -> tuple[Sequence[str], str]:
        """The names of the weights that are in codes where the module is made inside `quantized_model_init`, and the kind of op that multiplies by them."""
        return getattr(self, "_main_grad_names", ()), getattr(self, "_kind", "")

    @property
    def device(self: Any) -> torch.device:
        """Where the parameters are, or, if a device was assigned while they are on the meta device, where they will be made. Assigning moves
        them."""
        param = next(self.parameters(), None)
        if param is None:
            raise AttributeError("device")  # for which torch.nn.Module has the text
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
    """Those whose parameters the first call makes, or puts into codes. What has got parameters in another way is none of them any more."""
    found = {}
    for module in modules:
        if module.__dict__.get("_deferred"):
            if is_pending(module) or any(param is not None and param.is_meta for param in module._parameters.values()):
                found[id(module)] = module
            else:
                module.__dict__["_deferred"] = False
    return tuple(found.values())


def materialize(modules: Iterable[Any], device: torch.device) -> None:
    """Makes the parameters that are on the meta device, on the device that was assigned or else on `device`. They stay the same objects, which
    optimizers may hold, unless somebody looks at them whom torch does not tell of a swap; those that have values keep them."""
    # What is made outlives the modes of this call. A second thread finds it made.
    with _making, _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        for module in deferred(modules):
            finish_at_a_call(module)  # of weights that others have given values
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
