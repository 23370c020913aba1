"""Tensors in codes where other parts of torch meet them: caches of compiled code, autocast, budgets, delayed gradients, tangents."""

import copy
import os
import subprocess
import sys
import textwrap

import pytest
import tandem
import torch
from tandem import ops
from torch.autograd import forward_ad

MXFP8 = tandem.MXFP8Quantizer(torch.float8_e4m3fn)
CURRENT = tandem.Float8CurrentScalingQuantizer(torch.float8_e4m3fn)

COMPILED = """
    import torch, torch._inductor, tandem
    torch._inductor.config.fallback_by_default = True  # caches are the same, and no C++ compiler runs
    torch.manual_seed(0)
    linear = tandem.ops.Sequential(tandem.ops.Linear(64, 16, bias=False))

    def run(x, quantizer):
        def function(codes):
            with tandem.autocast(recipe=tandem.recipe.Float8CurrentScaling()):
                return linear(codes)
        torch._dynamo.reset()
        y = torch.compile(function, fullgraph=True)(tandem.quantize(x, quantizer))
        expected = function(tandem.quantize(x.detach(), quantizer))
        torch.testing.assert_close(y, expected)  # its dtype and shape too
        assert y.requires_grad
        y.sum().backward()
        return x.grad

    current = tandem.Float8CurrentScalingQuantizer(torch.float8_e4m3fn)
    mxfp8 = tandem.MXFP8Quantizer(torch.float8_e4m3fn)
    print([tandem.quantize(torch.randn(4, 64), each)._stable_hash_for_caching() for each in (mxfp8, current)])
"""


# Each behind COMPILED in a process of its own, with one cache on disk: the second may find what the first has left there.
IN_PROCESSES = [
    """
    assert run(torch.randn(16, 64), current) is None
    for rows in (33, 64, 1): run(torch.randn(rows, 64), mxfp8)
    """,
    """
    assert run(torch.randn(16, 64, requires_grad=True), current).norm() > 1
    assert run(torch.randn(16, 64, requires_grad=True), mxfp8).norm() > 1
    run(torch.randn(33, 64), current)
    linear = linear.bfloat16()
    run(torch.randn(64, 64).bfloat16(), mxfp8)
    """,
]


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """What they have printed."""
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("cache")), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}
    results = []
    for part in IN_PROCESSES:
        source = textwrap.dedent(COMPILED) + textwrap.dedent(part)
        results.append(subprocess.run([sys.executable, "-c", source], env={**os.environ, **cache, "PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=False))
    return results


@pytest.mark.long
def test_compile_caches_tell_who_wants_a_gradient_and_sizes_and_dtypes(processes):
    for result in processes:
        assert result.returncode == 0, result.stderr


@pytest.mark.long
def test_what_caches_know_a_tensor_by_means_the_same_in_every_process(processes):
    made = [tandem.quantize(torch.randn(4, 64), quantizer)._stable_hash_for_caching() for quantizer in (MXFP8, CURRENT)]
    assert [result.stdout.strip() for result in processes] == [str(made)] * 2 and made[0] != made[1]


@pytest.mark.parametrize("recipe", [tandem.recipe.Float8CurrentScaling(), tandem.recipe.DelayedScaling()])
def test_a_recipe_from_outside_of_compiled_code_with_dynamic_shapes(recipe):
    linear = ops.Sequential(ops.Linear(64, 64))
    another = copy.deepcopy(linear)  # whose history is its own

    def function(linear, x):
        with tandem.autocast(recipe=recipe):
            return linear(x)

    x = torch.randn(8, 64)
    y = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")(linear, x)
    assert torch.equal(y, function(another, x))


UNITS = {
    "linear": lambda: [],
    "bias_gelu": lambda: [ops.GELU()],
    "swiglu": lambda: [ops.SwiGLU()],
    "scale": lambda: [ops.ConstantScale(2.0)],
}


@pytest.mark.parametrize("behind", UNITS)
@pytest.mark.parametrize("bias", [True, False])
def test_codes_of_numbers_that_autocast_casts(behind, bias):
    pipeline = ops.Sequential(ops.Linear(64, 32, bias=bias), *UNITS[behind]())
    x = torch.randn(16, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16), tandem.autocast(recipe=tandem.recipe.MXFP8BlockScaling()):
        codes = tandem.quantize(x, MXFP8).requires_grad_()
        y, plain = pipeline(codes), pipeline(codes.dequantize().detach().requires_grad_())
        assert y.dtype == plain.dtype
        torch.testing.assert_close(y, plain, atol=0.02, rtol=0.02)
    y.sum().backward()
    assert codes.grad.dtype == torch.float32


@pytest.mark.parametrize("of_x", [torch.float32, torch.float16])
def test_codes_of_other_numbers_than_the_weight_has(of_x):
    pipeline = ops.Sequential(ops.Linear(64, 32, dtype=torch.bfloat16), ops.GELU())
    codes = tandem.quantize(torch.randn(16, 64, dtype=of_x), MXFP8).requires_grad_()
    with tandem.autocast(recipe=tandem.recipe.MXFP8BlockScaling()):
        y = pipeline(codes)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert codes.grad.dtype == of_x


def test_the_refusal_for_codes_of_numbers_that_are_cast_is_explained():
    pipeline = ops.Sequential(ops.Linear(64, 32, dtype=torch.bfloat16), ops.GELU())
    with tandem.autocast(recipe=tandem.recipe.MXFP8BlockScaling()):
        pipeline(tandem.quantize(torch.randn(16, 64), MXFP8))
    assert "x comes in codes of Float numbers, and the product computes in BFloat16" in pipeline.explain()


@pytest.mark.parametrize("recipe", [tandem.recipe.DelayedScaling(), tandem.recipe.Float8CurrentScaling(), None])
def test_a_memory_budget_beside_codes_with_a_given_scale(recipe):
    norm, mlp = ops.Sequential(ops.RMSNorm(64), ops.Quantize()), ops.Sequential(ops.Linear(64, 16), ops.GELU(), ops.Linear(16, 16))
    quantizer = tandem.Float8Quantizer(torch.ones(1), torch.zeros(1), torch.float8_e4m3fn)
    x = torch.randn(33, 64, requires_grad=True)
    with tandem.autocast(enabled=recipe is not None, recipe=recipe), tandem.memory_budget(10000):
        y = mlp(norm(x)) + mlp(tandem.quantize(x, quantizer))
    y.sum().backward()
    assert x.grad.norm() > 0


@pytest.mark.parametrize("recipe", [tandem.recipe.MXFP8BlockScaling(), tandem.recipe.Float8CurrentScaling()], ids=["mxfp8", "current"])
def test_codes_written_before_a_delayed_gradient_are_told_of(recipe):
    linear = tandem.Linear(128, 32, bias=False, delay_wgrad_compute=True)
    codes = tandem.quantize(torch.randn(66, 128), MXFP8 if recipe.mxfp8() else CURRENT)
    with tandem.autocast(recipe=recipe):
        y = linear(codes)
    y.sum().backward()
    codes.copy_(torch.zeros(66, 128))
    with pytest.raises(RuntimeError, match="backward_dw: expected x unchanged since backward"):
        linear.backward_dw()


def test_a_delayed_gradient_of_codes_that_nobody_writes():
    linear = tandem.Linear(128, 32, bias=False, delay_wgrad_compute=True)
    codes = tandem.quantize(torch.randn(66, 128), MXFP8)
    for recipe in (tandem.recipe.MXFP8BlockScaling(), None):
        with tandem.autocast(enabled=recipe is not None, recipe=recipe):
            y = linear(codes)
        y.sum().backward()
        linear.backward_dw()
    assert linear.weight.grad.norm() > 0


def test_tangents_of_codes():
    codes, tangent = tandem.quantize(torch.randn(8, 64), MXFP8), torch.randn(8, 64)
    pipeline = ops.Sequential(ops.Linear(64, 16))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(codes.detach(), tangent)
        numbers = forward_ad.unpack_dual(dual.dequantize())
        assert torch.equal(numbers.tangent, tangent) and torch.equal(numbers.primal, codes.dequantize())
        assert forward_ad.unpack_dual(dual.dequantize(torch.float64)).tangent.dtype == torch.float64
        assert torch.equal(forward_ad.unpack_dual(pipeline(dual.dequantize())).tangent, tangent @ pipeline[0].weight.t())
        for recipe in (None, tandem.recipe.MXFP8BlockScaling()):
            with tandem.autocast(enabled=recipe is not None, recipe=recipe):
                with pytest.raises(NotImplementedError, match="expected arguments in codes without tangents, got one under forward-mode"):
                    pipeline(dual)


QUANTIZERS = {
    "current": CURRENT,
    "blocks": tandem.Float8BlockQuantizer(torch.float8_e4m3fn, rowwise=True, columnwise=True),
    "mxfp8": MXFP8,
    "nvfp4": tandem.NVFP4Quantizer(),
}


def in_parameter(module, name, x):
    """What torch.func differentiates."""
    return lambda value: torch.func.functional_call(module, {name: value}, (x,)).square().sum()


@pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS)
def test_torch_func_over_a_weight_beside_codes(quantizer):
    codes = quantizer.quantize(torch.randn(32, 128))
    linear = ops.Linear(128, 16, bias=False)
    for module, name in ((linear, "weight"), (ops.Sequential(ops.RMSNorm(128), linear), "0.weight")):
        value = module.get_parameter(name).detach()
        of_codes, of_numbers = (in_parameter(module, name, x) for x in (codes, codes.dequantize()))
        expected = torch.func.grad(of_numbers)(value)
        assert torch.equal(torch.func.grad(of_codes)(value), expected)
        assert torch.equal(torch.vmap(torch.func.grad(of_codes))(value[None])[0], expected)
        tangents = (torch.ones_like(value),)
        torch.testing.assert_close(torch.func.jvp(of_codes, (value,), tangents), torch.func.jvp(of_numbers, (value,), tangents))


@pytest.mark.parametrize("recipe", [tandem.recipe.MXFP8BlockScaling(), tandem.recipe.DelayedScaling(), tandem.recipe.NVFP4BlockScaling()])
def test_torch_func_beside_codes_under_a_recipe_is_refused(recipe):
    linear, codes = ops.Linear(64, 32, bias=False), MXFP8.quantize(torch.randn(32, 64))
    weight, function = linear.weight.detach(), in_parameter(linear, "weight", codes)
    with tandem.autocast(recipe=recipe):
        with pytest.raises(NotImplementedError, match="quantize: expected a tensor without a tangent, got one under forward-mode"):
            torch.func.jvp(function, (weight,), (weight,))
        with pytest.raises(NotImplementedError, match="pipeline: expected no recipe where torch.func differentiates, got one whose backward rounds"):
            torch.func.grad(function)(weight)


def test_codes_with_a_history_inside_torch_func():
    """They count as their numbers."""
    x, weight = torch.randn(32, 64), torch.randn(64, 8)
    codes = MXFP8.quantize(x.clone().requires_grad_())
    numbers = codes.detach().dequantize()
    gradient = torch.func.grad(lambda weight: (codes.dequantize() @ weight).square().sum())(weight)
    torch.testing.assert_close(gradient, 2 * numbers.t() @ (numbers @ weight))
    torch.testing.assert_close(torch.vmap(lambda weight: codes.dequantize() @ weight)(weight[None])[0], numbers @ weight)
    inside = torch.func.grad(lambda weight: (MXFP8.quantize(x).dequantize() @ weight).square().sum())(weight)
    torch.testing.assert_close(inside, gradient)


VIEWS = {
    "rows": lambda x: x[32:],
    "first rows": lambda x: x[:32],
    "row": lambda x: x[3],
    "columns": lambda x: x[:, 32:],
    "split": lambda x: x.split(32)[1],
    "chunk": lambda x: x.chunk(2)[1],
    "unbind": lambda x: x.unbind()[1],
    "narrow": lambda x: x.narrow(0, 32, 32),
    "view": lambda x: x.view(2, 32, 64),
    "slice of a slice": lambda x: x[32:][8:16],
}


@pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_of_codes_with_a_tangent(quantizer, view):
    codes, tangent = quantizer.quantize(torch.randn(64, 64)), torch.randn(64, 64)
    with forward_ad.dual_level():
        dual = view(forward_ad.make_dual(codes, tangent))
        numbers = forward_ad.unpack_dual(dual * 1)
        assert torch.equal(numbers.primal, view(codes.dequantize())) and torch.equal(numbers.tangent, view(tangent))
        kind = type(view(codes))
    assert type(view(codes)) is kind  # the same codes without a tangent are seen as ever


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32, torch.bool, torch.float8_e4m3fn])
def test_only_numbers_have_codes(dtype):
    x = torch.ones(4, 64).to(dtype)
    for call in (lambda: tandem.quantize(x, MXFP8), lambda: MXFP8(x), lambda: MXFP8.quantize(x, out=tandem.quantize(torch.ones(4, 64), MXFP8))):
        with pytest.raises(TypeError, match=f"MXFP8Quantizer: expected numbers in float32, bfloat16, float16 or float64, got {dtype}. Convert x before"):
            call()


@pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS)
def test_torch_func_over_what_is_quantized(quantizer):
    x, weight = torch.randn(32, 64), torch.randn(16, 64)
    for function, expected in (
        (lambda x: torch.nn.functional.linear(quantizer.quantize(x), weight).sum(), weight.sum(0).expand(32, 64)),
        (lambda x: (quantizer.quantize(x) * 2).sum(), torch.full((32, 64), 2.0)),
    ):
        torch.testing.assert_close(torch.func.grad(function)(x), expected)
