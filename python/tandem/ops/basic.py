"""The basic ops under their path in transformer_engine: `tandem.ops.basic.BasicLinear` is `tandem.ops.BasicLinear`."""

from typing import TYPE_CHECKING

from tandem.ops import activation, collective, grouped_linear, linear, norm, structure
from tandem.ops.op import BasicOperation

if TYPE_CHECKING:
    from tandem.ops.activation import *  # noqa: F403
    from tandem.ops.collective import *  # noqa: F403
    from tandem.ops.grouped_linear import *  # noqa: F403
    from tandem.ops.linear import *  # noqa: F403
    from tandem.ops.norm import *  # noqa: F403
    from tandem.ops.structure import *  # noqa: F403

_FOUND = {
    name: value
    for module in (activation, collective, grouped_linear, linear, norm, structure)
    for name, value in vars(module).items()
    if isinstance(value, type) and issubclass(value, BasicOperation) and value.__module__ == module.__name__ and not name.startswith("_")
}
globals().update(_FOUND)
__all__ = sorted(_FOUND)  # pyright: ignore[reportUnsupportedDunderAll]


def __dir__() -> list[str]:
    return __all__
