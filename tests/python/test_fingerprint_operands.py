"""Ops that are written in Python: whose tensors and whose state a call uses, where several ops have equal code."""

import contextlib
import threading

import pytest
import torch
from torch.nn.utils import prune

import tandem.ops as ops
from support import AsksFunctions
from test_fingerprint import Base

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Scaled(ops.BasicOperation):
    """y = x w + b, of which operands and their order may differ."""

    def op_forward(self, ctx, input_, **_):
        ctx.save_for_backward(input_)
        y = input_ if self.w is None else input_ * self.w
        return y if self.b is None else y + self.b

    def op_backward(self, ctx, grad_output):
        (x,) = ctx.saved_tensors
        grads = {id(self.b): grad_output}
        grads[id(self.w)] = grad_output * x if self.w is not self.b else grad_output * x + grad_output
        return grad_output if self.w is None else grad_output * self.w, [grads[id(parameter)] for parameter in self.parameters()]


def scaled(**tensors):
    op = Scaled()
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.nn.Parameter) or tensor is None:
            op.register_parameter(name, tensor)
        else:
            op.register_buffer(name, tensor)
    return op


def full(value):
    return torch.nn.Parameter(torch.full((3,), value))


def tied():
    weight = full(5.0)
    return scaled(w=weight, b=weight)


ORDERS = {
    "buffers": [lambda: scaled(w=full(2.0).detach(), b=full(3.0).detach()), lambda: scaled(b=full(5.0).detach(), w=full(7.0).detach())],
    "parameters": [lambda: scaled(w=full(2.0), b=full(3.0)), lambda: scaled(b=full(5.0), w=full(7.0))],
    "absent": [lambda: scaled(w=full(2.0), b=None), lambda: scaled(w=None, b=full(5.0))],
    "tied": [lambda: scaled(w=full(2.0), b=full(3.0)), tied],
}


@pytest.mark.parametrize("how", ["compiled", "dispatcher"])
@pytest.mark.parametrize("what", ORDERS)
def test_ops_whose_operands_stand_elsewhere_do_not_stand_in_for_each_other(what, how):
    x = torch.randn(4, 3, requires_grad=True)
    kept = []
    for make in ORDERS[what]:
        op = make()
        kept.append(op)
        tensors = [x, *op.parameters()]
        want = (x if op.w is None else x * op.w) + (0.0 if op.b is None else op.b)
        box = ops.Sequential(op)
        function = torch.compile(box, backend="aot_eager", fullgraph=True) if how == "compiled" else box
        with AsksFunctions() if how == "dispatcher" else contextlib.nullcontext():
            y = function(x)
        torch.testing.assert_close(y, want)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), tensors), torch.autograd.grad(want.sum(), tensors))


def test_a_buffer_that_is_set_later_counts():
    op = scaled(w=full(2.0))
    op.register_buffer("b", None)
    box, x = ops.Sequential(op), torch.ones(3)
    function = torch.compile(box, backend="aot_eager", fullgraph=True)
    assert torch.equal(function(x), 2 * x)
    op.b = torch.full((3,), 4.0)
    assert torch.equal(function(x), 6 * x) and torch.equal(box(x), 6 * x)


class Counted(Base):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def factor(self):
        self.calls += 1
        return float(self.calls)


def test_equal_ops_keep_their_own_state_through_the_dispatcher():
    boxes = [ops.Sequential(Counted()) for _ in range(3)]
    with AsksFunctions():
        for call in (1, 2):
            assert [box(torch.ones(1)).item() for box in boxes] == [call] * 3


def test_equal_ops_in_two_threads_keep_their_own_parameters():
    boxes = [ops.Sequential(scaled(w=full(value), b=None)) for value in (2.0, 5.0)]
    wrong = []

    def call(box, factor):
        for _ in range(100):
            x = torch.randn(3, requires_grad=True)
            with AsksFunctions():
                y = box(x)
            y.sum().backward()
            wrong.extend([] if torch.equal(y, x * factor) and torch.equal(x.grad, torch.full((3,), factor)) else [factor])

    threads = [threading.Thread(target=call, args=arguments) for arguments in zip(boxes, (2.0, 5.0), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and [box[0].w[0].item() for box in boxes] == [2.0, 5.0]


def test_what_an_op_makes_while_it_is_traced_is_its_own():
    class Lazy(Base):
        def __init__(self):
            super().__init__()
            self.scale = None

        def op_forward_compute(self, input_):
            if self.scale is None:
                self.scale = float(input_.shape[-1])
            return input_ * self.scale, ()

        def factor(self):
            return self.scale

    for columns in (4, 16, 8):
        x = torch.ones(2, columns)
        assert torch.equal(torch.compile(ops.Sequential(Lazy()), backend="aot_eager", fullgraph=True)(x), columns * x)


class Thrice(torch.nn.Module):
    def forward(self, weight):
        return 3 * weight


@pytest.mark.parametrize("how", ["parametrized", "pruned"])
def test_a_parameter_that_is_computed_from_others_is_refused_where_gradients_are_needed(how):
    op, x = scaled(w=full(2.0), b=None), torch.ones(3)
    if how == "parametrized":
        torch.nn.utils.parametrize.register_parametrization(op, "w", Thrice())
    else:
        prune.random_unstructured(op, "w", 1)
    box = ops.Sequential(op)
    with torch.no_grad():
        assert torch.equal(box(x), op.w * x)
    message = (
        r"expected parameters of its own where gradients are needed, got w, which is computed from others \(a parametrization, pruning, a "
        r"norm\): op_backward would give them its gradient as theirs\. Compute it in the op's forward and op_backward, or make it permanent\."
    )
    with pytest.raises(RuntimeError, match=message):
        box(x)
