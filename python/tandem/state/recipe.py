"""`tandem.make_recipe_state`, which creates the buffers of a recipe before the first call."""

from __future__ import annotations

import warnings
from typing import TypeVar

import torch

from tandem import recipe_state
from tandem.op_base.base import OpBase
from tandem.recipe import Recipe
from tandem.recipe.base import check_recipe

Root = TypeVar("Root", bound=torch.nn.Module)


def make_recipe_state(module: Root, recipe: Recipe) -> Root:
    """Creates the buffers that modules keep for a recipe, such as `recipe_state.forward.scale`, before the first call would. Returns the module.

    Functions that read buffers before that call then find them: `torch.optim.swa_utils.AveragedModel`, `torch.distributed.checkpoint.load` into a new
    model, `from_pretrained`. Existing state is kept, and its history gets the recipe's number of rows. A recipe without state creates nothing. For
    modules of torch that `torch.compile(model, backend="tandem")` runs, the first call in training creates the state.

    >>> import tandem
    >>> linear = tandem.make_recipe_state(tandem.Linear(16, 16), tandem.recipe.DelayedScaling(amax_history_len=4))
    >>> linear.recipe_state.forward.amax_history.shape
    torch.Size([4, 2])

    Args:
        module: a module; its ops and those of all modules inside it get the buffers. A module with parameters but no ops gives a warning.
        recipe: the recipe under which the module will be called.
    """
    check_recipe("make_recipe_state", recipe, or_none="")
    length = recipe_state.history_length(recipe.to_json())
    ops = [op for op in module.modules() if isinstance(op, OpBase)]
    if length and not ops and any(True for _ in module.parameters()):
        warnings.warn(
            f"make_recipe_state: expected a module with ops of this library, got {module._get_name()} without, for which nothing is made. If the backend of torch.compile "
            "runs it, call it once in training instead; then tandem.recipe_state_dict has its state, and tandem.load_recipe_state_dict loads it.",
            stacklevel=2,
        )
    for op in ops if length else ():
        for basic_op in op.flat_ops():
            if any(basic_op._quantize_slots()):
                holder = basic_op._holder
                recipe_state.of(vars(holder), holder._quantize_slots(), length)  # type: ignore[operator]
    return module
