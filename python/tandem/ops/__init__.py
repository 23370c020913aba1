"""Operations, and the container that runs lists of them as few fused steps. Names and arguments are those of transformer_engine."""

from tandem import _runtime
from tandem.ops import basic, fused, fuser
from tandem.ops.activation import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    ClampedSwiGLU,
    ReGLU,
    ReLU,
    ScaledClampedQGeGLU,
    ScaledSiTUGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    SiLU,
    SiTUGLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from tandem.ops.collective import AllGather, AllReduce, ReduceScatter
from tandem.ops.context import OperationContext
from tandem.ops.declared import register_fusion
from tandem.ops.fusions import (
    FusionHandle,
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
)
from tandem.ops.grouped_linear import GroupedLinear
from tandem.ops.linear import BasicLinear, Bias, Linear
from tandem.ops.norm import L2Normalization, LayerNorm, RMSNorm
from tandem.ops.op import BasicOperation, FusedOperation, FusibleOperation
from tandem.ops.sequential import Sequential
from tandem.ops.structure import AddExtraInput, ConstantScale, Dropout, Identity, MakeExtraOutput, Quantize, Reshape

_runtime.install()

__all__ = [
    "AddExtraInput",
    "AllGather",
    "AllReduce",
    "BasicLinear",
    "BasicOperation",
    "Bias",
    "ClampedSwiGLU",
    "ConstantScale",
    "Dropout",
    "FusedOperation",
    "FusibleOperation",
    "FusionHandle",
    "GEGLU",
    "GELU",
    "GLU",
    "GroupedLinear",
    "Identity",
    "L2Normalization",
    "LayerNorm",
    "Linear",
    "MakeExtraOutput",
    "OperationContext",
    "QGEGLU",
    "QGELU",
    "Quantize",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "ReduceScatter",
    "Reshape",
    "SReGLU",
    "SReLU",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "Sequential",
    "SiLU",
    "SiTUGLU",
    "SwiGLU",
    "basic",
    "fused",
    "fuser",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
    "register_fusion",
]


def __dir__() -> list[str]:
    return __all__
