"""The backend of torch.compile: numbers of a model that Dynamo takes for symbols."""

import copy

import pytest
import torch
import torch.nn.functional as F
from test_backend import HIDDEN, Calls, check_equal, linear, ops_of, rms, scale

import tandem


def test_numbers_that_are_symbols():
    """Dynamo takes an eps for a symbol where shapes are dynamic."""
    model = Calls(lambda m, x: F.layer_norm(F.dropout(x, m.p), (HIDDEN,), m.weight, None, m.eps), weight=scale(), p=0.0, eps=1e-3)
    own = tandem.compile(copy.deepcopy(model), dynamic=True)
    for eps in (1e-3, 0.5):
        model.eps = own.eps = eps
        check_equal(model, own, torch.randn(3, HIDDEN))


@pytest.mark.parametrize("rest", ["eager", "inductor"])
def test_a_written_out_eps_that_is_a_symbol(rest):
    """It is the number that it is; what else is a symbol stays one, in pieces that Inductor leaves."""
    model = Calls(lambda m, x: m.up(m.weight * rms(x, m.eps)).cos() * m.factor + 1, weight=scale(), up=linear(), eps=1e-3, factor=0.5)
    own = tandem.compile(copy.deepcopy(model), dynamic=True, rest=rest, fullgraph=True)
    for eps, factor in ((1e-3, 0.5), (0.5, 0.5), (0.5, 0.25)):
        model.eps, own.eps, model.factor, own.factor = eps, eps, factor, factor
        check_equal(model, own, torch.randn(3, HIDDEN))
    assert ops_of(own)[0] == ["RMSNorm", "Linear"]
