"""scripts/new_op.py: what it writes and refuses. That what it writes works is for scripts/check_new_op.sh, which .ci/run calls.

The names are not those of the documentation, so that these tests pass in a tree where someone followed it.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "new_op.py"
sys.path.insert(0, str(ROOT / "scripts"))

import render_ops  # noqa: E402


@pytest.fixture
def tree(tmp_path):
    for folder in ("docs", "include", "src/kernels", "src/kernel_ops", "src/ops", "tests/python"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / ".clang-format", tmp_path)
    return tmp_path


def files_of(root):
    return {path.relative_to(root).as_posix(): path.read_text() for path in root.rglob("*") if path.suffix in (".cpp", ".h", ".md", ".py", ".txt")}


def new_op(root, *arguments):
    return subprocess.run([sys.executable, SCRIPT, *arguments, root], capture_output=True, text=True, check=False)


def test_an_op_is_seven_files_and_three_rows(tree):
    before = files_of(tree)
    result = new_op(tree, "zig_zag")
    assert result.returncode == 0, result.stderr
    after = files_of(tree)
    new, edited = sorted(after.keys() - before.keys()), sorted(name for name in before if after[name] != before[name])
    assert new == [
        "docs/ops/zig_zag.md", "src/kernel_ops/elementwise/zig_zag.cpp", "src/kernel_ops/elementwise/zig_zag.h", "src/kernels/cpu/zig_zag.cpp", "src/kernels/zig_zag.h",
        "src/ops/zig_zag.cpp", "tests/python/test_zig_zag.py",
    ]  # fmt: skip
    assert edited == ["docs/ops.md", "tests/python/test_kernel_ops.py"]
    assert sorted(re.findall(r"^new +(\S+)$", result.stdout, re.M)) == new
    assert sorted(re.findall(r"^edited +(\S+)$", result.stdout, re.M)) == edited
    assert "7 new files, 2 edited." in result.stdout
    assert len(after[edited[1]].splitlines()) == len(before[edited[1]].splitlines()) + 2
    assert not any(word in after[name] for name in new for word in ("@name@", "@Type@"))
    assert re.search(r"^\| \[`zig_zag`\]\(ops/zig_zag\.md\) \| .* \| `tandem\.ops\.library\.ZigZag` \|$", after["docs/ops.md"], re.M)


def test_an_activation_is_a_page_and_four_edits(tree):
    before = files_of(tree)
    result = new_op(tree, "--activation", "zig_zag")
    assert result.returncode == 0, result.stderr
    after = files_of(tree)
    edited = sorted(name for name in before if after[name] != before[name])
    assert after.keys() - before.keys() == {"docs/ops/zig_zag.md"}
    assert edited == ["docs/ops.md", "include/tandem/activations.h", "src/kernel_ops/unit/activation_reference.h", "src/kernels/cpu/activation_math-inl.h"]
    assert sorted(re.findall(r"^edited +(\S+)$", result.stdout, re.M)) == edited and "1 new files, 4 edited." in result.stdout
    assert '  ROW(zig_zag, "x / (1 + |x|)")\n' in after["include/tandem/activations.h"]
    assert "| [`zig_zag`](ops/zig_zag.md) | y = x / (1 + \\|x\\|) | `tandem.ops.library.ZigZag` |\n" in after["docs/ops.md"]
    page, names = after["docs/ops/sigmoid.md"], {"sigmoid": "zig_zag", "Sigmoid": "ZigZag", "1 / (1 + exp(-x))": "x / (1 + |x|)"}
    for old, new in names.items():
        page = page.replace(old, new)
    assert after["docs/ops/zig_zag.md"] == page
    again = new_op(tree, "--activation", "zig")
    assert again.returncode == 0 and files_of(tree)["include/tandem/activations.h"].count("ROW(zig") == 2
    assert re.findall(r"^\| \[`(zig\w*)`", files_of(tree)["docs/ops.md"], re.M) == ["zig", "zig_zag"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("SoftClip", "new_op: expected a name of lower-case letters, digits and single _, such as soft_clip, got 'SoftClip'. Rename it."),
        ("soft__clip", "digits and single _, such as soft_clip, got 'soft__clip'"),
        ("_clip", "got '_clip'"),
        ("2clip", "got '2clip'"),
        ("soft-clip", "got 'soft-clip'"),
        ("", "got ''"),
        ("class", "new_op: expected a name that is no keyword of C++ or Python, got 'class'. Rename it."),
        ("lambda", "expected a name that is no keyword of C++ or Python, got 'lambda'"),
        ("gelu", "new_op: expected a new name, got 'gelu', which include/tandem/activations.h has. Rename it."),
        ("rms_norm", "expected a new name, got 'rms_norm', which src/ops/norm.cpp has"),
        ("quantize", "expected a new name, got 'quantize', which src/"),
        ("element", "expected a new name, got 'element', which src/kernels/cpu/element-inl.h has"),
        ("linear", "expected a new name, got 'linear', which src/ops/linear"),
    ],
)
@pytest.mark.parametrize("flags", [(), ("--activation",)])
def test_names_are_checked_before_anything_is_written(tree, name, text, flags):
    before = files_of(tree)
    result = new_op(tree, *flags, "--", name)
    assert result.returncode == 2 and text in result.stderr and result.stdout == ""
    assert files_of(tree) == before


def test_a_name_whose_class_is_taken_is_refused(tree):
    assert new_op(tree, "zig2").returncode == 0
    result = new_op(tree, "zig_2")
    assert "new_op: expected a name whose class in Python is new, got 'zig_2', whose class is Zig2. Rename it." in result.stderr


def test_a_folder_without_sources_is_refused(tmp_path):
    result = new_op(tmp_path, "zig_zag")
    assert result.returncode == 2
    assert f"new_op: expected the folder of Tandem's sources, which has include/tandem/activations.h, got {tmp_path}." in result.stderr


def test_a_file_that_was_broken_is_refused(tree):
    (tree / "src/kernel_ops/unit/activation_reference.h").write_text("")
    result = new_op(tree, "--activation", "zag")
    assert result.returncode == 2 and "new_op: expected a file that holds" in result.stderr


def test_another_page_than_the_definitions_is_told(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(render_ops, "PAGE", tmp_path / "ops.md")
    monkeypatch.setattr(render_ops, "FUSIONS", tmp_path / "explain.md")
    (tmp_path / "explain.md").write_text("before\n<!-- fusions -->\n<!-- end of fusions -->\nbehind\n")
    assert render_ops.main(check=False) == 0 and render_ops.main(check=True) == 0
    (tmp_path / "ops.md").write_text("# Ops\n")
    assert render_ops.main(check=True) == 1
    assert "render_ops: expected docs/ops.md to say what the definitions say, got another page." in capsys.readouterr().err
    assert render_ops.main(check=False) == 0
    (tmp_path / "ops" / "gelu.md").write_text("# gelu\n")
    (tmp_path / "ops" / "gone.md").write_text("# gone\n")
    assert render_ops.main(check=True) == 1
    told = capsys.readouterr().err
    assert "expected docs/ops/gelu.md to say" in told and "expected docs/ops/gone.md to say" in told and told.count("\n") == 2
    assert render_ops.main(check=False) == 0 and not (tmp_path / "ops" / "gone.md").exists()
