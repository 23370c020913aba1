"""The C++ package that the wheel installs works from a project that knows nothing but find_package(tandem)."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths

import tandem
from tandem.recipe import DelayedScaling, MXFP8BlockScaling

CONSUMER = Path(__file__).parents[1] / "consumer"
EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*command, **options) -> str:
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "CMake Warning" not in result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    folder = tmp_path_factory.mktemp("consumer")
    package = Path(importlib.util.find_spec("tandem").origin).parent
    launcher = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] * (shutil.which("ccache") is not None)
    run("cmake", "-S", CONSUMER, "-B", folder, f"-Dtandem_DIR={package / 'lib/cmake/tandem'}", *launcher)
    run("cmake", "--build", folder)
    return folder


def test_a_cpp_project_builds_and_runs_against_the_installed_package(build):
    assert f"torch {torch.__version__.partition('+')[0]}, sum 12" in run(build / "consumer")


def test_installed_headers_lie_below_tandem_and_need_no_other_folder(tmp_path):
    include = Path(importlib.util.find_spec("tandem").origin).parent / "include"
    assert [entry.name for entry in include.iterdir()] == ["tandem"]
    headers = sorted(str(path.relative_to(include)) for path in include.rglob("*.h"))
    assert {"tandem/tandem.h", "tandem/version.h", "tandem/extension/core/op_def.h"} <= {*headers}
    # The machine that runs this has nlohmann's headers: one header alone asks for them, and does without.
    assert [header for header in headers if "<nlohmann/" in (include / header).read_text()] == ["tandem/extension/core/json_fwd.h"]
    source = tmp_path / "all.cpp"
    source.write_text("".join(f"#include <{header}>\n" for header in headers))
    torch_headers = [part for folder in include_paths() for part in ("-isystem", folder)]
    run("c++", "-std=c++20", "-fsyntax-only", "-Wall", "-Werror", "-I", include, *torch_headers, source)


def test_an_exported_pipeline_runs_in_a_program_that_names_nothing_of_tandem(build, tmp_path):
    # Under CI Inductor refuses an op that it only knows from a table of decompositions.
    here = run(sys.executable, EXAMPLES / "export_mlp.py", tmp_path / "mlp.pt2", cwd=tmp_path, env={**os.environ, "CI": "true"}).splitlines()
    there = run(build / "run_exported", tmp_path / "mlp.pt2").splitlines()
    assert len(here) == 4 and len(there) == 7  # 4 rows, then 3

    def numbers(lines):
        return torch.tensor([[float(number) for number in line.split()] for line in lines])

    assert numbers(here).shape == (4, 8)
    torch.testing.assert_close(numbers(there), numbers(here + here[:3]), rtol=1e-6, atol=1e-7)


RECIPES = {"plain": None, "post_norm": None, "mxfp8": MXFP8BlockScaling(), "delayed": DelayedScaling(amax_history_len=4)}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_transformer_layer_is_the_same_in_both_languages(build, tmp_path, recipe):
    def made():
        return tandem.TransformerLayer(
            *(64, 96, 4, 2), hidden_dropout=0, attention_dropout=0, bias=False, activation="swiglu", normalization="RMSNorm", qk_norm_type="RMSNorm",
            output_layernorm=recipe == "post_norm",
        )  # fmt: skip

    torch.manual_seed(0)
    layer = made()
    given = {**layer.state_dict(), "x": torch.randn(32, 2, 64), "grad_y": torch.randn(32, 2, 64)}
    torch.save(given, tmp_path / "given.pt")
    run(build / "transformer", recipe, tmp_path / "given.pt", tmp_path / "layer.pt", tmp_path / "computed.pt")
    x, angles = given["x"].requires_grad_(), tandem.RotaryPositionEmbedding(16)(32)
    for _ in range(2):
        with tandem.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
            y = layer(x, rotary_pos_emb=angles)
        y.backward(given["grad_y"])
    state = {name: tensor for name, tensor in layer.state_dict().items() if "recipe_state" in name}
    own = {"y": y.detach(), "x": x.grad, **{name: param.grad for name, param in layer.named_parameters()}, **state}
    computed = torch.load(tmp_path / "computed.pt", weights_only=False)  # tags of types are in it
    assert {*computed} == {*own}
    for name, tensor in own.items():
        assert torch.equal(computed[name], tensor), name
    saved = torch.jit.load(tmp_path / "layer.pt").state_dict()
    assert {*saved} == {*layer.state_dict()}
    loaded = made()
    loaded.load_state_dict(saved)
    with torch.no_grad(), tandem.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
        assert torch.equal(loaded(x, rotary_pos_emb=angles), layer(x, rotary_pos_emb=angles))


LOADS_THE_LIBRARY = """
import ctypes, json, sys
import torch
import tandem.ops as ops

ctypes.CDLL(sys.argv[1])
Leaky = ops.library.Leaky
box = ops.Sequential(Leaky(slope=0.5), Leaky())
x = torch.tensor([-8.0, 4.0], requires_grad=True)
with torch.no_grad():
    assert box(x).tolist() == [-1, 4]
    assert "made    leaky_twice" in box.explain()
box(x).sum().backward()
assert x.grad.tolist() == [0.125, 1]
assert box.verify(x), box.verify(x)
assert "refused leaky_twice at 0.leaky + 1.leaky" in box.explain()  # what lies between is read by backward
ctx = ops.OperationContext()
assert Leaky().op_forward(ctx, x).tolist() == [-2, 4] and ctx.to_save[0] is x
torch.testing.assert_close(torch.compile(box, fullgraph=True, backend="aot_eager")(x), box(x))
try:
    Leaky(slope=2)
except ValueError as error:
    assert "slope: of y below 0" in str(error)
else:
    raise AssertionError("a slope of 2")
print("loaded")
"""


def test_a_library_with_an_op_and_a_fusion_is_loaded_after_tandem(build):
    assert run(sys.executable, "-c", LOADS_THE_LIBRARY, build / "libleaky.so") == "loaded\n"
