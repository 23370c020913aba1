"""Recipes are values, with the arguments and predicates of TransformerEngine, that go through JSON; what they refuse."""

from __future__ import annotations

import dataclasses
import json

import pytest
from support import each_raises

import tandem
from tandem import recipe
from tandem.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    recipe_from_json,
)

PREDICATES = {
    DelayedScaling: {"delayed", "float8_per_tensor_scaling"},
    Float8CurrentScaling: {"float8_current_scaling", "float8_per_tensor_scaling"},
    MXFP8BlockScaling: {"mxfp8"},
    Float8BlockScaling: {"float8_block_scaling"},
    NVFP4BlockScaling: {"nvfp4"},
    recipe.CustomRecipe: {"custom"},
}


@pytest.mark.parametrize("kind", PREDICATES)
def test_predicates_are_asked_of_classes_and_of_recipes(kind):
    one = kind(lambda role: None) if kind is recipe.CustomRecipe else kind()
    for requested in (kind, one):
        said = {name for names in PREDICATES.values() for name in names if getattr(requested, name)()}
        assert said == PREDICATES[kind]


@pytest.mark.parametrize("kind", [kind for kind in PREDICATES if kind is not recipe.CustomRecipe])
@pytest.mark.parametrize("name", ["fp8_dpa", "fp8_mha"])
def test_attention_in_eight_bits_is_refused_by_name(kind, name):
    assert getattr(kind(**{name: False}), name) is False
    with pytest.raises(NotImplementedError, match=rf"{kind.__name__}: expected {name}=False, got True. This version knows the default only"):
        kind(**{name: True})


def test_accumulators_of_current_scaling():
    assert [Float8CurrentScaling().fp8_gemm_fprop, Float8CurrentScaling().fp8_gemm_dgrad] == [MMParams(False), MMParams(True)]
    one = Float8CurrentScaling(fp8_gemm_fprop=MMParams(True))
    assert one.fp8_gemm_fprop == MMParams(True) and one.to_json() == Float8CurrentScaling().to_json()


def test_defaults_and_the_order_of_arguments():
    current = Float8CurrentScaling()
    assert current.fp8_format is Format.HYBRID and current.use_power_2_scales is False
    assert json.loads(current.to_json()) == {
        "name": "Float8CurrentScaling",
        "backward_override": "none",
        "fp8_format": "HYBRID",
        "use_power_2_scales": False,
        "amax_epsilon_grad_output": 0.0,
        "amax_epsilon_input": 0.0,
        "amax_epsilon_weight": 0.0,
    }
    assert MXFP8BlockScaling() == MXFP8BlockScaling(0, Format.E4M3, False, False, False, None)
    assert Float8BlockScaling() == Float8BlockScaling(False, Format.E4M3, 1, 2, 1)
    assert Float8BlockScaling(amax_epsilon_weight=2.0).fp8_quant_fwd_weight == QParams(power_2_scale=True, amax_epsilon=2.0)
    assert NVFP4BlockScaling().fp4_quant_fwd_weight == QParams(fp4_2d_quantization=True)
    assert NVFP4BlockScaling().fp4_quant_bwd_grad == QParams(random_hadamard_transform=True, stochastic_rounding=True)
    assert Format.HYBRID.value.max_fwd == 448 and Format.HYBRID.value.max_bwd == 57344 and Format.E2M1.value.max_fwd == 6


@pytest.mark.parametrize(
    "made",
    [
        DelayedScaling(margin=1, amax_history_len=7, amax_compute_algo="most_recent", reduce_amax=False),
        Float8CurrentScaling(amax_epsilon_weight=2.5),
        MXFP8BlockScaling(fp8_format=Format.HYBRID, enable_2d_quantization=True),
        Float8BlockScaling(use_f32_scales=True, fp8_format=Format.HYBRID, w_block_scaling_dim=1, amax_epsilon_input=1.0),
        Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
        NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True),
        NVFP4BlockScaling(nvfp4_4over6="all"),
    ],
    ids=lambda made: made.to_json(),
)
def test_recipes_are_frozen_values_that_go_through_json(made):
    for each in (made, type(made)()):
        again = recipe_from_json(each.to_json())
        assert again == each and hash(again) == hash(each)
        with tandem.autocast(recipe=each):
            assert recipe_from_json(tandem._C.active_recipe()) == each
        with pytest.raises(dataclasses.FrozenInstanceError):
            each.fp8_format = Format.E4M3
    assert made != type(made)() and hash(made) != hash(type(made)())


def test_json_of_no_recipe_is_refused():
    with pytest.raises(ValueError, match="recipe: expected one of DelayedScaling, .*, NVFP4BlockScaling, got 'MXFP4'"):
        recipe_from_json('{"name": "MXFP4"}')


test_errors = each_raises([
    (lambda: Float8CurrentScaling(fp8_format="HYBRID"), ValueError, "expected fp8_format to be Format.HYBRID or Format.E4M3, got 'HYBRID'"),
    (lambda: Float8CurrentScaling(use_power_2_scales=1), ValueError, "expected use_power_2_scales to be True or False, got 1"),
    (lambda: Float8CurrentScaling(amax_epsilon_input=None), ValueError, "expected amax_epsilon_input to be a finite number >= 0, got None. amax_epsilon_input: the least"),
    (lambda: Float8CurrentScaling(amax_epsilon_input="1"), ValueError, "expected amax_epsilon_input to be a finite number >= 0, got '1'. amax_epsilon_input: the least"),
    (lambda: Float8CurrentScaling(amax_epsilon_weight=-1.0), ValueError, "expected amax_epsilon_weight to be a finite number >= 0, got -1.0"),
    (lambda: Float8CurrentScaling(backward_override="half"), ValueError, "Float8CurrentScaling: expected backward_override to be None, \"high_precision\" or \"dequantized\", got 'half'"),
    (lambda: tandem.autocast(recipe="fp8"), TypeError, "autocast: expected recipe to be a recipe of tandem.recipe or None, got str"),
    (lambda: MXFP8BlockScaling(fp8_format="E5M2"), ValueError, "MXFP8BlockScaling: expected fp8_format to be Format.HYBRID or Format.E4M3, got 'E5M2'"),
    (lambda: MXFP8BlockScaling(enable_2d_quantization=1), ValueError, "expected enable_2d_quantization to be True or False, got 1"),
    (lambda: MXFP8BlockScaling(margin=1), NotImplementedError, "MXFP8BlockScaling: expected margin=0, got 1"),
    (lambda: MXFP8BlockScaling(backward_override="half"), ValueError, "expected backward_override to be None, \"high_precision\" or \"dequantized\", got 'half'"),
    (lambda: Float8BlockScaling(x_block_scaling_dim=3), ValueError, "Float8BlockScaling: expected x_block_scaling_dim to be"),
    (lambda: Float8BlockScaling(x_block_scaling_dim=2), ValueError, "Float8BlockScaling: expected squares for one operand at most, got x_block_scaling_dim=2"),
    (lambda: Float8BlockScaling(fp8_format=Format.E5M2), ValueError, "expected fp8_format to be Format.HYBRID or Format.E4M3, got"),
    (lambda: Float8BlockScaling(fp8_gemm_dgrad=MMParams(use_split_accumulator=False)), NotImplementedError, "Float8BlockScaling: expected fp8_gemm_dgrad=MMParams(use_split_accumulator=True), got"),
    (lambda: NVFP4BlockScaling(nvfp4_4over6="inputs"), ValueError, "NVFP4BlockScaling: expected nvfp4_4over6 to be"),
    (lambda: NVFP4BlockScaling(nvfp4_4over6_e4m3_use_256=True), ValueError, "NVFP4BlockScaling: expected nvfp4_4over6_e4m3_use_256 to be"),
    (lambda: NVFP4BlockScaling(nvfp4_4over6_err_mode="mae"), ValueError, "NVFP4BlockScaling: expected nvfp4_4over6_err_mode to be"),
    (lambda: NVFP4BlockScaling(row_scaled_activation=True), NotImplementedError, "expected row_scaled_activation=False, got True"),
    (lambda: NVFP4BlockScaling(fp4_format=Format.E4M3), NotImplementedError, "NVFP4BlockScaling: expected fp4_format="),
    (lambda: NVFP4BlockScaling(disable_rht=1), ValueError, "expected disable_rht to be True or False, got 1"),
])  # fmt: skip
