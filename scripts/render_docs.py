"""Writes the tables of the documentation that follow from the library, between `<!-- NAME -->` and `<!-- end of NAME -->` of a page.

Usage: render_docs.py [--check]      With --check it writes nothing and fails if a page is outdated.
"""

import re
import sys
from pathlib import Path

from tandem import _C

DOCS = Path(__file__).parent.parent / "docs"


def fusions() -> str:
    """The table of all built-in fusions, in the order in which their pass tries them."""
    rows = [f"| {fusion.pass_name} | `{fusion.name}` | `{fusion.picture}` |" for fusion in _C.built_in_fusions()]
    return "\n".join(["| pass | fusion | what it replaces |", "|---|---|---|", *rows])


TABLES = {"guide/explain.md": {"fusions": fusions}}


def rendered(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    for name, render in TABLES[page.relative_to(DOCS).as_posix()].items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        text, count = re.subn(f"{begin}.*?{end}", lambda _: f"{begin}\n{render()}\n{end}", text, flags=re.S)
        if count != 1:
            raise SystemExit(f"{page.name}: expected one {begin} with its {end}, got {count}.")
    return text


def main(only_check: bool) -> int:
    outdated = [page for page in map(DOCS.joinpath, TABLES) if rendered(page) != page.read_text(encoding="utf-8")]
    for page in outdated:
        if only_check:
            print(f"render_docs: {page.name}: expected its tables as the library tells them, got others. Run scripts/render_docs.py.", file=sys.stderr)
        else:
            page.write_text(rendered(page), encoding="utf-8")
    return 1 if outdated and only_check else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
