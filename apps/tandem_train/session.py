"""The runs of one `tandem train`, one after the other, and the files that they write."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shlex
import signal
import statistics
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

import tandem
from tandem.report.inspection import Watched, picture

from .files import CHECKPOINT, METRICS, REPORT, OutFolder, UserError, read_text, tell
from .options import configuration_of, resolved
from .report import results_table, report_html
from .training import PeakMemory, TextData, Training

FORMAT = "tandem train checkpoint 3"
_STATE: dict[str, type] = {"run_index": int, "step": int, "results": list, "log": list, "losses": list, "step_seconds": list, "plan_svg": str, "inspected": list}
_STOPS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


class Interruption:
    """Whether to save and stop. The second SIGINT or SIGTERM ends the process at once; a closing terminal may send SIGHUP twice and means one stop.

    Under nohup SIGHUP is ignored.
    """

    def __enter__(self) -> Interruption:
        self.asked = False
        self._before = {number: signal.getsignal(number) for number in _STOPS}
        for number, before in self._before.items():
            if number != signal.SIGHUP or before is not signal.SIG_IGN:
                signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if number != signal.SIGHUP:
            signal.signal(number, signal.SIG_DFL)


class Progress:
    """A line on standard error: redrawn on a terminal, a new one every ten seconds elsewhere."""

    def __init__(self, run: str, steps: int) -> None:
        self._run, self._steps, self._shown, self._pace = run, steps, -math.inf, 0.0
        self._terminal = sys.stderr is not None and sys.stderr.isatty()

    def show(self, done: int, bits: float, seconds: float, tokens: int, steps_left: int) -> None:
        """Shows the loss of the newest step, and the speed and the remaining time at the pace of the newest steps."""
        self._pace = 0.9 * self._pace + 0.1 * seconds if self._pace else seconds
        now = time.monotonic()
        if done < self._steps and now - self._shown < (0.1 if self._terminal else 10):
            return
        self._shown = now
        filled, left = 20 * done // self._steps, round(self._pace * steps_left)
        hours = f"{left // 3600}:{left // 60 % 60:02}" if left >= 3600 else f"{left // 60}"
        line = f"{self._run:<6} [{'#' * filled}{'.' * (20 - filled)}] {done}/{self._steps}  {bits:.3f} bits/byte  "
        line += f"{tokens / self._pace:.0f} tokens/s  ETA {hours}:{left % 60:02}"
        if self._terminal:
            with contextlib.suppress(OSError):  # the terminal may close meanwhile
                line = line[: os.get_terminal_size(sys.stderr.fileno()).columns - 1]  # a wrapped line could not be redrawn
        tell(f"\r\x1b[K{line}" if self._terminal else line + "\n")

    def finish(self) -> None:
        """Leaves the line."""
        if self._terminal:
            tell("\n")


def _refuse_damaged(path: Path, got: object) -> UserError:
    return UserError(
        f"expected a whole checkpoint of tandem train in {path}, got {got}. Restore the file from a copy, or move it away and start again without --resume."
    )


def _raw(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def digest(state: str, tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 of all that a checkpoint holds."""
    digest = hashlib.sha256(state.encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {list(tensors[name].shape)}".encode())
        digest.update(_raw(tensors[name]))
    return digest.hexdigest()


def load_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The state and the tensors of a checkpoint. Throws: UserError if there is none, or one that is damaged."""
    path = folder / CHECKPOINT
    reason = "No such file" if not os.path.lexists(path) else "" if path.is_file() else "not a regular file"
    if reason:
        raise UserError(
            f"expected a checkpoint, got {path} ({reason}). Pass the --out folder of the run to go on with, or leave out --resume."
        )
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dict
        if metadata.get("format") != FORMAT:
            raise _refuse_damaged(path, "another file")
        text = bytes(_raw(tensors.pop("state"))).decode()
        if metadata.get("sha256") != digest(text, tensors):
            raise _refuse_damaged(path, "another checksum of what it holds")
        state = json.loads(text)
        if not isinstance(state, dict) or not isinstance(state.get("configuration"), dict):
            raise _refuse_damaged(path, "one without a configuration")
        return state, tensors
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError, RecursionError) as error:
        raise _refuse_damaged(path, error) from None


class Session:
    """The runs of one `tandem train`.

    Writes into --out: metrics.jsonl continuously, checkpoint.safetensors, and at the end model-RUN.safetensors and report.html. Nothing is written
    before all options have been checked. Throws: UserError if the options or the text are not usable.
    """

    def __init__(self, options: dict[str, Any], *, quiet: bool, inspect: bool) -> None:
        self.options = options = resolved(options)
        self.runs: list[str] = options["runs"].split(",")
        self.quiet, self._inspect = quiet, inspect
        path = options["text"] or default_text()
        text = read_text(path)
        self._text_name, self._text_bytes, self._text_sha256 = path, len(text), hashlib.sha256(text).hexdigest()
        self._text = TextData(text, path, options["context"])
        torch.set_num_threads(options["threads"])
        self.run_index, self.step, self.plan_svg, self.sample = 0, 0, "", ""
        self.results: list[dict[str, Any]] = []
        self.log: list[dict[str, Any]] = []
        self.losses: list[float] = []
        self.step_seconds: list[float] = []
        self.inspected: list[list[Any]] = []  # rows of an inspection, each behind its run
        self._told: set[tuple[str, ...]] = set()
        self._restored: dict[str, torch.Tensor] = {}

    @property
    def _step_tokens(self) -> int:
        return self.options["batch"] * self.options["context"]

    def file_names(self) -> list[str]:
        """The files that it writes."""
        return [METRICS, REPORT, CHECKPOINT, *(f"model-{run}.safetensors" for run in self.runs)]

    def resume(self, out: OutFolder, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Continues from a checkpoint. Throws: UserError if it does not fit."""
        try:
            if state["text_sha256"] != self._text_sha256:
                raise UserError(
                    f"expected the text that the checkpoint was trained on (SHA-256 {state['text_sha256']}), got {self._text_name} ({self._text_sha256}). "
                    "Pass that text with --text, or start again without --resume."
                )
            for name, kind in _STATE.items():
                if type(state[name]) is not kind:
                    raise ValueError(f"{name} of type {type(state[name]).__name__}")
                setattr(self, name, state[name])
            fits = 0 <= self.run_index < len(self.runs) and [result["run"] for result in self.results] == self.runs[: self.run_index]
            if not fits or not 0 <= self.step <= self.options["steps"] or not len(self.losses) == len(self.step_seconds) == self.step:
                raise ValueError("run_index, step and losses that disagree")
            if not all(row["run"] in self.runs[: self.run_index + 1] and row["step"] > 0 and row["bits_per_byte"] >= 0 for row in self.log):
                raise ValueError("rows of its log that are none")
            if not all(type(number) is float for number in self.losses + self.step_seconds):
                raise ValueError("losses that are no numbers")
            results_table(self.results)
            self._picture()
        except (KeyError, TypeError, ValueError) as error:
            raise _refuse_damaged(out.path / CHECKPOINT, f"one without the state of a training ({error})") from None
        Training(self.options, self.runs[self.run_index], self._text).restore(tensors, self.step)  # raises if it does not fit
        self._restored = tensors

    def _save(self, out: OutFolder, training: Training) -> None:
        state = {"configuration": configuration_of(self.options), "text_bytes": self._text_bytes, "text_sha256": self._text_sha256}
        text = json.dumps(state | {name: getattr(self, name) for name in _STATE})
        tensors = {name: tensor.contiguous() for name, tensor in training.state().items()}
        raw = torch.frombuffer(bytearray(text, "ascii"), dtype=torch.uint8)  # metadata may not be longer than 100 MB
        out.write(CHECKPOINT, save(tensors | {"state": raw}, {"format": FORMAT, "sha256": digest(text, tensors)}))

    def run(self, out: OutFolder) -> bool:
        """Trains until all runs have ended (True), or until a signal, and saves (False)."""
        out.claim(self.file_names())
        rows = []
        for i, run in enumerate(self.runs):
            rows += [row for row in self.log if row["run"] == run] + [result | {"final": True} for result in self.results[i : i + 1]]
        out.write(METRICS, b"".join(map(_line, rows)))
        with Interruption() as interruption:
            for self.run_index in range(self.run_index, len(self.runs)):
                if not self._train_one(out, self.runs[self.run_index], interruption):
                    return False
                self.step, self.losses, self.step_seconds = 0, [], []
            inspection = self._picture() if self._inspect else ""
            page = report_html(self.title(), self.results, self.log, self.plan_svg, inspection, self.sample)
            out.write(REPORT, page.encode(errors="backslashreplace"))
        return True

    def _train_one(self, out: OutFolder, run: str, interruption: Interruption) -> bool:
        Training(self.options, run, self._text).step(0)  # buffers that libraries keep count for no run
        memory = PeakMemory()
        training = Training(self.options, run, self._text)
        if self._restored:
            training.restore(self._restored, self.step)
            self._restored = {}
        steps, tokens = self.options["steps"], self._step_tokens
        progress = Progress(run, steps)
        while self.step < steps:
            if interruption.asked:
                progress.finish()
                self._save(out, training)
                return False
            is_logged = (self.step + 1) % self.options["log-every"] == 0 or self.step + 1 == steps or self.step == 0
            if self._inspect and is_logged:
                with tandem.inspect(training.model, warn=False) as inspection:
                    metrics = training.step(self.step)
                self._take(run, [row._replace(step=self.step + 1) for row in inspection.rows])
            else:
                metrics = training.step(self.step)
            if not math.isfinite(metrics.bits_per_byte):
                progress.finish()
                raise UserError(
                    f"expected a finite loss, got {metrics.bits_per_byte} at step {self.step + 1} of run {run}. Pass a smaller --learning-rate or --clip."
                )
            if self.step == 0 and self.run_index == 0 and not self.quiet and "TANDEM_STARTED" in os.environ:
                tell(f"first training step: {time.time() - float(os.environ['TANDEM_STARTED']):.1f} s after make began\n")
            self.step += 1
            self.losses.append(metrics.bits_per_byte)
            self.step_seconds.append(metrics.seconds)
            if self.step % self.options["log-every"] == 0 or self.step == steps:
                mean = statistics.fmean(self.losses[-self.options["log-every"] :])
                row = {"run": run, "step": self.step, "bits_per_byte": mean, "learning_rate": metrics.learning_rate}
                self.log.append(row | {"gradient_norm": metrics.gradient_norm, "tokens_per_second": tokens / metrics.seconds})
                out.append(METRICS, _line(self.log[-1]))
            if not self.quiet:
                progress.show(self.step, metrics.bits_per_byte, metrics.seconds, tokens, (len(self.runs) - self.run_index) * steps - self.step)
            every = self.options["checkpoint-every"]
            if every and (self.step % every == 0 or self.step == steps):
                with memory.paused():
                    self._save(out, training)
        progress.finish()
        self._finish_one(out, run, training, memory.bytes())
        return True

    def _finish_one(self, out: OutFolder, run: str, training: Training, peak_memory: int) -> None:
        result = {
            "run": run,
            "saved_bytes_per_token": training.saved_bytes_per_token(),
            "validation_bits_per_byte": training.validation_bits_per_byte(),
            "tokens_per_second": self._step_tokens / statistics.median(self.step_seconds),
            "peak_memory_bytes": peak_memory,
        }
        self.plan_svg = training.plan_svg() or self.plan_svg
        self.results.append(result)
        out.append(METRICS, _line(result | {"final": True}))
        out.write(f"model-{run}.safetensors", save({name: tensor.contiguous() for name, tensor in training.parameters().items()}))
        if run == self.runs[-1]:
            drawn = training.sample(240).decode("ascii", "replace")
            self.sample = "".join(c if c == "\n" or " " <= c <= "~" else "." for c in drawn)

    def _take(self, run: str, rows: list[Watched]) -> None:
        """Keeps the measurements of a step, and warns of the first one of each tensor that saturates or is not finite."""
        for row in rows:
            self.inspected.append([run, *row])
            if self.quiet or (run, row.name, row.role) in self._told or not (row.saturation or row.not_finite):
                continue
            self._told.add((run, row.name, row.role))
            what = f"{row.saturation:.2%} of its numbers beyond the format's range" if row.saturation else f"{row.not_finite} numbers that are not finite"
            tell(
                f"\ntandem train: warning: expected {row.name}: {row.role} of run {run} in the range of {row.quantizer}, got {what} in step {row.step} "
                f"(amax {row.amax:.3g}, scale {row.largest_scale:.3g}). Use a recipe whose scales follow the tensor, or look where it grows.\n"
            )

    def _picture(self) -> str:
        return picture([Watched(*row)._replace(name=f"{run}, {row[1]}") for run, *row in self.inspected])

    def document(self, finished: bool) -> dict[str, Any]:
        """All results as one document."""
        out = Path(self.options["out"])
        document = {
            "command": "train",
            "finished": finished,
            "configuration": configuration_of(self.options),
            "results": [*map(_strict, self.results)],
            "log": [*map(_strict, self.log)],
            "inspection": [_inspected(run, Watched(*row)) for run, *row in self.inspected],
            "metrics": str(out / METRICS),
        }
        if finished:
            return document | {"sample": self.sample, "report": str(out / REPORT)}
        return document | {"stopped": {"run": self.runs[self.run_index], "step": self.step}, "resume": self.resume_command()}

    def summary(self) -> str:
        """The table, the sample and the names of the written files, for the terminal."""
        out = Path(self.options["out"])
        return (
            f"{results_table(self.results)}\nText drawn from the last model:\n{self.sample}\n\n"
            f"Curves and plan: {out / REPORT}\nNumbers:         {out / METRICS}\n"
        )

    def resume_command(self) -> str:
        """The command that goes on."""
        return "tandem train --resume" + ("" if self.options["out"] == "out" else f" --out {shlex.quote(self.options['out'])}")

    def title(self) -> str:
        """The configuration in words."""
        o = self.options
        return (
            f"GPT with {o['layers']} layers, hidden {o['hidden']}, {o['heads']} heads, context {o['context']}; {o['dtype']}; {o['steps']} steps of "
            f"{o['batch']} x {o['context']} bytes; {Path(self._text_name).name}; threads: {o['threads']}"
        )


def _inspected(run: str, row: Watched) -> dict[str, Any]:
    numbers = {key: value for key, value in row._asdict().items() if key not in ("name", "role")}
    return {"run": run, "tensor": f"{row.name}: {row.role}"} | _strict(numbers)


def _strict(row: dict[str, Any]) -> dict[str, Any]:
    """A row for JSON, which has neither infinity nor NaN."""
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(_strict(row), separators=(",", ":")).encode() + b"\n"


def default_text() -> str:
    """The text that comes with Tandem."""
    return str(Path(__file__).parent / "data" / "kjv.txt")
