"""Backward on its own path: torch.autocast, batched gradients and subclasses, torch.jit.trace, checkpoints outside their region."""

import contextlib
import copy
import io

import pytest
import torch
import torch.nn.functional as F
from support import assert_equal, llama_mlp, randomize
from torch import nn
from torch.utils.checkpoint import checkpoint

import tandem
import tandem.ops as ops
from tandem.recipe import Float8CurrentScaling

RECIPE = Float8CurrentScaling()


def mlp(**kwargs):
    return randomize(ops.Sequential(ops.LayerNorm(16, **kwargs), ops.Linear(16, 32, **kwargs), ops.GELU(), ops.Linear(32, 8, **kwargs)))


# torch.autocast: the plan has the dtypes, in backward as in forward.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("recipe", [None, RECIPE], ids=["plain", "quantized"])
@pytest.mark.parametrize("way", ["direct", "dispatch", "compiled", "compiled autograd"])
def test_backward_inside_torch_autocast_is_that_outside(dtype, recipe, way):
    if way == "compiled autograd" and recipe is not None:
        pytest.skip("a recipe is refused under compiled autograd")
    box, x = mlp(), torch.randn(64, 16, requires_grad=True)
    grad = torch.randn(64, 8).to(dtype)
    requested = [x, *box.parameters()]
    torch._dynamo.reset()

    def forward(function):
        with tandem.autocast(enabled=recipe is not None, recipe=recipe):
            return function(x)

    with torch.autocast("cpu", dtype=dtype):
        y = forward(box)
    expected = torch.autograd.grad(y, requested, grad)
    if way == "compiled":
        function = torch.compile(box, backend="aot_eager")
    elif way == "dispatch":
        function = lambda x: box(x * torch.ones(()))  # noqa: E731
    else:
        function = box
    with torch.autocast("cpu", dtype=dtype), contextlib.ExitStack() as stack:
        if way == "dispatch":
            stack.enter_context(Watching())
        y = forward(function)
        if way == "compiled autograd":
            stack.enter_context(torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")))
            x.grad = None
            box.zero_grad()
            y.backward(grad)
            actual = [tensor.grad for tensor in requested]
        else:
            actual = torch.autograd.grad(y, requested, grad)
    for a, e in zip(actual, expected, strict=True):
        assert a.isfinite().all() and a.dtype == e.dtype
        if recipe is None and way != "direct":  # products are torch's there, which may sum in another order
            torch.testing.assert_close(a, e, rtol=0, atol=4 * torch.finfo(dtype).eps * e.abs().max().item())
        else:
            assert torch.equal(a, e)


class Watching(torch.utils._python_dispatch.TorchDispatchMode):
    """Sees every operation, and notes its name."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


# Gradients that are not plain.


def test_a_mode_sees_the_backward_of_a_direct_forward():
    box, x = mlp(), torch.randn(4, 16, requires_grad=True)
    y = box(x)
    with Watching() as watching:
        y.sum().backward()
    assert any("gelu" in name or "activation" in name for name in watching.seen), watching.seen


def one_by_one_and_batched(y, requested, grads, retain=True):
    """The gradients for each of several gradients of y: stacked, and as autograd batches them."""
    one_by_one = [torch.autograd.grad(y, requested, grad, retain_graph=True) for grad in grads]
    batched = torch.autograd.grad(y, requested, grads, is_grads_batched=True, retain_graph=retain)
    return [torch.stack(each) for each in zip(*one_by_one, strict=True)], [*batched]


@pytest.mark.parametrize("recipe", [None, RECIPE], ids=["plain", "quantized"])
@pytest.mark.parametrize("retain", [False, True])
def test_batched_gradients(recipe, retain):
    box, x = mlp(), torch.randn(5, 16, requires_grad=True)
    with tandem.autocast(enabled=recipe is not None, recipe=recipe):
        y = box(x)
    for expected, batched in zip(*one_by_one_and_batched(y, [x, *box.parameters()], torch.randn(3, 5, 8), retain), strict=True):
        torch.testing.assert_close(batched, expected, rtol=0, atol=2e-5 * expected.abs().max().item())


@pytest.mark.parametrize("recipe", [None, RECIPE], ids=["plain", "quantized"])
def test_batched_gradients_of_products_of_groups(recipe):
    """Kernel ops that take lists of tensors, for which torch has no rule."""
    box = ops.Sequential(ops.GroupedLinear(2, 16, 32, scale_bias=True), ops.ReLU(), ops.GroupedLinear(2, 32, 16))
    x, scales, splits = torch.randn(6, 16, requires_grad=True), torch.rand(6, requires_grad=True), torch.tensor([4, 2])
    with tandem.autocast(enabled=recipe is not None, recipe=recipe):
        y = box(x, splits, scales, splits)
    torch.testing.assert_close(*one_by_one_and_batched(y, [x, scales, *box.parameters()], torch.randn(3, 6, 16)))


def test_batched_gradients_share_a_delayed_scale():
    """As those of one call: the next scale is that of the largest of all."""
    linear, x = ops.Linear(32, 32, bias=False), torch.randn(16, 32, requires_grad=True)
    requested, grads = [x, linear.weight], torch.randn(3, 16, 32)
    for _ in range(2):  # the second finds a scale
        with tandem.autocast(recipe=tandem.recipe.DelayedScaling()):
            y = linear(x)
        batched = torch.autograd.grad(y, requested, grads, is_grads_batched=True, retain_graph=True)
    torch.testing.assert_close(linear.state_dict()["recipe_state.backward.scale"], torch.finfo(torch.float8_e5m2).max / grads.abs().max()[None])
    one_by_one = [torch.autograd.grad(y, requested, grad, retain_graph=True) for grad in grads]
    assert_equal([*batched], [torch.stack(each) for each in zip(*one_by_one, strict=True)])


@torch.no_grad()
@pytest.mark.parametrize("nested", [False, True])
def test_samples_share_a_delayed_scale(nested):
    x = torch.randn(6, 16, 32)
    weights = torch.randn(6, 32, 32)
    ways = {
        "x": lambda linear, run: run(linear, x),
        "weight": lambda linear, run: run(lambda weight: torch.func.functional_call(linear, {"weight": weight}, (x[0],)), weights),
    }

    def of_samples(function, samples):
        if nested:
            return torch.vmap(torch.vmap(function))(samples.unflatten(0, (2, 3))).flatten(0, 1)
        return torch.vmap(function)(samples)

    def one_by_one(function, samples):
        return torch.stack([function(sample) for sample in samples])

    for way in ways.values():
        linear = ops.Linear(32, 32, bias=False)
        found = []
        for run in (of_samples, one_by_one):
            module = copy.deepcopy(linear)
            for _ in range(2):
                with tandem.autocast(recipe=tandem.recipe.DelayedScaling()):
                    y = way(module, run)
            found.append((y, module.state_dict()["recipe_state.forward.amax_history"], module.state_dict()["recipe_state.forward.scale"]))
        for actual, expected in zip(*found, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vectorized_jacobian(dtype):
    box, x = mlp(dtype=dtype), torch.randn(2, 16, dtype=dtype)
    plain = torch.autograd.functional.jacobian(box, x)
    vectorized = torch.autograd.functional.jacobian(box, x, vectorize=True)
    torch.testing.assert_close(vectorized, plain, rtol=0, atol=1e-5 * plain.abs().max().item())


def test_gradients_of_a_subclass():
    from torch.testing._internal.two_tensor import TwoTensor

    box, x = mlp(), torch.randn(4, 16, requires_grad=True)
    y, grad = box(x), torch.randn(4, 8)
    (expected,) = torch.autograd.grad(y, x, grad, retain_graph=True)
    (actual,) = torch.autograd.grad(y, x, TwoTensor(grad, 2 * grad))
    assert isinstance(actual, TwoTensor)
    torch.testing.assert_close(actual.a, expected)
    torch.testing.assert_close(actual.b, 2 * expected)


def test_gradients_with_a_tangent_are_refused():
    x = torch.randn(3, requires_grad=True)
    y = ops.GELU()(x)
    with torch.autograd.forward_ad.dual_level():
        grad = torch.autograd.forward_ad.make_dual(torch.ones(3), torch.ones(3))
        with pytest.raises(NotImplementedError, match="pipeline: expected gradients without a tangent, got one under forward-mode"):
            torch.autograd.grad(y, x, grad)


# torch.jit.trace.

TRACED = {
    "mlp": lambda: mlp(),
    "llama": lambda: randomize(llama_mlp()),
    "identity": lambda: ops.Sequential(ops.Identity()),
    "mid-model": lambda: nn.Sequential(nn.Linear(16, 16), mlp(), nn.ReLU()),
    "reshape": lambda: ops.Sequential(ops.Reshape((-1, 4, 4)), ops.SiLU(), ops.Reshape((-1, 16)), randomize(ops.Linear(16, 3))),
    "gated": lambda: ops.Sequential(randomize(ops.RMSNorm(16)), ops.GEGLU(), ops.ConstantScale(0.5)),
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("mode", ["grad", "frozen", "no_grad"])
@pytest.mark.parametrize("name", TRACED)
def test_a_trace_is_right_for_other_inputs(name, mode):
    model = TRACED[name]()
    x, other = torch.randn(2, 16), torch.randn(2, 16)
    model(x)
    if mode == "frozen":
        model.requires_grad_(False)
    with torch.no_grad() if mode == "no_grad" else contextlib.nullcontext():
        traced = torch.jit.trace(model, (x,))
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    for module in (traced, torch.jit.load(file)):
        torch.testing.assert_close(module(other), model(other))
    if mode != "grad" or name == "identity":
        return
    params = list(model.parameters())
    (model(other).square().sum()).backward()
    expected = [p.grad for p in params]
    model.zero_grad()
    traced(other).square().sum().backward()
    for param, e in zip(params, expected, strict=True):
        torch.testing.assert_close(param.grad, e, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_trace_with_extra_inputs_and_outputs():
    box = ops.Sequential(ops.MakeExtraOutput(), randomize(ops.Linear(8, 8)), ops.AddExtraInput())
    x, extra = torch.randn(2, 8), torch.randn(2, 8)
    traced = torch.jit.trace(box, (x, extra))
    torch.testing.assert_close(traced(extra, x), box(extra, x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trace_inside_a_region_is_refused():
    box, x = mlp(), torch.randn(4, 16)
    for mode in (torch.no_grad(), contextlib.nullcontext()):
        with mode, tandem.autocast(recipe=RECIPE):
            with pytest.raises(NotImplementedError, match="pipeline: expected no recipe under torch.jit.trace, got one. Trace outside of"):
                torch.jit.trace(box, (x,))


def test_make_fx():
    from torch.fx.experimental.proxy_tensor import make_fx

    box, x, other = mlp(), torch.randn(4, 16), torch.randn(4, 16)
    with torch.no_grad():
        traced = make_fx(lambda x: box(x))(x)
        torch.testing.assert_close(traced(other), box(other))
    graph = make_fx(lambda x: torch.autograd.grad(box(x).sum(), x)[0])(x.requires_grad_())
    other.requires_grad_()
    torch.testing.assert_close(graph(other), torch.autograd.grad(box(other).sum(), other)[0])


# Checkpoints whose backward runs outside the region.

MISMATCH = r'pipeline: expected a recompute under the recipe of its forward, \{.*Float8CurrentScaling.*\}, got none\. Call backward\(\) inside the tandem\.autocast region'


@pytest.mark.parametrize("reentrant", [True, False])
def test_outputs_of_one_tensor_keep_their_gradients_in_a_checkpoint(reentrant):
    """The gradient of y is quantized, that of the extra output is not, and both are the result of SiLU."""
    box = ops.Sequential(ops.SiLU(), ops.MakeExtraOutput(), ops.Quantize(forward=False, backward=True))
    x, grads = torch.randn(8, 16, requires_grad=True), [torch.randn(8, 16), torch.randn(8, 16)]
    with tandem.autocast(recipe=RECIPE):
        expected = torch.autograd.grad(box(x), x, grads)[0]
        torch.autograd.backward(checkpoint(box, x, use_reentrant=reentrant), grads)
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("has_validation", [False, True])
@pytest.mark.parametrize("is_parametrized", [False, True])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recompute_outside_the_region_raises(reentrant, is_parametrized, has_validation):
    """Also where a validation before backward is not the forward that is recomputed."""
    box, x = mlp(), torch.randn(8, 16, requires_grad=True)
    if is_parametrized:
        torch.nn.utils.parametrizations.weight_norm(box[0])
    with tandem.autocast(recipe=RECIPE):
        y = checkpoint(box, x, use_reentrant=reentrant)
    if has_validation:
        with torch.no_grad():
            box.eval()(x)
        box.train()
    with pytest.raises(ValueError, match=MISMATCH):
        y.sum().backward()


@pytest.mark.parametrize("grad", [True, False])
def test_a_call_without_a_recipe_before_backward_hides_no_forward(grad):
    box, x = mlp(), torch.randn(8, 16, requires_grad=True)

    def step(inside):
        x.grad = None
        with tandem.autocast(recipe=RECIPE):
            y = checkpoint(box, x, use_reentrant=True)
        with torch.set_grad_enabled(grad):
            box(x)
        with tandem.autocast(enabled=inside, recipe=RECIPE):
            y.sum().backward()
        return x.grad

    with pytest.raises(ValueError, match=MISMATCH):
        step(inside=False)
    with tandem.autocast(recipe=RECIPE):
        expected = torch.autograd.grad(box(x).sum(), x)[0]
    assert torch.equal(step(inside=True), expected)


def test_forwards_under_several_recipes_are_not_recomputed():
    box, x = mlp(), torch.randn(8, 16, requires_grad=True)
    with tandem.autocast(recipe=RECIPE):
        checkpoint(box, x, use_reentrant=True)
    with tandem.autocast(recipe=Float8CurrentScaling(fp8_format=tandem.recipe.Format.E4M3)):
        y = checkpoint(box, x, use_reentrant=True)
        with pytest.raises(ValueError, match="expected a recompute under the recipe of its forward, one of several, got"):
            y.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recompute_inside_a_region_that_forward_was_not_in_raises(reentrant):
    box, x = mlp(), torch.randn(8, 16, requires_grad=True)
    y = checkpoint(box, x, use_reentrant=reentrant)
    with tandem.autocast(recipe=RECIPE), pytest.raises(ValueError, match=r"recipe of its forward, none, got \{"):
        y.sum().backward()


@pytest.mark.parametrize("remedy", ["inside, reentrant", "inside", "context_fn"])
def test_the_remedies_give_the_gradients_of_no_checkpoint(remedy):
    box, x = mlp(), torch.randn(8, 16, requires_grad=True)
    with tandem.autocast(recipe=RECIPE):
        (expected,) = torch.autograd.grad(box(x).sum(), x)
        if remedy == "context_fn":
            y = checkpoint(box, x, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), tandem.autocast(recipe=RECIPE)))
        else:
            y = checkpoint(box, x, use_reentrant=remedy.endswith("reentrant"))
            y.sum().backward()
    if remedy == "context_fn":
        y.sum().backward()
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("create_graph", [False, True])
def test_calls_in_hooks_and_custom_backwards_raise_no_alarm(create_graph):
    box, x = ops.Sequential(randomize(ops.Linear(8, 8)), ops.GELU()), torch.randn(4, 8, requires_grad=True)

    class UsesPipeline(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return box(x)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                y = box(x)
            return torch.autograd.grad(y, x, grad)

    calls = []

    def hook(_):
        with torch.no_grad():
            calls.append(box(x))

    for _ in range(2):  # gradients accumulate; regions come and go
        with tandem.autocast(recipe=RECIPE):
            y = box(x)
        y.register_hook(hook)
        y.sum().backward(create_graph=create_graph)
        UsesPipeline.apply(x).sum().backward()
        with tandem.autocast(recipe=RECIPE):
            (box(x) + UsesPipeline.apply(x)).sum().backward()
        with tandem.autocast(recipe=Float8CurrentScaling(use_power_2_scales=True)):
            checkpoint(box, x, use_reentrant=False).sum().backward()
    assert len(calls) == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recompute_that_would_write_in_place_again_raises(reentrant):
    add = ops.AddExtraInput(in_place=True)
    x, extra = torch.randn(2, 4, requires_grad=True), torch.randn(2, 4) * 1
    y = checkpoint(lambda x: F.gelu(add(x, extra)), x, use_reentrant=reentrant)
    with pytest.raises(ValueError, match="expected no write into a caller's tensor while backward recomputes a forward that has written it already"):
        y.sum().backward()


def test_compiled_autograd_of_an_extra_output_that_backward_reads():
    box = ops.Sequential(ops.Linear(8, 8), ops.MakeExtraOutput(), ops.Linear(8, 8))
    x = torch.randn(4, 8, requires_grad=True)
    expected = torch.autograd.grad([y.sum() for y in box(x)], [x, *box.parameters()])
    y, extra = box(x)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        (y.sum() + extra.sum()).backward()
    for tensor, grad in zip([x, *box.parameters()], expected, strict=True):
        torch.testing.assert_close(tensor.grad, grad)


def test_a_view_has_the_tangent_that_its_base_got_later():
    forward_ad = torch.autograd.forward_ad
    box, reference = ops.Sequential(ops.RMSNorm(8)), torch.nn.RMSNorm(8, eps=1e-5)
    with forward_ad.dual_level():
        base = torch.randn(6, 8)
        view = base[:4]
        base.copy_(forward_ad.make_dual(base.clone(), torch.randn(6, 8)))
        got, wanted = (forward_ad.unpack_dual(module(view)).tangent for module in (box, reference))
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("name", ["Float8CurrentScaling", "DelayedScaling", "MXFP8BlockScaling", "NVFP4BlockScaling"])
@pytest.mark.parametrize("with_gradients", [True, False])
def test_a_recipe_refuses_tangents_also_where_no_gradient_is_recorded(name, with_gradients):
    """Rounding would lose them: a tangent that is not there counts as zero."""
    forward_ad = torch.autograd.forward_ad
    linear = tandem.Linear(32, 32).requires_grad_(False)
    x, tangent = torch.randn(2, 32, 32)
    weight = {"weight": linear.weight.detach(), "bias": linear.bias.detach()}
    recipe = getattr(tandem.recipe, name)()
    refused = pytest.raises(NotImplementedError, match="^quantize: expected a tensor without a tangent, got one under forward-mode")
    with torch.set_grad_enabled(with_gradients), tandem.autocast(recipe=recipe):
        with forward_ad.dual_level():
            with refused:
                linear(forward_ad.make_dual(x, tangent))
            with refused:
                torch.func.functional_call(linear, weight | {"weight": forward_ad.make_dual(weight["weight"], tangent)}, (x,))
            bias_tangent = torch.randn(32)
            y = torch.func.functional_call(linear, weight | {"bias": forward_ad.make_dual(weight["bias"], bias_tangent)}, (x,))
            assert torch.equal(forward_ad.unpack_dual(y).tangent, bias_tangent.expand(32, 32))
        with refused:
            torch.func.jvp(linear, (x,), (tangent,))


def test_casts_refuse_tangents():
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.randn(4, 32), torch.randn(4, 32))
        for name, call in {
            "cast_to_codes": lambda: tandem.cast(x, torch.float8_e4m3fn),
            "quantize": lambda: torch.ops.tandem.quantize(x, None, "mxfp8_e4m3", [True, True, True]),
            "quantize_weight": lambda: tandem.quantize_weight(x, tandem.MXFP8Quantizer(torch.float8_e4m3fn)),
        }.items():
            with pytest.raises(NotImplementedError, match=f"^{name}: expected a tensor without a tangent"):
                call()
