"""Quantized parameters in state dicts, which hold their parts as unquantized tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from tandem.quantized.parts import PARTS, distinct, matrix_rows, sizes_of_parts
from tandem.quantized.quantizer import quantizer_of_text
from tandem.quantized.tensor import QuantizedTensor, assembled

_QUANTIZER = "quantizer"  # last word of the key under which a state dict has the quantizer's text as bytes
_TEXT_BYTES = 64  # texts are padded to this length, so that a checkpoint of another format loads in place


def save_parts(parameters: Mapping[str, torch.Tensor | None], destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
    """Replaces quantized parameters in a state dict by their parts and the text of their quantizer."""
    for name, param in parameters.items():
        if isinstance(param, QuantizedTensor):
            destination.pop(prefix + name, None)
            for part, tensor in distinct(param).items():
                destination[f"{prefix}{name}.{part}"] = tensor if keep_vars else tensor.detach()
            text = list(param.quantizer.text.encode().ljust(_TEXT_BYTES))
            destination[f"{prefix}{name}.{_QUANTIZER}"] = torch.tensor(text, dtype=torch.uint8)


def load_parts(parameters: Mapping[str, torch.Tensor | None], state_dict: dict[str, Any], prefix: str) -> list[str]:
    """Replaces the parts of each parameter in a state dict by one tensor: a quantized one if the parameter has the quantizer of the parts, else the
    dequantized values. Parts without the text of a quantizer count as the parameter's own format; returns the keys of those missing texts."""
    missing = []
    for name, param in parameters.items():
        key = f"{prefix}{name}."
        given = {part: state_dict.pop(key + part) for part in PARTS if key + part in state_dict}
        saved = state_dict.pop(key + _QUANTIZER, None)
        if not given or param is None:
            continue
        own, held = (param.quantizer.text, distinct(param)) if isinstance(param, QuantizedTensor) else ("", {})
        if saved is None and own:
            missing.append(key + _QUANTIZER)
        text = own if saved is None else bytes(saved.tolist()).decode().rstrip()
        if text == own and set(held) <= set(given) and isinstance(param, QuantizedTensor):
            for part, tensor in held.items():
                if given[part].shape != tensor.shape:
                    raise RuntimeError(
                        f"{key}{part}: expected shape {list(tensor.shape)}, got {list(given[part].shape)}. Load the state of the same module."
                    )
            state_dict[prefix + name] = param._of({part: given[part] for part in held})
            continue
        if not text:
            raise RuntimeError(
                f"{prefix}{name}: expected plain numbers in the state dict, as the parameter has, got {', '.join(given)}. Quantize the parameter as "
                "the saved one was: torch.nn.Parameter(tandem.quantize(...))."
            )
        expected = sizes_of_parts(text, matrix_rows(param), param.shape[-1] if param.dim() else 1)
        for part, tensor in given.items():
            if math.prod(expected[part]) != tensor.numel():
                raise RuntimeError(f"{key}{part}: expected shape {list(expected[part])}, got {list(tensor.shape)}. Load the state of the same module.")
        if "rowwise_data" not in given and "columnwise_data" not in given:
            raise RuntimeError(f"{prefix}{name}: expected codes among its parts in the state dict, got {', '.join(given)}. Save all parts.")
        codes = assembled([given.get(part) for part in PARTS], quantizer_of_text(text), param.dtype, param.shape)
        state_dict[prefix + name] = codes._numbers()
    return missing
