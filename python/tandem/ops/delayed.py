"""Gradients of weights that are computed after backward, when who trains asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tandem import _C
from tandem.ops import main_grad
from tandem.ops.buffers import Delayed, Entry
from tandem.ops.places import places


class DelayedMixin:
    """For ops with products whose backward may leave the gradients of weights to `backward_dw`: the attribute `delay_wgrad_compute` says so."""

    wgrad_store: Delayed
    delay_wgrad_compute: bool
    _deferred_tensors: int  # of an entry of the store

    def _set_delay(self: Any, value: bool) -> bool:
        """To be called where the attribute is set."""
        store = self.__dict__.setdefault("wgrad_store", Delayed(tensors=self._deferred_tensors))
        store.enabled = value
        return value

    def _weights(self: Any) -> list[torch.nn.Parameter]:
        """The parameters whose gradients may come later, as their owner holds them."""
        return [getattr(module, name) for module, name in places(self, "_parameters")]

    def need_backward_dw(self) -> bool:
        """Whether backward leaves the gradients of the weights to `backward_dw`."""
        return self.delay_wgrad_compute

    def backward_dw(self: Any) -> None:
        """Computes the gradients of the weights that the oldest backward has left, and adds them to `grad`, or to `main_grad`. Does nothing
        where backward leaves none; of calls in compiled code and under modes, whose backward has computed them, it calls the registered hooks alone.
        RuntimeError where there was no backward, unless code was compiled of a pipeline that is described as this op's is: it may have run."""
        if not self.need_backward_dw():
            return
        weights = self._weights()
        if not self.wgrad_store.context and not any(weight.requires_grad for weight in weights):
            return  # all frozen: backward has left nothing
        if self.wgrad_store.context or not self.wgrad_store.may_be_computed():
            with torch.no_grad():
                self._compute_left(self.wgrad_store.pop(), weights)
        for hook in self.__dict__.get("_wgrad_accumulation_and_reduce_hooks", ()):
            hook()

    def _compute_left(self, left: Entry, weights: Sequence[torch.nn.Parameter]) -> None:
        raise NotImplementedError

    def register_wgrad_accumulation_and_reduce_hooks(self, wgrad_accumulation_and_reduce_hook: Callable[[], Any]) -> None:
        """Has `backward_dw` call a hook at its end."""
        self.__dict__.setdefault("_wgrad_accumulation_and_reduce_hooks", []).append(wgrad_accumulation_and_reduce_hook)


def add_gradient(weight: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
    """What backward does with a gradient that it returns."""
    if not weight.requires_grad or gradient is None:
        return
    if weight.grad is None:
        weight.grad = gradient.to(weight.dtype)
    else:
        weight.grad.add_(gradient)


def add_to_main_grad(weight: Any, gradient: torch.Tensor, is_first: bool) -> None:
    """What backward does with a gradient of a weight that has a `main_grad`."""
    if weight.requires_grad:
        add_gradient(weight, main_grad.absorb("backward_dw", weight, gradient, is_first))


def product_into_main_grad(weight: Any, left: Entry) -> None:
    """The same of one product, which adds to `main_grad` itself."""
    is_added = not left.is_first and not getattr(weight, "overwrite_main_grad", False)
    _C.add_left_grad_weight(list(left), main_grad.take(weight), is_added)
    add_gradient(weight, main_grad.stand_in(weight))
