"""`tandem.explain` and `tandem.verify` of ops, modules and whole models."""

import json

import pytest
import torch

import tandem
from tandem import ops

SPLITS = torch.tensor([2, 2])
MODULES = {
    "Linear": lambda: (tandem.Linear(8, 8), torch.randn(4, 8)),
    "return_bias": lambda: (tandem.Linear(8, 8, return_bias=True), torch.randn(4, 8)),
    "LayerNormLinear": lambda: (tandem.LayerNormLinear(8, 8), torch.randn(4, 8)),
    "LayerNormMLP": lambda: (tandem.LayerNormMLP(8, 16), torch.randn(4, 8)),
    "GroupedLinear": lambda: (tandem.GroupedLinear(2, 8, 8), torch.randn(4, 8), SPLITS),
    "LayerNorm": lambda: (tandem.LayerNorm(8), torch.randn(4, 8)),
    "ops.Linear": lambda: (ops.Linear(8, 8), torch.randn(4, 8)),
    "MultiheadAttention": lambda: (tandem.MultiheadAttention(8, 2, attention_dropout=0, input_layernorm=True), torch.randn(4, 2, 8)),
    "TransformerLayer": lambda: (tandem.TransformerLayer(8, 16, 2, hidden_dropout=0, attention_dropout=0), torch.randn(4, 2, 8)),
}


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_every_module_is_explained_and_verified(make):
    module, x, *extra = make()
    module(x, *extra)
    assert "plan: training, with gradients" in tandem.explain(module)
    for format in ("svg", "html", "dot"):
        assert tandem.explain(module, format)
    plans = json.loads(tandem.explain(module, "json"))
    assert all(entry["plans"] for entry in (plans if isinstance(plans, list) else [plans]))
    outcome = tandem.verify(module, x, *extra, masks=2)
    assert outcome and outcome.comparisons > 0, outcome.text


def test_pipelines_of_a_model_are_told_under_their_names():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = tandem.TransformerLayer(8, 16, 2)
            self.mixed = ops.Sequential(ops.GELU(), torch.nn.Sequential(tandem.Linear(8, 8)), ops.Linear(8, 8))
            self.never_called = tandem.Linear(8, 8)

        def forward(self, x):
            return self.mixed(self.layer(x))

    model = Model()
    model(torch.randn(4, 2, 8))
    lines = tandem.explain(model).splitlines()
    headings = [line for line in lines if line.endswith(":") and "." in line or line == "mixed:"]
    assert headings[0] == "layer.self_attention.layernorm_qkv:" and "layer.behind the attention:" in headings and "mixed.1.0:" in headings
    assert "never_called:" not in lines and lines.count("mixed:") == 2
    assert "<h4>layer.behind the attention</h4>" in tandem.explain(model, "html")


def test_which_weights_were_quantized_is_told_of_a_module():
    module = tandem.Linear(16, 16)
    with tandem.autocast():
        module(torch.randn(4, 16))
    assert "recipe Float8CurrentScaling" in tandem.explain(module) or "first use" in tandem.explain(module)


def test_a_layer_whose_attention_is_called_as_a_module_is_verified():
    layer, x = tandem.TransformerLayer(8, 16, 2, hidden_dropout=0, attention_dropout=0), torch.randn(4, 2, 8)
    layer.self_attention.register_forward_hook(lambda module, arguments, y: None)
    layer(x)
    assert tandem.verify(layer, x, masks=2)


def test_errors():
    with pytest.raises(ValueError, match="explain: expected a module with pipelines that have been called, got Linear without. Call it once with an input."):
        tandem.explain(tandem.Linear(8, 8))
    with pytest.raises(ValueError, match='explain: expected format "text", "svg", "html", "dot" or "json", got "png". Name one of them.'):
        tandem.explain(tandem.Linear(8, 8), "png")
    with pytest.raises(TypeError, match="verify: expected a container, an op or a module of this library, got ReLU. Put the ops into a Sequential."):
        tandem.verify(torch.nn.ReLU(), torch.randn(2))
    for function in (tandem.explain, tandem.verify):
        with pytest.raises(TypeError, match=f"{function.__name__}: expected a container, an op or a module, got str. Pass what is called."):
            function("layer", torch.randn(2))
