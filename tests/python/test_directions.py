"""Forward and backward of ops of the library, called by ops and fusions that are written in Python."""

import pytest
import torch
from support import OPS, assert_equal, check_against, llama_mlp, randomize, tanh_gelu
from test_fusions_python import replacing

import tandem
import tandem.ops as ops
from tandem.ops import OperationContext

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

WITH_EXTRAS = {
    "AddExtraInput": (lambda: ops.AddExtraInput(), lambda x: [torch.randn_like(x)]),
    "MakeExtraOutput": (lambda: ops.MakeExtraOutput(), lambda x: []),
    "ScaledSwiGLU": (lambda: ops.ScaledSwiGLU(), lambda x: [torch.randn(x.shape[:-1])]),
    "ScaledSReLU": (lambda: ops.ScaledSReLU(), lambda x: [torch.randn(x.shape[:-1])]),
    "GroupedLinear": (lambda: ops.GroupedLinear(2, 8, 6), lambda x: [torch.tensor([3, 2])]),
    "LinearCrossEntropy": (lambda: ops.LinearCrossEntropy(8, 5), lambda x: [torch.arange(5)]),
    "LinearCrossEntropy, a sum": (lambda: ops.LinearCrossEntropy(8, 5, reduction="sum"), lambda x: [torch.arange(5)]),
    "LinearCrossEntropy by rows": (lambda: ops.LinearCrossEntropy(8, 5, reduction="none"), lambda x: [torch.arange(5)]),
}


@pytest.mark.parametrize("name", [name for name in OPS if name != "Linear" and name != "Linear without bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_directions_of_an_op_are_those_of_its_pipeline(name, dtype):
    op, x = randomize(OPS[name][0](dtype=dtype)), torch.randn(5, 8, dtype=dtype, requires_grad=True)
    y = op(x)
    grad = torch.randn_like(y)
    expected = torch.autograd.grad(y, [x, *op.parameters()], grad)
    ctx = OperationContext()
    torch.manual_seed(0)
    mine = op.op_forward(ctx, x)
    assert (mine is x or not mine.requires_grad) and ctx.dtype == dtype and ctx.saved_names == op._context
    if name != "Dropout 1":  # another seed, and the same numbers
        assert_equal(mine.detach(), y.detach())
    ctx.saved_tensors, ctx.to_save = ctx.to_save, None
    grad_x, grad_params = op.op_backward(ctx, grad)
    assert_equal([grad_x, *grad_params], [*expected])


@pytest.mark.parametrize("name", WITH_EXTRAS)
def test_extra_inputs_and_outputs_go_through_the_fuser_methods(name):
    make, extras = WITH_EXTRAS[name]
    op, x = make(), torch.randn(5, 8, requires_grad=True)
    extra = [tensor.requires_grad_(tensor.is_floating_point()) for tensor in extras(x)]
    outputs = op(x, *extra)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = [torch.randn_like(output) for output in outputs]
    floating = [tensor for tensor in extra if tensor.requires_grad]
    expected = torch.autograd.grad(outputs, [x, *floating, *op.parameters()], grads)
    ctx = OperationContext()
    y, (extra_outputs,) = op.fuser_forward([ctx], x, basic_op_extra_inputs=[tuple(extra)], basic_op_kwargs=[{}])
    assert_equal([y, *extra_outputs], [*outputs])
    ctx.saved_tensors = ctx.to_save
    grad_x, (grad_params,), (grad_extra,) = op.fuser_backward([ctx], grads[0], basic_op_grad_extra_outputs=[tuple(grads[1:])])
    assert [tensor is None for tensor in grad_extra] == [not tensor.is_floating_point() for tensor in extra]
    assert_equal([grad_x, *[g for g in grad_extra if g is not None], *grad_params], [*expected])
    split, _, saved = op.fuser_forward_compute(x, basic_op_extra_inputs=[tuple(extra)], basic_op_kwargs=[{}])
    assert_equal(split, y)
    other = OperationContext()
    op.fuser_forward_save_ctx([other], x, saved)
    assert other.saved_names == ctx.saved_names and other.dtype == ctx.dtype
    for method, arguments in (("op_forward", (ctx, x)), ("op_backward", (ctx, y)), ("op_forward_compute", (x,))):
        with pytest.raises(RuntimeError, match=rf"{type(op).__name__}: expected an op without extra tensor .*It should override `fuser_\w+` instead of `op_\w+`"):
            getattr(op, method)(*arguments)


def test_fields_of_contexts_have_the_names_of_transformer_engine():
    ctx = OperationContext()
    ops.BasicLinear(8, 4, dtype=torch.bfloat16).op_forward(ctx, torch.randn(2, 8))
    assert ctx.dtype == torch.bfloat16 and ctx.to_save[0].dtype == torch.bfloat16
    assert ctx.input_requires_grad and ctx.weight_requires_grad and not ctx.with_quantized_compute and ctx.backward_override is None
    assert ctx.input_quantizer is ctx.weight_quantizer is ctx.grad_output_quantizer is ctx.grad_input_quantizer is None
    for override in (None, "high_precision"):
        with tandem.autocast(recipe=tandem.recipe.MXFP8BlockScaling(backward_override=override)):
            ops.BasicLinear(32, 32).op_forward(ctx, torch.randn(32, 32))
        assert ctx.with_quantized_compute and ctx.backward_override == override
    ops.GELU().op_forward(ctx, torch.randn(2))
    assert ctx.dtype == torch.float32 and ctx.prev_op_grad_output_quantizer is None
    ops.Reshape((-1,)).op_forward(ctx, torch.randn(2, 3))
    assert ctx.input_shape == (2, 3)


def test_a_context_that_is_written_by_hand_serves_backward():
    linear, x, grad = ops.BasicLinear(8, 4), torch.randn(3, 8), torch.randn(3, 4)
    ctx = OperationContext(saved_tensors=(x, linear.weight.detach()))
    ctx.dtype, ctx.with_quantized_compute, ctx.input_requires_grad, ctx.weight_requires_grad = torch.float32, False, True, False
    grad_x, (grad_weight,) = linear.op_backward(ctx, grad)
    torch.testing.assert_close(grad_x, grad @ linear.weight.detach())
    assert grad_weight is None
    ctx.input_requires_grad, ctx.weight_requires_grad = False, True
    grad_x, (grad_weight,) = linear.op_backward(ctx, grad)
    assert grad_x is None
    torch.testing.assert_close(grad_weight, grad.T @ x)
    with pytest.raises(ValueError, match=r"BasicLinear: expected 2 saved tensors on its context \(x, weight\), got 1. Save what its own forward saves."):
        linear.op_backward(OperationContext(saved_tensors=(x,)), grad)
    with pytest.raises(ValueError, match=r"op_backward: expected .*x on the context, as backward reads it, got none. Save in forward"):
        linear.op_backward(OperationContext(saved_tensors=(None, linear.weight.detach())), grad)
    with pytest.raises(ValueError, match=r"GELU: expected 1 tensors to save \(x\), got 2. Pass what op_forward_compute has returned."):
        ops.GELU().op_forward_save_ctx(OperationContext(), x, (x, x))
    with pytest.raises(TypeError, match="GELU: expected no arguments for an op of the library, got shift. Define op_forward to take them."):
        ops.GELU().op_forward(OperationContext(), x, shift=1)


def test_evaluation_and_frozen_parameters_count_as_in_forward():
    drop, x, ctx = ops.Dropout(0.5).eval(), torch.randn(4), OperationContext()
    assert torch.equal(drop.op_forward(ctx, x), x) and ctx.to_save == (None,)
    ctx.saved_tensors = ctx.to_save
    drop.train()
    assert torch.equal(drop.op_backward(ctx, x)[0], x)
    linear = ops.BasicLinear(4, 4)
    linear.weight.requires_grad_(False)
    linear.op_forward(ctx, x)
    ctx.saved_tensors = ctx.to_save
    linear.weight.requires_grad_(True)
    assert linear.op_backward(ctx, x)[1] == (None,)


RECIPES = [tandem.recipe.Float8CurrentScaling, tandem.recipe.MXFP8BlockScaling]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_quantizes_in_the_directions_of_an_op_too(recipe):
    linear, x = randomize(ops.BasicLinear(64, 32)), torch.randn(32, 64, requires_grad=True)
    grad, ctx = torch.randn(32, 32), OperationContext()
    with tandem.autocast(recipe=recipe()):
        y = linear(x)
        mine = linear.op_forward(ctx, x)
    assert ctx.with_quantized_compute and ctx.to_save[0] is x
    assert_equal(mine, y.detach())
    expected = torch.autograd.grad(y, [x, linear.weight], grad)
    ctx.saved_tensors = ctx.to_save
    grad_x, (grad_weight,) = linear.op_backward(ctx, grad)  # outside of the region
    assert_equal((grad_x, grad_weight), expected)


def test_a_recipe_with_a_state_is_refused():
    with (
        tandem.autocast(recipe=tandem.recipe.DelayedScaling()),
        pytest.raises(NotImplementedError, match="BasicLinear: expected a recipe without a state where an op of the library is called by its parts, got one"),
    ):
        ops.BasicLinear(4, 4).op_forward(OperationContext(), torch.randn(4, 4))


@pytest.mark.parametrize("op", [lambda: ops.GELU(), lambda: ops.RMSNorm(8), lambda: ops.Bias(8), lambda: ops.SwiGLU(), lambda: ops.ConstantScale(3.0)])
def test_ops_that_quantize_nothing_take_any_recipe(op):
    op, ctx, x = randomize(op()), OperationContext(), torch.randn(4, 8, requires_grad=True)
    expected = op(x)
    with tandem.autocast(recipe=tandem.recipe.DelayedScaling()):
        y = op.op_forward(ctx, x)
    grad = torch.randn_like(y)
    ctx.saved_tensors = ctx.to_save
    grad_x, of_params = op.op_backward(ctx, grad)
    wanted = torch.autograd.grad(expected, [x, *op.parameters()], grad)
    assert_equal([y, grad_x, *of_params], [expected.detach(), *wanted])


def test_an_op_that_delegates_runs_under_a_recipe_with_a_state():
    box, x = ops.Sequential(ops.Linear(8, 8), DoubledGELU(), SplitDoubledGELU()), torch.randn(4, 8, requires_grad=True)
    for _ in range(2):
        with tandem.autocast(recipe=tandem.recipe.DelayedScaling(amax_history_len=2)):
            y, h = box(x), box[0](x)
        (of_h,) = torch.autograd.grad(doubled(doubled(leaf := h.detach().requires_grad_())).sum(), leaf)
        (of_x,) = torch.autograd.grad(h, x, of_h, retain_graph=True)
        torch.testing.assert_close(y, doubled(doubled(h)))
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], of_x, rtol=1e-2, atol=1e-2)


def doubled(x):
    return 2 * torch.nn.functional.gelu(x, approximate="tanh")


class DoubledGELU(ops.GELU):
    """2 gelu(x), in the one-piece style."""

    def op_forward(self, ctx, input_, **kwargs):
        return 2 * super().op_forward(ctx, input_, **kwargs)

    def op_backward(self, ctx, grad_output):
        assert ctx.dtype == grad_output.dtype and ctx.saved_names == ("x",)
        return super().op_backward(ctx, 2 * grad_output)


class SplitDoubledGELU(ops.GELU):
    """The same in the split style."""

    def op_forward_compute(self, input_, **kwargs):
        y, saved = super().op_forward_compute(input_, **kwargs)
        return 2 * y, saved

    def op_backward(self, ctx, grad_output):
        return super().op_backward(ctx, 2 * grad_output)


class Plain(ops.BasicLinear):
    """Forward of its own, backward of the library."""

    def op_forward(self, ctx, input_, **unused):
        ctx.save_for_backward(input_, self.weight)
        ctx.dtype = input_.dtype
        return torch.nn.functional.linear(input_, self.weight)


class Logged(ops.LayerNorm):
    """Backward of its own, forward of the library."""

    seen = 0

    def op_backward(self, ctx, grad_output):
        type(self).seen += 1
        x, mean, _ = ctx.saved_tensors
        assert mean.shape == (x.shape[0],)
        return super().op_backward(ctx, grad_output)


class Halved(ops.ScaledSwiGLU):
    """Half of it, with the extra input."""

    def fuser_forward(self, basic_op_ctxs, input_, **kwargs):
        y, extra = super().fuser_forward(basic_op_ctxs, input_, **kwargs)
        return y / 2, extra

    def fuser_backward(self, basic_op_ctxs, grad_output, **kwargs):
        return super().fuser_backward(basic_op_ctxs, grad_output / 2, **kwargs)


@pytest.mark.parametrize("made", [DoubledGELU, SplitDoubledGELU])
@pytest.mark.parametrize("compiled", [False, True])
def test_super_of_an_op_of_the_library(made, compiled):
    box = randomize(ops.Sequential(ops.Linear(8, 6), made(), ops.Linear(6, 8)))
    x = torch.randn(4, 8, requires_grad=True)

    def reference(x, w1, b1, w2, b2):
        return torch.nn.functional.linear(2 * tanh_gelu(torch.nn.functional.linear(x, w1, b1)), w2, b2)

    run = torch.compile(box, fullgraph=True, backend="aot_eager") if compiled else box
    expected = reference(x, *box.parameters())
    torch.testing.assert_close(run(x), expected)
    requested = [x, *box.parameters()]
    torch.testing.assert_close(torch.autograd.grad(run(x).sum(), requested), torch.autograd.grad(expected.sum(), requested, retain_graph=True))
    with torch.no_grad():
        torch.testing.assert_close(run(x), expected)
    if not compiled:
        torch.testing.assert_close(torch.func.grad(lambda x: box(x).sum())(x.detach()), torch.autograd.grad(expected.sum(), x)[0], rtol=1e-4, atol=1e-5)


def test_half_of_an_op_may_be_the_library_s():
    check_against(Plain(8, 6), torch.nn.functional.linear, torch.randn(5, 8, requires_grad=True))
    check_against(
        randomize(Logged(8)), lambda x, w, b: torch.nn.functional.layer_norm(x, (8,), w, b), torch.randn(5, 8, requires_grad=True)
    )
    assert Logged.seen == 1
    x, scales = torch.randn(5, 8, requires_grad=True), torch.randn(5, requires_grad=True)
    half = ops.Sequential(ops.ConstantScale(1.0), Halved())
    torch.testing.assert_close(half(x, scales), ops.ScaledSwiGLU()(x, scales) / 2)
    torch.testing.assert_close(torch.autograd.grad(half(x, scales).sum(), (x, scales)), torch.autograd.grad(ops.ScaledSwiGLU()(x, scales).sum() / 2, (x, scales)))
    assert Halved()._forward_prefix == "fuser"


def test_parts_of_a_linear_are_called_by_its_own_methods():
    linear, x = randomize(ops.Linear(8, 6)), torch.randn(3, 8, requires_grad=True)
    ctxs = [OperationContext(), OperationContext()]
    y, extra = linear.fuser_forward(ctxs, x, basic_op_extra_inputs=[(), ()], basic_op_kwargs=[{}, {}])
    torch.testing.assert_close(y, linear(x).detach())
    assert extra == [(), ()]
    for ctx in ctxs:
        ctx.saved_tensors = ctx.to_save
    grad = torch.randn_like(y)
    grad_x, ((grad_weight,), (grad_bias,)), grad_extra = linear.fuser_backward(ctxs, grad, basic_op_grad_extra_outputs=[(), ()])
    torch.testing.assert_close((grad_x, grad_weight, grad_bias), torch.autograd.grad(linear(x), [x, *linear.parameters()], grad))
    assert grad_extra == [(), ()]


class ForwardLinearGELU(ops.FusedOperation):
    """Compute of its own, whose save_ctx are those of its ops."""

    def fuser_forward_compute(self, input_, **unused):
        linear, bias, gelu = self.basic_ops
        z, saved = linear.op_forward_compute(input_)
        z, none = bias.op_forward_compute(z)
        y, of_gelu = gelu.op_forward_compute(z)
        return y, [(), (), ()], [saved, none, of_gelu]

    def fuser_forward_save_ctx(self, basic_op_ctxs, input_, tensors_to_save, **kwargs):
        for op, ctx, saved in zip(self.basic_ops, basic_op_ctxs, tensors_to_save, strict=True):
            op.op_forward_save_ctx(ctx, input_, saved)


class BackwardGELUBias(ops.FusedOperation):
    """The backward of its ops, one after the other."""

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        bias, gelu = self.basic_ops
        assert basic_op_ctxs[1].dtype == torch.float32 and basic_op_ctxs[1].prev_op_grad_output_quantizer is None
        grad, _ = gelu.op_backward(basic_op_ctxs[1], grad_output)
        grad, own = bias.op_backward(basic_op_ctxs[0], grad)
        return grad, [own, ()], [(), ()]


class JointGELUBias(BackwardGELUBias):
    """Both."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        bias, gelu = self.basic_ops
        return gelu.op_forward(basic_op_ctxs[1], bias.op_forward(basic_op_ctxs[0], input_)), [(), ()]


@pytest.mark.parametrize(
    ("register", "kinds", "made"),
    [
        (ops.register_forward_fusion, [ops.BasicLinear, ops.Bias, ops.GELU], ForwardLinearGELU),
        (ops.register_backward_fusion, [ops.Bias, ops.GELU], BackwardGELUBias),
        (ops.register_forward_backward_fusion, [ops.Bias, ops.GELU], JointGELUBias),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_fusions_call_the_directions_of_their_ops(register, kinds, made, compiled):
    box, x = randomize(ops.Sequential(ops.Linear(8, 6), ops.GELU())), torch.randn(4, 8, requires_grad=True)
    requested = [x, *box.parameters()]
    expected = box(x)
    grads = torch.autograd.grad(expected.sum(), requested)
    with register(replacing(kinds, made)):
        run = torch.compile(box, fullgraph=True, backend="aot_eager") if compiled else box
        torch.testing.assert_close(run(x), expected)
        torch.testing.assert_close(torch.autograd.grad(run(x).sum(), requested), grads)
        assert any(name.startswith("fuse_into_") for name in box.fusions_made()), box.fusions_made()
        assert compiled or box.verify(x), box.verify(x)


class BackwardNothing(ops.FusedOperation):
    """Of two scales, whose sizes nobody keeps, or of an activation, which keeps an x of the sizes of its gradient."""

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        return None, [(), ()], [(), ()]


def test_none_in_a_fusion_of_backward_alone():
    x = torch.randn(3, requires_grad=True)
    scales, gelu = ops.Sequential(ops.ConstantScale(2.0), ops.ConstantScale(2.0)), ops.Sequential(ops.GELU(), ops.ConstantScale(2.0))
    with (
        ops.register_backward_fusion(replacing([ops.ConstantScale, ops.ConstantScale], BackwardNothing)),
        ops.register_backward_fusion(replacing([ops.GELU, ops.ConstantScale], BackwardNothing)),
    ):
        assert not torch.autograd.grad(gelu(x).sum(), x)[0].any()
        y = scales(x).sum()
        with pytest.raises(ValueError, match="got None, and a fusion of backward alone knows no sizes. Return zeros from fuser_backward."):
            y.backward()


def test_every_op_of_a_model_can_be_called_by_hand():
    box, x = llama_mlp(), torch.randn(3, 16)
    y, ctxs = x, []
    flat = [basic for op in box for basic in op.flat_ops()]
    for op in flat:
        ctxs.append(OperationContext())
        y = op.op_forward(ctxs[-1], y)
    torch.testing.assert_close(y, box(x).detach())
    grad = torch.ones_like(y)
    grads = []
    for op, ctx in zip(reversed(flat), reversed(ctxs), strict=True):
        ctx.saved_tensors = ctx.to_save
        grad, own = op.op_backward(ctx, grad)
        grads = [*own, *grads]
    box(x).sum().backward()
    torch.testing.assert_close(grads, [param.grad for param in box.parameters()])
