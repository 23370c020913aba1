"""`inspect`: measurements of what quantizing does to each tensor in each step, for a training in low precision that goes wrong."""

from __future__ import annotations

import html
import math
import warnings
from typing import Any, NamedTuple

import torch

from tandem import _C
from tandem.pipelines.inspected import close_for, open_for, watchers


class Watched(NamedTuple):
    """The measurements of one quantization. Shares are shares of the finite elements; scales are the factors of decoded codes."""

    step: int  # from 0; each outermost autocast region is a step
    name: str  # path of the module whose product reads the tensor; for a GroupedLinear with the group: "experts, group 3"
    role: str  # "input", "weight" or "grad_output"
    quantizer: str
    amax: float
    least_scale: float
    largest_scale: float
    underflow: float  # share of elements that are not 0 but whose code, or the scale of whose block, is 0
    saturation: float  # share of elements beyond the range that rounds to the largest number of the format, in blocks whose scale is not 0
    signal_to_noise: float  # 10 log10(sum x^2 / sum (x - y)^2), dB
    not_finite: int  # number of NaNs and infinities


class Inspection:
    """Measures each quantization in a `with` block: amax, scales, shares of elements that underflow and saturate, and the ratio of signal to noise.

    It measures eager calls, which become slower; compiled code is not measured. A `GroupedLinear` has a row for each group with rows, under a name such
    as "experts, group 3", and its fusion to one step of experts is off in the block. The block also warns of saturation, which nothing else does.

    >>> import torch, tandem
    >>> model = torch.nn.Sequential(tandem.Linear(32, 32), tandem.Linear(32, 32))
    >>> with tandem.inspect(model) as seen:
    ...     for step in range(2):
    ...         with tandem.autocast(recipe=tandem.recipe.Float8CurrentScaling()):
    ...             y = model(torch.randn(4, 32, requires_grad=True))
    ...         y.sum().backward()
    >>> seen.rows[0].name, seen.rows[0].role, seen.rows[0].step, seen.rows[0].signal_to_noise > 25
    ('0', 'input', 0, True)
    >>> print(seen.table().splitlines()[0].split()[:3])
    ['tensor', 'format', 'steps']
    """

    def __init__(self, model: torch.nn.Module | None = None, *, warn: bool = True) -> None:
        """Creates an inspection, which `with` opens.

        Args:
            model: the model whose module paths name the tensors; None: types of modules name them.
            warn: whether to warn of the first step in which a tensor saturates or has elements that are not finite.
        """
        self._model, self._warn = model, warn
        self.pipelines: dict[int, Any] = {}  # weak references by number of the pipeline
        self._steps: dict[int, int] = {}  # number of the step by number of the region
        self._rows: list[Watched] = []
        self._warned: set[tuple[str, str]] = set()

    def __enter__(self) -> Inspection:
        if self in watchers:
            raise RuntimeError("inspect: expected an inspection that is not open, got one that is. Leave it first, or make another.")
        _collect()  # measurements from before the block must not count
        open_for(self)
        return self

    def __exit__(self, *_: object) -> None:
        _collect()
        close_for(self)

    @property
    def rows(self) -> list[Watched]:
        """The measurements of all quantizations so far, in order."""
        _collect()
        return list(self._rows)

    def _take(self, found: list[tuple[Any, ...]]) -> None:
        for pipeline, op, role, group, region, quantizer, *numbers in found:
            if pipeline not in self.pipelines:
                continue
            step = self._steps.setdefault(region, len(self._steps))
            name = self._name(pipeline, op)
            row = Watched(step, name if group < 0 else f"{name}, group {group}", role, quantizer, *numbers)
            self._rows.append(row)
            self._tell(row)

    def _tell(self, row: Watched) -> None:
        key = (row.name, row.role)
        if not self._warn or key in self._warned or not (row.saturation or row.not_finite):
            return
        self._warned.add(key)
        what = f"{row.saturation:.2%} of its numbers beyond the format's range" if row.saturation else f"{row.not_finite} numbers that are not finite"
        warnings.warn(
            f"tandem: expected {row.role} of {row.name} in the range of {row.quantizer}, got {what} in step {row.step} (amax {row.amax:.3g}, scale "
            f"{row.largest_scale:.3g}). Use a recipe whose scales follow the tensor, or look where it grows.",
            stacklevel=2,
        )

    def _name(self, pipeline: int, op: int) -> str:
        prepared = self.pipelines[pipeline]()
        if prepared is None:
            return f"op {op}"
        basic = prepared.basic_ops[op]
        holder = basic._holder
        path = next((path for path, module in self._model.named_modules() if module is holder), None) if self._model is not None else None
        path = path or type(holder).__name__
        products = [part for part in holder.flat_ops() if any(part._quantize_slots())] if holder is not basic else [basic]
        return path if len(products) == 1 else f"{path}, product {products.index(basic)}"

    def table(self) -> str:
        """A text table with one line for each tensor: amax and scale of the step with the least ratio of signal to noise, and the largest shares."""
        header = ("tensor", "format", "steps", "amax", "scale", "underflow", "saturation", "SNR, dB", "not finite")
        lines = [header]
        for (name, role), rows in _by_tensor(self.rows).items():
            worst = min(rows, key=lambda row: row.signal_to_noise)
            scale = f"{worst.least_scale:.3g}" if worst.least_scale == worst.largest_scale else f"{worst.least_scale:.3g} to {worst.largest_scale:.3g}"
            shares = (f"{max(row.underflow for row in rows):.2%}", f"{max(row.saturation for row in rows):.2%}")
            steps = str(len({row.step for row in rows}))
            noise = f"{worst.signal_to_noise:.1f}"
            lines.append((f"{name}: {role}", worst.quantizer, steps, f"{worst.amax:.3g}", scale, *shares, noise, str(sum(row.not_finite for row in rows))))
        widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
        if not self._rows:
            table.append("nothing was measured: no eager call quantized a tensor, and calls in code that torch.compile has compiled are not measured")
        return "\n".join(table)

    def svg(self) -> str:
        """A picture as SVG: the ratio of signal to noise in dB of each tensor, step by step, with red dots for steps in which it saturates."""
        return picture(self.rows)

    def _repr_svg_(self) -> str:
        return self.svg()

    def __str__(self) -> str:
        return self.table()


def _by_tensor(rows: list[Watched]) -> dict[tuple[str, str], list[Watched]]:
    tensors: dict[tuple[str, str], list[Watched]] = {}
    for row in rows:
        tensors.setdefault((row.name, row.role), []).append(row)
    return tensors


def picture(rows: list[Watched]) -> str:
    """A picture of measurements as SVG, as `Inspection.svg` draws it."""
    tensors = _by_tensor(rows)
    steps = 1 + max((row.step for row in rows), default=0)
    left, right, line, top = 330, 300, 30, 34
    place = lambda step: left + right * (step + 0.5) / steps  # noqa: E731
    height = lambda row: 22 * min(max(row.signal_to_noise, 0.0), 60.0) / 60 if math.isfinite(row.signal_to_noise) else 22.0  # noqa: E731
    parts = [f'<text x="{left}" y="20" class="head">signal to noise, 0 to 60 dB, over {steps} steps</text>']
    for index, ((name, role), found) in enumerate(tensors.items()):
        base = top + line * (index + 1) - 4
        worst = min(found, key=lambda row: row.signal_to_noise)
        points = " ".join(f"{place(row.step):.1f},{base - height(row):.1f}" for row in found)
        parts.append(f'<text x="8" y="{base - 6}">{html.escape(name)}: {role}</text>')
        parts.append(f'<line x1="{left}" x2="{left + right}" y1="{base}" y2="{base}" class="axis"/><polyline points="{points}"/>')
        parts += [
            f'<circle cx="{place(row.step):.1f}" cy="{base - height(row):.1f}" r="{4 if row.saturation else 2}" class="{"bad" if row.saturation else "good"}">'
            f"<title>step {row.step}: {row.signal_to_noise:.1f} dB, saturation {row.saturation:.2%}, underflow {row.underflow:.2%}, amax {row.amax:.3g}"
            "</title></circle>"
            for row in found
        ]
        parts.append(f'<text x="{left + right + 12}" y="{base - 6}">worst {worst.signal_to_noise:.1f} dB</text>')
    style = (
        "text{font:12px sans-serif;fill:#222}.head{font-weight:bold}.axis{stroke:#ccc}polyline{fill:none;stroke:#36c}.good{fill:#36c}.bad{fill:#c22}"
    )
    size = f'width="{left + right + 130}" height="{top + line * len(tensors) + 10}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>{"".join(parts)}</svg>'


def _collect() -> None:
    """Hands new measurements to all open inspections."""
    found = _C.take_watched()
    for inspection in watchers:
        inspection._take(found)


inspect = Inspection  # a `with` block reads better with a verb
