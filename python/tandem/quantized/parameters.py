"""Parameters in codes made of plain ones, whole or shared by ranks, and what is loaded into them."""

from __future__ import annotations

from typing import Any

import torch

from tandem.quantized.quantizer import Quantizer
from tandem.quantized.tensor import OF_A_RANK, QuantizedTensor
from tandem.quantized.views import FIRST_NUMBERS


def codes_of(param: Any) -> QuantizedTensor | None:
    """The parameter itself or what this rank has of it, where that is in codes."""
    local = local_of(param)
    return local if isinstance(local, QuantizedTensor) else None


def local_of(param: Any) -> torch.Tensor:
    """What this rank has of a parameter that ranks share; else the parameter."""
    local: torch.Tensor = getattr(param, "_local_tensor", param)
    return local


def is_shared(param: Any) -> bool:
    """Whether it is a DTensor."""
    return local_of(param) is not param


def with_local(param: Any, local: torch.Tensor) -> torch.Tensor:
    """A tensor that ranks share as they share a parameter, of which this rank has `local`; itself of one that they do not share."""
    if not is_shared(param):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride())


def for_share(param: Any, quantizer: Quantizer) -> Quantizer:
    """What quantizes the share of a rank: one that has the amax of all, where a scale serves the whole parameter."""
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
    """A parameter of the codes of another one's numbers, which are kept where that is asked for."""
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
    """Notes the numbers that a parameter in codes was given first: those of this rank where ranks share it."""
    first = [numbers.detach().to("cpu", copy=True)]
    local_of(param).__dict__[FIRST_NUMBERS] = first
    if is_shared(param):  # a DTensor knows no such methods
        held = _First(first)
        param.get_high_precision_init_val, param.clear_high_precision_init_val = held.get, held.clear


def keeps_numbers(param: Any) -> bool:
    """Whether there are such."""
    return getattr(param, "get_high_precision_init_val", lambda: None)() is not None


class _First:
    def __init__(self, numbers: list[torch.Tensor | None]) -> None:
        self.numbers = numbers

    def get(self) -> torch.Tensor | None:
        return self.numbers[0]

    def clear(self) -> None:
        self.numbers[0] = None


def numbers_of(param: Any) -> torch.Tensor:
    """A plain tensor of a parameter in codes, shared as it is."""
    codes: Any = codes_of(param)
    return with_local(param, codes._numbers())


def write(param: Any, numbers: torch.Tensor) -> None:
    """Quantizes what this rank has of a parameter. All ranks that share it must."""
    codes: Any = codes_of(param)
    codes.quantizer = for_share(param, codes.quantizer)
    codes.quantize_(local_of(numbers))
    if is_shared(param) and keeps_numbers(param):  # fully_shard may have made another tensor of it
        keep_numbers(param, local_of(numbers))
