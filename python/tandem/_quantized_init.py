"""Modules whose weights are made in codes."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from tandem import _C
from tandem._quantized_parts import PARTS, rows_of_blocks
from tandem._quantized_tensor import QuantizedTensor
from tandem._quantizer import Quantizer, quantizer_of_text
from tandem.recipe import Float8CurrentScaling, Recipe


class _Init(NamedTuple):
    recipe: Recipe
    keeps_numbers: bool


_in_force: contextvars.ContextVar[_Init | None] = contextvars.ContextVar("tandem.quantized_model_init", default=None)
_AS_GIVEN = ":delayed"  # scales that nobody has yet: the weight's own are better


@contextlib.contextmanager
def quantized_model_init(enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False) -> Iterator[None]:
    """Ops and modules that are made inside have the weights of their products in codes, as parameters that are `QuantizedTensor`s.

    Products under a recipe of the same format read these codes and quantize no weight. There are no other numbers: an optimizer steps a master copy in
    high precision, which each step writes back by `weight.quantize_(master)`. Weights that are made on the meta device are quantized when they get
    their first values.

    >>> import torch, tandem
    >>> recipe = tandem.recipe.MXFP8BlockScaling()
    >>> with tandem.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
    ...     layer = tandem.Linear(64, 64)
    >>> layer.weight
    QuantizedTensor([64, 64], dtype=torch.float32, quantizer=MXFP8Quantizer('mxfp8_e4m3', rowwise=True, columnwise=True))
    >>> master = layer.weight.get_high_precision_init_val()
    >>> layer.weight.clear_high_precision_init_val()

    Args:
        enabled: False: what is made inside is as it is outside of any such block.
        recipe: whose format weights have; None: `Float8CurrentScaling()`. Scales of `DelayedScaling` are those of the weight itself.
        preserve_high_precision_init_val: whether the numbers that a weight was drawn with are kept, on the CPU, for the master copy:
            `weight.get_high_precision_init_val()` gives them, `weight.clear_high_precision_init_val()` lets go of them.
    """
    for name, value in (("enabled", enabled), ("preserve_high_precision_init_val", preserve_high_precision_init_val)):
        if not isinstance(value, bool):
            raise ValueError(f"quantized_model_init: expected {name} to be True or False, got {value!r}. Pass a recipe as recipe=.")
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(
            f"quantized_model_init: expected recipe to be a recipe of tandem.recipe or None, got {type(recipe).__name__}. "
            "Pass for example tandem.recipe.MXFP8BlockScaling()."
        )
    token = _in_force.set(_Init(recipe or Float8CurrentScaling(), preserve_high_precision_init_val) if enabled else None)
    try:
        yield
    finally:
        _in_force.reset(token)


def fp8_model_init(enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False) -> Any:
    """`quantized_model_init` under its older name.

    Args:
        enabled, recipe, preserve_high_precision_init_val: as of `quantized_model_init`.
    """
    return quantized_model_init(enabled, recipe, preserve_high_precision_init_val)


def _quantizer(recipe: Recipe, kind: str) -> Quantizer | None:
    text = _C.recipe_quantizer(recipe.to_json(), "weight", kind)
    return quantizer_of_text(text.replace(_AS_GIVEN, ":current:eps=0:pow2=0")) if text else None


def _check_blocks(module: Any, parts: list[str], quantizer: Quantizer) -> None:
    """Parts of a weight are multiplied as one where no block of a part would lie in two; a scale of a whole part is not shared, but its numbers are multiplied."""
    if quantizer.text.startswith("nvfp4"):
        return
    for name in parts[:-1]:
        rows, columns = module._parameters[name].shape
        if rows % (unit := rows_of_blocks(quantizer.text, columns, PARTS)):
            raise ValueError(
                f"{module._get_name()}: expected parts in whole blocks inside quantized_model_init, each but the last a multiple of {unit} rows, got {name} with "
                f"{rows}. Build one module for each part, or use a format with smaller blocks."
            )


def quantize_weights(module: Any, names: Iterable[str], kind: str) -> None:
    """To be called where a module has drawn its parameters: those of these names become codes where `quantized_model_init` is in force, or was where the
    module was made. `kind` is that of the op that multiplies by them."""
    init: _Init | None = module.__dict__.get("_quantized_init") or _in_force.get()
    own = [name for name in names if isinstance(module._parameters.get(name), torch.Tensor)]
    quantizer = _quantizer(init.recipe, kind) if init is not None and own else None
    if init is None or quantizer is None:
        return
    for parts in module.__dict__.get("_joined", {}).values():
        _check_blocks(module, [name for name in parts if name in own], quantizer)
    for name in own:
        param = module._parameters[name]
        if isinstance(param, QuantizedTensor):
            continue
        if param.is_meta:
            module.__dict__["_quantized_init"] = init
            continue
        codes = torch.nn.Parameter(quantizer.quantize(param.detach()), requires_grad=param.requires_grad)
        codes.__dict__.update(param.__dict__)
        if init.keeps_numbers:
            codes._high_precision_init_val = param.detach().to("cpu", copy=True)  # type: ignore[attr-defined]
        setattr(module, name, codes)
    if hasattr(module, "_bring_together"):
        module._bring_together()


__all__ = ["fp8_model_init", "quantize_weights", "quantized_model_init"]
