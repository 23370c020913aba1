"""Every draw is its own, and a recomputed one is the same: eager, under torch.compile and in an exported program."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tandem
import tandem.ops as ops

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
BACKENDS = ("eager", "aot_eager", "inductor")
COUNT = 40000


def ones():
    return torch.ones(COUNT, requires_grad=True)


def prepared(function, backend):
    return function if backend is None else torch.compile(function, backend=backend, fullgraph=True)


def independent(*masks):
    """Masks of one half each: any two agree in one half of their places."""
    for i, a in enumerate(masks):
        assert abs(a.double().mean().item() - 0.5) < 0.02
        for b in masks[:i]:
            assert abs((a == b).double().mean().item() - 0.5) < 0.02
    return True


@pytest.mark.parametrize("backend", (None, *BACKENDS))
def test_dropout_of_nothing_draws_nothing(backend):
    box = ops.Sequential(ops.Linear(4, 4), ops.Dropout(0.0), ops.AddExtraInput())
    x, residual = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    state = torch.get_rng_state()
    prepared(box, backend)(x, residual).sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    (dropout,) = (op for op in box if isinstance(op, ops.Dropout))
    y, context = dropout.op_forward_compute(x.detach())
    assert torch.equal(y, x)
    if backend is None:
        assert "linear_bias_add" in tandem.explain(box)


@pytest.mark.parametrize("backend", (None, *BACKENDS))
def test_two_dropouts_of_a_pipeline(backend):
    box = ops.Sequential(ops.Dropout(0.5), ops.Dropout(0.5))
    x = ones()
    y = prepared(box, backend)(x)
    assert abs(y.mean().item() - 1) < 0.05
    assert abs((y != 0).double().mean().item() - 0.25) < 0.02
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, y)  # of a one: what it was multiplied with


@pytest.mark.parametrize("backend", (None, *BACKENDS))
def test_two_pipelines_with_the_same_input(backend):
    first, second = ops.Sequential(ops.Dropout(0.5)), ops.Sequential(ops.Dropout(0.5))
    x = ones()
    a, b = prepared(lambda x: (first(x), second(x)), backend)(x)
    assert independent(a != 0, b != 0)
    for y in (a, b):
        assert torch.equal(torch.autograd.grad(y.sum(), x, retain_graph=True)[0], y)


@pytest.mark.parametrize("backend", (None, *BACKENDS))
def test_one_pipeline_in_a_loop_and_over_steps(backend):
    box = ops.Sequential(ops.Dropout(0.5))
    function = prepared(lambda x: [box(x) for _ in range(3)], backend)
    masks = [y != 0 for _ in range(2) for y in function(ones())]
    assert independent(*masks)
    with torch.no_grad():
        assert independent(*[y != 0 for y in function(ones())])


@pytest.mark.parametrize("backend", (None, *BACKENDS))
def test_the_generator_decides(backend):
    function = prepared(ops.Sequential(ops.Dropout(0.5), ops.Dropout(0.3)), backend)
    results = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        results.append(function(ones()).detach())
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize("reentrant", (False, True))
def test_eager_checkpoint_replays_the_mask(reentrant):
    box = ops.Sequential(ops.Dropout(0.5), ops.Dropout(0.5))
    x = ones()
    y = checkpoint(box, x, use_reentrant=reentrant)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


@pytest.mark.parametrize("backend", BACKENDS[1:])  # in backend "eager" torch replays no generator, of its own dropout neither
def test_compiled_checkpoint_replays_the_mask(backend):
    box = ops.Sequential(ops.Dropout(0.5), ops.Dropout(0.5))
    function = prepared(lambda x: checkpoint(box, torch.cos(x), use_reentrant=False), backend)
    for _ in range(2):
        x = torch.zeros(COUNT, requires_grad=True)
        y = function(x + 1e-3)
        assert abs((y != 0).double().mean().item() - 0.25) < 0.02
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(grad != 0, y != 0)


def test_exported():
    box = ops.Sequential(ops.Dropout(0.5), ops.Dropout(0.5))
    program = torch.export.export(box, (torch.ones(COUNT),)).module()
    first, second = program(torch.ones(COUNT)), program(torch.ones(COUNT))
    for y in (first, second):
        assert abs((y != 0).double().mean().item() - 0.25) < 0.02
    assert not torch.equal(first, second)
