"""`tandem.compile`, which applies the backend of `torch.compile`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from typing_extensions import Unpack

if TYPE_CHECKING:
    from tandem.backend.options import GivenOptions

_Model = TypeVar("_Model", bound=Callable[..., Any])


def compile(model: _Model, *, fullgraph: bool = False, dynamic: bool | None = None, **options: Unpack[GivenOptions]) -> _Model:  # noqa: A001
    """`torch.compile(model, backend="tandem", options=options)`, which checks the options before the first call. The model itself is not changed.

    Args:
        model: a module or a function; another type raises TypeError.
        fullgraph: as for `torch.compile`.
        dynamic: as for `torch.compile`.
        options: `recipe`, `memory_budget`, `exclude`, `rest`, `logits`, `verify` and `require`; `tandem.backend.Options` says what errors they raise.
    """
    from tandem.backend import Options, backend  # this import loads Dynamo, which takes a second

    checked = Options.of(options)
    if not callable(model):
        raise TypeError(f"compile: expected a module or a function, got {type(model).__name__}. Pass the model.")
    if isinstance(model, torch.nn.Module):
        for text in checked.names_of_no_module(name for name, _ in model.named_modules()):
            warnings.warn(text, stacklevel=2)  # no error: a module of that name may be added before the first call
    compiled: Any = torch.compile(model, backend=backend, fullgraph=fullgraph, dynamic=dynamic, options={**options})
    return compiled  # type: ignore[no-any-return]
