"""The results of `tandem train` as a table, and as one page of HTML that needs no other file."""

from __future__ import annotations

import html
import math
from typing import Any

from .files import bytes_text

_COLUMNS = [
    ("run", ""), ("validation", "bits/byte"), ("less first", "bits/byte"), ("speed", "tokens/s"), ("speed / first", ""),
    ("kept for backward", "bytes/token"), ("kept / first", ""), ("peak memory", ""),
]  # fmt: skip
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2127; --paper: #ffffff; --faint: #d5dae0; --run0: #1b6ac9; --run1: #c2520a; --run2: #1a7f4b; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ec; --paper: #14181c; --faint: #3a424b; --run0: #6cb0ff; --run1: #ff9d57; --run2: #58c98b; }
}
body { color: var(--ink); background: var(--paper); font: 15px/1.5 system-ui, sans-serif; max-width: 880px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; }
h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; }
th, td { padding: .3em .9em; text-align: right; border-bottom: 1px solid var(--faint); }
th:first-child, td:first-child { text-align: left; }
small { font-weight: normal; opacity: .75; }
pre { white-space: pre-wrap; border-left: 3px solid var(--faint); padding-left: 1em; }
svg { max-width: 100%; height: auto; }
.plan { overflow-x: auto; background: #ffffff; border: 1px solid var(--faint); border-radius: 6px; }
.chart text { fill: var(--ink); font-size: 12px; }
.chart .grid { stroke: var(--faint); }
.chart .curve { fill: none; stroke-width: 1.8; }
"""
_DASHES = ["none", "7 3", "2 3", "9 3 2 3"]


def _cells(result: dict[str, Any], first: dict[str, Any]) -> list[str]:
    bits, speed, kept = "validation_bits_per_byte", "tokens_per_second", "saved_bytes_per_token"

    def ratio(key: str) -> str:
        return f"{result[key] / max(first[key], 1e-9):.2f}"

    return [
        result["run"], f"{result[bits]:.4f}", f"{result[bits] - first[bits]:+.4f}", f"{result[speed]:.0f}", ratio(speed), f"{result[kept]:.0f}",
        ratio(kept), bytes_text(result["peak_memory_bytes"]),
    ]  # fmt: skip


def results_table(results: list[dict[str, Any]]) -> str:
    """The results in aligned columns."""
    lines = [[name for name, _ in _COLUMNS], [unit for _, unit in _COLUMNS], *(_cells(result, results[0]) for result in results)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ([cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])] for cells in lines)
    return "".join("   ".join(row) + "\n" for row in rows)


def _table_html(results: list[dict[str, Any]]) -> str:
    head = "".join(f"<th>{name}<br><small>{unit}</small></th>" for name, unit in _COLUMNS)
    rows = ("".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(result, results[0])) for result in results)
    return f"<table>\n<tr>{head}</tr>\n" + "".join(f"<tr>{row}</tr>\n" for row in rows) + "</table>\n"


def _ticks(least: float, most: float, parts: int) -> list[float]:
    """The multiples of 1, 2 or 5 times a power of ten, about `parts` of them, that reach from `least` or below to `most` or above."""
    rough = max(most - least, 1e-9) / parts
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if rough <= factor * power)
    first = math.floor(least / step)
    return [round(step * (first + i), 10) for i in range(math.ceil(most / step) - first + 1)]


def _chart(log: list[dict[str, Any]]) -> str:
    """The loss of each run over its steps, as SVG in the colours of the page."""
    width, height, left, right, top, bottom = 760, 380, 60, 744, 12, 332
    losses = [row["bits_per_byte"] for row in log] or [0.0, 1.0]
    last = max((row["step"] for row in log), default=1)
    levels = _ticks(min(losses), max(max(losses), min(losses) + 0.1), 6)

    def x(step: float) -> float:
        return round(left + (right - left) * step / last, 1)

    def y(loss: float) -> float:
        return round(bottom - (bottom - top) * (loss - levels[0]) / (levels[-1] - levels[0]), 1)

    parts = [f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="Training loss of each run">']
    for level in levels:
        parts.append(f'<line class="grid" x1="{left}" y1="{y(level)}" x2="{right}" y2="{y(level)}"/>')
        parts.append(f'<text x="{left - 6}" y="{y(level) + 4}" text-anchor="end">{level:g}</text>')
    for step in _ticks(0, last, 8):
        if step <= last and step == int(step):
            parts.append(f'<text x="{x(step)}" y="{bottom + 18}" text-anchor="middle">{step:g}</text>')
    parts.append(f'<text x="{(left + right) / 2}" y="{height - 8}" text-anchor="middle">step</text>')
    parts.append(f'<text transform="translate(16 {(top + bottom) / 2}) rotate(-90)" text-anchor="middle">training loss, bits per byte</text>')
    for i, run in enumerate(dict.fromkeys(row["run"] for row in log)):
        points = " ".join(f"{x(row['step'])},{y(row['bits_per_byte'])}" for row in log if row["run"] == run)
        pen = f'class="curve" style="stroke: var(--run{i % 3}); stroke-dasharray: {_DASHES[i % 4]}"'
        at = top + 16 + 20 * i
        parts.append(f'<polyline {pen} points="{points}"/><line {pen} x1="{right - 110}" y1="{at}" x2="{right - 82}" y2="{at}"/>')
        parts.append(f'<text x="{right - 74}" y="{at + 4}">{html.escape(run)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def report_html(title: str, results: list[dict[str, Any]], log: list[dict[str, Any]], plan_svg: str, inspection_svg: str, sample: str) -> str:
    """Loss curves, table, plan of a layer, effects of quantizing, and text drawn from the last model."""
    body = f"<h1>tandem train</h1>\n<p>{html.escape(title)}</p>\n<h2>Loss</h2>\n{_chart(log)}<h2>Results</h2>\n{_table_html(results)}"
    if plan_svg:
        plan = plan_svg[plan_svg.find("<svg") :]  # an XML declaration may precede it
        body += f'<h2>Plan of one layer</h2>\n<div class="plan">{plan}</div>\n'
    if inspection_svg:
        body += f'<h2>What quantizing does to each tensor</h2>\n<div class="plan">{inspection_svg}</div>\n'
    body += f"<h2>Text drawn from the last model</h2>\n<pre>{html.escape(sample)}</pre>\n"
    head = '<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">\n<title>tandem train</title>'
    return f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}</body>\n</html>\n'
