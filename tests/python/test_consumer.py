"""The C++ package that the wheel installs works from a project that knows nothing but find_package(tandem)."""

import importlib.util
import subprocess
from pathlib import Path

import torch

CONSUMER = Path(__file__).parents[1] / "consumer"


def test_a_cpp_project_builds_and_runs_against_the_installed_package(tmp_path):
    package = Path(importlib.util.find_spec("tandem").origin).parent
    configure = ["cmake", "-S", CONSUMER, "-B", tmp_path, f"-Dtandem_DIR={package / 'lib/cmake/tandem'}"]
    for command in (configure, ["cmake", "--build", tmp_path], [tmp_path / "consumer"]):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
        assert "CMake Warning" not in result.stderr
    assert f"torch {torch.__version__.partition('+')[0]}, sum 12" in result.stdout
