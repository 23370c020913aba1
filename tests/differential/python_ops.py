"""Ops and fusions written in Python, for the pipelines of the generator."""

from __future__ import annotations

import torch
from torch.nn import functional as F

import tandem.ops as ops


class Weighted(ops.BasicOperation):
    """y = 1.5 x weight, split style."""

    fuser_options = ("factor",)

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.factor = 1.5
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=dtype))

    def op_forward_compute(self, input_):
        return input_ * self.factor * self.weight, (input_, self.weight)

    def op_forward_save_ctx(self, ctx, input_, tensors_to_save):
        ctx.save_for_backward(*tensors_to_save)

    def op_backward(self, ctx, grad_output):
        x, weight = ctx.saved_tensors
        grad_weight = (grad_output * x * self.factor).reshape(-1, x.shape[-1]).sum(0)
        return (grad_output * self.factor * weight).to(x.dtype), [grad_weight.to(weight.dtype)]


class Sin(ops.BasicOperation):
    """y = sin x, one-piece style."""

    def op_forward(self, ctx, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer):
        ctx.save_for_backward(input_)
        return torch.sin(input_)

    def op_backward(self, ctx, grad_output):
        (x,) = ctx.saved_tensors
        return grad_output * torch.cos(x), ()


class Swap(ops.BasicOperation):
    """y = 2 extra, extra output = 3 x; split style."""

    num_extra_inputs = 1
    num_extra_outputs = 1

    def fuser_forward_compute(self, input_, *, basic_op_extra_inputs):
        return basic_op_extra_inputs[0][0] * 2, [(input_ * 3,)], ()

    def fuser_forward_save_ctx(self, basic_op_ctxs, input_, tensors_to_save):
        basic_op_ctxs[0].three, basic_op_ctxs[0].x_dtype = 3, input_.dtype

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        (grad_extra,) = basic_op_grad_extra_outputs[0]
        context = basic_op_ctxs[0]
        grad_x = torch.zeros_like(grad_output, dtype=context.x_dtype) if grad_extra is None else grad_extra * context.three
        return grad_x, [()], [(grad_output * 2,)]


class SwapWhole(Swap):
    """y = 2 extra, extra output = 3 x; one-piece style."""

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **_):
        basic_op_ctxs[0].three, basic_op_ctxs[0].x_dtype = 3, input_.dtype
        return basic_op_extra_inputs[0][0] * 2, [(input_ * 3,)]


class Product(ops.BasicOperation):
    """y = x extra; one extra input, split style."""

    num_extra_inputs = 1

    def fuser_forward_compute(self, input_, *, basic_op_extra_inputs):
        extra = basic_op_extra_inputs[0][0]
        return input_ * extra, [()], (input_, extra)

    def fuser_forward_save_ctx(self, basic_op_ctxs, input_, tensors_to_save):
        basic_op_ctxs[0].save_for_backward(*tensors_to_save)

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        x, extra = basic_op_ctxs[0].saved_tensors
        return (grad_output * extra).to(x.dtype), [()], [((grad_output * x).to(extra.dtype),)]


class Outputs(ops.BasicOperation):
    """y = x + 1, extra outputs x^2 and -x; split style."""

    num_extra_outputs = 2

    def fuser_forward_compute(self, input_, *, basic_op_extra_inputs):
        return input_ + 1, [(input_ * input_, -input_)], (input_,)

    def fuser_forward_save_ctx(self, basic_op_ctxs, input_, tensors_to_save):
        basic_op_ctxs[0].save_for_backward(*tensors_to_save)

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        (x,) = basic_op_ctxs[0].saved_tensors
        square, negative = basic_op_grad_extra_outputs[0]
        grad_x = grad_output
        if square is not None:
            grad_x = grad_x + 2 * x * square
        if negative is not None:
            grad_x = grad_x - negative
        return grad_x, [()], [()]


class Child(ops.BasicOperation):
    """y = x scale, where the scale is a parameter of a child module."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(size, bias=False, dtype=dtype)

    def op_forward_compute(self, input_):
        return input_ * self.norm.weight, (input_, self.norm.weight)

    def op_forward_save_ctx(self, ctx, input_, tensors_to_save):
        ctx.save_for_backward(*tensors_to_save)

    def op_backward(self, ctx, grad_output):
        x, weight = ctx.saved_tensors
        return (grad_output * weight).to(x.dtype), [(grad_output * x).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)]


class Buffer(ops.BasicOperation):
    """y = x + buffer."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("shift", torch.linspace(-1, 1, size, dtype=torch.float64).to(dtype))

    def op_forward_compute(self, input_):
        return input_ + self.shift, ()

    def op_forward_save_ctx(self, ctx, input_, tensors_to_save):
        ctx.x_dtype = input_.dtype

    def op_backward(self, ctx, grad_output):
        return grad_output.to(ctx.x_dtype), ()


CLASSES = {
    "py_weighted": Weighted,
    "py_sin": Sin,
    "py_swap": Swap,
    "py_swap_whole": SwapWhole,
    "py_product": Product,
    "py_outputs": Outputs,
    "py_child": Child,
    "py_buffer": Buffer,
}


class ForwardReluScale(ops.FusedOperation):
    """A forward fusion of relu and scale."""

    def fuser_forward_compute(self, input_, *, basic_op_extra_inputs, basic_op_kwargs, **unused):
        return torch.relu(input_) * self.basic_ops[1].scale, [(), ()], [(input_,), ()]

    def fuser_forward_save_ctx(self, basic_op_ctxs, input_, tensors_to_save):
        for ctx, tensors in zip(basic_op_ctxs, tensors_to_save, strict=True):
            ctx.save_for_backward(*tensors)


class BackwardSiluScale(ops.FusedOperation):
    """A backward fusion of silu and scale."""

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        (x,) = basic_op_ctxs[0].saved_tensors
        s = torch.sigmoid(x)
        return grad_output * self.basic_ops[1].scale * (s * (1 + x * (1 - s))), [(), ()], [(), ()]


class JointGeluScale(ops.FusedOperation):
    """A joint fusion of gelu and scale, which saves the derivative."""

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, basic_op_kwargs, **unused):
        scale = self.basic_ops[1].scale
        x = input_.to(torch.promote_types(input_.dtype, torch.float32))  # a dozen roundings to a narrower dtype would fail `verify`
        tanh = torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
        slope = 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * 0.7978845608028654 * (1 + 3 * 0.044715 * x * x)
        basic_op_ctxs[0].save_for_backward((slope * scale).to(input_.dtype))
        return F.gelu(input_, approximate="tanh") * scale, [(), ()]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        (slope,) = basic_op_ctxs[0].saved_tensors
        return grad_output * slope, [(), ()], [(), ()]


class JointBiasRelu(ops.FusedOperation):
    """A joint fusion of bias and relu."""

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, basic_op_kwargs, **unused):
        y = torch.relu(input_ + self.flat_ops()[0].bias)
        basic_op_ctxs[1].save_for_backward(y)
        return y, [(), ()]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        (y,) = basic_op_ctxs[1].saved_tensors
        grad_x = grad_output * (y > 0)
        return grad_x, [(grad_x.reshape(-1, grad_x.shape[-1]).sum(0),), ()], [(), ()]


def _replacing(kinds: tuple[type, ...], fused: type):
    def replace(found, *, recipe=None):
        out, index = [], 0
        while index < len(found):
            window = found[index : index + len(kinds)]
            if len(window) == len(kinds) and all(type(op) is kind for op, kind in zip(window, kinds, strict=True)):
                out.append(fused(window))
                index += len(kinds)
            else:
                out.append(found[index])
                index += 1
        return out

    replace.__qualname__ = f"fuse_{fused.__name__}"
    return replace


FUSIONS = {
    "relu_scale": (ops.register_forward_fusion, _replacing((ops.ReLU, ops.ConstantScale), ForwardReluScale)),
    "silu_scale": (ops.register_backward_fusion, _replacing((ops.SiLU, ops.ConstantScale), BackwardSiluScale)),
    "gelu_scale": (ops.register_forward_backward_fusion, _replacing((ops.GELU, ops.ConstantScale), JointGeluScale)),
    "bias_relu": (ops.register_forward_backward_fusion, _replacing((ops.Bias, ops.ReLU), JointBiasRelu)),
}
