"""Ops written in Python, for the tests."""

import torch

import tandem.ops as ops


def op_of(forward, backward, name="Mine", **attributes):
    """The class of an op in the one-piece style that keeps nothing: y = forward(x), and the gradient of x is backward(grad)."""
    methods = {"op_forward": lambda self, ctx, input_, **_: forward(input_), "op_backward": lambda self, ctx, grad: (backward(grad), ())}
    return type(name, (ops.BasicOperation,), methods | attributes)


class SplitScale(ops.BasicOperation):
    """y = x * factor * weight, in the split style."""

    fuser_options = ("factor",)

    def __init__(self, factor=2.0):
        super().__init__()
        self.factor = factor
        self.weight = torch.nn.Parameter(torch.full((1,), 1.5))

    def op_forward_compute(self, input_):
        return input_ * self.factor * self.weight, (input_, self.weight)

    def op_forward_save_ctx(self, ctx, input_, tensors_to_save):
        ctx.save_for_backward(*tensors_to_save)
        ctx.factor = self.factor

    def op_backward(self, ctx, grad_output):
        x, weight = ctx.saved_tensors
        return grad_output * ctx.factor * weight, [(grad_output * x * ctx.factor).sum().reshape(1)]


class WholeSin(ops.BasicOperation):
    """y = sin x, in the one-piece style."""

    fuser_options = ()

    def op_forward(self, ctx, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer, shift=0.0):
        ctx.save_for_backward(input_)
        ctx.shift = shift
        return torch.sin(input_ + shift)

    def op_backward(self, ctx, grad_output):
        (x,) = ctx.saved_tensors
        return grad_output * torch.cos(x + ctx.shift), ()


class SplitSwap(ops.BasicOperation):
    """y = 2 extra, extra output = 3 x."""

    fuser_options = ()
    num_extra_inputs = 1
    num_extra_outputs = 1

    def fuser_forward_compute(self, input_, *, basic_op_extra_inputs):
        return basic_op_extra_inputs[0][0] * 2, [(input_ * 3,)], ()

    def fuser_forward_save_ctx(self, basic_op_ctxs, input_, tensors_to_save):
        basic_op_ctxs[0].factors = (2, 3)

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        two, three = basic_op_ctxs[0].factors
        (grad_extra,) = basic_op_grad_extra_outputs[0]
        grad_x = None if grad_extra is None else grad_extra * three
        return grad_x if grad_x is not None else torch.zeros_like(grad_output), [()], [(grad_output * two,)]


class WholeSwap(SplitSwap):
    """As SplitSwap, in the one-piece style."""

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **_):
        basic_op_ctxs[0].factors = (2, 3)
        return basic_op_extra_inputs[0][0] * 2, [(input_ * 3,)]
