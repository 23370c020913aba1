"""Memory budgets: what is kept fits, and no number depends on it."""

import json
import pickle
import random
import re

import pytest
import torch
from python_ops import op_of
from support import bytes_kept, fork, join, llama_mlp, randomize

import tandem
import tandem.ops as ops

ACTIVATIONS = [ops.GELU, ops.SiLU, ops.ReLU, ops.QGELU, ops.SReLU]
UNITS = [ops.SwiGLU, ops.GEGLU, ops.ReGLU]
CONSTANT = 64  # bytes of each op that do not grow with rows: seeds, scales of tensors


def generated(seed, width=32, most=12):
    """A pipeline of 2 to `most` ops."""
    draw = random.Random(seed)
    modules, open_channels, here = [], [], width
    of_one_width = {
        "norm": lambda: draw.choice([ops.RMSNorm, ops.LayerNorm])(here),
        "activation": lambda: draw.choice(ACTIVATIONS)(),
        "dropout": lambda: ops.Dropout(0.25),
        "scale": lambda: ops.ConstantScale(1.5),
        "bias": lambda: ops.Bias(here),
        "l2": ops.L2Normalization,
    }
    for _ in range(draw.randint(2, most)):
        kind = draw.choice(["linear", "linear", "norm", "activation", "unit", "dropout", "scale", "bias", "fork", "join", "l2"])
        if kind in of_one_width:
            modules.append(of_one_width[kind]())
        elif kind == "linear":
            wide = draw.choice([32, 64, 96])
            modules.append(ops.Linear(here, wide, bias=draw.random() < 0.6))
            here = wide
        elif kind == "unit" and here % 64 == 0:
            modules.append(draw.choice(UNITS)())
            here //= 2
        elif kind == "fork":
            open_channels.append((here, f"c{len(modules)}"))
            modules.append(fork(f"c{len(modules)}"))
        elif kind == "join" and any(known == here for known, _ in open_channels):
            channel = next(pair for pair in open_channels if pair[0] == here)
            open_channels.remove(channel)
            modules.append(join(channel[1]))
    for known, name in open_channels:  # each is read
        if known != here:
            modules.append(ops.Linear(here, known, bias=False))
            here = known
        modules.append(join(name))
    return randomize(ops.Sequential(*modules or [ops.GELU()]))


def results(box, x, seed=0):
    torch.manual_seed(seed)
    y = box(x)
    torch.manual_seed(seed + 1)
    wanted = [tensor for tensor in (x, *box.parameters()) if tensor.requires_grad]
    if not y.requires_grad:
        return [y]
    return [y.detach(), *torch.autograd.grad(y, wanted, torch.randn_like(y), allow_unused=True)]


def same(got, expected):
    return all((a is None and b is None) or torch.equal(a.nan_to_num(1e3), b.nan_to_num(1e3)) for a, b in zip(got, expected, strict=True))


def check(box, x, budgets=(1e9, 0.7, 0.4, 0.1, 0.0), constant=CONSTANT):
    """Every budget, as a share of what is kept without one: the same bits, within it."""
    rows = x.numel() // x.shape[-1]
    expected = results(box, x)
    whole = box.saved_bytes()
    cost = -1.0
    for share in budgets:
        budget = share * whole / rows if share <= 1 else share
        try:
            with tandem.memory_budget(budget):
                got = results(box, x)
        except ValueError as error:
            least = float(re.search(r"expected at least ([0-9.e+]+) bytes per row", str(error)).group(1))
            assert least > budget
            budget = least
            with tandem.memory_budget(budget):
                got = results(box, x)
        assert same(got, expected), (share, budget, [g is not None and e is not None and not torch.equal(g, e) for g, e in zip(got, expected)])
        assert box.saved_bytes() <= budget * rows + constant * len(box), (share, box.saved_bytes(), budget * rows)
        plan = json.loads(box.explain("json"))["plans"][-1]
        if "memory_budget" in plan:
            within = plan["memory_budget"]
            assert within["kept_bytes_per_row"] <= within["bytes_per_row"] == budget
            now = sum(choice["added_bytes"] + choice["added_operations"] / 16 for choice in within["choices"])
            assert now >= cost - 1e-6, "less memory costs no less"
            cost = now
    return box


@pytest.mark.parametrize("seed", range(60))
def test_random_pipelines_give_the_same_bits_within_every_budget(seed):
    torch.manual_seed(seed)
    dtype = [torch.float32, torch.bfloat16][seed % 2]
    box = generated(seed).to(dtype)
    check(box, torch.randn(12, 32, dtype=dtype, requires_grad=seed % 3 != 0))


RECIPES = [tandem.recipe.Float8CurrentScaling(), tandem.recipe.MXFP8BlockScaling(), tandem.recipe.DelayedScaling()]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
@pytest.mark.parametrize("seed", range(6))
def test_random_pipelines_under_a_recipe(recipe, seed):
    torch.manual_seed(seed)
    box, x = generated(100 + seed), torch.randn(64, 32, requires_grad=True)
    if isinstance(recipe, tandem.recipe.DelayedScaling):  # whose scales change from step to step
        with tandem.autocast(recipe=recipe):
            box(x).sum().backward()
        state = {name: tensor.clone() for name, tensor in box.state_dict().items()}
        expected = None
        for budget in (None, 1e9, 200.0, 0.0):
            box.load_state_dict(state)
            with tandem.autocast(recipe=recipe), tandem.memory_budget(budget):
                got = results(box, x)
            expected = got if expected is None else expected
            assert same(got, expected), budget
        return
    with tandem.autocast(recipe=recipe):
        check(box, x)


@pytest.mark.parametrize("seed", range(8))
def test_verify_holds_under_a_budget(seed):
    torch.manual_seed(seed)
    box, x = generated(200 + seed), torch.randn(8, 32, requires_grad=True)
    with tandem.memory_budget(64):
        outcome = box.verify(x)
    assert outcome, outcome.text


def test_the_trade_of_each_choice_is_told():
    torch.manual_seed(0)
    box = ops.Sequential(*llama_mlp(16, 32))
    x = torch.randn(4, 16, requires_grad=True)
    check(box, x, (1e9, 0.5, 0.0))
    text = box.explain()
    assert "  memory budget: 1e+09 bytes per row, " in text and "  memory budget: 0 bytes per row, 0 kept" in text
    assert re.search(r"run again \S+ \(Float\) by \S+: saves \d+ bytes, moves \d+ bytes more, adds \d+ operations", text), text
    assert re.search(r"kept \S+ \(Float\), \d+ bytes", text)
    assert "[run again]" in text


def test_the_choice_is_the_cheapest():
    """x [rows, 16] -> gelu: y [rows, 16] -> linear to 64 -> gelu. By hand, in bytes per row of float32."""
    box, x = ops.Sequential(ops.GELU(), ops.Linear(16, 64, bias=False), ops.GELU(), ops.Linear(64, 8, bias=False)), torch.randn(4, 16, requires_grad=True)

    def choices(budget):
        with tandem.memory_budget(budget):
            box(x)
        within = json.loads(box.explain("json"))["plans"][-1]["memory_budget"]
        return {choice["value"]: (choice["choice"], choice["added_bytes"]) for choice in within["choices"]}

    first, z, second = "0.gelu.y", "1.basic_linear.y", "2.gelu.y"
    assert choices(64 + 256 + 256) == {first: ("kept", 0), z: ("kept", 0), second: ("kept", 0)}
    assert choices(64 + 256) == {first: ("kept", 0), z: ("kept", 0), second: ("written again", 256)}
    assert choices(256) == {first: ("written again", 64), z: ("kept", 0), second: ("written again", 256)}
    # z from the first gelu's y, which is there: 64 read, 256 written, and 2 * 16 * 64 operations.
    assert choices(64) == {first: ("kept", 0), z: ("run again", 64 + 256), second: ("written again", 256)}
    # No step of backward comes early enough to write the first y for it: 64 read, 64 written.
    assert choices(0) == {first: ("run again", 64 + 64), z: ("run again", 64 + 256), second: ("written again", 256)}


def test_many_free_values_are_chosen_greedily():
    modules = [m for _ in range(14) for m in (ops.Linear(16, 16), ops.GELU(), ops.RMSNorm(16))]
    torch.manual_seed(0)
    check(randomize(ops.Sequential(*modules)), torch.randn(4, 16, requires_grad=True))


def test_equal_values_are_searched_in_time():
    torch.manual_seed(0)
    modules = [m for _ in range(8) for m in (ops.Linear(16, 16, bias=False), ops.GELU())]
    check(randomize(ops.Sequential(*modules)), torch.randn(4, 16, requires_grad=True), (0.5,))


def test_a_plan_depends_on_no_number_of_rows():
    box = ops.Sequential(*llama_mlp(16, 32), memory_budget=100)
    box(torch.randn(4, 16, requires_grad=True))
    before = tandem._C.plans_made()
    for rows in (1, 5, 33):
        box(torch.randn(rows, 16, requires_grad=True))
    assert tandem._C.plans_made() == before


@pytest.mark.parametrize("sizes", [(0, 24), (2, 0, 24), (0, 2, 24), (2, 0, 3, 24)])
def test_an_empty_batch(sizes):
    box = tandem.ops.Sequential(tandem.ops.Linear(24, 48), tandem.ops.GELU(), tandem.ops.Linear(48, 33))
    x = torch.randn(sizes, requires_grad=True)
    with tandem.memory_budget(400):
        y = box(x)
    y.sum().backward()
    assert y.shape == (*sizes[:-1], 33) and torch.equal(x.grad, torch.zeros(sizes)) and not box[0].weight.grad.any()


def test_a_reshape_makes_rows_count():
    box = ops.Sequential(ops.Linear(8, 8), ops.Reshape((4, 16)), ops.GELU(), ops.Linear(16, 8))
    torch.manual_seed(0)
    check(box, torch.randn(8, 8, requires_grad=True))


def test_a_seed_is_no_bytes_of_a_row():
    box = ops.Sequential(ops.Reshape((-1, 16)), ops.Dropout(0.5))
    with tandem.memory_budget(0):
        box(torch.randn(17, 16, requires_grad=True)).sum().backward()
    assert box.saved_bytes() <= CONSTANT


@pytest.mark.parametrize(
    ("unit", "recipe", "shares"),
    [(ops.ScaledSwiGLU, None, (2.0, 0.5, 0.25, 0.0)), (ops.SwiGLU, None, (0.5,)), (ops.SwiGLU, tandem.recipe.MXFP8BlockScaling(), (0.5,))],
)
def test_experts(unit, recipe, shares):
    box = randomize(ops.Sequential(ops.GroupedLinear(4, 64, 128), unit(), ops.GroupedLinear(4, 64, 64)))
    x, splits = torch.randn(64, 64, requires_grad=True), torch.tensor([16, 0, 32, 16])
    scales = [torch.rand(64, requires_grad=True)] if unit is ops.ScaledSwiGLU else []

    def run():
        y = box(x, splits, *scales, splits)
        return [y.detach(), *torch.autograd.grad(y.pow(2).sum(), [x, *scales, *box.parameters()])]

    with tandem.autocast(enabled=recipe is not None, recipe=recipe):
        expected = run()
        whole = box.saved_bytes()
        for share in shares:
            with tandem.memory_budget(share * whole / 64):
                assert same(run(), expected)
            assert box.saved_bytes() <= share * whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("between", [0, 1, 2])
@pytest.mark.parametrize("low", [None, tandem.recipe.MXFP8BlockScaling(backward_override="dequantized"), tandem.recipe.Float8CurrentScaling(backward_override="dequantized")], ids=["plain", "mxfp8", "current"])
def test_what_fuses_does_not_depend_on_what_is_kept(dtype, between, low):
    """Backward writes the norm's y again behind the product that a scale might fuse with, and what products in between make of it; a budget leaves them
    kept."""
    torch.manual_seed(0)
    products = [ops.Linear(32, 32, bias=False, dtype=dtype) for _ in range(between)]
    box = ops.Sequential(ops.LayerNorm(32, dtype=dtype), *products, ops.Linear(32, 64, bias=False, dtype=dtype), ops.ConstantScale(0.3))
    x, grad = torch.randn(32, 32, dtype=dtype).requires_grad_(), torch.randn(32, 64, dtype=dtype)
    found = []
    for budget in (None, 1e6, 100, 0):
        box.memory_budget = budget
        with tandem.autocast(enabled=low is not None, recipe=low):
            y = box(x)
        found.append(torch.autograd.grad(y, [x, *box.parameters()], grad))
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


def test_rows_and_features_of_one_number():
    box, x, extra = ops.Sequential(ops.GELU(), ops.AddExtraInput(), ops.GELU()), torch.randn(8, 8, requires_grad=True), torch.randn(8, 8)
    expected = torch.autograd.grad(box(x, extra).sum(), x)
    with tandem.memory_budget(0):
        assert same(torch.autograd.grad(box(x, extra).sum(), x), expected)
    assert box.saved_bytes() == 0


def test_one_of_two_extra_inputs_of_that_number_is_rows():
    box = ops.Sequential(ops.ScaledSwiGLU(), ops.SwiGLU(), ops.AddExtraInput())
    x, scales, features = torch.randn(4, 16, requires_grad=True), torch.rand(4), torch.randn(4)
    expected = torch.autograd.grad(box(x, scales, features).sum(), x)
    with tandem.memory_budget(1e6):
        assert same(torch.autograd.grad(box(x, scales, features).sum(), x), expected)


@pytest.mark.parametrize("calls", ["direct", "stepped", "compiled"])
def test_a_sum_that_broadcasts_the_extra_input_is_computed_again(calls):
    wide = torch.randn(4, 5)
    extra = (wide.as_strided((1, 5), (0, 1)) if calls == "stepped" else wide[:1]).requires_grad_()
    pipeline = ops.Sequential(ops.AddExtraInput(), ops.Linear(5, 12), ops.LayerNorm(12), memory_budget=0)
    call = torch.compile(pipeline, backend="aot_eager") if calls == "compiled" else pipeline
    x = torch.randn(3, 5, requires_grad=True)
    gradients = torch.autograd.grad(call(x, extra).square().sum(), [x, extra])
    want = torch.autograd.grad(pipeline[2](pipeline[1](x + extra)).square().sum(), [x, extra])
    torch.testing.assert_close(gradients, want)


def test_casts_of_parameters_are_no_bytes_of_an_x_without_rows():
    pipeline = ops.Sequential(ops.LayerNorm(29), ops.GroupedLinear(2, 29, 2), memory_budget=64)
    x = torch.randn(29, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        pipeline(x, torch.tensor([1, 0])).sum().backward()
        assert "memory budget: 64 bytes per row" in pipeline.explain()


def test_regions_nest_and_a_container_has_its_own():
    x = torch.randn(4, 16, requires_grad=True)
    box, own = (ops.Sequential(*llama_mlp(16, 32)) for _ in range(2))
    own.memory_budget = 0
    box(x)
    whole = box.saved_bytes()
    with tandem.memory_budget(1e6):
        box(x), own(x)
        everything = box.saved_bytes()
        assert everything > whole and own.saved_bytes() == 0
        with tandem.memory_budget(0):
            box(x)
            assert box.saved_bytes() == 0
            with tandem.memory_budget(None):
                box(x)
                assert box.saved_bytes() == whole
            with tandem.autocast():
                box(x)
                assert box.saved_bytes() < whole
        box(x)
        assert box.saved_bytes() == everything
    box(x)
    assert box.saved_bytes() == whole
    copy = pickle.loads(pickle.dumps(own))
    assert copy.memory_budget == 0.0 and box.memory_budget is None
    copy(x)
    assert copy.saved_bytes() == 0
    own.memory_budget = None
    own(x)
    assert own.saved_bytes() == whole


def test_single_ops_and_modules_are_pipelines_too():
    x = torch.randn(4, 16, requires_grad=True)
    module = tandem.LayerNormMLP(16, 32, activation="swiglu")
    expected = results(module, x)
    with tandem.memory_budget(0):
        assert same(results(module, x), expected)


def test_checkpoint_recomputes_within_the_budget():
    x = torch.randn(4, 16, requires_grad=True)
    box = ops.Sequential(*llama_mlp(16, 32))
    with tandem.memory_budget(0):
        y = tandem.checkpoint(box, x)
    y.sum().backward()
    assert box.saved_bytes() == 0


def test_what_cannot_run_again_is_the_minimum():
    doubles = op_of(lambda x: x * 2, lambda grad: grad * 2)()
    box, x = ops.Sequential(ops.Linear(8, 16), doubles, ops.Linear(16, 4)), torch.randn(4, 8, requires_grad=True)
    expected = results(box, x)
    with pytest.raises(ValueError) as error, tandem.memory_budget(63.5):
        box(x)
    assert str(error.value).startswith(
        "memory_budget: expected at least 64 bytes per row of the main input, the minimum of this pipeline, got 63.5. Raise the budget"
    )
    with tandem.memory_budget(64):
        assert same(results(box, x), expected)


@pytest.mark.parametrize(
    ("budget", "kind", "text"),
    [
        (-1, ValueError, "memory_budget: expected a finite number of bytes per row that is not negative, got -1.0"),
        (float("nan"), ValueError, "memory_budget: expected a finite number"),
        (float("inf"), ValueError, "got inf. Leave the budget out"),
        ("4k", TypeError, "memory_budget: expected a number of bytes per row or None, got str"),
        (True, TypeError, "got bool"),
    ],
)
def test_wrong_budgets(budget, kind, text):
    for make in (tandem.memory_budget, lambda value: ops.Sequential(memory_budget=value)):
        with pytest.raises(kind) as error:
            make(budget)
        assert text in str(error.value)


def test_a_region_is_left_where_it_was_entered():
    region, inner = tandem.memory_budget(1), tandem.memory_budget(2)
    with pytest.raises(RuntimeError, match="memory_budget: expected a region that was entered in this thread and async context"):
        region.__exit__(None, None, None)
    region.__enter__()
    inner.__enter__()
    with pytest.raises(RuntimeError, match="memory_budget: expected the innermost region to be left first"):
        region.__exit__(None, None, None)
    inner.__exit__(None, None, None)


def test_compiled_code_keeps_to_the_budget():
    torch.manual_seed(0)
    box, x = randomize(ops.Sequential(*llama_mlp(16, 32))), torch.randn(64, 16, requires_grad=True)
    expected = results(box, x)
    sizes = {}
    for name, budget in (("none", None), ("least", 0)):

        def call(x, budget=budget):
            with tandem.memory_budget(budget):
                return box(x)

        compiled = torch.compile(call, fullgraph=True, backend="aot_eager_decomp_partition")
        y, sizes[name] = bytes_kept(lambda: compiled(x), x, *box.parameters())  # noqa: B023
        torch.manual_seed(1)
        gradients = torch.autograd.grad(y, [x, *box.parameters()], torch.randn_like(y))
        torch.testing.assert_close([y, *gradients], expected)
    assert sizes["least"] < 0.2 * sizes["none"], sizes


def test_compiled_code_under_a_recipe_and_a_budget():
    torch.manual_seed(0)
    torch._dynamo.reset()
    box, x = randomize(ops.Sequential(*llama_mlp(32, 64))), torch.randn(64, 32, requires_grad=True)
    compiled = torch.compile(box, fullgraph=True, backend="aot_eager")
    with tandem.autocast(recipe=tandem.recipe.MXFP8BlockScaling()):
        expected = results(box, x)
        with tandem.memory_budget(0):
            torch.testing.assert_close(results(compiled, x), expected)


def test_compiled_code_is_guarded_by_the_budget_in_force():
    box = ops.Sequential(*llama_mlp(16, 32))
    torch._dynamo.reset()
    compiled = torch.compile(box, fullgraph=True, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    for budget in (None, 0, 0, 10):
        with tandem.memory_budget(budget):
            for rows in (8, 24):
                compiled(torch.randn(rows, 16, requires_grad=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 6


BLOCKS = [tandem.recipe.Float8BlockScaling(), tandem.recipe.NVFP4BlockScaling(disable_stochastic_rounding=True)]


@pytest.mark.parametrize("recipe", [None, *RECIPES[:2], *BLOCKS], ids=lambda recipe: type(recipe).__name__)
def test_a_weight_of_several_parts(recipe):
    parts = randomize(ops.Linear(64, 128, parameters_split=("gate", "up")))
    box = ops.Sequential(ops.RMSNorm(64), parts, ops.SwiGLU(), ops.Linear(64, 64))
    codes = 2 * parts.weight.numel() * 9 / 8  # of both directions, with scales, in no workspace
    with tandem.autocast(enabled=recipe is not None, recipe=recipe):
        check(box, torch.randn(128, 64, requires_grad=True), constant=CONSTANT + codes / len(box))


@pytest.mark.parametrize("recipe", [None, tandem.recipe.MXFP8BlockScaling()])
def test_a_weight_of_several_parts_without_gradients(recipe):
    box = ops.Sequential(ops.Linear(32, 64, bias=False, parameters_split=("gate", "up")), ops.SwiGLU(), ops.Linear(32, 32, bias=False))
    x = torch.randn(32, 32)
    with torch.no_grad(), tandem.autocast(enabled=recipe is not None, recipe=recipe):
        expected = box(x)
        with tandem.memory_budget(0):
            assert torch.equal(box(x), expected)
            assert torch.equal(torch.compile(box, fullgraph=True, backend="aot_eager")(x), expected)


def test_codes_with_padding():
    """Packed codes tell of the sizes of their numbers wherever they are made again."""
    box = randomize(ops.Sequential(ops.LayerNorm(49), ops.Linear(49, 71), ops.GELU(), ops.Linear(71, 49)))
    with tandem.autocast(recipe=BLOCKS[1]):
        check(box, torch.randn(128, 49, requires_grad=True))
        x = torch.randn(37, 49, requires_grad=True)
        expected = results(box, x)
        for budget in (100.0, 20.0):
            with tandem.memory_budget(budget):
                assert same(results(box, x), expected)


def test_seeds_of_codes_are_kept():
    """Codes that are rounded by chance and made again are the same."""
    box, x = randomize(ops.Sequential(ops.GELU(), ops.Linear(32, 32), ops.GELU(), ops.Linear(32, 32))), torch.randn(128, 32, requires_grad=True)
    with tandem.autocast(recipe=tandem.recipe.NVFP4BlockScaling()):
        check(box, x)


@pytest.mark.parametrize("recipe", [RECIPES[0], BLOCKS[1]], ids=lambda recipe: type(recipe).__name__)
def test_what_runs_again_is_measured_once(recipe):
    box, x = randomize(ops.Sequential(ops.RMSNorm(64), ops.Linear(64, 64), ops.GELU(), ops.Linear(64, 64))), torch.randn(32, 64)
    seen = []
    for budget in (None, 0.0):
        with tandem.inspect(box) as watched, tandem.autocast(recipe=recipe), tandem.memory_budget(budget):
            numbers = results(box, x.requires_grad_())
        seen.append(([(row.step, row.name, row.role, row.amax) for row in watched.rows], numbers))
    assert seen[0][0] and sorted(seen[0][0]) == sorted(seen[1][0])
    assert same(seen[0][1], seen[1][1])


def test_gradients_of_weights_that_come_later():
    delayed = ops.GroupedLinear(2, 32, 32, delay_wgrad_compute=True)
    box, x = randomize(ops.Sequential(ops.GELU(), delayed, ops.GELU())), torch.randn(16, 32, requires_grad=True)
    found = []
    for budget in (None, 0.0):
        with tandem.memory_budget(budget):
            box(x, torch.tensor([6, 10])).square().sum().backward()
        box[1].backward_dw()
        found.append([x.grad, *(param.grad for param in box.parameters())])
        x.grad = None
        box.zero_grad()
    assert same(*found)


def test_a_sum_into_the_callers_tensor_behind_a_product_fits_a_budget():
    ops = tandem.ops
    box = ops.Sequential(ops.Linear(16, 16), ops.GELU(), ops.BasicLinear(16, 16), ops.AddExtraInput(in_place=True), memory_budget=4096)
    x, extra = torch.randn(8, 16, requires_grad=True), torch.randn(8, 16)
    free = ops.Sequential(*box)
    expected = free(x, extra.clone())
    expected.sum().backward()
    gradient, x.grad = x.grad, None
    y = box(x, extra.clone())
    y.sum().backward()
    assert torch.equal(y, expected) and torch.equal(x.grad, gradient)


def test_a_lazily_negated_gradient_changes_no_bit():
    torch.manual_seed(0)
    pipeline = ops.Sequential(ops.Linear(3, 24, dtype=torch.float64), ops.Linear(24, 16, bias=False, dtype=torch.float64))
    x, gradient = torch.randn(5, 3, dtype=torch.float64, requires_grad=True), torch._neg_view(torch.randn(5, 16, dtype=torch.float64))

    def gradients(budget):
        with tandem.memory_budget(budget):
            return torch.autograd.grad(pipeline(x), [x, *pipeline.parameters()], gradient)

    for kept, again in zip(gradients(None), gradients(8), strict=True):
        assert torch.equal(kept, again)
