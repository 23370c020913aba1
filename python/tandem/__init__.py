"""Tandem: an operation fuser for training with PyTorch.

>>> import torch, tandem
>>> from tandem import ops
>>> mlp = ops.Sequential(ops.RMSNorm(64), ops.Linear(64, 256), ops.SwiGLU(), ops.Linear(128, 64))
>>> mlp(torch.randn(8, 64)).shape
torch.Size([8, 64])
>>> mlp.fusions_made()
['glu_backward_bias', 'linear_bias', 'linear_bias_glu']
>>> print(tandem.explain(mlp).splitlines()[0])
plan: training, with gradients, recipe none
"""


import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from tandem._build import TORCH
from tandem.versions import check_torch

check_torch(torch.__version__, TORCH)

from tandem import _C, modules, ops, recipe  # noqa: E402
from tandem._C import cached_bytes, empty_cache, set_cache_limit  # noqa: E402
from tandem.compilers.compile import compile  # noqa: A004, E402
from tandem.compilers.decompositions import decompositions, register_decompositions  # noqa: E402
from tandem.modules import *  # noqa: E402, F403
from tandem.ops.linear_cross_entropy import linear_cross_entropy  # noqa: E402
from tandem.pipelines.reporting import Verification  # noqa: E402
from tandem.quantized.formats import (  # noqa: E402
    Float8BlockQuantizer, Float8CurrentScalingQuantizer, Float8Quantizer, MXFP8Quantizer, NVFP4Quantizer, cast, cast_back, quantize,
)
from tandem.quantized.quantizer import Quantizer  # noqa: E402
from tandem.quantized.tensor import QuantizedTensor  # noqa: E402
from tandem.quantized.weights import WeightWorkspace, quantize_weight, weights_changed, weights_unchanged  # noqa: E402
from tandem.regions.autocast import (  # noqa: E402
    autocast, fp8_autocast, is_fp8_available, is_fp8_block_scaling_available, is_mxfp8_available, is_nvfp4_available,
)
from tandem.regions.checkpoint import checkpoint  # noqa: E402
from tandem.regions.memory_budget import memory_budget  # noqa: E402
from tandem.regions.model_init import finish_quantized_init, fp8_model_init, quantized_model_init  # noqa: E402
from tandem.report.explain import explain, verify  # noqa: E402
from tandem.report.help import shorten_help  # noqa: E402
from tandem.report.inspection import Inspection, inspect  # noqa: E402
from tandem.state.compiled import load_recipe_state_dict, recipe_state_dict  # noqa: E402
from tandem.state.recipe import make_recipe_state  # noqa: E402
from tandem.state.transformer_engine import transformer_engine_state_dict  # noqa: E402

__version__: str = _C.version()
__all__ = [
    "Float8BlockQuantizer", "Float8CurrentScalingQuantizer", "Float8Quantizer", "Inspection", "MXFP8Quantizer", "NVFP4Quantizer", "QuantizedTensor",
    "Quantizer", "Verification", "WeightWorkspace",
    "__version__", "autocast", "cached_bytes", "cast", "cast_back", "checkpoint", "compile", "decompositions", "empty_cache", "explain",
    "finish_quantized_init", "fp8_autocast", "fp8_model_init", "inspect", "is_fp8_available", "is_fp8_block_scaling_available", "is_mxfp8_available",
    "is_nvfp4_available", "linear_cross_entropy", "load_recipe_state_dict", "make_recipe_state", "memory_budget", "ops", "quantize", "quantize_weight",
    "quantized_model_init", "recipe", "recipe_state_dict", "set_cache_limit", "transformer_engine_state_dict", "verify", "weights_changed",
    "weights_unchanged",
]
__all__ += modules.__all__


def _after_step(*_: object) -> None:
    _C.weights_changed()  # fused optimizers write weights without changing version counters


register_optimizer_step_post_hook(_after_step)
register_decompositions()
shorten_help()


def __dir__() -> list[str]:
    return __all__
