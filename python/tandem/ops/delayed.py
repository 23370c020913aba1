"""Gradients of weights that `backward_dw` computes after backward, when the training loop calls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tandem import _C
from tandem.op_base import main_grad
from tandem.op_base.deferred import DeferredMixin
from tandem.op_base.places import places
from tandem.ops.op import BasicOperation
from tandem.pipelines.buffers import Delayed, Entry


class ProductOperation(DeferredMixin, BasicOperation):
    """A basic op with products. If the attribute `delay_wgrad_compute` is true, backward leaves the gradients of weights to `backward_dw`."""

    wgrad_store: Delayed
    delay_wgrad_compute: bool
    _deferred_tensors: int  # number of tensors of an entry of the store

    _watched_names = ("accumulate_into_main_grad", "delay_wgrad_compute")

    def _checked_option(self, name: str, value: Any) -> Any:
        value = super()._checked_option(name, value)
        if name == "delay_wgrad_compute":
            self.__dict__.setdefault("wgrad_store", Delayed(tensors=self._deferred_tensors)).enabled = value
        return value

    def _weights(self) -> list[torch.nn.Parameter]:
        """The parameters whose gradients may be delayed, as their owner holds them."""
        return [getattr(module, name) for module, name in places(self, "_parameters")]

    def need_backward_dw(self) -> bool:
        """Whether backward leaves the gradients of the weights to `backward_dw`."""
        return self.delay_wgrad_compute

    def backward_dw(self) -> None:
        """Computes the gradients of weights that the oldest backward has left, adds them to `grad` or `main_grad`, and calls the registered hooks.
        Without `delay_wgrad_compute` it does nothing. In compiled code and under modes, backward has computed the gradients, so only the hooks are
        called. Raises RuntimeError if no backward ran, unless compiled code of a pipeline with this op's description exists: it may have run."""
        if not self.need_backward_dw():
            return
        weights = self._weights()
        if not self.wgrad_store.context and not any(weight.requires_grad for weight in weights):
            return  # backward leaves nothing, because all weights are frozen
        if self.wgrad_store.context or not self.wgrad_store.may_be_computed():
            with torch.no_grad():
                self._compute_left(self.wgrad_store.pop(), weights)
        for hook in self.__dict__.get("_wgrad_accumulation_and_reduce_hooks", ()):
            hook()

    def _compute_left(self, left: Entry, weights: Sequence[torch.nn.Parameter]) -> None:
        raise NotImplementedError

    def register_wgrad_accumulation_and_reduce_hooks(self, wgrad_accumulation_and_reduce_hook: Callable[[], Any]) -> None:
        """Makes `backward_dw` call a hook at its end."""
        self.__dict__.setdefault("_wgrad_accumulation_and_reduce_hooks", []).append(wgrad_accumulation_and_reduce_hook)


def add_gradient(weight: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
    """Adds a gradient to `weight.grad`, as autograd does with a gradient that backward returns."""
    if not weight.requires_grad or gradient is None:
        return
    if weight.grad is None:
        weight.grad = gradient.to(weight.dtype)
    else:
        weight.grad.add_(gradient)


def add_to_main_grad(weight: Any, gradient: torch.Tensor, is_first: bool) -> None:
    """Adds a gradient to the `main_grad` of a weight as backward does, and its dummy gradient, if any, to `weight.grad`."""
    if weight.requires_grad:
        add_gradient(weight, main_grad.absorb("backward_dw", weight, gradient, is_first))


def product_into_main_grad(weight: Any, left: Entry) -> None:
    """Computes the gradient of one product directly into `main_grad`, and adds its dummy gradient, if any, to `weight.grad`."""
    is_added = not left.is_first and not getattr(weight, "overwrite_main_grad", False)
    _C.add_left_grad_weight(list(left), main_grad.take(weight), is_added)
    add_gradient(weight, main_grad.stand_in(weight))
