"""Arguments and predicates of recipes, as TransformerEngine's users write them."""

from __future__ import annotations

import pytest

from tandem import recipe
from tandem.recipe import MMParams

PREDICATES = {
    recipe.DelayedScaling: {"delayed", "float8_per_tensor_scaling"},
    recipe.Float8CurrentScaling: {"float8_current_scaling", "float8_per_tensor_scaling"},
    recipe.MXFP8BlockScaling: {"mxfp8"},
    recipe.Float8BlockScaling: {"float8_block_scaling"},
    recipe.NVFP4BlockScaling: {"nvfp4"},
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
    assert [recipe.Float8CurrentScaling().fp8_gemm_fprop, recipe.Float8CurrentScaling().fp8_gemm_dgrad] == [MMParams(False), MMParams(True)]
    one = recipe.Float8CurrentScaling(fp8_gemm_fprop=MMParams(True))
    assert one.fp8_gemm_fprop == MMParams(True) and one.to_json() == recipe.Float8CurrentScaling().to_json()
