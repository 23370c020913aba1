"""Sequential as a list, its state dicts, its calls."""

import copy
import pickle

import pytest
import torch
from support import llama_mlp, randomize
from torch import nn

import tandem
import tandem.ops as ops


def names(container):
    return list(container._modules)


def five():
    return [ops.ConstantScale(float(n)) for n in range(1, 6)]


def test_it_behaves_as_a_list():
    modules = five()
    box = ops.Sequential(*modules)
    reference = list(modules)
    assert len(box) == 5 and list(box) == reference
    assert box[0] is reference[0] and box[-1] is reference[-1]
    extra = ops.Identity()
    assert box.append(extra) is box
    reference.append(extra)
    assert box.insert(2, nn.ReLU()) is box
    reference.insert(2, box[2])
    assert box.extend([ops.GELU(), ops.SiLU()]) is box
    reference.extend([box[-2], box[-1]])
    assert list(box) == reference and names(box) == [str(n) for n in range(9)]
    assert box.pop() is reference.pop() and box.pop(0) is reference.pop(0)
    del box[1]
    del reference[1]
    assert list(box) == reference
    del box[-2:]
    del reference[-2:]
    assert list(box) == reference
    box += [extra]
    assert box[-1] is extra and isinstance(box, ops.Sequential)
    both = box + [modules[0]]
    assert list(both) == [*box, modules[0]] and len(box) + 1 == len(both)


def test_new_keys_follow_the_largest_number():
    box = ops.Sequential(*five())
    del box[0]
    box.append(ops.Identity())
    assert names(box) == ["1", "2", "3", "4", "5"]


def test_a_slice_shares_modules_and_counts_anew():
    box = ops.Sequential(*five())
    part = box[1:4]
    assert isinstance(part, ops.Sequential)
    assert list(part) == list(box)[1:4] and names(part) == ["0", "1", "2"]
    assert torch.equal(part(torch.ones(1)), torch.tensor([24.0]))
    assert list(box[::-2]) == list(box)[::-2]


def test_an_insertion_leaves_names_where_they_are():
    box = ops.Sequential({"norm": ops.RMSNorm(4), "3": ops.ReLU()})
    modules = list(box)
    box.insert(0, ops.GELU())
    assert names(box) == ["norm", "3", "4"] and list(box)[1:] == modules
    box.insert(-1, ops.SiLU()).insert(9, ops.Identity())
    assert names(box) == ["norm", "3", "4", "5", "6"]
    assert [type(op) for op in box] == [ops.GELU, ops.RMSNorm, ops.SiLU, ops.ReLU, ops.Identity]
    assert torch.equal(box(torch.ones(1, 4)), torch.relu(nn.functional.silu(box[1](box[0](torch.ones(1, 4))))))
    assert names(ops.Sequential().insert(0, ops.GELU())) == ["0"]


def test_slice_assignment_is_that_of_lists():
    for index, count in [(slice(1, 3), 2), (slice(1, 3), 0), (slice(1, 3), 4), (slice(0, 0), 1), (slice(None, None, 2), 3)]:
        box, new = ops.Sequential(*five()), [ops.Identity() for _ in range(count)]
        expected = list(box)
        box(torch.ones(1))
        box[index] = new
        expected[index] = new
        assert list(box) == expected
        product = torch.tensor([float(torch.tensor([op.scale for op in expected if isinstance(op, ops.ConstantScale)]).prod())])
        assert torch.equal(box(torch.ones(1)), product)
    with pytest.raises(ValueError, match="extended slice of size 3"):
        ops.Sequential(*five())[::2] = [ops.Identity()]


def test_a_dict_names_the_modules():
    box = ops.Sequential({"norm": ops.RMSNorm(4), "up": ops.Linear(4, 4)})
    assert names(box) == ["norm", "up"] and box.up is box[1]
    assert sorted(box.state_dict()) == ["norm.weight", "up.bias", "up.weight"]
    box.up = ops.Identity()
    assert torch.equal(box(torch.ones(1, 4)), box.norm(torch.ones(1, 4)))
    box.add_module("down", ops.ConstantScale(2.0))
    assert torch.equal(box(torch.ones(1, 4)), 2 * box.norm(torch.ones(1, 4)))
    del box.down
    assert len(box) == 2


def test_every_change_counts_at_the_next_call():
    box, x = ops.Sequential(ops.ConstantScale(2.0)), torch.ones(1)
    assert box(x) == 2
    box.append(ops.ConstantScale(3.0))
    assert box(x) == 6
    box[0] = ops.ConstantScale(5.0)
    assert box(x) == 15
    box.insert(0, nn.Identity())
    assert box(x) == 15
    box.pop()
    assert box(x) == 5
    del box[1]
    assert torch.equal(box(x), x)


def test_writes_to_the_dict_of_modules_count_at_the_next_call():
    box, x = ops.Sequential(ops.ConstantScale(2.0), ops.ConstantScale(3.0)), torch.ones(1)
    assert box(x) == 6
    box._modules["1"] = ops.ConstantScale(5.0)
    assert box(x) == 10
    box._modules.update({"2": ops.ConstantScale(7.0)})
    assert box(x) == 70
    box._modules.pop("0")
    assert box(x) == 35
    del box._modules["1"]
    assert box(x) == 7
    box._modules.setdefault("3", torch.nn.Identity())
    box._modules |= {"4": ops.ConstantScale(2.0)}
    assert box(x) == 14
    box._modules.popitem()
    assert box(x) == 7
    box._modules.clear()
    assert box(x) == 1


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda box: pickle.loads(pickle.dumps(box))])
def test_a_copy_and_its_original_follow_their_lists(clone):
    box, x = ops.Sequential(ops.ConstantScale(2.0)), torch.ones(1)
    assert box(x) == 2
    copied = clone(box)
    assert copied(x) == 2
    copied[0] = ops.ConstantScale(9.0)
    assert copied(x) == 9 and box(x) == box[0].scale  # a shallow copy shares the list, as everywhere in torch
    box._modules["0"] = ops.ConstantScale(5.0)
    assert box(x) == 5 and copied(x) == copied[0].scale


def test_a_fused_operation_follows_its_list():
    fused, x = ops.FusedOperation([ops.ConstantScale(2.0), ops.ReLU()]), torch.ones(1)
    box, nested = ops.Sequential(fused), ops.FusedOperation([fused])
    assert [call(x).item() for call in (fused, box, nested)] == [2, 2, 2]
    fused.basic_ops[0] = ops.ConstantScale(9.0)
    assert [call(x).item() for call in (fused, box, nested)] == [9, 9, 9]
    fused.basic_ops.append(ops.ConstantScale(3.0))
    assert [call(x).item() for call in (fused, box, nested)] == [27, 27, 27]
    fused.basic_ops = torch.nn.ModuleList([ops.ConstantScale(5.0)])
    assert [call(x).item() for call in (fused, box, nested)] == [5, 5, 5]
    fused.basic_ops[0] = ops.ConstantScale(4.0)
    assert [call(x).item() for call in (fused, box, nested)] == [4, 4, 4]
    copied = copy.deepcopy(fused)
    assert copied(x) == 4
    copied.basic_ops[0] = ops.ConstantScale(6.0)
    assert copied(x) == 6 and fused(x) == 4


def test_a_replica_follows_its_own_list():
    box, x = ops.Sequential(ops.ConstantScale(2.0)), torch.ones(1)
    assert box(x) == 2
    replica = box._replicate_for_data_parallel()
    replica._modules["0"] = ops.ConstantScale(3.0)
    assert replica(x) == 3 and box(x) == 2
    replica._modules["0"] = ops.ConstantScale(4.0)
    assert replica(x) == 4


def test_compiled_code_follows_the_list(fresh_dynamo):
    box, x = ops.Sequential(ops.ConstantScale(2.0), ops.FusedOperation([ops.ReLU()])), torch.ones(1)
    call = torch.compile(lambda x: box(x) + box[0](x) + len(box), backend="aot_eager", fullgraph=True)
    assert call(x) == 6
    box._modules["0"] = ops.ConstantScale(5.0)
    assert call(x) == 12
    box[1].basic_ops[0] = ops.ConstantScale(2.0)
    assert call(x) == 17
    box.append(ops.ConstantScale(3.0))
    assert call(x) == 38


ERRORS = [
    (lambda box: box[5], IndexError, r"Sequential: expected an index in \[-5, 5\), got 5. It has 5 modules."),
    (lambda box: box[-6], IndexError, r"expected an index in \[-5, 5\), got -6"),
    (lambda box: box.append(3), TypeError, "Sequential: expected modules, got int. Pass operations"),
    (lambda box: box.append(ops.GELU), TypeError, r"Sequential: expected modules, got the class GELU. Write GELU\(\), with its arguments"),
    (lambda box: box.__setitem__(0, None), TypeError, "Sequential: expected modules, got NoneType"),
    (lambda box: box(torch.ones(1), torch.ones(1)), ValueError, "pipeline: expected 0 extra inputs, .*, got 1. Pass them"),
    (lambda box: box + 3, TypeError, "unsupported operand"),
]


@pytest.mark.parametrize(("change", "kind", "text"), ERRORS)
def test_errors(change, kind, text):
    with pytest.raises(kind, match=text):
        change(ops.Sequential(*five()))


def test_missing_ops_are_told():
    with pytest.raises(AttributeError, match="tandem.ops: expected a name that it has, got 'Swiglu'. Write SwiGLU."):
        ops.Swiglu  # noqa: B018
    with pytest.raises(AttributeError, match="got 'Tanh'. There are AddExtraInput, .*, SwiGLU; a torch.nn module may stand between them"):
        ops.Tanh  # noqa: B018


def test_extra_inputs_go_to_the_pipelines_that_take_them():
    box = ops.Sequential(ops.AddExtraInput(), nn.ReLU(), ops.MakeExtraOutput(), ops.AddExtraInput())
    x, a, b = torch.randn(3, 4).unbind()
    y, extra = box(x, a, b)
    assert torch.equal(extra, (x + a).relu()) and torch.equal(y, extra + b)
    for call in (box, box.verify):
        with pytest.raises(ValueError, match="Sequential: expected 2 extra inputs, .* got 3. Leave out the last."):
            call(x, a, b, b)
    with pytest.raises(ValueError, match=r"pipeline: expected 1 extra inputs, .* got 0. Pass them after the input, in order, for op 1 \(AddExtraInput\)"):
        box(x, a)


def test_an_empty_container_returns_its_input():
    x = torch.ones(2)
    assert ops.Sequential()(x) is x


def test_plain_modules_stand_between_pipelines():
    plain = nn.Linear(6, 6)
    box = ops.Sequential(ops.Linear(4, 6), ops.GELU(), plain, nn.Tanh(), ops.RMSNorm(6))
    x = torch.randn(3, 4, requires_grad=True)
    expected = box[4](torch.tanh(plain(box[1](box[0](x)))))
    torch.testing.assert_close(box(x), expected)
    box(x).sum().backward()
    assert all(p.grad is not None for p in box.parameters())


def test_state_dict_keys_are_parameter_names():
    box = ops.Sequential(ops.LayerNorm(4), ops.Linear(4, 2), ops.Linear(2, 2, bias=False))
    assert list(box.state_dict()) == [name for name, _ in box.named_parameters()]
    assert list(box.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight"]
    other = ops.Sequential(ops.LayerNorm(4), ops.Linear(4, 2), ops.Linear(2, 2, bias=False))
    assert str(other.load_state_dict(box.state_dict())) == "<All keys matched successfully>"
    assert torch.equal(other(torch.ones(1, 4)), box(torch.ones(1, 4)))
    missing = other.load_state_dict({}, strict=False).missing_keys
    assert "1.weight" in missing


def test_extra_state_of_a_class_of_the_users_own_goes_round():
    class Counting(ops.GELU):
        count = 0

        def get_extra_state(self):
            return torch.tensor([self.count])

        def set_extra_state(self, state):
            self.count = int(state)

    first, second = ops.Sequential(Counting()), ops.Sequential(Counting())
    first[0].count = 5
    assert list(first.state_dict()) == ["0._extra_state"]
    second.load_state_dict(first.state_dict())
    assert second[0].count == 5


def test_reset_parameters_of_a_class_of_the_users_own_draws_at_construction_too():
    class Ones(ops.Linear):
        def reset_parameters(self):
            torch.nn.init.ones_(self.weight)

    assert Ones(4, 3).weight.eq(1).all()
    meta = Ones(4, 3, device="meta")
    meta(torch.randn(2, 4))  # the first call makes its parameters
    assert meta.weight.eq(1).all()


def test_state_dicts_of_transformer_engine_load_and_extra_state_is_never_read(recwarn):
    state = {
        "0.weight": torch.full((4,), 2.0),
        "0._extra_state": torch.empty(0, dtype=torch.uint8),
        "1.basic_ops.0.weight": torch.ones(2, 4),
        "1.basic_ops.0._extra_state": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "1.basic_ops.1.bias": torch.zeros(2),
        "1.basic_ops.1._extra_state": torch.tensor([1], dtype=torch.uint8),
    }
    from tandem.op_base import checkpoint

    checkpoint._has_warned = False
    box = ops.Sequential(ops.RMSNorm(4), ops.Linear(4, 2))
    assert str(box.load_state_dict(state)) == "<All keys matched successfully>"
    assert torch.equal(box[1].weight, torch.ones(2, 4))
    warned = [str(w.message) for w in recwarn if "_extra_state" in str(w.message)]
    assert len(warned) == 1 and "expected no quantization state in the state dict, got a non-empty 1.basic_ops.0._extra_state of TransformerEngine" in warned[0]
    linear = ops.Linear(4, 2)
    linear.load_state_dict({"basic_ops.0.weight": torch.ones(2, 4), "basic_ops.1.bias": torch.ones(2)})
    assert torch.equal(linear.bias, torch.ones(2))


def test_parts_of_a_linear_are_views_of_its_parameters():
    linear = ops.Linear(3, 2)
    weight, bias = linear.basic_ops
    assert weight.weight is linear.weight and bias.bias is linear.bias
    linear.weight = nn.Parameter(torch.zeros(2, 3))
    assert weight.weight is linear.weight
    assert list(linear.children()) == []
    with pytest.raises(ValueError, match="Linear: expected no bias, as it was built with bias=False, got a parameter"):
        ops.Linear(3, 2, bias=False).bias = nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_are_independent(clone):
    box = randomize(llama_mlp())
    x = torch.randn(3, 16)
    expected = box(x)
    copied = clone(box)
    assert torch.equal(copied(x), expected)
    with torch.no_grad():
        copied[1].weight.zero_()
    assert torch.equal(box(x), expected) and not copied(x).any()
    copied(x).sum().backward()
    assert copied[1].basic_ops[0].weight is copied[1].weight
    assert copied[3].weight.grad is not None and box[3].weight.grad is None


def test_hooks_of_inner_ops_fire_and_numbers_stay():
    box = randomize(llama_mlp())
    x = torch.randn(3, 16, requires_grad=True)
    expected = box(x)
    expected_grad = torch.autograd.grad(expected.sum(), x)[0]
    fired = []
    handles = [
        box[1].register_forward_hook(lambda *_: fired.append("forward")),
        box[2].register_forward_pre_hook(lambda *_: fired.append("pre")),
        box[3].register_full_backward_hook(lambda *_: fired.append("backward")),
        box[1].basic_ops[0].register_forward_hook(lambda *_: fired.append("part")),
    ]
    y = box(x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], expected_grad)
    assert fired == ["part", "forward", "pre", "backward"]
    for handle in handles:
        handle.remove()
    assert torch.equal(box(x), expected) and len(fired) == 4


def test_a_hook_may_replace_the_output(fresh_dynamo):
    box = ops.Sequential(ops.ConstantScale(2.0), ops.ConstantScale(3.0), ops.ConstantScale(5.0))
    box[1].register_forward_hook(lambda module, args, output: output + 1)
    for call in (box, torch.compile(box, backend="aot_eager", fullgraph=True)):
        assert call(torch.ones(1)) == 35


def test_hooks_of_quantized_ops_change_no_number():
    box = randomize(llama_mlp())
    x = torch.randn(3, 16)
    with tandem.autocast():
        expected = box(x)
        box[1].register_forward_hook(lambda *_: None)
        assert torch.equal(box(x), expected)


def test_parametrized_weights_are_operands():
    box = ops.Sequential(ops.Linear(4, 4), ops.GELU())
    x, bias = torch.randn(2, 4), box[0].bias
    nn.utils.parametrizations.weight_norm(box[0])
    y = box(x)
    expected = nn.functional.gelu(nn.functional.linear(x, box[0].weight, bias), approximate="tanh")
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    assert all(p.grad is not None for p in box.parameters())
    nn.utils.parametrize.remove_parametrizations(box[0], "weight")
    torch.testing.assert_close(box(x), expected)


def test_nested_containers_are_modules_of_their_own():
    box = ops.Sequential(ops.ConstantScale(2.0), ops.Sequential(ops.ConstantScale(3.0)), ops.ConstantScale(5.0))
    assert box(torch.ones(1)) == 30


@pytest.mark.parametrize("register", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
def test_hooks_of_all_modules_see_the_ops(register):
    import torch.nn.modules.module as modules

    def run(box):
        seen = []
        x = torch.randn(2, 8, requires_grad=True, generator=torch.Generator().manual_seed(0))
        box(x)
        handle = getattr(modules, f"register_module_{register}")(lambda module, *_: seen.append(type(module).__name__))
        try:
            y = box(x)
            y.sum().backward()
        finally:
            handle.remove()
        before = len(seen)
        box(x)
        assert len(seen) == before
        return seen, y, x.grad

    box = randomize(ops.Sequential(ops.Linear(8, 8), ops.SiLU(), ops.Linear(8, 8)))
    plain = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.SiLU(), torch.nn.Linear(8, 8))
    with torch.no_grad():
        [ours.copy_(theirs) for ours, theirs in zip(plain.parameters(), box.parameters(), strict=True)]
    actual, expected = run(box), run(plain)
    assert actual[0] == expected[0]
    torch.testing.assert_close(actual[1:], expected[1:])


def test_hooks_of_all_modules_see_an_op_alone_once():
    seen = []
    linear, x = ops.Linear(8, 8), torch.randn(2, 8)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        torch.testing.assert_close(linear(x), torch.nn.functional.linear(x, linear.weight, linear.bias))
    finally:
        handle.remove()
    assert seen == [linear]
    assert linear._alone.called_pipelines(), "the call took the direct path"


def test_fx_traces_a_pipeline_as_one_call():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.mlp, self.last = torch.nn.Linear(8, 8), llama_mlp(8, 16), ops.Linear(8, 4)

        def forward(self, x):
            return self.last(torch.relu(self.mlp(self.first(x))))

    model = randomize(Model())
    x, other = torch.randn(3, 8, requires_grad=True), torch.randn(5, 8)
    model(x)
    traced = torch.fx.symbolic_trace(model)
    assert [node.target for node in traced.graph.nodes if "pipeline" in str(node.target)] == [torch.ops.tandem.pipeline] * 2
    torch.testing.assert_close(traced(other), model(other))
    expected = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    requested = [x, *(traced.get_parameter(name) for name, _ in model.named_parameters())]
    torch.testing.assert_close(torch.autograd.grad(traced(x).sum(), requested), expected)
    with torch.no_grad():
        model.mlp[1].weight.mul_(2)
    torch.testing.assert_close(traced(other), model(other))


FX_ROOTS = [
    (lambda: ops.Sequential(ops.Linear(8, 8), ops.GELU()), 0),
    (lambda: ops.Sequential(ops.RMSNorm(8), nn.ReLU(), ops.Linear(8, 8)), 0),
    (lambda: ops.Sequential(ops.AddExtraInput(), nn.ReLU(), ops.GELU(), ops.AddExtraInput()), 2),
    (lambda: ops.Sequential(nn.ReLU()), 0),
    (lambda: ops.Linear(8, 8), 0),
    (ops.GELU, 0),
    (ops.AddExtraInput, 1),
    (lambda: ops.FusedOperation([ops.GELU(), ops.AddExtraInput()]), 1),
]


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize(("make", "extras"), FX_ROOTS)
def test_fx_traces_from_any_root(make, extras, has_run):
    root = randomize(make())
    tensors = torch.randn(1 + extras, 3, 8).unbind()
    if has_run:
        root(*tensors)
    traced = torch.fx.symbolic_trace(root)
    torch.testing.assert_close(traced(*tensors), root(*tensors))
    placeholders = [node.target for node in traced.graph.nodes if node.op == "placeholder"]
    assert placeholders == ["input", "*extra_inputs"][: 2 if extras else 1]


@pytest.mark.parametrize("value", [None, 3.0, [1.0]])
def test_what_is_no_tensor_is_refused(value):
    for box in (ops.Sequential(ops.GELU()), ops.GELU()):
        with pytest.raises(TypeError, match=f"pipeline: expected tensors, got {type(value).__name__}. Pass its inputs as torch.Tensor."):
            box(value)
    with pytest.raises(TypeError, match="pipeline: expected tensors, got "):
        ops.AddExtraInput()(torch.ones(2), value)


@pytest.mark.parametrize("needs_grad", [False, True])
def test_the_dispatcher_op_takes_the_buffers_that_it_writes_and_no_state(needs_grad):
    description = ops.Sequential(ops.ReLU())._op_runs()[0].now.pipeline(()).description(True)
    x = torch.randn(3, requires_grad=needs_grad)
    with pytest.raises(ValueError, match=r"pipeline: expected 0 tensors as state of the recipe, got 1\. Pass"):
        torch.ops.tandem.pipeline(x, [], [], [], [torch.zeros(1)], [], description)
    with pytest.raises(ValueError, match=r"pipeline: expected 0 buffers, got 2\. Pass one tensor for each that an op writes\."):
        torch.ops.tandem.pipeline(x, [], [], [], [], [torch.zeros(1), torch.zeros(1)], description)
    (y,) = torch.ops.tandem.pipeline(x, [], [], [], [], [], description)
    assert torch.equal(y, torch.relu(x))


class Tripled(torch.Tensor):
    """Means three times what it holds, to whatever function asks."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        def unwrapped(value):
            if isinstance(value, (list, tuple)):
                return type(value)(map(unwrapped, value))
            return value.as_subclass(torch.Tensor) * 3 if isinstance(value, cls) else value

        with torch._C.DisableTorchFunctionSubclass():
            return function(*unwrapped(args), **(kwargs or {}))


class Named(torch.Tensor):
    pass


class Counting(torch.overrides.TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [lambda: ops.Linear(4, 2), lambda: ops.Sequential(ops.RMSNorm(4), ops.Linear(4, 2))])
def test_torch_function_is_asked(make):
    module, x = make(), torch.randn(3, 4)
    torch.testing.assert_close(module(x.as_subclass(Tripled)), module(3 * x))
    assert type(module(x.as_subclass(Named))) is Named
    with Counting() as mode:
        y = module(x)
    assert torch.ops.tandem.pipeline in mode.seen
    torch.testing.assert_close(y, module(x))
    linear = module if isinstance(module, ops.Linear) else module[1]
    expected = torch.nn.functional.linear(x if module is linear else module[0](x), 3 * linear.weight, linear.bias)
    weight = linear.weight.detach().as_subclass(Tripled)
    weight._is_param = True  # as torch knows parameters of other classes
    linear.weight = weight
    torch.testing.assert_close(module(x), expected)


def test_a_tensor_among_the_attributes_stands_for_a_parameter_as_in_python():
    for module in (ops.BasicLinear(4, 2), ops.Sequential(ops.BasicLinear(4, 2))):
        owner = module if isinstance(module, ops.BasicLinear) else module[0]
        owner.__dict__["weight"] = torch.zeros(2, 4)
        assert not module(torch.ones(1, 4)).any()


def test_nested_tensors_are_refused():
    rows = [torch.randn(2, 4), torch.randn(3, 4)]
    for layout in (torch.strided, torch.jagged):
        with pytest.raises(ValueError, match=r"pipeline: expected tensors whose rows have one length, got a nested tensor\. Pass a padded tensor"):
            ops.Sequential(ops.GELU())(torch.nested.nested_tensor(rows, layout=layout))


def test_parametrized_modules_that_have_run_can_be_copied():
    linear = torch.nn.utils.parametrizations.weight_norm(ops.Linear(4, 2))
    box, x = ops.Sequential(ops.RMSNorm(4), linear), torch.randn(3, 4)
    expected = box(x), linear(x)
    copied = copy.deepcopy(box)
    with torch.no_grad():
        linear.bias.fill_(9)
    torch.testing.assert_close((copied(x), copied[1](x)), expected)
    averaged = torch.optim.swa_utils.AveragedModel(box)
    torch.testing.assert_close(averaged(x), box(x))
    assert copied[1].basic_ops[0]._owner is copied[1]


def test_replicas_compute_with_parameters_of_their_own():
    """What torch.nn.DataParallel does for each device."""
    x, linear = torch.randn(3, 4), ops.Linear(4, 2)
    linear(x)
    replica = linear._replicate_for_data_parallel()
    replica.weight, replica.bias = 2 * linear.weight, linear.bias * 0 + 1
    torch.testing.assert_close(replica(x), torch.nn.functional.linear(x, 2 * linear.weight) + 1)
    replica(x).sum().backward()
    torch.testing.assert_close(linear.weight.grad, 2 * x.sum(0).expand(2, 4))
