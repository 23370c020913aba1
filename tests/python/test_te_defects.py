"""Defects that were found in TransformerEngine's operation fuser, by the numbers of a list: each has a test that shows that it is not here, or a
line in docs/transformer-engine.md on why it does not apply."""

import ast
import copy
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from experts import product
from ranks import on_ranks
from support import fork, join, randomize
from torch import nn

import tandem
import tandem.ops as ops

ROOT = Path(__file__).parents[2]
COUNT = 32


def test_every_number_has_a_test_or_a_line():
    tested = {int(number) for name in globals() for number in re.findall(r"^test_(\d\d)_", name)}
    page = (ROOT / "docs" / "transformer-engine.md").read_text()
    told = {int(number) for number in re.findall(r"^\| (\d+) \|", page, re.M)}
    assert tested | told == set(range(1, COUNT + 1)) and not tested & told


def test_01_no_gradient_of_an_input_that_needs_none():
    box = ops.Sequential(ops.Linear(8, 8), ops.GELU())
    x = torch.randn(4, 8)
    box(x).sum().backward()
    backward = box.explain()[box.explain().index("  backward") :]
    assert "grad of 0.basic_linear.weight" in backward and "grad of x" not in backward
    box(x.requires_grad_()).sum().backward()
    assert "grad of x" in box.explain()


def test_02_parameters_that_are_made_late_get_their_gradients():
    box = ops.Sequential(ops.LayerNorm(8, device="meta"), ops.RMSNorm(8, device="meta"), ops.Linear(8, 8, device="meta"), ops.Bias(8, device="meta"))
    box(torch.randn(2, 8)).square().sum().backward()
    assert all(param.grad is not None and param.grad.isfinite().all() for param in box.parameters())
    experts = ops.GroupedLinear(2, 8, 4, device="meta")
    experts(torch.randn(3, 8), torch.tensor([1, 2])).sum().backward()
    assert all(param.grad is not None for param in experts.parameters())


def test_03_a_parameter_that_takes_the_place_of_another_gets_the_gradient():
    box = ops.Sequential(ops.Linear(4, 4), ops.GELU())
    x = torch.randn(2, 4)
    box(x).sum().backward()
    old, new = box[0].weight, nn.Parameter(torch.randn(4, 4))
    old.grad = None
    box[0].weight = new
    box(x).sum().backward()
    assert new.grad is not None and old.grad is None


def test_04_a_linear_without_bias_loads_its_own_state_and_missing_keys_are_told():
    linear = ops.Linear(4, 2, bias=False)
    assert str(linear.load_state_dict(linear.state_dict())) == "<All keys matched successfully>"
    assert str(linear.load_state_dict(tandem.transformer_engine_state_dict(linear))) == "<All keys matched successfully>"
    assert ops.Linear(4, 2).load_state_dict({}, strict=False).missing_keys == ["weight", "bias"]
    with pytest.raises(RuntimeError, match="Missing key"):
        ops.Linear(4, 2).load_state_dict({})


def test_05_keys_are_the_names_of_parameters():
    block = nn.Sequential(ops.Linear(4, 4), ops.Sequential(ops.RMSNorm(4), ops.Linear(4, 2)), tandem.LayerNormMLP(2, 2))
    assert list(block.state_dict()) == [name for name, _ in block.named_parameters()]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", [tandem.recipe.MXFP8BlockScaling, tandem.recipe.Float8CurrentScaling, tandem.recipe.DelayedScaling])
def test_06_a_linear_may_follow_a_linear_under_every_recipe(recipe, dtype, bias):
    box = ops.Sequential(ops.Linear(64, 64, bias=bias, dtype=dtype), ops.Linear(64, 64, bias=bias, dtype=dtype))
    x = torch.randn(32, 64, dtype=dtype, requires_grad=True)
    with tandem.autocast(recipe=recipe()):
        y = box(x)
    y.sum().backward()
    assert y.dtype == dtype and x.grad.isfinite().all() and all(param.grad is not None for param in box.parameters())


@pytest.mark.parametrize("parts", [(ops.Linear(8, 8, bias=False), ops.ConstantScale(2.0)), (ops.Linear(8, 8),)])
@pytest.mark.parametrize("in_place", [True, False])
def test_07_an_extra_input_of_another_dtype_is_added_as_unfused(parts, in_place):
    box = ops.Sequential(*parts, ops.AddExtraInput(in_place=in_place))
    x, extra = torch.randn(4, 8), torch.randn(4, 8).bfloat16()
    unfused = ops.Sequential(*parts)(x)
    expected = extra.clone().add_(unfused) if in_place else unfused + extra
    y = box(x, extra.clone())
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y, expected)


def test_08_what_overwrites_main_grad_gives_no_gradient_besides():
    linear = ops.Linear(4, 2, accumulate_into_main_grad=True)
    weight = linear.weight
    weight.main_grad, weight.overwrite_main_grad, weight.grad_added_to_main_grad = torch.full((2, 4), torch.nan), True, False
    x = torch.randn(3, 4)
    linear(x).sum().backward()
    torch.testing.assert_close(weight.main_grad, torch.ones(3, 2).t() @ x)
    assert weight.grad_added_to_main_grad is True and weight.grad.data_ptr() != weight.main_grad.data_ptr()


def check_sums_over_ranks(rank, size):
    x = torch.full((2, 2), float(rank + 1))
    before = x.clone()
    y, kept = ops.Sequential(ops.MakeExtraOutput(), ops.AllReduce())(x)
    assert torch.equal(x, before) and torch.equal(kept, before) and torch.equal(y, torch.full((2, 2), 3.0))


def test_09_a_sum_over_ranks_leaves_its_input_alone():
    on_ranks(2, check_sums_over_ranks)


def test_10_a_sum_in_place_into_a_channel_spoils_nothing_that_backward_reads():
    box = ops.Sequential(fork(), ops.GELU(), join(in_place=True))
    x = torch.randn(4, 8, requires_grad=True)
    y = box(x)
    expected = F.gelu(x, approximate="tanh") + x
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x), torch.autograd.grad(expected.sum(), x))


@pytest.mark.parametrize("module", [lambda: ops.Linear(8, 8, bias=False), lambda: ops.RMSNorm(8), ops.GELU])
def test_11_gradients_of_callers_are_not_written_to(module):
    box = ops.Sequential(ops.MakeExtraOutput(in_place=True), module())
    x = torch.randn(4, 8, requires_grad=True)
    given = torch.ones(1, 1).expand(4, 8), torch.full((4, 8), 2.0)
    before = [grad.clone() for grad in given]
    outputs = box(x)
    (actual,) = torch.autograd.grad(outputs, x, given)
    assert all(map(torch.equal, given, before))
    expected = torch.autograd.grad(box[1](x), x, given[0])[0] + given[1]
    torch.testing.assert_close(actual, expected)
    box(x)[1].sum().backward()


def test_12_a_graph_may_be_used_twice_and_no_term_of_a_second_derivative_is_lost():
    box, x = ops.Sequential(ops.Linear(4, 4), ops.GELU()), torch.randn(2, 4, requires_grad=True)
    y = box(x)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(y.sum(), x)[0])
    (gradient,) = torch.autograd.grad(box(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentia"):
        gradient.square().sum().backward()


def experts(**arguments):
    return ops.Sequential(ops.GroupedLinear(2, 8, 16, **arguments), ops.SwiGLU(), ops.GroupedLinear(2, 8, 8, **arguments))


def by_loop(box, x, splits):
    first, _, last = (dict(part.named_parameters()) for part in box)
    return product(ops.SwiGLU()(product(x, splits, first)), splits, last)


@pytest.mark.parametrize("splits", [(3, 4), (0, 1), (127, 2)])
def test_13_experts_take_any_number_of_tokens(splits):
    box, x = randomize(experts()), torch.randn(sum(splits), 8)
    torch.testing.assert_close(box(x, torch.tensor(splits), torch.tensor(splits)), by_loop(box, x, splits))


def test_14_weights_of_experts_may_be_frozen():
    box, x, splits = randomize(experts()), torch.randn(5, 8, requires_grad=True), torch.tensor([2, 3])
    for name, param in box.named_parameters():
        param.requires_grad_("bias" in name)
    box(x, splits, splits).square().sum().backward()
    (expected,) = torch.autograd.grad(by_loop(box, x, (2, 3)).square().sum(), x)
    torch.testing.assert_close(x.grad, expected)
    assert box[0].weight0.grad is None and box[0].bias0.grad is not None


@pytest.mark.parametrize("unit", [ops.ScaledSwiGLU, ops.ScaledSReLU])
def test_15_every_number_that_multiplies_a_bias_counts_in_a_fused_mlp(unit):
    wide = 16 if unit is ops.ScaledSwiGLU else 8
    box = randomize(ops.Sequential(ops.GroupedLinear(2, 8, wide, scale_bias=True), unit(), ops.GroupedLinear(2, 8, 8, scale_bias=True)))
    x, splits = torch.randn(7, 8), torch.tensor([3, 4])
    scales = [torch.rand(7, requires_grad=True) for _ in range(3)]  # of the first bias, of the unit, of the last bias: three tensors
    y = box(x, splits, scales[0], scales[1], splits, scales[2])
    y.square().sum().backward()
    assert f"made    grouped_mlp_scaled_{'glu' if unit is ops.ScaledSwiGLU else 'activation'}" in box.explain()
    factors = [scale.detach().requires_grad_() for scale in scales]
    parts = []
    for i, rows in enumerate(x.split([3, 4])):
        first, between, last = (factor.split([3, 4])[i][:, None] for factor in factors)
        z = F.linear(rows, getattr(box[0], f"weight{i}")) + first * getattr(box[0], f"bias{i}")
        h = (F.silu(z[:, :8]) * z[:, 8:] if unit is ops.ScaledSwiGLU else F.relu(z) ** 2) * between
        parts.append(F.linear(h, getattr(box[2], f"weight{i}")) + last * getattr(box[2], f"bias{i}"))
    expected = torch.cat(parts)
    torch.testing.assert_close(y, expected)
    wanted = [*factors, box[0].bias1, box[2].bias0]
    for tensor, gradient in zip([*scales, box[0].bias1, box[2].bias0], torch.autograd.grad(expected.square().sum(), wanted), strict=True):
        torch.testing.assert_close(tensor.grad, gradient, rtol=1e-4, atol=1e-4)


def test_16_another_recipe_of_the_same_kind_counts():
    box, x = ops.Sequential(ops.Linear(64, 64)), torch.randn(32, 64)
    first, second = (tandem.recipe.Float8CurrentScaling(fp8_format=format) for format in (tandem.recipe.Format.HYBRID, tandem.recipe.Format.E4M3))
    gradients = []
    for recipe in (first, second, first):
        x.grad = None
        with tandem.autocast(recipe=recipe):
            (gradient,) = torch.autograd.grad(box(x.requires_grad_()), x, torch.arange(2048.0).reshape(32, 64).sin())
        fresh = copy.deepcopy(box)
        with tandem.autocast(recipe=recipe):
            (expected,) = torch.autograd.grad(fresh(x), x, torch.arange(2048.0).reshape(32, 64).sin())
        assert torch.equal(gradient, expected)
        gradients.append(gradient)
    assert torch.equal(gradients[0], gradients[2]) and not torch.equal(gradients[0], gradients[1])


@pytest.mark.parametrize("make", [lambda: ops.Bias(4), lambda: ops.Linear(4, 4), lambda: ops.LayerNorm(4), lambda: ops.RMSNorm(4), lambda: ops.GroupedLinear(2, 4, 4)])
def test_19_parameters_may_be_reset_again(make):
    module = make()
    before = list(module.parameters())
    module.reset_parameters()
    assert all(param is known and param.requires_grad for param, known in zip(module.parameters(), before, strict=True))


def test_20_hooks_and_parametrizations_of_inner_ops_count():
    box, x, seen = ops.Sequential(ops.Linear(4, 4), ops.GELU()), torch.randn(2, 4), []
    box[0].register_forward_hook(lambda *_: seen.append("linear"))
    box[0].basic_ops[1].register_forward_hook(lambda *_: seen.append("bias"))
    box(x)
    assert seen == ["bias", "linear"]
    box = ops.Sequential(ops.BasicLinear(4, 4), ops.GELU())
    nn.utils.parametrizations.weight_norm(box[0])
    box(x).sum().backward()
    assert all(param.grad is not None for param in box.parameters())


def test_21_nothing_is_left_on_tensors():
    box = ops.Sequential(ops.Linear(4, 4), ops.MakeExtraOutput(), ops.AddExtraInput())
    x, extra = torch.randn(2, 4, requires_grad=True), torch.randn(2, 4)
    outputs = box(x, extra)
    outputs[0].sum().backward()
    assert all(not vars(tensor) for tensor in (x, extra, *outputs, *box.parameters()))


def test_22_an_output_that_nobody_uses_costs_nothing_in_backward():
    box, x = ops.Sequential(ops.ConstantScale(2.0), ops.MakeExtraOutput(), ops.GELU()), torch.randn(64, 64, requires_grad=True)
    y, _ = box(x)
    grad = torch.ones_like(y)
    with torch.profiler.profile() as profile:
        torch.autograd.grad(y, x, grad)
    assert not {"aten::zeros", "aten::zero_", "aten::zeros_like", "aten::add", "aten::add_"} & {event.key for event in profile.key_averages()}


def test_23_an_input_is_quantized_for_backward_alone():
    op, x = ops.GELU(cache_quantized_input=True), torch.randn(64, 64)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context, torch.profiler.profile() as profile:
            op(x)
        assert not [event.key for event in profile.key_averages() if "quantize" in event.key]
    with torch.profiler.profile() as profile:
        op(x.requires_grad_())
    assert [event.key for event in profile.key_averages() if "quantize" in event.key]


def test_24_no_message_has_braces_that_were_meant_to_be_filled():
    texts = [
        (path.name, node.value)
        for path in (ROOT / "python" / "tandem").rglob("*.py")
        for raised in ast.walk(ast.parse(path.read_text()))
        if isinstance(raised, ast.Raise)
        for node in ast.walk(raised)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert len(texts) > 100
    assert [text for text in texts if re.search(r"\{\w+", text[1])] == []


def test_25_surplus_inputs_are_refused_and_a_slice_is_assigned_as_a_whole():
    x = torch.ones(2)
    for box in (ops.Sequential(ops.GELU()), ops.Sequential(ops.GELU(), nn.ReLU()), ops.Sequential(nn.ReLU()), ops.Sequential()):
        with pytest.raises(ValueError, match="expected 0 extra inputs, .* got 1"):
            box(x, x)
    box = ops.Sequential(*[ops.ConstantScale(float(n)) for n in range(1, 6)])
    box[1:3] = [ops.ConstantScale(10.0), ops.ConstantScale(10.0)]
    assert [op.scale for op in box] == [1, 10, 10, 4, 5]
    box[::2] = [ops.Identity() for _ in range(3)]
    assert torch.equal(box(x), 40 * x)


class Short(ops.FusedOperation):
    """Two biases, of which backward forgets one."""

    def fuser_forward(self, basic_op_ctxs, input_, **_):
        return input_ + self.basic_ops[0].bias + self.basic_ops[1].bias, [(), ()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **_):
        return grad_output, [(grad_output.sum(0),)], [(), ()]


def test_26_gradients_that_are_missing_are_told():
    def fuse(ops_, **_):
        return [Short(ops_)]

    box = ops.Sequential(ops.Bias(4), ops.Bias(4))
    with ops.register_forward_backward_fusion(fuse):
        y = box(torch.randn(2, 4))
        with pytest.raises(RuntimeError, match="expected 2 groups of parameter gradients, got 1"):
            y.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_27_everything_may_be_dropped(dtype):
    x = torch.randn(3, 5, dtype=dtype, requires_grad=True)
    y = ops.Dropout(1.0)(x)
    y.sum().backward()
    assert torch.equal(y, torch.zeros_like(x)) and torch.equal(x.grad, torch.zeros_like(x))


def test_28_no_variable_of_the_environment_counts(monkeypatch):
    x = torch.randn(2, 4)
    expected = ops.LayerNorm(4, sm_margin={"forward": 8})(x)
    for name in ("FWD", "BWD", "INF"):
        monkeypatch.setenv(f"NVTE_{name}_LAYERNORM_SM_MARGIN", "not a number")
    assert torch.equal(ops.LayerNorm(4, sm_margin=8)(x), expected)
    sources = "".join(path.read_text() for path in (ROOT / "python" / "tandem").rglob("*.py"))
    assert "os.environ" not in sources and "getenv" not in sources


def test_29_biases_of_experts_have_gradients_in_deterministic_mode():
    box, x, splits = randomize(experts()), torch.randn(5, 8), torch.tensor([2, 3])
    torch.use_deterministic_algorithms(True)
    try:
        gradients = [torch.autograd.grad(box(x, splits, splits).square().sum(), list(box.parameters())) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("skipped", ["first", "last"])
def test_30_scales_do_not_depend_on_whose_backward_runs(skipped):
    torch.manual_seed(1)
    first, last = ops.Linear(32, 32), ops.Linear(32, 32)
    alone = copy.deepcopy(last if skipped == "first" else first)
    recipe = tandem.recipe.DelayedScaling(amax_history_len=4)
    for step in range(3):
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step)) * (step + 1)
        with tandem.autocast(recipe=recipe):
            outputs = first(x), last(x)
        y = outputs[skipped == "first"]
        y.square().sum().backward()
        with tandem.autocast(recipe=recipe):
            expected = alone(x)
        expected.square().sum().backward()
        used = last if skipped == "first" else first
        assert torch.equal(y, expected) and torch.equal(used.weight.grad, alone.weight.grad)


def test_31_codes_of_a_weight_are_made_once_while_it_stays():
    box, x = ops.Sequential(ops.Linear(256, 256)), torch.randn(4, 256)

    def called():
        with tandem.autocast(recipe=tandem.recipe.Float8CurrentScaling()):
            box(x)
        return box.explain()

    called()
    unchanged = called()
    with torch.no_grad():
        box[0].weight.add_(1)
    changed = called()
    assert "0.basic_linear.weight in fp8_e4m3:current:eps=0:pow2=0: found in forward" in unchanged
    assert "0.basic_linear.weight in fp8_e4m3:current:eps=0:pow2=0: made in forward (its version changed)" in changed


def test_32_a_module_that_is_converted_is_planned_again():
    box = ops.Sequential(ops.RMSNorm(8), ops.Linear(8, 8), ops.GELU()).bfloat16()
    box(torch.randn(2, 8).bfloat16())
    x = torch.randn(2, 8)
    converted = box.float()
    fresh = ops.Sequential(ops.RMSNorm(8), ops.Linear(8, 8), ops.GELU())
    fresh.load_state_dict(converted.state_dict())
    assert converted(x).dtype == torch.float32 and torch.equal(converted(x), fresh(x))
    mixed = ops.Sequential(ops.BasicLinear(8, 8), ops.Bias(8))
    mixed(x)
    mixed[1].double()
    assert mixed(x).dtype == torch.float64
