"""What the backend tells of models: what `tandem.explain` says, which products count, and what is warned of."""

import dataclasses
import gc
import json
import re

import pytest
import torch
import torch.nn.functional as F
from test_backend import HIDDEN, Calls, Decoder, check_equal, compiled, linear, scale
from torch import nn

import tandem
from tandem import recipe
from tandem.backend import Options
from tandem.backend.options import GivenOptions


@pytest.fixture
def x():
    return torch.randn(2, 5, HIDDEN)


def test_explain(x):
    model = Decoder(1)
    own = compiled(model)
    own(x)
    told = tandem.explain(own)
    assert "8 of 8 products in 1 pipelines" in told
    assert "    silu gate of two products          layers.0.mlp: return lambda m, x: m.down(function(m.gate(x)) * m.up(x))" in told
    assert re.search(r"SwiGLU, Linear, AddExtraInput, RMSNorm, Linear; keeps [1-9][0-9,]* bytes for backward\n", told)
    page = tandem.explain(own, "html")
    assert " bytes for backward</h4>" in page
    assert "<td>layers.0.o</td><td><code>x = x + self.o(attended(" in page
    assert page.count("<details>") == 1
    assert len(json.loads(tandem.explain(own, "json"))) == 1


def test_explain_tells_which_fusions_were_made_and_refused(x):
    own = compiled(Decoder(1))
    own(x.requires_grad_()).sum().backward()
    made = "\n    fused: add_rms_norm, linear_glu, rms_norm_backward_add\n    refused rms_norm_backward_add at 11.rms_norm.backward + add: "
    assert made in tandem.explain(own)


def test_explain_after_a_first_call_that_failed(x, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    own = compiled(Decoder(1))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tandem.ops.Sequential, "forward", interrupted)
        own(x)
    assert "pipeline 0: RMSNorm" in tandem.explain(own) and "fused" not in tandem.explain(own)


def test_verify_tells_what_the_graph_would_keep(x):
    """The graph keeps what goes into the unit and what comes out of it; operands count for neither."""
    model = nn.Sequential(linear(), nn.SiLU(), linear())
    own = compiled(model, verify=True)
    own(x)
    assert f"; keeps {2 * 5 * HIDDEN * 4:,} of {2 * 2 * 5 * HIDDEN * 4:,} bytes for backward" in tandem.explain(own)


@pytest.mark.parametrize("rest", ["eager", "inductor"])
def test_explain_where_nothing_was_found(x, rest):
    """Graphs without pipelines know whose they are, each model that they serve."""
    torch._dynamo.reset()
    for _ in range(2):
        own = tandem.compile(nn.Sequential(linear(), nn.Softsign(), nn.Tanh()).to(torch.complex64), rest=rest)
        own(x.to(torch.complex64))
        gc.collect()
        told = tandem.explain(own)
        assert ": 0 of 1 products in 0 pipelines\n  left: product of 0: " in told
        assert "its x is torch.complex64" in told
    assert "<h3>graph " in tandem.explain(own, "html")
    assert tandem.explain(own, "json") == "[]"
    with pytest.raises(ValueError, match="explain: expected a model with pipelines for format 'svg', got OptimizedModule, of which nothing became one. Ask for text, which says why"):
        tandem.explain(own, "svg")


def test_a_pipeline_without_parameters_is_explained(x):
    own = compiled(Calls(lambda m, x: F.relu(x + 1) * m.weight.sin(), weight=scale()))
    own(x)
    assert "0 of 0 products in 1 pipelines" in tandem.explain(own)


@pytest.mark.filterwarnings("error")
def test_products_that_a_recipe_does_not_reach_are_warned_of_once(x):
    """Each compiled model by itself; what `exclude` or a function leaves is no mistake."""
    def function(m, x):
        return F.linear(m.up(x), m.weight) + m.down(x).to(torch.complex64).real + (m.odd(x.to(torch.complex64)).real if x.shape[0] == 2 else 0)

    low = recipe.MXFP8BlockScaling()
    model = Calls(function, up=linear(), down=linear(), odd=nn.Linear(HIDDEN, HIDDEN, dtype=torch.complex64), weight=scale(HIDDEN, HIDDEN))
    text = "compile: expected to quantize all products by the recipe, got 1 of 4 that stay in high precision, the first of odd: its x is torch.complex64. See tandem.explain, and leave"
    for _ in range(2):
        own = compiled(model, recipe=low)
        with pytest.warns(UserWarning, match=text):
            own(x)
        own(torch.randn(2, 7, HIDDEN)), own(torch.randn(3, 7, HIDDEN))
    compiled(model, recipe=low, exclude="odd")(x)
    compiled(model, recipe=lambda name: None if name == "odd" else low)(x)
    compiled(model)(x)


def test_explain_of_modules_of_this_library_in_a_compiled_model(x):
    own = compiled(nn.Sequential(tandem.Linear(HIDDEN, HIDDEN)))
    own(x)
    assert "plan: " in tandem.explain(own)


def test_explain_where_no_graph_has_reached_the_backend(x):
    torch._dynamo.reset()
    own = tandem.compile(nn.LSTM(HIDDEN, HIDDEN))
    own(x)
    without = tandem.compile(Calls(lambda m, x: F.relu(x + 1)))
    without(x)
    with pytest.raises(ValueError, match="got OptimizedModule without. Compiled graphs are known by the parameters and buffers that they read, and it has none"):
        tandem.explain(without)
    with pytest.raises(ValueError, match="got OptimizedModule without. Call it once with an input. If it was called, either its graphs read other tensors than its parameters, as under FSDP1 and torch.func.functional_call, or Dynamo has handed no graph of it to the backend, and TORCH_LOGS=graph_breaks tells why"):
        tandem.explain(own)
    given = compiled(nn.Sequential(nn.Linear(HIDDEN, HIDDEN)))
    torch.func.functional_call(given, {name: each.detach() * 2 for name, each in given.named_parameters()}, x)
    with pytest.raises(ValueError, match="either its graphs read other tensors than its parameters"):
        tandem.explain(given)


SKIPPED = "Dynamo skips the forward of torch.nn's own classes where model.compile compiles them in place. Call what tandem.compile(model) returns."


def test_explain_of_classes_of_torch_that_are_compiled_in_place(x):
    torch._dynamo.reset()
    skipped, partly = nn.Sequential(linear(), nn.ReLU()), nn.Sequential(Decoder(1), nn.Linear(32, 4))
    for model in (skipped, partly):
        model.compile(backend="tandem")
        model(x)
    if torch.__version__ >= "2.14":  # Dynamo compiles them as other classes
        assert SKIPPED not in tandem.explain(skipped) + tandem.explain(partly) and "9 of 9 products" in tandem.explain(partly)
        return
    with pytest.raises(ValueError, match="explain: expected a module with pipelines that have been called, got Sequential without. No graph of it has reached the backend") as error:
        tandem.explain(skipped)
    assert str(error.value).endswith(f": {SKIPPED}")
    told = tandem.explain(partly)
    assert "8 of 8 products" in told
    assert told.endswith(f"\nleft: what Sequential calls itself: {SKIPPED}")
    assert "1 of 1 products" in (tandem.compile(skipped)(x), tandem.explain(skipped))[1]


UNMATCHED = "compile: expected names of modules in exclude, got {!r}, which matches none. {}"


def test_names_in_exclude_that_are_of_no_module(x):
    """`tandem.compile` warns of them, and `tandem.explain` tells, which knows the model that another way has compiled."""
    wrong = {"haed": "Did you mean head?", "encoder.*": "Leave it out.", "zzz": "Leave it out."}
    texts = [UNMATCHED.format(name, remedy) for name, remedy in wrong.items()]
    exclude = (*wrong, "head", "layers", "layers.0.*", "*.mlp")
    own = compiled(Decoder(), exclude=exclude)
    own(x)
    assert tandem.explain(own).splitlines()[-3:] == texts
    with pytest.warns(UserWarning) as warned:
        tandem.compile(Decoder(), exclude=exclude)
    assert [str(each.message) for each in warned] == texts
    own = compiled(nn.Sequential(Decoder()), exclude=("0.head",))
    own(x)
    assert "matches none" not in tandem.explain(own)


def test_products_by_weights_that_are_results_count(x):
    """Of normalized and cast weights and of adapters, whose own product is a part of a weight."""
    adapted = Calls(lambda m, x: F.linear(F.silu(m.up(x)), m.weight + m.a @ m.b), up=linear(), weight=scale(HIDDEN, HIDDEN), a=scale(HIDDEN, 2), b=scale(2, HIDDEN))
    cast = Calls(lambda m, x: m.up(F.linear(x, m.weight.float())), up=linear(), weight=scale(HIDDEN, HIDDEN).bfloat16())
    weight_norm = nn.utils.parametrizations.weight_norm
    for model, name in ((nn.Sequential(weight_norm(linear()), nn.ReLU(), weight_norm(linear(8))), "0"), (adapted, "up"), (cast, "up")):
        own = compiled(model, require=1.0)
        check_equal(model, own, x)
        assert "2 of 2 products" in tandem.explain(own)
        with pytest.raises(Exception, match="expected at least 1 of the products in pipelines, got 1 of 2"):
            compiled(model, require=1.0, exclude=name)(x)


def test_products_of_activations_do_not_count(x):
    model = Calls(lambda m, x: (lambda q, k: (q @ k.t()).softmax(-1) @ q)(m.q(x[0]), m.k(x[1])), q=linear(), k=linear())
    own = compiled(model)
    check_equal(model, own, x)
    assert "2 of 2 products" in tandem.explain(own)


def test_options_are_typed_as_they_are_declared():
    assert [*GivenOptions.__annotations__] == [field.name for field in dataclasses.fields(Options)]


def test_what_is_exported_is_the_model(x):
    """In torch's operations, for any number of rows."""
    model = Decoder(1)
    expected = model(x)
    torch._dynamo.reset()
    model.compile(backend="tandem")
    model(x)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    assert "tandem" not in str(program.graph)
    assert torch.equal(program.module()(x), expected)
