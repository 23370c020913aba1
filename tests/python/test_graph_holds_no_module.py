"""No autograd node refers to a module: modules die while graphs of theirs live, and these still give gradients."""

import gc
import weakref

import pytest
import torch
from python_ops import SplitScale, WholeSin
from support import llama_mlp, residual

import tandem
import tandem.ops as ops
from tandem.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling

pytestmark = pytest.mark.usefixtures("collections_pass_over_older_objects")
MODULES = {
    "Linear op": lambda: ops.Linear(32, 32),
    "RMSNorm op": lambda: ops.RMSNorm(32),
    "LayerNorm op": lambda: ops.LayerNorm(32),
    "GELU": ops.GELU,
    "SwiGLU": ops.SwiGLU,
    "Dropout": lambda: ops.Dropout(0.5),
    "Sequential": lambda: llama_mlp(32, 64),
    "Sequential with a plain module": lambda: ops.Sequential(ops.Linear(32, 32), torch.nn.Tanh(), ops.Linear(32, 32)),
    "Python ops": lambda: ops.Sequential(ops.Linear(32, 16), SplitScale(), WholeSin()),
    "residual": lambda: residual(ops.Linear(32, 32)),
    "Linear": lambda: tandem.Linear(32, 32),
    "Linear of parts": lambda: tandem.Linear(32, 96, parameters_split=("q", "k", "v")),
    "LayerNormLinear": lambda: tandem.LayerNormLinear(32, 32),
    "LayerNormMLP": lambda: tandem.LayerNormMLP(32, 64),
    "LayerNorm": lambda: tandem.LayerNorm(32),
    "RMSNorm": lambda: tandem.RMSNorm(32),
    "GroupedLinear": lambda: tandem.GroupedLinear(2, 32, 32),
    "MultiheadAttention": lambda: tandem.MultiheadAttention(32, 4),
    "TransformerLayer": lambda: tandem.TransformerLayer(32, 64, 4),
}
RECIPES = {"plain": None, "current": Float8CurrentScaling(), "mx": MXFP8BlockScaling(), "delayed": DelayedScaling(amax_history_len=4)}


def nodes(tensor):
    """The autograd nodes behind a tensor."""
    found, ahead = {}, [tensor.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in found:
            found[node] = None
            ahead += [following for following, _ in node.next_functions]
    return list(found)


def modules_behind(node):
    """Modules that a node's Python object leads to, without going through other nodes, types and code."""
    found, seen, ahead = [], set(), [node]
    while ahead:
        item = ahead.pop()
        if id(item) in seen or isinstance(item, (type, type(gc), type(nodes))):
            continue
        seen.add(id(item))
        if isinstance(item, torch.nn.Module):
            found.append(item)
            continue
        ahead += [
            other for other in gc.get_referents(item) if item is node or not isinstance(other, torch.autograd.graph.Node)
        ]
    return found


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_modules_die_before_their_graphs(name, recipe):
    if name == "GroupedLinear" and recipe in ("current", "delayed"):
        pytest.skip("groups have no such scales")
    module = MODULES[name]()
    held = [weakref.ref(each) for each in module.modules()]
    shape = (32, 2, 32) if name in ("MultiheadAttention", "TransformerLayer") else (32, 32)
    x = torch.randn(shape, requires_grad=True)
    params = list(module.parameters())
    arguments = ([16, 16],) if name == "GroupedLinear" else ()
    with tandem.autocast(recipe=RECIPES[recipe]) if recipe != "plain" else tandem.autocast(enabled=False):
        y = module(x, *arguments)
    y = y[0] if isinstance(y, tuple) else y
    del module
    gc.collect()
    assert [each() for each in held if each() is not None and each() not in params] == []
    for node in nodes(y):
        saved = [getattr(node, attribute) for attribute in dir(node) if attribute.startswith("_saved_") or attribute == "saved_tensors"]
        assert modules_behind(node) == [] and not any(isinstance(each, torch.nn.Module) for each in saved), node
    y.sum().backward()
    assert x.grad.isfinite().all() and all(param.grad is not None for param in params)
