"""Measures memory growth when a process does many different things once: new shapes, pipelines, registrations, options, regions.

One process does an item COUNT times with Tandem, another one with torch.nn. The benchmark prints the growth of resident memory per repetition
after WARM repetitions, garbage collection and malloc_trim, with Tandem's cache of freed memory emptied.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import tandem
import tandem.ops as ops
from benchmarks.timing import table, verdict

COUNT = int(os.environ.get("TANDEM_MANY", "10000"))
WARM = 500  # more than the number of recent programs that are kept without a user
BAR = 1.5  # growth relative to torch.nn, as a library of products caches its preparation for each shape
WIDTH = 64

Step = Callable[[int], object]


class Scaled(ops.BasicOperation):
    """y = factor x, with the factor given per call."""

    def op_forward_compute(self, input_, factor=1.0):
        return input_ * factor, ()

    def op_forward_save_ctx(self, ctx, input_, tensors_to_save, factor=1.0):
        ctx.factor = factor

    def op_backward(self, ctx, grad_output):
        return grad_output * ctx.factor, ()


class Passed(ops.FusedOperation):
    """A fusion of two ConstantScale ops."""

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, basic_op_kwargs, **_):
        return input_ * (self.basic_ops[0].scale * self.basic_ops[1].scale), [(), ()]


def linear(width: int = WIDTH, nn: bool = False) -> torch.nn.Module:
    return torch.nn.Linear(width, width) if nn else ops.Linear(width, width)


def step_of(module: torch.nn.Module, x: torch.Tensor) -> None:
    module(x).sum().backward()


def shapes(nn: bool) -> Step:
    """Forward and backward with a new number of rows."""
    box = torch.nn.Sequential(linear(nn=True), torch.nn.GELU(), linear(nn=True)) if nn else ops.Sequential(linear(), ops.GELU(), linear())
    order = list(range(256, 256 + WARM + COUNT))
    random.Random(0).shuffle(order)
    step_of(box, torch.randn(256 + WARM + COUNT, WIDTH, requires_grad=True))
    return lambda n: step_of(box, torch.randn(order[n], WIDTH, requires_grad=True))


def pipelines(nn: bool) -> Step:
    """A new pipeline with new options, which is called once and dropped."""
    x = torch.randn(4, 8, requires_grad=True)

    def step(n: int) -> None:
        scale = torch.nn.Threshold(float(n), 0.0) if nn else ops.ConstantScale(float(n))
        step_of((torch.nn.Sequential if nn else ops.Sequential)(linear(8, nn), scale, linear(8, nn)), x)

    return step


def equal_pipelines(nn: bool) -> Step:
    """A new pipeline with a known description, which is called once and dropped."""
    x = torch.randn(4, 8, requires_grad=True)
    return lambda _: step_of((torch.nn.Sequential if nn else ops.Sequential)(linear(8, nn), linear(8, nn)), x)


def registrations(nn: bool) -> Step:
    """A fusion that is registered, used and removed; with torch.nn a forward hook."""
    x = torch.randn(4, 8)
    box = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Identity()) if nn else ops.Sequential(ops.ConstantScale(2.0), ops.ConstantScale(3.0))

    def step(_: int) -> None:
        if nn:
            handle = box[0].register_forward_hook(lambda *_: None)
        else:
            handle = ops.register_forward_fusion(lambda found, *, recipe=None: [Passed(found)])
        box(x)
        handle.remove()

    return step


def options(nn: bool) -> Step:
    """A call after an option has changed."""
    x = torch.randn(4, 8, requires_grad=True)
    dropout = torch.nn.Dropout(0.0) if nn else ops.Dropout(0.0)
    box = (torch.nn.Sequential if nn else ops.Sequential)(linear(8, nn), dropout)

    def step(n: int) -> None:
        dropout.p = n / (4 * (WARM + COUNT))
        step_of(box, x)

    return step


def regions(nn: bool) -> Step:
    """A recipe region around one call; with torch.nn a region of torch.autocast."""
    x = torch.randn(4, 8, requires_grad=True)
    box = (torch.nn.Sequential if nn else ops.Sequential)(linear(8, nn))

    def step(_: int) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16) if nn else tandem.autocast(recipe=tandem.recipe.Float8CurrentScaling()):
            y = box(x)
        y.sum().backward()

    return step


def recipes(nn: bool) -> Step:
    """A region with a new recipe around one call; with torch.nn a region of torch.autocast."""
    x = torch.randn(4, 8, requires_grad=True)
    box = (torch.nn.Sequential if nn else ops.Sequential)(linear(8, nn))

    def step(n: int) -> None:
        recipe = tandem.recipe.Float8CurrentScaling(amax_epsilon_input=n / 1e6)
        with torch.autocast("cpu", dtype=torch.bfloat16) if nn else tandem.autocast(recipe=recipe):
            y = box(x)
        y.sum().backward()

    return step


def subsets(nn: bool) -> Step:
    """A backward for a new set of requested gradients."""
    x = torch.randn(4, 8, requires_grad=True)
    box = (torch.nn.Sequential if nn else ops.Sequential)(*[linear(8, nn) for _ in range(8)])
    params = list(box.parameters())
    order = list(range(1, 2 ** len(params)))
    random.Random(0).shuffle(order)

    def step(n: int) -> None:
        requested = [param for bit, param in enumerate(params) if order[n] >> bit & 1]
        torch.autograd.grad(box(x).sum(), requested)

    return step


def arguments(nn: bool) -> Step:
    """A call of an op written in Python with a new number as its argument."""
    x = torch.randn(4, 8, requires_grad=True)
    op = Scaled()
    box = ops.Sequential(op)
    return lambda n: (x * float(n) if nn else box(x, op_kwargs={op: {"factor": float(n)}})).sum().backward()


def python_ops(nn: bool) -> Step:
    """An op written in Python, which is created, called and dropped."""
    x = torch.randn(4, 8, requires_grad=True)
    return lambda _: step_of(torch.nn.Tanh() if nn else ops.Sequential(Scaled()), x)


ITEMS = {
    item.__name__: item
    for item in (shapes, pipelines, equal_pipelines, registrations, options, regions, recipes, subsets, arguments, python_ops)
}


def resident() -> int:
    gc.collect()
    tandem.empty_cache()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(name: str, nn: bool) -> int:
    """The growth of memory in bytes over COUNT repetitions of an item."""
    torch.set_num_threads(1)
    step = ITEMS[name](nn)
    for n in range(WARM):
        step(n)
    before = resident()
    for n in range(WARM, WARM + COUNT):
        step(n)
    return resident() - before


def in_process(name: str, nn: bool) -> int:
    command = [sys.executable, "-c", f"from benchmarks import many; print(many.measure({name!r}, {nn}))"]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def run() -> str:
    rows = []
    for name in ITEMS:
        own, other = in_process(name, False), in_process(name, True)
        figures = [f"{own / COUNT:.0f}", f"{other / COUNT:.0f}", f"{own / 1e6:.1f}", f"{other / 1e6:.1f}"]
        rows.append([name.replace("_", " "), *figures, bar(own, other)])
    return table(f"memory that {COUNT} times leave", ["", "bytes each", "torch.nn", "MB in all", "torch.nn", "bar"], rows)


def bar(own: int, other: int) -> str:
    """The bar and its verdict. Growth below 4 MB counts as met: after 10,000 pipelines the allocator keeps 3 MB, of which no byte is in use."""
    return f"{BAR} of torch.nn: {verdict(own <= max(BAR * other, 4e6))}"
