"""Ops written in Python: the two styles, and which methods a class has to define."""

import pytest
import torch
from python_ops import SplitScale

import tandem.ops as ops

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def define(**methods):
    return type("Mine", (ops.BasicOperation,), methods)


def anything(self, *arguments, **kwargs): ...


HALVES = [
    (["op_forward_compute"], "Mine: expected the pair op_forward_compute and op_forward_save_ctx, got op_forward_compute alone. Define op_forward_save_ctx"),
    (["op_forward_save_ctx"], "got op_forward_save_ctx alone. Define op_forward_compute too"),
    (["fuser_forward_compute"], "got fuser_forward_compute alone. Define fuser_forward_save_ctx too"),
    (["fuser_forward_save_ctx"], "got fuser_forward_save_ctx alone. Define fuser_forward_compute too"),
    (
        ["op_forward", "op_forward_compute", "op_forward_save_ctx"],
        "Mine: expected either op_forward or the pair op_forward_compute and op_forward_save_ctx, got op_forward and op_forward_compute",
    ),
    (["fuser_forward", "fuser_forward_compute"], "expected either fuser_forward or the pair"),
]


@pytest.mark.parametrize(("methods", "text"), HALVES)
def test_half_a_pair_or_a_mix_is_refused_when_the_class_is_defined(methods, text):
    with pytest.raises(TypeError) as error:
        define(**dict.fromkeys(methods, anything))
    assert text in str(error.value)
    with pytest.raises(TypeError):
        type("Fused", (ops.FusedOperation,), dict.fromkeys([m for m in methods if "fuser" in m] or ["fuser_forward_compute"], anything))


def test_a_subclass_replaces_the_style_of_its_base():
    class Whole(SplitScale):
        def op_forward(self, ctx, input_, **_):
            ctx.save_for_backward(input_, self.weight)
            ctx.factor = 7.0
            return input_ * 7.0 * self.weight

    class SplitAgain(Whole):
        def op_forward_compute(self, input_):
            return input_ * 9.0 * self.weight, (input_, self.weight)

        def op_forward_save_ctx(self, ctx, input_, tensors_to_save):
            ctx.save_for_backward(*tensors_to_save)
            ctx.factor = 9.0

    class HalfOfAPair(SplitAgain):
        def op_forward_compute(self, input_):
            return input_ * 11.0 * self.weight, (input_, self.weight)

    class MyGELU(ops.GELU):
        def op_forward(self, ctx, input_, **_):
            ctx.save_for_backward(input_)
            return input_ * 13

        def op_backward(self, ctx, grad_output):
            return grad_output * 13, ()

    x = torch.ones(1, requires_grad=True)
    for op, factor in [(Whole(), 10.5), (SplitAgain(), 13.5), (HalfOfAPair(), 16.5), (MyGELU(), 13), (SplitScale(), 3)]:
        assert op(x) == factor, type(op)
    for op, factor in [(Whole(), 10.5), (SplitAgain(), 13.5), (MyGELU(), 13)]:
        assert torch.autograd.grad(op(x), x)[0] == factor
    assert SplitAgain().op_forward(ops.OperationContext(), x) == 13.5


def test_methods_that_are_missing_say_so():
    x = torch.ones(1, requires_grad=True)
    fused = type("Fused", (ops.FusedOperation,), {})([ops.GELU()])
    with pytest.raises(TypeError, match=r"Mine: expected a forward, op_forward_compute and op_forward_save_ctx, or op_forward\(ctx, ...\), got a class without"):
        define()()
    with pytest.raises(NotImplementedError, match="Fused: expected a forward written in Python, got none. Define fuser_forward, or fuser_forward_c"):
        fused.fuser_forward([], x, basic_op_extra_inputs=[], basic_op_kwargs=[])
    with pytest.raises(NotImplementedError, match="Fused: expected a backward written in Python, got none. Define fuser_backward"):
        fused.fuser_backward([], x, basic_op_grad_extra_outputs=[])
    forward_only = define(op_forward=lambda self, ctx, input_, **_: input_ * 1)()
    with pytest.raises(NotImplementedError, match="Mine: expected a backward written in Python, got none. Define op_backward"):
        forward_only(x).sum().backward()
    fuser_only = define(fuser_forward=lambda self, ctxs, input_, **_: (input_ * 1, [()]))()
    with pytest.raises(NotImplementedError, match="Mine: expected a forward written in Python, got none. Define op_forward, or op_forward_compute and"):
        fuser_only.op_forward(ops.OperationContext(), x)
    with pytest.raises(NotImplementedError, match="Mine: expected a backward written in Python, got none. Define fuser_backward"):
        fuser_only(x).sum().backward()
