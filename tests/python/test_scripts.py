"""The checking scripts pass on a tree that keeps the rules and fail on each way of breaking one."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

GOOD_TREE = {
    "src/core/plan.h": '#include <ATen/core/Tensor.h>\n#include "kernel_ops/norm.h"\n#include "tandem/export.h"\n',
    "src/core/plan.cpp": '#include "core/plan.h"\n'
    "void f(int n) {\n"
    '  TORCH_CHECK_VALUE(n == g(1, ","), "plan: expected one step, got ", n,  // a comment with "text"\n'
    '                    ". Pass " "one.");\n'
    "}\n",
    "src/kernel_ops/norm.h": '#include "tandem/memory.h"\nnamespace tandem {\nvoid norm(int rows);\nstruct Norm;\n}\n',
    "src/kernel_ops/norm.cpp": "namespace tandem {\nvoid norm(int rows) {\n}\nint cached_bytes() {\n  return 0;\n}\nstruct Norm {};\n}\n",
    "include/tandem/memory.h": "namespace tandem {\nint cached_bytes();\n}\n",
    "src/kernels/cpu/norm.cpp": '#include "kernels/norm.h"\n',
    "src/kernels/norm.h": "#pragma once\n",
    "src/autograd/node.h": "#include <torch/csrc/autograd/function.h>\n",
    "src/bindings/tensor.h": "#include <torch/csrc/autograd/python_variable.h>\n",
    "python/tandem/__init__.py": "from tandem import _C, ops\n",
    "python/tandem/_C.pyi": "def version() -> str: ...\n",
    "python/tandem/ops/__init__.py": "from tandem.ops.linear import Linear\n",
    "python/tandem/ops/op.py": "from tandem import _C\n",
    "python/tandem/ops/linear.py": "from tandem.ops import op\n",
    "tests/core/plan_test.cpp": 'EXPECT_TEXT("plan: expected one step");\n',
}


def run(script: str, root: Path, *flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "scripts" / script), *flags, str(root)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def write(root: Path, tree: dict[str, str]) -> Path:
    for name, text in tree.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize("script", ["check_layout.py", "check_messages.py"])
def test_a_good_tree_passes(tmp_path, script):
    result = run(script, write(tmp_path, GOOD_TREE))
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("script", ["check_layout.py", "check_messages.py"])
def test_this_repository_passes(script):
    result = run(script, ROOT)
    assert result.returncode == 0, result.stderr


BROKEN_LAYOUTS = {
    "file too long": ({"src/core/plan.h": "\n" * 701}, "src/core/plan.h: expected at most 700 lines, got 701"),
    "median too long": (
        {name: "\n" * 300 for name in GOOD_TREE if not name.endswith(("txt", "cmake"))},
        "expected a median of at most 200 lines per file, got 300",
    ),
    "arrow up": ({"src/core/plan.h": '#include "planner/planner.h"\n'}, "planner lies above core"),
    "kernel ops see core": ({"src/kernel_ops/norm.h": '#include "core/plan.h"\n'}, "core lies above kernel_ops"),
    "core sees the front": ({"src/core/plan.h": "#include <tandem/tandem.h>\n"}, "tandem lies above core"),
    "wide comment": ({"src/core/wide.h": "// " + "x" * 98 + "\n"}, "src/core/wide.h:1: expected at most 100 columns, got 101. Break the line"),
    "unknown folder": ({"src/helpers/all.h": "\n"}, "expected a folder of LAYERS in check_layout.py, got helpers"),
    "torch in a kernel": ({"src/kernels/norm.h": "#include <ATen/ATen.h>\n"}, "kernels know no torch"),
    "autograd elsewhere": (
        {"src/core/plan.h": "#include <torch/csrc/autograd/variable.h>\n"},
        "only src/autograd includes torch/csrc/autograd",
    ),
    "bindings include more of autograd": (
        {"src/bindings/tensor.h": "#include <torch/csrc/autograd/engine.h>\n"},
        "only src/autograd includes torch/csrc/autograd",
    ),
    "CUDA elsewhere": (
        {"src/kernel_ops/norm.h": "#include <cuda_runtime.h>\n"},
        "the library builds without CUDA's headers",
    ),
    "function defined above": (
        {"src/core/plan.cpp": "namespace tandem {\nvoid norm(int rows) {\n}\n}\n", "src/kernel_ops/norm.cpp": "\n"},
        "src/kernel_ops/norm.h: expected tandem::norm() to be defined in its own layer or below, got src/core/plan.cpp. Declare it there.",
    ),
    "function defined above, another of its name below": (
        {"src/core/plan.cpp": "void tandem::norm(int rows) {\n}\n", "src/kernel_ops/norm.cpp": "namespace tandem {\nvoid norm() {}\n}\n"},
        "expected tandem::norm() to be defined in its own layer",
    ),
    "class defined above": ({"src/core/plan.h": "struct tandem::Norm {};\n", "src/kernel_ops/norm.cpp": "\n"}, "expected tandem::Norm to be"),
    "method defined above": (
        {
            "src/kernel_ops/norm.h": "namespace tandem {\nclass Norm {\n public:\n  explicit Norm(int n);\n  int rows() const;\n};\n}\n",
            "src/core/plan.cpp": 'namespace tandem {\nNorm::Norm(int n) : n_{n}, s_("}") {\n}\nint Norm::rows() const {\n  return 1;\n}\n}\n',
        },
        "expected tandem::Norm::rows() to be defined",
    ),
    "variable defined above": (
        {"src/kernel_ops/norm.h": "extern const int kNorm;\n", "src/core/plan.cpp": "const int kNorm = 1;\n"},
        "expected kNorm to be defined",
    ),
    "defined above, in a header that all see": (
        {"src/kernel_ops/norm.cpp": "\n", "src/core/plan.cpp": "namespace tandem {\nint cached_bytes() { return 0; }\n}\n"},
        "include/tandem/memory.h: expected tandem::cached_bytes() to be defined",
    ),
    "circle of imports": (
        {"python/tandem/ops/op.py": "import tandem.ops.linear\n"},
        "python/tandem/ops/linear.py: expected no circle of imports, got tandem.ops.linear -> tandem.ops.op -> tandem.ops.linear. Move",
    ),
    "circle of imports in a function": ({"python/tandem/ops/op.py": "def f():\n    from tandem.ops.linear import Linear\n"}, "no circle of imports"),
    "circle of imports for types": (
        {"python/tandem/ops/op.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .linear import Linear\n"},
        "no circle of imports",
    ),
    "circle of imports through a package": ({"python/tandem/ops/op.py": "import tandem\n"}, "no circle of imports"),
    "package above": (
        {"python/tandem/quantized/tensor.py": "def f():\n    from tandem.ops.linear import Linear\n"},
        "python/tandem/quantized/tensor.py: expected imports of quantized only, got tandem.ops.linear. Move",
    ),
    "package without a rank": ({"python/tandem/gadgets/wheel.py": ""}, "expected a package of PACKAGES in check_layout.py, got gadgets. Add it there"),
    "underscored module": ({"python/tandem/_linear.py": ""}, "python/tandem/_linear.py: expected a module in a package that says what it is about"),
    "no such test": ({"src/core/plan.h": "/// Error: none (test Plans).\n"}, "src/core/plan.h: expected a suite or a case of tests/ for what holds, got Plans"),
    "no such test in the next line": (
        {
            "src/core/plan.h": "/// Error: none (tests PlanTest, PlanTest.*Order,\n///         Plans).\n",
            "tests/plan_test.cpp": "TEST_P(PlanTest, KeepsOrder) {}\n",
        },
        "got Plans, which none is called. Name one that is there",
    ),
}


@pytest.mark.parametrize(("change", "text"), BROKEN_LAYOUTS.values(), ids=BROKEN_LAYOUTS.keys())
def test_broken_layout_fails(tmp_path, change, text):
    result = run("check_layout.py", write(tmp_path, GOOD_TREE | change))
    assert result.returncode == 1
    assert text in result.stderr


def check_of(*arguments: str, kind: str = "VALUE") -> dict[str, str]:
    return {"src/core/plan.cpp": f"void f() {{\n  TORCH_CHECK_{kind}({', '.join(arguments)});\n}}\n"}


@pytest.mark.parametrize(
    ("change", "lacking"),
    [
        (check_of("ok", '"plan: wrong number of steps"'), "got no expected and no got"),
        (check_of("ok", '"plan: expected one step"', kind="TYPE"), "got no got"),
        (check_of("ok", '"plan: got two steps"', kind="NOT_IMPLEMENTED"), "got no expected"),
        (check_of("ok"), "(no text)"),
        (check_of('name != "expected, got"', '"plan: wrong name"'), "got no expected and no got"),
        (check_of("ok", '"plan: wrong name" /* "expected", "got" */'), "got no expected and no got"),
        (check_of("ok", '"unexpected and forgotten"'), "got no expected and no got"),
    ],
)
def test_incomplete_message_fails(tmp_path, change, lacking):
    result = run("check_messages.py", write(tmp_path, GOOD_TREE | change))
    assert result.returncode == 1
    assert "src/core/plan.cpp:2:" in result.stderr
    assert lacking in result.stderr


def test_words_in_adjacent_literals_count(tmp_path):
    change = check_of("ok", '"plan: expe" "cted one step"\n    ", g" "ot ", n')
    result = run("check_messages.py", write(tmp_path, GOOD_TREE | change))
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("test", "is_mentioned"),
    [
        ('"planner: expected a list of ops"', True),
        ('"steps: expected a list of ops, got 3"', True),
        ('r"expected a list of ops, got .*, which"', True),
        ('r"expected a list of ops \\(of two\\)"', False),
        ('"expected a list"', True),
        ('"a list of"', False),
    ],
)
def test_messages_that_no_test_mentions_fail(tmp_path, test, is_mentioned):
    change = check_of("ok", 'name, ": expected a list of "', '"ops, got "', "n") | {"tests/python/test_plan.py": f"TEXT = {test}\n"}
    result = run("check_messages.py", write(tmp_path, GOOD_TREE | change))
    assert (result.returncode == 0) == is_mentioned
    text = "src/core/plan.cpp:2: expected a test of the text, got none that mentions: : expected a list of ops, got "
    assert (text in result.stderr) != is_mentioned


def test_texts_that_python_raises_count(tmp_path):
    raises = "def f(n):\n    raise {}\n"
    tested = {"tests/python/test_op.py": 'match="Op: expected one of these, got 3"\n'}
    for raised, text in [
        ('ValueError(f"f: expected one, got {n}. " "Pass one.")', "2 messages, 1 problems"),
        ('ValueError(f"f: expected one of these, and not {n}.")', "2 messages, 1 problems"),
        ('ValueError(f"f: expected one of these, got {n}.")', "2 messages, 0 problems"),
        ('ValueError(f"{n}: expected {n}, got {n}.")', "2 messages, 0 problems"),  # it says what it fills in
        ('AttributeError("name")', "1 messages, 0 problems"),
        ("NotImplementedError", "1 messages, 0 problems"),
    ]:
        result = run("check_messages.py", write(tmp_path, GOOD_TREE | tested | {"python/tandem/ops/op.py": raises.format(raised)}))
        assert text in result.stdout and result.returncode == ("1 problems" in text), raised


def recipe(target: str) -> str:
    """The commands that `make TARGET` would run, asked of a make that is nobody's child: a child prints the folder as well."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    result = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_make_run_builds_what_it_runs_and_no_tests():
    assert recipe("run").split() == ["scripts/setup.sh", "--run", "scripts/build.sh", ".venv/bin/tandem-train"]
    assert recipe("test").split() == ["scripts/setup.sh", "scripts/build.sh", "scripts/test.sh"]
    assert "scripts/build.sh benchmarks\n" in recipe("bench")


def test_training_prints_the_time_since_make_began(tmp_path):
    tiny = ["--layers", "1", "--hidden", "32", "--heads", "2", "--context", "16", "--batch", "2", "--steps", "2", "--runs", "tandem"]
    command = [Path(sys.executable).parent / "tandem-train", *tiny, "--out", tmp_path]
    environment = {**os.environ, "TANDEM_STARTED": str(time.time() - 1000)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    (seconds,) = re.findall(r"^first training step: ([\d.]+) s after make began$", result.stderr, re.M)
    assert 1000 < float(seconds) < 1300
