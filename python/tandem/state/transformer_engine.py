"""State dicts under TransformerEngine's keys."""

from __future__ import annotations

from typing import Any

import torch

from tandem.modules.attention import RotaryPositionEmbedding
from tandem.op_base.base import OpBase
from tandem.quantized.tensor import QuantizedTensor
from tandem.recipe_state import NAME


def transformer_engine_state_dict(module: torch.nn.Module, *, extra_state: bool = True) -> dict[str, Any]:
    """The state dict of a module under the keys of TransformerEngine. TransformerEngine loads it, and so does `load_state_dict` of the module.

    The tensors are the module's own, so torch.distributed.checkpoint.load into them loads into the module; quantized parameters are dequantized
    copies. Scales of delayed scaling are left out, as TransformerEngine keeps them in pickles.

    Args:
        module: an op, or a module that contains ops at any depth.
        extra_state: whether to add the empty `_extra_state` entries that TransformerEngine requires. Without them all entries are tensors with
            content, as torch.distributed.checkpoint needs them for checkpoints in which the extra state has content.

    >>> import tandem
    >>> [*tandem.transformer_engine_state_dict(tandem.ops.Sequential(tandem.ops.Linear(4, 2)), extra_state=False)]
    ['0.basic_ops.0.weight', '0.basic_ops.1.bias']
    """
    state: dict[str, Any] = module.state_dict()
    theirs: dict[str, str] = {}  # by our key
    states: dict[str, torch.Tensor] = {}
    for path, unit in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        if isinstance(unit, RotaryPositionEmbedding):
            state[f"{prefix}inv_freq"] = unit.inv_freq
        if not isinstance(unit, OpBase) or unit._holder is not unit:
            continue
        theirs.update({prefix + ours: prefix + name for name, ours in unit._transformer_engine_names().items()})
        states.update({f"{prefix}{owner}_extra_state": torch.empty(0, dtype=torch.uint8) for owner in unit._transformer_engine_states()})
        for key in [key for key in state if key.startswith(f"{prefix}{NAME}.")]:
            del state[key]
        for name, param in unit._parameters.items():
            if isinstance(param, QuantizedTensor):
                for key in [key for key in state if key.startswith(f"{prefix}{name}.")]:
                    del state[key]
                state[prefix + name] = param.detach().dequantize()
    named = {theirs.get(key, key): value for key, value in state.items()}
    return {**named, **states} if extra_state else named
