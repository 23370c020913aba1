"""What ops tell of the quantizers that a recipe has for them."""

import pytest
import torch

import tandem
import tandem.ops as ops
from tandem.ops import fused


def test_numbers_of_quantizers_are_those_of_transformer_engine():
    counts = {
        ops.BasicLinear(4, 4): (2, 1), ops.Bias(4): (0, 0), ops.GELU(): (0, 0), ops.RMSNorm(4): (0, 0), ops.Identity(): (0, 0),
        ops.Quantize(): (1, 0), ops.Quantize(False, True): (0, 1), ops.Quantize(True, True): (1, 1),
        ops.GroupedLinear(3, 4, 4): (6, 3), ops.GroupedLinear(2, 4, 4, single_grouped_weight=True): (4, 2),
    }  # fmt: skip
    for op, expected in counts.items():
        assert (op.num_quantizers("forward"), op.num_quantizers("backward")) == expected, op


def test_without_a_recipe_there_is_none():
    linear = ops.Linear(4, 4)
    assert linear.basic_ops[0].get_quantizer("forward", 1) is None and linear.get_input_quantizer() is None
    assert linear.get_grad_output_quantizer() is None  # of the bias


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [
        (tandem.recipe.Float8CurrentScaling(), tandem.Float8CurrentScalingQuantizer),
        (tandem.recipe.MXFP8BlockScaling(), tandem.MXFP8Quantizer),
        (tandem.recipe.DelayedScaling(), tandem.Float8Quantizer),
        (tandem.recipe.Float8BlockScaling(), tandem.Float8BlockQuantizer),
        (tandem.recipe.NVFP4BlockScaling(), tandem.NVFP4Quantizer),
    ],
)
def test_under_a_recipe_they_quantize_as_products_do(recipe, kind):
    linear = ops.BasicLinear(64, 64)
    with tandem.autocast(recipe=recipe):
        found = [linear.get_quantizer("forward", 0), linear.get_quantizer("forward", 1), linear.get_quantizer("backward", 0)]
        assert linear.get_input_quantizer() == found[0] or kind is tandem.Float8Quantizer
        box = ops.Sequential(linear, ops.Identity())
        assert box[0].get_grad_output_quantizer() is not None
    assert [type(quantizer) for quantizer in found] == [kind] * 3
    if kind is not tandem.NVFP4Quantizer:
        has_wide_gradients = kind in (tandem.Float8CurrentScalingQuantizer, tandem.Float8Quantizer)
        assert "e4m3" in found[0].text and ("e5m2" in found[2].text) == has_wide_gradients
    x = torch.randn(32, 64)
    assert (tandem.quantize(x, found[0]).dequantize() - x).norm() < (0.2 if kind is tandem.NVFP4Quantizer else 0.1) * x.norm()


def test_what_is_quantized_by_hand_joins_the_step():
    linear, x = ops.BasicLinear(64, 64), torch.randn(32, 64)
    with tandem.autocast(recipe=tandem.recipe.DelayedScaling(amax_history_len=4)):
        linear(x)
        linear.get_quantizer("forward", 0).quantize(0.01 * x)
    torch.testing.assert_close(linear.recipe_state.forward.scale[0].item(), 448 / x.abs().max().item())


def test_of_delayed_scaling_they_show_the_state_of_the_op():
    linear, x = ops.Linear(64, 64), torch.randn(32, 64)
    for _ in range(2):
        with tandem.autocast(recipe=tandem.recipe.DelayedScaling(amax_history_len=4)):
            linear(x).sum().backward()
    basic = linear.basic_ops[0]
    with tandem.autocast(recipe=tandem.recipe.DelayedScaling(amax_history_len=4)):
        linear(x)
        torch.testing.assert_close(basic.get_quantizer("forward", 0).scale.item(), 448 / x.abs().max().item())
        assert basic.get_quantizer("forward", 1).scale == linear.recipe_state.forward.scale[1]
    assert basic.get_quantizer("forward", 0).scale == linear.recipe_state.forward.scale[0], "outside of the region too"


@pytest.mark.parametrize("recipe", [tandem.recipe.Float8CurrentScaling(), tandem.recipe.MXFP8BlockScaling(), tandem.recipe.DelayedScaling()])
def test_behind_a_region_they_are_those_of_the_last_call(recipe):
    linear, x = ops.Linear(32, 32), torch.randn(32, 32, requires_grad=True)
    box, (product, _) = ops.Sequential(linear), linear.basic_ops
    with tandem.autocast(recipe=recipe):
        assert box(x).requires_grad
        inside = product.get_quantizer("forward", 1)
    assert product.get_quantizer("forward", 1).text == inside.text and linear.get_input_quantizer().text == inside.text
    assert product.get_grad_output_quantizer() is not None
    box(x)
    if not isinstance(recipe, tandem.recipe.DelayedScaling):  # whose state stays with the op
        assert product.get_quantizer("forward", 1) is None and product.get_grad_output_quantizer() is None


def test_errors():
    with pytest.raises(ValueError, match='BasicLinear: expected mode "forward" or "backward", got "?\'?input'):
        ops.BasicLinear(4, 4).num_quantizers("input")
    with pytest.raises(IndexError, match="BasicLinear: expected the index of one of its 2 forward quantizers, got 2, which is out of range"):
        ops.BasicLinear(4, 4).get_quantizer("forward", 2)


BY_NAME = [
    (fused.ForwardLinearBiasActivation, {"linear": ops.BasicLinear(8, 8), "bias": ops.Bias(8), "activation": None}, 2),
    (fused.ForwardLinearBiasActivation, {"linear": ops.BasicLinear(8, 8), "bias": ops.Bias(8), "activation": ops.SwiGLU()}, 3),
    (fused.ForwardLinearBiasAdd, {"linear": ops.BasicLinear(8, 8), "bias": None, "add": ops.AddExtraInput(in_place=True)}, 2),
    (fused.ForwardLinearScaleAdd, {"linear": ops.BasicLinear(8, 8), "scale": ops.ConstantScale(2.0), "add": ops.AddExtraInput()}, 3),
    (fused.BackwardActivationBias, {"bias": ops.Bias(8), "activation": ops.GELU()}, 2),
    (fused.BackwardAddRMSNorm, {"add": ops.MakeExtraOutput(), "rmsnorm": ops.RMSNorm(8)}, 2),
    (fused.BackwardLinearAdd, {"backward_add": ops.MakeExtraOutput(), "linear": ops.BasicLinear(8, 8)}, 2),
    (fused.BackwardLinearScale, {"linear": ops.BasicLinear(8, 8), "scale": ops.ConstantScale(2.0)}, 2),
]


@pytest.mark.parametrize(("kind", "members", "count"), BY_NAME)
def test_fused_classes_are_made_of_ops_by_name(kind, members, count):
    made = kind(**members)
    assert list(made.basic_ops) == [op for op in members.values() if op is not None] and len(made.basic_ops) == count
    extra = [torch.randn(2, 8) for op in made.basic_ops for _ in range(op.num_extra_inputs)]
    assert made(torch.randn(2, 8), *extra) is not None
    with pytest.raises(TypeError, match=f"{kind.__name__}: expected the ops .* by name, got other. Pass one op for each."):
        kind(other=ops.GELU())
    first = next(iter(members))
    with pytest.raises(TypeError, match=f"{kind.__name__}: expected {first} to be a .*, got Reshape. Pass such an op."):
        kind(**{**members, first: ops.Reshape((-1,))})
