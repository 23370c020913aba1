"""A Linear of several named weights: separate parameters and keys, one step, the numbers of the undivided one."""

import copy
import gc
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from support import randomize, results_of

import tandem
import tandem.ops as ops
from tandem.pipelines.joined import are_adjacent, split_sizes

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

RECIPES = [None, tandem.recipe.Float8CurrentScaling(), tandem.recipe.MXFP8BlockScaling(), tandem.recipe.DelayedScaling()]


def pair(bias=True, split=("gate", "up"), **kwargs):
    """A divided and an undivided Linear of the same numbers."""
    whole = randomize(ops.Linear(64, 96, bias=bias, **kwargs))
    parts = ops.Linear(64, 96, bias=bias, parameters_split=split, **kwargs)
    with torch.no_grad():
        parts.weight.copy_(whole.weight)
        if bias:
            parts.bias.copy_(whole.bias)
    return whole, parts


def grads_of(linear, operand):
    named = dict(linear.named_parameters())
    names = [operand] if operand in named else [name for name in named if name.endswith(f"_{operand}")]
    return torch.cat([named[name].grad for name in names])


def step(linear, x, grad, recipe=None):
    x = x.detach().requires_grad_()
    with tandem.autocast(enabled=recipe is not None, recipe=recipe):
        y = linear(x)
    y.backward(grad)
    return y, x.grad


def test_parameters_and_keys_are_those_of_the_parts():
    linear = ops.Linear(8, 12, parameters_split={"query_": 6, "key": 3, "value": 3})
    names = ["query_weight", "key_weight", "value_weight", "query_bias", "key_bias", "value_bias"]
    assert [name for name, _ in linear.named_parameters()] == list(linear.state_dict()) == names
    assert linear.query_weight.shape == (6, 8) and linear.value_bias.shape == (3,)
    assert linear.weight.shape == (12, 8) and linear.bias.shape == (12,)
    assert "parameters_split={'query': 6, 'key': 3, 'value': 3}" in repr(linear)
    assert isinstance(linear, torch.nn.Linear)
    assert list(ops.Linear(8, 12, bias=False, parameters_split=["a", "b", "c"]).state_dict()) == ["a_weight", "b_weight", "c_weight"]


def test_one_memory_and_one_product():
    _, linear = pair()
    assert are_adjacent([linear.gate_weight, linear.up_weight]) and are_adjacent([linear.gate_bias, linear.up_bias])
    pipeline = ops.Sequential(linear)
    pipeline(torch.randn(4, 64, requires_grad=True)).sum().backward()
    steps = [line.split()[0] for line in pipeline.explain().splitlines() if line.startswith("  ")]
    assert steps.count("linear_bias:") == 1 and steps.count("basic_linear.grad_weight:") == 1
    assert steps.count("join:") == 3, "weight and bias in forward, weight in backward"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
@pytest.mark.parametrize("bias", [True, False])
def test_numbers_are_those_of_the_undivided_one(recipe, bias):
    whole, parts = pair(bias)
    x, grad = torch.randn(32, 64), torch.randn(32, 96)
    for _ in range(2):
        expected, actual = step(whole, x, grad, recipe), step(parts, x, grad, recipe)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    for operand in ("weight", "bias")[: 1 + bias]:
        assert torch.equal(grads_of(parts, operand), grads_of(whole, operand))


def test_a_gated_unit_fuses_behind_it():
    linear = ops.Linear(64, 96, bias=False, parameters_split=("gate", "up"))
    mlp = ops.Sequential(ops.RMSNorm(64), linear, ops.SwiGLU(), ops.Linear(48, 64, bias=False))
    x = torch.randn(16, 64, requires_grad=True)
    y = mlp(x)
    assert "linear_glu" in mlp.explain()
    normed = torch.nn.functional.rms_norm(x, (64,), mlp[0].weight, 1e-5)
    hidden = torch.nn.functional.silu(normed @ linear.gate_weight.t()) * (normed @ linear.up_weight.t())
    torch.testing.assert_close(y, hidden @ mlp[3].weight.t(), atol=2e-5, rtol=1e-4)
    mlp.verify(x)


def test_explain_tells_of_parts_that_lie_apart():
    _, parts = pair()
    mlp = ops.Sequential(parts, ops.SwiGLU())
    mlp(torch.randn(8, 64))
    assert "lie apart" not in mlp.explain()
    parts.up_weight = torch.nn.Parameter(parts.up_weight.detach().clone())
    mlp(torch.randn(8, 64))
    told = "each call copies gate_weight, up_weight into one weight, as they lie apart in memory. Move their module with .to(device)"
    assert mlp.explain().count(told) == 1 and told in mlp.explain("html")
    mlp.to("cpu")
    assert "lie apart" not in mlp.explain()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("are_apart", [True, False])
def test_large_parts_are_multiplied_where_they_lie(dtype, are_apart):
    """Products with and without sums and biases, of parts of several sizes, against float64; no memory for a joined weight is allocated in forward."""
    linear = ops.Linear(128, 512, parameters_split={"q": 256, "k": 128, "v": 128}, dtype=dtype)
    if are_apart:
        linear.k_weight = torch.nn.Parameter(linear.k_weight.detach().clone())
    pipeline = ops.Sequential(ops.MakeExtraOutput(), linear, ops.AddExtraInput())
    x, extra = torch.randn(3, 7, 128, dtype=dtype, requires_grad=True), torch.randn(3, 7, 512, dtype=dtype)
    given = torch.randn(3, 7, 512, dtype=dtype), torch.randn(3, 7, 128, dtype=dtype)
    weight = torch.cat([linear.q_weight, linear.k_weight, linear.v_weight]).detach().double()
    bias = torch.cat([linear.q_bias, linear.k_bias, linear.v_bias]).detach().double()
    with torch.profiler.profile(profile_memory=True) as profile:
        y, same = pipeline(x, extra)
    if dtype in (torch.float32, torch.float64):  # products in 16 bits may widen a part
        assert max(event.self_cpu_memory_usage for event in profile.events()) < weight.numel() * x.element_size()
    torch.autograd.backward([y, same], given)
    assert ("lie apart" in pipeline.explain()) == (are_apart and dtype.itemsize == 2)
    wide = x.detach().double()
    near = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 20 * torch.finfo(dtype).eps}
    if dtype in (torch.float32, torch.float64):
        near["atol"] *= 10
    torch.testing.assert_close(y.double(), wide @ weight.T + bias + extra, **near)
    torch.testing.assert_close(x.grad.double(), given[0].double() @ weight + given[1], **near)
    torch.testing.assert_close(grads_of(linear, "weight").double(), given[0].double().flatten(0, 1).T @ wide.flatten(0, 1), **near)
    alone = copy.deepcopy(linear)  # its parts are adjacent
    torch.testing.assert_close(step(alone, x, given[0]), step(linear, x, given[0]), rtol=0, atol=0)
    with torch.autograd.detect_anomaly(check_nan=True):
        step(linear, x, given[0])


@pytest.mark.parametrize("rows", [63, 64, 256])
def test_a_sum_in_place_into_the_memory_of_a_part_is_refused(rows):
    linear = ops.Linear(256, 2 * rows, bias=False, parameters_split=("q", "k")).requires_grad_(False)
    extra, weight = linear.q_weight.view(-1, 2 * rows), linear.weight.clone()
    with pytest.raises(RuntimeError, match="expected 0.basic_linear.weight unchanged until the end of the call, as the op that writes reads it"):
        ops.Sequential(linear, ops.AddExtraInput(in_place=True))(torch.randn(len(extra), 256), extra)
    assert torch.equal(linear.weight, weight)


@pytest.mark.parametrize("own", [
    lambda linear: linear.q_weight.data,
    lambda linear: linear.weight[:256],
    lambda linear: linear.weight[256:],
    lambda linear: torch.from_numpy(linear.weight.numpy()),
])  # fmt: skip
@pytest.mark.parametrize("split", [("q", "k"), None])
def test_a_sum_in_place_into_an_operand_is_right_or_refused(own, split):
    """Whether or not the tensors have one storage."""
    linear = ops.Linear(512, 512, bias=False, parameters_split=split).requires_grad_(False)
    if split is None:
        linear.q_weight = linear.weight[:256]
    weight, extra, before = linear.weight.clone(), own(linear), own(linear).clone()
    x = torch.randn(len(extra), 512)
    try:
        y = ops.Sequential(linear, ops.AddExtraInput(in_place=True))(x, extra)
    except RuntimeError as error:
        assert "unchanged until the end of the call, as the op that writes reads it" in str(error) and torch.equal(linear.weight, weight)
    else:
        torch.testing.assert_close(y.double(), x.double() @ weight.double().T + before.double(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [127, 128])
def test_what_reads_a_weight_beside_the_plan_gets_its_numbers(rows, dtype):
    """Fused and unfused steps agree, and an op that is called by its parts saves the weight, where parts are small and where they are multiplied apart."""
    linear = ops.Linear(128, 2 * rows, parameters_split=("a", "b"), dtype=dtype)
    x = torch.randn(6, 128, dtype=dtype)
    for listed in ((linear,), (ops.RMSNorm(128, dtype=dtype), linear, ops.SwiGLU()), (linear, ops.AddExtraInput(), ops.GELU())):
        extra = [torch.randn(6, 2 * rows, dtype=dtype)] if len(listed) == 3 and isinstance(listed[1], ops.AddExtraInput) else []
        outcome = ops.Sequential(*listed).verify(x, *extra)
        assert outcome, outcome.text
    _, saved = linear.basic_ops[0].op_forward_compute(x)
    assert torch.equal(saved[1], torch.cat([linear.a_weight, linear.b_weight]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_in_place_reads_parts_where_they_lie(dtype):
    linear = ops.Linear(512, 1024, bias=False, parameters_split=("q", "k"), dtype=dtype).requires_grad_(False)
    linear.k_weight = torch.nn.Parameter(linear.k_weight.clone(), requires_grad=False)
    weight = torch.cat([linear.q_weight, linear.k_weight]).double()
    x, extra = torch.randn(2, 512, dtype=dtype), torch.randn(2, 1024, dtype=dtype)
    wanted = x.double() @ weight.T + extra.double()
    pipeline = ops.Sequential(linear, ops.AddExtraInput(in_place=True))
    with torch.profiler.profile(profile_memory=True) as profile:
        assert pipeline(x, extra).data_ptr() == extra.data_ptr()
    if dtype == torch.float32:
        assert max(event.self_cpu_memory_usage for event in profile.events()) < linear.q_weight.nbytes
    torch.testing.assert_close(extra.double(), wanted, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)
    said = pipeline.explain().count("each backward copies q_weight, k_weight into one weight, as they lie apart in memory.")
    assert said == (dtype == torch.bfloat16)


@pytest.mark.parametrize("moved", ["apart", "deepcopy", "pickle", "assigned", "float64", "to_empty"])
def test_where_the_parts_lie_changes_no_number(moved):
    whole, parts = pair()
    if moved == "apart":
        parts.gate_weight = torch.nn.Parameter(parts.gate_weight.detach().clone())
    elif moved == "deepcopy":
        parts = copy.deepcopy(parts)
    elif moved == "pickle":
        parts = pickle.loads(pickle.dumps(parts))
    elif moved == "assigned":
        parts.load_state_dict({name: value.clone() for name, value in parts.state_dict().items()}, assign=True)
    elif moved == "float64":
        whole, parts = whole.double(), parts.double()
    else:
        state = parts.state_dict()
        parts = ops.Linear(64, 96, parameters_split=("gate", "up"), device="meta")
        assert parts.weight.is_meta
        parts.to_empty(device="cpu").load_state_dict(state)
    assert are_adjacent([parts.gate_weight, parts.up_weight]) == (moved != "apart")
    x, grad = torch.randn(8, 64, dtype=whole.weight.dtype), torch.randn(8, 96, dtype=whole.weight.dtype)
    torch.testing.assert_close(step(parts, x, grad), step(whole, x, grad), rtol=0, atol=0)
    assert torch.equal(grads_of(parts, "weight"), grads_of(whole, "weight"))


def test_parts_of_one_row_in_a_wider_row():
    """The stride of a part of one row, here the row of `wide`, says nothing of where the next part is."""
    linear, wide = ops.Linear(8, 2, bias=False, parameters_split=("a", "b")), torch.randn(1, 16)
    linear.load_state_dict({"a_weight": wide[:, :8], "b_weight": wide[:, 8:]}, assign=True)
    x = torch.randn(4, 8)
    torch.testing.assert_close(linear(x), x @ wide.view(2, 8).t())


def test_made_on_the_meta_device_it_is_drawn_at_the_first_call():
    linear = ops.Linear(64, 96, parameters_split=("gate", "up"), device="meta")
    linear(torch.randn(4, 64)).sum().backward()
    assert are_adjacent([linear.gate_weight, linear.up_weight])
    assert 0 < linear.up_weight.abs().max() <= 1 / 8 and not linear.up_bias.any()


def test_frozen_parts_get_no_gradient():
    _, parts = pair()
    parts.gate_weight.requires_grad_(False)
    parts.up_bias.requires_grad_(False)
    parts(torch.randn(4, 64)).sum().backward()
    assert parts.gate_weight.grad is None and parts.up_bias.grad is None
    assert parts.up_weight.grad is not None and parts.gate_bias.grad is not None


def test_a_part_written_between_forward_and_backward_is_noticed():
    _, parts = pair()
    y = parts(torch.randn(4, 64, requires_grad=True))
    with torch.no_grad():
        parts.up_weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("budget", [None, 0.0])
def test_a_part_that_no_gradient_needs_may_be_written_between_forward_and_backward(budget, is_compiled):
    """The biases, and the weights if x wants no gradient: as with a weight that is not divided, and as in torch."""
    parts = ops.Linear(64, 96, parameters_split={"gate": 64, "up": 32})
    pipeline = ops.Sequential(parts)
    pipeline.memory_budget = budget
    call = torch.compile(pipeline, backend="aot_eager") if is_compiled else pipeline
    for x, names in ((torch.randn(4, 64, requires_grad=True), ["gate_bias", "up_bias"]), (torch.randn(4, 64), ["gate_weight", "up_weight", "gate_bias"])):
        parts.zero_grad()
        y, grad = call(x), torch.randn(4, 96)
        with torch.no_grad():
            for name in names:
                getattr(parts, name).zero_()
        y.backward(grad)
        torch.testing.assert_close(parts.up_weight.grad, grad[:, 64:].T @ x.detach())
        torch.testing.assert_close(parts.gate_bias.grad, grad[:, :64].sum(0))


@pytest.mark.parametrize("recipe", RECIPES[:3], ids=lambda recipe: type(recipe).__name__)
def test_compiled_code_computes_the_same(recipe):
    _, parts = pair()

    def call(x):
        with tandem.autocast(enabled=recipe is not None, recipe=recipe):
            return parts(x)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    x, grad = torch.randn(8, 64), torch.randn(8, 96)
    torch.testing.assert_close(results_of(compiled, x, grad, module=parts), results_of(call, x, grad, module=parts))


def test_derivatives():
    linear = ops.Linear(3, 4, parameters_split=("a", "b"), dtype=torch.float64)
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)

    def function(x, *params):
        names = [name for name, _ in linear.named_parameters()]
        return torch.func.functional_call(linear, dict(zip(names, params, strict=True)), x)

    assert torch.autograd.gradcheck(function, (x, *linear.parameters()))
    hessian = torch.func.hessian(lambda x: function(x, *linear.parameters()).square().sum())(x.detach())
    weight = linear.weight.detach()
    torch.testing.assert_close(hessian[0, :, 0, :], 2 * weight.t() @ weight)


def test_autocast_of_torch():
    whole, parts = pair()
    x, grad = torch.randn(8, 64), torch.randn(8, 96)
    with torch.autocast("cpu", torch.bfloat16):
        actual, expected = step(parts, x, grad.bfloat16()), step(whole, x, grad.bfloat16())
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert torch.equal(grads_of(parts, "weight"), grads_of(whole, "weight"))


def test_weight_and_bias_are_the_parts_as_one():
    _, parts = pair()
    torch.nn.init.constant_(parts.weight, 0.5)
    parts.bias.data.fill_(0.25)
    assert (parts.gate_weight == 0.5).all() and (parts.up_weight == 0.5).all() and (parts.up_bias == 0.25).all()
    torch.nn.init.normal_(parts.weight)
    parts.weight.square().sum().backward()
    assert torch.equal(parts.gate_weight.grad, 2 * parts.gate_weight) and torch.equal(parts.up_weight.grad, 2 * parts.up_weight)
    (product, bias) = parts.basic_ops
    assert torch.equal(product.weight, parts.weight) and torch.equal(bias.bias, parts.bias)
    parts.reset_parameters()
    assert parts.up_weight.std() > 0 and not parts.bias.any()


@pytest.mark.parametrize(
    ("split", "kind", "message"),
    [
        (3, TypeError, r"Linear: expected parameters_split to be names, or sizes by name, got 3\. Name the parts in their order\."),
        ((), ValueError, r"Linear: expected parameters_split to be names, or sizes by name, got \(\)\. Name the parts in their order\."),
        ("qkv", ValueError, "Linear: expected parameters_split to be names, or sizes by name, got 'qkv'"),
        (("a", ""), ValueError, "Linear: expected names in parameters_split that can be those of attributes, got ''. Use letters, digits and _."),
        (("a", "a_"), ValueError, "Linear: expected names in parameters_split that differ, got a, a. Rename one."),
        (("a", "b", "c", "d", "e"), ValueError, "Linear: expected out_features that 5 parts share evenly, got 12. Give parameters_split as sizes by name."),
        ({"a": 5, "b": 6}, ValueError, r"Linear: expected sizes in parameters_split > 0 that sum up to out_features, 12, got \[5, 6\]. Give those of the rows"),
        ({"a": 12, "b": 0}, ValueError, "Linear: expected sizes in parameters_split > 0"),
    ],
)
def test_splits_that_are_none(split, kind, message):
    with pytest.raises(kind, match=message):
        ops.Linear(8, 12, parameters_split=split)


def test_ranks_share_each_part():
    assert split_sizes("Linear", "out_features", {"q": 8, "k": 4}, 12, ranks=2) == {"q": 4, "k": 2}
    with pytest.raises(ValueError, match=r"Linear: expected sizes in parameters_split that 2 ranks share evenly, got \[7, 5\]. Use multiples of 2."):
        split_sizes("Linear", "out_features", {"q": 7, "k": 5}, 12, ranks=2)


def test_what_data_is_replaced_by_goes_into_the_parts():
    linear = ops.Linear(8, 12, parameters_split={"a": 5, "b": 7})
    parts, new = dict(linear.named_parameters()), torch.randn(12, 8)
    linear.weight.data = new
    linear.bias.data = torch.ones(12)
    assert torch.equal(linear.a_weight, new[:5]) and torch.equal(linear.b_weight, new[5:]) and (linear.b_bias == 1).all()
    assert all(linear.get_parameter(name) is part for name, part in parts.items()), "optimizers hold them"
    linear.weight.data += 1
    assert torch.equal(linear.b_weight, new[5:] + 1) and type(linear.weight + 1) is torch.Tensor
    for wrong, got in ((torch.zeros(11, 8), r"\[11, 8\] and torch.float32"), (torch.zeros(12, 8).double(), r"\[12, 8\] and torch.float64")):
        with pytest.raises(ValueError, match=r"data: expected numbers for parts that stay .* of shape \[12, 8\] and torch.float32, got shape " + got):
            linear.weight.data = wrong
    linear.double()
    linear.weight.data = torch.zeros(12, 8, dtype=torch.float64)
    assert not linear.a_weight.any()


def test_a_copy_is_told_of():
    linear = ops.Linear(8, 12, parameters_split=("a", "b"))
    linear.a_weight = torch.nn.Parameter(linear.a_weight.detach().clone())
    with pytest.warns(UserWarning, match="tandem: expected Linear.weight to be read of parts that lie one behind the other, got parts that lie apart"):
        copied = linear.weight
    assert torch.equal(copied[:6], linear.a_weight)
    with pytest.raises(AttributeError, match="Linear: expected a value for one of a_weight, b_weight, which weight consists of, got one for weight. Set"):
        linear.weight = torch.nn.Parameter(torch.zeros(12, 8))
    linear.load_state_dict({name: value.clone() for name, value in linear.state_dict().items()}, assign=True)
    linear.weight.data.fill_(3.0)
    assert (linear.b_weight == 3).all()


def test_no_main_grad():
    with pytest.raises(ValueError, match="Linear: expected accumulate_into_main_grad=False with parameters_split, as a product adds to one main_grad"):
        ops.Linear(8, 12, parameters_split=("a", "b"), accumulate_into_main_grad=True)


def test_parts_that_do_not_fit():
    linear = ops.Linear(8, 12, parameters_split=("a", "b"))
    linear.a_weight = torch.nn.Parameter(torch.randn(6, 7))
    with pytest.raises(ValueError, match=r"join: expected parts of one parameter that differ in their first size at most, got \[6, 7\] and \[6, 8\]"):
        linear(torch.randn(2, 8))
    for name, wrong in (("a_weight", (7, 8)), ("b_weight", (5, 8)), ("b_bias", (4,))):
        linear = ops.Linear(8, 12, parameters_split=("a", "b"))
        setattr(linear, name, torch.nn.Parameter(torch.randn(wrong)))
        text = rf"Linear: expected {name} with 6 rows, as parameters_split says, got shape \[{', '.join(map(str, wrong))}\]. Assign a tensor with as many"
        for call in (linear, ops.Sequential(ops.GELU(), linear)):
            for _ in range(2):  # the second call looks at nothing before
                with pytest.raises(ValueError, match=text):
                    call(torch.randn(2, 8))
    module = tandem.Linear(8, 12, parameters_split=("a", "b"))
    module.a_weight = torch.nn.Parameter(torch.randn(7, 8))
    with pytest.raises(ValueError, match=r"Linear: expected a_weight with 6 rows, as parameters_split says, got shape \[7, 8\]"):
        module(torch.randn(2, 8))
    linear = ops.Linear(8, 12, parameters_split=("a", "b"))
    linear.a_weight = torch.nn.Parameter(torch.randn(6, 8, dtype=torch.float64))
    with pytest.raises(TypeError, match="0.basic_linear: expected the parts of a parameter in one dtype, got float64 and float32"):
        linear(torch.randn(2, 8))


def test_parts_have_storages_of_their_own():
    _, parts = pair()
    weights = [parts.gate_weight, parts.up_weight]
    starts = [weight.untyped_storage().data_ptr() for weight in weights]
    assert starts == [weight.data_ptr() for weight in weights] and starts[1] == starts[0] + weights[0].nbytes
    assert [weight.untyped_storage().nbytes() for weight in weights] == [weight.nbytes for weight in weights]
    assert not any(weight.storage_offset() for weight in weights)
    file = io.BytesIO()
    torch.save(parts.up_weight, file)
    assert file.tell() < 2 * parts.up_weight.nbytes, "a part is saved without the others"


def test_what_tells_shared_weights_by_their_storage_keeps_all_parts(tmp_path):
    """As safetensors and accelerate do, which keep one name of each storage."""
    model = tandem.TransformerLayer(32, 64, 4)
    names = {}
    for name, tensor in model.state_dict().items():
        storage = tensor.untyped_storage()
        names.setdefault((storage.data_ptr(), storage.nbytes()), []).append(name)
    assert all(len(same) == 1 for same in names.values())
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_model(model, tmp_path / "model.safetensors")
    assert safetensors.load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys()


def test_a_part_keeps_the_memory_alive():
    _, parts = pair()
    kept, expected = parts.up_weight, parts.up_weight.detach().clone()
    del parts
    gc.collect()
    torch.full((4096, 64), 7.0)  # what was freed is handed out again
    assert torch.equal(kept, expected)


def test_a_storage_that_is_resized_moves_its_part_alone():
    whole, parts = pair()
    storage = parts.up_weight.untyped_storage()
    saved = parts.up_weight.detach().clone()
    storage.resize_(0)
    storage.resize_(saved.nbytes)
    with torch.no_grad():
        parts.up_weight.copy_(saved)
    assert not are_adjacent([parts.gate_weight, parts.up_weight])
    x, grad = torch.randn(8, 64), torch.randn(8, 96)
    torch.testing.assert_close(step(parts, x, grad), step(whole, x, grad), rtol=0, atol=0)


def test_shared_memory_stays_shared():
    whole, parts = pair()
    parts.share_memory()
    assert all(param.is_shared() for param in parts.parameters()), "bringing parts together would make copies that no other process sees"
    sent = pickle.loads(ForkingPickler.dumps(parts))
    with torch.no_grad():
        parts.up_weight.mul_(2)
        whole.weight[48:].mul_(2)
    assert torch.equal(sent.up_weight, parts.up_weight)
    x, grad = torch.randn(8, 64), torch.randn(8, 96)
    torch.testing.assert_close(step(sent, x, grad), step(whole, x, grad), rtol=0, atol=0)


@pytest.mark.parametrize("way", ["foreach", "fused", "flat"])
def test_what_writes_parts_writes_the_joined_weight(way):
    whole, parts = pair()
    if way == "flat":  # as libraries with flat buffers do
        memory = torch.nn.utils.parameters_to_vector(parts.parameters()).detach()
        torch.nn.utils.vector_to_parameters(memory, parts.parameters())
        assert are_adjacent([parts.gate_weight, parts.up_weight]), "views of one storage lie together too"
    for linear in (whole, parts):
        optimizer = torch.optim.AdamW(linear.parameters(), lr=0.1, foreach=way != "fused", fused=way == "fused")
        for _ in range(2):
            optimizer.zero_grad()
            step(linear, torch.ones(4, 64), torch.ones(4, 96))
            optimizer.step()
    assert torch.equal(parts.weight, whole.weight) and torch.equal(parts.bias, whole.bias)
