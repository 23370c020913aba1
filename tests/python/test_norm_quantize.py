"""Gradients of norms and dropout, and norms behind a sum, that go to codes in their kernels: the bits of the ops one by one."""

import copy
from functools import partial

import pytest
import recipes
import torch
from support import assert_equal, fork, join, randomize, results_of

import tandem
from tandem import ops
from tandem.recipe import CustomRecipe, MXFP8BlockScaling, NVFP4BlockScaling

RECIPES = [*recipes.RECIPES.values()]  # those that draw no seeds, which ops by themselves draw in another order
NORMS = {"rms_norm": partial(ops.RMSNorm, rounds_before_weight=True), "layer_norm": ops.LayerNorm}


def name_of(recipe):
    return type(recipe).__name__


class Residual(torch.nn.Module):
    """h + inside(h) for h = before(x), or inside(h) alone: in one pipeline, and one by one."""

    def __init__(self, before, inside, residual=True):
        super().__init__()
        self.before, self.inside, self.residual = torch.nn.Sequential(*before), torch.nn.Sequential(*inside), residual
        self.together = ops.Sequential(*before, *([fork(), *inside, join()] if residual else inside))

    def forward(self, x):
        return self.together(x)

    def apart(self, x):
        h = self.before(x)
        return ops.AddExtraInput()(self.inside(h), h) if self.residual else self.inside(h)


def behind_a_product(norm, features, bias, residual, dtype):
    """before(x) + after(norm(before(x)))."""
    before, after = ops.Linear(*features, bias=bias, dtype=dtype), ops.Linear(features[1], features[1], bias=bias, dtype=dtype)
    return Residual([before], [NORMS[norm](features[1], dtype=dtype), after], residual)


def block_of(norm, unit, bias, dtype):
    """x + linear(unit(linear(norm(x)))), as in LLaMA: both operands of weight gradients are written again."""
    up, down = ops.Linear(48, 80, bias=bias, dtype=dtype), ops.Linear(80 if unit is ops.GELU else 40, 48, bias=bias, dtype=dtype)
    return Residual([], [NORMS[norm](48, dtype=dtype), up, unit(), down])


def after_a_step(call, module, recipe, x, grad):
    """Results of a second step, as delayed scales are those of the step before."""
    return [results_of(call, x, grad, recipe, module, seed=0) for _ in range(2)][1]


WITHOUT_A_SUM = [(bias, False, dtype) for bias in (False, True) for dtype in (torch.float32, torch.bfloat16, torch.float16)]


# In 16 bits a step that adds a residual rounds once, two ops do twice.
@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("bias", "residual", "dtype"), [*WITHOUT_A_SUM, (False, True, torch.float32), (True, True, torch.float32)])
def test_gradients_of_norms_have_the_bits_of_ops_one_by_one(bias, residual, dtype, norm, recipe):
    for features, sizes in (((32, 64), (3, 32, 32)), ((19, 45), (37, 19)), ((16, 32), (0, 16))):
        module = randomize(behind_a_product(norm, features, bias, residual, dtype))
        twin = copy.deepcopy(module)
        x = torch.randn(*sizes).to(dtype)
        grad = torch.randn(*sizes[:-1], features[1]).to(dtype)
        assert_equal(after_a_step(module, module, recipe, x, grad), after_a_step(twin.apart, twin, recipe, x, grad))
        name = f"{norm}_backward{'_add' if residual else ''}{'_bias' if bias else ''}_quantize_quantize_y"
        assert name in module.together.fusions_made(), module.together.explain()
        assert name in module.together.explain()


@pytest.mark.parametrize("recipe", [*RECIPES[:-1], NVFP4BlockScaling()], ids=name_of)
@pytest.mark.parametrize("norm", NORMS)
def test_verify_finds_no_difference(norm, recipe):
    module = randomize(behind_a_product(norm, (32, 48), True, True, torch.float32))
    with tandem.autocast(recipe=recipe):
        outcome = module.together.verify(torch.randn(33, 32, requires_grad=True))
    assert outcome, str(outcome)


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("is_block", [False, True], ids=["behind a product", "block"])
def test_compiled_gradients_have_the_bits_of_eager_ones(is_block, norm, recipe, fresh_dynamo):
    dtype = torch.bfloat16 if is_block else torch.float32
    module = randomize(block_of(norm, ops.SwiGLU, True, dtype) if is_block else behind_a_product(norm, (32, 48), True, True, dtype))
    twin = copy.deepcopy(module)
    x, grad = torch.randn(33, 48 if is_block else 32).to(dtype), torch.randn(33, 48).to(dtype)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert_equal(results_of(compiled, x, grad, recipe, seed=0), results_of(twin, x, grad, recipe, seed=0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", [None, *RECIPES], ids=name_of)
@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_behind_a_sum_has_the_bits_of_ops_one_by_one(norm, recipe, dtype):
    for features, rows in ((64, 32), (45, 37), (32, 0)):
        parts = [ops.AddExtraInput(), ops.MakeExtraOutput(), NORMS[norm](features, dtype=dtype), ops.Linear(features, 24, bias=False, dtype=dtype)]
        box = randomize(ops.Sequential(*parts))
        twin = copy.deepcopy(box)
        x, extra = torch.randn(2, rows, features).to(dtype)

        def one_by_one(x, extra, twin=twin):
            add, _, of_norm, linear = twin
            total = add(x, extra)
            return linear(of_norm(total)), total

        outcomes = []
        for module, call in ((box, box), (twin, one_by_one)):
            own, other = x.clone().requires_grad_(), extra.clone().requires_grad_()
            with tandem.autocast(enabled=recipe is not None, recipe=recipe):
                outputs = call(own, other)
            sum(t.float().square().sum() for t in outputs).backward()
            of_x = [own.grad, other.grad] if dtype is torch.float32 else []  # in 16 bits a step that adds rounds once, two ops do twice
            outcomes.append([*(t.detach() for t in outputs), *of_x, *(p.grad for p in module.parameters())])
        assert_equal(*outcomes)
        assert f"add_{norm}{'_quantize' if recipe else ''}" in box.fusions_made(), box.explain()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("behind, fused", [(lambda: ops.Dropout(0.3), "dropout"), (lambda: ops.ConstantScale(0.3), "scale")], ids=["dropout", "scale"])
def test_gradients_behind_a_product_have_the_bits_of_ops_one_by_one(behind, fused, bias, recipe, dtype):
    for features, sizes in (((32, 64), (3, 32, 32)), ((19, 45), (37, 19)), ((16, 32), (0, 16))):
        box = randomize(ops.Sequential(ops.Linear(*features, bias=bias, dtype=dtype), behind()))
        twin = copy.deepcopy(box)
        x, grad = torch.randn(*sizes).to(dtype), torch.randn(*sizes[:-1], features[1]).to(dtype)
        linear, last = twin
        apart = results_of(lambda x, linear=linear, last=last: last(linear(x)), x, grad, recipe, twin, seed=0)
        got = results_of(box, x, grad, recipe, seed=0)
        if fused == "scale":  # forward rounds once, behind product, bias and scale; two ops do twice
            got, apart = got[1:], apart[1:]
        assert_equal(got, apart)
        name = f"{fused}_backward{'_bias' if bias else ''}_quantize"
        assert name in box.fusions_made(), box.explain()
    with tandem.autocast(recipe=recipe):
        assert box.verify(torch.randn(33, 16, dtype=dtype, requires_grad=True))


def test_a_gradient_that_goes_on_is_written_beside_its_codes():
    """Two blocks on one residual stream: the sum of gradients is read by the product before it and by the stream."""
    parts = []
    for i in range(2):
        parts += [fork(f"r{i}"), ops.RMSNorm(32), ops.Linear(32, 32, bias=False), join(f"r{i}")]
    box = randomize(ops.Sequential(*parts))
    with tandem.autocast(recipe=MXFP8BlockScaling()):
        outcome = box.verify(torch.randn(33, 32, requires_grad=True))
    assert outcome, str(outcome)
    expected = {"rms_norm_backward_add_quantize_quantize_y", "rms_norm_backward_add_quantize_y"}
    assert expected <= set(box.fusions_made()), box.explain()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("unit", [ops.SwiGLU, ops.GELU])
@pytest.mark.parametrize("bias", [False, True])
def test_what_is_written_again_goes_to_codes_with_the_bits_of_ops_one_by_one(bias, unit, norm, recipe, dtype):
    block = randomize(block_of(norm, unit, bias, dtype))
    twin = copy.deepcopy(block)
    x, grad = torch.randn(37, 48).to(dtype), torch.randn(37, 48).to(dtype)
    got, expected = after_a_step(block, block, recipe, x, grad), after_a_step(twin.apart, twin, recipe, x, grad)
    if dtype is torch.float32:  # in 16 bits a step that adds rounds once, two ops do twice
        assert_equal(got[:1] + got[2:], expected[:1] + expected[2:])  # the gradients of x are added in another order
    kind = "glu" if unit is ops.SwiGLU else "activation"
    made = {f"{norm}_backward_add_quantize_y", f"{kind}_backward{'_bias' if bias else ''}_quantize_quantize_y"}
    assert made <= set(block.together.fusions_made()), block.together.explain()
    with tandem.autocast(recipe=recipe):
        assert block.together.verify(x.clone().requires_grad_())


MX, LINES = tandem.MXFP8Quantizer, partial(tandem.Float8BlockQuantizer, rowwise=True, columnwise=True, block_scaling_dim=1)
FORMATS = {"blocks and mx": (MX, LINES), "mx and blocks": (LINES, MX), "one scale and mx": (MX, tandem.Float8CurrentScalingQuantizer)}


@pytest.mark.parametrize(("of_gradients", "of_others"), FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("norm", NORMS)
def test_two_formats_in_one_kernel(norm, of_gradients, of_others):
    """Blocks of other heights: gradients of one format and what is written again of another."""

    def choose(role):
        return of_gradients(torch.float8_e5m2) if role.tensor_type == "grad_output" else of_others(torch.float8_e4m3fn)

    block = randomize(block_of(norm, ops.SwiGLU, True, torch.bfloat16))
    with tandem.autocast(recipe=CustomRecipe(choose)):
        outcome = block.together.verify(torch.randn(300, 48).bfloat16().requires_grad_())
    assert outcome, str(outcome)
    made = {f"{norm}_backward_add_quantize_y", "glu_backward_bias_quantize_quantize_y"}
    assert made <= set(block.together.fusions_made()), block.together.explain()
