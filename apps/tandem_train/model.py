"""The model: a byte-level transformer with pre-norm, rotary positions, causal attention and SwiGLU.

Shapes: bytes int64 [batch, length], length <= context -> logits [batch, length, 256]. Names, order and shapes of parameters do not depend on what
computes. Source: Radford et al. 2019 (GPT-2), with Su et al. 2021 (rotary, arXiv:2104.09864) and Shazeer 2020 (SwiGLU, arXiv:2002.05202).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu

import tandem

VOCABULARY = 256  # every byte is a token
_EPS, _BASE = 1e-5, 10000.0


class Sizes(NamedTuple):
    """The sizes of the model."""

    layers: int
    hidden: int
    heads: int
    context: int

    @property
    def inner(self) -> int:
        """Width of the MLP: 8/3 of hidden, rounded up to a multiple of 32. Its three matrices are then as large as two of 4 * hidden."""
        return (8 * self.hidden // 3 + 31) // 32 * 32


class PlainLayer(nn.Module):
    """A layer of torch's own modules and functions: x [batch, length, hidden] -> y of the same shape."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden, self.heads = sizes.hidden, sizes.heads
        self.attention_norm = nn.RMSNorm(hidden, eps=_EPS)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.projection = nn.Linear(hidden, hidden)
        self.mlp_norm = nn.RMSNorm(hidden, eps=_EPS)
        self.up = nn.Linear(hidden, 2 * sizes.inner)
        self.down = nn.Linear(sizes.inner, hidden)
        width = hidden // sizes.heads
        angles = torch.outer(torch.arange(sizes.context).float(), _BASE ** (torch.arange(0, width, 2).float() / -width))
        sines = angles.sin()
        self.register_buffer("cosines", torch.cat([angles, angles], -1).cos(), persistent=False)
        self.register_buffer("signed_sines", torch.cat([-sines, sines], -1), persistent=False)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Turns each pair (x[i], x[i + width / 2]) by its position's angle. x [.., length, width]."""
        length = x.shape[-2]
        first, second = x.chunk(2, -1)
        return torch.addcmul(x * self.cosines[:length], torch.cat([second, first], -1), self.signed_sines[:length])

    def attend(self, qkv: torch.Tensor) -> torch.Tensor:
        """Causal attention of all heads. qkv [batch, length, 3 hidden] -> [batch, length, hidden]."""
        by_head = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key = self.rotate(by_head[:2])
        value = by_head[2].contiguous()  # a view would keep all of qkv for backward
        return scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(-2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.projection(self.attend(self.qkv(self.attention_norm(x)))) + x
        gate, linear = self.up(self.mlp_norm(y)).chunk(2, -1)
        return self.down(silu(gate) * linear) + y


def tandem_layer(sizes: Sizes) -> nn.Module:
    """The same layer as one pipeline."""
    ops, hidden = tandem.ops, sizes.hidden
    heads = {"num_heads": sizes.heads, "head_dim": hidden // sizes.heads}
    fork, join, attended, out = ops.MakeExtraOutput(), ops.AddExtraInput(), ops.MakeExtraOutput(), ops.AddExtraInput()
    for name, head, tail in (("x", fork, join), ("attended", attended, out)):
        head.set_extra_output_channel(0, name, output_to_caller=False)
        tail.set_extra_input_channel(0, name)
    return ops.Sequential({
        "fork": fork,
        "attention_norm": ops.RMSNorm(hidden, eps=_EPS),
        "qkv": ops.Linear(hidden, 3 * hidden),
        "rotary": ops.Rotary(**heads, base=_BASE),
        "attention": ops.Attention(**heads, causal=True),
        "projection": tandem.Linear(hidden, hidden, save_original_input=True),  # attention keeps x for its own backward anyway
        "join": join,
        "attended": attended,
        "mlp_norm": ops.RMSNorm(hidden, eps=_EPS),
        "up": ops.Linear(hidden, 2 * sizes.inner),
        "swiglu": ops.SwiGLU(),
        "down": ops.Linear(sizes.inner, hidden),
        "out": out,
    })  # fmt: skip


class Gpt(nn.Module):
    """The model, whose layers and head torch's modules compute if it is `plain`, and pipelines if not; the embedding is torch's."""

    def __init__(self, sizes: Sizes, *, plain: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, sizes.hidden)
        self.layers = nn.ModuleList(PlainLayer(sizes) if plain else tandem_layer(sizes) for _ in range(sizes.layers))
        library, container = (nn, nn.Sequential) if plain else (tandem.ops, tandem.ops.Sequential)
        self.head = container()
        self.head.add_module("norm", library.RMSNorm(sizes.hidden, eps=_EPS))
        self.head.add_module("linear", library.Linear(sizes.hidden, VOCABULARY, bias=False))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Normal(0, 0.02) for matrices, less for matrices that add to the residual stream; ones for norms, zeros for biases."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1)
            elif name.endswith(".bias"):
                parameter.zero_()
            else:
                deviation = 0.02 / (2 * len(self.layers)) ** 0.5 if name.endswith(("projection.weight", "down.weight")) else 0.02
                parameter.copy_(torch.normal(0.0, deviation, tuple(parameter.shape), generator=generator))


@torch.no_grad()
def generate(model: Callable[[torch.Tensor], torch.Tensor], prompt: bytes, length: int, context: int, seed: int) -> bytes:
    """The prompt followed by `length` bytes, each drawn from the logits of the last `context` bytes at temperature 0.8."""
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(length):
        last = model(torch.tensor([text[-context:]]))[0, -1].float()
        text.append(int(torch.multinomial(torch.softmax(last / 0.8, -1), 1, generator=generator)))
    return bytes(text)
