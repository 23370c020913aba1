"""The options of `tandem train`: one table for the command line, its help, and the configuration in a checkpoint."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

import tandem

from .files import UserError

RECIPES: dict[str, Callable[[], tandem.recipe.Recipe]] = {
    "fp8": tandem.recipe.Float8CurrentScaling,
    "delayed": tandem.recipe.DelayedScaling,
    "block": tandem.recipe.Float8BlockScaling,
    "mxfp8": tandem.recipe.MXFP8BlockScaling,
    "nvfp4": tandem.recipe.NVFP4BlockScaling,
}
RUNS = ["plain", "tandem", "float32", "bfloat16", *RECIPES]  # without Tandem, with it, in a given dtype, and under each recipe


class Whole(NamedTuple):
    """A whole number between two bounds, which are included."""

    least: int
    most: int

    def __str__(self) -> str:
        return f"a whole number from {self.least} to {self.most}"

    def read(self, text: str) -> Any:
        return int(text) if re.fullmatch(r"-?[0-9]{1,19}", text) else text

    def holds(self, value: object) -> bool:
        return type(value) is int and self.least <= value <= self.most


class Real(NamedTuple):
    """A number between two bounds, which are included."""

    least: float
    most: float

    def __str__(self) -> str:
        return f"a number from {self.least:g} to {self.most:g}"

    def read(self, text: str) -> Any:
        return float(text) if re.fullmatch(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text) else text

    def holds(self, value: object) -> bool:
        return type(value) in (int, float) and self.least <= value <= self.most  # type: ignore[operator]


class Choice(NamedTuple):
    """One of several words."""

    words: Sequence[str]

    def __str__(self) -> str:
        return "one of " + ", ".join(self.words)

    def read(self, text: str) -> str:
        return text

    def holds(self, value: object) -> bool:
        return value in self.words


class Text(NamedTuple):
    """Any text; `what` names it in the help."""

    what: str

    def __str__(self) -> str:
        return "a text"

    def read(self, text: str) -> str:
        return text

    def holds(self, value: object) -> bool:
        return isinstance(value, str)


class Option(NamedTuple):
    """An option. A checkpoint keeps it but for "no"; resuming may change it if it is kept "freely", because results do not depend on it."""

    name: str
    default: Any
    bounds: Whole | Real | Choice | Text
    kept: str  # "fixed", "freely" or "no"
    group: str
    help: str


_MOST = 1_000_000_000
OPTIONS = [
    Option("layers", 4, Whole(1, 1000), "fixed", "Model", "transformer layers"),
    Option("hidden", 192, Whole(2, 65536), "fixed", "Model", "width of the residual stream"),
    Option("heads", 6, Whole(1, 1024), "fixed", "Model", "attention heads"),
    Option("context", 128, Whole(1, 65536), "fixed", "Model", "bytes that the model sees at once"),
    Option("dtype", "auto", Choice(("auto", "float32", "bfloat16")), "fixed", "Model",
           "type of all runs; auto: bfloat16 where the processor multiplies in it (the optimizer then keeps float32 copies), else float32"),
    Option("text", "", Text("FILE"), "freely", "Training", "file to learn from (default: the King James Version that comes with Tandem)"),
    Option("runs", "plain,tandem,fp8", Text("LIST"), "fixed", "Training", "which to run, in this order: " + ", ".join(RUNS)),
    Option("batch", 8, Whole(1, 65536), "fixed", "Training", "sequences per step"),
    Option("steps", 500, Whole(1, _MOST), "fixed", "Training", "steps of each run"),
    Option("learning-rate", 2e-3, Real(0, 10), "fixed", "Training", "highest learning rate; falls along a cosine to a tenth"),
    Option("warmup", 50, Whole(0, _MOST), "fixed", "Training", "steps before the highest learning rate"),
    Option("weight-decay", 0.1, Real(0, 10), "fixed", "Training", "of matrices, as in AdamW"),
    Option("clip", 1.0, Real(1e-6, 1e6), "fixed", "Training", "largest norm of all gradients together"),
    Option("seed", 1, Whole(0, _MOST), "fixed", "Training", "decides initial parameters and batches"),
    Option("threads", 0, Whole(0, 1024), "freely", "Training", "processor threads; 0: one per core"),
    Option("out", "out", Text("FOLDER"), "no", "Files", "folder for everything that is written"),
    Option("log-every", 5, Whole(1, _MOST), "freely", "Files", "steps between rows of metrics.jsonl"),
    Option("checkpoint-every", 100, Whole(0, _MOST), "no", "Files", "steps between checkpoints; 0: only on Ctrl-C"),
]  # fmt: skip
FLAGS = {
    "resume": "go on from the checkpoint in --out; options left out come from it",
    "inspect": "measure what quantizing does to each tensor in the steps that are logged, for the report; warn where one saturates",
    "json": "print one JSON document instead of progress and table",
}
_DESCRIPTION = """\
Train a byte-level GPT on a text three times from the same start: with torch's own modules (plain), with Tandem
pipelines (tandem), and with Tandem pipelines in emulated FP8 (fp8). Compares loss, speed and memory."""
_EPILOG = """\
Writes into --out: metrics.jsonl, report.html, model-RUN.safetensors, checkpoint.safetensors, and
tandem-files.json, which lists them: no other file there is replaced or removed.
Ctrl-C, SIGTERM and SIGHUP save and stop; --resume goes on, with bit for bit the same numbers on as many threads.

Examples:
  tandem train                                      three runs of the default model, some minutes
  tandem train --runs fp8 --layers 6 --steps 1000   one longer run of a larger model
  tandem train --text notes.txt --out notes         a text of your own
  tandem train --resume --out notes                 go on where it stopped"""


def _help(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=30, width=120)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UserError(f"expected a complete command line, got: {message}. See tandem train --help.")


def parsed(arguments: Sequence[str] | None) -> tuple[dict[str, Any], dict[str, bool]]:
    """The options that the command line gives, by name, and all flags. Throws: UserError for unknown options and values out of their bounds."""
    parser = _Parser("tandem train", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=_help, allow_abbrev=False)
    groups = {option.group: parser.add_argument_group(option.group) for option in OPTIONS}
    for option in OPTIONS:
        metavar = option.bounds.what if isinstance(option.bounds, Text) else "N" if isinstance(option.bounds, Whole) else "X"
        metavar = "|".join(option.bounds.words) if isinstance(option.bounds, Choice) else metavar
        default = f" (default: {option.default})" if option.default != "" else ""
        groups[option.group].add_argument("--" + option.name, default=argparse.SUPPRESS, metavar=metavar, help=option.help + default)
    for flag, text in FLAGS.items():
        groups["Files"].add_argument("--" + flag, action="store_true", help=text)
    found = vars(parser.parse_args(arguments))
    given = {}
    for option in OPTIONS:
        text = found.get(option.name.replace("-", "_"))
        if text is None:
            continue
        given[option.name] = value = option.bounds.read(text)
        if not option.bounds.holds(value):
            raise UserError(f'expected --{option.name} to be {option.bounds}, got "{text}". See tandem train --help.')
    return given, {flag: found[flag] for flag in FLAGS}


def resumed(given: dict[str, Any], configuration: dict[str, Any]) -> dict[str, Any]:
    """All options of a training that goes on: those of its checkpoint, and those given. Throws: UserError if they disagree or are out of their bounds."""
    options = {}
    for option in OPTIONS:
        options[option.name] = given.get(option.name, option.default)
        if option.kept == "no":
            continue
        saved = configuration.get(option.name)
        if not option.bounds.holds(saved):
            raise UserError(
                f'expected "{option.name}" to be {option.bounds} in the checkpoint\'s configuration, got {json.dumps(saved)}. '
                "Restore the checkpoint from a copy, or start again without --resume."
            )
        if option.name not in given:
            options[option.name] = saved
        elif option.kept == "fixed" and saved != given[option.name]:
            raise UserError(
                f"expected --{option.name} {saved} as in the checkpoint, got {given[option.name]}. "
                f"Leave --{option.name} out, or start again without --resume."
            )
    return options


def configuration_of(options: dict[str, Any]) -> dict[str, Any]:
    """The options that a checkpoint keeps."""
    return {option.name: options[option.name] for option in OPTIONS if option.kept != "no"}


def resolved(options: dict[str, Any]) -> dict[str, Any]:
    """The options, with what the machine decides filled in. Throws: UserError for options that do not fit each other."""
    heads, hidden, runs = options["heads"], options["hidden"], options["runs"].split(",")
    if hidden % heads or hidden // heads % 2:
        raise UserError(
            f"expected --hidden to be an even multiple of --heads, got --hidden {hidden} and --heads {heads}. Pass for example --hidden {32 * heads}."
        )
    if not set(runs) <= set(RUNS):
        raise UserError(f'expected --runs to list some of {", ".join(RUNS)}, got "{options["runs"]}". Pass for example --runs plain,fp8.')
    twice = next((run for run in runs if runs.count(run) > 1), None)
    if twice:
        raise UserError(f'expected --runs to list each run once, got "{options["runs"]}". Leave one {twice} out.')
    dtype = options["dtype"]
    if dtype == "auto":
        capabilities = torch.cpu.get_capabilities()
        dtype = "bfloat16" if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") else "float32"
    return options | {"dtype": dtype, "threads": options["threads"] or torch.get_num_threads()}
