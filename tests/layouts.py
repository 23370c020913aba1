"""Memory layouts that torch allows and that few programs make by hand."""

from __future__ import annotations

import torch


def laid(values: torch.Tensor, generator: torch.Generator, may_negate: bool = True) -> torch.Tensor:
    """The same values in memory of a random layout.

    The dimensions lie in any order, with steps and gaps; a dimension of one element has any stride, which no reader may use. NaN, or a large
    number where the dtype has none, lies in every gap and in front of and behind the elements. The negative bit is set now and then, unless it
    may not be.
    """

    def draw(*choices: int) -> int:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    if values.dim() == 0:
        return values
    strides, extent = [0] * values.dim(), draw(1, 1, 1, 2, 3)
    order = torch.randperm(values.dim(), generator=generator).tolist() if draw(0, 1) else list(reversed(range(values.dim())))
    for dim in order:
        strides[dim] = extent
        extent = extent * max(values.shape[dim], 1) + draw(0, 0, 0, 1, 5)
    begin = draw(0, 0, 1, 3, 8)
    poison = float("nan") if values.is_floating_point() else 99
    memory = torch.full((begin + extent + draw(0, 1, 16),), poison, dtype=values.dtype)
    negative = may_negate and values.is_floating_point() and draw(0, 0, 0, 0, 0, 0, 0, 1) == 1
    memory.as_strided(values.shape, strides, begin).copy_(-values if negative else values)
    for dim, size in enumerate(values.shape):
        if size == 1:
            others = [stride for stride, of in zip(strides, values.shape, strict=True) if of > 1]
            strides[dim] = draw(strides[dim], 0, 1, 7, 1_000_003, *others)
    view = memory.as_strided(values.shape, strides, begin)
    return torch._neg_view(view) if negative else view
