"""`LayerNormLinear` and `LayerNormMLP` against torch, against containers of the same ops, and over ranks."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import on_ranks
from support import ACTIVATIONS, GATED, TOLERANCES, assert_equal, clamped_swiglu, of_halves, randomize, results_of, tanh_gelu
from torch.testing import assert_close

import tandem
from tandem import ops

HIDDEN, WIDE, ROWS = 8, 12, 6
REFERENCES = {**ACTIVATIONS, **GATED}
NAMES = ("clamped_swiglu", "gelu", "geglu", "glu", "qgelu", "qgeglu", "relu", "reglu", "silu", "situglu", "srelu", "sreglu", "swiglu")


def linear(**arguments: Any) -> tandem.LayerNormLinear:
    return randomize(tandem.LayerNormLinear(HIDDEN, WIDE, **arguments), seed=1)


def mlp(**arguments: Any) -> tandem.LayerNormMLP:
    return randomize(tandem.LayerNormMLP(HIDDEN, WIDE, **arguments), seed=1)


def normed(module: Any, x: torch.Tensor) -> torch.Tensor:
    weight = module.layer_norm_weight + (1 if module.zero_centered_gamma else 0)
    if module.normalization == "RMSNorm":
        return F.rms_norm(x, x.shape[-1:], weight, module.eps)
    return F.layer_norm(x, x.shape[-1:], weight, module.layer_norm_bias, module.eps)


def by_torch(module: Any, x: torch.Tensor) -> torch.Tensor:
    y = normed(module, x)
    if isinstance(module, tandem.LayerNormLinear):
        return F.linear(y, module.weight, None if module.return_bias else module.bias)
    y = REFERENCES[ops.library.class_of(module.activation)](F.linear(y, module.fc1_weight, module.fc1_bias))
    return F.linear(y, module.fc2_weight, None if module.return_bias else module.fc2_bias)


def by_ops(module: Any) -> ops.Sequential:
    """A container of the same ops with the same parameters."""
    norm = ops.RMSNorm if module.normalization == "RMSNorm" else ops.LayerNorm
    box = ops.Sequential(norm(HIDDEN, eps=module.eps, zero_centered_gamma=module.zero_centered_gamma))
    box[0].weight = module.layer_norm_weight
    if module.layer_norm_bias is not None:
        box[0].bias = module.layer_norm_bias
    names = [""] if isinstance(module, tandem.LayerNormLinear) else ["fc1_", "fc2_"]
    for name in names:
        weight, bias = getattr(module, f"{name}weight"), getattr(module, f"{name}bias")
        if name == "fc2_":
            box.append(ops.library.class_of(module.activation)())
        box.append(ops.Linear(*weight.shape[::-1], bias=bias is not None))
        box[-1].weight = weight
        if bias is not None:
            box[-1].bias = bias
    return box


CASES: dict[str, Any] = {
    **{f"{make.__name__} {norm}": (make, {"normalization": norm}) for make in (linear, mlp) for norm in ("LayerNorm", "RMSNorm")},
    **{f"mlp {name}": (mlp, {"activation": name}) for name in NAMES},
    "linear without bias": (linear, {"bias": False, "eps": 0.1}),
    "mlp without bias": (mlp, {"bias": False, "normalization": "RMSNorm"}),
    "linear zero-centered": (linear, {"zero_centered_gamma": True}),
    "mlp zero-centered": (mlp, {"zero_centered_gamma": True, "normalization": "RMSNorm"}),
}


@pytest.fixture(params=CASES)
def case(request: Any) -> Any:
    make, arguments = CASES[request.param]
    return lambda **more: make(**arguments, **more)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_and_gradients_are_those_of_torch(case: Any, dtype: torch.dtype) -> None:
    module = case(params_dtype=dtype)
    exact = copy.deepcopy(module).double()
    x = torch.randn(2, 3, HIDDEN, dtype=dtype, requires_grad=True)
    x_exact = x.detach().double().requires_grad_()
    y, expected = module(x), by_torch(exact, x_exact)
    grad = torch.randn_like(y)
    ours = torch.autograd.grad(y, [x, *module.parameters()], grad)
    theirs = torch.autograd.grad(expected, [x_exact, *exact.parameters()], grad.double())
    for got, wanted in zip((y, *ours), (expected, *theirs), strict=True):
        assert got.dtype == dtype
        assert (got.double() - wanted).abs().max() <= TOLERANCES[dtype] * max(1.0, wanted.abs().max().item()) * 4
    assert y.grad_fn.name() == "TandemPipelineBackward"
    assert {node[0].name() for node in y.grad_fn.next_functions if node[0] is not None} == {"torch::autograd::AccumulateGrad"}, "one node"


@pytest.mark.parametrize("recipe", [None, tandem.recipe.Float8CurrentScaling()])
def test_bits_and_kept_bytes_are_those_of_a_container(case: Any, recipe: Any) -> None:
    module = case()
    box, alone = by_ops(module), ops.Sequential(module)
    x = torch.randn(16, HIDDEN, requires_grad=True)
    expected = results_of(box, x, recipe=recipe, module=module)
    for call in (module, alone):
        assert_equal(results_of(call, x, recipe=recipe, module=module), expected)
    assert alone.saved_bytes() == box.saved_bytes()
    assert alone.fusions_made() == box.fusions_made() and (recipe is not None or not module.use_bias or alone.fusions_made())
    assert alone.verify(x)


def test_names_of_parameters_and_fields() -> None:
    norm = ["layer_norm_weight", "layer_norm_bias"]
    assert [*linear().state_dict()] == [*norm, "weight", "bias"]
    assert [*mlp().state_dict()] == [*norm, "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"]
    bare = mlp(bias=False, normalization="RMSNorm", activation="swiglu")
    assert {name: tuple(value.shape) for name, value in bare.state_dict().items()} == {
        "layer_norm_weight": (HIDDEN,),
        "fc1_weight": (2 * WIDE, HIDDEN),
        "fc2_weight": (HIDDEN, WIDE),
    }
    assert bare.fc1_bias is None and bare.fc2_bias is None and bare.layer_norm_bias is None
    assert [*linear(return_bias=True).state_dict()] == [*norm, "weight", "bias"]
    assert repr(linear(bias=False)) == "LayerNormLinear(8, 12, bias=False, normalization=LayerNorm)"
    part = mlp().basic_ops[1]
    assert [*part.state_dict()] == ["weight"] and part.weight.shape == (WIDE, HIDDEN)


def test_constructor_arguments_have_transformer_engines_order() -> None:
    layer = tandem.LayerNormLinear(8, 4, 1e-3, False, False, None, 1, None, torch.nn.init.ones_, False, "RMSNorm", False, torch.float64)
    assert layer.eps == 1e-3 and layer.bias is None and torch.equal(layer.weight, torch.ones(4, 8).double())
    init = (torch.nn.init.ones_, True, "RMSNorm", "relu", None, torch.nn.init.zeros_)
    block = tandem.LayerNormMLP(8, 4, 1e-3, False, True, None, None, 1, *init, False, torch.float64)
    assert torch.equal(block.fc1_weight, torch.ones(4, 8).double()) and not block.fc2_weight.any()
    assert block.return_bias and block.activation == "relu" and block.layer_norm_bias is None


def test_harmless_arguments_are_accepted() -> None:
    layer = tandem.LayerNormLinear(8, 4, name="qkv", ub_name="qkv")
    block = tandem.LayerNormMLP(8, 4, seq_length=8, micro_batch_size=2, name="mlp")
    x = torch.randn(2, 8)
    assert torch.equal(layer(x, True), layer(x, is_first_microbatch=False, fp8_output=False)) and block(x, True).shape == (2, 8)


def test_what_is_drawn() -> None:
    torch.manual_seed(0)
    block = tandem.LayerNormMLP(256, 256)
    assert abs(block.fc1_weight.std().item() - 0.023) < 1e-3 and not block.fc1_bias.any() and not block.fc2_bias.any()
    assert (block.layer_norm_weight == 1).all() and not block.layer_norm_bias.any()
    assert not tandem.LayerNormLinear(4, 4, zero_centered_gamma=True).layer_norm_weight.any()


REFUSED = [
    (tandem.LayerNormLinear, {"parameters_split": ("q", "k", "v")}, r"LayerNormLinear: expected out_features that 3 parts share evenly, got 4"),
    (
        tandem.Linear,
        {"parameters_split": ("q", "k"), "fuse_wgrad_accumulation": True},
        r"Linear: expected fuse_wgrad_accumulation=False with parameters_split, as a product adds to one main_grad, got True\. Build one module",
    ),
    *[
        (cls, {name: value}, rf"{cls.__name__}: expected {name}=(None|False), got .*\. This version knows the default only")
        for cls in (tandem.Linear, tandem.LayerNormLinear, tandem.LayerNormMLP)
        for name, value in {
            "symmetric_ar_type": "one_shot",
            **dict.fromkeys(("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad"), True),
        }.items()
    ],
    (tandem.LayerNormMLP, {"checkpoint": 3}, r"LayerNormMLP: expected checkpoint to be True or False, got 3\. Pass a bool"),
    (tandem.Linear, {"delay_wgrad_compute": "yes"}, r"Linear: expected delay_wgrad_compute to be True or False, got 'yes'\. Pass a bool"),
    (tandem.LayerNormMLP, {"activation": "tanh"}, r"expected activation to be one of clamped_swiglu, erf_geglu, .* got 'tanh'\. Name one of them"),
    (tandem.LayerNormLinear, {"normalization": "BatchNorm"}, r'expected normalization "LayerNorm" or "RMSNorm", got \'BatchNorm\'\. Name one'),
    (tandem.LayerNormLinear, {"parallel_mode": "rows"}, r'expected parallel_mode None, "column" or "row", got \'rows\'\. Name how ranks'),
    (tandem.LayerNormMLP, {"tp_size": 2}, r"expected the ranks as tp_group, as tp_size is 2, got None\. Pass the process group, or tp_size=1"),
    (tandem.LayerNormLinear, {"return_bias": 3}, r"LayerNormLinear: expected return_bias to be True or False, got 3\. Pass a bool"),
    (tandem.LayerNormLinear, {"eps": -1.0}, r"expected eps to be a finite number >= 0, got -1\.0\. eps: added"),
]


@pytest.mark.parametrize(("cls", "arguments", "message"), REFUSED, ids=[f"{c.__name__}-{[*a]}-{i}" for i, (c, a, _) in enumerate(REFUSED)])
def test_what_is_refused(cls: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=message):
        cls(8, 4, **arguments)


def test_an_activation_has_numbers() -> None:
    x, plain = torch.randn(5, 8), tandem.LayerNormMLP(8, 4, activation="clamped_swiglu")
    module = tandem.LayerNormMLP(8, 4, activation="clamped_swiglu", activation_params={"limit": 0.01, "alpha": 1.0})
    module.load_state_dict(plain.state_dict())
    h = F.layer_norm(x, (8,)) @ module.fc1_weight.t()
    assert_close(module(x), of_halves(lambda a, b: clamped_swiglu(a, b, 0.01, 1.0))(h) @ module.fc2_weight.t())
    assert not torch.equal(module(x), plain(x))
    with pytest.raises(ValueError, match="expected names in activation_params among the options of clamped_swiglu .*, got 'bound'. Leave it out."):
        tandem.LayerNormMLP(8, 4, activation="clamped_swiglu", activation_params={"bound": 1.0})


def test_what_a_call_refuses() -> None:
    with pytest.raises(NotImplementedError, match=r"LayerNormLinear: expected fp8_output=False, got True\. This version knows the default only"):
        linear()(torch.randn(2, HIDDEN), fp8_output=True)
    with pytest.raises(ValueError, match=r"MLP: expected no fc1_bias, as it was built with bias=False, got a parameter\. Build it with bias"):
        mlp(bias=False).fc1_bias = torch.nn.Parameter(torch.zeros(WIDE))
    with pytest.raises(ValueError, match=r'expected no layer_norm_bias, as it was built with normalization="RMSNorm", got a parameter\. Build it'):
        linear(normalization="RMSNorm").layer_norm_bias = torch.nn.Parameter(torch.zeros(HIDDEN))
    for container in (ops.Sequential(linear(return_bias=True)), ops.FusedOperation([linear(return_bias=True)])):
        with pytest.raises(ValueError, match=r"expected a module whose output is what the next op takes, got one with return_bias=True\. Call it"):
            container(torch.randn(2, HIDDEN))
    with pytest.raises(KeyError, match=r"expected one of the parameters \['weight'\] that the part shares with its owner, got other\. Set it"):
        linear().basic_ops[1].register_parameter("other", torch.nn.Parameter(torch.zeros(1)))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("make", [linear, mlp])
def test_what_else_is_returned(make: Any, compiled: bool) -> None:
    torch._dynamo.reset()
    x = torch.randn(4, HIDDEN, requires_grad=True)
    for return_bias in (False, True):
        for return_norm in (False, True):
            module = make(return_bias=return_bias, return_layernorm_output=return_norm, return_layernorm_output_gathered=return_norm)
            outputs = (torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module)(x)
            bias = module.bias if make is linear else module.fc2_bias
            expected = [by_torch(module, x), *([bias] if return_bias else []), *([normed(module, x)] if return_norm else [])]
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            assert_close(list(outputs), expected, rtol=1e-4, atol=1e-5)
            ours = torch.autograd.grad(sum(y.square().sum() for y in outputs), [x, *module.parameters()])
            theirs = torch.autograd.grad(sum(y.square().sum() for y in expected), [x, *module.parameters()])
            assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    bare = make(bias=False, return_bias=True)
    assert bare(x)[1] is None
    low = make(return_bias=True)
    assert low.to(torch.bfloat16)(x.bfloat16())[1].dtype == torch.bfloat16


def test_an_output_of_the_norm_follows_that_of_a_container() -> None:
    module = mlp(return_layernorm_output=True)
    box, x = ops.Sequential(module, ops.ReLU()), torch.randn(4, HIDDEN)
    y, norm = box(x)
    assert_close((y, norm), (by_torch(module, x).relu(), normed(module, x)), rtol=1e-4, atol=1e-5)
    handle = module.register_forward_hook(lambda *_: None)
    assert_close(box(x), (y, norm))
    assert "has a forward hook" in box.explain()
    handle.remove()


def test_neighbours_fuse_with_the_parts() -> None:
    module = linear(bias=False, normalization="RMSNorm")
    box = ops.Sequential(module, ops.Bias(WIDE), ops.GELU())
    x = torch.randn(4, HIDDEN, requires_grad=True)
    assert_close(box(x), tanh_gelu(by_torch(module, x)))
    assert "linear_bias_activation" in box.fusions_made(), box.fusions_made()


@pytest.mark.parametrize("recipe", [None, tandem.recipe.Float8CurrentScaling()])
def test_compiled_code_has_no_break(recipe: Any, fresh_dynamo: None) -> None:
    block = torch.nn.Sequential(linear(normalization="RMSNorm"), torch.nn.Linear(WIDE, HIDDEN), mlp(activation="swiglu", bias=False))
    x = torch.randn(16, HIDDEN)

    def call(x: torch.Tensor) -> torch.Tensor:
        with tandem.autocast(enabled=recipe is not None, recipe=recipe or tandem.recipe.Float8CurrentScaling()):
            return block(x)

    y, *ours = results_of(torch.compile(call, fullgraph=True), x, module=block)
    expected, *theirs = results_of(call, x, module=block)
    assert_close(y, expected)
    assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_weights_go_into_main_grad(compiled: bool) -> None:
    torch._dynamo.reset()
    for make, names in ((linear, ["weight"]), (mlp, ["fc1_weight", "fc2_weight"])):
        module, plain = make(fuse_wgrad_accumulation=True), make()
        for name in names:
            getattr(module, name).main_grad = torch.ones_like(getattr(module, name))
        x = torch.randn(5, HIDDEN)
        (torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module)(x).square().sum().backward()
        plain(x).square().sum().backward()
        for name, param in plain.named_parameters():
            own = getattr(module, name)
            assert_close(own.main_grad - 1 if name in names else own.grad, param.grad, rtol=1e-4, atol=1e-3)
            assert name not in names or own.grad is None


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("has_run", [False, True])
def test_copies_are_independent(clone: Any, has_run: bool) -> None:
    for module in (linear(), mlp(), mlp(return_bias=True)):
        x = torch.randn(3, HIDDEN)
        expected = by_torch(module, x)
        if has_run:
            module(x)
        copied = clone(module)
        first = copied.basic_ops[1]
        assert first.weight is (copied.weight if isinstance(module, tandem.LayerNormLinear) else copied.fc1_weight) and first._owner is copied
        with torch.no_grad():
            for param in copied.parameters():
                param.zero_()
        y, y_copied = module(x), copied(x)
        assert_close(y[0] if module.return_bias else y, expected, rtol=1e-4, atol=1e-5)
        assert not (y_copied[0] if module.return_bias else y_copied).any()


def test_replaced_and_frozen_parameters_and_options_count_at_the_next_call() -> None:
    module = mlp()
    box, x = ops.Sequential(module), torch.randn(3, HIDDEN)
    box(x)
    module.fc2_weight = torch.nn.Parameter(torch.randn(HIDDEN, WIDE))
    module._parameters["fc1_bias"] = torch.nn.Parameter(torch.randn(WIDE))
    module.layer_norm_weight.data = torch.randn(HIDDEN)
    module.basic_ops[1].weight = torch.nn.Parameter(torch.randn(WIDE, HIDDEN))
    module.eps, module.zero_centered_gamma = 0.5, True
    for call in (module, box):
        assert_close(call(x), by_torch(module, x), rtol=1e-4, atol=1e-5)
    module.requires_grad_(False)
    assert not box(x).requires_grad
    module.fc1_bias.requires_grad_()
    box(x).sum().backward()
    assert module.fc1_bias.grad is not None and module.fc1_weight.grad is None
    replica = module._replicate_for_data_parallel()
    for name, value in module.named_parameters():
        setattr(replica, name, 2 * value)
    expected = copy.deepcopy(module)
    with torch.no_grad():
        for param in expected.parameters():
            param.mul_(2)
    assert_close(replica(x), by_torch(expected, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cls", [tandem.LayerNormLinear, tandem.LayerNormMLP])
def test_meta_device(cls: Any) -> None:
    module = cls(HIDDEN, WIDE, device="meta", params_dtype=torch.bfloat16)
    assert {(param.device.type, param.dtype) for param in module.parameters()} == {("meta", torch.bfloat16)}
    assert module(torch.empty(2, HIDDEN, device="meta", dtype=torch.bfloat16)).is_meta
    module.to_empty(device="cpu")
    module.reset_parameters()
    assert (module.layer_norm_weight == 1).all()
    x = torch.randn(2, HIDDEN).bfloat16()
    assert_close(module(x), by_torch(module, x))
    with torch.device("meta"):
        assert cls(4, 4).layer_norm_weight.is_meta


def test_functional_calls_and_exported_programs() -> None:
    module, x = mlp(activation="geglu"), torch.randn(3, HIDDEN)
    doubled = {name: 2 * param.detach() for name, param in module.named_parameters()}
    expected = copy.deepcopy(module)
    expected.load_state_dict(doubled)
    assert_close(torch.func.functional_call(module, doubled, (x,)), by_torch(expected, x), rtol=1e-4, atol=1e-4)
    gradients = torch.func.grad(lambda params: torch.func.functional_call(module, params, (x,)).square().sum())(doubled)
    by_torch(expected, x).square().sum().backward()
    assert_close(gradients, {name: param.grad for name, param in expected.named_parameters()}, rtol=1e-3, atol=1e-2)
    assert_close(torch.export.export(module, (x,)).module()(x), by_torch(module, x), rtol=1e-4, atol=1e-4)


def test_a_parametrized_weight_counts() -> None:
    module, x = mlp(), torch.randn(3, HIDDEN)
    torch.nn.utils.parametrizations.weight_norm(module, "fc1_weight")
    with torch.no_grad():
        module.parametrizations.fc1_weight.original0.mul_(2)
    for call in (module, copy.deepcopy(module)):
        assert_close(call(x), by_torch(module, x), rtol=1e-4, atol=1e-4)


def test_fusions_written_in_python_see_the_parts() -> None:
    seen = []

    class Fused(ops.FusedOperation):
        def fuser_forward(self, basic_op_ctxs: Any, input_: Any, *, basic_op_extra_inputs: Any, **_: Any) -> Any:
            return F.linear(input_, self.basic_ops[0].weight), [()]

    def fuse(found: list[Any], *, recipe: Any) -> list[Any]:
        seen.extend(found)
        return [Fused([op]) if isinstance(op, ops.BasicLinear) else op for op in found]

    module = mlp(activation="relu")
    x = torch.randn(3, HIDDEN)
    with ops.register_forward_fusion(fuse):
        assert_close(module(x), by_torch(module, x), rtol=1e-4, atol=1e-5)
        assert_close(torch.compile(module, fullgraph=True, backend="aot_eager")(x), by_torch(module, x), rtol=1e-4, atol=1e-5)
    assert {type(op) for op in seen} >= {ops.LayerNorm, ops.BasicLinear, ops.Bias, ops.ReLU}


# Over ranks.


def slice_of(value: torch.Tensor, name: str, whole: Any, rank: int, size: int) -> torch.Tensor:
    """The part of a parameter, or of its gradient, that a rank holds."""
    if isinstance(whole, tandem.LayerNormMLP):
        dimension = {"fc1_weight": 0, "fc1_bias": 0, "fc2_weight": 1}.get(name)
        if dimension == 0 and whole.activation in ("geglu", "swiglu"):
            return torch.cat([half.chunk(size)[rank] for half in value.chunk(2)])
    else:
        dimension = {"weight": 0, "bias": 0}.get(name)
    return value if dimension is None else value.chunk(size, dimension)[rank]


def check_rank(rank: int, size: int, make: Any, sequence_parallel: bool, compiled: bool, arguments: dict[str, Any]) -> None:
    whole = make(**arguments)
    parallel = {"parallel_mode": "column"} if make is linear else {"set_parallel_mode": True}
    module = make(**arguments, **parallel, tp_group=dist.group.WORLD, tp_size=size, sequence_parallel=sequence_parallel)
    with torch.no_grad():
        for name, param in module.named_parameters():
            param.copy_(slice_of(getattr(whole, name), name, whole, rank, size))
    own = slice(rank * ROWS // size, (rank + 1) * ROWS // size) if sequence_parallel else slice(None)
    x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(3)).requires_grad_()
    x_own = x.detach()[own].clone().requires_grad_()
    expected, y = whole(x), (torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module)(x_own)
    expected, y = expected if isinstance(expected, tuple) else (expected,), y if isinstance(y, tuple) else (y,)
    grads = [torch.randn(value.shape, generator=torch.Generator().manual_seed(4)) for value in expected]
    features = slice(rank * WIDE // size, (rank + 1) * WIDE // size) if make is linear else slice(None)
    parts = [(own if make is mlp else slice(None), features), (own, slice(None))]
    if arguments.get("return_bias"):
        parts.insert(1, (features if make is linear else slice(None),))
    for got, wanted, part in zip(y, expected, parts, strict=False):
        assert_close(got, wanted[part], rtol=1e-4, atol=1e-5)
    torch.autograd.backward(expected, grads)
    torch.autograd.backward(y, [grad[part] for grad, part in zip(grads, parts, strict=False)])
    assert_close(x_own.grad, x.grad[own], rtol=1e-4, atol=1e-4)
    for name, param in module.named_parameters():
        got, wanted = param.grad, slice_of(getattr(whole, name).grad, name, whole, rank, size)
        assert hasattr(param, "partition_dim") is (wanted.shape != getattr(whole, name).shape)
        if sequence_parallel and not hasattr(param, "partition_dim"):  # each rank has seen its rows only, which the attribute tells
            assert param.sequence_parallel is True
            if not (arguments.get("return_bias") and name == "fc2_bias"):
                dist.all_reduce(got)
        assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def check_row(rank: int, size: int, sequence_parallel: bool) -> None:
    """Each rank norms its own features; the bias is added once."""
    parallel: dict[str, Any] = {"parallel_mode": "row", "tp_group": dist.group.WORLD, "sequence_parallel": sequence_parallel}
    module = tandem.LayerNormLinear(size * HIDDEN, WIDE, **parallel)
    assert module.weight.shape == (WIDE, HIDDEN) and module.layer_norm_weight.shape == (HIDDEN,)
    assert module.weight.partition_dim == 1 and module.bias.sequence_parallel is sequence_parallel
    with torch.no_grad():
        module.bias.fill_(3.0)
    x = torch.randn(ROWS, HIDDEN)
    y = F.linear(normed(module, x), module.weight)
    dist.all_reduce(y)
    rows = slice(rank * ROWS // size, (rank + 1) * ROWS // size) if sequence_parallel else slice(None)
    assert_close(module(x), y[rows] + 3, rtol=1e-4, atol=1e-5)


def check_gathered(rank: int, size: int) -> None:
    """What is returned is the rows of all ranks, and its gradient counts."""
    arguments = {"tp_group": dist.group.WORLD, "parallel_mode": "column", "sequence_parallel": True, "return_layernorm_output": True}
    x = torch.randn(ROWS // size, HIDDEN, requires_grad=True)
    _, own = linear(**arguments)(x)
    y, gathered = linear(**arguments, return_layernorm_output_gathered=True)(x)
    assert y.shape == (ROWS, WIDE // size) and own.shape == x.shape
    rows = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    assert gathered.shape == (ROWS, HIDDEN) and torch.equal(gathered[rows], own)
    (expected,) = torch.autograd.grad((size * own).square().sum() / size, x)
    assert_close(torch.autograd.grad(gathered.square().sum(), x)[0], expected)


def check_copies_and_errors(rank: int, size: int) -> None:
    module = mlp(set_parallel_mode=True, tp_group=dist.group.WORLD)
    x = torch.randn(4, HIDDEN)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(copied(x), module(x)) and copied.tp_group is module.tp_group
    with pytest.raises(ValueError, match=f"LayerNormMLP: expected ffn_hidden_size that {size} ranks share evenly, got 7. Use a multiple of {size}"):
        tandem.LayerNormMLP(8, 7, set_parallel_mode=True, tp_group=dist.group.WORLD)
    alone = tandem.LayerNormMLP(HIDDEN, WIDE, tp_group=dist.group.WORLD)  # whose ranks compute without each other
    assert alone.fc1_weight.shape == (WIDE // size, HIDDEN) and alone.tp_group is None
    assert_close(alone(x), by_torch(alone, x))


ON_RANKS = [
    (make, sequence_parallel, False, arguments)
    for make in (linear, mlp)
    for sequence_parallel in (False, True)
    for arguments in ({}, {"bias": False, "normalization": "RMSNorm"}, {"return_bias": True})
]
ON_RANKS += [(mlp, True, False, {"activation": "swiglu"}), (mlp, True, True, {}), (linear, False, True, {})]


@pytest.mark.parametrize(("make", "sequence_parallel", "compiled", "arguments"), ON_RANKS)
def test_two_ranks_equal_one_process(make: Any, sequence_parallel: bool, compiled: bool, arguments: dict[str, Any]) -> None:
    on_ranks(2, check_rank, make, sequence_parallel, compiled, arguments)


@pytest.mark.parametrize(
    ("check", "arguments"),
    [(check_row, [False]), (check_row, [True]), (check_gathered, []), (check_copies_and_errors, [])],
    ids=["row", "row, sequence_parallel", "gathered", "copies and errors"],
)
def test_on_two_ranks(check: Any, arguments: list[bool]) -> None:
    on_ranks(2, check, *arguments)
