"""What a user sees of the package without running it: types, help, completion, examples in docstrings."""

import doctest
import importlib
import inspect
import json
import pkgutil
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tandem
from tandem import recipe

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(sys.executable).parent
CACHE = ROOT / "build" / "mypy"  # torch's types take minutes the first time


USE = """
from typing import assert_type

import torch
import tandem
from tandem.ops import LayerNorm, Linear, OperationContext, Sequential

linear, norm = Linear(4, 4), LayerNorm(4)
assert_type(linear.weight, torch.nn.Parameter)
assert_type(linear.bias, torch.nn.Parameter | None)
total: torch.Tensor = linear.weight.sum() + norm.weight.sum() + norm.bias.sum()
(saved,) = OperationContext(saved_tensors=(total,)).saved_tensors
doubled: torch.Tensor = saved * 2
box = assert_type(Sequential(linear).append(norm), Sequential)
assert_type(box[1:], Sequential)
assert_type(bool(tandem.verify(box, total)), bool)
assert_type(tandem.cached_bytes(), int)
assert_type(tandem.compile(linear, recipe=None, exclude="head", require=0.9), Linear)
tandem.compile(linear, recipes=None)  # type: ignore[call-arg]
tandem.compile(linear, rest="fast")  # type: ignore[arg-type]
"""


@pytest.fixture(scope="module")
def documented(tmp_path_factory):
    """A folder with every Python block of the pages, each a module, and every example."""
    folder = tmp_path_factory.mktemp("documented")
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for number, text in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)):
            (folder / f"{page.stem.replace('-', '_').lower()}_{number}.py").write_text(text)
    for example in (ROOT / "examples").glob("*.py"):
        (folder / example.name).write_text(example.read_text())
    assert len(list(folder.iterdir())) >= 5
    (folder / "use.py").write_text(USE)
    return folder


def test_mypy_strict_passes_on_what_is_documented(documented):
    command = [PROGRAMS / "mypy", "--strict", "--cache-dir", CACHE, "--python-executable", sys.executable, *sorted(documented.iterdir())]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=documented)
    assert result.returncode == 0, result.stdout + result.stderr


def test_pyright_passes_on_what_is_documented(documented):
    """basedpyright is pyright with all that it needs in the package; `standard` is pyright's own set of rules."""
    project = documented / "pyrightconfig.json"
    project.write_text(json.dumps({"typeCheckingMode": "standard", "include": ["*.py"]}))
    command = [PROGRAMS / "basedpyright", "--project", project, "--pythonpath", sys.executable]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=documented)
    finally:
        project.unlink()
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_stub_of_the_extension_names_what_it_has():
    stub = (Path(tandem.__file__).parent / "_C.pyi").read_text()
    named = set(re.findall(r"^(?:class |def )?(\w+)(?=[(:])", stub, re.M)) - {"InForce"}  # a type that only its one object has
    assert named == {name for name in vars(tandem._C) if not name.startswith("_")}


PUBLIC = [getattr(module, name) for module in (tandem, tandem.ops, recipe) for name in sorted(module.__all__)]
CALLED = [thing for thing in PUBLIC if inspect.isclass(thing) or inspect.isfunction(thing)]


@pytest.mark.parametrize("thing", CALLED, ids=lambda thing: thing.__name__)
def test_help_explains_every_argument(thing):
    if thing in (recipe.Format, tandem.ops.FusibleOperation):
        return  # nobody constructs these
    text = inspect.getdoc(thing) or ""
    if inspect.isclass(thing) and thing.__init__ is not object.__init__:
        own = inspect.getdoc(thing.__init__) or ""
        assert own != inspect.getdoc(torch.nn.Module.__init__), "the constructor has no docstring of its own"
        text += own
    assert len(text) > 10
    for name in inspect.signature(thing).parameters:
        assert re.search(rf"^\s*(\w+, )*{name}(, \w+)*: \S", text, re.M), f"{name} is not explained:\n{text}"


@pytest.mark.parametrize("module", [tandem, tandem.ops, recipe], ids=lambda module: module.__name__)
def test_completion_shows_public_names_only(module):
    assert set(dir(module)) == set(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)


@pytest.mark.parametrize("imports", ["import pydoc, torch, tandem", "import torch, tandem, pydoc"], ids=["before", "behind"])
def test_help_is_text_of_the_library(imports):
    """Whether pydoc is imported before the package or behind it."""
    things = "tandem.ops.Linear", "tandem.Linear", "tandem.QuantizedTensor", "tandem"
    code = f"{imports}; [print(pydoc.plain(pydoc.render_doc(thing)), end='\\0') for thing in ({', '.join(things)})]"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *texts, rest = result.stdout.split("\0")
    assert len(texts) == len(things) and rest == ""
    for thing, text in zip(things, texts, strict=True):
        assert "inherited from torch" not in text and "register_full_backward_hook" not in text, thing
        if thing != "tandem":
            assert "torch.nn.modules.module.Module" in text or "torch.Tensor" in text, "the classes that it inherits from are named"
            assert text.count("\n") < 400
    assert "Makes a product with a weight" in texts[0] and "x ~= decode(data) * scale_inv" in texts[2] and "an operation fuser" in texts[3]


def test_help_of_other_classes_and_completion_are_whole():
    class Own(tandem.Linear):
        pass

    for thing in (Own, torch.nn.Linear):
        assert "register_full_backward_hook" in pydoc.plain(pydoc.render_doc(thing))
    assert "register_full_backward_hook" in dir(tandem.Linear) and "register_full_backward_hook" in dir(tandem.ops.Identity())


def test_examples_in_docstrings_run():
    names = ["tandem", *(module.name for module in pkgutil.walk_packages(tandem.__path__, "tandem."))]
    results = {name: doctest.testmod(importlib.import_module(name)) for name in names}
    assert {name: result for name, result in results.items() if result.failed} == {}
    assert sum(result.attempted for result in results.values()) >= 15
