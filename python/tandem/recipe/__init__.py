"""Recipes: the choice of a quantizer for each role, as frozen values."""

from __future__ import annotations

import json

from tandem.recipe import scaling
from tandem.recipe.base import Format, MMParams, QParams, Recipe
from tandem.recipe.custom import _factories, CustomRecipe, QuantizerRole
from tandem.recipe.delayed import _with_functions, DelayedScaling
from tandem.recipe.scaling import *  # noqa: F403

__all__ = [
    "CustomRecipe",
    "DelayedScaling",
    "Format",
    "MMParams",
    "QParams",
    "QuantizerRole",
    "Recipe",
]
__all__ += scaling.__all__


def recipe_from_json(text: str) -> Recipe:
    """The recipe that `to_json` wrote. Raises ValueError for an unknown name."""
    values = json.loads(text)
    name = values.pop("name")
    for of_the_region in ("amax_reduction_group", "calibrating"):
        values.pop(of_the_region, None)
    if (function := values.pop("scale_update", "")) in _with_functions:
        return _with_functions[function]
    if values.get("backward_override") == "none":
        values["backward_override"] = None
    if (function := values.pop("quantizers", "")) in _factories:
        return CustomRecipe(_factories[function], **values)
    known = {each: recipe for each, recipe in Recipe._known.items() if recipe is not CustomRecipe}
    if name not in known:
        raise ValueError(f"recipe: expected one of {', '.join(sorted(known))}, got {name!r}. Use the version of tandem that wrote it.")
    return known[name](**{field: Format[value] if field == "fp8_format" else value for field, value in values.items()})


def __dir__() -> list[str]:
    return __all__
