"""A recipe of each kind, by a short name. All round to nearest, so that two runs give the same numbers."""

from tandem.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling

RECIPES = {
    "current": Float8CurrentScaling(),
    "delayed": DelayedScaling(amax_history_len=4),
    "blocks": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
}
