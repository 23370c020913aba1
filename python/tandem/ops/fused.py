"""What fused steps of a plan are shown as, by transformer_engine's names where it has one. The library runs the steps; these name what they cover."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tandem.ops.op import FusedOperation
from tandem.ops.signature import signature_of
from tandem.ops.unit import BasicUnit, Unit


class LibraryFusion(FusedOperation):
    """A fused step of the library: `name` is the fusion's."""

    name = ""

    def extra_repr(self) -> str:
        return self.name


class ForwardLinearBiasActivation(LibraryFusion):
    """A product, its bias, and an activation where one follows."""


class ForwardLinearBiasAdd(LibraryFusion):
    """A product, its bias where there is one, and a sum with an extra input."""


class ForwardLinearScaleAdd(LibraryFusion):
    """A product, a constant factor, and a sum with an extra input."""


class BackwardActivationBias(LibraryFusion):
    """The gradients of a bias and of the activation behind it."""


class BackwardAddRMSNorm(LibraryFusion):
    """The gradient of an RMSNorm and the sum with that of the extra output before it."""


class BackwardLinearAdd(LibraryFusion):
    """The gradient of a product and the sum with that of the extra output before it."""


class BackwardLinearScale(LibraryFusion):
    """The gradients of a product and of the constant factor behind it."""


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


def shown(name: str, ops: Sequence[BasicUnit], *, is_backward: bool) -> LibraryFusion:
    """What a fused step of the library over `ops` is shown as."""
    families = [signature_of(op._kind).family if op._kind else "" for op in ops]
    kinds = tuple("activation" if family in ("activation", "glu") else op._kind for op, family in zip(ops, families, strict=True))
    covered: Iterable[Unit] = ops
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
