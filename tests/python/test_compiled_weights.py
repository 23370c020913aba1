"""Compiled code quantizes a weight once per optimizer step, under a memory budget and where the weight is of several parts too; exported programs."""

import contextlib
import copy
import io

import pytest
import torch
from functorch.compile import make_boxed_func
from support import assert_equal, llama_mlp, randomize
from torch._dynamo.backends.common import aot_autograd
from weights import RECIPES, assert_fresh, codes_told, made_in, results_of, step

import tandem
import tandem.ops as ops
from tandem.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
SPLIT = ("query", "key", "value")
REFRESH, CODES, QUANTIZE = [getattr(torch.ops.tandem, name).default for name in ("refresh_weight_", "weight_codes", "quantize")]


def joined(adjacent=True):
    linear = randomize(tandem.Linear(32, 96, parameters_split=SPLIT))
    if not adjacent:
        linear.key_weight.data = linear.key_weight.data.clone()
    return linear


def bits_of(call, module, x, recipe):
    """The output, and the gradients of x and of all parameters."""
    module.zero_grad()
    return [*results_of(call, x, recipe), *[param.grad for param in module.parameters() if param.requires_grad]]


def assert_same_bits(call, module, x, recipe):
    assert_equal(bits_of(call, module, x, recipe), bits_of(module, module, x, recipe))


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(64, 32, requires_grad=True)


@pytest.fixture
def graphs():
    """What aot_autograd makes of forward and backward, and a backend that puts it there."""
    found = {"forward": [], "backward": []}

    def keep(direction):
        def compiler(graph, _):
            found[direction].append(graph)
            return make_boxed_func(graph)

        return compiler

    found["backend"] = aot_autograd(fw_compiler=keep("forward"), bw_compiler=keep("backward"))
    return found


def calls_of(graph, op):
    """Arguments of the calls of an op, also where a mutation is a function of what it mutates."""
    calls = []
    for node in graph.graph.nodes:
        is_functional = "auto_functionalized" in str(node.target)
        if (node.args[0] if is_functional else node.target) == op:
            calls.append(node.kwargs if is_functional else node.args)
    return calls


# Under a memory budget


def check_steps(call, module, x, recipe, weights):
    """Three optimizer steps of two micro-batches, then writes that leave no sign: codes are made once for each, and give the bits of eager code."""
    optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
    for _ in range(3):
        assert made_in(lambda: step(call, x, recipe))[0] == weights
        assert made_in(lambda: step(call, x, recipe))[0] == 0
        assert_same_bits(call, module, x, recipe)
        optimizer.step()
        optimizer.zero_grad()
    step(call, x, recipe)
    for param in module.parameters():
        before = param.detach().clone()
        param.data.mul_(2)
        made, _ = made_in(lambda: step(call, x, recipe))
        assert made == (param.dim() == 2), "its bytes changed without a version"
        assert_same_bits(call, module, x, recipe)
        param.data.copy_(before)
        step(call, x, recipe)


@pytest.mark.parametrize("budget", [0, 400, 1e9])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_budget_quantizes_once_per_optimizer_step(x, recipe, budget):
    box = randomize(llama_mlp(32, 64))
    compiled = torch.compile(box, fullgraph=True, backend="aot_eager")
    with tandem.memory_budget(budget):
        check_steps(compiled, box, x, RECIPES[recipe], 2)


def test_a_budget_of_the_container_under_inductor(x):
    box = randomize(ops.Sequential(*llama_mlp(32, 64), memory_budget=0))
    compiled = torch.compile(box, fullgraph=True)
    for expected in (2, 0):
        assert made_in(lambda: step(compiled, x, RECIPES["mx"]))[0] == expected
    with torch.no_grad():
        for param in box.parameters():
            param.mul_(2)
    assert made_in(lambda: step(compiled, x, RECIPES["mx"]))[0] == 2
    torch.testing.assert_close(step(compiled, x, RECIPES["mx"]), step(box, x, RECIPES["mx"]), rtol=2e-2, atol=2e-2)


def test_a_checkpointed_module_quantizes_once_per_optimizer_step(x):
    module = randomize(tandem.LayerNormMLP(32, 64, checkpoint=True))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    check_steps(compiled, module, x, RECIPES["mx"], 2)


def test_what_runs_again_reads_codes_and_writes_none(x, graphs):
    box = randomize(llama_mlp(32, 64))
    with tandem.memory_budget(0):
        step(torch.compile(box, fullgraph=True, backend=graphs["backend"]), x, RECIPES["mx"])
    (forward,), (backward,) = graphs["forward"], graphs["backward"]
    assert len(calls_of(forward, REFRESH)) == 2 and not calls_of(backward, REFRESH)
    assert len(calls_of(backward, CODES)) == 3, "rows of the first weight for its product, columns of both"
    quantized = [arguments[0] for arguments in calls_of(backward, QUANTIZE)]
    assert quantized, "x and gradients"
    weights = {tuple(param.shape) for param in box.parameters() if param.dim() == 2}
    assert all(tuple(node.meta["val"].shape) not in weights for node in quantized)


def test_budgets_share_the_codes_of_one_pipeline(x):
    box = randomize(llama_mlp(32, 64))
    compiled = torch.compile(box, fullgraph=True, backend="aot_eager")
    assert made_in(lambda: step(compiled, x, RECIPES["mx"]))[0] == 2
    for budget in (0, 400):
        with tandem.memory_budget(budget):
            assert made_in(lambda: step(compiled, x, RECIPES["mx"]))[0] == 0


# Joined of parts


@pytest.mark.parametrize("adjacent", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_parts_are_quantized_once_per_optimizer_step(x, recipe, adjacent):
    linear = joined(adjacent)
    check_steps(torch.compile(linear, fullgraph=True, backend="aot_eager"), linear, x, RECIPES[recipe], 1)


def test_parts_under_inductor(x):
    linear = joined()
    compiled = torch.compile(linear, fullgraph=True)
    assert [made_in(lambda: step(compiled, x, RECIPES["mx"]))[0] for _ in range(2)] == [1, 0]
    linear.value_weight.data.mul_(3)
    assert made_in(lambda: step(compiled, x, RECIPES["mx"]))[0] == 1
    torch.testing.assert_close(step(compiled, x, RECIPES["mx"]), step(linear, x, RECIPES["mx"]), rtol=1e-4, atol=1e-4)


def test_parts_under_a_budget(x):
    box = randomize(ops.Sequential(ops.RMSNorm(32), ops.Linear(32, 128, bias=False, parameters_split=("gate", "up")), ops.SwiGLU(), ops.Linear(64, 32)))
    compiled = torch.compile(box, fullgraph=True, backend="aot_eager")
    with tandem.memory_budget(0):
        check_steps(compiled, box, x, RECIPES["mx"], 2)


@pytest.mark.parametrize("adjacent", [True, False])
def test_parts_are_not_put_together_to_find_their_codes(x, graphs, adjacent):
    linear = joined(adjacent)
    step(torch.compile(linear, fullgraph=True, backend=graphs["backend"]), x, RECIPES["mx"])
    for direction in ("forward", "backward"):
        nodes = graphs[direction][0].graph.nodes
        joins = [node for node in nodes if node.target == torch.ops.aten.cat.default and node.meta["val"].dim() == 2]
        assert not joins
    assert [len(arguments["weight"]) for arguments in calls_of(graphs["forward"][0], REFRESH)] == [3]


@pytest.mark.parametrize("compiled", [False, True])
def test_every_way_to_change_a_part_is_seen(x, compiled):
    """As tests/python/test_weight_writes.py has them for whole weights."""
    linear = joined()
    call = torch.compile(linear, fullgraph=True, backend="aot_eager") if compiled else linear
    flat = torch.cat([getattr(linear, f"{name}_weight").detach().flatten() for name in SPLIT])
    views = [flat[i * 1024 : (i + 1) * 1024].view(32, 32) for i in range(3)]

    def fused():
        for param in linear.parameters():
            param.grad = torch.randn_like(param)
        torch.optim.AdamW(linear.parameters(), lr=0.1, fused=True).step()

    def put_into_a_flat_buffer():
        flat.normal_()
        for name, view in zip(SPLIT, views, strict=True):
            getattr(linear, f"{name}_weight").data = view

    def swap():
        first, last = linear.query_weight, linear.value_weight
        linear.query_weight, linear.value_weight = last, first

    ways = {
        "in place": lambda: torch.nn.init.normal_(linear.key_weight),
        "data": lambda: linear.key_weight.data.mul_(2),
        "replaced": lambda: setattr(linear, "value_weight", torch.nn.Parameter(torch.randn(32, 32))),
        "fused optimizer": fused,
        "flat buffer": put_into_a_flat_buffer,
        "write to the buffer": lambda: flat[1030].fill_(7),
        "parts swapped": swap,
    }
    with tandem.autocast():
        for way, change in ways.items():
            step(call, x)
            assert made_in(lambda: step(call, x))[0] == 0, way
            change()
            assert made_in(lambda: step(call, x))[0] == 1, way
            assert_fresh(call, linear, x)


@pytest.mark.parametrize("compiled", [False, True])
def test_parts_that_are_frozen_or_said_to_be_unchanged(x, compiled):
    linear = joined()
    call = torch.compile(linear, fullgraph=True, backend="aot_eager") if compiled else linear
    step(call, x)
    with tandem.weights_unchanged():
        linear.key_weight.data.mul_(2)
        assert made_in(lambda: step(call, x))[0] == 0, "nobody looks at the bytes of parts either"
        with torch.no_grad():
            linear.key_weight.add_(1)
        assert made_in(lambda: step(call, x))[0] == 1, "versions are seen"
    assert_fresh(call, linear, x)
    linear.requires_grad_(False)
    step(call, x)
    other = torch.nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    torch.optim.SGD([other], lr=0.1).step()
    assert made_in(lambda: step(call, x))[0] == 0
    assert_fresh(call, linear, x)


def test_parts_whose_rows_move_from_one_to_another(x):
    """The same bytes one behind the other, and other parts."""
    linear = ops.Sequential(ops.Linear(32, 64, bias=False, parameters_split={"a": 32, "b": 32}))
    step(linear, x)
    whole = linear[0].weight.detach().clone()
    other = ops.Sequential(ops.Linear(32, 64, bias=False, parameters_split={"a": 16, "b": 48}))
    with torch.no_grad():
        other[0].weight.copy_(whole)
    assert torch.equal(step(linear, x), step(other, x))


# What is told of it


def test_explain_says_why(x):
    box = randomize(ops.Sequential(ops.Linear(32, 96, bias=False, parameters_split=SPLIT), ops.GELU(), ops.Linear(96, 32)))
    compiled = torch.compile(box, fullgraph=True, backend="aot_eager")

    def why(change=lambda: None, recipe=RECIPES["mx"]):
        change()
        step(compiled, x, recipe)
        return [entry["forward"] for entry in codes_told(box)]

    with torch.no_grad():
        step(compiled, x, RECIPES["mx"])
        assert why() == ["found", "found"]
    assert why() == ["a direction was missing"] * 2
    assert why() == ["found", "found"]
    assert why(lambda: torch.nn.init.normal_(box[0].key_weight)) == ["its version changed", "found"]
    assert why(lambda: box[0].value_weight.data.mul_(2)) == ["its bytes changed without a version", "found"]
    assert why(lambda: setattr(box[0], "query_weight", torch.nn.Parameter(torch.randn(32, 32))))[0] == "the weight is another tensor"
    assert why(recipe=Float8CurrentScaling()) == ["the recipe changed"] * 2
    with tandem.memory_budget(0):
        assert why() == ["found", "found"], "under a budget too"
    assert "0.basic_linear.weight in mxfp8" in tandem.explain(box)


def test_explain_tells_of_weights_that_are_quantized_in_each_call(x):
    box = ops.Sequential(ops.Linear(32, 32), ops.GELU(), ops.Linear(32, 32))
    step(box, x, DelayedScaling())
    assert [entry["forward"] for entry in codes_told(box)] == ["in each call: the scale is the step's"] * 2
    assert "made in forward (in each call: the scale is the step's)" in tandem.explain(box)
    grouped = ops.Sequential(ops.GroupedLinear(2, 32, 32, single_grouped_weight=True))
    with tandem.autocast(recipe=RECIPES["mx"]):
        grouped(x, torch.tensor([32, 32])).sum().backward()
    told = codes_told(grouped)
    assert [entry["forward"] for entry in told] == [entry["backward"] for entry in told] == ["in each call: where it is multiplied"]


def test_inductor_leaves_what_the_host_decides_out_of_cuda_graphs(x, graphs):
    from torch._inductor.utils import is_cudagraph_unsafe_fx_node

    box = randomize(llama_mlp(32, 64))
    step(torch.compile(box, fullgraph=True, backend=graphs["backend"]), x, RECIPES["mx"])
    for direction, op in (("forward", REFRESH), ("backward", CODES)):
        (graph,) = graphs[direction]
        assert len(calls_of(graph, op)) == 2
        on_host = [node for node in graph.graph.nodes if node.op == "placeholder" and node.meta["val"].dtype == torch.int64]
        readers = {node for stamp in on_host for node in stamp.users if node.target != torch.ops.aten.copy_.default}
        assert len(on_host) == len(readers) == 2, "nothing else reads what lies on the CPU"
    unsafe = {node.target for node in graph.graph.nodes if is_cudagraph_unsafe_fx_node(node)}
    assert unsafe == {CODES}
    for name in ("refresh_weight_", "say_of_weight_", "take_scale_", "record_amax_", "region_number"):
        assert torch._C.Tag.cudagraph_unsafe in getattr(torch.ops.tandem, name).default.tags


# Export


class InRegion(torch.nn.Module):
    def __init__(self, box):
        super().__init__()
        self.box = box

    def forward(self, x):
        with tandem.autocast(recipe=MXFP8BlockScaling()):
            return self.box(x)


def quantized_in(program):
    """Shapes of what the program quantizes, by itself or together with the activation before."""
    nodes = program.run_decompositions().graph.nodes
    quantizing = (torch.ops.tandem.quantize.default, torch.ops.tandem.activation_forward.codes)
    by_one = [node for node in nodes if node.target in quantizing and any(isinstance(arg, str) and arg.startswith("mxfp8") for arg in node.args)]
    return [tuple(node.args[0].meta["val"].shape) for node in by_one]


def linears():
    return ops.Sequential(ops.Linear(32, 48), ops.GELU(), ops.Linear(48, 32)).requires_grad_(False)


def saved_and_loaded(program):
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


@pytest.mark.parametrize("inside", [True, False], ids=["region inside", "region outside"])
def test_an_exported_program_is_right_with_any_state_dict(x, inside):
    x = x.detach()
    model = InRegion(randomize(linears())) if inside else randomize(linears())
    before = copy.deepcopy(model)
    with contextlib.nullcontext() if inside else tandem.autocast(recipe=MXFP8BlockScaling()):
        program = torch.export.export(model, (x,))
        shapes = quantized_in(program)
        assert shapes == [(64, 32), (48, 32), (64, 48), (32, 48)], "x and weight of each product: weights are arguments of the program"
        other = copy.deepcopy(model)
        with torch.no_grad():
            for param in other.parameters():
                param.mul_(-3)
        expected = [model(x), other(x)]
    assert not torch.equal(*expected)
    for exported in (program, program.run_decompositions(), saved_and_loaded(program)):
        module = exported.module()
        for loaded, y in ((before, expected[0]), (other, expected[1])):
            module.load_state_dict(loaded.state_dict())
            assert torch.equal(module(x), y), "frozen weights are parameters all the same"


def test_weights_that_are_kept_in_codes_are_exported_in_codes(x):
    x = x.detach()
    with tandem.quantized_model_init(recipe=MXFP8BlockScaling()):
        box = linears()
    model = InRegion(box)
    program = torch.export.export(model, (x,))
    assert quantized_in(program) == [(64, 32), (64, 48)], "no weight"
    for exported in (program, saved_and_loaded(program)):
        assert torch.equal(exported.module()(x), model(x))
