"""Experts whose biases are scaled, whose gradients go elsewhere, or which write tensors of the caller."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle

import pytest
import torch
from experts import TOLERANCE, grad_of, made, product, wide
from torch.testing import assert_close
from torch.utils._python_dispatch import BaseTorchDispatchMode

import tandem
from tandem import ops

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

SPLITS = ([3, 0, 5, 1], [2, 1, 3, 0])  # the second leaves rows behind


def rows_of(dtype=torch.float32, features=6):
    return torch.randn(9, features, dtype=dtype).requires_grad_()


# Scaled biases.


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_biases_times_a_number_per_row(splits, packed, dtype):
    module = made(dtype=dtype, scale_bias=True, single_grouped_bias=packed)
    x, scales, grad = rows_of(dtype), torch.rand(9, dtype=dtype).requires_grad_(), torch.randn(9, 5, dtype=dtype)
    y = module(x, torch.tensor(splits), scales)
    y.backward(grad)
    params, x64, scales64 = wide(module), x.detach().double().requires_grad_(), scales.detach().double().requires_grad_()
    expected = product(x64, splits, params, scales64)
    expected.backward(grad.double())
    tolerance = {"rtol": TOLERANCE[dtype], "atol": 4 * TOLERANCE[dtype]}
    assert_close(y.double(), expected.detach(), **tolerance)
    assert_close(x.grad.double(), x64.grad, **tolerance)
    assert_close(scales.grad.double(), scales64.grad, **tolerance)
    for name, param in module.named_parameters():
        assert_close(param.grad.double(), grad_of(params[name]), msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def test_scaled_biases_compiled_and_differentiated():
    module, splits = made(scale_bias=True), torch.tensor([3, 0, 5, 1])
    x, scales = rows_of(), torch.rand(9, requires_grad=True)
    expected = torch.autograd.grad(module(x, splits, scales).square().sum(), [x, scales, *module.parameters()])
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_close(torch.autograd.grad(compiled(x, splits, scales).square().sum(), [x, scales, *module.parameters()]), expected)
    double = made(scale_bias=True, dtype=torch.float64)
    inputs = [torch.randn(9, 6, dtype=torch.float64, requires_grad=True), torch.rand(9, dtype=torch.float64, requires_grad=True)]
    assert torch.autograd.gradcheck(lambda x, scales: double(x, splits, scales), inputs)
    tangents = torch.func.jvp(lambda x, scales: double(x, splits, scales), tuple(i.detach() for i in inputs), tuple(torch.ones_like(i) for i in inputs))[1]
    jacobian = torch.autograd.functional.jvp(lambda x, scales: product(x, [3, 0, 5, 1], wide(double), scales), tuple(inputs), tuple(map(torch.ones_like, inputs)))[1]
    assert_close(tangents, jacobian)


def test_there_are_scales_only_with_biases():
    assert ops.GroupedLinear(2, 4, 3, scale_bias=True).num_extra_inputs == 2
    module = ops.GroupedLinear(2, 4, 3, scale_bias=True, bias=False)
    assert module.num_extra_inputs == 1 and module(torch.ones(3, 4), torch.tensor([1, 2])).shape == (3, 3)
    assert ops.GroupedLinear(2, 4, 3).num_extra_inputs == 1
    with pytest.raises(ValueError, match="expected scale_bias=False, with which it was built, got True"):
        module = ops.GroupedLinear(2, 4, 3)
        module.scale_bias = True


def test_scales_of_any_shape_and_channel():
    module, x = made(scale_bias=True), torch.randn(3, 3, 6)
    splits, scales = torch.tensor([3, 0, 5, 1]), torch.rand(3, 3, requires_grad=True)
    y = module(x, splits, scales)
    assert torch.equal(y, module(x.reshape(9, 6), splits, scales.reshape(9)).reshape(3, 3, 5))
    y.sum().backward()
    assert scales.grad.shape == (3, 3)
    with pytest.raises(ValueError, match=r"grouped_linear: expected scales with 9 elements, one per row of x \[3, 3, 6\], got shape \[4\]"):
        module(x, splits, torch.rand(4))


# Gradients that go into main_grad.


def expected_gradients(module, x, splits, grad):
    params = wide(module)
    product(x.detach().double(), splits, params).backward(grad.double())
    return {name: grad_of(param).float() for name, param in params.items()}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("through", ["direct", "op", "compiled"])
def test_gradients_are_added_to_main_grad(through, packed):
    module, splits = made(accumulate_into_main_grad=True, single_grouped_weight=packed), [3, 0, 5, 1]
    weights = [module.weight] if packed else [getattr(module, f"weight{g}") for g in range(4)]
    names = ["weight"] if packed else [f"weight{g}" for g in range(4)]
    for weight in weights:
        weight.main_grad = torch.ones_like(weight)
    x, grad = rows_of(), torch.randn(9, 5)
    expected = expected_gradients(module, x, splits, grad)
    call = torch.compile(module, fullgraph=True) if through == "compiled" else module
    for step in (1, 2):
        with BaseTorchDispatchMode() if through == "op" else contextlib.nullcontext():
            y = call(x, torch.tensor(splits))
        y.backward(grad)
        for weight, name in zip(weights, names, strict=True):
            assert weight.grad is None
            assert_close(weight.main_grad, 1 + step * expected[name])
    assert_close(grad_of(module.bias0), 2 * expected["bias0"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_main_grad_is_overwritten_and_a_dummy_returned(dtype):
    module, splits = made(accumulate_into_main_grad=True, dtype=dtype), [3, 0, 5, 1]
    for g in range(4):
        weight = getattr(module, f"weight{g}")
        weight.main_grad, weight.overwrite_main_grad = torch.full(weight.shape, torch.nan), True
        weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, True
    x, grad = rows_of(dtype), torch.randn(9, 5).to(dtype)
    expected = expected_gradients(module, x, splits, grad)
    module(x, torch.tensor(splits)).backward(grad)
    for g in range(4):
        weight = getattr(module, f"weight{g}")
        assert_close(weight.main_grad, expected[f"weight{g}"], rtol=1e-5, atol=1e-5)  # not rounded to bfloat16
        assert weight.grad_added_to_main_grad and not weight.grad.any() and weight.grad.data_ptr() != weight.main_grad.data_ptr()


def test_a_main_grad_that_is_no_plain_matrix_gets_the_sum():
    module = made(groups=2, accumulate_into_main_grad=True)
    for g in range(2):
        getattr(module, f"weight{g}").main_grad = torch.zeros(6, 5, dtype=torch.float64).t()
    x, grad = rows_of(), torch.randn(9, 5)
    module(x, torch.tensor([4, 5])).backward(grad)
    expected = expected_gradients(module, x, [4, 5], grad)
    assert_close(module.weight1.main_grad.float(), expected["weight1"])


def test_main_grads_that_do_not_fit_are_told():
    module, splits = made(groups=2, accumulate_into_main_grad=True), torch.tensor([4, 5])
    with pytest.raises(RuntimeError, match="expected a tensor as main_grad of the weight"):
        module(rows_of(), splits)
    for g in range(2):
        getattr(module, f"weight{g}").main_grad = torch.zeros(6, 5)
    with pytest.raises(ValueError, match=r"grouped_linear: expected main_grad of the weight's shape \[5, 6\], got \[6, 5\]\. Allocate it like"):
        module(rows_of(), splits).sum().backward()
    for g in range(2):
        getattr(module, f"weight{g}").main_grad = torch.zeros(5, 6, dtype=torch.int64)
    with pytest.raises(ValueError, match="grouped_linear: expected main_grad to hold floating-point numbers without a gradient of its own, got "):
        module(rows_of(), splits).sum().backward()
    module.weight1.requires_grad_(False)
    with pytest.raises(RuntimeError, match="expected weights that are alike in requires_grad, overwrite_main_grad, .* got 2 kinds. Set them for all"):
        module(rows_of(), splits)
    module.weight0.requires_grad_(False)
    module(rows_of(), splits).sum().backward()
    module.accumulate_into_main_grad = False
    module.weight0.requires_grad_()
    module(rows_of(), splits).sum().backward()
    assert module.weight0.grad is not None


# Gradients that are computed later.


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("recipe", [None, tandem.recipe.Float8CurrentScaling(), tandem.recipe.MXFP8BlockScaling()], ids=str)
def test_gradients_of_weights_wait_for_backward_dw(recipe, packed):
    module = made(delay_wgrad_compute=True, single_grouped_weight=packed)
    plain = copy.deepcopy(module)
    plain.delay_wgrad_compute = False
    names, splits = module._main_grad_names, torch.tensor([3, 0, 5, 1])
    batches = [(torch.randn(9, 6), torch.randn(9, 5)) for _ in range(3)]
    fired = []
    module.register_wgrad_accumulation_and_reduce_hooks(lambda: fired.append(module.get_parameter(names[0]).grad is not None))
    for x, grad in batches:
        for each in (module, plain):
            with tandem.autocast(enabled=recipe is not None, recipe=recipe):
                y = each(x, splits)
            y.backward(grad)
    assert all(module.get_parameter(name).grad is None for name in names)
    bias = "bias0"
    assert torch.equal(module.get_parameter(bias).grad, plain.get_parameter(bias).grad)
    assert module.need_backward_dw() and not plain.need_backward_dw()
    for _ in batches:
        module.backward_dw()
    plain.backward_dw()
    assert fired == [True] * 3
    for name in names:
        assert_close(module.get_parameter(name).grad, plain.get_parameter(name).grad)
    with pytest.raises(RuntimeError, match="backward_dw: expected a backward before it whose gradients of weights are delayed, got none"):
        module.backward_dw()


def test_delayed_gradients_go_into_main_grad_and_past_frozen_weights():
    module, splits = made(groups=2, delay_wgrad_compute=True, accumulate_into_main_grad=True), torch.tensor([4, 5])
    module.weight0.requires_grad_(False)
    module.weight1.main_grad, module.weight1.grad_added_to_main_grad = torch.ones(5, 6), False
    x, grad = rows_of(), torch.randn(9, 5)
    expected = expected_gradients(module, x, [4, 5], grad)
    module(x, splits).backward(grad)
    assert torch.equal(module.weight1.main_grad, torch.ones(5, 6)) and not module.weight1.grad_added_to_main_grad
    module.backward_dw()
    assert_close(module.weight1.main_grad, 1 + expected["weight1"])
    assert module.weight0.grad is None and module.weight1.grad_added_to_main_grad
    assert module.weight1.grad.shape == (5, 6)  # the stand-in that owners of grad_added_to_main_grad wait for
    module.weight1.overwrite_main_grad = True
    module(x, splits).backward(grad)
    module.backward_dw()
    assert_close(module.weight1.main_grad, expected["weight1"])
    assert module.weight1.skip_backward_post_hook


def test_an_op_that_delays_in_the_midst_of_a_pipeline():
    first, last = made(delay_wgrad_compute=True, out_features=8), made(in_features=4, delay_wgrad_compute=True)
    box, splits = ops.Sequential(first, ops.SwiGLU(), last), torch.tensor([3, 0, 5, 1])
    x = rows_of()
    box(x, splits, splits).square().sum().backward()
    gradients = {}
    for module in (last, first):
        module.backward_dw()
        gradients[module] = [getattr(module, f"weight{g}").grad for g in range(4)]
        module.delay_wgrad_compute = False
    box.zero_grad()
    box(x, splits, splits).square().sum().backward()
    for module in (first, last):
        assert_close(gradients[module], [getattr(module, f"weight{g}").grad for g in range(4)])
    module.delay_wgrad_compute = True
    assert not pickle.loads(pickle.dumps(first)).wgrad_store.context and copy.deepcopy(box)[2].need_backward_dw()


def test_delayed_gradients_need_direct_calls():
    module, splits = made(delay_wgrad_compute=True), torch.tensor([3, 0, 5, 1])
    with torch.no_grad():
        module(rows_of(), splits)
    module.accumulate_into_main_grad = True
    text = "expected delay_wgrad_compute=False with accumulate_into_main_grad=True where the call goes through torch's dispatcher, got True. Build the op"
    with pytest.raises(NotImplementedError, match=text):
        torch.nn.utils.parametrizations.weight_norm(module, "weight0")(rows_of(), splits)
    module = made(delay_wgrad_compute=True)
    y = module(rows_of(), splits)
    with pytest.raises(NotImplementedError, match="grouped_linear: expected delay_wgrad_compute=False where the call is traced, got True"):
        with BaseTorchDispatchMode():
            y.backward(torch.ones(9, 5))


def test_compiled_code_computes_delayed_gradients_in_its_backward():
    module, splits = made(delay_wgrad_compute=True), torch.tensor([3, 0, 5, 1])
    x, grad, fired = rows_of(), torch.randn(9, 5), []
    module.register_wgrad_accumulation_and_reduce_hooks(lambda: fired.append(module.weight0.grad is not None))
    expected = expected_gradients(module, x, [3, 0, 5, 1], grad)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for times in (1, 2):
        compiled(x, splits).backward(grad)
        module.backward_dw()
        for name, gradient in expected.items():
            if name in dict(module.named_parameters()):
                assert_close(module.get_parameter(name).grad, times * gradient)
    module(x, splits).backward(grad)  # not compiled: it waits
    assert_close(module.weight0.grad, 2 * expected["weight0"])
    module.backward_dw()
    assert_close(module.weight0.grad, 3 * expected["weight0"])
    assert fired == [True] * 3


def test_a_weight_that_is_computed_gets_its_delayed_gradient_in_backward():
    module, splits = made(delay_wgrad_compute=True, bias=False), torch.tensor([3, 0, 5, 1])
    torch.nn.utils.parametrizations.weight_norm(module, "weight0")
    module(rows_of(), splits).square().sum().backward()
    assert all(param.grad is not None for param in module.parameters())
    module.backward_dw()


def test_a_missing_backward_is_told_of_though_other_code_was_compiled():
    compiled, alike, other = [tandem.Linear(8, width, delay_wgrad_compute=True) for width in (8, 8, 8)]
    other = tandem.ops.Sequential(tandem.Linear(8, 8, delay_wgrad_compute=True), tandem.ops.ReLU())
    torch.compile(compiled, backend="aot_eager")(torch.randn(4, 8)).sum().backward()
    for calls in (compiled, alike):  # `alike` could run the compiled code too
        calls(torch.randn(4, 8))
        calls.backward_dw()
    other(torch.randn(4, 8))
    with pytest.raises(RuntimeError, match="backward_dw: expected a backward before it whose gradients of weights are delayed, got none"):
        other[0].backward_dw()


# Tensors of the caller.


def test_the_output_and_the_gradient_of_the_input_are_written_into_tensors_of_the_caller():
    module, splits = made(), torch.tensor([3, 0, 5, 1])
    x, grad = rows_of(), torch.randn(9, 5)
    expected = module(x, splits)
    (expected_grad,) = torch.autograd.grad(expected, x, grad)
    y, grad_x = torch.full((9, 5), torch.nan), torch.full((9, 6), torch.nan)
    result = module(x, splits, output=y, grad_input=grad_x)
    assert result.data_ptr() == y.data_ptr() and torch.equal(y, expected) and result.requires_grad and not y.requires_grad
    (gradient,) = torch.autograd.grad(result, x, grad)
    assert gradient.data_ptr() == grad_x.data_ptr() and torch.equal(grad_x, expected_grad)
    with torch.no_grad():
        assert module(x, splits, output=y).data_ptr() == y.data_ptr()


def test_a_leaf_does_not_keep_the_caller_s_tensor_as_its_gradient():
    module, splits, x, grad_x = made(), torch.tensor([3, 0, 5, 1]), rows_of(), torch.empty(9, 6)
    gradients = [torch.randn(9, 5) for _ in range(3)]
    expected = [torch.autograd.grad(module(x, splits), x, gradient)[0] for gradient in gradients]
    y = module(x, splits, grad_input=grad_x)
    y.backward(gradients[0], retain_graph=True)
    y.backward(gradients[1])
    module(x, splits, grad_input=grad_x).backward(gradients[2])
    assert_close(x.grad, sum(expected))
    assert_close(grad_x, expected[2])


def test_tensors_of_the_caller_in_a_pipeline():
    first, last = made(out_features=8), made(in_features=4)
    box, splits, x = ops.Sequential(first, ops.SwiGLU(), last), torch.tensor([3, 0, 5, 1]), rows_of()
    expected = box(x, splits, splits)
    (expected_grad,) = torch.autograd.grad(expected.sum(), x)
    between, y, grad_x = torch.empty(9, 8), torch.empty(9, 5), torch.empty(9, 6)
    result = box(x, splits, splits, op_kwargs={first: {"output": between, "grad_input": grad_x}, 2: {"output": y}})
    assert_close(y, expected)
    assert result.data_ptr() == y.data_ptr() and torch.equal(between, first(x, splits))
    result.sum().backward()
    assert_close(grad_x, expected_grad)
    assert x.grad is grad_x or torch.equal(x.grad, grad_x)
    result = box(x, splits, splits, op_kwargs={0: {"output": between}})
    between.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


@pytest.mark.parametrize(
    ("tensor", "got"),
    [
        (torch.empty(9, 4), r"got one of shape \[9, 4\]"),
        (torch.empty(9, 5, dtype=torch.float64), "got one of shape .* Double"),
        (torch.empty(5, 9).t(), "not contiguous"),
        (torch.empty(9, 5, requires_grad=True), "that requires grad"),
    ],
)
def test_tensors_that_do_not_fit_are_told(tensor, got):
    with pytest.raises(ValueError, match=r"grouped_linear: expected a contiguous tensor without a gradient as output, of shape \[9, 5\], Float, on cpu, .*" + got):
        made()(rows_of(), torch.tensor([3, 0, 5, 1]), output=tensor)


def test_other_arguments_and_paths_are_told():
    module, splits = made(), torch.tensor([3, 0, 5, 1])
    with pytest.raises(TypeError, match="GroupedLinear: expected output or grad_input as arguments of a call, got an unexpected keyword argument 'out'. Leave it out"):
        module(rows_of(), splits, out=torch.empty(9, 5))
    with pytest.raises(TypeError, match="GroupedLinear: expected a tensor as output, got int"):
        module(rows_of(), splits, output=3)
    with pytest.raises(NotImplementedError, match="GroupedLinear: expected no output or grad_input where the call goes through torch's dispatcher, got one"):
        with BaseTorchDispatchMode():
            module(rows_of(), splits, output=torch.empty(9, 5))
    y = module(rows_of(), splits, grad_input=torch.empty(9, 6))
    with pytest.raises(NotImplementedError, match='grouped_linear: expected no "grad_input" where the call goes through torch.s dispatcher, got one'):
        with BaseTorchDispatchMode():
            y.backward(torch.ones(9, 5))
    y = torch.utils.checkpoint.checkpoint(lambda x: module(x, splits, output=torch.empty(9, 5)), rows_of(), use_reentrant=False)
    with pytest.raises(ValueError, match="pipeline: expected no tensor of the caller for an output while backward recomputes a forward"):
        y.sum().backward()


# Whatever else the constructor takes.


@pytest.mark.parametrize(
    "make", [functools.partial(ops.GroupedLinear, 2, 4, 3), functools.partial(ops.BasicLinear, 4, 3), functools.partial(ops.Linear, 4, 3)]
)
def test_weights_are_drawn_under_the_tracker_that_is_given(make):
    class Tracker:
        @contextlib.contextmanager
        def fork(self):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(7)
                yield

    state = torch.get_rng_state()
    first, second = (make(rng_state_tracker_function=Tracker) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    meta = make(device="meta", rng_state_tracker_function=Tracker).to_empty(device="cpu")
    meta.reset_parameters()
    assert torch.equal(torch.get_rng_state(), state) and all(map(torch.equal, first.parameters(), meta.parameters()))


def test_state_dicts_of_packed_weights_load_into_others_and_back():
    packed, parts = made(single_grouped_weight=True, single_grouped_bias=True), ops.GroupedLinear(4, 6, 5)
    parts.load_state_dict(packed.state_dict())
    assert torch.equal(parts.weight2, packed.weight[2]) and torch.equal(parts.bias3, packed.bias[3])
    again = ops.GroupedLinear(4, 6, 5, single_grouped_weight=True, single_grouped_bias=True)
    again.load_state_dict(parts.state_dict())
    assert torch.equal(again.weight, packed.weight) and torch.equal(again.bias, packed.bias)
    with pytest.raises(RuntimeError, match="Missing key"):
        again.load_state_dict(ops.GroupedLinear(2, 6, 5).state_dict())


def test_delayed_gradients_are_those_of_their_backward():
    splits, x = torch.tensor([3, 2]), torch.randn(5, 4)
    residual = torch.zeros(5, 4, requires_grad=True)
    module = ops.GroupedLinear(2, 4, 4, bias=False, delay_wgrad_compute=True)
    box = ops.Sequential(module, ops.AddExtraInput())
    for _ in range(2):  # the gradient of the residual, a leaf, is added to
        box(x, splits, residual).sum().backward()
    residual.grad.zero_()
    for _ in range(2):
        module.weight0.grad = None
        module.backward_dw()
        torch.testing.assert_close(module.weight0.grad, torch.ones(4, 3) @ x[:3])


@pytest.mark.parametrize("name", ["x", "the numbers of rows"])
def test_what_delayed_gradients_are_computed_from_stays(name):
    splits, x = torch.tensor([3, 2]), torch.randn(5, 4)
    module = ops.GroupedLinear(2, 4, 4, bias=False, delay_wgrad_compute=True)
    module(x, splits).sum().backward()
    (x if name == "x" else splits).zero_()
    with pytest.raises(RuntimeError, match=f"backward_dw: expected {name} unchanged since backward, as gradients of weights are computed from it, got an in-"):
        module.backward_dw()


def test_frozen_weights_delay_nothing():
    module = ops.GroupedLinear(2, 4, 4, bias=False, delay_wgrad_compute=True).requires_grad_(False)
    module(torch.randn(5, 4, requires_grad=True), torch.tensor([3, 2])).sum().backward()
    module.backward_dw()


def test_tensors_that_are_written_share_no_memory_with_what_is_read():
    module, splits = ops.GroupedLinear(2, 8, 8, bias=False), torch.tensor([3, 2])
    memory = torch.randn(6, 8)
    for x, output, what in ((memory[:5], memory[1:], "x"), (memory[:5], memory[:5], "x"), (torch.randn(5, 8), module.weight0.data[:5], "weight")):
        with torch.no_grad(), pytest.raises(ValueError, match=f"grouped_linear: expected memory of its own for output, got that of .*{what}.*, which is read"):
            module(x, splits, output=output)
    x = torch.randn(5, 8, requires_grad=True)
    y = module(x, splits, grad_input=module.weight1.data[:5])
    with pytest.raises(ValueError, match="grouped_linear: expected memory of its own for grad_input, got that of"):
        y.sum().backward()


def test_what_lies_between_rows_is_not_read():
    torch.manual_seed(0)
    memory = torch.full((70, 37), torch.nan, dtype=torch.bfloat16)
    rows = memory[:, 1:35]
    rows.copy_(torch.randn(70, 34))
    linear = ops.Linear(34, 6, dtype=torch.bfloat16)
    assert linear(rows).isfinite().all()
    y = ops.Linear(6, 34, dtype=torch.bfloat16)(x := torch.randn(70, 6).bfloat16().requires_grad_())
    y.backward(rows)
    assert x.grad.isfinite().all()
