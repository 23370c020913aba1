"""Writes a new op, with a kernel of its own or as an activation. The files work unchanged and are meant to be edited.

Usage: new_op.py [--activation] NAME [ROOT]      NAME as on the command line, such as soft_clip.

An op with a kernel is y = x / (1 + slope |x|) with the option `slope`; an activation is y = x / (1 + |x|). Prints the new and edited files.
"""

import argparse
import keyword
import re
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import op_pages
import render_ops
from new_op_texts import ACTIVATION_FORMULA, ACTIVATION_REFERENCE, KERNEL_OP_CASES, NEW_FILES

NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
CPP_KEYWORDS = set(
    "alignas alignof asm auto bool break case catch char class concept const consteval constexpr constinit continue decltype default delete "
    "do double else enum explicit export extern false float for friend goto if inline int long mutable namespace new noexcept nullptr operator "
    "private protected public register requires return short signed sizeof static struct switch template this throw true try typedef typeid "
    "typename union unsigned using virtual void volatile while and or not xor".split()
)
TABLE = "include/tandem/activations.h"
CASES = "tests/python/test_kernel_ops.py"


class Refused(Exception):
    """The reason why nothing was written."""


def camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def taken_names(root: Path) -> dict[str, str]:
    """The names that are taken, each with a file that uses it."""
    table = (root / TABLE).read_text(encoding="utf-8")
    names = dict.fromkeys(re.findall(r"^  ROW\((\w+),", table, re.M), TABLE)
    for folder in ("src/ops", "src/kernel_ops", "src/kernels"):
        for path in sorted((root / folder).rglob("*.*")):
            names.setdefault(re.sub(r"(-inl)?\.\w+$", "", path.name), str(path.relative_to(root)))
            for found in re.findall(r'\.name = "(\w+)",\n +\.formula', path.read_text(encoding="utf-8")) if folder == "src/ops" else ():
                names[found] = str(path.relative_to(root))
    for front in ("include/tandem/ops.h", "include/tandem/modules.h"):
        for found in re.findall(r"^TANDEM_API Op (\w+)\(", (root / front).read_text(encoding="utf-8"), re.M):
            names.setdefault(found, front)
    return names


def check_name(name: str, root: Path) -> None:
    if not (root / TABLE).is_file():
        raise Refused(f"expected the folder of Tandem's sources, which has {TABLE}, got {root}. Pass it behind the name.")
    if not NAME.fullmatch(name):
        raise Refused(f"expected a name of lower-case letters, digits and single _, such as soft_clip, got {name!r}. Rename it.")
    if name in CPP_KEYWORDS or keyword.iskeyword(name):
        raise Refused(f"expected a name that is no keyword of C++ or Python, got {name!r}. Rename it.")
    taken = taken_names(root)
    if name in taken:
        raise Refused(f"expected a new name, got {name!r}, which {taken[name]} has. Rename it.")
    if camel(name) in map(camel, taken):
        raise Refused(f"expected a name whose class in Python is new, got {name!r}, whose class is {camel(name)}. Rename it.")


def edit(path: Path, change) -> None:
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")


def before(mark: str, text: str):
    """An edit that inserts `text` before the last occurrence of `mark`."""

    def change(source: str) -> str:
        if mark not in source:
            raise Refused(f"expected a file that holds {mark!r}, got one without. Restore it.")
        head, tail = source.rsplit(mark, 1)
        return head + text + mark + tail

    return change


def with_row(table: str, row: str) -> str:
    """The table of activations with one more row, with the backslashes aligned."""
    block = re.search(r"^#define TANDEM_ACTIVATIONS\(ROW\).*?[^\\]$", table, re.M | re.S)[0]
    lines = [line.rstrip("\\ ") for line in block.splitlines()] + [f"  {row}"]
    width = max(map(len, lines[:-1])) + 1
    return table.replace(block, "\n".join([line.ljust(width) + "\\" for line in lines[:-1]] + lines[-1:]))


def document(root: Path, op: dict) -> str:
    """Adds an op to docs/ops.md in alphabetical order and writes its page, as render_ops.py will once the op is built. Returns the page's path."""
    path = root / "docs" / "ops.md"
    text = path.read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[`\w+`\]\(ops/\w+\.md\) \| .*\n", text, re.M)
    rest = text.replace("".join(rows), "\0", 1)
    path.write_text(rest.replace("\0", "".join(sorted([*rows, render_ops.row(op)], key=lambda row: row.split("`")[1]))), encoding="utf-8")
    # Shapes, dtypes, kept values and steps are those of sigmoid, which has no class of its own either.
    same, fusions = (root / "docs" / "ops" / "sigmoid.md").read_text(encoding="utf-8").split("\n## Shapes", 1)[1].split("\n## Fusions\n\n")
    shown = same.replace("sigmoid", op["name"]) + "\n## Fusions\n\n" + (fusions if op["family"] else op_pages.NO_FUSIONS)
    page = f"docs/ops/{op['name']}.md"
    (root / page).write_text(f"{op_pages.opening(op, render_ops.section(op))}\n## Shapes{shown}", encoding="utf-8")
    return page


def description(name: str, formula: str, family: str, options: list[dict], python) -> dict:
    """The op's signature as the library will return it. `python` must have the arguments that the op's class will have."""
    return {
        "name": name,
        "formula": formula,
        "family": family,
        "sizes": [],
        "options": options,
        "parameters": [],
        "extra_inputs": [],
        "extra_outputs": [],
        "class": python,
        "python": f"tandem.ops.library.{camel(name)}",
    }


def write_activation(name: str, root: Path) -> tuple[list[str], list[str]]:
    formula = "x / (1 + |x|)"
    kernel, reference = "src/kernels/cpu/activation_math-inl.h", "src/kernel_ops/unit/activation_reference.h"
    edit(root / TABLE, lambda table: with_row(table, f'ROW({name}, "{formula}")'))
    mark = "template <Precision kPrecision, typename Body, size_t... kIndex>"
    edit(root / kernel, before(mark, ACTIVATION_FORMULA.replace("@name@", name)))
    edit(root / reference, before("}  // namespace tandem::kernel_ops", ACTIVATION_REFERENCE.replace("@name@", name)))
    page = document(root, description(name, f"y = {formula}", "activation", [], lambda: None))
    return [page], [TABLE, kernel, reference, "docs/ops.md"]


def write_op(name: str, root: Path) -> tuple[list[str], list[str]]:
    new = []
    for path, text in NEW_FILES.items():
        path = path.replace("@name@", name)
        if (root / path).exists():
            raise Refused(f"expected no file {path}, got one. Rename the op.")
        new.append(path)
    for path, text in zip(new, NEW_FILES.values(), strict=True):
        (root / path).write_text(text.replace("@name@", name).replace("@Type@", camel(name)), encoding="utf-8")
    slope = {
        "name": "slope",
        "default": 1.0,
        "expected": "a finite number >= 0",
        "is_required": False,
        "doc": "how fast y bends away from x",
    }
    edit(root / CASES, before("    }\n\n\ndef without_codes", KERNEL_OP_CASES.replace("@name@", name)))
    page = document(root, description(name, "y = x / (1 + slope |x|)", "", [slope], lambda *, slope=1.0: None))
    return [*new, page], [CASES, "docs/ops.md"]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Writes a new op with a kernel of its own, or an activation.")
    parser.add_argument("name", help="as on the command line, such as soft_clip")
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parent.parent, help="folder of Tandem's sources")
    parser.add_argument("--activation", action="store_true", help="a row of the table of activations instead")
    given = parser.parse_args(arguments)
    try:
        check_name(given.name, given.root)
        new, edited = (write_activation if given.activation else write_op)(given.name, given.root)
    except Refused as refused:
        print(f"new_op: {refused}", file=sys.stderr)
        return 2
    formatter = shutil.which("clang-format")
    if formatter and (given.root / ".clang-format").is_file():
        sources = [given.root / path for path in (*new, *edited) if path.endswith((".cpp", ".h"))]
        subprocess.run([formatter, "-i", *sources], check=True)
    for path in new:
        print(f"new     {path}")
    for path in edited:
        print(f"edited  {path}")
    print(f"{len(new)} new files, {len(edited)} edited. Next: make test. It is `tandem.ops.library.{camel(given.name)}` in Python,")
    print(f'`tandem::ops::op("{given.name}")` in C++, `{given.name}` on the command line.')
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
