"""`TransformerLayer` computes with the parts and attributes that it has at the call, and calls those as modules that are more than ops."""

import copy
import pickle

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing, checkpoint_wrapper
from torch.testing import assert_close

import tandem

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

PLAIN = {"hidden_dropout": 0, "attention_dropout": 0}


@pytest.fixture
def layer():
    torch.manual_seed(5)
    return tandem.TransformerLayer(32, 64, 4, **PLAIN)


@pytest.fixture
def x():
    torch.manual_seed(6)
    return torch.randn(4, 2, 32)


def composed(layer, x):
    """The layer's formula out of its children, each called by itself."""
    h = x + layer.self_attention(x)
    y = h + layer.layernorm_mlp(h)
    return layer.layernorm(y) if hasattr(layer, "layernorm") else y


class Wrapper(torch.nn.Module):
    """What LoRA and quantizing libraries put in the place of a part."""

    def __init__(self, wrapped, factor=1.0):
        super().__init__()
        self.wrapped, self.factor, self.calls = wrapped, factor, 0

    def forward(self, *arguments, **options):
        self.calls += 1
        return self.wrapped(*arguments, **options) * self.factor


CHANGES = {
    "another MLP": lambda layer: setattr(layer, "layernorm_mlp", tandem.LayerNormMLP(32, 48, activation="swiglu")),
    "another product": lambda layer: setattr(layer.self_attention, "proj", tandem.Linear(32, 32)),
    "another attention": lambda layer: setattr(layer, "self_attention", tandem.MultiheadAttention(32, 4, attention_dropout=0, input_layernorm=True)),
    "another norm": lambda layer: setattr(layer, "layernorm", tandem.RMSNorm(32)),
    "an MLP that is wrapped": lambda layer: setattr(layer, "layernorm_mlp", Wrapper(layer.layernorm_mlp, 0.5)),
    "a product that is wrapped": lambda layer: setattr(layer.self_attention, "proj", Wrapper(layer.self_attention.proj, 0.5)),
    "an attention that is wrapped": lambda layer: setattr(layer, "self_attention", Wrapper(layer.self_attention, 0.5)),
    "an MLP of torch": lambda layer: setattr(layer, "layernorm_mlp", torch.nn.Sequential(torch.nn.LayerNorm(32), torch.nn.Linear(32, 32))),
    "an attribute": lambda layer: setattr(layer, "hidden_dropout", 1.0),
}


@pytest.mark.parametrize("called_before", [False, True], ids=["fresh", "called"])
@pytest.mark.parametrize("change", [name for name in CHANGES if name != "an attribute"])
def test_a_replaced_part_is_what_computes(x, change, called_before):
    torch.manual_seed(5)
    layer = tandem.TransformerLayer(32, 64, 4, output_layernorm=change == "another norm", **PLAIN)
    before = layer(x) if called_before else None
    CHANGES[change](layer)
    y = layer(x)
    assert before is None or not torch.equal(y, before)
    assert_close(y, composed(layer, x), atol=1e-5, rtol=1e-5)
    y.sum().backward()
    assert all(param.grad is not None for param in layer.parameters())


def test_a_part_that_comes_back_computes_again(layer, x):
    before, old = layer(x), layer.layernorm_mlp
    CHANGES["another MLP"](layer)
    layer(x)
    layer.layernorm_mlp = old
    assert torch.equal(layer(x), before)


@pytest.mark.parametrize("kind", [tandem.LayerNormMLP, tandem.MultiheadAttention, tandem.Linear])
def test_torch_checkpoint_wrappers_run(layer, x, kind):
    expected = layer(x)
    calls = []

    def counted(function, *arguments, **options):
        calls.append(kind)
        return torch.utils.checkpoint.checkpoint(function, *arguments, use_reentrant=False, **options)

    apply_activation_checkpointing(
        layer, checkpoint_wrapper_fn=lambda part: checkpoint_wrapper(part, checkpoint_fn=counted), check_fn=lambda part: type(part) is kind
    )
    y = layer(x)
    assert calls == [kind]
    assert_close(y, expected)
    y.sum().backward()
    assert all(param.grad is not None for param in layer.parameters())


def test_hooks_of_the_attention_run(layer, x):
    expected, seen = layer(x), []
    handles = [
        layer.self_attention.register_forward_pre_hook(lambda module, arguments: seen.append("before")),
        layer.self_attention.register_forward_hook(lambda module, arguments, y: seen.append("behind") or y * 0),
    ]
    y = layer(x)
    assert seen == ["before", "behind"]
    assert_close(y, x + layer.layernorm_mlp(x))
    for handle in handles:
        handle.remove()
    assert torch.equal(layer(x), expected)


def test_hooks_of_all_modules_see_the_attention(layer, x):
    seen = []
    with torch.nn.modules.module.register_module_forward_hook(lambda module, arguments, y: seen.append(type(module).__name__)):
        layer(x)
    assert "MultiheadAttention" in seen and "LayerNormMLP" in seen


def test_a_forward_of_ones_own_runs(layer, x):
    own = layer.self_attention.forward
    layer.self_attention.forward = lambda *arguments, **options: own(*arguments, **options) * 0
    assert_close(layer(x), x + layer.layernorm_mlp(x))
    del layer.self_attention.forward

    class Mine(tandem.MultiheadAttention):
        def forward(self, *arguments, **options):
            return super().forward(*arguments, **options) * 0

    layer.self_attention = Mine(32, 4, attention_dropout=0)
    assert_close(layer(x), x + layer.layernorm_mlp(x))


def test_a_class_that_is_patched_counts(layer, x, monkeypatch):
    own = tandem.MultiheadAttention.forward
    monkeypatch.setattr(tandem.MultiheadAttention, "forward", lambda *arguments, **options: own(*arguments, **options) * 0)
    assert_close(layer(x), x + layer.layernorm_mlp(x))


def test_an_attention_that_was_compiled_runs_so(layer, x):
    expected, seen = layer(x), []

    def backend(graph, _):
        seen.append(graph)
        return graph.forward

    layer.self_attention.compile(backend=backend)
    assert_close(layer(x), expected)
    assert seen


def test_dropout_follows_the_attribute(x):
    layer = tandem.TransformerLayer(32, 64, 4, hidden_dropout=0.5, attention_dropout=0)
    assert not torch.equal(layer(x), layer(x))
    layer.hidden_dropout = 0.0
    assert torch.equal(layer(x), layer(x))
    layer.hidden_dropout = 0.25
    assert not torch.equal(layer(x), layer(x))
    layer.training = False
    assert torch.equal(layer(x), layer(x))
    layer.train()
    assert not torch.equal(layer(x), layer(x))


def test_training_of_parts_is_left_alone(layer, x):
    layer.layernorm_mlp.eval()
    CHANGES["another product"](layer)
    layer(x)
    assert not layer.layernorm_mlp.training and layer.training


def test_fully_shard_of_each_part(layer, x, one_rank):
    from torch.distributed.fsdp import fully_shard

    expected = layer(x)
    for part in (layer.self_attention, layer.layernorm_mlp, layer):
        fully_shard(part)
    y = layer(x)
    assert_close(y, expected)
    y.sum().backward()
    assert all(param.grad is not None for param in layer.parameters())


@pytest.mark.parametrize("change", ["another MLP", "a product that is wrapped", "an attention that is wrapped", "an attribute"])
def test_compiled_code_notices(layer, x, change):
    compiled = torch.compile(layer, backend="aot_eager")
    assert_close(compiled(x), layer(x))
    CHANGES[change](layer)
    assert_close(compiled(x), layer(x))


def test_copies_have_parts_of_their_own(layer, x):
    layer(x)
    CHANGES["another MLP"](layer)
    expected = layer(x)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(copied(x), expected)
        with torch.no_grad():
            copied.self_attention.proj.weight.zero_()
        assert not torch.equal(copied(x), expected) and torch.equal(layer(x), expected)
        copied.layernorm_mlp = torch.nn.Identity()
        assert not torch.equal(copied(x), expected)
    assert torch.equal(layer(x), expected)


def test_an_attention_of_several_results_is_refused(layer, x):
    layer.self_attention = Several(layer.self_attention)
    with pytest.raises(TypeError, match="TransformerLayer: expected self_attention to return y alone, got tuple. Build it with return_bias=False"):
        layer(x)


class Several(Wrapper):
    def forward(self, *arguments, **options):
        return self.wrapped(*arguments, **options), None
