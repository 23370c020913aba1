"""Gradients that go into `weight.main_grad`."""

from __future__ import annotations

import pytest
import torch
from support import tanh_gelu
from torch.testing import assert_close
from torch.utils._python_dispatch import BaseTorchDispatchMode

import tandem
from tandem import ops


def model(bias: bool = True, dtype: torch.dtype | None = None) -> ops.Sequential:
    torch.manual_seed(0)
    return ops.Sequential(
        ops.RMSNorm(8, dtype=dtype),
        ops.Linear(8, 24, bias=bias, dtype=dtype, accumulate_into_main_grad=True),
        ops.SwiGLU(),
        ops.Linear(12, 8, bias=bias, dtype=dtype, accumulate_into_main_grad=True),
    )


def weights(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [module[1].weight, module[3].weight]


def plain_gradients(module: ops.Sequential, x: torch.Tensor, grad: torch.Tensor) -> dict[str, torch.Tensor]:
    plain = ops.Sequential(
        ops.RMSNorm(8, dtype=x.dtype), ops.Linear(8, 24, dtype=x.dtype), ops.SwiGLU(), ops.Linear(12, 8, dtype=x.dtype)
    )
    plain.load_state_dict(module.state_dict())
    plain(x).backward(grad)
    return {name: param.grad for name, param in plain.named_parameters()}


@pytest.mark.parametrize("through", ["direct", "op", "compiled"])
def test_gradients_are_added_to_main_grad_and_nowhere_else(through: str) -> None:
    module = model()
    for weight in weights(module):
        weight.main_grad = torch.ones_like(weight)
    x, grad = torch.randn(5, 8), torch.randn(5, 8)
    expected = plain_gradients(module, x, grad)
    call = torch.compile(module, fullgraph=True) if through == "compiled" else module
    for step in (1, 2):
        if through == "op":
            with BaseTorchDispatchMode():
                y = call(x)
            y.backward(grad)
        else:
            call(x).backward(grad)
        for weight, name in zip(weights(module), ("1.weight", "3.weight"), strict=True):
            assert weight.grad is None
            assert_close(weight.main_grad, 1 + step * expected[name])
    assert_close(module[1].bias.grad, 2 * expected["1.bias"])


@pytest.mark.parametrize(("make", "sizes"), [(ops.BasicLinear, (8, 8)), (ops.GroupedLinear, (2, 8, 8))])
def test_a_delayed_gradient_has_a_stand_in_too(make, sizes) -> None:
    module = ops.Sequential(make(*sizes, accumulate_into_main_grad=True, delay_wgrad_compute=True))
    weights = [param for name, param in module.named_parameters() if "weight" in name]
    for weight in weights:
        weight.main_grad, weight.grad_added_to_main_grad, weight.zero_out_wgrad = torch.zeros_like(weight), False, True
    extra = (torch.tensor([2, 3]),) if isinstance(module[0], ops.GroupedLinear) else ()
    module(torch.randn(5, 8), *extra).sum().backward()
    assert not any(weight.main_grad.any() for weight in weights)
    module[0].backward_dw()
    for weight in weights:
        assert weight.main_grad.any() and weight.grad_added_to_main_grad and torch.equal(weight.grad, torch.zeros_like(weight))


def test_explain_shows_the_step_and_what_it_mutates() -> None:
    module = model()
    for weight in weights(module):
        weight.main_grad = torch.zeros_like(weight)
    module(torch.randn(5, 8)).sum().backward()
    text = module.explain()
    assert "basic_linear.accumulate" in text
    assert "(mutates 1.basic_linear.main_grad[0])" in text


@pytest.mark.parametrize("zero", [False, True])
def test_a_dummy_is_returned_where_the_owner_waits_for_a_gradient(zero: bool) -> None:
    module = model()
    for weight in weights(module):
        weight.main_grad = torch.zeros(weight.shape)
        weight.grad_added_to_main_grad = False
        weight.zero_out_wgrad = zero
    fired = []
    for weight in weights(module):
        weight.register_post_accumulate_grad_hook(lambda param: fired.append(param.grad_added_to_main_grad))
    y = module(torch.randn(5, 8))
    assert not any(weight.grad_added_to_main_grad for weight in weights(module)), "nothing has been written yet"
    y.sum().backward()
    assert fired == [True, True]
    for weight in weights(module):
        assert weight.grad.shape == weight.shape and weight.main_grad.abs().sum() > 0
        assert not zero or not weight.grad.any()


def test_main_grad_is_overwritten_where_the_weight_says_so() -> None:
    module = model()
    x, grad = torch.randn(5, 8), torch.randn(5, 8)
    expected = plain_gradients(module, x, grad)
    for weight in weights(module):
        weight.main_grad = torch.full_like(weight, torch.nan)
        weight.overwrite_main_grad = True
        weight.grad_added_to_main_grad = False
    module(x).backward(grad)
    assert_close(module[1].weight.main_grad, expected["1.weight"])
    assert_close(module[3].weight.main_grad, expected["3.weight"])
    assert module[1].weight.grad.data_ptr() != module[1].weight.main_grad.data_ptr()
    assert module[1].weight.grad_added_to_main_grad
    for weight in weights(module):
        weight.overwrite_main_grad = False
    module(x).backward(grad)
    assert_close(module[1].weight.main_grad, 2 * expected["1.weight"])


def test_a_wider_main_grad_sums_without_rounding_to_the_weights_dtype() -> None:
    module = model(dtype=torch.bfloat16)
    for weight in weights(module):
        weight.main_grad = torch.full(weight.shape, 1024.0)
    x, grad = torch.randn(5, 8).bfloat16(), torch.randn(5, 8).bfloat16()
    expected = plain_gradients(module, x, grad)
    module(x).backward(grad)
    added = module[3].weight.main_grad - 1024
    assert_close(added, expected["3.weight"].float(), rtol=2e-2, atol=2e-2)
    assert added.abs().sum() > 0


def test_under_a_recipe_the_sum_is_that_of_the_quantized_product() -> None:
    x, grad = torch.randn(5, 16), torch.randn(5, 32)
    linear = ops.Linear(16, 32, accumulate_into_main_grad=True)
    plain = ops.Linear(16, 32)
    plain.load_state_dict(linear.state_dict())
    linear.weight.main_grad = torch.zeros_like(linear.weight)
    for module in (linear, plain):
        with tandem.autocast(recipe=tandem.recipe.Float8CurrentScaling()):
            y = module(x)
        y.backward(grad)
    assert torch.equal(linear.weight.main_grad, plain.weight.grad)


def test_buffers_that_take_the_place_of_main_grad_after_forward_are_the_ones_written() -> None:
    linear = ops.Linear(4, 4, accumulate_into_main_grad=True)
    linear.weight.main_grad = torch.zeros(4, 4)
    y = linear(torch.ones(2, 4))
    linear.weight.main_grad = torch.zeros(4, 4)
    y.sum().backward()
    assert torch.equal(linear.weight.main_grad, torch.full((4, 4), 2.0))


def test_nothing_is_written_where_the_weights_gradient_is_not_asked_for() -> None:
    linear = ops.Linear(4, 4, accumulate_into_main_grad=True)
    linear.weight.main_grad = torch.zeros(4, 4)
    x = torch.ones(2, 4, requires_grad=True)
    torch.autograd.grad(linear(x).sum(), [x])
    assert not linear.weight.main_grad.any()
    linear.weight.requires_grad_(False)
    linear(x).sum().backward()
    assert not linear.weight.main_grad.any()
    del linear.weight.main_grad
    linear(x).sum().backward()
    with torch.no_grad():
        linear(x)


def test_one_buffer_for_two_layers_gets_both_gradients() -> None:
    first, second = ops.Linear(4, 4, bias=False, accumulate_into_main_grad=True), ops.Linear(4, 4, bias=False, accumulate_into_main_grad=True)
    second.weight = first.weight
    first.weight.main_grad = torch.zeros(4, 4)
    x = torch.randn(3, 4)
    ops.Sequential(first, second)(x).sum().backward()
    weight = first.weight.detach().clone().requires_grad_()
    (x @ weight.t() @ weight.t()).sum().backward()
    assert_close(first.weight.main_grad, weight.grad)


def test_a_checkpoint_writes_once() -> None:
    linear = ops.Linear(4, 4, accumulate_into_main_grad=True)
    linear.weight.main_grad = torch.zeros(4, 4)
    y = torch.utils.checkpoint.checkpoint(linear, torch.ones(2, 4), use_reentrant=False)
    y.sum().backward()
    assert torch.equal(linear.weight.main_grad, torch.full((4, 4), 2.0))


def test_a_missing_main_grad_is_told_before_anything_runs() -> None:
    with pytest.raises(RuntimeError, match=r"expected a tensor as main_grad of the weight, .* got NoneType\. Assign weight\.main_grad"):
        ops.Linear(4, 4, accumulate_into_main_grad=True)(torch.ones(2, 4))


def test_a_main_grad_of_another_shape_is_told() -> None:
    linear = ops.Linear(4, 3, accumulate_into_main_grad=True)
    linear.weight.main_grad = torch.zeros(4, 3)
    with pytest.raises(ValueError, match=r"linear: expected main_grad of the weight's shape \[3, 4\], got \[4, 3\]\. Allocate it like the weight"):
        linear(torch.ones(2, 4)).sum().backward()


def test_a_main_grad_in_memory_that_backward_reads_is_refused() -> None:
    memory, x = torch.randn(4, 4), torch.randn(4, 4)
    text = r"expected memory of its own for main_grad, got that of {}, which is read while it is written\. Allocate it by itself"
    linear = ops.Linear(4, 4, bias=False, accumulate_into_main_grad=True)
    for main_grad, named in ((memory.detach(), r"grad of 0\.basic_linear\.y"), (torch.from_numpy(x.numpy()), "x")):
        linear.weight.main_grad, before = main_grad, main_grad.clone()
        with pytest.raises(ValueError, match=f"linear: {text.format(named)}"):
            linear(x).backward(memory)
        assert torch.equal(main_grad, before)
    flat = torch.zeros(4, 8)  # columns beside those of x share none of its elements
    linear.weight.main_grad, apart = flat[:, :4], flat[:, 4:].copy_(x)
    linear(apart).backward(memory)
    torch.testing.assert_close(flat[:, :4], memory.t() @ x)
    grouped = ops.GroupedLinear(2, 4, 4, bias=False, accumulate_into_main_grad=True)
    grouped.weight0.main_grad, grouped.weight1.main_grad = torch.zeros(4, 4), memory.detach()
    with pytest.raises(ValueError, match=f"grouped_linear: {text.format('.*grad of .*')}"):
        grouped(x, torch.tensor([1, 3])).backward(memory)
    delayed = ops.BasicLinear(4, 4, accumulate_into_main_grad=True, delay_wgrad_compute=True)
    delayed.weight.main_grad = x.detach()
    delayed(x).backward(memory)
    with pytest.raises(ValueError, match=f"backward_dw: {text.format('x')}"):
        delayed.backward_dw()


def test_transforms_refuse() -> None:
    linear = ops.Linear(4, 4, accumulate_into_main_grad=True)
    linear.weight.main_grad = torch.zeros(4, 4)
    with pytest.raises(NotImplementedError, match="expected gradients that are returned, as torch.func returns them"):
        torch.func.grad(lambda x: linear(x).sum())(torch.ones(2, 4))


LINEAR = '{"ops":[{"op":"basic_linear","params":[0],"options":{"accumulate_into_main_grad":true%s}%s}]}'


@pytest.mark.parametrize(
    ("description", "text"),
    [
        (LINEAR % (',"dummy_gradient":"ones"', ',"buffers":[0]'), 'basic_linear: expected option dummy_gradient to be one of "none", "empty", "zeros", got "ones"'),
        (LINEAR % ("", ""), "0.basic_linear: expected 1 buffers, got 0. Give the position of each in the buffer list."),
        ('{"ops":[{"op":"grouped_linear","options":{"num_groups":0}}]}', "grouped_linear: expected option num_groups to be a whole number from 1 to 65536, got 0"),
        ('{"ops":[{"op":"all_gather","options":{"group":"g","size":0}}]}', "all_gather: expected option size to be a whole number from 1 to 1048576, got 0"),
    ],
)
def test_descriptions_are_checked(description: str, text: str) -> None:
    with pytest.raises(ValueError) as error:
        tandem._C.explain_description(description, "text")
    assert text in str(error.value)


def test_a_module_at_two_places_overwrites_once_and_a_tensor_at_two_is_refused() -> None:
    first, second = [ops.Linear(4, 4, bias=False, accumulate_into_main_grad=True) for _ in range(2)]
    first.weight.main_grad, first.weight.overwrite_main_grad = torch.full((4, 4), torch.nan), True
    x = torch.randn(2, 4)
    ops.Sequential(first, ops.GELU(), first)(x).sum().backward()
    weight = first.weight.detach().requires_grad_()
    ((tanh_gelu(x @ weight.t())) @ weight.t()).sum().backward()
    assert_close(first.weight.main_grad, weight.grad)
    second.weight = first.weight
    for delays in ((False, False), (True, False), (False, True), (True, True)):
        first.delay_wgrad_compute, second.delay_wgrad_compute = delays
        with pytest.raises(RuntimeError, match=r"expected a weight with overwrite_main_grad at one place of a pipeline, got one at two: .*\. Set main_grad to zero instead"):
            ops.Sequential(first, second)(x)
