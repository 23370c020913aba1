"""Compiled models under torch.autocast: each result has the dtype that it has in the model."""

import pytest
import torch
import torch.nn.functional as F
from test_backend import HIDDEN, compiled
from torch import nn
from torch.testing import assert_close

import tandem
from tandem import ops


@pytest.fixture
def x():
    return torch.randn(2, 5, HIDDEN)


class Wide(nn.Module):
    """Reads the result of a norm or an activation by a product and by others: `between` is computed ahead of the product, and `behind` of the sum."""

    def __init__(self, function, between=lambda h: h, behind=lambda y: y):
        super().__init__()
        self.function, self.product, self.norm, self.between, self.behind = function, nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN), between, behind

    def forward(self, x):
        h = self.function(x)
        y = self.norm(h + self.product(self.between(h)))
        return self.behind(y), torch.tanh(h).exp() * 2 + 1


@pytest.mark.parametrize("rest", ["eager", "inductor"])
@pytest.mark.parametrize(
    ("function", "between"),
    [(nn.LayerNorm(HIDDEN), lambda h: h), (nn.RMSNorm(HIDDEN), lambda h: h * (1 + h.mean(1, keepdim=True))), (nn.SiLU(), F.gelu)],
    ids=["a norm", "a modulated norm", "activations"],
)
def test_autocast_rounds_for_products_alone(x, function, between, rest):
    model = Wide(function, between)
    own = compiled(model, rest=rest)
    exact = [each.double() for each in model(x)]
    with torch.autocast("cpu", torch.bfloat16):
        for leaf in (x, x.detach().requires_grad_()):
            results, expected = own(leaf), model(leaf)
            assert [each.dtype for each in results] == [each.dtype for each in expected] == [torch.float32] * 2
            assert_close(results[1], expected[1], rtol=1e-6, atol=1e-6)
            error, of_eager = ((each[0] - exact[0]).square().mean() for each in (results, expected))
            assert error <= 1.5 * of_eager
    (gradient,), (wanted,) = (torch.autograd.grad(sum(each.sum() for each in made), leaf, retain_graph=True) for made in (results, expected))
    assert_close(gradient, wanted, rtol=2e-2, atol=2e-2)


def test_results_of_another_dtype_are_an_error(x, monkeypatch):
    monkeypatch.setattr("tandem.backend.place.FOLLOW_AUTOCAST", (ops.Linear, ops.LayerNorm))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match=r"tandem: expected results of dtypes \[.*\], as in the graph, got \[.*\]. Exclude their modules, and report it."):
        compiled(Wide(nn.LayerNorm(HIDDEN)))(x)


def test_regions_end_behind_an_error(x):
    """Code of Dynamo alone leaves torch's count of regions as it is, and with it a cache of cast weights that no step of an optimizer reaches."""

    def read(x, row):
        with torch.autocast("cpu", torch.float16, cache_enabled=False):
            return product(x)[:, row]

    product, own = nn.Linear(HIDDEN, HIDDEN), tandem.compile(read)
    own(x, torch.tensor([4]))
    with pytest.raises(IndexError):
        own(x, torch.tensor([5]))
    assert torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()
    assert torch.get_autocast_dtype("cpu") == torch.bfloat16 and torch.is_autocast_cache_enabled()
