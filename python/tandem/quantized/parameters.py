"""Quantized parameters, whole or sharded over ranks: creating them from unquantized ones, and writing into them."""

from __future__ import annotations

from typing import Any

import torch

from tandem.quantized.quantizer import Quantizer
from tandem.quantized.tensor import OF_A_RANK, QuantizedTensor
from tandem.quantized.views import FIRST_NUMBERS


def codes_of(param: Any) -> QuantizedTensor | None:
    """The quantized tensor that a parameter is, or that a DTensor has on this rank; None if it is not quantized."""
    local = local_of(param)
    return local if isinstance(local, QuantizedTensor) else None


def local_of(param: Any) -> torch.Tensor:
    """The local tensor of a DTensor; any other parameter itself."""
    local: torch.Tensor = getattr(param, "_local_tensor", param)
    return local


def is_shared(param: Any) -> bool:
    """Whether a parameter is a DTensor."""
    return local_of(param) is not param


def with_local(param: Any, local: torch.Tensor) -> torch.Tensor:
    """A DTensor with the placements of `param` and the local tensor `local`; `local` itself if `param` is no DTensor."""
    if not is_shared(param):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride())


def for_share(param: Any, quantizer: Quantizer) -> Quantizer:
    """The quantizer for this rank's shard of a parameter. If one scale serves the whole parameter, the ranks of the mesh share their amax."""
    if not is_shared(param):
        return quantizer
    at = [dim for dim, placement in enumerate(param.placements) if placement.is_shard()]
    if len(at) > 1:
        raise ValueError(
            f"quantized_model_init: expected weights that ranks share in one dimension of their mesh, got {len(at)}: {tuple(param.placements)}. Share them "
            "by fully_shard alone."
        )
    return quantizer._of_all(param.device_mesh.get_group(at[0])) if at else quantizer


def in_codes(param: torch.Tensor, quantizer: Quantizer, keeps: bool) -> torch.nn.Parameter:
    """A quantized parameter with the values of `param`, whose unquantized numbers are kept on the CPU if `keeps`."""
    numbers = local_of(param).detach()
    codes = for_share(param, quantizer).quantize(numbers)
    made = torch.nn.Parameter(with_local(param, codes), requires_grad=param.requires_grad)
    if is_shared(made):
        local_of(made).__dict__[OF_A_RANK] = True
    made.__dict__.update(param.__dict__)
    if keeps:
        keep_numbers(made, numbers)
    return made


def keep_numbers(param: Any, numbers: torch.Tensor) -> None:
    """Keeps a copy on the CPU of the initial numbers of a quantized parameter, or of this rank's shard of it."""
    first = [numbers.detach().to("cpu", copy=True)]
    local_of(param).__dict__[FIRST_NUMBERS] = first
    if is_shared(param):  # a DTensor does not have the methods of its local tensor
        held = _First(first)
        param.get_high_precision_init_val, param.clear_high_precision_init_val = held.get, held.clear


def keeps_numbers(param: Any) -> bool:
    """Whether the initial numbers of a parameter are kept."""
    return getattr(param, "get_high_precision_init_val", lambda: None)() is not None


class _First:
    def __init__(self, numbers: list[torch.Tensor | None]) -> None:
        self.numbers = numbers

    def get(self) -> torch.Tensor | None:
        return self.numbers[0]

    def clear(self) -> None:
        self.numbers[0] = None


def numbers_of(param: Any) -> torch.Tensor:
    """The dequantized values of a quantized parameter, sharded as the parameter is."""
    codes: Any = codes_of(param)
    return with_local(param, codes._numbers())


def write(param: Any, numbers: torch.Tensor) -> None:
    """Quantizes `numbers` into a parameter, or into this rank's shard of it. All ranks of its mesh must call it."""
    codes: Any = codes_of(param)
    codes.quantizer = for_share(param, codes.quantizer)
    codes.quantize_(local_of(numbers))
    if is_shared(param) and keeps_numbers(param):  # fully_shard may have replaced the local tensor
        keep_numbers(param, local_of(numbers))
