"""Dtypes that an op in Python declares, changed between calls."""

from __future__ import annotations

import pytest
import torch

from tandem import ops


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


def test_dtypes_of_extra_outputs_are_a_list():
    op = Cast()
    op.extra_output_dtypes = None
    with pytest.raises(TypeError, match="Cast: expected extra_output_dtypes to be a tuple or a list, got NoneType. Leave it out where extra outputs have"):
        op(torch.randn(4))
