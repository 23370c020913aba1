"""Tensors in more than one place: tied weights, outputs that share memory, what hooks give back."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from support import AsksFunctions, assert_equal, fork, join, randomize, tanh_gelu
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import BaseTorchDispatchMode

import tandem
import tandem.ops as ops
from tandem.recipe import Float8CurrentScaling


def grads_of(y, inputs, seed=3, retain_graph=None):
    outputs = y if isinstance(y, tuple) else (y,)
    generator = torch.Generator().manual_seed(seed)
    given = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype) for o in outputs]
    return torch.autograd.grad(outputs, inputs, given, retain_graph=retain_graph)


# One tensor in several places.


def tied(kind, dtype=torch.float64):
    """A pipeline in which one tensor has two places, its arguments, and the same in torch operations."""
    make, shape, apply = {
        "linear": (lambda: ops.BasicLinear(8, 8, dtype=dtype), (8, 8), F.linear),
        "rms_norm": (lambda: ops.RMSNorm(8, dtype=dtype), (8,), lambda x, w: x * torch.rsqrt((x * x).mean(-1, True) + 1e-5) * w),
        "bias": (lambda: ops.Bias(8, dtype=dtype), (8,), torch.add),
    }[kind]
    a, b = make(), make()
    weight = torch.nn.Parameter(torch.randn(shape, dtype=dtype))
    name = next(name for name, _ in a.named_parameters())
    setattr(a, name, weight)
    setattr(b, name, weight)
    return ops.Sequential(a, ops.GELU(), b), weight, lambda x, w: apply(tanh_gelu(apply(x, w)), w)


@pytest.mark.parametrize("kind", ["linear", "rms_norm", "bias"])
@pytest.mark.parametrize("x_grad", [False, True])
def test_one_parameter_in_two_ops(kind, x_grad):
    box, weight, reference = tied(kind)
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=x_grad)
    requested = [x, weight] if x_grad else [weight]
    y = box(x)
    expected = grads_of(reference(x, weight), requested)
    for retain in (True, True, False):
        torch.testing.assert_close(grads_of(y, requested, retain_graph=retain), expected)
    (weight_grad,) = grads_of(box(x), [weight])
    torch.testing.assert_close(weight_grad, expected[-1])


def test_one_parameter_in_two_linears_under_a_recipe():
    box, weight, _ = tied("linear", torch.float32)
    apart = [ops.BasicLinear(8, 8), ops.BasicLinear(8, 8)]
    for op in apart:
        op.weight = torch.nn.Parameter(weight.detach().clone())
    x = torch.randn(4, 8, requires_grad=True)
    with tandem.autocast(recipe=Float8CurrentScaling()):
        together, separate = box(x), ops.Sequential(apart[0], ops.GELU(), apart[1])(x)
    assert torch.equal(together, separate)
    actual = grads_of(together, [x, weight])
    x_grad, one, two = grads_of(separate, [x, apart[0].weight, apart[1].weight])
    assert torch.equal(actual[0], x_grad)
    torch.testing.assert_close(actual[1], one + two)


def test_a_weight_as_input_and_an_input_as_extra_input():
    linear = ops.BasicLinear(8, 8, dtype=torch.float64)
    weight = linear.weight
    torch.testing.assert_close(grads_of(linear(weight), [weight]), grads_of(F.linear(weight, weight), [weight]))
    box = ops.Sequential(ops.GELU(), ops.AddExtraInput(), ops.RMSNorm(8, dtype=torch.float64), ops.AddExtraInput(), ops.SiLU())
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)

    def reference(x, w):
        h = tanh_gelu(x) + x
        return F.silu(h * torch.rsqrt((h * h).mean(-1, True) + 1e-5) * w + x)

    torch.testing.assert_close(grads_of(box(x, x, x), [x]), grads_of(reference(x, box[2].weight), [x]))


def test_a_shared_tensor_is_packed_and_unpacked_once_and_freed_with_its_last_use():
    box, weight, reference = tied("linear")
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    packed, unpacked = [], []

    def pack(tensor):
        packed.append(tensor.data_ptr())
        return tensor.clone()

    def unpack(tensor):
        unpacked.append(weakref.ref(tensor))
        return tensor

    with saved_tensors_hooks(pack, unpack):
        y = box(x)
    assert packed.count(weight.data_ptr()) == 1
    actual = grads_of(y, [x, weight])
    assert len(unpacked) == len(packed)
    gc.collect()
    assert all(reference() is None for reference in unpacked)
    torch.testing.assert_close(actual, grads_of(reference(x, weight), [x, weight]))


def test_what_a_python_op_saves_is_freed_when_its_backward_has_run():
    alive_in_backward = []

    class Keeping(ops.BasicOperation):
        """Notes which of the tensors that ops of this kind saved still live when its backward runs."""

        saved = []

        def op_forward_compute(self, input_):
            kept = torch.full((1000,), 2.0)
            self.saved.append(weakref.ref(kept))
            return input_ * 2, [kept]

        def op_forward_save_ctx(self, ctx, input_, tensors_to_save):
            ctx.save_for_backward(*tensors_to_save)

        def op_backward(self, ctx, grad_output):
            (kept,) = ctx.saved_tensors
            factor = kept[0].clone()
            del kept
            alive_in_backward.append([reference() is not None for reference in self.saved])
            return grad_output * factor, []

    x = torch.randn(3, requires_grad=True)
    y = ops.Sequential(Keeping(), ops.GELU(), Keeping())(x)
    (grad,) = grads_of(y, [x])
    assert [alive[0] for alive in alive_in_backward] == [True, True]
    assert alive_in_backward[1][1] is False, "the second op's tensor, when the first op's backward runs"
    assert not any(reference() for reference in Keeping.saved) and y.grad_fn is not None, "nor does the output keep them"
    torch.testing.assert_close(grad, grads_of(tanh_gelu(x * 2) * 2, [x])[0])


def test_what_a_python_op_notes_is_freed_when_its_backward_has_run():
    alive_in_backward = []

    class Note:
        """What is no tensor."""

    class Noting(ops.BasicOperation):
        """Notes which of the notes of ops of this kind still live when its backward runs."""

        notes = []

        def op_forward(self, ctx, input_, **unused):
            ctx.note = Note()
            self.notes.append(weakref.ref(ctx.note))
            return input_ * 2

        def op_backward(self, ctx, grad_output):
            alive_in_backward.append([note() is not None for note in self.notes])
            return grad_output * 2, []

    x = torch.randn(3, requires_grad=True)
    y = ops.Sequential(Noting(), ops.GELU(), Noting())(x)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert alive_in_backward == [[True, True]] * 3 + [[True, False]], "only what is not needed again is freed"


@pytest.mark.parametrize(("rows", "copies"), [(4, 0), (1024, 1)])  # calling torch's copy takes longer than filling a few elements
def test_a_gradient_that_repeats_one_element_is_written_out_once(rows, copies):
    model, x = ops.Sequential(ops.Linear(8, 8)), torch.randn(rows, 8, requires_grad=True)
    arguments, grad = [x, *model.parameters()], torch.tensor(0.5).expand(rows, 8)
    y = model(x)
    with torch.profiler.profile() as profile:
        actual = torch.autograd.grad(y, arguments, grad, retain_graph=True)
    names = [event.name for event in profile.events()]
    assert names.count("aten::copy_") == copies and "aten::clone" not in names
    torch.testing.assert_close(actual, torch.autograd.grad(y, arguments, grad.clone()))


# Outputs that share memory.


VIEW = "is a view and is being modified inplace"
LATER = "is a view and its base or another view of its base has been modified inplace"
ALIASES = {
    "identity": (lambda: ops.Identity(), lambda x: (x,)),
    "reshape": (lambda: ops.Reshape((2, 2, 2)), lambda x: (x.reshape(2, 2, 2),)),
    "reshape of reshape": (lambda: ops.Sequential(ops.Reshape((8,)), ops.Reshape((2, 4))), lambda x: (x,)),
    "extra output": (lambda: ops.MakeExtraOutput(), lambda x: (x, x)),
    "extra output and reshape": (
        lambda: ops.Sequential(ops.MakeExtraOutput(), ops.Reshape((-1,)), ops.MakeExtraOutput()),
        lambda x: (x.reshape(-1), x, x.reshape(-1)),
    ),
    "result twice": (lambda: ops.Sequential(ops.GELU(), ops.MakeExtraOutput()), lambda x: (tanh_gelu(x),) * 2),
    "result and its reshape": (
        lambda: ops.Sequential(ops.GELU(), ops.MakeExtraOutput(), ops.Reshape((-1,))),
        lambda x: (tanh_gelu(x).reshape(-1), tanh_gelu(x)),
    ),
}


@pytest.mark.parametrize("leaf", [False, True])
@pytest.mark.parametrize("name", ALIASES)
def test_outputs_that_share_memory_have_the_right_values_and_gradients(name, leaf):
    make, reference = ALIASES[name]
    w = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    x = w if leaf else w * 1
    outputs, expected = make()(x), reference(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.testing.assert_close(outputs, tuple(e * 1 for e in expected))
    torch.testing.assert_close(grads_of(outputs, [w], retain_graph=True), grads_of(tuple(e * 1 for e in expected), [w]))


@pytest.mark.parametrize("leaf", [False, True])
@pytest.mark.parametrize("name", ALIASES)
def test_writing_one_of_them_in_place_raises_or_is_right(name, leaf):
    make, reference = ALIASES[name]
    count = len(reference(torch.zeros(2, 4)))
    for index in range(count):
        w = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
        x, before = w if leaf else w * 1, w.detach().clone()
        outputs = make()(x)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        is_result = name.startswith("result")
        try:
            outputs[index].mul_(2)
        except RuntimeError as error:
            assert VIEW in str(error)
            assert torch.equal(w, before)
            continue
        assert is_result, "an argument was written without an error"
        with pytest.raises(RuntimeError, match=LATER):
            sum(output.sum() for output in outputs).backward()
        (grad,) = grads_of(outputs[index], [w])
        torch.testing.assert_close(grad, grads_of(2 * reference(w)[index], [w])[0])


def test_an_argument_that_is_written_later_is_found_at_the_next_use_of_the_output():
    x = torch.randn(4, requires_grad=True) * 1
    y = ops.Identity()(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match=LATER):
        (y + x).sum().backward()


def test_an_output_without_grad_shares_memory_as_a_tracked_view():
    x, w = torch.ones(2, 4), torch.full((4,), 3.0, requires_grad=True)
    y, extra = ops.Sequential(ops.MakeExtraOutput(), ops.Bias(4))(x)
    assert not extra.requires_grad and extra.data_ptr() == x.data_ptr()
    extra.mul_(w)
    assert x.requires_grad, "its base has the history of the write"
    assert torch.equal(grads_of(x, [w], retain_graph=True)[0], grads_of(extra, [w])[0])
    y.sum().backward()


def test_a_write_to_a_reshape_of_what_backward_reads_is_found():
    linear = randomize(ops.Linear(4, 4))
    box = ops.Sequential(linear, ops.Reshape((-1,)), ops.MakeExtraOutput(), ops.Reshape((-1, 4)), ops.GELU())
    y, between = box(torch.randn(2, 4))
    with torch.no_grad():
        between.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_ordinary_outputs_may_be_written():
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    y = ops.Sequential(ops.ConstantScale(3.0), ops.Reshape((8,)))(x)
    assert not y._is_view()
    y.mul_(2)
    torch.testing.assert_close(grads_of(y, [x]), grads_of((6 * x).reshape(8), [x]))


def test_a_python_op_that_returns_its_input_or_a_view_of_it():
    class Transpose(ops.BasicOperation):
        def op_forward_compute(self, input_):
            return input_.t(), []

        def op_forward_save_ctx(self, ctx, input_, tensors_to_save):
            pass

        def op_backward(self, ctx, grad_output):
            return grad_output.t(), []

    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    box = ops.Sequential(Transpose(), ops.GELU())
    torch.testing.assert_close(grads_of(box(x), [x]), grads_of(tanh_gelu(x.t()), [x]))
    y = ops.Sequential(Transpose())(x * 1)
    with pytest.raises(RuntimeError, match=VIEW):
        y.mul_(2)


class Square(ops.BasicOperation):
    """Saves its input."""

    def op_forward_compute(self, input_):
        return input_ * input_, [input_]

    def op_forward_save_ctx(self, ctx, input_, tensors_to_save):
        ctx.save_for_backward(*tensors_to_save)

    def op_backward(self, ctx, grad_output):
        return 2 * ctx.saved_tensors[0] * grad_output, []


class AsIs(ops.BasicOperation):
    """Returns its input."""

    def op_forward_compute(self, input_):
        return input_.view_as(input_), []

    def op_forward_save_ctx(self, ctx, input_, tensors_to_save):
        pass

    def op_backward(self, ctx, grad_output):
        return grad_output, []


def in_place():
    return ops.AddExtraInput(in_place=True)


READ_AGAIN = {
    "through numpy": (lambda: [in_place(), ops.AddExtraInput()], lambda x, b: (x, b, torch.from_numpy(b.detach().numpy())), "extra 1", "a later op reads it"),
    "channel of a Python op": (lambda: [AsIs(), fork(), in_place(), join()], lambda x, b: (b, b), ".*", "a later op reads it"),
    "saved by a Python op": (lambda: [Square(), in_place()], lambda x, b: (b, b), ".*", "backward reads it"),
}


@pytest.mark.parametrize("name", READ_AGAIN)
def test_nothing_else_may_read_what_an_in_place_sum_overwrites(name):
    """As tests/autograd/in_place_test.cpp has it for views and for ops of the library."""
    make, arguments, value, why = READ_AGAIN[name]
    x, leaf = (torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    b = leaf * 1
    text = (
        rf"pipeline: expected {value} unchanged until the end of the call, as {why}, got an in-place write by an op of the pipeline\. "
        r"Use in_place=False, or write into a copy\."
    )
    with pytest.raises(RuntimeError, match=text):
        ops.Sequential(*make())(*arguments(x, b))
    assert torch.equal(b, leaf) and b.grad_fn.name() == "MulBackward0"


class Subclass(torch.Tensor):
    pass


def within(context):
    def call(box, x, b):
        with context:
            return box(x, b)

    return call


def with_parametrized_weight(box, x, b):
    linear = ops.BasicLinear(4, 4)
    torch.nn.utils.parametrizations.orthogonal(linear)
    return ops.Sequential(linear, *box)(x, b)


NOT_PLAIN = {
    "function mode": within(AsksFunctions()),
    "dispatch mode": within(BaseTorchDispatchMode()),
    "subclass": lambda box, x, b: box(x.as_subclass(Subclass), b),
    "subclass to write": lambda box, x, b: box(x, b.as_subclass(Subclass)),
    "vmap": lambda box, x, b: torch.vmap(box)(x, b),
    "grad": lambda box, x, b: torch.func.grad(lambda x: box(x, b).sum())(x),
    "jvp": lambda box, x, b: torch.func.jvp(lambda x: box(x, b), (x,), (x,)),
    "parametrization": with_parametrized_weight,
}


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_in_place_is_refused_where_the_call_goes_through_the_dispatcher(name):
    x, b = torch.randn(2, 4), torch.randn(2, 4)
    before = b.clone()
    with pytest.raises(ValueError) as raised:
        NOT_PLAIN[name](ops.Sequential(in_place(), ops.GELU()), x, b)
    assert str(raised.value) == (
        "pipeline: expected a plain call, which writes the sum of in_place=True into the caller's tensor, got one through "
        "torch.ops.tandem.pipeline, which writes no argument: under a mode or a torch.func transform, or with a tensor subclass, a tangent or a "
        "parametrized weight. Use in_place=False."
    )
    assert torch.equal(b, before)
    NOT_PLAIN[name](ops.Sequential(ops.AddExtraInput(), ops.GELU()), x, b)


def test_a_default_device_is_no_mode_to_ask():
    x, b = torch.randn(2, 4), torch.randn(2, 4)
    before = b.clone()
    with torch.device("meta"):
        y = ops.Sequential(in_place(), ops.GELU())(x, b)
    torch.testing.assert_close(y, tanh_gelu(x + before))
    assert torch.equal(b, x + before)


@pytest.mark.parametrize("record", [torch.fx.symbolic_trace, lambda box: torch.compile(box, backend="eager")], ids=["fx", "compile"])
def test_a_recorded_in_place_sum_is_a_fresh_tensor(record):
    x, b = torch.randn(2, 4), torch.randn(2, 4)
    before = b.clone()
    torch.testing.assert_close(record(ops.Sequential(in_place(), ops.GELU()))(x, b), tanh_gelu(x + before))
    assert torch.equal(b, before)


# Hooks.

BOXES = {
    "reshape": lambda: ops.Sequential(ops.Reshape((64, 4, 16)), ops.GELU()),
    "reshape of reshape": lambda: ops.Sequential(ops.Reshape((16, 256)), ops.Reshape((64, 4, 16)), ops.GELU()),
    "both": lambda: ops.Sequential(ops.SiLU(), ops.Reshape((-1, 16)), ops.GELU()),
    "input twice": lambda: ops.Sequential(ops.MakeExtraOutput(), ops.Reshape((-1,)), ops.GELU()),
}
INPUTS = {
    "contiguous": lambda: torch.randn(64, 64),
    "transposed": lambda: torch.randn(64, 64).t(),
    "slice": lambda: torch.randn(128, 64)[64:],
    "columns": lambda: torch.randn(64, 128)[:, 3:67],
    "expanded": lambda: torch.randn(64).expand(64, 64),
    "every other row": lambda: torch.randn(128, 64)[::2],
}
HOOKS = {
    "numpy": lambda: saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy),
    "clone": lambda: saved_tensors_hooks(torch.clone, lambda t: t),
    "contiguous copy": lambda: saved_tensors_hooks(lambda t: t.detach().contiguous().clone(), lambda t: t),
    "slice of a larger one": lambda: saved_tensors_hooks(lambda t: torch.stack([t.detach(), t.detach()], -1), lambda t: t[..., 1]),
    "save_on_cpu": save_on_cpu,
}


@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize("layout", INPUTS)
@pytest.mark.parametrize("name", BOXES)
def test_hooks_may_give_back_a_copy(name, layout, hooks):
    box, x = BOXES[name](), INPUTS[layout]().requires_grad_()
    with HOOKS[hooks]():
        y = box(x)
    assert_equal(grads_of(y, [x]), grads_of(box(x), [x]))


def test_saved_tensors_of_another_dtype_are_refused():
    x = torch.randn(4, 8, requires_grad=True)
    with saved_tensors_hooks(lambda t: t, lambda t: t.double()):
        y = ops.Sequential(ops.GELU())(x)
    with pytest.raises(TypeError, match="pipeline: expected x in backward as forward saved it, a plain tensor of dtype Float, got .* of dtype Double. Let a hook"):
        y.sum().backward()
    linear = ops.Linear(8, 8)
    y = linear(x)
    linear.double()
    with pytest.raises(TypeError, match="expected .*weight in backward as forward saved it.* and convert modules before forward or after backward"):
        y.sum().backward()


@pytest.mark.parametrize("first", [ops.BasicLinear, ops.RMSNorm])
def test_operands_of_an_in_place_sum_that_are_parts_of_one_tensor(first):
    whole = torch.randn(8, 4)
    behind = randomize(first(4, 4) if first is ops.BasicLinear else first(4))
    box = ops.Sequential(ops.AddExtraInput(in_place=True), behind)
    expected = torch.autograd.grad(box(whole[:4].clone(), whole[4:].clone()).sum(), behind.weight)
    written = whole.clone()
    actual = torch.autograd.grad(box(written[:4], written[4:]).sum(), behind.weight)
    torch.testing.assert_close(actual, expected)
    assert torch.equal(written[4:], whole[:4] + whole[4:]) and torch.equal(written[:4], whole[:4])


def test_a_write_into_one_output_in_codes_changes_no_other():
    box = ops.Sequential(ops.Quantize(), ops.MakeExtraOutput())
    x = torch.randn(4, 32, requires_grad=True)
    with tandem.autocast(recipe=tandem.recipe.Float8CurrentScaling()):
        y, extra = box(x)
    before = extra.dequantize().clone()
    y.mul_(2)
    assert torch.equal(extra.dequantize(), before) and torch.equal(y.dequantize(), 2 * before)
    torch.autograd.backward([y, extra], [torch.ones_like(x), torch.ones_like(x)])
    assert torch.equal(x.grad, torch.full_like(x, 3.0))
