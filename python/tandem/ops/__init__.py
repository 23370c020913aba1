"""Operations, and `Sequential`, which plans lists of them as pipelines. Names and arguments are those of transformer_engine."""

from typing import Any

from tandem.op_base.context import OperationContext
from tandem.ops import basic, fused, fuser
from tandem.ops.activation import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    ClampedSwiGLU,
    ErfGEGLU,
    ErfGELU,
    HardSwish,
    LeakyReLU,
    Mish,
    ReGLU,
    ReLU,
    ScaledClampedQGeGLU,
    ScaledSiTUGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    SiLU,
    SiTUGLU,
    Softplus,
    SReGLU,
    SReLU,
    SwiGLU,
)
from tandem.ops.attention import Attention, QKNorm, Rotary
from tandem.ops.collective import AllGather, AllReduce, ReduceScatter
from tandem.ops.declared import register_fusion
from tandem.ops.grouped_linear import GroupedLinear
from tandem.ops.linear import BasicLinear, Bias, Linear
from tandem.ops.loss import CrossEntropy, LinearCrossEntropy, LinearCrossEntropyWithPredictions
from tandem.ops.norm import L2Normalization, LayerNorm, RMSNorm
from tandem.ops.op import BasicOperation, FusedOperation, FusibleOperation
from tandem.ops.sequential import Sequential
from tandem.ops.structure import AddExtraInput, ConstantScale, Dropout, Identity, MakeExtraOutput, Modulate, Quantize, Reshape
from tandem.user_ops import runtime
from tandem.user_ops.fusions import (
    FusionHandle,
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
)

runtime.install()

__all__ = [
    "AddExtraInput",
    "AllGather",
    "AllReduce",
    "Attention",
    "BasicLinear",
    "BasicOperation",
    "Bias",
    "ClampedSwiGLU",
    "ConstantScale",
    "Dropout",
    "ErfGEGLU",
    "ErfGELU",
    "FusedOperation",
    "FusibleOperation",
    "FusionHandle",
    "GEGLU",
    "GELU",
    "GLU",
    "GroupedLinear",
    "HardSwish",
    "Identity",
    "L2Normalization",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "CrossEntropy",
    "LinearCrossEntropy",
    "LinearCrossEntropyWithPredictions",
    "MakeExtraOutput",
    "Mish",
    "Modulate",
    "OperationContext",
    "QGEGLU",
    "QGELU",
    "QKNorm",
    "Quantize",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "ReduceScatter",
    "Reshape",
    "Rotary",
    "SReGLU",
    "SReLU",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "Sequential",
    "SiLU",
    "SiTUGLU",
    "Softplus",
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


def __getattr__(name: str) -> Any:
    there = [each for each in __all__ if each[0].isupper()]
    meant = [each for each in there if each.lower() == name.lower()]
    advice = f"Write {meant[0]}." if meant else f"There are {', '.join(there)}; a torch.nn module may stand between them."
    raise AttributeError(f"tandem.ops: expected a name that it has, got {name!r}. {advice}")
