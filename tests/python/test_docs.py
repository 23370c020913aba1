"""Every Python block of the pages at the top and in docs/ runs; every C++ block stands word for word in an example that the tests build and run."""

import re
import sys
import types
from pathlib import Path

import pytest

import tandem

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(language: str) -> list:
    found = []
    for page in PAGES:
        for number, text in enumerate(re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)):
            found.append(pytest.param(page, text, id=f"{page.name}-{number}"))
    return found


@pytest.mark.parametrize(("page", "code"), blocks("python"))
def test_python_block_runs(page, code, tmp_path, monkeypatch):
    source = tmp_path / "block.py"  # a file, so that the source of a class can be found
    source.write_text(code)
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType(f"block_of_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where Dynamo looks for globals of a compiled class
    exec(compile(code, str(source), "exec"), module.__dict__)


@pytest.mark.parametrize(("page", "code"), blocks("cpp"))
def test_cpp_block_stands_in_an_example(page, code):
    examples = [path.read_text() for path in (ROOT / "examples").glob("*.cpp")]
    assert any(code in example for example in examples), f"{page.name}: a C++ block that no example holds:\n{code}"


def test_tables_are_what_the_library_tells():
    page = (ROOT / "docs" / "guide" / "explain.md").read_text()
    for fusion in tandem._C.built_in_fusions():
        assert f"| {fusion.pass_name} | `{fusion.name}` | `{fusion.picture}` |" in page


def test_pages_link_to_what_exists():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_pages_name_files_that_exist():
    for page in PAGES:
        for path in re.findall(r"`((?:src|include|tests|python|apps|cli|scripts|examples|benchmarks|docs)/[\w./-]+)`", page.read_text()):
            assert (ROOT / path).exists(), f"{page.name}: {path}"
