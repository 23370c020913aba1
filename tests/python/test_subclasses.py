"""Subclasses of ops of the library that replace one direction and call the other, with what makes a backward write elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import randomize
from torch.testing import assert_close

import tandem
from tandem import ops


class OwnBackward(ops.BasicLinear):
    def op_backward(self, ctx: Any, grad_output: Any) -> Any:
        return super().op_backward(ctx, 2 * grad_output)


class OwnForward(OwnBackward):
    def op_forward(self, ctx: Any, input_: Any, **kwargs: Any) -> Any:
        return super().op_forward(ctx, input_, **kwargs)


class OwnGrouped(ops.GroupedLinear):
    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, **kwargs: Any) -> Any:
        return super().fuser_backward(basic_op_ctxs, 2 * grad_output, **kwargs)


@pytest.mark.parametrize("made", [OwnBackward, OwnForward])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("announced", [False, True])
def test_main_grad_of_a_product(made: Any, overwrite: bool, announced: bool) -> None:
    linear, x = made(8, 6, accumulate_into_main_grad=True), torch.randn(4, 8, requires_grad=True)
    linear.weight.main_grad = torch.ones(6, 8)
    linear.weight.overwrite_main_grad = overwrite
    if announced:
        linear.weight.grad_added_to_main_grad, linear.weight.zero_out_wgrad = False, True
    box, grad = ops.Sequential(linear, ops.GELU()), torch.randn(4, 6)
    box(x).backward(grad)
    plain, z = x.detach().clone().requires_grad_(), linear.weight.detach().clone().requires_grad_()
    ops.GELU()(torch.nn.functional.linear(plain, z)).backward(grad)
    assert_close(linear.weight.main_grad, 2 * z.grad + (0 if overwrite else 1))
    assert_close(x.grad, 2 * plain.grad)
    assert linear.weight.grad is None or not linear.weight.grad.any()
    assert not announced or linear.weight.grad_added_to_main_grad
    del linear.weight.main_grad
    with pytest.raises(RuntimeError, match=f"{made.__name__}: expected a tensor as main_grad of the weight, as accumulate_into_main_grad=True asks"):
        box(x).backward(grad)


def grouped(made: Any, **options: Any) -> tuple[Any, Any]:
    module, plain = randomize(made(2, 8, 6, **options)), ops.GroupedLinear(2, 8, 6, scale_bias=options.get("scale_bias", False))
    plain.load_state_dict(module.state_dict())
    return module, plain


def test_main_grads_of_products_of_groups() -> None:
    module, plain = grouped(OwnGrouped, accumulate_into_main_grad=True)
    for weight in (module.weight0, module.weight1):
        weight.main_grad = torch.zeros_like(weight)
    x, splits = torch.randn(5, 8), torch.tensor([2, 3])
    module(x, splits).sum().backward()
    plain(x, splits).sum().backward()
    assert_close(module.weight0.main_grad, 2 * plain.weight0.grad)
    assert_close(module.weight1.main_grad, 2 * plain.weight1.grad)
    assert_close(module.bias1.grad, 2 * plain.bias1.grad)


@pytest.mark.parametrize("recipe", [None, tandem.recipe.MXFP8BlockScaling()])
def test_delayed_gradients_of_products_of_groups(recipe: Any) -> None:
    module, plain = grouped(OwnGrouped, delay_wgrad_compute=True)
    x, splits = torch.randn(64, 8, requires_grad=True), torch.tensor([32, 32])
    with tandem.autocast(enabled=recipe is not None, recipe=recipe):
        module(x, splits).sum().backward()
        assert module.weight0.grad is None or not module.weight0.grad.any()
        module.backward_dw()
        plain(x, splits).sum().backward()
    assert_close(module.weight0.grad, 2 * plain.weight0.grad)
    assert_close(module.weight1.grad, 2 * plain.weight1.grad)
    module(x, splits).sum().backward()
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="backward_dw: expected x unchanged since backward"):
        module.backward_dw()
    with pytest.raises(Exception, match="OwnGrouped: expected delay_wgrad_compute=False where the call goes through torch's dispatcher"):
        torch.compile(module, backend="aot_eager")(x, splits).sum().backward()
    with pytest.raises(ValueError, match="OwnGrouped: expected x and splits on its context, got None and None. Save what its own forward saves."):
        module._library_backward_of(ops.OperationContext(saved_tensors=(None, None, None)), (torch.ones(4, 6),))


def test_delayed_gradients_of_products_of_groups_go_into_main_grad() -> None:
    module, plain = grouped(OwnGrouped, delay_wgrad_compute=True, accumulate_into_main_grad=True)
    x, splits = torch.randn(64, 8), torch.tensor([32, 32])
    weights = [module.weight0, module.weight1]
    for weight in weights:
        weight.main_grad = torch.ones_like(weight)  # type: ignore[attr-defined]
    module(x, splits).sum().backward()
    module.backward_dw()
    plain(x, splits).sum().backward()
    for weight, same in zip(weights, [plain.weight0, plain.weight1], strict=True):
        assert_close(weight.main_grad, 1 + 2 * same.grad)  # type: ignore[attr-defined]


def test_scales_of_biases_of_groups() -> None:
    module, plain = grouped(OwnGrouped, scale_bias=True)
    x, scales, splits = torch.randn(5, 8, requires_grad=True), torch.randn(5, requires_grad=True), torch.tensor([2, 3])
    y, expected = module(x, splits, scales), plain(x, splits, scales)
    assert_close(y, expected)
    requested = [x, scales]
    for got, wanted in zip(
        torch.autograd.grad(y.sum(), [*requested, *module.parameters()]), torch.autograd.grad(expected.sum(), [*requested, *plain.parameters()]), strict=True
    ):
        assert_close(got, 2 * wanted)
