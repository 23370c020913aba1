"""Times models of torch's modules that the backend compiles against eager torch and Inductor, which take turns."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

import tandem  # noqa: F401  # registers kernel ops
from benchmarks.block import has_bfloat16
from benchmarks.loss import forget_peak, peak_bytes
from benchmarks.timing import interleaved, verdict

HIDDEN, INNER, HEADS, VOCABULARY, CLASSES, ROUNDS = 256, 704, 4, 2048, 32000, 15
EXPERTS, EXPERT_INNER, TOKENS = 8, 512, 512
EXPERTS_BAR = 1.7


class Norm(nn.Module):
    """RMSNorm as model libraries write it out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def turned(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotary embedding as model libraries write it out."""
    first, second = heads[..., : heads.shape[-1] // 2], heads[..., heads.shape[-1] // 2 :]
    return heads * cosines.unsqueeze(1) + torch.cat((-second, first), -1) * sines.unsqueeze(1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = Norm(), Norm()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        h = self.before(x)
        q, k, v = (each(h).view(*x.shape[:2], HEADS, -1).transpose(1, 2) for each in (self.q, self.k, self.v))
        q, k = turned(q, cosines, sines), turned(k, cosines, sines)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
        h = self.behind(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(vocabulary, HIDDEN), nn.ModuleList(Layer() for _ in range(4))
        self.norm, self.head = Norm(), nn.Linear(HIDDEN, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, features = self.embedding(ids), HIDDEN // HEADS
        frequencies = 1 / 10000 ** (torch.arange(0, features, 2, device=ids.device).float() / features)
        angles = torch.arange(ids.shape[1], device=ids.device).float()[None, :, None] * frequencies
        angles = torch.cat((angles, angles), -1)
        cosines, sines = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cosines, sines)
        return self.head(self.norm(x))


class WithLoss(nn.Module):
    """A decoder that returns its loss, and beside it the logits where transformers' models do."""

    def __init__(self, vocabulary: int, returns_logits: bool) -> None:
        super().__init__()
        self.decoder, self.returns_logits = Decoder(vocabulary), returns_logits

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits = self.decoder(ids)
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), ids.view(-1)), logits if self.returns_logits else None


def policy() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


@torch.library.custom_op("transformers::grouped_mm_fallback", mutates_args=())
def grouped_mm(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """The operator by which transformers calls torch's grouped product in compiled code, in which torch's own function takes bfloat16 only."""
    return F.grouped_mm(x, weight, offs=offs)


grouped_mm.register_fake(lambda x, weight, offs: x.new_empty(len(x), weight.shape[2]))
grouped_mm.register_autograd(
    lambda ctx, grad: (F.grouped_mm(grad, ctx.weight.mT, offs=ctx.offs), F.grouped_mm(ctx.x.mT, grad, offs=ctx.offs), None),
    setup_context=lambda ctx, inputs, output: ctx.__dict__.update(zip(("x", "weight", "offs"), inputs, strict=True)),
)


class Mixture(nn.Module):
    """Experts as in Mixtral: a router chooses two for each row. They are computed in a loop over the experts, or by products of groups."""

    def __init__(self, is_loop: bool) -> None:
        super().__init__()
        self.is_loop, self.router = is_loop, nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * EXPERT_INNER, HIDDEN) / 16)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, EXPERT_INNER) / 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scales, chosen = self.router(x).softmax(-1, torch.float32).topk(2)
        return (self.loop if self.is_loop else self.groups)(x, scales.to(x.dtype), chosen)

    def loop(self, x: torch.Tensor, scales: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for expert in range(EXPERTS):
            row, place = torch.where(chosen == expert)
            gate, up = F.linear(x[row], self.gate_up[expert]).chunk(2, -1)
            y.index_add_(0, row, F.linear(F.silu(gate) * up, self.down[expert]) * scales[row, place, None])
        return y

    def groups(self, x: torch.Tensor, scales: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        product = grouped_mm if torch.compiler.is_compiling() and x.dtype != torch.bfloat16 else F.grouped_mm
        ordered, order = chosen.view(-1).sort()
        ends = torch.histc(ordered.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
        gate, up = product(x[order // 2], self.gate_up.mT, offs=ends).chunk(2, -1)
        h = product(F.silu(gate) * up, self.down.mT, offs=ends) * scales.view(-1)[order, None]
        return torch.zeros_like(x).index_add(0, order // 2, h)


def mixtures(dtype: torch.dtype) -> str:
    torch._dynamo.reset()
    loop, groups = Mixture(True).to(dtype), Mixture(False).to(dtype)
    own = copy.deepcopy(groups)
    x = torch.randn(TOKENS, HIDDEN, dtype=dtype, requires_grad=True)

    def step(model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        model.zero_grad()
        call(x).square().mean().backward()

    compiled = tandem.compile(own, require=1.0)
    seconds = interleaved({"loop": lambda: step(loop, loop), "groups": lambda: step(groups, groups), "tandem": lambda: step(own, compiled)}, rounds=ROUNDS)
    of_loop, of_groups = seconds["loop"] / seconds["tandem"], seconds["groups"] / seconds["tandem"]
    return (
        f"{EXPERTS} experts, {TOKENS} tokens, {str(dtype).removeprefix('torch.'):<8} step {1e3 * seconds['tandem']:8.3f} ms; speed against eager: a loop {of_loop:.2f}, "
        f"products of groups {of_groups:.2f} (bar: {EXPERTS_BAR} of the loop, {verdict(of_loop >= EXPERTS_BAR)})"
    )


def few_rows(dtype: torch.dtype, rows: int) -> str:
    """The forward of a gated MLP without gradients, whose weights take longer to read than to multiply, as when a model generates text."""
    torch._dynamo.reset()
    model = nn.ModuleList([nn.Linear(4 * HIDDEN, 4 * INNER, bias=False), nn.Linear(4 * HIDDEN, 4 * INNER, bias=False)]).to(dtype)
    x = torch.randn(rows, 4 * HIDDEN, dtype=dtype)

    def unit(x: torch.Tensor) -> torch.Tensor:
        return F.silu(model[0](x)) * model[1](x)

    called = torch.compile(unit, backend="tandem")
    with torch.no_grad():
        seconds = interleaved({"eager": lambda: unit(x), "tandem": lambda: called(x)}, rounds=ROUNDS)
    return f"gated unit, {rows} rows, {str(dtype).removeprefix('torch.'):<8} without gradients {1e3 * seconds['tandem']:6.3f} ms; speed against eager {seconds['eager'] / seconds['tandem']:.2f}"


def compared(name: str, model: nn.Module, x: torch.Tensor, loss: Callable[[torch.Tensor], torch.Tensor], calls: int) -> str:
    torch._dynamo.reset()
    models = {name: copy.deepcopy(model) for name in ("eager", "tandem", "inductor", "nothing")}
    backends = {"tandem": "tandem", "inductor": "inductor", "nothing": "eager"}  # the last one runs the graph unchanged and shows the cost of Dynamo
    called = {name: torch.compile(each, backend=backends[name]) if name in backends else each for name, each in models.items()}

    def step(backend: str) -> None:
        models[backend].zero_grad()
        loss(called[backend](x)).backward()

    def kept(backend: str) -> int:
        sizes = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, nn.Parameter):
                sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            step(backend)
        return sum(sizes.values())

    def peak(backend: str) -> int:
        peaks = []
        for _ in range(3):
            models[backend].zero_grad()
            tandem.empty_cache()
            before = forget_peak()
            step(backend)
            peaks.append(peak_bytes() - before)
        return min(peaks)

    times: dict[str, list[float]] = {backend: [] for backend in models}
    for turn in range(ROUNDS + 2):
        for backend, measured in times.items():
            begun = time.perf_counter()
            for _ in range(calls):
                step(backend)
            if turn > 1:
                measured.append((time.perf_counter() - begun) / calls)
    median = {backend: statistics.median(measured) for backend, measured in times.items()}
    return (
        f"{name:<28} step {1e3 * median['tandem']:8.3f} ms; speed against eager {median['eager'] / median['tandem']:.2f}, against Inductor "
        f"{median['inductor'] / median['tandem']:.2f}, of a backend that does nothing against eager {median['eager'] / median['nothing']:.2f}; kept {kept('tandem') / max(kept('eager'), 1):.2f} of eager's bytes, "
        f"peak memory {peak('tandem') / max(peak('eager'), 1):.2f}"
    )


def first_call(model: nn.Module, x: torch.Tensor, backend: str) -> float:
    torch._dynamo.reset()
    own = torch.compile(copy.deepcopy(model), backend=backend)
    begun = time.perf_counter()
    own(x)
    return time.perf_counter() - begun


def run() -> str:
    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (4, 128))
    lines = ["backend: unchanged models, forward + backward"]
    dtypes = (torch.float32, torch.bfloat16)[: 1 + has_bfloat16()]
    for dtype in dtypes:
        for returns_logits in (True, False):
            name = f"decoder, {str(dtype).removeprefix('torch.')}, {'loss, logits' if returns_logits else 'loss'}"
            lines.append(compared(name, WithLoss(VOCABULARY, returns_logits).to(dtype), ids, lambda y: y[0], 1))
    lines.append(compared(f"decoder, {CLASSES} classes, loss", WithLoss(CLASSES, False), ids, lambda y: y[0], 1))
    lines.append(compared("policy network, 64 rows", policy(), torch.randn(64, 8), lambda y: y.square().mean(), 20))
    lines += [mixtures(dtype) for dtype in dtypes]
    lines += [few_rows(dtype, rows) for dtype in dtypes for rows in (1, 16)]
    model = Decoder()
    first = {backend: min(first_call(model, ids, backend) for _ in range(3)) for backend in ("eager", "tandem")}
    lines.append(f"first call of the decoder      {first['tandem'] / first['eager']:.2f} of the backend that does nothing")
    return "\n".join(lines)
