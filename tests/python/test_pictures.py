"""Pictures of plans: by Graphviz where it is installed, in two columns elsewhere, with times."""

import shutil
import stat
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from python_ops import op_of
from torch.utils.flop_counter import FlopCounterMode

import tandem
import tandem.ops as ops
from tandem.pipelines.picture import step_times


@pytest.fixture
def mlp():
    box = ops.Sequential(ops.RMSNorm(16), ops.Linear(16, 64), ops.SwiGLU(), ops.Linear(32, 16))
    box(torch.randn(4, 16, requires_grad=True)).sum().backward()
    return box


def named(svg):
    root = ElementTree.fromstring(svg)
    assert root.tag.endswith("svg")
    return " ".join("".join(element.itertext()) for element in root.iter())


@pytest.fixture
def without_graphviz(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)


def test_the_plain_layout_shows_edges_kept_bytes_and_times(mlp, without_graphviz):
    text = named(mlp.explain("svg", profile={"linear_bias_glu": 7.25, "rms_norm.backward": 100}))
    for wanted in ("linear_bias_glu", "replaces 1.basic_linear + 2.bias + 3.swiglu", "7.25 us", "100.0 us", "2.bias.y", "Float, 1.0 KiB", "backward, upwards"):
        assert wanted in text, wanted
    assert " us" not in named(mlp.explain("svg"))


def fake_dot(tmp_path, body):
    program = tmp_path / "dot"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


def test_graphviz_draws_where_it_is(mlp, monkeypatch, tmp_path):
    body = 'cat > "$0.in"; echo "<?xml version=\\"1.0\\"?><svg>laid out $1</svg>"'
    program = fake_dot(tmp_path, body)
    monkeypatch.setattr(shutil, "which", lambda name: {"dot": program}[name])
    assert mlp.explain("svg") == "<svg>laid out -Tsvg</svg>"
    assert (tmp_path / "dot.in").read_text() == mlp.explain("dot")
    html = mlp.explain("html")
    assert html.startswith("<div><svg>laid out") and "<pre>plan: training" in html and "-&gt; " in html
    assert mlp._repr_html_() == html


@pytest.mark.parametrize("body", ["exit 1", "echo no picture", "kill -9 $$"])
def test_a_graphviz_that_fails_is_done_without(mlp, monkeypatch, tmp_path, body):
    program = fake_dot(tmp_path, body)
    monkeypatch.setattr(shutil, "which", lambda name: program)
    assert "backward, upwards" in mlp.explain("svg")


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_graphviz_reads_the_graph(mlp):
    text = named(mlp.explain("svg", profile={"linear_bias_glu": 7.25}))
    for wanted in ("linear_bias_glu", "replaces 1.basic_linear + 2.bias + 3.swiglu", "7.25 us", "2.bias.y", "Float, 1.0 KiB", "backward (upwards)"):
        assert wanted in text, wanted


def test_a_profile_gives_the_times(mlp, without_graphviz):
    x = torch.randn(4, 16, requires_grad=True)
    with torch.profiler.profile() as profile:
        for _ in range(2):
            mlp(x).sum().backward()
    times = step_times(profile)
    assert times["linear_bias_glu"] > 0 and times["swiglu.backward" if "swiglu.backward" in times else "glu_backward_bias"] > 0
    assert named(tandem.explain(mlp, "svg", profile)).count(" us") >= 5


def test_a_profile_names_the_steps_and_tells_shapes(mlp):
    with torch.profiler.profile(record_shapes=True) as profile:
        mlp(torch.randn(4, 16))
    shapes = {event.key: event.input_shapes for event in profile.key_averages(group_by_input_shape=True)}
    assert shapes["tandem::rms_norm"] == [[4, 16], [16]]


@pytest.mark.parametrize("profile", [3, {"gelu": "long"}, {"gelu": -1.0}, {3: 1.0}, [("gelu", 1.0)]])
def test_what_is_no_profile_is_refused(mlp, profile):
    with pytest.raises(TypeError, match="explain: expected profile to be a torch.profiler.profile that has ended, or a dict of microseconds by step, got"):
        mlp.explain("svg", profile=profile)


@pytest.mark.parametrize("time", [float("inf"), float("nan")])
def test_times_that_are_no_numbers_are_told_with_their_step(mlp, time):
    for form in ("text", "svg"):
        with pytest.raises(ValueError, match=f"explain: expected profile to give gelu a finite number of microseconds, got {time}. Leave out steps that"):
            mlp.explain(form, profile={"rms_norm": 1.0, "gelu": time})


def test_names_that_are_no_xml_are_escaped(without_graphviz):
    odd = op_of(lambda x: x * 1, lambda grad: grad, 'A<"&\\')
    box = ops.Sequential(odd(), ops.GELU())
    box(torch.randn(2, requires_grad=True)).sum().backward()
    named(box.explain("svg"))
    assert 'label="0.A<\\"&\\\\.saved' in box.explain("dot")


def test_products_are_counted_as_those_of_torch():
    layers = [torch.nn.RMSNorm(16), torch.nn.Linear(16, 64, bias=False), torch.nn.GELU(), torch.nn.Linear(64, 8)]
    x = torch.randn(6, 16, requires_grad=True)

    def counted(module):
        with FlopCounterMode(display=False) as counter:
            module(x).sum().backward()
        return counter.get_total_flops()

    assert counted(ops.Sequential(*layers)) == counted(torch.nn.Sequential(*layers)) == 3 * 2 * 6 * (16 * 64 + 64 * 8)
