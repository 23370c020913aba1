"""What compiled code guards: the description of its own pipeline, and nothing that is made at the first call."""

import pytest
import torch
from python_ops import SplitScale, SplitSwap, WholeSin
from support import llama_mlp, randomize, residual
from test_fusions_python import JointSquare, replacing
from torch._dynamo.testing import CompileCounterWithBackend

import tandem
import tandem.ops as ops

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BLOCKS = {
    "LLaMA MLP": llama_mlp,
    "several pipelines": lambda: ops.Sequential(ops.Linear(16, 16), torch.nn.Tanh(), ops.Linear(16, 16), ops.Dropout(0.0)),
    "Linear": lambda: ops.Linear(16, 16),
    "GELU": ops.GELU,
    "Python op": SplitScale,
    "Python ops": lambda: ops.Sequential(ops.Linear(16, 16), SplitScale(), WholeSin(), ops.GELU()),
    "residual": lambda: residual(ops.Linear(16, 16)),
}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("grad", [True, False])
def test_equal_blocks_compile_once_cold(name, grad):
    blocks = [randomize(BLOCKS[name]()) for _ in range(12)]
    counter = CompileCounterWithBackend("aot_eager")
    for block in blocks:
        block.compile(backend=counter, fullgraph=True)
    x = torch.randn(4, 16, requires_grad=grad)
    results = [block(x) for block in blocks]
    assert counter.frame_count == 1
    if grad:
        grads = [torch.autograd.grad(y.sum(), [x, *block.parameters()]) for y, block in zip(results, blocks, strict=True)]
    torch._dynamo.reset()
    for index, block in enumerate(blocks):
        block._compiled_call_impl = None
        expected = block(x)
        torch.testing.assert_close(results[index], expected)
        if grad:
            torch.testing.assert_close(grads[index], torch.autograd.grad(expected.sum(), [x, *block.parameters()]))


def test_equal_blocks_with_hooks_compile_once_cold():
    blocks = [ops.Sequential(ops.ConstantScale(2.0), SplitSwap(), ops.ConstantScale(3.0)) for _ in range(4)]
    counter = CompileCounterWithBackend("aot_eager")
    for block in blocks:
        block[1].register_forward_hook(lambda module, arguments, output: None)
        block.compile(backend=counter, fullgraph=True)
    x, extra = torch.randn(4), torch.randn(4)
    for block in blocks:
        torch.testing.assert_close(block(x, extra), (6 * extra, 6 * x))
    assert counter.frame_count == 1


def test_blocks_that_differ_do_not_share_code():
    x = torch.ones(4)
    blocks = [ops.Sequential(ops.ConstantScale(float(k))) for k in range(1, 5)]
    for block in blocks:
        block.compile(backend="eager", fullgraph=True)
    for k, block in enumerate(blocks, 1):
        assert torch.equal(block(x), k * x)
    tied = ops.Linear(4, 4)
    shared = ops.Sequential(tied, ops.GELU(), tied)
    apart = randomize(ops.Sequential(ops.Linear(4, 4), ops.GELU(), ops.Linear(4, 4)))
    expected = apart(x), shared(x)
    apart.compile(backend="eager", fullgraph=True)
    shared.compile(backend="eager", fullgraph=True)
    torch.testing.assert_close((apart(x), shared(x)), expected)


def counted(box):
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(box, backend=counter, fullgraph=True), counter


def test_an_option_that_changes_elsewhere_recompiles_nothing():
    box, other = randomize(llama_mlp()), ops.Sequential(ops.ConstantScale(2.0), ops.Dropout(0.5).eval())
    x = torch.randn(4, 16)
    function, counter = counted(box)
    other_function, other_counter = counted(other)
    function(x), other_function(x)
    for scale in (3.0, 4.0):
        other[0].scale = scale
        function(x)
        torch.testing.assert_close(other_function(x), scale * x)
    assert counter.frame_count == 1 and other_counter.frame_count == 3
    box[0].eps = 0.5
    torch.testing.assert_close(function(x), box(x))
    assert counter.frame_count == 2
    box[0].eps = 1e-5
    function(x)
    assert counter.frame_count == 2, "the code of the first description is found again"


def test_a_fusion_of_other_ops_recompiles_nothing():
    box, other = randomize(llama_mlp()), ops.Sequential(ops.SiLU(), ops.SiLU())
    x = torch.randn(4, 16, requires_grad=True)
    function, counter = counted(box)
    other_function, other_counter = counted(other)
    function(x), other_function(x)
    for _ in range(2):
        with ops.register_forward_backward_fusion(replacing([ops.SiLU, ops.SiLU], JointSquare)):
            function(x)
            y = other_function(x)
            torch.testing.assert_close([y, *torch.autograd.grad(y.sum(), x)], [x * x, 2 * x])
        function(x)
        torch.testing.assert_close(other_function(x), torch.nn.functional.silu(torch.nn.functional.silu(x)))
    assert counter.frame_count == 1 and other_counter.frame_count == 3


def test_a_fusion_that_applies_under_a_recipe_only():
    box, x = ops.Sequential(ops.SiLU(), ops.SiLU()), torch.randn(4, requires_grad=True)
    plain = box(x)
    function, counter = counted(box)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def inside(x):
        with tandem.autocast():
            return box(x)

    function(x), inside(x)
    fuse = replacing([ops.SiLU, ops.SiLU], JointSquare)

    def under_a_recipe(found, *, recipe=None):
        return found if recipe is None else fuse(found)

    with ops.register_forward_backward_fusion(under_a_recipe):
        torch.testing.assert_close(function(x), plain)
        assert counter.frame_count == 1
        with tandem.autocast():
            torch.testing.assert_close(function(x), x * x)
        torch.testing.assert_close(inside(x), x * x)
    torch.testing.assert_close(inside(x), plain)


def test_only_the_pipeline_that_holds_a_changed_op_prepares_again():
    layers = [ops.Sequential(ops.ConstantScale(2.0), ops.Identity()) for _ in range(8)]
    x = torch.ones(2)
    [layer(x) for layer in layers]
    before = [layer._made[1] for layer in layers]
    layers[3][0].scale = 5.0
    assert [float(layer(x)[0]) for layer in layers] == [2, 2, 2, 5, 2, 2, 2, 2]
    assert [layer._made[1] is pipeline for layer, pipeline in zip(layers, before, strict=True)] == [n != 3 for n in range(8)]
    before = layers[3]._made[1]
    layers[3][0].scale = 5.0
    layers[3](x)
    assert layers[3]._made[1] is before, "the same value is no change"


@pytest.mark.parametrize("forward", [False, True])
def test_a_quantize_flag_changed_in_place_counts_at_the_next_call(forward):
    op, x = ops.Quantize(forward=not forward), torch.randn(4, 4)
    box = ops.Sequential(op)
    with tandem.autocast():
        assert torch.equal(box(x), x) == forward
        op.quantize_forward = forward
        assert torch.equal(box(x), x) != forward


@pytest.mark.parametrize("alone", [False, True])
def test_in_place_changed_counts_at_the_next_call(alone):
    add = ops.AddExtraInput()
    box = add if alone else ops.Sequential(ops.ConstantScale(1.0), add)
    x, extra = torch.ones(3), torch.ones(3)
    assert torch.equal(box(x, extra), 2 * x) and torch.equal(extra, torch.ones(3))
    add.in_place = True
    assert torch.equal(box(x, extra), 2 * x) and torch.equal(extra, 2 * torch.ones(3))
    add.in_place = False
    assert torch.equal(box(x, extra), 3 * x) and torch.equal(extra, 2 * torch.ones(3))
