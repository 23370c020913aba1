"""Classes, created from signatures, of ops that have none in `tandem.ops`, including ops of a loaded C++ extension. The op "soft_clip" is
`tandem.ops.library.SoftClip`; its sizes are positional arguments, its options are keywords.

>>> from tandem.ops import library
>>> library.class_of("gelu")
<class 'tandem.ops.activation.GELU'>
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from tandem import _C
from tandem.arguments import positive
from tandem.op_base.deferred import DeferredMixin
from tandem.op_base.signature import Signature, signature_of
from tandem.ops.op import BasicOperation, own_classes


class LibraryOperation(DeferredMixin, BasicOperation):
    """An op of the library, described by its signature."""

    def __init__(self, *sizes: int, **options: Any) -> None:
        """Makes the op.

        Args:
            sizes: sizes of its parameters, such as that of the last dimension of x.
            options: options of the op; if it has parameters, also their `device` and `dtype`.
        """
        super().__init__()
        name, signature = type(self).__name__, signature_of(self._kind)
        given = inspect.signature(type(self)).bind(*sizes, **options)
        given.apply_defaults()
        for size in signature.sizes:
            setattr(self, size.name, positive(name, size.name, given.arguments[size.name]))
        for option in self._option_names:
            setattr(self, option, given.arguments[option])
        for parameter in signature.parameters:
            shape = [getattr(self, size) for size in parameter.shape]
            empty = torch.empty(shape, device=given.arguments["device"], dtype=given.arguments["dtype"])
            self.register_parameter(parameter.name, torch.nn.Parameter(empty))
        self._give_first_values()


def class_name(kind: str) -> str:
    """The name of the class that is created for an op."""
    return "".join(part.capitalize() for part in kind.split("_"))


def _parameters_of(signature: Signature) -> list[inspect.Parameter]:
    """The arguments of the constructor."""
    sizes = [inspect.Parameter(size.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=int) for size in signature.sizes]
    defaults = {option.name: tuple(option.default) if option.type == "shape" else option.default for option in signature.options}
    if signature.parameters:
        defaults |= {"device": None, "dtype": None}
    required = {option.name for option in signature.options if option.is_required}
    return sizes + [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=inspect.Parameter.empty if name in required else default)
        for name, default in defaults.items()
    ]


@functools.cache
def class_of(kind: str) -> type[BasicOperation]:
    """The class of the op that the library calls `kind`, from `tandem.ops` or created here. Raises ValueError for an op that is not registered,
    and NotImplementedError if its signature does not say the shape of each parameter."""
    if kind in own_classes:
        return own_classes[kind]
    signature = signature_of(kind)
    unknown = [parameter.name for parameter in signature.parameters if not parameter.shape or parameter.name.endswith("[]")]
    if unknown:
        raise NotImplementedError(
            f"{kind}: expected a signature with the shape of each parameter, got none of {', '.join(unknown)}. Give it in the definition's params."
        )
    arguments = "\n".join(f"    {each.name}: {each.doc}." for each in (*signature.sizes, *signature.options))
    members = {
        "__doc__": f"{signature.formula}." + (f"\n\nArgs:\n{arguments}" if arguments else ""),
        "__module__": __name__,
        "__signature__": inspect.Signature(_parameters_of(signature)),
        "_kind": kind,
        "_shown_names": (*[size.name for size in signature.sizes], *[option.name for option in signature.options]),
    }
    return type(class_name(kind), (LibraryOperation,), members)


def __getattr__(name: str) -> type[LibraryOperation]:
    for kind in _C.op_names():
        if kind not in own_classes and class_name(kind) == name:
            made: Any = class_of(kind)
            return made  # type: ignore[no-any-return]
    raise AttributeError(
        f"tandem.ops.library: expected the class of an op of the library that has none in tandem.ops, got {name!r}. "
        f"There are {', '.join(__dir__())}."
    )


def __dir__() -> list[str]:
    return sorted(["LibraryOperation", "class_name", "class_of", *(class_name(kind) for kind in _C.op_names() if kind not in own_classes)])
