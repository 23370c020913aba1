"""Under torch.compile: one graph, the numbers of eager, no Python per step, nothing saved that is written again."""

import sys

import pytest
import torch
from python_ops import SplitScale, SplitSwap, WholeSin
from support import llama_mlp, randomize, residual
from torch._dynamo.testing import CompileCounterWithBackend

import tandem
import tandem.ops as ops

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def compiled(module, backend="aot_eager", **kwargs):
    return torch.compile(module, fullgraph=True, backend=backend, **kwargs)


def compare(box, function, x):
    requested = [x, *box.parameters()]
    expected = torch.autograd.grad(box(x).pow(2).sum(), requested)
    actual = torch.autograd.grad(function(x).pow(2).sum(), requested)
    torch.testing.assert_close(function(x), box(x))
    torch.testing.assert_close(actual, expected)


BOXES = {
    "LLaMA MLP": llama_mlp,
    "Python ops": lambda: ops.Sequential(ops.Linear(16, 16), SplitScale(), WholeSin(), ops.GELU()),
    "residual": lambda: residual(*llama_mlp()),
    "plain modules": lambda: ops.Sequential(ops.LayerNorm(16), torch.nn.Linear(16, 16), ops.ReLU(), torch.nn.Tanh()),
    "one op": lambda: ops.Linear(16, 8),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", BOXES)
def test_one_graph_for_all_shapes(name, dynamic):
    box = randomize(BOXES[name]())
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(box, fullgraph=True, backend=counter, dynamic=dynamic)
    for rows in (6, 7, 19) if dynamic else (6,):
        x = torch.randn(rows, 16, requires_grad=True)
        compare(box, function, x)
    assert counter.frame_count == 1
    with torch.no_grad():
        torch.testing.assert_close(function(x), box(x))


def test_inductor():
    box = randomize(llama_mlp())
    compare(box, compiled(box, "inductor"), torch.randn(6, 16, requires_grad=True))


def test_extra_inputs_and_outputs():
    box = ops.Sequential(ops.ConstantScale(2.0), SplitSwap(), ops.MakeExtraOutput(), ops.AddExtraInput())
    inputs = [torch.randn(4, requires_grad=True) for _ in range(3)]
    function = compiled(box)
    actual, expected = function(*inputs), box(*inputs)
    torch.testing.assert_close(actual, expected)

    def loss(outputs):
        return sum(((n + 1) * y).sum() for n, y in enumerate(outputs))

    torch.testing.assert_close(torch.autograd.grad(loss(actual), inputs), torch.autograd.grad(loss(expected), inputs))


def test_arguments_per_call():
    sin = WholeSin()
    box = ops.Sequential(ops.Identity(), sin)
    function = compiled(lambda x: box(x, op_kwargs={1: {"shift": 0.5}}))
    x = torch.randn(3)
    torch.testing.assert_close(function(x), torch.sin(x + 0.5))


def test_no_python_runs_in_a_compiled_step():
    box = randomize(llama_mlp())
    function = compiled(box, "inductor")
    x = torch.randn(6, 16, requires_grad=True)
    function(x).sum().backward()
    function(x).sum().backward()
    called = set()

    def profile(frame, event, _):
        if event == "call" and "tandem" in frame.f_code.co_filename.split("/")[-3:-1]:
            called.add(frame.f_code.co_qualname)

    sys.setprofile(profile)
    try:
        function(x).sum().backward()
    finally:
        sys.setprofile(None)
    assert called <= {"Sequential.forward"}  # whose code Dynamo has replaced


def test_no_code_of_a_python_op_runs_in_a_compiled_step():
    calls = []

    class Noting(WholeSin):
        def op_forward(self, ctx, input_, **kwargs):
            calls.append(1)
            return super().op_forward(ctx, input_, **kwargs)

    function = compiled(ops.Sequential(ops.Identity(), Noting()))
    function(torch.ones(2))
    before = len(calls)
    function(torch.ones(2))
    assert len(calls) == before > 0


def test_train_and_eval():
    box = ops.Sequential(ops.ConstantScale(2.0), ops.Dropout(0.5))
    function, x = compiled(box), torch.ones(1000)
    assert 300 < (function(x) == 0).sum() < 700
    box.eval()
    assert torch.equal(function(x), 2 * x)
    box.train()
    box[1].eval()
    assert torch.equal(function(x), 2 * x)


def saved_by(function):
    bytes_of = {}

    def pack(tensor):
        bytes_of[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function().sum().backward()
    return bytes_of


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_what_is_written_again_in_backward_is_not_saved(backend):
    from torch._functorch import config

    box = randomize(llama_mlp(32, 64))
    x = torch.randn(128, 32, requires_grad=True)
    function = compiled(box, backend)
    with config.patch(activation_memory_budget=1.0):
        function(x).sum().backward()
    given = {t.data_ptr() for t in (x, *box.parameters())}
    eager = sum(size for pointer, size in saved_by(lambda: box(x)).items() if pointer not in given)
    traced = sum(size for pointer, size in saved_by(lambda: function(x)).items() if pointer not in given)
    assert eager == 4 * (128 * 128 + 128)
    assert traced <= eager


def test_export_keeps_the_pipeline():
    box = randomize(llama_mlp())
    x = torch.randn(6, 16)
    program = torch.export.export(box, (x,))
    assert "tandem.pipeline" in str(program.graph)
    torch.testing.assert_close(program.module()(x), box(x))
    decomposed = program.run_decompositions()
    assert "tandem.pipeline" not in str(decomposed.graph) and "tandem" in str(decomposed.graph)
    torch.testing.assert_close(decomposed.module()(x), box(x))


def exported():
    """A decoder's block without attention, with a batch of any size."""
    box = randomize(ops.Sequential(*llama_mlp(), ops.LayerNorm(16), ops.Dropout(0.5), ops.GEGLU(), ops.L2Normalization())).eval()
    x = torch.randn(6, 16)
    return box, x, ({0: torch.export.Dim.DYNAMIC},)


def test_export_decomposes_for_any_batch():
    box, x, shapes = exported()
    program = torch.export.export(box, (x,), dynamic_shapes=shapes).run_decompositions(tandem.decompositions())
    assert "tandem" not in str(program.graph)
    torch.testing.assert_close(program.module()(x[:2]), box(x[:2]))
    with tandem.autocast(recipe=tandem.recipe.MXFP8BlockScaling()):
        program = torch.export.export(box.requires_grad_(False), (x,)).run_decompositions(tandem.decompositions())
        assert "tandem" not in str(program.graph)
        torch.testing.assert_close(program.module()(x), box(x))


def test_onnx_has_every_op(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    box, x, shapes = exported()
    torch.onnx.export(box, (x,), tmp_path / "box.onnx", dynamo=True, dynamic_shapes=shapes)
    session = onnxruntime.InferenceSession(tmp_path / "box.onnx")
    (y,) = session.run(None, {session.get_inputs()[0].name: x[:2].numpy()})
    torch.testing.assert_close(torch.from_numpy(y), box(x[:2]))


def test_export_of_both_directions():
    from torch.export.experimental import _export_forward_backward

    class Loss(torch.nn.Module):
        def __init__(self, box):
            super().__init__()
            self.box = box

        def forward(self, x):
            return self.box(x).square().sum()

    model, x = Loss(exported()[0]), torch.randn(6, 16)
    _export_forward_backward(torch.export.export(model, (x,), strict=False))


def test_a_parameter_that_is_none_is_told_as_in_eager(fresh_dynamo):
    box, x = ops.Sequential(ops.Linear(8, 8)), torch.randn(2, 8)
    box[0].bias = None
    text = "pipeline: expected a tensor as parameter bias, got NoneType. Assign a torch.nn.Parameter to it."
    for call in (box, torch.compile(box, backend="aot_eager"), torch.compile(box, backend="aot_eager", fullgraph=True)):
        with pytest.raises(ValueError, match=text):
            call(x)
