"""When gradients of the modules' weights are computed, where they go, and what is kept for them: `backward_dw`, `main_grad`, `checkpoint`."""

from __future__ import annotations

import copy
import pickle

import pytest
import recipes
import torch
from support import assert_equal, results_of
from torch.testing import assert_close
from torch.utils._python_dispatch import BaseTorchDispatchMode

import tandem
from tandem import ops
from tandem.pipelines.buffers import Delayed

RECIPES = {"none": None, **recipes.RECIPES, "nvfp4": tandem.recipe.NVFP4BlockScaling()}
MODULES = {
    "Linear": lambda **options: tandem.Linear(32, 48, **options),
    "Linear without bias": lambda **options: tandem.Linear(32, 48, bias=False, **options),
    "LayerNormLinear": lambda **options: tandem.LayerNormLinear(32, 48, **options),
    "LayerNormMLP": lambda **options: tandem.LayerNormMLP(32, 64, activation="swiglu", normalization="RMSNorm", **options),
}


@pytest.fixture(params=MODULES)
def make(request):
    def made(**options):
        torch.manual_seed(3)
        return MODULES[request.param](**options)

    return made


@pytest.fixture(params=RECIPES)
def recipe(request):
    return RECIPES[request.param]


def run(module, x, recipe=None):
    torch.manual_seed(11)  # of stochastic rounding
    with tandem.autocast(enabled=recipe is not None, recipe=recipe):
        return module(x)


def weights(module):
    return {name: param for name, param in module.named_parameters() if name.endswith("weight") and "layer_norm" not in name}


def test_gradients_of_weights_wait_for_backward_dw(make, recipe, monkeypatch):
    monkeypatch.setattr(Delayed, "graphs", set())  # as if no code had been compiled, which may have computed gradients
    later, now = make(delay_wgrad_compute=True), make()
    assert later.need_backward_dw() and not now.need_backward_dw() and later.delay_wgrad_compute
    fired = []
    later.register_wgrad_accumulation_and_reduce_hooks(lambda: fired.append(True))
    for _ in range(2):
        x = torch.randn(2, 16, 32)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        for module, each in zip((later, now), inputs, strict=True):
            y = run(module, each, recipe)
            y.backward(torch.ones_like(y).cumsum(-1) / 48)
        assert torch.equal(inputs[0].grad, inputs[1].grad)
    assert all(weight.grad is None and weight.skip_backward_post_hook for weight in weights(later).values())
    others = [name for name, _ in later.named_parameters() if name not in weights(later)]
    assert all(torch.equal(later.get_parameter(name).grad, now.get_parameter(name).grad) for name in others)
    later.backward_dw()
    later.backward_dw()
    now.backward_dw()
    assert len(fired) == 2
    for name, weight in weights(now).items():
        assert torch.equal(later.get_parameter(name).grad, weight.grad), name
    with pytest.raises(RuntimeError, match="backward_dw: expected a backward before it whose gradients of weights are delayed, got none"):
        later.backward_dw()


def test_delayed_gradients_go_into_main_grad(make, recipe):
    if isinstance(recipe, tandem.recipe.NVFP4BlockScaling):
        pytest.skip("as the others, but for what is drawn")
    later, now = make(delay_wgrad_compute=True, fuse_wgrad_accumulation=True), make(fuse_wgrad_accumulation=True)
    assert later.fuse_wgrad_accumulation and now.fuse_wgrad_accumulation
    for module in (later, now):
        for weight in weights(module).values():
            weight.main_grad, weight.grad_added_to_main_grad = torch.ones_like(weight, dtype=torch.float32), False
        y = run(module, torch.randn(16, 32, generator=torch.Generator().manual_seed(5)), recipe)
        y.backward(torch.ones_like(y).cumsum(-1) / 48)
    assert all(torch.equal(weight.main_grad, torch.ones_like(weight)) and not weight.grad_added_to_main_grad for weight in weights(later).values())
    later.backward_dw()
    for name, weight in weights(now).items():
        assert weight.grad_added_to_main_grad and later.get_parameter(name).grad_added_to_main_grad
        assert_close(later.get_parameter(name).main_grad, weight.main_grad, rtol=1e-6, atol=1e-6)
    for weight in weights(later).values():
        weight.overwrite_main_grad = True
    y = run(later, torch.randn(16, 32), recipe)
    y.backward(torch.zeros_like(y))
    later.backward_dw()
    assert not any(weight.main_grad.any() for weight in weights(later).values())


def test_delayed_gradients_of_parts_and_of_frozen_weights():
    later = tandem.Linear(32, 48, parameters_split=("query", "key", "value"), delay_wgrad_compute=True)
    now = copy.deepcopy(later)
    now.delay_wgrad_compute = False
    x = torch.randn(8, 32)
    for module in (later, now):
        module.key_weight.requires_grad_(False)
        module(x).square().sum().backward()
    assert later.query_weight.grad is None
    later.backward_dw()
    for name in ("query_weight", "value_weight", "query_bias"):
        assert torch.equal(later.get_parameter(name).grad, now.get_parameter(name).grad), name
    assert later.key_weight.grad is None
    later.requires_grad_(False)
    later(x.requires_grad_()).sum().backward()
    later.backward_dw()  # nothing is left


def test_what_delayed_gradients_are_computed_from_stays():
    module = tandem.Linear(8, 8, delay_wgrad_compute=True)
    x = torch.randn(4, 8)
    module(x).sum().backward()
    x.zero_()
    with pytest.raises(RuntimeError, match="backward_dw: expected x unchanged since backward, as gradients of weights are computed from it, got an in-"):
        module.backward_dw()
    module(x).sum().backward()
    assert not pickle.loads(pickle.dumps(module)).basic_ops[0].wgrad_store.context
    again = tandem.Linear(8, 8, delay_wgrad_compute=True, fuse_wgrad_accumulation=True)
    again.weight.main_grad = torch.zeros(8, 8)
    again(x).sum().backward()
    again.weight.main_grad = torch.zeros(8, 4)
    with pytest.raises(ValueError, match=r"backward_dw: expected main_grad of the weight's shape \[8, 8\] without a gradient of its own, got \[8, 4\]"):
        again.backward_dw()


def test_delayed_gradients_are_computed_at_once_where_nobody_could_ask_for_them():
    x = torch.randn(4, 8)
    normed = torch.nn.utils.parametrizations.weight_norm(tandem.Linear(8, 8, delay_wgrad_compute=True), "weight")
    normed(x).sum().backward()
    assert normed.parametrizations.weight.original1.grad.any()
    module = tandem.Linear(8, 8, delay_wgrad_compute=True)
    torch.compile(module, backend="aot_eager", fullgraph=True)(x).sum().backward()
    torch.testing.assert_close(module.weight.grad, x.sum(0).expand(8, 8))
    module.backward_dw()
    torch.testing.assert_close(module.weight.grad, x.sum(0).expand(8, 8))
    y = module(x)
    with pytest.raises(NotImplementedError, match="basic_linear: expected delay_wgrad_compute=False where the call is traced, got True"):
        with BaseTorchDispatchMode():
            y.backward(torch.ones(4, 8))


def test_a_layer_of_a_pipeline_may_delay():
    layer = tandem.Linear(8, 8, delay_wgrad_compute=True)
    box = ops.Sequential(ops.RMSNorm(8), layer, ops.GELU(), tandem.Linear(8, 4))
    box(torch.randn(4, 8)).sum().backward()
    assert layer.weight.grad is None and box[3].weight.grad is not None
    layer.backward_dw()
    assert layer.weight.grad.any()


@pytest.mark.parametrize("activation", ["gelu", "swiglu", "srelu"])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_checkpoint_gives_the_same_bits_and_keeps_less(recipe, activation, normalization):
    options = {"activation": activation, "normalization": normalization}
    plain = tandem.LayerNormMLP(32, 128, **options)
    checked = tandem.LayerNormMLP(32, 128, checkpoint=True, **options)
    checked.load_state_dict(plain.state_dict())
    assert checked.checkpoint and not plain.checkpoint
    x = torch.randn(64, 32)
    assert_equal(*[results_of(module, x, recipe=recipe, seed=11) for module in (plain, checked)])
    kept = [module._alone.called_pipelines()[0].saved_bytes() for module in (plain, checked)]
    bound = 0.1 if recipe is None else 0.6  # codes of weights, where they are not cached, are no activations
    assert kept[1] <= bound * kept[0], kept
    if recipe is None:
        assert kept[1] == 0


def test_checkpoint_is_told_of_and_switched():
    module = tandem.LayerNormMLP(32, 128, checkpoint=True)
    box = ops.Sequential(module)
    x = torch.randn(64, 32, requires_grad=True)
    box(x).sum().backward()
    text = box.explain()
    assert "computed again: 0 bytes per row kept" in text and "run again" in text
    module.checkpoint = False
    box(x).sum().backward()
    assert box.saved_bytes() > 0
    assert pickle.loads(pickle.dumps(tandem.LayerNormMLP(8, 8, checkpoint=True))).checkpoint


def test_checkpoint_in_a_pipeline_leaves_the_others_alone():
    torch.manual_seed(0)
    mlp = tandem.LayerNormMLP(32, 128)
    box = ops.Sequential(ops.Linear(32, 32), ops.GELU(), mlp, ops.Linear(32, 8))
    x = torch.randn(64, 32, requires_grad=True)
    expected = torch.autograd.grad(box(x).sum(), [x, *box.parameters()])
    whole = box.saved_bytes()
    mlp.checkpoint = True
    got = torch.autograd.grad(box(x).sum(), [x, *box.parameters()])
    assert all(map(torch.equal, got, expected)) and 0 < box.saved_bytes() < 0.5 * whole
    compiled = torch.compile(box, backend="aot_eager", fullgraph=True)
    assert_close(torch.autograd.grad(compiled(x).sum(), [x, *box.parameters()]), expected)
    with tandem.memory_budget(0):  # both at once
        got = torch.autograd.grad(box(x).sum(), [x, *box.parameters()])
    assert all(map(torch.equal, got, expected)) and box.saved_bytes() == 0
