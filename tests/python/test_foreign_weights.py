"""Weights whose types have products of their own, as those of quantizing libraries: they are asked as `torch.nn.Linear` asks them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import randomize
from torch.testing import assert_close

import tandem
from tandem import ops

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Rounded(torch.Tensor):
    """A weight in whole numbers and a scale, which knows linear and next to nothing else."""

    codes: torch.Tensor
    scale: torch.Tensor
    calls = 0

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Rounded:
        made: Rounded = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)  # type: ignore[attr-defined]
        made.codes, made.scale = codes, scale
        return made

    @classmethod
    def of(cls, weight: torch.Tensor) -> torch.nn.Parameter:
        scale = weight.detach().abs().amax() / 127
        return torch.nn.Parameter(cls((weight.detach() / scale).round().to(torch.int8), scale), requires_grad=False)

    def numbers(self) -> torch.Tensor:
        return self.codes.to(self.scale.dtype) * self.scale

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Rounded({list(self.shape)})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Any], context: None, size: Any, stride: Any) -> Rounded:
        return Rounded(parts["codes"], parts["scale"])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.linear:
            x, weight, *bias = args
            return torch.nn.functional.linear(x, weight.numbers(), *bias, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.view.default):  # what compilers ask of an argument
            return Rounded(args[0].codes, args[0].scale)
        raise NotImplementedError(f"Rounded knows no {function}")


def modules(bias: bool) -> list[Any]:
    return [
        ops.Linear(8, 8, bias=bias),
        ops.BasicLinear(8, 8),
        ops.Sequential(ops.RMSNorm(8), ops.Linear(8, 12, bias=bias), ops.GELU(), ops.Linear(12, 4, bias=bias)),
        tandem.Linear(8, 8, bias=bias),
    ]


def quantized(module: Any) -> list[torch.nn.Module]:
    found = []
    for each in module.modules():
        if isinstance(each, (ops.Linear, ops.BasicLinear, tandem.Linear)) and not isinstance(each.weight, Rounded):  # as the parts of one are then
            each.weight = Rounded.of(each.weight)
            found.append(each)
    return found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", range(4))
def test_they_are_asked(kind: int, bias: bool) -> None:
    module = randomize(modules(bias)[kind])
    x, same = (torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    module(x)  # with plain weights: what was made for these does not serve
    found = quantized(module)
    y = module(x)
    y.sum().backward()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)(x.detach())
    with torch.no_grad():
        assert_close(module(x), y)
    grads = {name: param.grad for name, param in module.named_parameters() if param.requires_grad}
    for each in found:
        each.weight = torch.nn.Parameter(each.weight.numbers(), requires_grad=False)  # type: ignore[operator, union-attr]
    module.zero_grad()
    expected = module(same)
    expected.sum().backward()
    assert_close(y, expected)
    assert_close(compiled, expected)
    assert_close(x.grad, same.grad)
    for name, grad in grads.items():
        assert_close(grad, module.get_parameter(name).grad)


def test_a_pipeline_tells_of_them() -> None:
    box = ops.Sequential(ops.RMSNorm(8), ops.Linear(8, 12), ops.GELU(), ops.Linear(12, 4))
    quantized(box[1])
    box(torch.randn(2, 8))
    assert "cut into 2 pipelines: Linear has a weight of type Rounded, which multiplies by itself" in box.explain()
    assert "linear_bias" in box.explain(), "what stands behind is a pipeline as ever"


def test_a_product_that_cannot_be_asked_says_what_it_lacks() -> None:
    linear = ops.BasicLinear(8, 8, accumulate_into_main_grad=True)
    linear.weight = Rounded.of(linear.weight)  # type: ignore[assignment]
    with pytest.raises(NotImplementedError, match="Rounded knows no aten"):
        linear(torch.randn(2, 8))
