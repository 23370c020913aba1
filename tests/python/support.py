"""References and comparisons for the tests of the Python package."""

import contextlib
import io
import re

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F

import tandem
import tandem.ops as ops

AsksFunctions = torch.overrides.BaseTorchFunctionMode  # a mode without effect, under which calls are dispatched calls
DYNAMO_ERRORS = (torch._dynamo.exc.TorchRuntimeError, torch._dynamo.exc.Unsupported)  # around an error while tracing; the second one since torch 2.14

# Allowed distance from the float64 result, relative to its largest element: a few roundings of the dtype.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 4e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def gated(function):
    def apply(x):
        a, b = x.chunk(2, -1)
        return function(a) * b

    return apply


def tanh_gelu(x):
    return F.gelu(x, approximate="tanh")


def quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


def squared_relu(x):
    return F.relu(x) ** 2


def situ(a, b, beta1=4.0, beta2=25.0):
    return beta1 * torch.tanh(a / beta1) * torch.sigmoid(a) * beta2 * torch.tanh(b / beta2)


def clamped_swiglu(a, b, limit=7.0, alpha=1.702, offset=1.0):
    a = torch.clamp(a, max=limit)
    return a * torch.sigmoid(alpha * a) * (torch.clamp(b, -limit, limit) + offset)


def of_halves(function):
    """A function of x that calls `function(a, b)` with the halves of its last dimension."""
    return lambda x: function(*x.chunk(2, -1))


# Each activation and each gated unit of `tandem.ops`, and what it computes.
ACTIVATIONS = {
    ops.GELU: tanh_gelu,
    ops.QGELU: quick_gelu,
    ops.SiLU: F.silu,
    ops.ReLU: F.relu,
    ops.SReLU: squared_relu,
    ops.ErfGELU: F.gelu,
    ops.Mish: F.mish,
    ops.Softplus: F.softplus,
    ops.HardSwish: F.hardswish,
    ops.LeakyReLU: F.leaky_relu,
}
GATED = {
    ops.SwiGLU: gated(F.silu),
    ops.GEGLU: gated(tanh_gelu),
    ops.GLU: gated(torch.sigmoid),
    ops.QGEGLU: gated(quick_gelu),
    ops.ReGLU: gated(F.relu),
    ops.SReGLU: gated(squared_relu),
    ops.ErfGEGLU: gated(F.gelu),
    ops.SiTUGLU: of_halves(situ),
    ops.ClampedSwiGLU: of_halves(clamped_swiglu),
}

# Ops with n input features, each with a reference that computes the result from the input and the parameters.
OPS = {
    "Linear": (lambda n=8, **k: ops.Linear(n, 6, **k), F.linear),
    "Linear without bias": (lambda n=8, **k: ops.Linear(n, 6, bias=False, **k), F.linear),
    "BasicLinear": (lambda n=8, **k: ops.BasicLinear(n, 6, **k), F.linear),
    "Bias": (lambda n=8, **k: ops.Bias(n, **k), lambda x, bias: x + bias),
    "RMSNorm": (
        lambda n=8, **k: ops.RMSNorm(n, **k),
        lambda x, w: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * w,
    ),
    "RMSNorm zero-centered": (
        lambda n=8, **k: ops.RMSNorm(n, eps=1e-3, zero_centered_gamma=True, **k),
        lambda x, w: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-3) * (1 + w),
    ),
    "LayerNorm": (lambda n=8, **k: ops.LayerNorm(n, **k), lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b)),
    "LayerNorm zero-centered": (
        lambda n=8, **k: ops.LayerNorm(n, zero_centered_gamma=True, **k),
        lambda x, w, b: F.layer_norm(x, x.shape[-1:], 1 + w, b),
    ),
    "L2Normalization": (lambda *_, **__: ops.L2Normalization(eps=1e-3), lambda x: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-3)),
    **{kind.__name__: (lambda *_, kind=kind, **__: kind(), reference) for kind, reference in {**ACTIVATIONS, **GATED}.items()},
    "SiTUGLU with a factor": (lambda *_, **__: ops.SiTUGLU(beta1=2.0), of_halves(lambda a, b: situ(a, b, 2.0))),
    # No bfloat16 and no float16 is this limit, at which torch 2.14 has another gradient than torch 2.13.
    "ClampedSwiGLU with a limit": (lambda *_, **__: ops.ClampedSwiGLU(limit=0.7501), of_halves(lambda a, b: clamped_swiglu(a, b, 0.7501))),
    "Identity": (lambda *_, **__: ops.Identity(), lambda x: x * 1),
    "Quantize": (lambda *_, **__: ops.Quantize(), lambda x: x * 1),
    "ConstantScale": (lambda *_, **__: ops.ConstantScale(-1.5), lambda x: x * -1.5),
    "Reshape": (lambda *_, **__: ops.Reshape((-1, 4)), lambda x: x.reshape(-1, 4)),
    "Dropout of almost nothing": (lambda *_, **__: ops.Dropout(1e-14), lambda x: x * 1),
    "Dropout 1": (lambda *_, **__: ops.Dropout(1.0), lambda x: x * 0),
}


def randomize(module, seed=None):
    """Draws all parameters from the normal distribution, as zeros and ones would hide errors. With a seed, modules alike get the same. Returns the module."""
    if seed is not None:
        torch.manual_seed(seed)
    with torch.no_grad():
        for param in module.parameters():
            param.normal_()
    return module


def close(actual, expected, dtype=None, terms=0.0):
    """Asserts that `actual` is as near to the float64 `expected` as its dtype allows. `terms` is the magnitude of terms of a sum that may cancel."""
    dtype = dtype or actual.dtype
    assert actual.shape == expected.shape
    scale = expected.abs().max().item() if expected.numel() else 0.0
    bound = TOLERANCES[dtype] * max(scale, terms, 1.0)
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=bound, equal_nan=True)


def assert_equal(actual, expected):
    """Asserts that tensors, or lists and dicts of them, hold the same numbers."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def each_raises(cases):
    """The test of cases `(make, error, text)`: that `make()` raises an error of that type, whose text holds that text."""

    @pytest.mark.parametrize(("make", "error", "text"), cases)
    def test(make, error, text):
        with pytest.raises(error, match=re.escape(text)):
            make()

    return test


def saved_and_loaded(value):
    """What `torch.load` reads of what `torch.save` has written."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def results_of(call, x, grad=None, recipe=None, module=None, seed=None):
    """y of `call(x)` and the gradients of x and of the parameters of `module`, which is `call` itself where none is given.

    Args:
        grad: the gradient of y; that of the sum of y's squares where none is given.
        recipe: that of the region around the call.
        seed: of torch's generator, from right before the call on.
    """
    leaf = x.detach().clone().requires_grad_()
    params = [param for param in (call if module is None else module).parameters() if param.requires_grad]
    if seed is not None:
        torch.manual_seed(seed)
    with contextlib.nullcontext() if recipe is None else tandem.autocast(recipe=recipe):
        y = call(leaf)
    return [y.detach(), *torch.autograd.grad(y.square().sum() if grad is None else y, [leaf, *params], grad)]


def bytes_kept(call, *given):
    """y of `call()`, and the bytes of all storages that autograd keeps for its backward, those of `given` aside."""
    known, sizes = {tensor.untyped_storage().data_ptr() for tensor in given}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = call()
    return y, sum(size for address, size in sizes.items() if address not in known)


def double_leaves(tensors):
    return [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]


def check_against(module, reference, *inputs, gain=0.0):
    """Asserts that output and all gradients of `module` equal those of `reference` on float64 copies of the inputs and the parameters. `gain` bounds
    the magnitude of terms of the gradients relative to the gradient of the output."""
    operands = [*inputs, *module.parameters()]
    wide = double_leaves(operands)
    y, y64 = module(*inputs), reference(*wide)
    assert y.dtype == inputs[0].dtype
    close(y, y64)
    grad = torch.randn(y.shape, dtype=torch.float64).to(y)
    requested = [t for t in operands if t.requires_grad]
    asked64 = [t for t in wide if t.requires_grad]
    if not requested:
        assert not y.requires_grad
        return
    grads = torch.autograd.grad(y, requested, grad)
    for actual, expected in zip(grads, torch.autograd.grad(y64, asked64, grad.double()), strict=True):
        assert actual.dtype == y.dtype or actual.dtype in [t.dtype for t in requested]
        close(actual, expected, terms=gain * grad.abs().max().item() if grad.numel() else 0.0)


def step(module, x, recipe=None, grad=None):
    """`results_of` a step under a recipe, with one seed for all steps."""
    return results_of(module, x, grad, recipe, seed=0)


def llama_mlp(hidden=16, inner=24, **kwargs):
    return ops.Sequential(
        ops.RMSNorm(hidden, **kwargs),
        ops.Linear(hidden, 2 * inner, bias=False, **kwargs),
        ops.SwiGLU(),
        ops.Linear(inner, hidden, bias=False, **kwargs),
    )


def llama_mlp_reference(x, norm, up, down):
    h = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * norm
    return F.linear(gated(F.silu)(F.linear(h, up)), down)


def fork(channel="residual", to_caller=False, **options):
    """The op whose x goes into a channel as well."""
    return ops.MakeExtraOutput(**options).set_extra_output_channel(0, channel, output_to_caller=to_caller)


def join(channel="residual", **options):
    """The op that adds what comes through the channel."""
    return ops.AddExtraInput(**options).set_extra_input_channel(0, channel)


def residual(*branch):
    """x and what the branch makes of it, added."""
    return ops.Sequential(fork(), *branch, join())
