"""Types and words of errors that code written for transformer_engine.pytorch.ops matches, but for those that other files test with their whole text."""

import torch
from python_ops import op_of
from support import each_raises

import tandem.ops as ops
from tandem.ops.fuser import OperationFuser


def captured():
    op = ops.AddExtraInput()
    op(torch.ones(1), torch.ones(1))
    return op


def make(name):
    return ops.MakeExtraOutput().set_extra_output_channel(0, name)


def add(name):
    return ops.AddExtraInput().set_extra_input_channel(0, name)


def other_order(found, **_):
    return found[::-1]


def mismatch():
    with ops.register_forward_fusion(other_order):
        ops.Sequential(ops.GELU(), ops.ReLU())(torch.ones(1))


class Omits(ops.BasicOperation):
    num_extra_outputs = 1

    def fuser_forward(self, basic_op_ctxs, input_, **_):
        return input_ * 1, [(None,)]


test_errors_have_the_type_and_words_that_users_match = each_raises([
    (lambda: captured().set_extra_input_channel(0, "a"), RuntimeError, "already captured its channel routing"),
    (lambda: ops.AddExtraInput().set_extra_input_channel(1, "a"), IndexError, "out of range"),
    (lambda: ops.MakeExtraOutput().set_extra_output_channel(-1, "a"), IndexError, "out of range"),
    (lambda: ops.AddExtraInput().set_extra_input_channel(0, ""), ValueError, "non-empty string"),
    (lambda: ops.MakeExtraOutput().set_extra_output_channel(0, 3), ValueError, "non-empty string"),
    (lambda: ops.MakeExtraOutput().set_extra_output_channel(0, "a", output_to_caller=1), TypeError, "output_to_caller must be a bool"),
    (lambda: op_of(lambda x: x, lambda grad: grad, num_extra_inputs=1)()(torch.ones(1), torch.ones(1)), RuntimeError, "should override `fuser_forward` instead of `op_forward`"),
    (lambda: ops.ScaledSwiGLU().op_forward(ops.OperationContext(), torch.ones(1, 2)), RuntimeError, "should override `fuser_forward` instead of `op_forward`"),
    (lambda: ops.AddExtraInput().op_backward(ops.OperationContext(), torch.ones(1)), RuntimeError, "should override `fuser_backward` instead of `op_backward`"),
    (lambda: ops.Linear(2, 2, bias=False).register_parameter("bias", torch.nn.Parameter(torch.ones(2))), ValueError, "bias=False"),
    (lambda: ops.Sequential(ops.GELU())[1], IndexError, "index"),
    (lambda: OperationFuser([ops.AddExtraInput()])(torch.ones(1)), ValueError, "extra inputs"),
    (lambda: OperationFuser([make("a"), make("a")]), ValueError, "multiple producers"),
    (lambda: OperationFuser([add("a")]), ValueError, "has no producer"),
    (lambda: OperationFuser([add("a"), make("a")]), ValueError, "has no earlier producer"),
    (mismatch, RuntimeError, "mismatch after fusing operations"),
    (lambda: Omits()(torch.ones(1)), RuntimeError, "is public"),
    (lambda: Omits()(torch.ones(1)), RuntimeError, "outside its forward fusion"),
    (lambda: ops.LayerNorm(4)(torch.ones(2, 3)), ValueError, "weight of shape"),
])  # fmt: skip
