"""Import, version check, reports."""

import json

import pytest
import torch
from support import llama_mlp

import tandem
import tandem.ops as ops
from tandem._versions import check_torch


def test_the_version_is_that_of_the_library():
    assert tandem.__version__ == tandem._C.version()
    assert tandem.__version__.count(".") == 2


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1+cu130", "2.13.0+cpu"])
def test_versions_of_torch_that_work(version):
    check_torch(version)


@pytest.mark.parametrize("version", ["2.10.1", "2.14.0+cpu", "3.0.0", "1.13.1"])
def test_versions_of_torch_that_do_not(version):
    with pytest.raises(ImportError) as error:
        check_torch(version)
    assert f"tandem: expected torch >=2.11,<2.14, got torch {version}. Run: pip install" in str(error.value)


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
    with pytest.raises(ValueError, match='explain: expected format "text", "svg", "html" or "json", got "pdf"'):
        box.explain("pdf")
    two = ops.Sequential(ops.GELU(), torch.nn.ReLU(), ops.SiLU())
    two(torch.randn(2))
    assert len(json.loads(two.explain("json"))) == 2


def test_verify_compares_fused_with_unfused():
    box = ops.Sequential(*llama_mlp(), torch.nn.ReLU(), ops.AddExtraInput(), ops.Dropout(0.5))
    outcome = box.verify(torch.randn(3, 16, requires_grad=True), torch.randn(3, 16), masks=2)
    assert outcome and outcome.passed and outcome.comparisons > 10 and "agree" in str(outcome)


@pytest.mark.parametrize(("function", "arguments"), [("explain", ()), ("verify", (torch.ones(1),))])
def test_reports_are_about_containers(function, arguments):
    with pytest.raises(TypeError, match=f"{function}: expected a tandem.ops.Sequential, got GELU. Put the ops into one."):
        getattr(tandem, function)(ops.GELU(), *arguments)


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
