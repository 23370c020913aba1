"""What is installed elsewhere: the wheel in an environment of its own, the source archive, and a machine that lacks packages."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SITE = Path(sysconfig.get_paths()["purelib"])
# What any Linux with the glibc and libstdc++ of the tag has. Everything else must come with torch or with the wheel.
SYSTEM = {"linux-vdso.so.1", "libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1"}


def run(*command, **options) -> str:
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(ROOT / "scripts" / "wheel.sh", folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """A venv with the wheel, and with the packages of this one but for tandem."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    site = folder / SITE.relative_to(Path(sys.prefix))
    for package in SITE.iterdir():
        if not package.name.startswith("tandem"):
            (site / package.name).symlink_to(package)
    pip = [sys.executable, "-m", "pip", "--python", folder, "install", "-qq", "--disable-pip-version-check", "--no-index", "--no-deps"]
    run(*pip, wheel)
    return folder


def test_the_wheel_says_what_it_needs(wheel):
    assert re.fullmatch(r"tandem-[\d.]+-cp\d+-cp\d+-manylinux_2_\d+_x86_64\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as files:
        (metadata,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        assert re.search(r"^Requires-Dist: torch==2\.\d+\.\*$", files.read(metadata).decode(), re.M)


def test_the_wheel_runs_where_it_is_installed(environment):
    code = """
import tandem, torch
assert tandem.__file__.startswith(PREFIX), tandem.__file__
mlp = tandem.ops.Sequential(tandem.ops.RMSNorm(64), tandem.ops.Linear(64, 64), tandem.ops.GELU())
mlp(torch.randn(8, 64)).sum().backward()
print(mlp.verify(torch.randn(8, 64, requires_grad=True)).passed)
"""
    python = environment / "bin" / "python"
    assert run(python, "-c", code.replace("PREFIX", repr(str(environment))), cwd=environment) == "True\n"
    run(environment / "bin" / "tandem", "train", "--help", cwd=environment)  # it starts tandem-train


def test_the_wheel_needs_no_library_of_the_machine_that_built_it(environment):
    binaries = [*environment.rglob("tandem/**/*.so"), environment / "bin" / "tandem"]
    assert len(binaries) == 3
    for binary in binaries:
        for line in run("ldd", binary).splitlines():
            name, _, path = line.strip().partition(" => ")
            in_place = "/torch/lib/" in path or f"{environment}/" in path
            is_loader = name.startswith("/lib") and "ld-linux" in name
            assert in_place or is_loader or name.split()[0] in SYSTEM and "not found" not in path, f"{binary.name}: {line}"


def test_a_source_archive_holds_what_the_build_needs(tmp_path):
    build = "from scikit_build_core.build import build_sdist; import sys; build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, tmp_path, cwd=ROOT)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(tmp_path, filter="data")
    (source,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert (source / "scripts" / "package_metadata.py").is_file()
    run("cmake", "-S", source, "-B", tmp_path / "build", "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}")
    run("ninja", "-C", tmp_path / "build", "-n", "tandem", "_C", "programs")


def configure_error(folder, *definitions, **options) -> str:
    command = ["cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}", *definitions]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **options)
    assert result.returncode != 0
    return " ".join(result.stderr.split())


def test_a_machine_without_the_headers_is_told_the_packages(tmp_path):
    assert (
        "tandem: expected hwy/highway.h, nlohmann/json.hpp, CLI/CLI.hpp, got a system without. "
        "Run: apt-get install libhwy-dev nlohmann-json3-dev libcli11-dev"
    ) in configure_error(tmp_path, "-DCMAKE_IGNORE_PATH=/usr/include;/usr/local/include")


def test_a_machine_without_a_compiler_is_told_the_package(tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("cmake", "ninja"):
        (programs / name).symlink_to(shutil.which(name))
    without = {name: value for name, value in os.environ.items() if name not in ("CXX", "CMAKE_CXX_COMPILER")}
    ignored = "/usr/bin;/usr/local/bin;/bin"
    error = configure_error(tmp_path / "build", f"-DCMAKE_IGNORE_PATH={ignored}", env={**without, "PATH": str(programs)})
    assert "tandem: expected a C++ compiler, got a system without. Run: apt-get install g++" in error


def test_another_torch_is_refused_when_the_build_is_configured(tmp_path):
    torch = tmp_path / "torch"
    (torch / "include" / "ATen").mkdir(parents=True)
    (torch / "include" / "ATen" / "ATen.h").touch()
    (torch / "version.py").write_text("__version__ = '2.10.0+cpu'\n")
    error = configure_error(tmp_path / "build", f"-DTANDEM_TORCH_DIR={torch}")
    assert f"tandem: expected torch >=2.11,<2.15, got 2.10.0 in {torch}. Run:" in error
