"""The modules as plain functions: what modules give, with no module, no autograd and no memory that is shared."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest
import torch
from support import assert_equal
from torch.testing import assert_close

import tandem
from tandem.modules import functional

pytestmark = pytest.mark.usefixtures("collections_pass_over_older_objects")
MXFP8 = tandem.recipe.MXFP8BlockScaling()
RECIPES = {
    "none": None,
    "current": tandem.recipe.Float8CurrentScaling(),
    "block": tandem.recipe.Float8BlockScaling(),
    "mxfp8": tandem.recipe.MXFP8BlockScaling(),
    "nvfp4": tandem.recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
}
FUNCTIONS = {
    name: [getattr(functional, f"{name}_{part}") for part in ("forward", "setup_context", "backward")]
    for name in ("linear", "layernorm_linear", "layernorm_mlp", "grouped_linear")
}


MADE = {
    "linear": (lambda **options: tandem.Linear(32, 48, **options), functional.LinearArgs),
    "layernorm_linear": (lambda **options: tandem.LayerNormLinear(32, 48, **options), functional.LayerNormLinearArgs),
    "layernorm_mlp": (lambda **options: tandem.LayerNormMLP(32, 64, **options), functional.LayerNormMLPArgs),
}
CASES = {
    "linear": ("linear", {}),
    "linear without bias": ("linear", {"bias": False}),
    "layernorm_linear": ("layernorm_linear", {}),
    "layernorm_linear rms": ("layernorm_linear", {"normalization": "RMSNorm", "eps": 0.1, "zero_centered_gamma": True}),
    "layernorm_linear output": ("layernorm_linear", {"return_layernorm_output": True}),
    "layernorm_mlp": ("layernorm_mlp", {}),
    "layernorm_mlp swiglu": ("layernorm_mlp", {"activation": "swiglu", "normalization": "RMSNorm", "bias": False}),
    "layernorm_mlp clamped": ("layernorm_mlp", {"activation": "clamped_swiglu", "activation_params": {"limit": 5.0}}),
    "layernorm_mlp checkpoint": ("layernorm_mlp", {"checkpoint": True}),
}


def tensors_of(module):
    """The parameters, by their names, as fields of arguments."""
    return {name: param.detach() for name, param in module.named_parameters()}


@pytest.fixture(params=CASES)
def case(request):
    kind, options = CASES[request.param]
    make, args = MADE[kind]
    module, more = make(**options), {name: value for name, value in options.items() if name != "bias"}
    return kind, module, lambda x, **others: args(inp=x, **tensors_of(module), **more, **others)


def run(kind, args, *grads, **options):
    forward, setup, backward = FUNCTIONS[kind]
    results = forward(args)
    context = setup(args, results)
    return results, context, backward(context, *grads, **options)


def context_of(args):
    """What backward of a linear reads, once forward has run."""
    return functional.linear_setup_context(args, functional.linear_forward(args))


@pytest.mark.parametrize("recipe", RECIPES)
def test_they_are_the_modules(case, recipe):
    kind, module, make = case
    recipe = RECIPES[recipe]
    x = torch.randn(2, 16, 32)
    own = x.clone().requires_grad_()
    with tandem.autocast(enabled=recipe is not None, recipe=recipe):
        outputs = module(own)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = [torch.randn_like(y) for y in outputs]
    expected = torch.autograd.grad(outputs, [own, *module.parameters()], grads)
    results, _, gradients = run(kind, make(x, recipe=recipe), *grads)
    assert torch.equal(results.y, outputs[0]) and not results.y.requires_grad and results.weight_workspaces is None
    if len(outputs) > 1:
        assert torch.equal(results.layernorm_output, outputs[1])
    assert [*gradients] == ["inp", *[name for name, _ in module.named_parameters()]]
    assert all(map(torch.equal, gradients.values(), expected))


def test_nothing_shares_memory_with_an_argument(case):
    kind, _, make = case
    args = make(torch.randn(2, 16, 32))
    results = FUNCTIONS[kind][0](args)
    arguments = {value.untyped_storage().data_ptr() for value in (getattr(args, each.name) for each in dataclasses.fields(args)) if isinstance(value, torch.Tensor)}
    outputs = [results.y] + ([] if results.layernorm_output is None else [results.layernorm_output])
    made = [tensor.untyped_storage().data_ptr() for tensor in (*outputs, *results.saved) if tensor is not None]
    assert arguments.isdisjoint(made) and len({y.data_ptr() for y in outputs}) == len(outputs)


def test_activations_are_gone_after_backward(case):
    kind, _, make = case
    forward, setup, backward = FUNCTIONS[kind]
    args = make(torch.randn(64, 32))
    results = forward(args)
    grad, outputs = torch.ones_like(results.y), 2 if results.layernorm_output is not None else 1
    context = setup(args, results)
    alive = [weakref.ref(tensor) for tensor in context.saved()]
    kept = context.saved_bytes()
    assert (kept == 0) == (kind == "linear" or getattr(args, "checkpoint", False))
    del results
    first = backward(context, grad, retain=True)
    assert context.saved_bytes() == kept
    second = backward(context, grad)
    assert context.saved_bytes() == 0
    gc.collect()
    assert not any(ref() is not None for ref in alive) or outputs > 1
    assert all(map(torch.equal, first.values(), second.values()))
    with pytest.raises(RuntimeError, match="backward: expected a context whose activations are there, got one whose backward has run"):
        backward(context, grad)


@pytest.mark.parametrize("retain", [False, True])
def test_activations_of_modules_are_gone_after_backward(case, retain):
    _, module, _ = case
    alive = []

    class Held:
        def __init__(self, tensor):
            self.tensor = tensor

    def pack(tensor):
        held = Held(tensor)
        alive.append(weakref.ref(held))
        return held

    own = {param.untyped_storage().data_ptr() for param in module.parameters()}

    def count():
        gc.collect()
        there = [held.tensor for ref in alive if (held := ref()) is not None]
        return sum(tensor.nbytes for tensor in there if tensor.untyped_storage().data_ptr() not in own)

    x = torch.randn(64, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
        y = module(x)
    y = y[0] if isinstance(y, tuple) else y
    before = count()
    assert before > 0
    y.backward(torch.ones_like(y), retain_graph=retain)
    assert count() == (before if retain else 0)
    if retain:
        y.backward(torch.ones_like(y))
        assert count() == 0


@pytest.mark.parametrize("absent", ["fc1_bias", "fc2_bias"])
def test_one_product_without_bias(absent):
    module = tandem.LayerNormMLP(32, 64)
    torch.nn.init.normal_(module.get_parameter("fc1_bias" if absent == "fc2_bias" else "fc2_bias"))
    args = functional.LayerNormMLPArgs(inp=torch.ones(4, 32), **{**tensors_of(module), absent: None})
    results, _, gradients = run("layernorm_mlp", args, torch.ones(4, 32))
    assert torch.equal(results.y, module(torch.ones(4, 32))) and absent not in gradients and len(gradients) == 6


def test_groups():
    module = tandem.GroupedLinear(3, 32, 16)
    x, splits = torch.randn(40, 32, requires_grad=True), [10, 0, 30]
    for recipe in (None, MXFP8):
        with tandem.autocast(enabled=recipe is not None, recipe=recipe):
            y = module(x, splits)
        expected = torch.autograd.grad(y, [x, *module.parameters()], torch.ones_like(y))
        weights, biases = ([getattr(module, f"{name}{group}").detach() for group in range(3)] for name in ("weight", "bias"))
        args = functional.GroupedLinearArgs(inp=x.detach(), m_splits=splits, weights=weights, biases=biases, recipe=recipe)
        results, _, gradients = run("grouped_linear", args, torch.ones_like(y))
        assert torch.equal(results.y, y)
        assert all(map(torch.equal, [gradients["inp"], *gradients["weights"], *gradients["biases"]], expected))


def test_workspaces_of_groups_are_individual_tensors():
    weights = [torch.randn(16, 32) for _ in range(3)]
    args = dict(inp=torch.randn(40, 32), m_splits=[10, 0, 30], weights=weights, recipe=MXFP8)
    first = functional.grouped_linear_forward(functional.GroupedLinearArgs(**args, weight_workspaces=()))
    assert all(isinstance(tensor, torch.Tensor) for tensor in first.weight_workspaces) and len(first.weight_workspaces) % 3 == 0
    again = functional.grouped_linear_forward(functional.GroupedLinearArgs(**args, weight_workspaces=first.weight_workspaces))
    plain = functional.grouped_linear_forward(functional.GroupedLinearArgs(**args))
    assert torch.equal(first.y, plain.y) and torch.equal(again.y, plain.y)


def test_what_is_asked_for_and_where_it_goes():
    x, weight = torch.randn(4, 8), torch.randn(6, 8)
    only = functional.LinearArgs(inp=x, weight=weight, needs_grad=["weight"])
    _, _, gradients = run("linear", only, torch.ones(4, 6))
    assert [*gradients] == ["weight"]
    main_grad = torch.ones(6, 8)
    into = functional.LinearArgs(inp=x, weight=weight, main_grads={"weight": main_grad})
    _, _, gradients = run("linear", into, torch.ones(4, 6))
    assert gradients["weight"] is None
    assert_close(main_grad, 1 + torch.ones(6, 4) @ x)
    overwriting = functional.LinearArgs(inp=x, weight=weight, main_grads={"weight": main_grad}, overwrite_main_grad=True)
    run("linear", overwriting, torch.ones(4, 6))
    assert_close(main_grad, torch.ones(6, 4) @ x)


def test_workspaces_are_passed_in_and_returned():
    x, weight = torch.randn(16, 32), torch.randn(48, 32)
    plain, _, expected = run("linear", functional.LinearArgs(inp=x, weight=weight, recipe=MXFP8), torch.ones(16, 48))
    first, _, gradients = run("linear", functional.LinearArgs(inp=x, weight=weight, recipe=MXFP8, weight_workspaces=()), torch.ones(16, 48))
    assert first.weight_workspaces and torch.equal(first.y, plain.y) and torch.equal(gradients["inp"], expected["inp"])
    args = functional.LinearArgs(inp=x, weight=weight, recipe=MXFP8, weight_workspaces=first.weight_workspaces)
    again = functional.linear_forward(args)
    assert [t.data_ptr() for t in again.weight_workspaces] == [t.data_ptr() for t in first.weight_workspaces]
    weight.mul_(2)  # never stale
    assert torch.equal(functional.linear_forward(args).y, functional.linear_forward(functional.LinearArgs(inp=x, weight=weight, recipe=MXFP8)).y)


def test_a_recipe_with_a_state_has_it_passed_in():
    module = tandem.Linear(32, 48)
    recipe = tandem.recipe.DelayedScaling(amax_history_len=4)
    x = torch.randn(16, 32)
    state = [torch.tensor([1])]
    for slots in (2, 1):
        state += [torch.ones(slots), torch.zeros(4, slots), torch.zeros(1, dtype=torch.int64)]
    args = functional.LinearArgs(inp=x, weight=module.weight.detach(), bias=module.bias.detach(), recipe=recipe, recipe_state=state)
    results, _, gradients = run("linear", args, torch.ones(16, 48))
    with tandem.autocast(recipe=recipe):
        y = module(x)
        y.backward(torch.ones(16, 48))
    assert torch.equal(results.y, y) and torch.equal(gradients["weight"], module.weight.grad)
    assert state[2][0].tolist() == pytest.approx([x.abs().max().item(), module.weight.abs().max().item()])


def test_errors():
    x, weight, ones = torch.randn(4, 8), torch.randn(6, 8), torch.ones(8)
    args = functional.LinearArgs(inp=x, weight=weight)
    results = functional.linear_forward(args)
    context = functional.linear_setup_context(args, results)
    x.add_(1)
    with pytest.raises(ValueError, match=r"backward: expected .* unchanged since the setup of the context, as backward reads it, got an in-place write"):
        functional.linear_backward(context, torch.ones(4, 6))
    with pytest.raises(ValueError, match=r"LinearArgs: expected needs_grad to name some of inp, weight, got 'weigth'"):
        functional.linear_forward(functional.LinearArgs(inp=x, weight=weight, needs_grad=["weigth"]))
    with pytest.raises(ValueError, match=r'LayerNormLinear: expected normalization "LayerNorm" or "RMSNorm", got \'Norm\''):
        functional.layernorm_linear_forward(functional.LayerNormLinearArgs(inp=x, weight=weight, layer_norm_weight=ones, normalization="Norm"))
    with pytest.raises(TypeError, match="LayerNormLinearArgs: expected layer_norm_bias to be a tensor, got NoneType. Pass one."):
        functional.layernorm_linear_forward(functional.LayerNormLinearArgs(inp=x, weight=weight, layer_norm_weight=ones))
    normed = functional.LayerNormLinearArgs(inp=x, weight=weight, layer_norm_weight=ones, layer_norm_bias=torch.zeros(8))
    other = functional.layernorm_linear_forward(normed)
    with pytest.raises(ValueError, match=r"setup_context: expected the \d+ tensors that forward of these arguments saves, got \d+"):
        functional.linear_setup_context(args, other)
    with pytest.raises(ValueError, match=r"backward: expected 1 gradients, one per output, got 2"):
        context._inner.backward([torch.ones(4, 6), None], False)
    with pytest.raises(ValueError, match="backward: expected a gradient of y alone, as no output of a norm was returned, got grad_layernorm_output"):
        functional.backward(context, torch.ones(4, 6), torch.ones(4, 8))


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_are_checked_before_any_work(recipe):
    x, weight = torch.randn(17, 32), torch.randn(48, 32)
    args = functional.LinearArgs(inp=x, weight=weight, recipe=RECIPES[recipe])
    context = context_of(args)
    for shape in ((18, 48), (16, 48), (2_000_000, 48), (1, 48), (48,), (17, 40), (1, 17, 48)):
        with pytest.raises(ValueError, match=r"backward: expected a gradient of shape \[17, 48\], as output 0 has, got \[.*\]. Expand or reshape it."):
            functional.linear_backward(context, torch.ones(1).expand(shape))
    for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.complex64):
        with pytest.raises(TypeError, match="backward: expected a gradient in Float, as output 0 is, got .*. Convert it with .to()"):
            functional.linear_backward(context, torch.ones(17, 48, dtype=dtype))
    with pytest.raises(ValueError, match="backward: expected a gradient on cpu, where output 0 is, got one on meta. Move it with .to()"):
        functional.linear_backward(context, torch.ones(17, 48, device="meta"))
    assert functional.linear_backward(context, torch.ones(17, 48))["weight"].isfinite().all()  # nothing has run before


@pytest.mark.parametrize(
    "gradient",
    [
        torch.tensor(1j).conj().imag.expand(4, 8),
        torch._neg_view(torch.randn(4, 8)),
        torch.randn(4, 8, dtype=torch.complex64).conj().imag,
        torch.randn(8, 4).t(),
        torch.randn(4, 16)[:, ::2],
        torch.randn(8).expand(4, 8),
    ],
    ids=["negative, expanded", "negative", "negative, stepped", "transposed", "stepped", "expanded"],
)
def test_layouts_of_gradients(gradient):
    args = functional.LinearArgs(inp=torch.randn(4, 8), weight=torch.randn(8, 8))
    context = context_of(args)
    found, dense = (functional.linear_backward(context, each, retain=True) for each in (gradient, torch.empty(4, 8).copy_(gradient)))
    assert_close(found, dense, rtol=1e-5, atol=1e-5)
    assert_close(found["inp"], gradient @ args.weight, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("groups", [None, MXFP8])
def test_gradients_of_groups_are_checked(groups):
    args = functional.GroupedLinearArgs(inp=torch.randn(9, 64), m_splits=[4, 5], weights=[torch.randn(48, 64)] * 2, recipe=groups)
    context = functional.grouped_linear_setup_context(args, functional.grouped_linear_forward(args))
    with pytest.raises(ValueError, match=r"backward: expected a gradient of shape \[9, 48\], as output 0 has, got \[5000, 48\]"):
        functional.grouped_linear_backward(context, torch.ones(5000, 48))


@pytest.mark.parametrize("recipe", [None, tandem.recipe.MXFP8BlockScaling(backward_override="high_precision")])
@pytest.mark.parametrize("shape", [(4, 32), (2, 2, 32)])
@pytest.mark.parametrize("which", ["inp", "weight"])
def test_writes_between_the_functions_are_noticed(recipe, shape, which):
    fields_ = {"inp": torch.randn(shape), "weight": torch.randn(48, 32)}
    args = functional.LinearArgs(**fields_, recipe=recipe)
    results = functional.linear_forward(args)
    fields_[which].mul_(2)
    with pytest.raises(ValueError, match="setup_context: expected .* unchanged since forward, as backward reads it, got an in-place write"):
        functional.linear_setup_context(args, results)
    context = context_of(args)
    fields_[which].mul_(2)
    with pytest.raises(ValueError, match="backward: expected .* unchanged since the setup of the context, as backward reads it, got an in-place write"):
        functional.linear_backward(context, torch.ones(results.y.shape))
    others = functional.LinearArgs(**(fields_ | {which: fields_[which].clone()}), recipe=recipe)
    with pytest.raises(ValueError, match="setup_context: expected results of these arguments, got other memory as .*, which backward reads. Pass the arguments"):
        functional.linear_setup_context(others, functional.linear_forward(args))


@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_writes_into_workspaces_are_noticed(case, recipe):
    kind, _, make = case
    forward, setup, backward = FUNCTIONS[kind]
    x, more = torch.randn(16, 32), {"recipe": RECIPES[recipe], "weight_workspaces": ()}
    args = make(x, **more)
    results = forward(args)
    grads = [torch.ones_like(each) for each in (results.y, results.layernorm_output) if each is not None]
    wanted = backward(setup(args, results), *grads)
    codes = [place for place, tensor in enumerate(results.weight_workspaces) if tensor.dtype != torch.int64]
    assert codes
    for place in codes:
        results = forward(args)
        context = setup(args, results)
        results.weight_workspaces[place].zero_()
        with pytest.raises(ValueError, match="backward: expected the tensors of weight_workspaces unchanged since the setup of the context but by the library"):
            backward(context, *grads)
        with pytest.raises(ValueError, match="setup_context: expected the tensors of weight_workspaces unchanged since forward but by the library, as backward"):
            setup(args, results)
    results = forward(args)
    context = setup(args, results)
    doubled = {field.name: 2 * getattr(args, field.name) for field in dataclasses.fields(args) if field.name.endswith("weight")}
    forward(dataclasses.replace(args, **doubled, weight_workspaces=results.weight_workspaces))  # the library writes them, and knows of what
    assert_equal(backward(context, *grads), wanted)


def test_all_that_forward_has_returned_is_asked_for():
    args = functional.LinearArgs(inp=torch.randn(4, 8), weight=torch.randn(6, 8))
    results = functional.linear_forward(args)
    with pytest.raises(ValueError, match="setup_context: expected 1 outputs, and of what is saved whether it is an argument, got 1 outputs and 0 of 2"):
        functional.linear_setup_context(args, results._replace(read=[]))


@pytest.mark.parametrize("recipe", ["none", "mxfp8"])
def test_quantized_weights(recipe):
    numbers = torch.randn(48, 32)
    weight = tandem.quantize(numbers, tandem.MXFP8Quantizer(torch.float8_e4m3fn))
    args = functional.LinearArgs(inp=torch.randn(16, 32), weight=weight, recipe=RECIPES[recipe])
    results, _, gradients = run("linear", args, torch.ones(16, 48))
    assert_close(gradients["inp"], torch.ones(16, 48) @ weight.dequantize(columnwise=recipe == "mxfp8"))
    context = functional.linear_setup_context(args, results)
    weight.quantize_(2 * numbers)
    if recipe == "none":  # forward has decoded it, and backward reads that
        assert torch.equal(functional.linear_backward(context, torch.ones(16, 48))["inp"], gradients["inp"])
        return
    with pytest.raises(ValueError, match="expected .* unchanged since the setup of the context"):
        functional.linear_backward(context, torch.ones(16, 48))


def test_workspaces_that_do_not_fit_are_replaced():
    x, weight = torch.randn(16, 32), torch.randn(48, 32)
    for before, more in ((RECIPES["nvfp4"], {}), (MXFP8, {"needs_grad": []}), (RECIPES["current"], {})):
        first = functional.linear_forward(functional.LinearArgs(inp=x, weight=weight, recipe=before, weight_workspaces=(), **more))
        args = functional.LinearArgs(inp=x, weight=weight, recipe=MXFP8, weight_workspaces=first.weight_workspaces)
        results, _, gradients = run("linear", args, torch.ones(16, 48))
        wanted, _, expected = run("linear", functional.LinearArgs(inp=x, weight=weight, recipe=MXFP8), torch.ones(16, 48))
        assert torch.equal(results.y, wanted.y) and torch.equal(gradients["inp"], expected["inp"])
        kept = functional.linear_forward(functional.LinearArgs(inp=x, weight=weight, recipe=MXFP8, weight_workspaces=results.weight_workspaces))
        assert all(a is b or a.data_ptr() == b.data_ptr() for a, b in zip(kept.weight_workspaces, results.weight_workspaces, strict=True))


def test_unknown_fields_are_refused():
    args = functional.LinearArgs(inp=torch.ones(2, 3), weight=torch.ones(2, 3))
    with pytest.raises(AttributeError, match="'LinearArgs' object has no attribute 'wieght'"):
        args.wieght = torch.zeros(2, 3)


def test_errors_of_fields():
    x, weight, ones = torch.randn(4, 8), torch.randn(6, 8), torch.ones(8)

    def linear(**changed):
        return functional.LinearArgs(**{"inp": x, "weight": weight} | changed)

    def groups(**changed):
        return functional.GroupedLinearArgs(**{"inp": x, "m_splits": [2, 2], "weights": [weight] * 2} | changed)

    normed = functional.LayerNormLinearArgs(inp=x, weight=weight, layer_norm_weight=ones, normalization="RMSNorm", layer_norm_bias=ones)
    of_all = "LinearArgs: expected main_grads of weight to be one tensor for each weight, 1 in all, got 2. Pass a list"
    of_biases = "GroupedLinearArgs: expected biases to be a list of one vector for each of 2 groups, or None, got "
    cases = [
        (linear(inp=[1]), TypeError, "LinearArgs: expected inp to be a tensor, got list"),
        (linear(weight=None), TypeError, "LinearArgs: expected weight to be a tensor, got NoneType"),
        (linear(recipe="fp8"), TypeError, "LinearArgs: expected recipe to be a recipe of tandem.recipe or None, got str"),
        (linear(main_grads={"weight": [weight] * 2}), ValueError, of_all),
        (linear(main_grads={"weight": "w"}), TypeError, "LinearArgs: expected main_grads of weight to be a tensor, got str. Pass one."),
        (linear(main_grads={"wieght": weight}), ValueError, "LinearArgs: expected main_grads to name some of weight, got 'wieght'"),
        (linear(main_grads=[weight]), TypeError, "LinearArgs: expected main_grads to be tensors by the names of fields, got list. Pass a dict"),
        (linear(needs_grad="weight"), TypeError, "LinearArgs: expected needs_grad to be names of fields, got the text 'weight'. Pass a list of names"),
        (normed, ValueError, "LayerNormLinearArgs: expected layer_norm_bias=None with RMSNorm, which adds none, got a tensor"),
        (groups(m_splits=[1.5, 2]), TypeError, r"GroupedLinearArgs: expected m_splits to be integers, the rows of each group, got \[1.5, 2\]"),
        (groups(weights=[weight, None]), TypeError, r"GroupedLinearArgs: expected weights\[1\] to be a tensor, got NoneType"),
        (groups(m_splits=[], weights=[]), ValueError, "GroupedLinearArgs: expected weights to be a list of one matrix for each group, got none"),
        (groups(biases=[weight[0]] * 3), ValueError, of_biases + "3"),
        (groups(biases=weight[0]), ValueError, of_biases + "Tensor"),
    ]
    for args, kind, text in cases:
        with pytest.raises(kind, match=text):
            functional.forward(args)


def test_options_of_other_types_are_not_those_of_earlier_calls():
    fields_ = {"inp": torch.randn(4, 8), "weight": torch.randn(6, 8), "layer_norm_weight": torch.ones(8), "normalization": "RMSNorm"}

    def y(**options):
        return functional.forward(functional.LayerNormLinearArgs(**fields_, **options)).y

    for eps in (1e-5, 1.0):
        expected = torch.nn.functional.rms_norm(fields_["inp"], (8,), eps=eps) @ fields_["weight"].t()
        assert_close(y(eps=eps), expected)
        for wrong in (torch.tensor(eps), [eps]):
            try:
                assert_close(y(eps=wrong), expected)
            except (TypeError, ValueError):
                pass
    with pytest.raises(ValueError, match="expected eps"):
        y(eps=True)
