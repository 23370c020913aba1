"""Pictures of plans, laid out by Graphviz if it is installed."""

from __future__ import annotations

import html
import math
import shutil
import subprocess
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

Explain = Callable[[str, dict[str, float]], str]  # (format, microseconds by step) -> report
_SECONDS = 60  # time limit of Graphviz for one picture


def step_times(profile: Any) -> dict[str, float]:
    """Microseconds of one run by name of a step: a mapping itself, or averages of a torch.profiler.profile, device time if it has any, else CPU time."""
    if profile is None:
        return {}
    if isinstance(profile, Mapping):
        if all(isinstance(name, str) and isinstance(time, Real) and not isinstance(time, bool) and not time < 0 for name, time in profile.items()):
            times = {name: float(time) for name, time in profile.items()}
            if endless := [name for name, time in times.items() if not math.isfinite(time)]:
                raise ValueError(
                    f"explain: expected profile to give {endless[0]} a finite number of microseconds, got {times[endless[0]]}. Leave out steps that "
                    "were not measured."
                )
            return times
    elif hasattr(profile, "key_averages"):
        totals = {event.key.removeprefix("tandem::"): (getattr(event, "device_time_total", 0) or event.cpu_time_total, event.count) for event in profile.key_averages()}
        return {name: total / count for name, (total, count) in totals.items() if count}
    raise TypeError(
        f"explain: expected profile to be a torch.profiler.profile that has ended, or a dict of microseconds by step, got {profile!r}. Run the "
        "pipeline under `with torch.profiler.profile() as profile:` and pass that."
    )


def svg(explain: Explain, times: dict[str, float]) -> str:
    """A picture as SVG, by Graphviz, or in the library's own layout if Graphviz is missing or fails."""
    program = shutil.which("dot")
    if program is not None:
        try:
            drawn = subprocess.run([program, "-Tsvg"], input=explain("dot", times), capture_output=True, text=True, check=True, timeout=_SECONDS).stdout
            return drawn[drawn.index("<svg") :].rstrip()
        except (OSError, ValueError, subprocess.SubprocessError):
            pass
    return explain("svg", times)


def rendered(explain: Explain, format: str, times: dict[str, float]) -> str:
    """A report of a pipeline in a format of `tandem.explain`."""
    if format == "svg":
        return svg(explain, times)
    if format == "html":
        return f"<div>{svg(explain, times)}<pre>{html.escape(explain('text', times))}</pre></div>"
    return explain(format, times)
