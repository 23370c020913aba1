"""Import, version check, reports."""

import importlib.metadata
import json
import subprocess
import sys

import pytest
import torch
from support import llama_mlp

import tandem
import tandem.ops as ops
from tandem.versions import check_torch
from tandem.tracing import constant_while_traced


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_loads_nothing_of_torch_that_torch_has_not_loaded():
    loaded = python("import sys, torch; before = set(sys.modules); import tandem; print(*sorted(set(sys.modules) - before))").split()
    assert "tandem.ops.op" in loaded
    assert [name for name in loaded if name.startswith("torch.") or name in ("sympy", "numpy")] == []


def test_functions_are_marked_for_dynamo_as_torch_marks_them():
    def by_torch():
        pass

    @constant_while_traced
    def by_tandem():
        pass

    assert vars(by_tandem) == vars(torch.compiler.assume_constant_result(by_torch))


def test_the_version_is_that_of_the_library():
    assert tandem.__version__ == tandem._C.version()
    assert tandem.__version__.count(".") == 2


@pytest.mark.parametrize("version", ["2.13.0", "2.13.1+cu130", "2.13.0+cpu"])
def test_versions_of_torch_that_work(version):
    check_torch(version, "2.13.0")


@pytest.mark.parametrize("version", ["2.12.1", "2.14.0+cpu", "3.13.0", "1.13.1", "2.1.3", "2.130.0"])
def test_versions_of_torch_that_do_not(version):
    with pytest.raises(ImportError) as error:
        check_torch(version, "2.13.0")
    expected = f"tandem: expected torch 2.13, which this tandem was built against, got torch {version}. Run: pip install \"torch==2.13.*\", or"
    assert expected in str(error.value)


def test_another_torch_is_refused_before_the_library_is_loaded():
    code = """
import sys, torch
torch.__version__ = "2.12.0"
try:
    import tandem
except ImportError as error:
    print(error)
print([name for name in sys.modules if name.startswith("tandem") and "_C" in name])
"""
    message, loaded = python(code).splitlines()
    built = tandem._build.TORCH.rpartition(".")[0]
    assert message.startswith(f"tandem: expected torch {built}, which this tandem was built against, got torch 2.12.0. Run: pip install")
    assert loaded == "[]"


def test_the_package_names_the_torch_that_it_was_built_against():
    assert tandem._build.TORCH == tandem._C.built_against_torch()
    wanted = ".".join(tandem._build.TORCH.split(".")[:2])
    assert f"torch=={wanted}.*" in importlib.metadata.requires("tandem")


def test_explain_shows_steps_and_fusions_in_every_format():
    box = llama_mlp()
    with pytest.raises(ValueError, match="explain: expected a container that has been called, got one without calls"):
        box.explain()
    assert box._repr_html_().startswith("<pre>")
    box(torch.randn(2, 16))
    text = tandem.explain(box)
    assert "forward" in text and "rms_norm" in text and "swiglu" in text and "kept for backward" in text
    assert box.explain("svg").startswith("<svg")
    assert "<svg" in box._repr_html_()
    assert json.loads(box.explain("json"))
    with pytest.raises(ValueError, match='explain: expected format "text", "svg", "html", "dot" or "json", got "pdf"'):
        box.explain("pdf")
    two = ops.Sequential(ops.GELU(), torch.nn.ReLU(), ops.SiLU())
    two(torch.randn(2))
    assert len(json.loads(two.explain("json"))) == 2


def test_verify_compares_fused_with_unfused():
    box = ops.Sequential(*llama_mlp(), torch.nn.ReLU(), ops.AddExtraInput(), ops.Dropout(0.5))
    outcome = box.verify(torch.randn(3, 16, requires_grad=True), torch.randn(3, 16), masks=2)
    assert outcome and outcome.passed and outcome.comparisons > 10 and "agree" in str(outcome)


@pytest.mark.parametrize(("function", "arguments"), [("explain", ()), ("verify", (torch.ones(1),))])
def test_reports_are_about_modules(function, arguments):
    with pytest.raises(TypeError, match=f"{function}: expected a container, an op or a module, got int. Pass what is called."):
        getattr(tandem, function)(3, *arguments)


def test_a_required_fusion_that_is_not_made_is_an_error_with_the_reason():
    box = ops.Sequential(ops.Linear(4, 4), ops.GELU())
    x = torch.randn(2, 4)
    box(x)
    made = box.fusions_made()
    assert made
    assert torch.equal(box.require_fusion(made)(x), box.require_fusion([])(x))
    with pytest.raises(ValueError, match='require_fusion: expected fusion "linear_bias_glu" to be made, got no steps that match'):
        box.require_fusion("linear_bias_glu")(x)


def test_freed_memory_is_kept_within_the_limit():
    linear, x = tandem.ops.Linear(256, 256), torch.randn(1024, 256)
    before = tandem.set_cache_limit(1 << 30)
    try:
        tandem.empty_cache()
        linear(x)
        assert tandem.cached_bytes() == 1024 * 256 * 4
        with pytest.raises(ValueError, match="set_cache_limit: expected a number of bytes of at least 0, got -1. 0 keeps nothing."):
            tandem.set_cache_limit(-1)
        assert tandem.set_cache_limit(0) == 1 << 30
        assert tandem.cached_bytes() == 0
    finally:
        tandem.set_cache_limit(before)
