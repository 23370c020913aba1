"""`tandem.inspect`: what is measured, under which names, and that watching changes no number."""

import contextlib
import copy
import math
import warnings

import pytest
import torch
from support import assert_equal, llama_mlp, randomize

import tandem
from tandem import ops

RECIPES = [
    tandem.recipe.Float8CurrentScaling(),
    tandem.recipe.DelayedScaling(),
    tandem.recipe.MXFP8BlockScaling(),
    tandem.recipe.Float8BlockScaling(),
    tandem.recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
]


def block():
    torch.manual_seed(0)
    return randomize(llama_mlp(64, 64))


def step(model, x, recipe):
    x = x.detach().requires_grad_()
    with tandem.autocast(recipe=recipe):
        y = model(x)
    y.sum().backward()
    grads = [param.grad for param in model.parameters()]
    model.zero_grad()
    return [y.detach(), x.grad, *grads]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_watching_changes_no_number(recipe):
    x = torch.randn(32, 64)
    plain, watched = block(), block()
    for _ in range(2):
        expected = step(plain, x, recipe)
        with tandem.inspect(watched) as seen:
            actual = step(watched, x, recipe)
        assert_equal(actual, expected)
        assert {(row.name, row.role) for row in seen.rows} == {(name, role) for name in "13" for role in ("input", "weight", "grad_output")}
    assert_equal(step(watched, x, recipe), step(plain, x, recipe))


def test_rows_are_those_of_the_tensors():
    model, x = tandem.ops.Sequential(ops.Linear(32, 32, bias=False)), torch.randn(16, 32)
    with tandem.inspect(model) as seen:
        for _ in range(3):
            step(model, x, tandem.recipe.Float8CurrentScaling())
    rows = seen.rows
    assert [row.step for row in rows] == [0] * 3 + [1] * 3 + [2] * 3
    assert sorted({row.role for row in rows}) == ["grad_output", "input", "weight"]
    by_role = {row.role: row for row in rows}
    row = by_role["input"]
    assert row.amax == x.abs().max().item() and row.quantizer.startswith("fp8_e4m3") and row.not_finite == 0
    assert row.least_scale == row.largest_scale == pytest.approx(row.amax / 448, rel=1e-6)
    assert row.signal_to_noise == pytest.approx(noise(x, tandem.Float8CurrentScalingQuantizer(torch.float8_e4m3fn)), rel=1e-6)
    assert by_role["weight"].amax == model[0].weight.abs().max().item()
    assert by_role["grad_output"].amax == 1 and by_role["grad_output"].quantizer.startswith("fp8_e5m2")


def test_saturation_is_told_of_once():
    model = tandem.ops.Sequential(ops.Linear(32, 32))
    recipe = tandem.recipe.DelayedScaling(amax_history_len=4)
    step(model, torch.randn(8, 32), recipe)
    step(model, torch.randn(8, 32), recipe)
    with pytest.warns(UserWarning, match=r"tandem: expected input of 0 in the range of fp8_e4m3.*, got .*% of its numbers beyond the format's range in") as told:
        with tandem.inspect(model) as seen:
            for _ in range(2):
                step(model, 100 * torch.randn(8, 32), recipe)
    assert len([warning for warning in told if "expected input of 0" in str(warning.message)]) == 1
    assert any(row.saturation > 0.5 for row in seen.rows if row.role == "input")
    with pytest.warns(UserWarning, match="tandem: expected input of 0 in the range of fp8_e4m3.*, got 1 numbers that are not finite in step 0"):
        with tandem.inspect(model):
            step(model, torch.full((1, 32), 1.0).index_fill(1, torch.tensor([3]), math.nan), tandem.recipe.Float8CurrentScaling())


def test_names_of_products_in_one_module():
    model = torch.nn.ModuleDict({"mlp": tandem.LayerNormMLP(32, 64)})
    with tandem.inspect(model) as seen:
        step(model["mlp"], torch.randn(16, 32), tandem.recipe.MXFP8BlockScaling())
    assert {row.name for row in seen.rows} == {"mlp, product 0", "mlp, product 1"}
    with tandem.inspect() as nameless:
        step(model["mlp"], torch.randn(16, 32), tandem.recipe.MXFP8BlockScaling())
    assert {row.name for row in nameless.rows} == {"LayerNormMLP, product 0", "LayerNormMLP, product 1"}


def test_table_and_picture():
    model = block()
    with tandem.inspect(model, warn=False) as seen:
        for _ in range(3):
            step(model, torch.randn(16, 64), tandem.recipe.Float8CurrentScaling())
    lines = str(seen).splitlines()
    assert len(lines) == 7 and lines[0].split()[0] == "tensor" and "1: input" in lines[1] and " 3 " in lines[1]
    picture = seen.svg()
    assert picture.startswith("<svg") and picture.count("<polyline") == 6 and picture.count("<circle") == 18 and seen._repr_svg_() == picture


def test_where_nobody_watches_nothing_is_kept():
    model = block()
    step(model, torch.randn(16, 64), tandem.recipe.Float8CurrentScaling())
    with tandem.inspect(model) as seen:
        pass
    assert seen.rows == []
    with seen, pytest.raises(RuntimeError, match="inspect: expected an inspection that is not open, got one that is. Leave it first, or make another."):
        seen.__enter__()


def test_a_block_whose_scale_is_zero_does_not_saturate():
    x = torch.full((4, 32), 1e6)
    x[:, 16:] = 1e-3
    linear = tandem.Linear(32, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tandem.inspect(linear) as seen:
            step(linear, x, tandem.recipe.NVFP4BlockScaling())
    row = next(row for row in seen.rows if row.role == "input")
    assert row.underflow == 0.5 and row.saturation == 0


def noise(x, quantizer):
    """Signal to noise in dB, in float64."""
    wide, codes = x.double(), tandem.quantize(x, quantizer).dequantize().double()
    return 10 * math.log10((wide.square().sum() / (wide - codes).square().sum()).item())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("recipe", RECIPES[:4], ids=lambda recipe: type(recipe).__name__)
def test_each_group_is_measured(recipe, packed):
    counts, experts = [5, 0, 9], randomize(ops.GroupedLinear(3, 64, 32, single_grouped_weight=packed))
    plain = copy.deepcopy(experts)
    x, grad = torch.randn(16, 64) * torch.logspace(-3, 3, 16)[:, None], torch.randn(16, 32)

    def run(module):
        leaf = x.clone().requires_grad_()
        with tandem.autocast(recipe=recipe):
            y = module(leaf, torch.tensor(counts))
        return [y.detach(), *torch.autograd.grad(y, [leaf, *module.parameters()], grad)]

    with tandem.inspect(torch.nn.ModuleDict({"experts": experts}), warn=False) as seen:
        actual = run(experts)
        explained = tandem.explain(experts)
    assert ("where it is multiplied" in explained) == packed, "explain: codes of single weights are made once, by the step ahead of the product"
    assert_equal(actual, run(plain))
    rows = {(row.name, row.role): row for row in seen.rows}
    assert len(rows) == len(seen.rows) and {row.step for row in seen.rows} == {0}
    weights = experts.weight.unbind(0) if packed else [getattr(experts, f"weight{g}") for g in range(3)]
    wanted = {}
    for g, (own, of_y) in enumerate(zip(x.split([*counts, 2])[:3], grad.split([*counts, 2])[:3], strict=True)):
        wanted[f"experts, group {g}", "weight"] = weights[g].detach()
        if counts[g]:
            wanted |= {(f"experts, group {g}", "input"): own, (f"experts, group {g}", "grad_output"): of_y}
    assert rows.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert rows[key].amax == tensor.double().abs().max().item(), key
        if isinstance(recipe, (tandem.recipe.Float8CurrentScaling, tandem.recipe.MXFP8BlockScaling)):
            dtype = torch.float8_e5m2 if "e5m2" in rows[key].quantizer else torch.float8_e4m3fn
            quantizer = tandem.MXFP8Quantizer(dtype) if recipe.mxfp8() else tandem.Float8CurrentScalingQuantizer(dtype)
            assert rows[key].signal_to_noise == pytest.approx(noise(tensor, quantizer), rel=1e-6), key
    table = seen.table().splitlines()
    assert len(table) == 1 + len(wanted) and any(line.startswith("experts, group 2: grad_output") for line in table)


@pytest.mark.parametrize("budget", [None, 300.0])
def test_experts_that_are_one_fusion_are_measured_in_parts(budget):
    model = randomize(ops.Sequential(ops.GroupedLinear(2, 64, 64, bias=False), ops.SwiGLU(), ops.GroupedLinear(2, 32, 64, bias=False)))
    x, splits = torch.randn(9, 64, requires_grad=True), torch.tensor([4, 5])

    def run():
        with tandem.autocast(recipe=tandem.recipe.NVFP4BlockScaling(disable_stochastic_rounding=True)):
            y = model(x, splits, splits)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]

    expected = run()
    assert "made    grouped_mlp_glu" in model.explain()
    with tandem.inspect(model) as seen, tandem.memory_budget(budget) if budget else contextlib.nullcontext():
        actual = run()  # within a budget forward's steps run again, which have told already
    assert_equal(actual, expected)
    assert len(seen.rows) == 12
    names = {(f"{place}, group {g}", role) for place in "02" for g in range(2) for role in ("input", "weight", "grad_output")}
    assert {(row.name, row.role) for row in seen.rows} == names


def test_an_empty_table_says_why() -> None:
    linear = tandem.Linear(32, 32)
    with tandem.inspect(linear) as seen:
        linear(torch.randn(4, 32))
    assert "nothing was measured" in seen.table() and "torch.compile has compiled are not measured" in seen.table()
