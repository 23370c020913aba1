"""One run of `tandem train`: a model, its optimizer and the text."""

from __future__ import annotations

import contextlib
import ctypes
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy

import tandem

from .files import UserError
from .model import Gpt, Sizes, generate
from .options import RECIPES

_VALIDATION_BATCHES = 16
_MASK = (1 << 64) - 1


def _mixed(x: int) -> int:
    """A step of SplitMix64 (Steele, Lea and Flood 2014): different inputs give unrelated outputs."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


class TextData:
    """A text, of which the last tenth is for validation. Throws: UserError if it is shorter than ten windows."""

    def __init__(self, text: bytearray, path: str, context: int) -> None:
        least = 10 * (context + 1)
        if len(text) < least:
            raise UserError(
                f"expected a text of at least {least} bytes (ten windows of --context {context}), got {len(text)} in {path}. "
                "Pass a longer --text or a smaller --context."
            )
        self._bytes = torch.frombuffer(text, dtype=torch.uint8)
        self._context = context
        self._training_bytes = len(text) - len(text) // 10

    def _windows(self, starts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        window = self._bytes[torch.tensor(starts)[:, None] + torch.arange(self._context + 1)].long()
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    def training_batch(self, batch: int, seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets [batch, context], which are the inputs one byte on, at places that seed and step decide."""
        starts = self._training_bytes - self._context
        return self._windows([_mixed(_mixed(_mixed(seed) ^ step) ^ row) % starts for row in range(batch)])

    def validation_batch(self, batch: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One of sixteen batches, whose windows are spread evenly over the text for validation."""
        last, windows = len(self._bytes) - self._training_bytes - self._context - 1, batch * _VALIDATION_BATCHES
        return self._windows([self._training_bytes + last * (index * batch + row) // (windows - 1) for row in range(batch)])

    def prompt(self, length: int) -> bytes:
        """The first bytes of the text for validation."""
        return bytes(self._bytes[self._training_bytes :][:length].tolist())


class StepMetrics(NamedTuple):
    """What a step measures."""

    bits_per_byte: float
    gradient_norm: float
    learning_rate: float
    seconds: float


class Training:
    """A model that computes as the run says, with its optimizer. Batches and initial parameters are equal in all runs.

    In bfloat16 the optimizer works on float32 copies of the parameters, because updates may be too small to change a bfloat16 number.
    """

    def __init__(self, options: dict[str, Any], run: str, text: TextData) -> None:
        self._options, self._run, self._text = options, run, text
        self._recipe = RECIPES[run]() if run in RECIPES else None
        dtype = getattr(torch, run if run in ("float32", "bfloat16") else options["dtype"])
        self.model = Gpt(Sizes(*(options[name] for name in Sizes._fields)), plain=run == "plain").to(dtype)
        self.model.initialize(options["seed"])
        torch.manual_seed(options["seed"])  # for ops that draw
        self._named = dict(self.model.named_parameters())
        self._masters = {name: p if dtype == torch.float32 else p.detach().float().requires_grad_() for name, p in self._named.items()}
        matrices = [master for master in self._masters.values() if master.dim() >= 2]
        vectors = [master for master in self._masters.values() if master.dim() < 2]  # decay would change what norm weights and biases mean
        groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": options["weight-decay"]}, {"params": vectors, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=options["learning-rate"], betas=(0.9, 0.95))

    def _forward(self, tokens: torch.Tensor) -> torch.Tensor:
        region = tandem.autocast(recipe=self._recipe) if self._recipe else contextlib.nullcontext()
        with region, tandem.weights_unchanged():  # everything that writes parameters here changes their versions
            return self.model(tokens)

    def _loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy in nats, a scalar."""
        return cross_entropy(self._forward(tokens).flatten(0, -2).float(), targets.flatten())

    def _learning_rate(self, step: int) -> float:
        """Rises linearly for `warmup` steps, then falls along half a cosine to a tenth."""
        highest, warmup = self._options["learning-rate"], self._options["warmup"]
        if step + 1 <= warmup:
            return highest * (step + 1) / warmup
        share = (step + 1 - warmup) / max(self._options["steps"] - warmup, 1)
        return highest * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share)))

    def step(self, index: int) -> StepMetrics:
        """Trains one batch."""
        begin = time.perf_counter()
        loss = self._loss(*self._text.training_batch(self._options["batch"], self._options["seed"], index))
        loss.backward()
        copied = [(self._named[name], master) for name, master in self._masters.items() if master is not self._named[name]]
        for parameter, master in copied:
            if parameter.grad is not None:
                master.grad, parameter.grad = parameter.grad.float(), None
        norm = torch.nn.utils.clip_grad_norm_(self._masters.values(), self._options["clip"])
        rate = self._learning_rate(index)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            for parameter, master in copied:
                parameter.copy_(master)
        return StepMetrics(loss.item() / math.log(2), norm.item(), rate, time.perf_counter() - begin)

    @torch.no_grad()
    def validation_bits_per_byte(self) -> float:
        """The mean loss over the validation batches."""
        batch = self._options["batch"]
        losses = [self._loss(*self._text.validation_batch(batch, i)).item() / math.log(2) for i in range(_VALIDATION_BATCHES)]
        return sum(losses) / _VALIDATION_BATCHES

    def saved_bytes_per_token(self) -> float:
        """Bytes kept between forward and backward, without parameters, per byte of text in a batch."""
        saved: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            saved[storage._cdata] = storage.nbytes()
            return tensor

        batch = self._options["batch"]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = self._loss(*self._text.training_batch(batch, self._options["seed"], 0))
        for parameter in self._named.values():
            saved.pop(parameter.untyped_storage()._cdata, None)
        del loss  # until here it kept the storages, whose addresses are then no others'
        return sum(saved.values()) / (batch * self._options["context"])

    @torch.no_grad()
    def sample(self, length: int) -> bytes:
        """Bytes drawn from the model behind the beginning of the text for validation."""
        options = self._options
        prompt = self._text.prompt(min(64, options["context"]))
        return generate(self._forward, prompt, length, options["context"], options["seed"])

    def plan_svg(self) -> str:
        """A picture of one layer's plan; empty without a plan."""
        layer = self.model.layers[0]
        return layer.explain("svg") if isinstance(layer, tandem.ops.Sequential) else ""

    def parameters(self) -> dict[str, torch.Tensor]:
        """The float32 parameters by name."""
        return {name: master.detach() for name, master in self._masters.items()}

    def state(self) -> dict[str, torch.Tensor]:
        """Parameters, both moments of each, the state of the recipe, and the state of the random generator."""
        state = self.parameters() | {"random_state": torch.get_rng_state()}
        for name, master in self._masters.items():
            if moments := self._optimizer.state.get(master):
                state |= {f"{name}.first_moment": moments["exp_avg"], f"{name}.second_moment": moments["exp_avg_sq"]}
        return state | {f"buffer.{name}": buffer for name, buffer in self._buffers()}

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The state of the recipe, which the first call under a recipe that has state makes."""
        persistent = self.model.state_dict(keep_vars=True)
        return ((name, buffer) for name, buffer in self.model.named_buffers() if name in persistent)

    @torch.no_grad()
    def restore(self, state: dict[str, torch.Tensor], steps: int) -> None:
        """Continues from `state` after `steps` steps. Throws: UserError for other names or shapes."""

        def take(name: str, like: torch.Tensor) -> torch.Tensor:
            found = state.get(name)
            if found is None or found.shape != like.shape or found.dtype != like.dtype:
                got = "no such tensor" if found is None else list(found.shape)
                raise UserError(
                    f"expected {name} with shape {list(like.shape)} in the checkpoint, got {got}. "
                    "It belongs to another model: start again without --resume."
                )
            return found

        for name, master in self._masters.items():
            self._named[name].copy_(master.copy_(take(name, master)))
            if steps:
                moments = {key: take(f"{name}.{kind}_moment", master).clone() for key, kind in (("exp_avg", "first"), ("exp_avg_sq", "second"))}
                self._optimizer.state[master] = {"step": torch.tensor(float(steps)), **moments}
        if self._recipe and steps:
            tandem.make_recipe_state(self.model, self._recipe)
        for name, buffer in self._buffers():
            buffer.copy_(take(f"buffer.{name}", buffer))
        torch.set_rng_state(take("random_state", torch.get_rng_state()))


class PeakMemory:
    """The largest resident memory of this process since the object was made, above what it had then, in bytes.

    Linux's /proc/self/clear_refs resets the maximum. Where it may not be written, only growth beyond an earlier maximum is seen.
    """

    def __init__(self) -> None:
        self._restart()
        self._before, self._most = self._status("VmRSS"), 0

    @staticmethod
    def _restart() -> None:
        tandem.empty_cache()  # memory that earlier work freed does not count
        ctypes.CDLL(None).malloc_trim(0)
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out what is used meanwhile."""
        self._most = self.bytes()
        yield
        self._restart()

    @staticmethod
    def _status(field: str) -> int:
        """The bytes of a line such as "VmHWM:   1234 kB" in /proc/self/status."""
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))

    def bytes(self) -> int:
        return max(self._most, self._status("VmHWM") - self._before)
