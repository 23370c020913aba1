"""FSDP1 as it is by default: parameters are plain attributes of their modules, views of one flat parameter."""

import copy

import pytest
import torch
from support import llama_mlp
from torch.distributed.fsdp import FullyShardedDataParallel

import tandem.ops as ops


class Scale(ops.BasicOperation):
    """y = x * weight * other, written in Python."""

    def __init__(self):
        super().__init__()
        self.weight, self.other = (torch.nn.Parameter(torch.full((16,), value)) for value in (1.5, 0.5))

    def op_forward(self, ctx, input_, **_):
        ctx.save_for_backward(input_, self.weight, self.other)
        return input_ * self.weight * self.other

    def op_backward(self, ctx, grad_output):
        x, weight, other = ctx.saved_tensors
        return grad_output * weight * other, [(grad_output * x * other).sum(0), (grad_output * x * weight).sum(0)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("make", [llama_mlp, lambda: ops.Sequential(ops.Linear(16, 16), Scale()), lambda: ops.Linear(16, 16)])
def test_steps_are_those_of_one_process(one_rank, use_orig_params, make):
    box = make()
    plain = copy.deepcopy(box)
    wrapped = FullyShardedDataParallel(box, device_id=torch.device("cpu"), use_orig_params=use_orig_params)
    results = []
    for model in (plain, wrapped):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            x = torch.randn(4, 16, generator=generator, requires_grad=True)
            optimizer.zero_grad()
            y = model(x)
            y.square().sum().backward()
            optimizer.step()
        with torch.no_grad():
            results.append((y, x.grad, model(x)))
    torch.testing.assert_close(results[1], results[0])
