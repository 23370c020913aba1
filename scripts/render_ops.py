"""Renders docs/ops.md, a page per op in docs/ops, and the table of fusions in docs/guide/explain.md, from definitions in the library and calls of the ops.

Usage: render_ops.py [--pages] [--check]      --pages renders only the pages of ops. With --check it writes nothing and fails if a page is outdated.

An op is the dictionary that `tandem._C.op_signature` returns as JSON, with its class in Python under "class", the name of the class under
"python", and the built-in fusions that it takes part in under "fusions".
"""

import json
import sys
from pathlib import Path

import op_pages

PAGE = Path(__file__).parent.parent / "docs" / "ops.md"
FUSIONS = PAGE.parent / "guide" / "explain.md"
HEAD = """# Operations

This page lists every operation. The page of an operation, behind its name, says its sizes, options, parameters, shapes, dtypes, kept values, steps and fusions.
`scripts/render_ops.py` renders all of these from the definitions in the library.

- In Python an operation is a class that takes TransformerEngine's arguments, where TransformerEngine has it. Classes of `tandem.ops.library` take the sizes and
  options of the operation's page.
- In C++ it is `tandem::ops::op("name", sizes, options)`. Most have a function in `tandem/ops.h`; `grouped_linear` has only that.
- On the command line sizes and options follow behind colons; see `tandem explain --help`.
- Activations and gated units are the rows of `tandem/activations.h`. Behind a `Linear` each fuses with the product's bias, in both directions. A gated unit takes
  a and b from the halves of the last dimension, or from blocks of columns by turns (`glu_interleave_size`).

| operation | computes | Python |
|---|---|---|
"""


def row(op: dict) -> str:
    """The row of an op in the table of all ops."""
    return f"| [`{op['name']}`](ops/{op['name']}.md) | {op['formula'].replace('|', chr(92) + '|')} | `{op['python']}` |\n"


def lines_of(op: dict) -> list[str]:
    """The rows of the table of an op's sizes and options."""
    lines = [f"| `{size['name']}` | size | {size['doc']} |" for size in op["sizes"]]
    for option in op["options"]:
        default = "required" if option["is_required"] else f"`{json.dumps(option['default'])}`"
        lines.append(f"| `{option['name']}` | {default}; {option['expected']} | {option['doc']} |")
    return lines


def start_of(parameter: dict) -> str:
    start = {"zeros": "zeros", "ones": "ones", "kaiming_uniform": "drawn as torch.nn.Linear draws its weight"}[parameter["init"]]
    return start + (f", zeros with `{parameter['zeros_if']}`" if parameter["zeros_if"] else "")


def section(op: dict) -> str:
    """The section of an op's page on its sizes, options, parameters, extra inputs and extra outputs."""
    text = f"`{op['formula']}`, in Python `{op['python']}`.\n"
    lines = lines_of(op)
    if lines:
        text += "\n| | | |\n|---|---|---|\n" + "\n".join(lines) + "\n"
    facts = [f"Parameter `{each['name']}` [{', '.join(each['shape'])}]: {start_of(each)}." for each in op["parameters"]]
    facts += [f"Extra input `{name}`." for name in op["extra_inputs"]] + [f"Extra output `{name}`." for name in op["extra_outputs"]]
    text += "\n" + " ".join(facts) + "\n" if facts else ""
    return text


def page(ops: list[dict]) -> str:
    return HEAD + "".join(row(op) for op in sorted(ops, key=lambda op: op["name"]))


def parts_of(fusion) -> set[str]:
    """The ops and families whose steps a fusion replaces."""
    return {step.split(".")[0] for steps in fusion.steps for step in steps.split("|")}


def library_ops() -> list[dict]:
    """The ops of the installed package."""
    import tandem.ops
    from tandem import _C
    from tandem.ops import library

    ops = [json.loads(_C.op_signature(name)) for name in _C.op_names()]
    for op in ops:
        made = library.class_of(op["name"])
        op["fusions"] = [fusion.name for fusion in _C.built_in_fusions() if {op["name"], op["family"]} & parts_of(fusion)]
        op["class"] = made
        op["python"] = ("tandem.ops." if made.__name__ in tandem.ops.__all__ else f"{made.__module__}.") + made.__name__
    return ops


def fusions(text: str) -> str:
    """The text of docs/guide/explain.md with the table of the built-in fusions, in the order in which their pass tries them."""
    from tandem import _C

    rows = [f"| {fusion.pass_name} | `{fusion.name}` | `{fusion.picture}` |" for fusion in _C.built_in_fusions()]
    before, begin, rest = text.partition("<!-- fusions -->\n")
    _, end, behind = rest.partition("<!-- end of fusions -->")
    return "\n".join([before + begin + "| pass | fusion | what it replaces |", "|---|---|---|", *rows, end + behind])


def rendered(ops: list[dict], pages_only: bool) -> dict[Path, str]:
    """The text of each file, by path."""
    texts = {} if pages_only else {PAGE: page(ops), FUSIONS: fusions(FUSIONS.read_text(encoding="utf-8"))}
    return {**texts, **{PAGE.parent / "ops" / f"{op['name']}.md": op_pages.page(op, section(op)) for op in ops}}


def main(check: bool, pages_only: bool = False) -> int:
    texts = rendered(library_ops(), pages_only)
    folder = PAGE.parent / "ops"
    stale = sorted({*folder.glob("*.md")} - {*texts})
    if not check:
        folder.mkdir(exist_ok=True)
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
        for path in stale:
            path.unlink()
        return 0
    wrong = [path for path, text in texts.items() if not path.exists() or path.read_text(encoding="utf-8") != text] + stale
    for path in wrong:
        name = path.relative_to(PAGE.parent).as_posix()
        print(f"render_ops: expected docs/{name} to say what the definitions say, got another page. Run scripts/render_ops.py.", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:], "--pages" in sys.argv[1:]))
