"""Modules with the names, arguments and parameters of transformer_engine.pytorch: each is a pipeline of the ops of `tandem.ops`."""

from tandem.modules.attention import MultiheadAttention, RotaryPositionEmbedding, apply_rotary_pos_emb
from tandem.modules.grouped_linear import GroupedLinear
from tandem.modules.inference import InferenceParams
from tandem.modules.layer_norm_linear import LayerNormLinear
from tandem.modules.layer_norm_mlp import LayerNormMLP
from tandem.modules.linear import Linear
from tandem.modules.norm import LayerNorm, RMSNorm
from tandem.modules.transformer import TransformerLayer

__all__ = [
    "GroupedLinear",
    "InferenceParams",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "apply_rotary_pos_emb",
]
