"""Measures time and bytes kept for backward of the MLP of a LLaMA block: norm, linear, SwiGLU, linear, residual, with inner size 8/3 hidden."""

from __future__ import annotations

import torch
from torch import nn

import tandem
from benchmarks.host import TorchSwiGLU
from benchmarks.timing import interleaved, table, verdict


class TorchBlock(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.RMSNorm(hidden, eps=1e-5), nn.Linear(hidden, 2 * inner, bias=False), TorchSwiGLU(), nn.Linear(inner, hidden, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


def tandem_block(hidden: int, inner: int) -> nn.Module:
    ops = tandem.ops
    head, tail = ops.MakeExtraOutput(), ops.AddExtraInput()
    head.set_extra_output_channel(0, "residual", output_to_caller=False)
    tail.set_extra_input_channel(0, "residual")
    return ops.Sequential(head, ops.RMSNorm(hidden), ops.Linear(hidden, 2 * inner, bias=False), ops.SwiGLU(), ops.Linear(inner, hidden, bias=False), tail)


def inner_size(hidden: int) -> int:
    return (8 * hidden // 3 + 31) // 32 * 32


def has_bfloat16() -> bool:
    """Whether the processor has instructions that multiply bfloat16."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported() and torch.cpu._is_avx512_bf16_supported()


def kept_bytes(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes of distinct tensors that are saved for backward, without parameters and x."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()} | {x.untyped_storage().data_ptr()}
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(x)
    del y
    return sum(seen.values())


def run() -> str:
    torch.set_num_threads(2)
    rows, kept = [], []
    dtypes = [torch.float32] + ([torch.bfloat16] if has_bfloat16() else [])
    bars = {(128, torch.float32): 1.15, (128, torch.bfloat16): 1.3, (1024, torch.float32): 1.04, (1024, torch.bfloat16): 1.08}
    for tokens, hidden in ((128, 256), (1024, 512)):
        for dtype in dtypes:
            inner = inner_size(hidden)
            torch._dynamo.reset()
            eager, pipeline = TorchBlock(hidden, inner).to(dtype), tandem_block(hidden, inner).to(dtype)
            compiled = torch.compile(eager, dynamic=False)
            x = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
            grad = torch.randn_like(x)
            a, b, c = (torch.randn(*shape, dtype=dtype) for shape in ((tokens, hidden), (2 * inner, hidden), (tokens, 2 * inner)))
            d, e = torch.randn(hidden, inner, dtype=dtype), torch.randn(tokens, inner, dtype=dtype)

            # Every implementation must at least compute the products, and add to the gradients of earlier steps.
            gradients = [torch.zeros_like(leaf) for leaf in (x, *pipeline.parameters())]

            def least(a=a, b=b, c=c, d=d, e=e, gradients=gradients) -> None:
                for left, right in ((a, b.t()), (e, d.t()), (a, d), (a.t(), e), (c, b), (c.t(), a)):
                    torch.mm(left, right)
                for gradient in gradients:
                    gradient.add_(gradient)

            step = lambda model: model(x).backward(grad)  # noqa: E731
            times = interleaved({"tandem": lambda: step(pipeline), "eager": lambda: step(eager), "compile": lambda: step(compiled),
                                 "least": least}, rounds=21, seconds=0.05)
            best = min(times["eager"], times["compile"])
            bar = bars[tokens, dtype]
            rows.append([f"{tokens}x{hidden} {dtype}".replace("torch.", ""), *(f"{times[k] * 1e6:.0f}" for k in ("tandem", "eager", "compile", "least")),
                         f"{best / times['tandem']:.2f}", f"{best / times['least']:.2f}", f">= {bar}", verdict(best / times["tandem"] >= bar)])
            if tokens == 1024:
                reference, ours = kept_bytes(eager, x), kept_bytes(pipeline, x)
                compiled_pipeline = kept_bytes(torch.compile(pipeline, dynamic=False), x)
                for what, value, limit in (("eager", ours, 0.48 if dtype == torch.float32 else 0.42), ("compiled", compiled_pipeline, 0.55)):
                    kept.append([f"{dtype}".replace("torch.", ""), what, str(value), str(reference), f"{value / reference:.3f}", f"<= {limit}", verdict(value / reference <= limit)])
    return (table("MLP block, forward+backward, us", ["size", "tandem", "eager", "compile", "products and sums", "x best rival", "x products and sums", "bar", ""], rows) + "\n\n" +
            table("bytes kept for backward, 1024x512, against eager torch.nn", ["dtype", "tandem", "bytes", "torch.nn", "ratio", "bar", ""], kept))
