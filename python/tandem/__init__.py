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
from tandem._versions import check_torch

check_torch(torch.__version__, TORCH)

from tandem import _C, recipe  # noqa: E402
from tandem._C import cached_bytes, empty_cache, set_cache_limit  # noqa: E402
from tandem._autocast import autocast  # noqa: E402
from tandem._checkpoint import checkpoint  # noqa: E402
from tandem._compile import compile  # noqa: A004, E402
from tandem._loss import linear_cross_entropy  # noqa: E402
from tandem._memory_budget import memory_budget  # noqa: E402
from tandem._names import (  # noqa: E402
    fp8_autocast,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from tandem._quantize import (  # noqa: E402
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    cast,
    cast_back,
    quantize,
)
from tandem._quantized_tensor import QuantizedTensor  # noqa: E402
from tandem._quantizer import Quantizer  # noqa: E402
from tandem._quantized_init import finish_quantized_init, fp8_model_init, quantized_model_init  # noqa: E402
from tandem._weights import WeightWorkspace, quantize_weight, weights_changed, weights_unchanged  # noqa: E402
from tandem import ops  # noqa: E402
from tandem._decompositions import decompositions, register_decompositions  # noqa: E402
from tandem._export import transformer_engine_state_dict  # noqa: E402
from tandem.modules import (  # noqa: E402
    GroupedLinear,
    InferenceParams,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MultiheadAttention,
    RMSNorm,
    RotaryPositionEmbedding,
    TransformerLayer,
    apply_rotary_pos_emb,
)
from tandem._inspect import Inspection, inspect  # noqa: E402
from tandem._compiled_state import load_recipe_state_dict, recipe_state_dict  # noqa: E402
from tandem._recipe_state import make_recipe_state  # noqa: E402
from tandem._report import Verification, explain, verify  # noqa: E402

__version__: str = _C.version()
__all__ = [
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    "QuantizedTensor",
    "Quantizer",
    "GroupedLinear",
    "InferenceParams",
    "Inspection",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "apply_rotary_pos_emb",
    "Verification",
    "WeightWorkspace",
    "__version__",
    "autocast",
    "cached_bytes",
    "cast",
    "cast_back",
    "checkpoint",
    "compile",
    "decompositions",
    "empty_cache",
    "explain",
    "inspect",
    "fp8_autocast",
    "finish_quantized_init",
    "fp8_model_init",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "linear_cross_entropy",
    "load_recipe_state_dict",
    "make_recipe_state",
    "memory_budget",
    "ops",
    "quantize",
    "quantize_weight",
    "quantized_model_init",
    "recipe",
    "recipe_state_dict",
    "set_cache_limit",
    "transformer_engine_state_dict",
    "verify",
    "weights_changed",
    "weights_unchanged",
]


def _after_step(*_: object) -> None:
    _C.weights_changed()  # fused optimizers write without moving version counters


register_optimizer_step_post_hook(_after_step)
register_decompositions()


def __dir__() -> list[str]:
    return __all__
