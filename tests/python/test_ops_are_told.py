"""Ops written in Python are told before their pipeline is planned and before each call."""

import torch

import tandem.ops as ops


class Told(ops.BasicOperation):
    """y = x weight, whose weight is made before the first call."""

    def __init__(self, trained=True):
        super().__init__()
        self.told, self.trained = [], trained

    def pre_first_fuser_forward(self):
        self.told.append("first")
        if not hasattr(self, "weight"):
            self.weight = torch.nn.Parameter(torch.full((2,), 3.0), requires_grad=self.trained)

    def pre_fuser_forward(self, *, requires_grad):
        self.told.append(requires_grad)

    def op_forward(self, ctx, input_, **_):
        ctx.save_for_backward(input_, self.weight)
        return input_ * self.weight

    def op_backward(self, ctx, grad_output):
        x, weight = ctx.saved_tensors
        return grad_output * weight, [(grad_output * x).sum(0)]


def test_ops_are_told_before_calls():
    frozen, trained, x = Told(trained=False), Told(), torch.ones(1, 2)
    box = ops.Sequential(frozen, trained)
    box(x).sum().backward()
    assert torch.equal(trained.weight.grad, torch.full((2,), 3.0)) and frozen.weight.grad is None
    box(x.clone().requires_grad_())
    with torch.no_grad():
        box(x)
    assert frozen.told == ["first", False, True, False] and trained.told == ["first", True, True, False]
    trained(x)
    assert trained.told[4:] == ["first", True]  # a pipeline of its own
    handle = frozen.register_forward_hook(lambda *_: None)  # the op stands alone now
    box(x)
    handle.remove()
    assert frozen.told.count(False) == 3 and trained.told[-1] is True
    box(x)
    assert frozen.told[-1] is False


def test_ops_are_told_before_compiled_calls(fresh_dynamo):
    op, x = Told(), torch.ones(1, 2)
    call = torch.compile(ops.Sequential(op), backend="aot_eager", fullgraph=True)
    assert torch.equal(call(x), torch.full((1, 2), 3.0)) and op.told == ["first", True]
