"""When codes of weights are made, found and written again: in pipelines, in compiled code, and by `quantize_weight` itself."""

import copy
import json
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from support import assert_equal, llama_mlp, randomize, results_of
from test_quantized_tensors import same
from torch.distributed.fsdp import fully_shard
from weights import RECIPES, assert_fresh, codes_told, fresh_numbers, made_in, step

import tandem
import tandem.ops as ops
from tandem.recipe import Float8CurrentScaling


@pytest.fixture
def linear():
    torch.manual_seed(0)
    return tandem.Linear(32, 32)


@pytest.fixture
def x():
    return torch.randn(32, 32, requires_grad=True)


@pytest.fixture(params=["eager", "compiled"])
def called(request, fresh_dynamo):
    """How modules are called: gives what is called for a module."""
    functions = {}

    def compiled(module):
        return functions.setdefault(module, torch.compile(module, fullgraph=True, backend="aot_eager"))

    return compiled if request.param == "compiled" else lambda module: module


# Pipelines


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_miss_is_made_and_a_hit_is_found(called, linear, x, recipe):
    assert made_in(lambda: step(called(linear), x, recipe)) == (1, 1), "backward finds what forward has made"
    assert made_in(lambda: step(called(linear), x, recipe)) == (0, 2)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("optimize", [torch.optim.SGD, partial(torch.optim.AdamW, fused=True)], ids=["SGD", "fused AdamW"])
def test_an_update_is_written_into_the_same_tensors(called, linear, x, optimize, recipe):
    optimizer = optimize(linear.parameters(), lr=0.1)
    for _ in range(3):
        assert made_in(lambda: step(called(linear), x, recipe)) == (1, 1)
        optimizer.step()
    assert_fresh(called(linear), linear, x, recipe)


def test_micro_batches_in_one_region_share_codes(called, linear, x):
    """In regions inside of it too."""
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)

    def micro_batches():
        with tandem.autocast():
            for region in (nullcontext(), tandem.autocast(), nullcontext(), tandem.autocast()):
                with region:
                    called(linear)(x).sum().backward()

    for _ in range(2):
        assert made_in(micro_batches) == (1, 7)
        optimizer.step()


def test_is_first_microbatch(called, linear, x):
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    for _ in range(2):
        assert made_in(lambda: step(called(linear), x, is_first_microbatch=True)) == (1, 1)
        assert made_in(lambda: [step(called(linear), x, is_first_microbatch=False) for _ in range(3)]) == (0, 6)
        optimizer.step()
    assert made_in(lambda: step(called(linear), x, is_first_microbatch=False)) == (1, 1), "an optimizer has stepped: that is seen whatever is said"
    linear.weight.data.mul_(2)
    expected = fresh_numbers(linear, x)
    assert made_in(lambda: step(called(linear), x, is_first_microbatch=False)) == (0, 2), "nobody has looked"
    assert not torch.equal(step(called(linear), x, is_first_microbatch=False), expected)
    assert torch.equal(step(called(linear), x), expected), "what was said holds for that call alone"


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_first_microbatch_speaks_against_all_codes_of_the_weight(called, linear, x, recipe):
    """Evaluation and training hold codes of other directions, each by themselves: one must not believe its own where the other has found other bytes."""

    def evaluated(**said):
        with torch.no_grad(), tandem.autocast(recipe=recipe):
            return called(linear)(x, **said)

    evaluated(is_first_microbatch=True)
    linear.weight.data.mul_(2)
    step(called(linear), x, recipe, is_first_microbatch=True)
    expected = fresh_numbers(linear, x, recipe)
    assert torch.equal(evaluated(is_first_microbatch=False), expected)
    assert torch.equal(step(called(linear), x, recipe, is_first_microbatch=False), expected)
    linear.weight.data.mul_(2)
    evaluated()
    assert torch.equal(step(called(linear), x, recipe, is_first_microbatch=False), fresh_numbers(linear, x, recipe)), "other bytes were found"


@pytest.mark.parametrize("between", [tandem.recipe.NVFP4BlockScaling(), tandem.recipe.MXFP8BlockScaling(), None], ids=["nvfp4", "mxfp8", "none"])
def test_a_first_microbatch_under_another_recipe_counts(linear, x, between):
    recipe = tandem.recipe.NVFP4BlockScaling(disable_stochastic_rounding=True, nvfp4_4over6="all")
    step(linear, x, recipe, is_first_microbatch=True)
    linear.weight.data.mul_(2)
    with tandem.autocast(enabled=between is not None, recipe=between):
        linear(x, is_first_microbatch=True)
    assert torch.equal(step(linear, x, recipe, is_first_microbatch=False), fresh_numbers(linear, x, recipe))
    assert made_in(lambda: step(linear, x, recipe, is_first_microbatch=False))[0] == 0


def test_weights_that_are_said_to_be_unchanged(called, x):
    box = ops.Sequential(ops.Linear(32, 32), ops.GELU(), ops.Linear(32, 32))
    step(called(box), x)
    with tandem.weights_unchanged():
        assert made_in(lambda: step(called(box), x)) == (0, 4)
        box[0].weight.data.mul_(2)
        assert made_in(lambda: step(called(box), x)) == (0, 4), "a write that leaves no sign is not looked for"
        tandem.weights_changed()
        assert made_in(lambda: step(called(box), x)) == (1, 3), "nor is the other weight quantized again, whose bytes are the same"
    assert_fresh(called(box), box, x)


@pytest.mark.parametrize(
    "make",
    [
        lambda: tandem.LayerNormLinear(32, 32),
        lambda: tandem.LayerNormMLP(32, 64),
        lambda: tandem.MultiheadAttention(32, 4),
        lambda: tandem.TransformerLayer(32, 64, 4),
    ],
)
def test_modules_pass_on_what_is_said(make):
    module, x = make(), torch.randn(32, 2, 32)
    assert made_in(lambda: step(module, x, is_first_microbatch=True))[0] > 0
    for param in module.parameters():
        param.data.mul_(2)
    assert made_in(lambda: step(module, x, is_first_microbatch=False))[0] == 0
    assert made_in(lambda: step(module, x))[0] > 0


def test_an_optimizer_over_a_flat_buffer(called, linear, x):
    """As ZeRO and Megatron have it: parameters are views of one buffer, which something of their own steps."""
    flat = torch.cat([linear.weight.detach().flatten(), linear.bias.detach()])
    linear.weight.data, linear.bias.data = flat[:1024].view(32, 32), flat[1024:]
    with tandem.autocast():
        for _ in range(3):
            assert made_in(lambda: called(linear)(x).sum().backward()) == (1, 1)
            flat.sub_(0.1 * torch.randn_like(flat))
        assert_fresh(called(linear), linear, x)


def test_frozen_weights_are_quantized_once_whoever_steps(called, linear, x):
    linear.requires_grad_(False)
    other = torch.nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    optimizer = torch.optim.SGD([other], lr=0.1)
    assert made_in(lambda: step(called(linear), x)) == (1, 1)
    for _ in range(3):
        optimizer.step()
        assert made_in(lambda: step(called(linear), x)) == (0, 2)
    linear.weight.data.mul_(2)
    assert made_in(lambda: step(called(linear), x)) == (1, 1), "loaded anew, it is another one"
    assert_fresh(called(linear), linear, x)


def test_a_frozen_weight_without_a_gradient_behind_it_has_no_column_codes():
    linear = ops.Sequential(ops.Linear(32, 32))
    step(linear.requires_grad_(False), torch.randn(32, 32), RECIPES["mx"])
    plan = json.loads(tandem.explain(linear, "json"))["plans"][-1]
    written = [name for entry in plan["forward"] for name in entry["mutates"]]
    assert any("row_codes" in name for name in written) and not any("column" in name for name in written)


class Calling(torch.nn.Module):
    """A module as `called` has it, within another one, whose hooks gather parameters."""

    def __init__(self, module, called):
        super().__init__()
        self.module = module
        self.__dict__["call"] = called(module)

    def forward(self, x):
        return self.call(x)


@pytest.mark.filterwarnings("ignore")
def test_weights_that_fsdp2_shards(called, one_rank, x):
    linears = [ops.Linear(32, 32), ops.Linear(32, 32)]
    plain, sharded = [torch.nn.Sequential(*[Calling(linear, called) for linear in copy.deepcopy(linears)]) for _ in range(2)]
    for module in (*sharded, sharded):
        fully_shard(module, mesh=one_rank)
    results = []
    for model in (plain, sharded):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            assert made_in(lambda: step(model, x)) == (2, 2), "gathered again for backward, it is the same weight"  # noqa: B023
            assert made_in(lambda: step(model, x)) == (0, 4), "and for the next micro-batch"  # noqa: B023
            optimizer.step()
        results.append(step(model, x))
    assert torch.equal(*results)


@pytest.mark.filterwarnings("ignore")
def test_quantize_weight_of_a_shard_is_that_of_the_whole(one_rank):
    sharded = fully_shard(torch.nn.Linear(32, 32), mesh=one_rank)
    quantizer = tandem.MXFP8Quantizer(torch.float8_e4m3fn)
    codes, workspace = tandem.quantize_weight(sharded.weight.detach(), quantizer)
    expected = tandem.quantize(sharded.weight.full_tensor().detach(), quantizer)
    assert torch.equal(codes.rowwise_data, expected.rowwise_data)
    assert tandem.quantize_weight(sharded.weight.detach(), quantizer, workspace)[1].made == "found", "a copy of the same bytes"


@pytest.mark.parametrize("adjacent", [True, False])
def test_weights_of_parts(x, adjacent):
    linear = tandem.Linear(32, 96, parameters_split=("q", "k", "v"))
    whole = tandem.Linear(32, 96)
    if not adjacent:
        linear.k_weight.data = linear.k_weight.data.clone()
    with torch.no_grad():
        whole.weight.copy_(torch.cat([linear.q_weight, linear.k_weight, linear.v_weight]))
    assert made_in(lambda: step(linear, x)) == (1, 1)
    assert made_in(lambda: step(linear, x)) == (0, 2)
    with tandem.autocast():
        expected = torch.autograd.grad(whole(x).sum(), x)
        torch.testing.assert_close(torch.autograd.grad(linear(x).sum(), x), expected)
    with torch.no_grad():
        linear.k_weight.mul_(2)
        whole.weight[32:64].mul_(2)
    assert made_in(lambda: step(linear, x)) == (1, 1)
    assert torch.equal(step(linear, x), step(whole, x))
    boxes = [ops.Sequential(module) for module in (linear, whole)]
    for box in boxes:
        step(box, x)
    assert boxes[0].saved_bytes() == boxes[1].saved_bytes(), "codes of weights are not kept by graphs"


def test_a_direction_that_is_missing(called, x):
    linear = ops.Sequential(ops.Linear(32, 48), ops.ReLU())  # no other test has one: compiled, it would have both workspaces beforehand
    with torch.no_grad():
        step(called(linear), x, RECIPES["mx"])
    assert made_in(lambda: step(called(linear), x, RECIPES["mx"])) == (1, 1)
    assert codes_told(linear)[0]["forward"] == "a direction was missing"
    assert_fresh(called(linear), linear, x, RECIPES["mx"])


def test_a_recipe_whose_value_changes(called, x):
    linear = ops.Sequential(ops.Linear(32, 32), ops.ConstantScale(0.8125))  # which no other test has traced: else both are made room for at once
    step(called(linear), x, Float8CurrentScaling())
    other = Float8CurrentScaling(use_power_2_scales=True)
    assert made_in(lambda: step(called(linear), x, other)) == (1, 1), "of the same class"
    assert codes_told(linear)[0]["forward"] == "the recipe changed"
    assert_fresh(called(linear), linear, x, other)
    with torch.no_grad():
        linear[0].weight.mul_(2)
    for recipe in (Float8CurrentScaling(), other):
        assert made_in(lambda: step(called(linear), x, recipe)) == (1, 1)  # noqa: B023
        assert_fresh(called(linear), linear, x, recipe)


def test_a_parameter_that_is_replaced(called, linear, x):
    step(called(linear), x)
    linear.weight = torch.nn.Parameter(torch.randn(32, 32))
    assert made_in(lambda: step(called(linear), x)) == (1, 1)
    assert_fresh(called(linear), linear, x)
    linear.weight = torch.nn.Parameter(linear.weight.detach().clone())
    assert made_in(lambda: step(called(linear), x)) == (0, 2), "another tensor of the same bytes"


def test_a_recompute_finds_the_codes_of_its_forward(linear, x):
    with tandem.autocast():
        y = tandem.checkpoint(linear, x)
    assert made_in(lambda: y.sum().backward())[0] == 0


# `explain`


def test_explain_says_which_weights_were_quantized_and_why(x):
    box = ops.Sequential(ops.Linear(32, 32), ops.GELU(), ops.Linear(32, 32))

    def why(change=lambda: None):
        change()
        step(box, x)
        return [entry["forward"] for entry in codes_told(box)]

    assert why() == ["first use", "first use"]
    assert why() == ["found", "found"]
    assert [entry["backward"] for entry in codes_told(box)] == ["found", "found"]

    def in_place():
        with torch.no_grad():
            box[0].weight.mul_(2)

    assert why(in_place) == ["its version changed", "found"]
    assert why(lambda: box[2].weight.data.mul_(2)) == ["found", "its bytes changed without a version"]
    assert why(lambda: setattr(box[0], "weight", torch.nn.Parameter(torch.randn(32, 32)))) == ["the weight is another tensor", "found"]
    assert why(torch.optim.AdamW(box.parameters(), lr=0.1, fused=True).step)[1] in ("an optimizer stepped", "its version changed")
    text = tandem.explain(box)
    assert "codes of weights in the last call\n" in text and "basic_linear.weight in fp8_e4m3" in text and ": made in forward (" in text
    assert "), found in backward\n" in text


# Compiled code


@pytest.mark.parametrize(
    ("backend", "recipe", "inside"),
    [("eager", "current", False), ("aot_eager", "current", True), ("aot_eager", "mx", False), ("inductor", "mx", False)],
)
def test_compiled_steps_keep_codes(fresh_dynamo, backend, inside, recipe):
    torch.manual_seed(0)
    recipe = RECIPES[recipe]
    box = randomize(llama_mlp(32, 64))
    eager = copy.deepcopy(box)
    x = torch.randn(32, 32)

    def within(x):
        with tandem.autocast(recipe=recipe):
            return box(x)

    function = torch.compile(within if inside else box, fullgraph=True, backend=backend)

    def call(x):
        if inside:
            return function(x)
        with tandem.autocast(recipe=recipe):
            return function(x)

    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-9) for model in (box, eager)]
    weights = sum(param.dim() == 2 for param in box.parameters())
    for number in range(3):
        for micro in range(2):
            made, _ = made_in(lambda: call(x).square().sum().backward())
            assert made == (weights if micro == 0 else 0), (number, micro)
            step(eager, x, recipe)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(call(x), step(eager, x, recipe), rtol=2e-2, atol=2e-2)
    with torch.no_grad():
        call(x)
        assert made_in(lambda: call(x))[0] == 0, "evaluation"


def test_compiled_codes_are_those_of_the_weight_that_forward_used(fresh_dynamo):
    """Between a forward and its backward another one may run with another weight: autograd tells of the write, as in eager code."""
    linear, x = ops.Linear(32, 32, bias=False), torch.randn(32, 32, requires_grad=True)
    function = torch.compile(linear, fullgraph=True, backend="aot_eager")
    with tandem.autocast():
        y = function(x)
        expected = torch.autograd.grad(linear(x).sum(), x)
        held = linear.weight.detach().clone()
        linear.weight.data = torch.randn(32, 32)  # another memory: the old one is as it was
        function(x)
        linear.weight.data = held
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x), expected)


def test_equal_blocks_with_workspaces_compile_once_cold(fresh_dynamo, x):
    from torch._dynamo.testing import CompileCounterWithBackend

    blocks = [ops.Sequential(ops.Linear(32, 32), ops.GELU()) for _ in range(12)]
    counter = CompileCounterWithBackend("aot_eager")
    for block in blocks:
        block.compile(backend=counter, fullgraph=True)
    for block in blocks:
        block(x)
    assert counter.frame_count == 1
    with tandem.autocast():
        results = [block(x) for block in blocks]
        assert counter.frame_count == 2
        assert made_in(lambda: [block(x) for block in blocks]) == (0, 12)
    for block, y in zip(blocks, results, strict=True):
        block._compiled_call_impl = None
        torch.testing.assert_close(y, step(block, x))


def test_explain_tells_of_compiled_code(fresh_dynamo, x):
    box = ops.Sequential(ops.Linear(32, 32), ops.GELU())
    function = torch.compile(box, fullgraph=True, backend="aot_eager")
    for expected in ("first use", "found"):
        step(function, x)
        assert codes_told(box)[0]["forward"] == expected


# The function


def test_quantize_weight_gives_the_codes_of_quantize():
    weight = torch.randn(64, 32)
    for quantizer in (
        tandem.MXFP8Quantizer(torch.float8_e4m3fn),
        tandem.MXFP8Quantizer(torch.float8_e4m3fn, columnwise=False),
        tandem.Float8CurrentScalingQuantizer(torch.float8_e4m3fn),
        tandem.Float8BlockQuantizer(torch.float8_e4m3fn, rowwise=True, columnwise=True),
        tandem.NVFP4Quantizer(),
    ):
        codes, workspace = tandem.quantize_weight(weight, quantizer)
        same(codes, tandem.quantize(weight, quantizer))
        assert workspace.made == "first use"
        again, found = tandem.quantize_weight(weight, quantizer, workspace)
        assert found.made == "found" and again.rowwise_data.data_ptr() == codes.rowwise_data.data_ptr()


def test_quantize_weight_owns_the_rules():
    weight, quantizer = torch.randn(64, 32), tandem.MXFP8Quantizer(torch.float8_e4m3fn)
    rows = tandem.MXFP8Quantizer(torch.float8_e4m3fn, columnwise=False)
    _, workspace = tandem.quantize_weight(weight, rows)

    def made(*args, **kwargs):
        nonlocal workspace
        _, workspace = tandem.quantize_weight(*args, workspace, **kwargs)
        return workspace.made

    assert made(weight, quantizer) == "a direction was missing"
    assert made(weight, rows) == "found", "more than is wanted is there"
    assert made(weight, quantizer, is_first_microbatch=True) == "the first micro-batch"
    weight.numpy()[0, 0] = 7
    assert made(weight, quantizer, is_first_microbatch=False) == "found"
    assert made(weight, quantizer) == "its bytes changed without a version"
    assert made(weight.mul_(2), quantizer) == "its version changed"
    assert made(weight.clone(), quantizer) == "found"
    assert made(torch.randn(64, 32), quantizer) == "the weight is another tensor"
    assert made(torch.randn(32, 32), quantizer) == "the weight is another tensor"
    assert made(torch.randn(32, 32), tandem.MXFP8Quantizer(torch.float8_e5m2)) == "the recipe changed"
    assert workspace.stamp.device.type == "cpu"


def test_quantize_weight_of_quantized_weights():
    plain, quantizer = torch.randn(64, 32), tandem.MXFP8Quantizer(torch.float8_e4m3fn)
    weight = tandem.quantize(plain, quantizer)
    codes, workspace = tandem.quantize_weight(weight, quantizer)
    assert codes is weight and workspace is None
    assert tandem.quantize_weight(weight, tandem.MXFP8Quantizer(torch.float8_e4m3fn, columnwise=False))[0] is weight
    other = tandem.Float8CurrentScalingQuantizer(torch.float8_e4m3fn)
    codes, workspace = tandem.quantize_weight(weight, other)
    assert torch.equal(codes.rowwise_data, tandem.quantize(weight.dequantize(), other).rowwise_data)
    assert tandem.quantize_weight(weight, other, workspace)[1].made == "found"
    only_rows = tandem.quantize(plain, tandem.MXFP8Quantizer(torch.float8_e4m3fn, columnwise=False))
    codes, _ = tandem.quantize_weight(only_rows, quantizer)
    assert codes.columnwise_data is not None, "of the numbers that it has"


def test_quantize_weight_refuses():
    weight, quantizer = torch.randn(64, 32), tandem.MXFP8Quantizer(torch.float8_e4m3fn)
    with pytest.raises(TypeError, match=r"quantize_weight: expected a Quantizer, got str\. Pass for example"):
        tandem.quantize_weight(weight, "fp8_e4m3")
    with pytest.raises(ValueError, match=r"quantize_weight: expected is_first_microbatch to be True, False or None, got 2\. Pass one"):
        tandem.quantize_weight(weight, quantizer, is_first_microbatch=2)
    with pytest.raises(NotImplementedError, match="quantize_weight: expected a tensor that needs no gradient"):
        tandem.quantize_weight(weight.requires_grad_(), quantizer)
    with pytest.raises(ValueError, match='weights: expected "", "first micro-batch" or "unchanged" as what is said of them, got'):
        tandem._C.in_force.said_of_weights = "stale"


@pytest.mark.parametrize("inside", [False, True])
def test_compiled_code_that_recomputes_has_no_workspaces(fresh_dynamo, inside):
    torch.manual_seed(0)
    mlp = tandem.LayerNormMLP(32, 48, checkpoint=True)
    module = ops.Sequential(mlp) if inside else mlp
    compiled, x = torch.compile(module, fullgraph=True, backend="aot_eager"), torch.randn(8, 32)
    assert_equal(*[results_of(call, x, recipe=tandem.recipe.MXFP8BlockScaling()) for call in (module, compiled)])
