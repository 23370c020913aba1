"""Hooks, which make calling a module more than calling its forward. The library reads these lists before it runs a pipeline."""

from __future__ import annotations

import torch
import torch.nn.modules.module as _modules

OF_A_MODULE = {  # attributes that hold hooks, and the words for them in messages
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
OF_ALL_MODULES = (
    _modules._global_forward_hooks,
    _modules._global_forward_pre_hooks,
    _modules._global_backward_hooks,
    _modules._global_backward_pre_hooks,
)


def any_of_all_modules() -> bool:
    """Whether hooks are registered for all modules."""
    for hooks in OF_ALL_MODULES:
        if hooks:
            return True
    return False


def any_of(module: torch.nn.Module) -> bool:
    """Whether a module has hooks of its own."""
    for field in OF_A_MODULE:
        if getattr(module, field):
            return True
    return False
