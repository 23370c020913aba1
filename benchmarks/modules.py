"""Measures the host time of each module against a composite of torch.nn (4x8 float32, one thread), and bytes of parameters and activations per recipe."""

from __future__ import annotations

import torch
from torch import nn

import tandem
from benchmarks.timing import interleaved, table, verdict

FORWARD_BAR, STEP_BAR = 0.7, 0.9
HIDDEN, WIDE, TOKENS = 256, 1024, 512
# The quantizer of a quantized weight under each recipe.
RECIPES = {
    "Float8CurrentScaling": tandem.Float8CurrentScalingQuantizer(torch.float8_e4m3fn),
    "DelayedScaling": tandem.Float8CurrentScalingQuantizer(torch.float8_e4m3fn),
    "Float8BlockScaling": tandem.Float8BlockQuantizer(torch.float8_e4m3fn, rowwise=True, columnwise=True),
    "MXFP8BlockScaling": tandem.MXFP8Quantizer(torch.float8_e4m3fn),
    "NVFP4BlockScaling": tandem.NVFP4Quantizer(with_2d_quantization=True),
}


class TorchGrouped(nn.Module):
    """Two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([expert(rows) for expert, rows in zip(self.experts, x.split([2, 2]), strict=True)])


class TorchLayer(nn.Module):
    """A transformer layer of two heads, sequence first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(approximate="tanh"), nn.Linear(32, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm(x)).view(x.shape[0], x.shape[1], 2, 3, 4).permute(3, 1, 2, 0, 4)
        attended = nn.functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(attended.permute(2, 0, 1, 3).reshape(x.shape))
        return x + self.mlp(x)


def pairs() -> dict[str, tuple[nn.Module, nn.Module, tuple[int, ...]]]:
    """By name: torch modules, the equal module, sizes of x."""
    splits = torch.tensor([2, 2])
    grouped = tandem.GroupedLinear(2, 8, 8)

    class Grouped(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return grouped(x, splits)

    return {
        "Linear": (nn.Sequential(nn.Linear(8, 8)), tandem.Linear(8, 8), (4, 8)),
        "LayerNorm": (nn.Sequential(nn.LayerNorm(8)), tandem.LayerNorm(8), (4, 8)),
        "RMSNorm": (nn.Sequential(nn.RMSNorm(8)), tandem.RMSNorm(8), (4, 8)),
        "LayerNormLinear": (nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)), tandem.LayerNormLinear(8, 8), (4, 8)),
        "LayerNormMLP": (
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(approximate="tanh"), nn.Linear(32, 8)),
            tandem.LayerNormMLP(8, 32),
            (4, 8),
        ),
        "GroupedLinear": (TorchGrouped(), Grouped(), (4, 8)),
        "TransformerLayer": (TorchLayer(), tandem.TransformerLayer(8, 32, 2, hidden_dropout=0, attention_dropout=0), (4, 1, 8)),
    }


def host_time() -> str:
    torch.set_num_threads(1)
    rows = []
    for name, (reference, module, sizes) in pairs().items():
        x = torch.randn(*sizes, requires_grad=True)
        calls = {"torch": reference, "tandem": module}
        forward = interleaved({which: lambda call=call: call(x) for which, call in calls.items()})
        step = interleaved({which: lambda call=call: call(x).sum().backward() for which, call in calls.items()})
        for what, times, bar in (("forward", forward, FORWARD_BAR), ("forward+backward", step, STEP_BAR)):
            ratio = times["tandem"] / times["torch"]
            times_text = [f"{times[which] * 1e6:.2f}" for which in ("torch", "tandem")]
            rows.append([name, what, *times_text, f"{ratio:.2f}", f"<= {bar}", verdict(ratio <= bar)])
    return table("host time of modules, us per call, 4x8", ["module", "what", "torch.nn", "tandem", "ratio", "bar", ""], rows)


def bytes_of(parameter: torch.Tensor) -> int:
    """Bytes of a parameter, or of all parts of a quantized one."""
    if not isinstance(parameter, tandem.QuantizedTensor):
        return parameter.nbytes
    inner, _ = parameter.__tensor_flatten__()
    return sum(getattr(parameter, name).nbytes for name in inner)


def kept(recipe: tandem.recipe.Recipe | None, tokens: int) -> int:
    """Bytes that a LayerNormMLP keeps for backward, without inputs and parameters."""
    box = tandem.ops.Sequential(tandem.LayerNormMLP(HIDDEN, WIDE, bias=False))
    with tandem.autocast(enabled=recipe is not None, recipe=recipe):
        box(torch.randn(tokens, HIDDEN, requires_grad=True))
    return box.saved_bytes()


def memory() -> str:
    """A table for LayerNormMLP: bytes per parameter with quantized weights, and bytes kept for backward, per token and independent of tokens."""
    rows, base = [], (0.0, 0.0)
    for name in ("float32", *RECIPES):
        recipe = None if name == "float32" else getattr(tandem.recipe, name)()
        weights = list(tandem.LayerNormMLP(HIDDEN, WIDE, bias=False).parameters())
        count = sum(weight.numel() for weight in weights)
        if recipe is not None:
            weights = [tandem.quantize(weight.detach(), RECIPES[name]) if weight.dim() == 2 else weight for weight in weights]
        few, many = kept(recipe, TOKENS), kept(recipe, 2 * TOKENS)
        own = (sum(map(bytes_of, weights)) / count, (many - few) / TOKENS)
        base = own if recipe is None else base
        is_met = all(ours <= first * 1.0001 for ours, first in zip(own, base, strict=True))
        rows.append([name, f"{own[0]:.3f}", f"{own[1]:.0f}", f"{(2 * few - many) / count:.3f}", f"{own[0] / base[0]:.2f}", f"{own[1] / base[1]:.2f}",
                     verdict(is_met)])
    title = f"LayerNormMLP {HIDDEN} to {WIDE} without biases, float32: bytes of a parameter; bytes kept per token, and whatever the tokens, per parameter"
    return table(title, ["recipe", "per parameter", "per token", "once", "of float32", "of float32", "bar <= 1"], rows)


def run() -> str:
    return f"{host_time()}\n\n{memory()}"
