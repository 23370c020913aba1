"""Classes that show fused steps of a plan, with transformer_engine's names where it has one. The library runs the steps; these list their ops."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from tandem.op_base.base import BasicOpBase, OpBase
from tandem.op_base.directions import PartsMixin
from tandem.op_base.signature import signature_of
from tandem.ops.activation import _Activation, _Interleaved
from tandem.ops.linear import BasicLinear, Bias
from tandem.ops.norm import RMSNorm
from tandem.ops.op import FusedOperation
from tandem.ops.structure import AddExtraInput, ConstantScale, MakeExtraOutput


class LibraryFusion(PartsMixin, FusedOperation):
    """A fused step of the library. `name` is the name of its fusion."""

    name = ""
    _members: ClassVar[Mapping[str, type[BasicOpBase] | tuple[type[BasicOpBase], ...]]] = {}  # by name, in the order of the ops
    _optional: ClassVar[tuple[str, ...]] = ()

    def __init__(self, basic_ops: Iterable[OpBase] | None = None, **members: BasicOpBase | None) -> None:
        """Makes a fused op of these basic ops.

        Args:
            basic_ops: all ops in order, or None.
            members: the ops by TransformerEngine's names instead, such as `linear` and `bias`; TypeError if one is missing or of another class.
        """
        super().__init__(self._named(members) if basic_ops is None else basic_ops)

    def _named(self, members: Mapping[str, BasicOpBase | None]) -> list[BasicOpBase]:
        own = type(self).__name__
        unknown = [name for name in members if name not in self._members]
        missing = [name for name in self._members if members.get(name) is None and name not in self._optional]
        if unknown or missing:
            raise TypeError(f"{own}: expected the ops {', '.join(self._members)} by name, got {', '.join(members) or 'none'}. Pass one op for each.")
        found = [(name, kind, members.get(name)) for name, kind in self._members.items()]
        for name, kind, op in found:
            if op is not None and not isinstance(op, kind):
                kinds = kind if isinstance(kind, tuple) else (kind,)
                raise TypeError(f"{own}: expected {name} to be a {' or '.join(each.__name__.strip('_') for each in kinds)}, got {type(op).__name__}. Pass such an op.")
        return [op for _, _, op in found if op is not None]

    def extra_repr(self) -> str:
        return self.name


class ForwardLinearBiasActivation(LibraryFusion):
    """A product, its bias if any, and the activation behind it if any."""

    _members = {"linear": BasicLinear, "bias": Bias, "activation": (_Activation, _Interleaved)}
    _optional = ("bias", "activation")


class ForwardLinearBiasAdd(LibraryFusion):
    """A product, its bias if any, and a sum with an extra input."""

    _members = {"linear": BasicLinear, "bias": Bias, "add": AddExtraInput}
    _optional = ("bias",)


class ForwardLinearScaleAdd(LibraryFusion):
    """A product, a constant factor, and a sum with an extra input."""

    _members = {"linear": BasicLinear, "scale": ConstantScale, "add": AddExtraInput}


class BackwardActivationBias(LibraryFusion):
    """The gradients of a bias and of the activation that follows it."""

    _members = {"bias": Bias, "activation": (_Activation, _Interleaved)}


class BackwardAddRMSNorm(LibraryFusion):
    """The gradient of an RMSNorm, plus the gradient of the extra output in front of it."""

    _members = {"add": MakeExtraOutput, "rmsnorm": RMSNorm}


class BackwardLinearAdd(LibraryFusion):
    """The gradient of a product, plus the gradient of the extra output in front of it."""

    _members = {"backward_add": MakeExtraOutput, "linear": BasicLinear}


class BackwardLinearScale(LibraryFusion):
    """The gradients of a product and of the constant factor that follows it."""

    _members = {"linear": BasicLinear, "scale": ConstantScale}


_FORWARD: dict[tuple[str, ...], type[LibraryFusion]] = {
    ("basic_linear", "bias"): ForwardLinearBiasActivation,
    ("basic_linear", "bias", "activation"): ForwardLinearBiasActivation,
    ("basic_linear", "activation"): ForwardLinearBiasActivation,
    ("basic_linear", "bias", "add_extra_input"): ForwardLinearBiasAdd,
    ("basic_linear", "add_extra_input"): ForwardLinearBiasAdd,
    ("basic_linear", "constant_scale", "add_extra_input"): ForwardLinearScaleAdd,
}
_BACKWARD: dict[tuple[str, ...], type[LibraryFusion]] = {
    ("bias", "activation"): BackwardActivationBias,
    ("make_extra_output", "rms_norm"): BackwardAddRMSNorm,
    ("make_extra_output", "basic_linear"): BackwardLinearAdd,
    ("basic_linear", "constant_scale"): BackwardLinearScale,
}


def shown(name: str, ops: Sequence[BasicOpBase], *, is_backward: bool) -> LibraryFusion:
    """The fused op that shows a fused step of the library over `ops`."""
    families = [signature_of(op._kind).family if op._kind else "" for op in ops]
    kinds = tuple("activation" if family in ("activation", "glu") else op._kind for op, family in zip(ops, families, strict=True))
    covered: Iterable[OpBase] = ops
    made = (_BACKWARD if is_backward else _FORWARD).get(kinds, LibraryFusion)(covered)
    made.name = name
    return made


__all__ = [
    "BackwardActivationBias",
    "BackwardAddRMSNorm",
    "BackwardLinearAdd",
    "BackwardLinearScale",
    "ForwardLinearBiasActivation",
    "ForwardLinearBiasAdd",
    "ForwardLinearScaleAdd",
    "LibraryFusion",
]
