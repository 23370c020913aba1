"""Ops written in Python: what they return, its dtype and history, and what is refused."""

import pytest
import torch
from python_ops import op_of

import tandem.ops as ops

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Wrong(ops.BasicOperation):
    """Returns what it is told to."""

    num_extra_outputs = 1

    def __init__(self, forward, backward=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.returns = (forward, backward)

    def fuser_forward(self, basic_op_ctxs, input_, **_):
        return self.returns[0](input_)

    def fuser_backward(self, basic_op_ctxs, grad_output, **_):
        return self.returns[1](grad_output)


def fine(x):
    return x * 1, [(x * 2,)]


RESULTS = [
    (
        lambda x: (None, [(x,)]),
        None,
        RuntimeError,
        "expected the output, which is public or required by an operation outside its forward fusion, got None. Return it.",
    ),
    (lambda x: (3, [(x,)]), None, TypeError, "expected the output to be a tensor or None, got int. Return tensors."),
    (lambda x: (x, []), None, RuntimeError, "expected 1 groups of extra outputs, got 0. Return one for each, None where there is none."),
    (lambda x: (x, [()]), None, RuntimeError, "expected 1 extra outputs, got 0"),
    (fine, lambda g: (g, [()], [()]), RuntimeError, "expected 1 parameter gradients, got 0"),
    (fine, lambda g: (g, [], [()]), RuntimeError, "expected 1 groups of parameter gradients, got 0"),
    (fine, lambda g: (g, [(g,)], []), RuntimeError, "expected 1 groups of extra input gradients, got 0"),
    (fine, lambda g: (3, [(g,)], [()]), TypeError, "expected a gradient to be a tensor or None, got int"),
]


@pytest.mark.parametrize(("forward", "backward", "kind", "text"), RESULTS)
def test_wrong_results_name_the_op(forward, backward, kind, text):
    x = torch.ones(1, requires_grad=True)
    with pytest.raises(kind) as error:
        y, extra = Wrong(forward, backward)(x)
        (y + extra).sum().backward()
    assert text in str(error.value) and "Wrong" in str(error.value)


def test_an_unused_output_gives_zeros_and_none():
    seen = []

    class Watch(Wrong):
        def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
            seen.append((grad_output, basic_op_grad_extra_outputs[0][0]))
            return grad_output, [(grad_output.sum().reshape(1),)], [()]

    x = torch.ones(2, requires_grad=True)
    y, _ = Watch(fine)(x)
    y.sum().backward()
    _, extra = Watch(fine)(x)
    extra.sum().backward()
    assert seen[0][1] is None
    assert torch.equal(seen[1][0], torch.zeros(2)) and torch.equal(seen[1][1], torch.ones(2))


def test_results_have_the_dtype_to_which_the_tensors_promote():
    model = ops.Sequential(op_of(torch.Tensor.double, torch.Tensor.double)(), ops.MakeExtraOutput())
    with pytest.raises(TypeError, match="expected the output in Float, to which the op's tensors promote, got Double"):
        model(torch.randn(4, requires_grad=True))
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    sum(y.sum() for y in model(x)).backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))
    model[0].output_dtype = torch.float64  # from the next call on
    y, _ = model(torch.randn(4, requires_grad=True))
    assert y.dtype == torch.float64 and y.requires_grad


class Ranked(ops.BasicOperation):
    """y = x in another dtype, and the order of its elements."""

    num_extra_outputs = 1
    extra_output_dtypes = (torch.int64,)

    def __init__(self, output_dtype=torch.bfloat16):
        super().__init__()
        self.output_dtype = output_dtype

    def fuser_forward_compute(self, input_, **_):
        return input_.to(self.output_dtype), [(input_.argsort(-1),)], [()]

    def fuser_forward_save_ctx(self, basic_op_ctxs, input_, tensors_to_save, **_):
        pass

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        assert grad_output.dtype == self.output_dtype and basic_op_grad_extra_outputs[0][0] is None
        return grad_output * 3, [()], [()]


class Cast(ops.BasicOperation):
    """x in the dtype that the op declares."""

    def op_forward(self, ctx, input_, **_):
        return input_ if self.output_dtype is None else input_.to(self.output_dtype)

    def op_backward(self, ctx, grad_output):
        return grad_output.to(torch.float32), ()


def test_a_declared_dtype_that_is_taken_back():
    op = Cast()
    box = ops.Sequential(ops.GELU(), op)
    for dtype in (torch.bfloat16, torch.float16):
        op.output_dtype = dtype
        assert box(torch.randn(4)).dtype == dtype == op(torch.randn(4)).dtype
        del op.output_dtype
        assert box(torch.randn(4)).dtype == torch.float32 == op(torch.randn(4)).dtype


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_an_op_declares_other_dtypes_of_results(dtype, compiled):
    box = ops.Sequential(ops.GELU(), Ranked(dtype), ops.ConstantScale(2.0))
    x = torch.randn(3, 8, requires_grad=True)
    run = torch.compile(box, fullgraph=True, backend="aot_eager") if compiled else box
    y, order = run(x)
    z = ops.GELU()(x)
    assert y.dtype == dtype and torch.equal(y, z.to(dtype) * 2) and torch.equal(order, z.argsort(-1)) and not order.requires_grad
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    (expected,) = torch.autograd.grad(z, x, torch.full_like(z, 6))
    assert grad.dtype == torch.float32
    torch.testing.assert_close(grad, expected)
    assert box.verify(x)
    box[1].output_dtype = torch.float16
    assert run(x)[0].dtype == torch.float16


class Declaring(ops.BasicOperation):
    """Declares dtypes that its results have not."""

    num_extra_outputs = 2

    def __init__(self, output_dtype, extra_output_dtypes):
        super().__init__()
        self.output_dtype, self.extra_output_dtypes = output_dtype, extra_output_dtypes

    def fuser_forward_compute(self, input_, **_):
        return input_.clone(), [(input_.clone(), input_.double())], [()]

    def fuser_forward_save_ctx(self, basic_op_ctxs, input_, tensors_to_save, **_):
        pass

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        raise AssertionError


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        ((torch.bfloat16, ()), "expected the output in BFloat16, which the op declares, got Float. Convert it in the op's forward, or declare that dtype as"),
        ((None, (torch.int64,)), "expected an extra output in Long, which the op declares, got Float. Convert it"),
        ((None, (None, torch.float16)), "expected an extra output in Half, which the op declares, got Double. Convert it"),
        ((torch.float32, (torch.float32,)), "expected an extra output in Float, to which the op's tensors promote, got Double. Convert it"),
    ],
)
def test_errors_tell_where_a_dtype_is_declared(declared, text):
    with pytest.raises(TypeError, match=f"Declaring.*{text}"):
        ops.Sequential(ops.GELU(), Declaring(*declared))(torch.randn(3))


def test_an_op_that_returns_integers_has_no_gradient():
    counts = op_of(lambda x: (x > 0).sum(-1), None, output_dtype=torch.int64)()
    y = ops.Sequential(ops.GELU(), counts)(torch.randn(3, 8, requires_grad=True))
    assert y.dtype == torch.int64 and not y.requires_grad


def test_dtypes_of_results_that_are_none():
    op = Ranked("float32")
    with pytest.raises(TypeError, match="Ranked: expected output_dtype and extra_output_dtypes to be torch dtypes or None, got str. Leave them out"):
        op(torch.randn(3))
    op = Ranked()
    op.extra_output_dtypes = None
    with pytest.raises(TypeError, match="Ranked: expected extra_output_dtypes to be a tuple or a list, got NoneType. Leave it out where extra outputs have"):
        op(torch.randn(3))
    op = Ranked()
    op.extra_output_dtypes = (None, torch.int64)
    with pytest.raises(ValueError, match="Ranked: expected extra_output_dtypes with at most 1 entries, one for each extra output, got 2. That of the"):
        op(torch.randn(3))
    op = Ranked()
    op.extra_output_dtypes = ()
    with pytest.raises(TypeError, match="expected an extra output in Float, to which the op's tensors promote, got Long. .* or declare output_dtype or ext"):
        op(torch.randn(3))


class Recording(ops.BasicOperation):
    """Results that have a history: recorded in spite of the library, or that of a parameter that nobody declared."""

    def __init__(self, parameter, how):
        super().__init__()
        self._of_others = [parameter]
        self._how = how

    def op_forward(self, ctx, input_, **_):
        with torch.enable_grad():
            scaled = input_ * self._of_others[0]
        ctx.save_for_backward(scaled)
        return {"recorded": scaled, "itself": self._of_others[0], "view": self._of_others[0].view(-1)}[self._how]

    def op_backward(self, ctx, grad_output):
        assert not ctx.saved_tensors[0].requires_grad
        with torch.enable_grad():
            return grad_output * self._of_others[0], ()


@pytest.mark.parametrize("how", ["recorded", "itself", "view"])
def test_results_have_no_history_of_their_own(how):
    parameter = torch.nn.Parameter(torch.full((4,), 3.0))
    x = torch.randn(4)
    for context in (torch.enable_grad(), torch.no_grad()):
        with context:
            y = ops.Sequential(Recording(parameter, how), ops.Identity())(x)
            assert not y.requires_grad and y.grad_fn is None
    x.requires_grad_()
    y = ops.Sequential(Recording(parameter, how))(x)
    y.sum().backward()
    assert torch.equal(x.grad, parameter.detach()) and not x.grad.requires_grad
    assert parameter.is_leaf and parameter.requires_grad and parameter.grad is None


@pytest.mark.parametrize("count", [(1, 0), (0, 1)])
def test_an_op_forward_has_no_extra_tensors(count):
    make, x = op_of(lambda x: x, lambda grad: grad, "Half", num_extra_inputs=count[0], num_extra_outputs=count[1]), torch.ones(1)
    text = rf"Half: expected a forward for its {count[0]} extra inputs and {count[1]} extra outputs, got op_forward, .* It should override `fuser_forward`"
    for call in (make(), ops.Sequential(make()), ops.Sequential(ops.GELU(), make())):
        with pytest.raises(RuntimeError, match=text):
            call(x, *[x] * count[0])
