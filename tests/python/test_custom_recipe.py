"""`CustomRecipe`: a function says what quantizes each operand of each product."""

from __future__ import annotations

import functools
import pickle
import warnings

import pytest
import torch
from support import assert_equal, llama_mlp, randomize, step

import tandem
from tandem import ops
from tandem import recipe as recipe_module
from tandem.recipe import CustomRecipe, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, QuantizerRole

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def as_current_scaling(role):
    return tandem.Float8CurrentScalingQuantizer(E5M2 if role.tensor_type == "grad_output" else E4M3)


def as_mxfp8(role):
    return tandem.MXFP8Quantizer(E4M3)


def as_blocks(role):
    return tandem.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=2 if role.tensor_type == "weight" else 1)


def as_nvfp4(role):
    if role.tensor_type == "weight":
        return tandem.NVFP4Quantizer(with_2d_quantization=True)
    return tandem.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, stochastic_rounding=role.tensor_type == "grad_output")


BUILT_IN = [
    (as_current_scaling, Float8CurrentScaling()),
    (as_mxfp8, MXFP8BlockScaling()),
    (as_blocks, Float8BlockScaling()),
    (as_nvfp4, NVFP4BlockScaling()),
]


@pytest.mark.parametrize(("qfactory", "recipe"), BUILT_IN)
@pytest.mark.parametrize("make", [lambda: llama_mlp(32, 48), lambda: tandem.LayerNormMLP(32, 48, activation="swiglu"), lambda: tandem.Linear(32, 16)])
def test_a_function_that_says_what_a_recipe_says_gives_its_bits(make, qfactory, recipe):
    module, x = randomize(make()), torch.randn(16, 32)
    assert_equal(step(module, x, CustomRecipe(qfactory)), step(module, x, recipe))


@pytest.mark.parametrize("recipe", [Float8BlockScaling(), MXFP8BlockScaling()])
def test_groups_too(recipe):
    experts, x, splits = ops.GroupedLinear(2, 32, 16), torch.randn(12, 32), torch.tensor([5, 7])
    results = []
    for each in (CustomRecipe(as_blocks if recipe.float8_block_scaling() else as_mxfp8), recipe):
        with tandem.autocast(recipe=each):
            y = experts(x, splits)
        results.append([y, *torch.autograd.grad(y.square().sum(), [*experts.parameters()])])
    assert_equal(*results)

    def without_x(role):
        return None if role.tensor_type == "input" else tandem.MXFP8Quantizer(E4M3)

    with tandem.autocast(recipe=CustomRecipe(without_x)), pytest.raises(
        NotImplementedError, match="grouped_linear: expected quantizers for both operands of a product of groups, or for none, got one for grad of .* and none for x"
    ):
        experts(x, splits)


def test_the_function_is_asked_once_for_each_role():
    roles = []

    def qfactory(role):
        roles.append(role)
        return tandem.MXFP8Quantizer(E4M3)

    module, recipe = llama_mlp(32, 48), CustomRecipe(qfactory)
    for rows in (4, 8):
        step(module, torch.randn(rows, 32), recipe)
    expected = {QuantizerRole("linear", role, f"{index}.basic_linear") for index in (1, 3) for role in ("input", "weight", "grad_output")}
    assert len(roles) == 6 and set(roles) == expected


def test_what_has_no_quantizer_is_taken_as_it_is():
    linear, x = ops.Linear(32, 16, bias=False), torch.randn(8, 32)
    quantizer = tandem.MXFP8Quantizer(E4M3)

    def weights_alone(role):
        return quantizer if role.tensor_type == "weight" else None

    y, grad_x, grad_weight = step(linear, x, CustomRecipe(weights_alone))
    weight = tandem.quantize(linear.weight.detach(), quantizer)
    torch.testing.assert_close(y, x @ weight.dequantize().t())
    grad = 2 * y
    torch.testing.assert_close(grad_x, grad @ weight.dequantize(columnwise=True))
    torch.testing.assert_close(grad_weight, grad.t() @ x)
    assert_equal(step(linear, x, CustomRecipe(lambda role: None)), step(linear, x, None))


@pytest.mark.parametrize("packed", ["input", "weight", "grad_output"])
@pytest.mark.parametrize("other", [as_current_scaling, as_mxfp8, as_blocks])
def test_sizes_that_divide_by_nothing_suit_a_packed_format_beside_another(packed, other):
    nvfp4 = tandem.NVFP4Quantizer()
    recipe = CustomRecipe(lambda role: nvfp4 if role.tensor_type == packed else other(role))
    linear, x = ops.Linear(40, 24, bias=False), torch.randn(21, 40)

    def numbers(of, tensor_type, columnwise):
        quantizer = recipe.qfactory(QuantizerRole("linear", tensor_type, "basic_linear"))
        return tandem.quantize(of.detach(), quantizer).dequantize(columnwise=columnwise)

    y, grad_x, grad_weight = step(linear, x, recipe)
    torch.testing.assert_close(y, numbers(x, "input", False) @ numbers(linear.weight, "weight", False).t())
    grad = 2 * y
    torch.testing.assert_close(grad_x, numbers(grad, "grad_output", False) @ numbers(linear.weight, "weight", True))
    torch.testing.assert_close(grad_weight, numbers(grad, "grad_output", True).t() @ numbers(x, "input", True))
    torch.compiler.reset()
    compiled = step(torch.compile(linear, fullgraph=True, backend="aot_eager"), x, recipe)
    assert_equal(compiled, [y, grad_x, grad_weight])

    experts, splits = ops.GroupedLinear(2, 40, 24, bias=False), torch.tensor([8, 13])
    with tandem.autocast(recipe=recipe):
        y = experts(x, splits)
    grads = torch.autograd.grad(y.square().sum(), [*experts.parameters()])
    for rows, weight, got, grad in zip(x.split([8, 13]), experts.parameters(), y.split([8, 13]), grads, strict=True):
        with torch.no_grad():
            linear.weight.copy_(weight)
        expected, _, expected_grad = step(linear, rows, recipe)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(grad, expected_grad)


def test_one_layer_may_be_left_out():
    box, x = ops.Sequential(ops.Linear(32, 32), ops.GELU(), ops.Linear(32, 32)), torch.randn(8, 32)
    recipe = CustomRecipe(lambda role: None if role.name.startswith("2.") else tandem.MXFP8Quantizer(E4M3))
    step(box, x, recipe)
    text = box.explain()
    assert "0.basic_linear.weight in mxfp8_e4m3" in text and "2.basic_linear.weight in" not in text
    with tandem.autocast(recipe=recipe):
        assert tandem.verify(box, x.clone().requires_grad_()).passed


def test_rounding_points_ask_too():
    x = torch.randn(4, 32)
    op = ops.Quantize(forward=True, backward=True)
    recipe = CustomRecipe(lambda role: tandem.MXFP8Quantizer(E4M3) if role == QuantizerRole("quantize", "input", "0.quantize") else None)
    leaf = x.clone().requires_grad_()
    with tandem.autocast(recipe=recipe):
        y = op(leaf)
    assert torch.equal(y, tandem.quantize(x, tandem.MXFP8Quantizer(E4M3)).dequantize())
    grad = torch.randn(4, 32)
    assert torch.equal(torch.autograd.grad(y, leaf, grad)[0], grad)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_calls_equal_eager_ones(backend):
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, x = randomize(llama_mlp(32, 48)), torch.randn(16, 32)

    def mixed(role):
        if role.name.startswith("3."):
            return None if role.tensor_type == "grad_output" else tandem.Float8CurrentScalingQuantizer(E4M3)
        return tandem.MXFP8Quantizer(E4M3)

    recipe = CustomRecipe(mixed)
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    torch.testing.assert_close(step(compiled, x, recipe), step(module, x, recipe))


def test_ops_say_their_quantizers():
    linear = ops.BasicLinear(32, 16)
    recipe = CustomRecipe(lambda role: tandem.NVFP4Quantizer(with_2d_quantization=True) if role.tensor_type == "weight" else None)
    with tandem.autocast(recipe=recipe):
        assert linear.get_input_quantizer() is None
        assert linear.get_quantizer("forward", 1) == tandem.NVFP4Quantizer(with_2d_quantization=True)


def test_fusion_functions_see_the_recipe():
    seen = []

    def look(ops_, *, recipe):
        seen.append(recipe)
        return ops_

    recipe = CustomRecipe(as_mxfp8, backward_override="high_precision")
    with ops.register_forward_fusion(look):
        step(ops.Sequential(ops.Linear(32, 16)), torch.randn(4, 32), recipe)
    assert recipe in seen and recipe.custom() and not MXFP8BlockScaling().custom()


def test_it_is_a_value():
    recipe = CustomRecipe(as_mxfp8)
    assert recipe == CustomRecipe(as_mxfp8) and recipe.to_json() == CustomRecipe(as_mxfp8).to_json() != CustomRecipe(as_blocks).to_json()
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert recipe.quantization_alignment == 128 and recipe.fp8_format.name == "HYBRID"


def state_needed(role):
    return tandem.Float8Quantizer(torch.ones(1), torch.zeros(1), E4M3)


def rotated_weight(role):
    return tandem.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)


ERRORS = [
    (lambda role: "fp8", TypeError, "CustomRecipe: expected qfactory to return a quantizer or None, got str"),
    (state_needed, ValueError, 'CustomRecipe: expected quantizers whose scales follow from the numbers, got "fp8_e4m3:delayed" for 0.basic_linear, whose scale'),
    (rotated_weight, ValueError, "basic_linear.* expected operands that are both rotated or both not, got grad of .*y in .* and .*weight in"),
]


@pytest.mark.parametrize(("qfactory", "kind", "text"), ERRORS)
def test_errors_of_the_function(qfactory, kind, text):
    x = torch.randn(16, 32, requires_grad=True)
    with tandem.autocast(recipe=CustomRecipe(qfactory)), pytest.raises(kind, match=text):
        ops.Linear(32, 16, bias=False)(x)


def test_what_the_function_raises_reaches_the_caller():
    def raises(role):
        raise LookupError("no such layer")

    with tandem.autocast(recipe=CustomRecipe(raises)), pytest.raises(LookupError, match="no such layer"):
        ops.Linear(32, 16)(torch.randn(4, 32))


def test_errors_of_the_recipe():
    with pytest.raises(ValueError, match="CustomRecipe: expected qfactory to be a function of a QuantizerRole, got 3"):
        CustomRecipe(3)
    with pytest.raises(NotImplementedError, match="CustomRecipe: expected fp8_dpa=False, got True"):
        CustomRecipe(as_mxfp8, fp8_dpa=True)
    other = CustomRecipe(as_mxfp8).to_json().replace("python-", "of-another-process-")
    with pytest.raises(ValueError, match='CustomRecipe: expected the name of a function that was registered in this process, got "of-another-process-'):
        tandem._C.recipe_quantizer(other, "input", "basic_linear")


class Doubled(tandem.MXFP8Quantizer):
    def quantize(self, x):
        return super().quantize(2 * x)


class Renamed(tandem.MXFP8Quantizer):
    def __init__(self):
        super().__init__(E4M3)


def test_what_products_would_not_do_is_refused():
    linear, x = ops.Linear(32, 16), torch.randn(4, 32)

    def patched(role):
        made = tandem.MXFP8Quantizer(E4M3)
        made.quantize = lambda x: x
        return made

    def sharing(role):
        made = tandem.Float8CurrentScalingQuantizer(E4M3)
        made._amax_group = object()  # as with_amax_reduction=True sets it among processes
        return made

    refused = [
        (sharing, NotImplementedError, "CustomRecipe: expected with_amax_reduction=False for the input of 0.basic_linear, .* got True. Use a format"),
        (lambda role: Doubled(E4M3), NotImplementedError, "CustomRecipe: expected a quantizer of tandem for the input of 0.basic_linear, .* got Doubled with a qu"),
        (patched, NotImplementedError, "CustomRecipe: expected a quantizer of tandem for the input of 0.basic_linear, .* got MXFP8Quantizer with a quantize"),
        (
            lambda role: tandem.NVFP4Quantizer(stochastic_rounding=True),
            ValueError,
            "CustomRecipe: expected a quantizer that rounds to nearest for the weight of 0.basic_linear, .* got \"nvfp4:sr=1\"",
        ),
    ]
    for qfactory, kind, text in refused:
        with tandem.autocast(recipe=CustomRecipe(qfactory)), pytest.raises(kind, match=text):
            linear(x)
    assert_equal(step(linear, x, CustomRecipe(lambda role: Renamed())), step(linear, x, MXFP8BlockScaling()))


class Factory:
    def __init__(self, dtype):
        self.dtype = dtype

    def choose(self, role):
        return tandem.MXFP8Quantizer(self.dtype)


def of_dtype(role, dtype, *, more=None):
    return tandem.MXFP8Quantizer(dtype)


def test_a_function_is_known_by_what_it_is():
    factory, other = Factory(E4M3), Factory(E5M2)
    name = lambda qfactory: CustomRecipe(qfactory).to_json()  # noqa: E731
    made = {
        "method": lambda: factory.choose,
        "other method": lambda: other.choose,
        "partial": lambda: functools.partial(of_dtype, dtype=E4M3),
        "other partial": lambda: functools.partial(of_dtype, dtype=E5M2),
        **{f"captured {dtype}": lambda dtype=dtype: (lambda role: tandem.MXFP8Quantizer(dtype)) for dtype in (E4M3, E5M2)},
        **{f"default {dtype}": lambda dtype=dtype: (lambda role, given=dtype: tandem.MXFP8Quantizer(given)) for dtype in (E4M3, E5M2)},
        "quantizer": lambda: (lambda role, given=tandem.MXFP8Quantizer(E4M3): given),
        "other quantizer": lambda: (lambda role, given=tandem.MXFP8Quantizer(E5M2): given),
    }
    names = {key: name(make()) for key, make in made.items()}
    assert len({*names.values()}) == len(made)
    known = len(recipe_module._factories)
    for key, make in made.items():
        assert name(make()) == names[key]
    assert len(recipe_module._factories) == known
    held = [name(lambda role, at=object(): None) for _ in range(3)]
    assert len({*held}) == 3  # what was captured stays, so that nothing else gets its number


def test_a_name_without_a_value_and_attributes_make_a_function_one_of_a_kind():
    def make():
        def choose(role):
            return later

        made = CustomRecipe(choose).to_json()
        later = None
        return made

    def marked():
        def choose(role):
            return None

        choose.mark = 1
        return CustomRecipe(choose).to_json()

    assert make() != make() and marked() != marked()


def test_functions_that_are_new_each_time_are_told_of_once():
    def recipe(captured):
        return CustomRecipe(lambda role: tandem.MXFP8Quantizer(E4M3) if captured else None)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same_one = object()
        for _ in range(200):
            recipe(same_one)
        for _ in range(62):
            recipe(object())
    with pytest.warns(UserWarning, match=r"CustomRecipe: expected a qfactory that has captured what others of its code have, got 64 of <lambda> at .*test_custom_recipe.py:"):
        recipe(object())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(100):
            recipe(object())
